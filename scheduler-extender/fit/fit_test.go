package fit_test

import (
	"reflect"
	"strings"
	"testing"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/scheduler-extender/fit"
	"github.com/carve-gpu/carve/scheduler-extender/score"
)

const gib = 1024

// card is an A100 of 80 GiB with something in use on it.
func card(usedMiB int64) fit.Card {
	c := fit.Card{UUID: "GPU-a", Model: "NVIDIA A100-80", MemMiB: 80 * gib, Slots: 32}
	if usedMiB > 0 {
		c.Used, c.Touched = fit.Amount{MemMiB: usedMiB, Slots: 1}, true
	}
	return c
}

func node(cards ...fit.Card) *fit.Node {
	n := &fit.Node{Name: "n1", Cards: cards}
	for i := range n.Cards {
		n.Cards[i].Index = i
		n.Cards[i].UUID = "GPU-" + string(rune('a'+i))
	}
	return n
}

func ask(t testing.TB, cs ...api.ContainerRequest) *fit.Ask {
	t.Helper()
	a, refusal := fit.NewAsk(api.Request{Containers: cs})
	if refusal != nil {
		t.Fatalf("refused: %v", refusal)
	}
	return a
}

func mem(name string, kind api.ContainerKind, mib int64) api.ContainerRequest {
	return api.ContainerRequest{Name: name, Kind: kind, Cards: 1, MemMiB: mib}
}

func TestFit(t *testing.T) {
	share := func(mib int64) api.ContainerRequest { return mem("app", api.App, mib) }
	whole := func(n int) api.ContainerRequest { return api.ContainerRequest{Name: "app", Cards: n, Whole: true} }
	with := func(c fit.Card, change func(*fit.Card)) fit.Card { change(&c); return c }
	cases := map[string]struct {
		node *fit.Node
		asks []api.ContainerRequest
		want fit.Placement
		why  fit.Reason
	}{
		"a share goes to the card that it fills best": {
			node(card(0), card(40*gib), card(20*gib)), []api.ContainerRequest{share(30 * gib)}, fit.Placement{{1}}, ""},
		"a share of all that is left fits, one MiB more does not": {
			node(card(40 * gib)), []api.ContainerRequest{share(40 * gib)}, fit.Placement{{0}}, ""},
		"one MiB over is refused": {
			node(card(40 * gib)), []api.ContainerRequest{share(40*gib + 1)}, nil, fit.ReasonMemory},
		"gang-16: a third share of 12 GiB does not fit on 24 GiB": {
			node(with(card(24*gib), func(c *fit.Card) { c.MemMiB = 24 * gib })), []api.ContainerRequest{share(12 * gib)}, nil, fit.ReasonMemory},
		"N cards are N different ones": {
			node(card(0), card(0)), []api.ContainerRequest{{Name: "app", Cards: 2, MemMiB: 10 * gib}}, fit.Placement{{0, 1}}, ""},
		"N cards don't fit on one with room for N shares": {
			node(card(0), card(79*gib)), []api.ContainerRequest{{Name: "app", Cards: 2, MemMiB: 10 * gib}}, nil, fit.ReasonMemory},
		"more cards than the node has": {
			node(card(0)), []api.ContainerRequest{whole(2)}, nil, fit.ReasonTooFewCards},
		"a whole card must be untouched, however little is on it": {
			node(card(1)), []api.ContainerRequest{whole(1)}, nil, fit.ReasonShared},
		"a whole card takes the untouched one": {
			node(card(1), card(0)), []api.ContainerRequest{whole(1)}, fit.Placement{{1}}, ""},
		"a card that is held whole takes nobody": {
			node(with(card(0), func(c *fit.Card) { c.Touched, c.Whole = true, true })), []api.ContainerRequest{share(1)}, nil, fit.ReasonHeldWhole},
		"memory that isn't named is the whole card's": {
			node(card(1), card(0)), []api.ContainerRequest{{Name: "app", Cards: 1, Cores: 10}}, fit.Placement{{1}}, ""},
		"percent is of each card's own memory": {
			node(with(card(0), func(c *fit.Card) { c.MemMiB = 24 * gib; c.Used.MemMiB = 13 * gib; c.Touched = true }), card(40*gib)),
			[]api.ContainerRequest{{Name: "app", Cards: 1, MemPercent: 50}}, fit.Placement{{1}}, ""},
		"compute is summed up to 100": {
			node(with(card(gib), func(c *fit.Card) { c.Used.Cores = 71 })), []api.ContainerRequest{{Name: "app", Cards: 1, MemMiB: 1, Cores: 30}}, nil, fit.ReasonCores},
		"no share of compute fits beside 100 percent": {
			node(with(card(gib), func(c *fit.Card) { c.Used.Cores = 100 })), []api.ContainerRequest{share(1)}, fit.Placement{{0}}, ""},
		"a card has so many slots": {
			node(with(card(gib), func(c *fit.Card) { c.Used.Slots = 32 })), []api.ContainerRequest{share(1)}, nil, fit.ReasonSlots},
		"two containers of a pod can't share the last slot": {
			node(with(card(gib), func(c *fit.Card) { c.Used.Slots = 31 })), []api.ContainerRequest{mem("a", api.App, 1), mem("b", api.App, 1)}, nil, fit.ReasonTogether},
		"a card in debt takes nothing": {
			node(card(90 * gib)), []api.ContainerRequest{share(1)}, nil, fit.ReasonMemory},
		"an unhealthy card is passed over": {
			node(with(card(0), func(c *fit.Card) { c.Blocked = fit.ReasonUnhealthy }), card(0)), []api.ContainerRequest{share(1)}, fit.Placement{{1}}, ""},
		"a cordoned card says so": {
			node(with(card(0), func(c *fit.Card) { c.Blocked = fit.ReasonCordoned })), []api.ContainerRequest{share(1)}, nil, fit.ReasonCordoned},
		"share-12: a sidecar and an app of 60 GiB don't fit on 80": {
			node(card(0)), []api.ContainerRequest{mem("side", api.Sidecar, 60*gib), mem("app", api.App, 60*gib)}, nil, fit.ReasonTogether},
		"an init container uses the room of the app": {
			node(card(0)), []api.ContainerRequest{mem("init", api.Init, 60*gib), mem("app", api.App, 60*gib)}, fit.Placement{{0}, {0}}, ""},
		"an init container stays on the pod's card though another would be fuller": {
			node(card(0), card(79*gib)), []api.ContainerRequest{mem("init", api.Init, gib), mem("app", api.App, 60*gib)}, fit.Placement{{0}, {0}}, ""},
		"a sidecar adds to the init containers after it": {
			node(card(0)), []api.ContainerRequest{mem("side", api.Sidecar, 30*gib), mem("init", api.Init, 60*gib)}, nil, fit.ReasonTogether},
		"a sidecar doesn't add to the init containers before it": {
			node(card(0)), []api.ContainerRequest{mem("init", api.Init, 60*gib), mem("side", api.Sidecar, 30*gib)}, fit.Placement{{0}, {0}}, ""},
		"two app containers go to two cards where one is too small": {
			node(card(40*gib), card(40*gib)), []api.ContainerRequest{mem("a", api.App, 30*gib), mem("b", api.App, 30*gib)}, fit.Placement{{0}, {1}}, ""},
		"the greedy choice is taken back where it leads nowhere": {
			// Both fours on one card would leave room for three of the threes.
			node(card(70*gib), card(70*gib)),
			[]api.ContainerRequest{mem("a", api.App, 4*gib), mem("b", api.App, 4*gib), mem("c", api.App, 3*gib), mem("d", api.App, 3*gib), mem("e", api.App, 3*gib), mem("f", api.App, 3*gib)},
			fit.Placement{{0}, {1}, {0}, {0}, {1}, {1}}, ""},
		"an init container may have a card whole that the app then shares": {
			node(card(0)), []api.ContainerRequest{{Name: "init", Kind: api.Init, Cards: 1, Whole: true}, mem("app", api.App, gib)}, fit.Placement{{0}, {0}}, ""},
		"a whole card and a share of the same pod are on two cards": {
			node(card(0), card(gib)), []api.ContainerRequest{{Name: "a", Cards: 1, Whole: true}, mem("b", api.App, gib)}, fit.Placement{{0}, {1}}, ""},
		"no card has that much memory": {
			node(card(0)), []api.ContainerRequest{share(81 * gib)}, nil, fit.ReasonMemory},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			got, refusal := fit.Fit(c.node, ask(t, c.asks...), score.Binpack.Card)
			if !reflect.DeepEqual(got, c.want) {
				t.Fatalf("placement %v, want %v (refusal %+v)", got, c.want, refusal)
			}
			if c.why != "" && (refusal == nil || refusal.Reason != c.why) {
				t.Fatalf("refusal %+v, want %s", refusal, c.why)
			}
		})
	}
}

func TestModesThatAreNotServedAreRefusedByName(t *testing.T) {
	for name, r := range map[string]api.Request{
		"mig":       {Isolation: api.ModeMIG, Containers: []api.ContainerRequest{mem("app", api.App, 1)}},
		"instances": {Containers: []api.ContainerRequest{{Name: "app", MIG: map[string]int{"1g.10gb": 1}}}},
	} {
		t.Run(name, func(t *testing.T) {
			_, refusal := fit.NewAsk(r)
			if refusal == nil || refusal.Reason != fit.ReasonIsolation || !refusal.Never || refusal.Detail == "" {
				t.Fatalf("refusal %+v", refusal)
			}
		})
	}
}

func TestIsolationChoosesTheMode(t *testing.T) {
	n := node(card(0))
	for name, c := range map[string]struct {
		isolation api.Mode
		request   api.ContainerRequest
		want      api.CardGrant
	}{
		"a card alone is exclusive":                {"", api.ContainerRequest{Name: "app", Cards: 1, Whole: true}, api.CardGrant{Card: "GPU-a", Mode: api.ModeExclusive}},
		"a share goes through the library":         {"", mem("app", api.App, 8000), api.CardGrant{Card: "GPU-a", Mode: api.ModeVGPU, MemMiB: 8000}},
		"a share on an exclusive card":             {api.ModeExclusive, mem("app", api.App, 8000), api.CardGrant{Card: "GPU-a", Mode: api.ModeExclusive}},
		"a card alone that insists on the library": {api.ModeVGPU, api.ContainerRequest{Name: "app", Cards: 1, Whole: true}, api.CardGrant{Card: "GPU-a", Mode: api.ModeVGPU, MemMiB: 80 * gib}},
	} {
		t.Run(name, func(t *testing.T) {
			a, refusal := fit.NewAsk(api.Request{Isolation: c.isolation, Containers: []api.ContainerRequest{c.request}})
			if refusal != nil {
				t.Fatal(refusal)
			}
			p, refusal := fit.Fit(n, a, score.Binpack.Card)
			if refusal != nil {
				t.Fatal(refusal)
			}
			g := a.Grant(n, p, "uid")
			if got := g.Containers["app"]; len(got) != 1 || got[0] != c.want {
				t.Fatalf("grant %+v, want %+v", got, c.want)
			}
			if _, err := g.Encode(); err != nil {
				t.Fatal(err)
			}
		})
	}
}

func TestSelectors(t *testing.T) {
	n := node(card(0), card(0))
	n.Cards[1].Model = "NVIDIA L20"
	one := []api.ContainerRequest{mem("app", api.App, 1)}
	for name, c := range map[string]struct {
		request api.Request
		want    fit.Placement
		why     fit.Reason
	}{
		"only a model":       {api.Request{Containers: one, Models: api.Selector{Only: []string{"l20"}}}, fit.Placement{{1}}, ""},
		"not a model":        {api.Request{Containers: one, Models: api.Selector{Not: []string{"A100"}}}, fit.Placement{{1}}, ""},
		"a model nobody has": {api.Request{Containers: one, Models: api.Selector{Only: []string{"H100"}}}, nil, fit.ReasonModel},
		"only a card":        {api.Request{Containers: one, UUIDs: api.Selector{Only: []string{"GPU-b"}}}, fit.Placement{{1}}, ""},
		"no card at all":     {api.Request{Containers: one, UUIDs: api.Selector{Not: []string{"GPU-a", "GPU-b"}}}, nil, fit.ReasonUUID},
	} {
		t.Run(name, func(t *testing.T) {
			a, _ := fit.NewAsk(c.request)
			got, refusal := fit.Fit(n, a, score.Binpack.Card)
			if !reflect.DeepEqual(got, c.want) {
				t.Fatalf("placement %v, want %v", got, c.want)
			}
			if c.why != "" && (refusal.Reason != c.why || !refusal.Never) {
				t.Fatalf("refusal %+v, want %s forever", refusal, c.why)
			}
		})
	}
}

func TestPeak(t *testing.T) {
	use := func(k api.ContainerKind, mib int64, cores int) fit.Use {
		return fit.Use{Kind: k, Amount: fit.Amount{MemMiB: mib, Cores: cores, Slots: 1}}
	}
	got := fit.Peak([]fit.Use{
		use(api.Init, 50, 0),    // alone
		use(api.Sidecar, 10, 5), // from here on
		use(api.Init, 45, 90),   // beside the sidecar: 55, 95 %
		use(api.App, 20, 20), use(api.App, 20, 20),
	})
	if want := (fit.Amount{MemMiB: 55, Cores: 95, Slots: 3}); got != want {
		t.Fatalf("peak %+v, want %+v", got, want)
	}
}

func TestMessagesNameCardAskedFree(t *testing.T) {
	n := node(card(24000))
	n.Cards[0].UUID = "GPU-0123456789abcdef"
	a := ask(t, mem("app", api.App, 70000))
	_, refusal := fit.Fit(n, a, score.Binpack.Card)
	got := refusal.Message(n, a, "default/a (8000 MiB), default/b (16000 MiB)")
	want := "n1: card 0 (GPU-01234567…, A100-80): asked 70000 MiB, free 57920 of 81920 MiB; held by default/a (8000 MiB), default/b (16000 MiB)"
	if got != want {
		t.Fatalf("message\n%s\nwant\n%s", got, want)
	}
}

// An init-heavy mix on many cards that all differ could take exponential time.
func TestSearchEnds(t *testing.T) {
	n := &fit.Node{Name: "n1"}
	for i := range 16 {
		c := card(int64(30*gib + i))
		n.Cards = append(n.Cards, c)
	}
	var cs []api.ContainerRequest
	for i := range 18 {
		cs = append(cs, mem("c"+string(rune('a'+i)), api.App, int64(26*gib-i)))
	}
	_, refusal := fit.Fit(n, ask(t, cs...), score.Binpack.Card)
	if refusal == nil || refusal.Reason != fit.ReasonSearchLimit && refusal.Reason != fit.ReasonTogether {
		t.Fatalf("refusal %+v", refusal)
	}
	if refusal.Message(n, nil, "") == "" || strings.Contains(refusal.Message(n, nil, ""), "%!") {
		t.Fatalf("message %q", refusal.Message(n, nil, ""))
	}
}

func TestKeysTellAsksApart(t *testing.T) {
	seen := map[string]string{}
	for name, r := range map[string]api.Request{
		"8000":    {Containers: []api.ContainerRequest{mem("app", api.App, 8000)}},
		"8001":    {Containers: []api.ContainerRequest{mem("app", api.App, 8001)}},
		"init":    {Containers: []api.ContainerRequest{mem("app", api.Init, 8000)}},
		"percent": {Containers: []api.ContainerRequest{{Name: "app", Cards: 1, MemPercent: 50}}},
		"cores":   {Containers: []api.ContainerRequest{{Name: "app", Cards: 1, MemMiB: 8000, Cores: 50}}},
		"two":     {Containers: []api.ContainerRequest{{Name: "app", Cards: 2, MemMiB: 8000}}},
		"whole":   {Containers: []api.ContainerRequest{{Name: "app", Cards: 1, Whole: true}}},
		"model":   {Containers: []api.ContainerRequest{mem("app", api.App, 8000)}, Models: api.Selector{Only: []string{"x"}}},
		"not":     {Containers: []api.ContainerRequest{mem("app", api.App, 8000)}, Models: api.Selector{Not: []string{"x"}}},
		"uuid":    {Containers: []api.ContainerRequest{mem("app", api.App, 8000)}, UUIDs: api.Selector{Only: []string{"x"}}},
		"mps":     {Isolation: api.ModeMPS, Containers: []api.ContainerRequest{mem("app", api.App, 8000)}},
		"slices":  {Isolation: api.ModeTimeslice, Containers: []api.ContainerRequest{mem("app", api.App, 8000)}},
		"library": {Isolation: api.ModeVGPU, Containers: []api.ContainerRequest{mem("app", api.App, 8000)}},
		"policy":  {Containers: []api.ContainerRequest{mem("app", api.App, 8000)}, Policy: "spread"},
	} {
		a, _ := fit.NewAsk(r)
		if other, twice := seen[a.Key()]; twice {
			t.Errorf("%s and %s have the same key %q", name, other, a.Key())
		}
		seen[a.Key()] = name
	}
	a, _ := fit.NewAsk(api.Request{Containers: []api.ContainerRequest{mem("other", api.App, 8000)}})
	if seen[a.Key()] != "8000" {
		t.Error("the container's name is part of the key")
	}
}
