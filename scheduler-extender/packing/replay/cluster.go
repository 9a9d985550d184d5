// Package replay runs the packing experiment: pods arrive one after another, a policy places
// each or turns it away for good, and what was allocated is counted. Pods and nodes go through
// the code that the extender decides with (fit), so what is measured is what is shipped.
//
// Start reading at Run.
package replay

import (
	"fmt"
	"strings"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/scheduler-extender/fit"
	"github.com/carve-gpu/carve/scheduler-extender/packing/openb"
)

// cardMiB is the memory of every card. The trace knows parts of cards only, of whole percents,
// which are whole MiB of this.
const cardMiB = 10000

// slots is more than the smallest share needs.
const slots = 100

// Kind sorts pods by what they ask of cards.
type Kind int

// The kinds of pods, by what they ask.
const (
	NoCard Kind = iota
	Share
	OneCard
	FewCards // two to seven
	EightCards
	Kinds = iota
)

func (k Kind) String() string {
	return [...]string{"cpu", "share", "1-card", "few-cards", "8-card"}[k]
}

// Arrival is a pod as fit sees it.
type Arrival struct {
	Ask   *fit.Ask
	Milli int64 // what it asks of all its cards, in thousandths of a card
	Kind  Kind
}

// Cluster is what policies place pods on. The position of a node is its rank.
type Cluster struct {
	Nodes    []*fit.Node
	Capacity int64 // of all cards, in thousandths of a card
	Held     int64 // by what was placed
}

// NewCluster makes empty nodes.
func NewCluster(nodes []openb.Node) *Cluster {
	c := &Cluster{}
	for _, n := range nodes {
		out := &fit.Node{Name: n.Name, HostKnown: true, Host: fit.Host{CPUMilli: n.CPUMilli, MemMiB: n.MemMiB}}
		for i := range n.Cards {
			out.Cards = append(out.Cards, fit.Card{UUID: fmt.Sprintf("%s-%d", n.Name, i), Index: i, Model: n.Model, MemMiB: cardMiB, Slots: slots})
		}
		c.Nodes = append(c.Nodes, out)
		c.Capacity += int64(n.Cards) * openb.Card
	}
	return c
}

// NewArrivals compiles pods; pods that ask the same share one Ask.
func NewArrivals(pods []openb.Pod) ([]Arrival, error) {
	known := map[openb.Pod]Arrival{}
	out := make([]Arrival, len(pods))
	for i, p := range pods {
		p.Name = ""
		a, ok := known[p]
		if !ok {
			var err error
			if a, err = newArrival(&p); err != nil {
				return nil, err
			}
			known[p] = a
		}
		out[i] = a
	}
	return out, nil
}

func newArrival(p *openb.Pod) (Arrival, error) {
	a := Arrival{Milli: p.Total()}
	var r api.Request
	c := api.ContainerRequest{Name: "main", Cards: p.Cards}
	switch {
	case p.Cards == 0:
		a.Kind = NoCard
	case p.Milli < openb.Card:
		const percent = openb.Card / 100
		if p.Milli%percent != 0 || p.Milli == 0 {
			return a, fmt.Errorf("a share of %d thousandths isn't one of whole percents", p.Milli)
		}
		a.Kind, c.MemPercent, c.Cores = Share, int(p.Milli/percent), int(p.Milli/percent)
	default:
		c.Whole = true
		switch {
		case p.Cards == 1:
			a.Kind = OneCard
		case p.Cards < 8:
			a.Kind = FewCards
		default:
			a.Kind = EightCards
		}
	}
	if p.Cards > 0 {
		r.Containers = append(r.Containers, c)
	}
	if p.Models != "" {
		r.Models.Only = strings.Split(p.Models, "|")
	}
	ask, refusal := fit.NewAsk(r)
	if refusal != nil {
		return a, fmt.Errorf("pod of %d cards: %s", p.Cards, refusal.Sentence())
	}
	a.Ask = ask.WithHost(fit.Host{CPUMilli: p.CPUMilli, MemMiB: p.MemMiB})
	return a, nil
}

func (c *Cluster) place(node int, a *Arrival, p fit.Placement) {
	c.Nodes[node] = fit.Apply(c.Nodes[node], a.Ask, p)
	c.Held += a.Milli
}

// state is a hash of all that costs depend on.
func state(n *fit.Node) uint64 {
	h := scramble(uint64(n.Host.CPUMilli)) ^ scramble(uint64(n.Host.MemMiB)<<32)
	for i := range n.Cards {
		c := &n.Cards[i]
		is := uint64(c.Used.MemMiB)<<1 | uint64(c.Used.Cores)<<40
		if c.Touched {
			is |= 1
		}
		if c.Whole {
			is |= 1 << 63
		}
		h = scramble(h ^ is)
	}
	if len(n.Cards) > 0 {
		for _, b := range []byte(n.Cards[0].Model) {
			h = scramble(h ^ uint64(b))
		}
	}
	return h
}
