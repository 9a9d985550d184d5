package fit_test

import (
	"reflect"
	"testing"

	"pgregory.net/rapid"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/scheduler-extender/fit"
	"github.com/carve-gpu/carve/scheduler-extender/score"
)

// genNode draws a small node with cards in all kinds of state.
func genNode(t *rapid.T) *fit.Node {
	n := &fit.Node{Name: "n"}
	for i := range rapid.IntRange(1, 4).Draw(t, "cards") {
		c := fit.Card{UUID: "GPU-" + string(rune('a'+i)), Index: i,
			MemMiB: int64(rapid.IntRange(2, 6).Draw(t, "mem")), Slots: rapid.IntRange(1, 3).Draw(t, "slots")}
		if rapid.IntRange(0, 2).Draw(t, "modes") == 0 {
			m := &fit.Modes{MPS: rapid.Bool().Draw(t, "mps"), Timeslice: rapid.Bool().Draw(t, "timeslice")}
			if rapid.IntRange(0, 3).Draw(t, "down") == 0 {
				m.MPSDown = "it died"
			}
			if rapid.Bool().Draw(t, "configured") {
				m.Only = rapid.SampledFrom([]api.Mode{api.ModeMPS, api.ModeTimeslice}).Draw(t, "only")
				m.Replicas = rapid.IntRange(2, 3).Draw(t, "replicas")
				m.OneOnly = rapid.IntRange(0, 3).Draw(t, "one") == 0
				c.Slots = m.Replicas
			}
			c.Modes = m
		}
		if rapid.Bool().Draw(t, "touched") {
			c.Touched = true
			c.Used = fit.Amount{MemMiB: int64(rapid.IntRange(0, 4).Draw(t, "used")), Cores: 10 * rapid.IntRange(0, 10).Draw(t, "cores"), Slots: 1}
			if c.Whole = rapid.IntRange(0, 5).Draw(t, "whole") == 0; !c.Whole {
				c.Mode = rapid.SampledFrom([]api.Mode{api.ModeVGPU, api.ModeVGPU, api.ModeMPS, api.ModeTimeslice, fit.Mixed}).Draw(t, "mode")
			}
		}
		if rapid.IntRange(0, 6).Draw(t, "blocked") == 0 {
			c.Blocked = fit.ReasonCordoned
		}
		n.Cards = append(n.Cards, c)
	}
	return n
}

func genContainers(t *rapid.T) []api.ContainerRequest {
	var out []api.ContainerRequest
	for i := range rapid.IntRange(1, 4).Draw(t, "containers") {
		c := api.ContainerRequest{Name: "c" + string(rune('a'+i)), Cards: rapid.IntRange(1, 3).Draw(t, "n")}
		c.Kind = api.ContainerKind(rapid.IntRange(0, 2).Draw(t, "kind"))
		switch rapid.IntRange(0, 4).Draw(t, "what") {
		case 0:
			c.Whole = true
		case 1:
			c.MemPercent = rapid.SampledFrom([]int{25, 50, 100}).Draw(t, "percent")
		case 2:
			c.Cores = 10 * rapid.IntRange(1, 10).Draw(t, "c")
		default:
			c.MemMiB = int64(rapid.IntRange(1, 4).Draw(t, "m"))
			c.Cores = 10 * rapid.IntRange(0, 6).Draw(t, "c")
		}
		out = append(out, c)
	}
	return out
}

// given is what a card is given as to a container: the rules one by one, as README has
// them.
type given struct {
	mode  api.Mode
	whole bool
	mib   int64
	cores int
}

func give(isolation api.Mode, c *api.ContainerRequest, card *fit.Card) (given, bool) {
	g := given{mode: isolation, mib: c.MemMiB, cores: c.Cores}
	if c.MemPercent > 0 {
		g.mib = max(1, card.MemMiB*int64(c.MemPercent)/100)
	}
	asksMemory := g.mib > 0
	m := card.Modes
	if m == nil {
		m = &fit.Modes{}
	}
	switch m.Only {
	case "":
		switch {
		case isolation == "" && c.Whole:
			g.mode = api.ModeExclusive
		case isolation == "":
			g.mode = api.ModeVGPU
		case (isolation == api.ModeMPS || isolation == api.ModeTimeslice) && !asksMemory:
			return g, false
		}
		if !asksMemory {
			g.mib = card.MemMiB
		}
		if g.mode == api.ModeExclusive {
			if c.MemMiB > card.MemMiB {
				return g, false // the least that the card must have
			}
			g = given{api.ModeExclusive, true, card.MemMiB, 100}
		}
	default:
		share := asksMemory || c.Cores > 0
		if isolation != "" && isolation != m.Only || isolation == "" && share && m.Only == api.ModeTimeslice {
			return g, false
		}
		g.mode = m.Only
		if !asksMemory {
			g.mib = max(1, card.MemMiB/int64(m.Replicas))
		}
		if !share {
			g.cores = 100 / m.Replicas
		}
		if m.OneOnly && c.Cards > 1 {
			return g, false
		}
	}
	switch g.mode {
	case api.ModeMPS:
		return g, m.MPS && m.MPSDown == "" && c.Cards == 1 && (card.Mode == "" || card.Mode == api.ModeMPS)
	case api.ModeTimeslice:
		return g, m.Timeslice && (card.Mode == api.ModeTimeslice || card.Mode == "" && (card.Touched || m.MPSDown == ""))
	case api.ModeVGPU:
		return g, card.Mode == api.ModeVGPU || card.Mode == "" && (card.Touched || m.MPSDown == "")
	}
	return g, !card.Touched && m.MPSDown == ""
}

// allowed is the plain model: whether a complete assignment (a card set per
// container) respects every rule, written without the search's shortcuts.
func allowed(n *fit.Node, isolation api.Mode, cs []api.ContainerRequest, sets []uint) bool {
	modes := make([]api.Mode, len(cs))
	for i := range n.Cards {
		card := &n.Cards[i]
		var on []int
		parts := make([]given, len(cs))
		for ci := range cs {
			if sets[ci]&(1<<i) == 0 {
				continue
			}
			on = append(on, ci)
			g, ok := give(isolation, &cs[ci], card)
			if !ok || modes[ci] != "" && modes[ci] != g.mode {
				return false
			}
			parts[ci], modes[ci] = g, g.mode
		}
		if len(on) == 0 {
			continue
		}
		if card.Blocked != "" || card.Whole {
			return false
		}
		// Each moment of the pod's life: an init container alone with the
		// sidecars before it, and at the end all apps and sidecars.
		moment := func(in func(ci int) bool) bool {
			var mib int64
			cores, slots := 0, 0
			asksCores := false
			for _, ci := range on {
				if !in(ci) {
					continue
				}
				g := parts[ci]
				slots++
				mib, cores = mib+g.mib, cores+g.cores
				asksCores = asksCores || g.cores > 0
			}
			return mib+card.Used.MemMiB <= card.MemMiB && slots+card.Used.Slots <= card.Slots &&
				(!asksCores || cores+card.Used.Cores <= 100)
		}
		for ci := range cs {
			if cs[ci].Kind == api.Init && !moment(func(o int) bool { return o == ci || o < ci && cs[o].Kind == api.Sidecar }) {
				return false
			}
		}
		if !moment(func(o int) bool { return cs[o].Kind != api.Init }) {
			return false
		}
	}
	return true
}

// possible tries every assignment.
func possible(n *fit.Node, isolation api.Mode, cs []api.ContainerRequest, sets []uint) bool {
	if len(sets) == len(cs) {
		return allowed(n, isolation, cs, sets)
	}
	c := cs[len(sets)]
	for set := uint(0); set < 1<<len(n.Cards); set++ {
		count := 0
		for b := set; b != 0; b &= b - 1 {
			count++
		}
		if count == c.Cards && possible(n, isolation, cs, append(sets[:len(sets):len(sets)], set)) {
			return true
		}
	}
	return false
}

func TestFitAgreesWithTryingEverything(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n, cs := genNode(t), genContainers(t)
		isolation := rapid.SampledFrom([]api.Mode{"", "", "", api.ModeVGPU, api.ModeExclusive, api.ModeMPS, api.ModeTimeslice}).Draw(t, "isolation")
		a, refusal := fit.NewAsk(api.Request{Containers: cs, Isolation: isolation})
		if refusal != nil {
			t.Fatalf("refused: %+v", refusal)
		}
		policy := rapid.SampledFrom([]score.Policy{score.Binpack, score.Spread}).Draw(t, "policy")
		p, refusal := fit.Fit(n, a, policy.Card)
		if q, ok := fit.Choose(n, a, policy.Card); ok != (refusal == nil) || !reflect.DeepEqual(p, q) {
			t.Fatalf("fit says %v, choose %v", p, q)
		}
		want := possible(n, isolation, cs, nil)
		if (refusal == nil) != want {
			t.Fatalf("fit says %v (%+v), trying everything says %t", p, refusal, want)
		}
		if refusal != nil {
			if refusal.Message(n, a, "") == "" || refusal.Reason == "" {
				t.Fatalf("a refusal without words: %+v", refusal)
			}
			return
		}
		sets := make([]uint, len(cs))
		for ci, cards := range p {
			for _, i := range cards {
				sets[ci] |= 1 << i
			}
			if len(cards) != cs[ci].Cards {
				t.Fatalf("container %d has %d cards, asked %d", ci, len(cards), cs[ci].Cards)
			}
		}
		if !allowed(n, isolation, cs, sets) {
			t.Fatalf("placement %v breaks a rule", p)
		}
		// What was placed is in the copy, and the original is as it was.
		before := append([]fit.Card(nil), n.Cards...)
		after := fit.Apply(n, a, p)
		if !reflect.DeepEqual(before, n.Cards) {
			t.Fatal("Apply changed its argument")
		}
		for i := range after.Cards {
			if c := &after.Cards[i]; c.Used.MemMiB > c.MemMiB && n.Cards[i].Used.MemMiB <= c.MemMiB || c.Used.Slots > c.Slots && n.Cards[i].Used.Slots <= c.Slots {
				t.Fatalf("card %d overbooked: %+v", i, c)
			}
		}
		if policy.Node(n, a, p) < 0 {
			t.Fatal("negative cost")
		}
		// The grant says what the rules say, and a card's pods stay in one mode.
		for ci, cards := range p {
			for k, i := range cards {
				got := a.Grant(n, p, "u").Containers[cs[ci].Name][k]
				g, _ := give(isolation, &cs[ci], &n.Cards[i])
				want := api.CardGrant{Card: n.Cards[i].UUID, Mode: g.mode, MemMiB: g.mib, Cores: g.cores, Fixed: g.mode == api.ModeMPS && g.cores > 0}
				if g.whole {
					want.MemMiB, want.Cores = 0, 0
				}
				if got != want {
					t.Fatalf("grant %+v, want %+v", got, want)
				}
			}
		}
		if err := a.Grant(n, p, "u").Validate(); err != nil {
			t.Fatal(err)
		}
		for i := range after.Cards {
			if was, is := n.Cards[i].Mode, after.Cards[i].Mode; is == fit.Mixed && was != fit.Mixed || was != "" && is != was {
				t.Fatalf("card %d was in mode %q and is in %q", i, was, is)
			}
		}
	})
}
