package replay

import (
	"math/rand"
	"time"

	"github.com/carve-gpu/carve/scheduler-extender/fit"
	"github.com/carve-gpu/carve/scheduler-extender/packing/openb"
	"github.com/carve-gpu/carve/scheduler-extender/rank"
)

// Ratio is how much arrives, in parts of the capacity; early is up to where nothing should
// have been turned away. Both are the published experiment's.
const (
	Ratio = 1.30
	early = 0.92
)

// Policy is what is compared. It is made anew for each run.
type Policy interface {
	// Judge places the ask on the node, at a cost: the node with the lowest is taken.
	Judge(n *fit.Node, a *fit.Ask) (p fit.Placement, cost int64, ok bool)
	// Learn is told of every arrival after the decision. True says that costs are others
	// from now on.
	Learn(a *fit.Ask, placed bool) bool
}

// Ties says which of the nodes that cost the least is taken.
type Ties int

// What decides among equals.
const (
	FirstRank Ties = iota // the node of the lowest rank, as in the published experiment
	ByPod                 // a hash of the pod, as the extender does: the same each time
	Random                // chance, as a stock kube-scheduler does
)

// Options of a run.
type Options struct {
	Ties Ties
	// Seed is for random ties.
	Seed int64
	// Timed measures decisions.
	Timed bool
}

// Result is what came of a run. Parts are those of the capacity, in percent.
type Result struct {
	// At100 and Allocated are what was allocated when 100 % had arrived, and at the end.
	At90, At100, Allocated float64
	// FirstRejected is what had arrived when the first pod that asks for cards was turned
	// away; Early is what was turned away while at most 92 % had arrived.
	FirstRejected, Early float64
	// Arrived and Rejected count pods by kind.
	Arrived, Rejected [Kinds]int
	// RejectedPart is what those asked.
	RejectedPart [Kinds]float64
	// Decisions are how long each took, where Options.Timed.
	Decisions []time.Duration
	// Judged is how often a node was asked for its cost.
	Judged int64
}

// placed is a decision, kept for the check.
type placed struct {
	node int
	p    fit.Placement
}

// Run gives the arrivals of an order to the policy, one after another, and checks that what
// came out is possible and that nothing was turned away that fits.
func Run(order openb.Order, policy Policy, o Options) (Result, error) {
	arrivals, err := NewArrivals(order.Pods)
	if err != nil {
		return Result{}, err
	}
	c := NewCluster(order.Nodes)
	d := newDecider(c, policy, o)
	var res Result
	percent := 100 / float64(c.Capacity)
	decisions := make([]placed, len(arrivals))
	res.FirstRejected = Ratio * 100
	var arrived int64
	for i := range arrivals {
		a := &arrivals[i]
		arrived += a.Milli
		res.Arrived[a.Kind]++
		node, p, ok := d.decide(a)
		decisions[i] = placed{node, p}
		if !ok {
			res.Rejected[a.Kind]++
			res.RejectedPart[a.Kind] += float64(a.Milli) * percent
			if a.Milli > 0 {
				res.FirstRejected = min(res.FirstRejected, float64(arrived)*percent)
				if float64(arrived)*percent <= early*100 {
					res.Early += float64(a.Milli) * percent
				}
			}
		}
		is := float64(c.Held) * percent
		if float64(arrived) <= .9*float64(c.Capacity) {
			res.At90 = is
		}
		if arrived <= c.Capacity {
			res.At100 = is
		}
		res.Allocated = is
	}
	res.Decisions, res.Judged = d.took, d.index.Judged
	return res, check(order, c, arrivals, decisions)
}

// decider joins a policy with the index that remembers its costs.
type decider struct {
	cluster *Cluster
	policy  Policy
	options Options
	index   *rank.Index
	rand    *rand.Rand
	ties    []int
	pods    uint64
	took    []time.Duration
}

func newDecider(c *Cluster, p Policy, o Options) *decider {
	d := &decider{cluster: c, policy: p, options: o, index: rank.New(len(c.Nodes)), rand: rand.New(rand.NewSource(o.Seed))}
	for i, n := range c.Nodes {
		d.index.Touch(i, state(n))
	}
	return d
}

// decide places an arrival, or says that it doesn't fit.
func (d *decider) decide(a *Arrival) (int, fit.Placement, bool) {
	var start time.Time
	if d.options.Timed {
		start = time.Now()
	}
	node, p := d.choose(a)
	if d.options.Timed {
		d.took = append(d.took, time.Since(start))
	}
	if node >= 0 {
		d.cluster.place(node, a, p)
		d.index.Touch(node, state(d.cluster.Nodes[node]))
	}
	if d.policy.Learn(a.Ask, node >= 0) {
		d.index.Reset()
	}
	return node, p, node >= 0
}

func (d *decider) choose(a *Arrival) (int, fit.Placement) {
	cost := func(node int) int64 {
		if _, cost, ok := d.policy.Judge(d.cluster.Nodes[node], a.Ask); ok {
			return cost
		}
		return rank.None
	}
	node, key := -1, a.Ask.Key()
	switch d.options.Ties {
	case FirstRank:
		node, _ = d.index.Best(key, cost)
	case ByPod:
		d.pods++
		node, _ = d.index.Any(key, cost, scramble(d.pods))
	case Random:
		if d.ties = d.index.Ties(key, cost, d.ties[:0]); len(d.ties) > 0 {
			node = d.ties[d.rand.Intn(len(d.ties))]
		}
	}
	if node < 0 {
		return -1, nil
	}
	p, _, _ := d.policy.Judge(d.cluster.Nodes[node], a.Ask)
	return node, p
}

// scramble makes a hash of a pod's number: where pods have UIDs, it is of these.
func scramble(x uint64) uint64 {
	x *= 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
