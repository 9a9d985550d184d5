package score

import (
	"sync"

	"github.com/carve-gpu/carve/scheduler-extender/fit"
)

// level keeps the costs of a policy from being negative: a placement may be a gain.
const level = 1 << 50

// Policy is packing by these prices behind the types that other policies have. Where a node's
// processors aren't known, what depends on them costs nothing. It is safe for concurrent use.
func (p *Prices) Policy() Policy {
	pool := sync.Pool{New: func() any { return NewScorer(p) }}
	return Policy{
		Name: PriceName,
		Card: func(c *fit.Card, after fit.Amount) int64 { return p.preferCard(c, after) },
		Node: func(n *fit.Node, a *fit.Ask, at fit.Placement) int64 {
			s := pool.Get().(*Scorer)
			defer pool.Put(s)
			s.node = n
			return level + s.rounded(s.cost(a, at))
		},
	}
}

// preferCard orders the cards of a node by the value that they lose; among equals the smaller
// one comes first, then the fuller one.
func (p *Prices) preferCard(c *fit.Card, after fit.Amount) int64 {
	f := p.family(c.MemMiB)
	lost := f.table.Value(f.state(c, c.Used)) - f.table.Value(f.state(c, after))
	return lost<<(2*memBits-8) | min(c.MemMiB, 1<<memBits-1)<<(memBits-8) | remaining(c, after)>>8
}
