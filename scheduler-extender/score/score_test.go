package score_test

import (
	"reflect"
	"testing"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/scheduler-extender/fit"
	"github.com/carve-gpu/carve/scheduler-extender/score"
)

// node has cards of 80 GiB with the given use in GiB; negative is held whole.
func node(name string, used ...int64) *fit.Node {
	n := &fit.Node{Name: name}
	for i, u := range used {
		c := fit.Card{UUID: name + string(rune('a'+i)), Index: i, MemMiB: 80 << 10, Slots: 32}
		switch {
		case u < 0:
			c.Touched, c.Whole, c.Used = true, true, fit.Amount{MemMiB: 80 << 10, Cores: 100, Slots: 1}
		case u > 0:
			c.Touched, c.Used = true, fit.Amount{MemMiB: u << 10, Slots: 1}
		}
		n.Cards = append(n.Cards, c)
	}
	return n
}

func TestNodeOrder(t *testing.T) {
	share := func(gib int64) api.ContainerRequest {
		return api.ContainerRequest{Name: "app", Cards: 1, MemMiB: gib << 10}
	}
	whole := func(n int) api.ContainerRequest { return api.ContainerRequest{Name: "app", Cards: n, Whole: true} }
	for name, c := range map[string]struct {
		policy        score.Policy
		ask           api.ContainerRequest
		better, worse *fit.Node
	}{
		"binpack: a share goes where a card is in use":               {score.Binpack, share(10), node("a", 70, 0), node("b", 0, 0)},
		"binpack: a share goes where it fits tightest":               {score.Binpack, share(10), node("a", 70, 0), node("b", 60, 0)},
		"gang-33 binpack: two cards come from the node that has two": {score.Binpack, whole(2), node("a", -1, -1, 0, 0), node("b", 0, 0, 0, 0)},
		"spread: a share goes to the emptier node":                   {score.Spread, share(10), node("a", 0, 0), node("b", 70, 0)},
		"spread: whole cards go to the emptier node":                 {score.Spread, whole(1), node("a", 0, 0), node("b", -1, 0)},
	} {
		t.Run(name, func(t *testing.T) {
			a, refusal := fit.NewAsk(api.Request{Containers: []api.ContainerRequest{c.ask}})
			if refusal != nil {
				t.Fatal(refusal)
			}
			cost := func(n *fit.Node) int64 {
				p, refusal := fit.Fit(n, a, c.policy.Card)
				if refusal != nil {
					t.Fatalf("%s: %+v", n.Name, refusal)
				}
				return c.policy.Node(n, a, p)
			}
			if b, w := cost(c.better), cost(c.worse); b >= w {
				t.Fatalf("costs %d and %d", b, w)
			}
		})
	}
}

func TestCardOrder(t *testing.T) {
	a, _ := fit.NewAsk(api.Request{Containers: []api.ContainerRequest{{Name: "app", Cards: 1, MemMiB: 10 << 10}}})
	n := node("a", 0, 30, 60)
	for policy, want := range map[string]int{"binpack": 2, "spread": 0, "topology": 2} {
		p, ok := score.ByName(policy)
		if !ok {
			t.Fatal(policy)
		}
		if got, _ := fit.Fit(n, a, p.Card); got[0][0] != want {
			t.Errorf("%s: card %d, want %d", policy, got[0][0], want)
		}
	}
	if _, ok := score.ByName("best"); ok {
		t.Error("an unknown policy was found")
	}
}

func TestWire(t *testing.T) {
	for name, c := range map[string]struct{ costs, want []int64 }{
		"none":             {nil, []int64{}},
		"one":              {[]int64{7}, []int64{10}},
		"equal":            {[]int64{7, 7}, []int64{10, 10}},
		"from 10 to 0":     {[]int64{0, 50, 100}, []int64{10, 5, 0}},
		"without overflow": {[]int64{0, 1 << 62}, []int64{10, 0}},
	} {
		if got := score.Wire(c.costs); !reflect.DeepEqual(got, c.want) {
			t.Errorf("%s: %v, want %v", name, got, c.want)
		}
	}
}
