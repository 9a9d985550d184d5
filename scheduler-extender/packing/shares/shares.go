// Package shares is the packing experiment on cards alone whose shares are of unequal parts of
// compute and memory. The mixes are made up; what counts is how far a policy gets on the way to
// what the linear program says is possible.
package shares

import (
	"fmt"
	"math/rand"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/scheduler-extender/fit"
	"github.com/carve-gpu/carve/scheduler-extender/price"
	"github.com/carve-gpu/carve/scheduler-extender/rank"
	"github.com/carve-gpu/carve/scheduler-extender/score"
)

const (
	cards   = 1000
	cardMiB = 10000
	// ratio is how much arrives, in parts of what is possible.
	ratio = 1.3
)

// Mix is a kind of demand: shares in percent of compute and of memory, each as likely.
type Mix struct {
	Name   string
	Shares [][2]int
}

// Mixes are those that are run.
var Mixes = []Mix{
	{"correlated", [][2]int{{10, 10}, {15, 20}, {25, 25}, {20, 30}, {35, 30}, {40, 40}, {45, 50}, {55, 55}, {60, 65}, {70, 75}, {80, 80}}},
	{"anticorrelated", [][2]int{{10, 85}, {15, 75}, {20, 80}, {25, 65}, {30, 60}, {35, 45}, {50, 40}, {55, 30}, {65, 25}, {70, 35}, {75, 15}, {85, 20}, {90, 10}}},
	{"memoryheavy", [][2]int{{5, 30}, {10, 35}, {10, 50}, {15, 45}, {5, 60}, {20, 40}, {15, 25}, {25, 70}, {10, 20}, {30, 55}}},
}

// Policies are those that are compared: today's default, tightest fit in both, and prices.
func Policies() []string { return []string{"binpack", "bestfit", "carve"} }

// Result is what came of a run, in percent of the bound.
type Result struct {
	FirstRejected float64 // of the pods that could be served
	Memory        float64 // allocated in the end, in percent of the cards' memory
}

// Bound is how many pods of the mix the cards could serve at best.
func Bound(m Mix) float64 {
	var slots []price.Slot
	for _, s := range m.Shares {
		slots = append(slots, price.Slot{Cores: s[0], Mem: s[1], Demand: 1})
	}
	return cards / price.Cut(slots, 100, 5).Cards() * float64(len(m.Shares))
}

// Run has pods of the mix arrive one after another.
func Run(m Mix, policy string, seed int64) (Result, error) {
	var asks []*fit.Ask
	for _, s := range m.Shares {
		a, refusal := fit.NewAsk(api.Request{Containers: []api.ContainerRequest{{Name: "main", Cards: 1, Cores: s[0], MemPercent: s[1]}}})
		if refusal != nil {
			return Result{}, fmt.Errorf("mix %s: %s", m.Name, refusal.Sentence())
		}
		asks = append(asks, a)
	}
	nodes := make([]*fit.Node, cards)
	for i := range nodes {
		nodes[i] = &fit.Node{Name: fmt.Sprint(i), Cards: []fit.Card{{UUID: fmt.Sprint(i), MemMiB: cardMiB, Slots: 100}}}
	}
	learner := score.NewLearner(score.FleetOf(nodes))
	scorer := score.NewScorer(learner.Prices())
	judge := scorer.Judge
	switch policy {
	case "carve":
	case "binpack":
		judge = func(n *fit.Node, a *fit.Ask) (fit.Placement, int64, bool) {
			p, ok := fit.Choose(n, a, score.Binpack.Card)
			if !ok {
				return nil, 0, false
			}
			return p, score.Binpack.Node(n, a, p), true
		}
	case "bestfit":
		judge = func(n *fit.Node, a *fit.Ask) (fit.Placement, int64, bool) {
			p, ok := fit.Choose(n, a, score.Binpack.Card)
			used := n.Cards[0].Used
			return p, -used.MemMiB*100/cardMiB - int64(used.Cores), ok
		}
	default:
		return Result{}, fmt.Errorf("there is no policy %q; %v are known", policy, Policies())
	}
	index, r := rank.New(cards), rand.New(rand.NewSource(seed))
	bound := Bound(m)
	res := Result{FirstRejected: ratio * 100}
	var held int64
	for i := range int(ratio * bound) {
		a := asks[r.Intn(len(asks))]
		at, _ := index.Any(a.Key(), func(node int) int64 {
			if _, cost, ok := judge(nodes[node], a); ok {
				return cost
			}
			return rank.None
		}, uint64(i)*0x9e3779b97f4a7c15)
		if at < 0 {
			res.FirstRejected = min(res.FirstRejected, 100*float64(i)/bound)
		} else {
			p, _, _ := judge(nodes[at], a)
			nodes[at] = fit.Apply(nodes[at], a, p)
			held += int64(a.Containers[0].MemPercent)
			index.Touch(at, 0)
		}
		if learner.Arrived(a, at >= 0) {
			scorer.Use(learner.Prices())
			index.Reset()
		}
	}
	for _, n := range nodes {
		if c := &n.Cards[0]; c.Used.MemMiB > c.MemMiB || c.Used.Cores > 100 {
			return res, fmt.Errorf("card %s holds too much: %+v", n.Name, c.Used)
		}
	}
	res.Memory = float64(held) / cards
	return res, nil
}
