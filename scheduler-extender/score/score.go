// Package score orders places that fit: cards within a node, and nodes. It is
// pure. A Policy is two functions over the same view that fit uses.
//
// Binpack and Spread look at one node's cards alone. Prices know what pods ask of late and
// what nodes there are: a Learner makes them, a Scorer reckons with them, and Policy puts them
// behind the same types.
package score

import (
	"sync"

	"github.com/carve-gpu/carve/scheduler-extender/fit"
)

// Policy says what a good place is. Lower is better in both functions.
type Policy struct {
	Name string
	Card fit.Prefer
	// Node prices a placement on a node; the node is as it is before it.
	Node func(n *fit.Node, a *fit.Ask, p fit.Placement) int64
}

// Binpack fills what is already broken and keeps untouched cards, and nodes
// with many of them, for those that need them.
var Binpack = Policy{Name: "binpack", Card: packCard, Node: packNode}

// Spread uses the emptiest card of the emptiest node.
var Spread = Policy{Name: "spread", Card: spreadCard, Node: spreadNode}

// PriceName names packing by prices, which change with what pods ask.
const PriceName = "price"

// common is packing by the prices of a common mix of pods, for who has none of his own.
var common = sync.OnceValue(func() Policy { return NewLearner(nil).Prices().Policy() })

// ByName finds a policy. Topology weighs nothing but room so far, as binpack.
func ByName(name string) (Policy, bool) {
	switch name {
	case PriceName:
		return common(), true
	case "binpack", "topology":
		return Binpack, true
	case "spread":
		return Spread, true
	}
	return Policy{}, false
}

// memBits holds any card's memory in MiB: the api package allows 2^24.
const memBits = 25

func remaining(c *fit.Card, after fit.Amount) int64 {
	return min(max(0, c.MemMiB-after.MemMiB), 1<<memBits-1)
}

// packCard prefers, in this order: a card that is in use or that can't serve whole,
// the least memory left, the smaller card, the least compute left.
func packCard(c *fit.Card, after fit.Amount) int64 {
	var opens int64
	if !c.Touched && !c.Replicated() {
		opens = 1
	}
	return opens<<(2*memBits+8) | remaining(c, after)<<(memBits+8) |
		min(c.MemMiB, 1<<memBits-1)<<8 | int64(max(0, 100-after.Cores))
}

func spreadCard(c *fit.Card, after fit.Amount) int64 {
	var shared int64
	if c.Touched {
		shared = 1
	}
	return shared<<(memBits+8) | (1<<memBits-1-remaining(c, after))<<8 | int64(min(max(0, after.Cores), 255))
}

// shape sums up what a placement does to a node.
type shape struct {
	opened, left  int64 // untouched cards that shares open; untouched cards left
	remain        int64 // memory left on the used cards, in thousandths
	free          int64 // memory left on the node, in thousandths
	cardGiB       int64 // mean size of the cards used
	whole, shares bool
}

func measure(n *fit.Node, a *fit.Ask, p fit.Placement) shape {
	var s shape
	after := fit.Apply(n, a, p)
	var total, free, usedTotal, usedFree, used int64
	for i := range after.Cards {
		was, is := &n.Cards[i], &after.Cards[i]
		f := is.Free().MemMiB
		total, free = total+is.MemMiB, free+f
		if !is.Touched && !is.Replicated() {
			s.left++
		}
		if is.Used == was.Used && is.Whole == was.Whole {
			continue
		}
		used, usedTotal, usedFree = used+1, usedTotal+is.MemMiB, usedFree+f
		switch {
		case is.Whole:
			s.whole = true
		case !was.Touched && !was.Replicated():
			s.opened++
			s.shares = true
		default:
			s.shares = true
		}
	}
	s.remain = usedFree * 1000 / max(1, usedTotal)
	s.free = free * 1000 / max(1, total)
	s.cardGiB = usedTotal / max(1, used) >> 10
	return s
}

func packNode(n *fit.Node, a *fit.Ask, p fit.Placement) int64 {
	s := measure(n, a, p)
	if s.whole && !s.shares {
		// Above all that a replica costs: who is content with one gets that.
		return 1<<60 | s.left<<36 | min(s.cardGiB, 1<<16-1)<<20 | s.free
	}
	return s.opened<<52 | s.remain<<36 | s.left<<20 | s.free
}

func spreadNode(n *fit.Node, a *fit.Ask, p fit.Placement) int64 {
	s := measure(n, a, p)
	return (1000-s.free)<<36 | (1000-s.remain)<<20
}

// Wire turns costs into the scores 0 to 10 that kube-scheduler takes: the
// lowest cost gets 10, the highest 0, and equal costs 10 each.
func Wire(costs []int64) []int64 {
	out := make([]int64, len(costs))
	if len(costs) == 0 {
		return out
	}
	low, high := costs[0], costs[0]
	for _, c := range costs {
		low, high = min(low, c), max(high, c)
	}
	for i, c := range costs {
		if high == low {
			out[i] = 10
			continue
		}
		// In floating point, since the costs fill 60 bits.
		out[i] = int64(10*(1-float64(c-low)/float64(high-low)) + 0.5)
	}
	return out
}
