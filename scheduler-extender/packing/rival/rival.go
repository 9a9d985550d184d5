// Package rival has the policies that carve is compared with, as published, on the experiment's
// own terms: costs are whole numbers from 0 to 100 and the first card wins among equals. They
// are measuring sticks, and no part of the extender.
package rival

import (
	"math/rand"

	"github.com/carve-gpu/carve/scheduler-extender/fit"
)

// milli is a part of a card, of thousand, as the published code counts.
func milli(c *fit.Card, mib int64) int64 { return mib * 1000 / c.MemMiB }

func left(c *fit.Card) int64 { return milli(c, c.Free().MemMiB) }

// request is what an ask wants of a card, and of how many.
func request(a *fit.Ask) (each int64, cards int) {
	if len(a.Containers) == 0 {
		return 0, 0
	}
	c := &a.Containers[0]
	if c.Whole {
		return 1000, c.Cards
	}
	return int64(c.MemPercent) * 10, c.Cards
}

// bestCard is the fullest card that fits; whole cards are the first ones.
func bestCard(c *fit.Card, after fit.Amount) int64 { return c.MemMiB - after.MemMiB }

// constant learns nothing.
type constant struct{}

func (constant) Learn(*fit.Ask, bool) bool { return false }

// Random takes any node and any card, each as likely. It is meant to be run with random ties.
type Random struct {
	constant
	rand *rand.Rand
}

// NewRandom makes one.
func NewRandom(seed int64) *Random { return &Random{rand: rand.New(rand.NewSource(seed))} }

// Judge implements replay.Policy.
func (r *Random) Judge(n *fit.Node, a *fit.Ask) (fit.Placement, int64, bool) {
	p, ok := fit.Choose(n, a, func(*fit.Card, fit.Amount) int64 { return r.rand.Int63() })
	return p, 0, ok
}

// BestFit takes the node that has the least left, processors and cards weighed by the largest
// node's: 128 cores, 8 cards.
type BestFit struct{ constant }

// Judge implements replay.Policy.
func (BestFit) Judge(n *fit.Node, a *fit.Ask) (fit.Placement, int64, bool) {
	p, ok := fit.Choose(n, a, bestCard)
	if !ok {
		return nil, 0, false
	}
	each, cards := request(a)
	gpu := -each * int64(cards)
	for i := range n.Cards {
		gpu += left(&n.Cards[i])
	}
	cpu := n.Host.CPUMilli - a.Host.CPUMilli
	rest := float64(float64(cpu)/128000*0.5) + float64(float64(gpu)/8000*0.5)
	return p, -int64((1 - rest) * 100), true
}

// GPUPacking takes cards in use before free ones, and these of nodes in use before others.
type GPUPacking struct{ constant }

// Judge implements replay.Policy.
func (GPUPacking) Judge(n *fit.Node, a *fit.Ask) (fit.Placement, int64, bool) {
	p, ok := fit.Choose(n, a, bestCard)
	if !ok {
		return nil, 0, false
	}
	if len(a.Containers) == 0 {
		return p, 0, true
	}
	var free int64
	for i := range n.Cards {
		if !n.Cards[i].Touched {
			free++
		}
	}
	if free == int64(len(n.Cards)) {
		return p, -max(33-free, free), true
	}
	var opened, onUsed int64
	for _, at := range p[0] {
		c := &n.Cards[at]
		if !c.Touched {
			opened++
		}
		onUsed += left(c) / 10
	}
	if opened > 0 {
		return p, -max(50-opened, 33), true
	}
	return p, -max(100-onUsed/10, 50), true
}
