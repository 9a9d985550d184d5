package replay

import (
	"container/heap"
	"fmt"
	"math/rand"
	"reflect"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/scheduler-extender/fit"
	"github.com/carve-gpu/carve/scheduler-extender/packing/openb"
)

// How long a run with departures is, in mean lives of a pod: the cluster fills up first.
const (
	warmLives = 3
	lives     = 3
)

// Churned is what came of a run with departures, in percent.
type Churned struct {
	Used     float64 // of the cards, over time
	Rejected float64 // of what was asked of cards
}

// Churn has pods of the trace come at random moments and leave again, so that at load 1 as much
// is asked of cards on average as there is. Lives are exponential, not the trace's.
func Churn(trace *openb.Trace, policy Policy, load float64, seed int64, o Options) (Churned, error) {
	arrivals, err := NewArrivals(trace.Pods)
	if err != nil {
		return Churned{}, err
	}
	var asked int64
	for i := range arrivals {
		asked += arrivals[i].Milli
	}
	order := openb.Arrivals(trace, 0, seed)
	c := NewCluster(order.Nodes)
	perLife := load * float64(c.Capacity) / (float64(asked) / float64(len(arrivals)))
	d := newDecider(c, policy, o)
	r := rand.New(rand.NewSource(seed))
	var ends departures
	var now, used float64
	var came, refused int64
	advance := func(to float64) {
		used += float64(c.Held) * max(0, to-max(now, warmLives))
		now = to
	}
	for next := 0.0; next < warmLives+lives; next += r.ExpFloat64() / perLife {
		for len(ends) > 0 && ends[0].at <= next {
			advance(ends[0].at)
			d.leave(heap.Pop(&ends).(departure))
		}
		advance(next)
		a := &arrivals[r.Intn(len(arrivals))]
		life := r.ExpFloat64()
		node, p, ok := d.decide(a)
		if ok {
			heap.Push(&ends, departure{next + life, node, a, p})
		}
		if next >= warmLives {
			came += a.Milli
			if !ok {
				refused += a.Milli
			}
		}
	}
	advance(warmLives + lives)
	for len(ends) > 0 {
		d.leave(heap.Pop(&ends).(departure))
	}
	if empty := NewCluster(order.Nodes); c.Held != 0 || !reflect.DeepEqual(c.Nodes, empty.Nodes) {
		return Churned{}, fmt.Errorf("everybody left, and %d thousandths of cards are held", c.Held)
	}
	return Churned{100 * used / lives / float64(c.Capacity), 100 * float64(refused) / float64(max(1, came))}, nil
}

// leave takes a pod off its node.
func (d *decider) leave(e departure) {
	c := d.cluster
	n := *c.Nodes[e.node]
	n.Cards = append([]fit.Card(nil), n.Cards...)
	n.Host = n.Host.Plus(e.arrival.Ask.Host)
	for ci, cards := range e.place {
		for _, at := range cards {
			card := &n.Cards[at]
			amount := e.arrival.Ask.Containers[ci].On(card)
			card.Used = fit.Amount{MemMiB: card.Used.MemMiB - amount.MemMiB, Cores: card.Used.Cores - amount.Cores, Slots: card.Used.Slots - amount.Slots}
			card.Whole = false
			if card.Touched = card.Used.Slots > 0; !card.Touched {
				card.Mode = api.Mode("")
			}
		}
	}
	c.Nodes[e.node] = &n
	c.Held -= e.arrival.Milli
	d.index.Touch(e.node, state(&n))
}

type departure struct {
	at      float64
	node    int
	arrival *Arrival
	place   fit.Placement
}

// departures is a heap, the next one first.
type departures []departure

func (d departures) Len() int           { return len(d) }
func (d departures) Less(i, j int) bool { return d[i].at < d[j].at }
func (d departures) Swap(i, j int)      { d[i], d[j] = d[j], d[i] }
func (d *departures) Push(e any)        { *d = append(*d, e.(departure)) }
func (d *departures) Pop() any {
	last := (*d)[len(*d)-1]
	*d = (*d)[:len(*d)-1]
	return last
}
