package score

import (
	"fmt"
	"testing"

	"pgregory.net/rapid"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/scheduler-extender/fit"
	"github.com/carve-gpu/carve/scheduler-extender/price"
)

func drawAsk(t *rapid.T) *fit.Ask {
	var r api.Request
	share := func(name string) api.ContainerRequest {
		mem := rapid.SampledFrom([]int{5, 16, 23, 32, 47, 55, 65, 81, 100}).Draw(t, "mem")
		cores := mem
		if rapid.Bool().Draw(t, "uneven") {
			cores = rapid.IntRange(0, 100).Draw(t, "cores")
		}
		return api.ContainerRequest{Name: name, Cards: 1, MemPercent: mem, Cores: cores}
	}
	switch rapid.IntRange(0, 5).Draw(t, "kind") {
	case 0:
	case 1:
		r.Containers = append(r.Containers, api.ContainerRequest{Name: "a", Cards: rapid.IntRange(1, 4).Draw(t, "cards"), Whole: true})
	case 2:
		r.Containers = append(r.Containers, share("a"), share("b"))
	default:
		r.Containers = append(r.Containers, share("a"))
	}
	if rapid.IntRange(0, 3).Draw(t, "insists") == 0 {
		r.Models.Only = []string{rapid.SampledFrom([]string{"G2", "T4"}).Draw(t, "model")}
	}
	a, refusal := fit.NewAsk(r)
	if refusal != nil {
		t.Fatal(refusal)
	}
	return a.WithHost(fit.Host{CPUMilli: int64(1000 * rapid.IntRange(0, 20).Draw(t, "cpu")), MemMiB: int64(rapid.IntRange(0, 64).Draw(t, "host"))})
}

func drawNode(t *rapid.T) *fit.Node {
	n := &fit.Node{Name: "n", HostKnown: rapid.IntRange(0, 4).Draw(t, "known") > 0}
	if n.HostKnown {
		n.Host = fit.Host{CPUMilli: int64(1000 * rapid.IntRange(0, 96).Draw(t, "cpu")), MemMiB: int64(rapid.IntRange(0, 512).Draw(t, "host"))}
	}
	model := rapid.SampledFrom([]string{"G2", "T4", "other"}).Draw(t, "model")
	for i := range rapid.IntRange(0, 8).Draw(t, "cards") {
		c := fit.Card{UUID: fmt.Sprint(i), Index: i, Model: model, MemMiB: 10000, Slots: 100}
		switch rapid.IntRange(0, 4).Draw(t, "state") {
		case 0:
			c.Touched, c.Whole = true, true
		case 1, 2:
			p := rapid.IntRange(1, 100).Draw(t, "used")
			c.Touched, c.Used = true, fit.Amount{MemMiB: int64(p) * 100, Cores: min(100, p+rapid.IntRange(0, 5).Draw(t, "more")), Slots: 1}
		}
		n.Cards = append(n.Cards, c)
	}
	return n
}

// TestTheQuickWayCostsWhatTheLongOneDoes compares what Judge reckons from changes of sums with
// the difference of two nodes that are summed up from scratch.
func TestTheQuickWayCostsWhatTheLongOneDoes(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		mix := price.NewMix(0)
		for range rapid.IntRange(1, 30).Draw(t, "pods") {
			mix.Add(drawAsk(t))
		}
		empty := &fit.Node{Name: "e", HostKnown: true, Host: fit.Host{CPUMilli: 96000, MemMiB: 512}}
		for i := range 8 {
			empty.Cards = append(empty.Cards, fit.Card{UUID: fmt.Sprint(i), Model: "G2", MemMiB: 10000, Slots: 100})
		}
		w := Usual
		if rapid.Bool().Draw(t, "overloaded") {
			w = Overloaded
		}
		p := NewPrices(2, mix.Shapes(), FleetOf([]*fit.Node{empty}), w)
		s := NewScorer(p)
		for range 5 {
			n, a := drawNode(t), drawAsk(t)
			at, cost, ok := s.Judge(n, a)
			if _, fits := fit.Choose(n, a, Binpack.Card); fits != ok {
				t.Fatalf("judged to fit: %t, fits: %t", ok, fits)
			}
			if !ok {
				continue
			}
			if again, c, _ := NewScorer(p).Judge(n, a); c != cost || fmt.Sprint(again) != fmt.Sprint(at) {
				t.Fatalf("cost %d at %v, by a new scorer %d at %v", cost, at, c, again)
			}
			if len(a.Containers) != 1 || a.Containers[0].Whole {
				continue
			}
			s.node = n
			if long := s.rounded(s.cost(a, at)); long != cost {
				t.Fatalf("cost %d, from scratch %d: %+v", cost, long, n)
			}
			// No other card of the node would have cost less.
			for i := range n.Cards {
				if a.Miss(n, i, 0) == nil {
					if c := s.rounded(s.cost(a, fit.Placement{{i}})); c < cost {
						t.Fatalf("card %v costs %d, card %d %d", at, cost, i, c)
					}
				}
			}
			if got := p.Policy().Node(n, a, at); got != level+cost {
				t.Fatalf("the policy says %d, Judge %d", got, cost)
			}
		}
	})
}

// TestAShareGoesWhereItLeavesWhatOthersUse is what prices are for.
func TestAShareGoesWhereItLeavesWhatOthersUse(t *testing.T) {
	share := func(percent int) *fit.Ask {
		a, _ := fit.NewAsk(api.Request{Containers: []api.ContainerRequest{{Name: "a", Cards: 1, MemPercent: percent, Cores: percent}}})
		return a
	}
	mix := price.NewMix(0)
	for range 10 {
		mix.Add(share(65))
		mix.Add(share(32))
		mix.Add(share(47))
		mix.Add(share(47))
	}
	node := func(used ...int) *fit.Node {
		n := &fit.Node{Name: "n"}
		for i, u := range used {
			n.Cards = append(n.Cards, fit.Card{UUID: fmt.Sprint(i), MemMiB: 10000, Slots: 100, Touched: u > 0, Used: fit.Amount{MemMiB: int64(u) * 100, Cores: u}})
		}
		return n
	}
	for name, c := range map[string]struct {
		size int
		node *fit.Node
		want int
	}{
		"32 beside 65, though beside 47 it would leave less": {32, node(47, 65), 1},
		"47 beside 47, though 32 would leave less":           {47, node(0, 47, 32), 1},
		"47 on a card of its own, not beside 23":             {47, node(23, 0), 1},
	} {
		t.Run(name, func(t *testing.T) {
			s := NewScorer(NewPrices(2, mix.Shapes(), FleetOf([]*fit.Node{node(0, 0, 0)}), Usual))
			if at, _, ok := s.Judge(c.node, share(c.size)); !ok || at[0][0] != c.want {
				t.Fatalf("card %v, want %d", at, c.want)
			}
		})
	}
}

func TestALearnerMakesPricesOfWhatArrives(t *testing.T) {
	node := &fit.Node{Name: "n", Cards: []fit.Card{{UUID: "a", MemMiB: 10000, Slots: 100}}}
	l := NewLearner(FleetOf([]*fit.Node{node}))
	a, _ := fit.NewAsk(api.Request{Containers: []api.ContainerRequest{{Name: "a", Cards: 1, MemPercent: 47, Cores: 47}}})
	if g := l.Prices().Generation; g != 1 || len(l.Prices().Shapes) == 0 {
		t.Fatalf("it begins with generation %d, %d shapes", g, len(l.Prices().Shapes))
	}
	changes := 0
	for range 2000 {
		if l.Arrived(a, true) {
			changes++
		}
	}
	if changes != 1 || len(l.Prices().Shapes) != 1 {
		t.Fatalf("%d changes, %d shapes, of pods that are all the same", changes, len(l.Prices().Shapes))
	}
	turnedAway := 0
	for ; !l.overloaded && turnedAway < 1000; turnedAway++ {
		l.Arrived(a, false)
	}
	if turnedAway < 10 || turnedAway > 500 || l.Prices().weights != Overloaded {
		t.Fatalf("overloaded after %d pods were turned away, weights %+v", turnedAway, l.Prices().weights)
	}
	for i := 0; l.overloaded; i++ {
		if l.Arrived(a, true); i > 20000 {
			t.Fatal("it stays overloaded for ever")
		}
	}
	if l.Prices().weights != Usual {
		t.Fatalf("weights %+v", l.Prices().weights)
	}
}
