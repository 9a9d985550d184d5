package place

import (
	"cmp"
	"errors"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/scheduler-extender/fit"
	"github.com/carve-gpu/carve/scheduler-extender/ledger"
	"github.com/carve-gpu/carve/scheduler-extender/score"
)

const (
	// maxReturned bounds the nodes that a cooperative filter returns: enough
	// for the scheduler's own preferences, few enough to score fast.
	maxReturned = 128
	// maxListed bounds the refused nodes that are named one by one. More
	// are summed up by reason under summaryNode.
	maxListed = 8
	// summaryNode is the made-up node under which one reason for all nodes is
	// returned. kube-scheduler ignores names that it doesn't know and shows
	// the text in the pod's condition (seen with v1.37).
	summaryNode = "carve"
)

// Config says how places are chosen.
type Config struct {
	// Policy for pods that don't name one. Prices, where it goes by them, are made of what
	// pods ask, as they come.
	Policy score.Policy
	// PricesFrom is how many cards there must be for pods that name no policy to go by
	// prices. Where there are fewer, too few pods come to say what the next ones ask, and
	// score.Binpack is taken, which keeps as many cards whole as it can. Prices are learnt
	// meanwhile.
	PricesFrom int
	// Cooperative returns all nodes that fit and lets kube-scheduler choose,
	// for every pod. Otherwise only pods with soft preferences of their own
	// are handled so, and the others get exactly one node.
	Cooperative bool
}

// Placer decides. It is safe for concurrent use.
type Placer struct {
	ledger *ledger.Ledger
	config Config
	shapes shapes
	market market

	mu      sync.Mutex
	waiting map[string]*waiter // by pod UID
}

// New makes a placer over a ledger.
func New(l *ledger.Ledger, c Config) *Placer {
	return &Placer{ledger: l, config: c, waiting: map[string]*waiter{}}
}

// Pod is what a decision needs of a pod.
type Pod struct {
	ledger.Ref
	Request api.Request
	// Host is what the pod asks of its node beside cards; zero where that isn't known.
	Host fit.Host
	// Owner is the UID of the controller whose replica the pod is, or empty. Serves says
	// that replicas stand in for one another, so that they should not all go with one node.
	Owner  string
	Serves bool
	// Soft is true where the pod states preferences that kube-scheduler
	// weighs: preferred affinity, soft spread.
	Soft     bool
	Priority int32
	Created  time.Time
}

// Filtered is the answer to a filter call.
type Filtered struct {
	// All passes every node: the pod asks for nothing of ours.
	All bool
	// Nodes are those that pass.
	Nodes []string
	// Failed are refused as of now, Never for as long as they have the cards
	// that they have.
	Failed, Never map[string]string
	// Reason is that of the nearest miss, where no managed node passes.
	Reason fit.Reason
	// Err asks the scheduler to come again later.
	Err error
}

// Filter decides where the pod goes among the named nodes and books an offer
// for it. Nodes that carve doesn't manage pass untouched if they offer cards of
// their own.
func (p *Placer) Filter(pod Pod, names [][]byte, now time.Time) Filtered {
	if pod.Request.Empty() {
		return Filtered{All: true}
	}
	if pod.UID == "" {
		return Filtered{Err: errors.New("the pod has no UID")}
	}
	ask, refusal := fit.NewAsk(pod.Request)
	if refusal != nil {
		return Refuse(refusal.Reason, refusal.Detail)
	}
	waits := ask.WithHost(pod.Host)
	c := call{Placer: p, pod: pod, ask: waits.Settle(), waits: waits, names: names, now: now, most: 1}
	if c.cooperative() {
		c.most = maxReturned
	}
	c.shape = p.shape(ask, c.ask)
	return c.filter()
}

// Plan says how a pod is placed before any scheduler has asked about it.
type Plan struct {
	// Spares is how many nodes are named behind the chosen one: those to which the pod may
	// be moved still when it is bound.
	Spares int
	// For is how long the room is kept for the pod.
	For time.Duration
	// Suits says of a node that gained room later whether the pod may be there.
	Suits func(node string) bool
}

// Plan decides like Filter, for a pod that nobody has asked about yet: its nodes are all that
// suit it, and what it asks of them beside cards decides, too. Filtered.Nodes are the chosen
// one and its spares. Where none has room the pod waits, as after Filter.
func (p *Placer) Plan(pod Pod, names [][]byte, plan Plan, now time.Time) Filtered {
	ask, refusal := fit.NewAsk(pod.Request)
	if refusal != nil {
		return Refuse(refusal.Reason, refusal.Detail)
	}
	// What the pod prefers is weighed by kube-scheduler, among the nodes that it gets.
	pod.Soft = false
	waits := ask.WithHost(pod.Host)
	c := call{Placer: p, pod: pod, ask: waits, waits: waits, names: names, now: now, most: 1 + plan.Spares, plan: &plan}
	c.shape = p.shape(waits, waits)
	return c.filter()
}

// filter answers by what the pod holds, or decides.
func (c *call) filter() Filtered {
	p, pod := c.Placer, c.pod
	c.nodes = p.ledger.Among(c.names)
	if out, done := c.held(); done {
		return out
	}
	// A node that gains room while we look at others would be missed by the
	// waker, since the pod isn't waiting yet: then look again.
	for seen := p.ledger.FreedCount(); ; {
		out := c.decide()
		if out.Err != nil || len(out.Nodes) > 0 {
			if c.offered && !p.Forget(pod.UID) {
				p.arrived(*c, true)
			}
			return out
		}
		if out.Reason != "" && len(out.Failed) > 0 && !p.wait(*c) {
			p.arrived(*c, false)
		}
		now := p.ledger.FreedCount()
		if now == seen {
			return out
		}
		seen = now
	}
}

// Refuse is the answer that tells one reason for all nodes, for requests that
// no node can serve.
func Refuse(reason fit.Reason, text string) Filtered {
	return Filtered{Never: map[string]string{summaryNode: clip(text)}, Reason: reason}
}

// shape is the kind of request that an ask is: by prices with what it wants beside cards,
// since that has a price, too, and otherwise without.
func (p *Placer) shape(plain, hosted *fit.Ask) *shape {
	policy := p.config.Policy
	if policy.Name == score.PriceName && p.ledger.Cards() < p.config.PricesFrom {
		policy = score.Binpack
	}
	if s, ok := score.ByName(plain.Policy); ok && plain.Policy != "" {
		policy = s
	}
	if policy.Name != score.PriceName {
		return p.shapes.of(plain, policy, nil)
	}
	return p.shapes.of(hosted, policy, &p.market)
}

// call is one filter call.
type call struct {
	*Placer
	pod   Pod
	ask   *fit.Ask // of nodes that kube-scheduler named
	waits *fit.Ask // of any, for a pod that is refused now
	shape *shape
	names [][]byte
	nodes *ledger.Among
	most  int   // nodes to be named
	plan  *Plan // nil where a scheduler asks
	now   time.Time

	prefer  fit.Prefer // as of the last scan
	offered bool
	over    *ledger.QuotaRefusal // why the last decision failed, if that is why
}

// held answers for a pod that holds something already: kube-scheduler filters
// twice in a cycle for a nominated pod, and again after a cycle that failed
// elsewhere.
func (c *call) held() (Filtered, bool) {
	h, ok := c.ledger.Held(c.pod.UID)
	if !ok {
		return Filtered{}, false
	}
	among := c.nodes.Has(h.Node)
	switch {
	case h.Binding:
		return Filtered{Err: ledger.ErrInFlight}, true
	case h.State == ledger.Bound && among:
		return Filtered{Nodes: []string{h.Node.Name}}, true
	case h.State == ledger.Bound:
		return Filtered{Err: errors.New("the pod is bound to " + h.Node.Name + ", which is not among the nodes asked for")}, true
	case h.State == ledger.Releasing:
		return Filtered{Err: errors.New("the pod has ended")}, true
	}
	if among && (c.plan != nil || !c.cooperative()) && (h.Key == c.ask.Key() || h.Key == c.waits.Key()) && h.Node.Snapshot().Managed &&
		h.Node.Snapshot().View.Blocked == "" && c.ledger.Renew(c.pod.UID, c.now) {
		c.Forget(c.pod.UID)
		return c.withOthers([]string{h.Node.Name}), true
	}
	c.ledger.Withdraw(c.pod.UID)
	return Filtered{}, false
}

func (c *call) cooperative() bool { return c.config.Cooperative || c.pod.Soft }

// place is a node that fits.
type place struct {
	at      int // among the nodes asked for
	node    *ledger.Node
	version uint64
	cost    int64
	place   fit.Placement
	// Between places of the same cost: how many of the pod's replicas are there, and its lot.
	replicas int
	lot      uint64
	serves   bool
}

// order is that in which places are taken: for pods that serve a node without a replica
// comes before one at less cost.
func (a *place) order(b *place, nodes *ledger.Among) int {
	switch {
	case a.serves && a.replicas != b.replicas:
		return cmp.Compare(a.replicas, b.replicas)
	case a.cost != b.cost:
		return cmp.Compare(a.cost, b.cost)
	case a.replicas != b.replicas:
		return cmp.Compare(a.replicas, b.replicas)
	case a.lot != b.lot:
		return cmp.Compare(a.lot, b.lot)
	}
	return strings.Compare(nodes.Node(a.at).Name, nodes.Node(b.at).Name)
}

// decide scans, chooses and books. It repeats only if the chosen node filled up
// meanwhile, so somebody else made progress.
func (c *call) decide() Filtered {
	c.over = nil
	for {
		fits := c.scan()
		if len(fits) == 0 {
			out := c.withOthers(nil)
			if len(out.Nodes) == 0 {
				c.explain(&out)
			}
			return out
		}
		best := fits[0]
		offer := ledger.Offer{Ref: c.pod.Ref, Node: best.node, Version: best.version, Ask: c.ask, Place: best.place, Prefer: c.prefer, Owner: c.pod.Owner}
		if c.plan != nil {
			offer.For = c.plan.For
		}
		names := make([]string, len(fits))
		for i, f := range fits {
			names[i] = f.node.Name
			if i > 0 {
				offer.Allowed = append(offer.Allowed, f.node)
			}
		}
		switch err := c.ledger.Offer(offer, c.now); {
		case err == nil:
			c.offered = true
			return c.withOthers(names)
		case errors.As(err, &c.over):
			return c.refuseQuota()
		case !errors.Is(err, ledger.ErrNoRoom):
			return Filtered{Err: err}
		}
	}
}

// refuseQuota answers where there is room and the namespace may not have it.
func (c *call) refuseQuota() Filtered {
	out := c.withOthers(nil)
	if len(out.Nodes) == 0 {
		out.Reason = c.over.Reason
		out.add(summaryNode, clip(c.over.Error()), false)
	}
	return out
}

// scan returns the nodes that fit, the best first, and no more than are wanted.
func (c *call) scan() []place {
	fits := make([]place, 0, min(c.most, 16))
	var replicas map[*ledger.Node]int
	if c.pod.Owner != "" && c.ask.Policy != score.Binpack.Name {
		replicas = c.ledger.Replicas(c.pod.Owner)
	}
	serves := c.pod.Serves && replicas != nil
	drawn := ledger.LotOf(c.pod.UID)
	c.shape.mu.Lock()
	defer c.shape.mu.Unlock()
	c.shape.begin(c.ledger)
	c.prefer = c.shape.policy.Card
	for i, id := range c.nodes.IDs {
		if id < 0 {
			continue
		}
		version, managed, _ := c.nodes.State(i)
		if !managed {
			continue
		}
		a := c.shape.known(id, version)
		if a == nil {
			n := c.nodes.Node(i)
			snap := n.Snapshot()
			if !snap.Managed {
				continue
			}
			a = c.shape.at(n, snap)
		}
		full := len(fits) == c.most
		if a.refusal != nil || full && a.cost > fits[len(fits)-1].cost && !serves {
			continue
		}
		f := place{at: i, cost: a.cost, serves: serves}
		if c.shape.market != nil {
			f.lot = lot(drawn, c.nodes.Lot(i))
		}
		if len(replicas) > 0 {
			f.replicas = replicas[c.nodes.Node(i)]
		}
		if full && f.order(&fits[len(fits)-1], c.nodes) >= 0 {
			continue
		}
		f.version, f.place = a.version, a.place
		if full {
			fits = fits[:len(fits)-1]
		}
		// Few are wanted as a rule, and most nodes are no better than those.
		to, _ := slices.BinarySearchFunc(fits, &f, func(a place, b *place) int { return a.order(b, c.nodes) })
		fits = slices.Insert(fits, to, f)
	}
	for i := range fits {
		fits[i].node = c.nodes.Node(fits[i].at)
	}
	return fits
}

// withOthers adds the nodes that carve doesn't manage and that offer cards of
// their own, for pods that ask for whole cards: a share would not be held there.
func (c *call) withOthers(names []string) Filtered {
	if c.plan != nil || !c.pod.Request.WholeOnly() {
		return Filtered{Nodes: names}
	}
	for i, id := range c.nodes.IDs {
		if id < 0 {
			continue
		}
		if _, _, others := c.nodes.State(i); others {
			names = append(names, c.nodes.Node(i).Name)
		}
	}
	return Filtered{Nodes: names}
}

// Prioritize scores the named nodes from 0 to 10. The node of the pod's offer
// is the best; nodes that carve doesn't manage get 0.
func (p *Placer) Prioritize(pod Pod, names [][]byte) []int64 {
	out := make([]int64, len(names))
	if pod.Request.Empty() {
		return out
	}
	ask, refusal := fit.NewAsk(pod.Request)
	if refusal != nil {
		return out
	}
	held, has := p.ledger.Held(pod.UID)
	sh := p.shape(ask, ask.WithHost(pod.Host).Settle())
	nodes := p.ledger.Among(names)
	var at []int
	var costs []int64
	sh.mu.Lock()
	sh.begin(p.ledger)
	for i := range names {
		n := nodes.Node(i)
		if n == nil {
			continue
		}
		if has && held.Node == n {
			out[i] = 10
			continue
		}
		snap := n.Snapshot()
		if !snap.Managed {
			continue
		}
		if a := sh.at(n, snap); a.refusal == nil {
			at, costs = append(at, i), append(costs, a.cost)
		}
	}
	sh.mu.Unlock()
	for i, s := range score.Wire(costs) {
		out[at[i]] = s
	}
	return out
}
