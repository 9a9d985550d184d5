package api_test

import (
	"errors"
	"reflect"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/carve-gpu/carve/api"
)

const example = `{"v":1,"uid":"u","node":"n1","gen":1,"containers":{"app":[{"card":"GPU-a","memMiB":8000,"cores":30,"mode":"vgpu"}],"side":[{"card":"GPU-b","mode":"mig","profile":"1g.10gb","start":3}]}}`

func grant(change func(g *api.Grant)) api.Grant {
	g := api.Grant{Version: 1, UID: "u", Node: "n1", Generation: 1, Containers: map[string][]api.CardGrant{"app": {{Card: "GPU-a", MemMiB: 8000, Cores: 30, Mode: api.ModeVGPU}}}}
	change(&g)
	return g
}

func TestTheFormatOfAGrant(t *testing.T) {
	g, err := api.DecodeGrant(example)
	if err != nil {
		t.Fatal(err)
	}
	start := 3
	want := api.Grant{Version: 1, UID: "u", Node: "n1", Generation: 1, Containers: map[string][]api.CardGrant{
		"app": {{Card: "GPU-a", MemMiB: 8000, Cores: 30, Mode: api.ModeVGPU}}, "side": {{Card: "GPU-b", Mode: api.ModeMIG, Profile: "1g.10gb", Start: &start}}}}
	if !reflect.DeepEqual(g, want) {
		t.Fatalf("%+v", g)
	}
	if s, err := g.Encode(); err != nil || s != example {
		t.Fatalf("%s, %v", s, err)
	}
	if _, err := api.DecodeGrant(""); !errors.Is(err, api.ErrNoGrant) {
		t.Fatalf("error %v", err)
	}
	// A field of a later writer is no fault.
	if _, err := api.DecodeGrant(strings.Replace(example, `"v":1`, `"v":1,"later":true`, 1)); err != nil {
		t.Fatal(err)
	}
}

func TestGrantsThatAreRefused(t *testing.T) {
	first := func(change func(c *api.CardGrant)) func(g *api.Grant) {
		return func(g *api.Grant) { change(&g.Containers["app"][0]) }
	}
	for name, c := range map[string]struct {
		change func(g *api.Grant)
		want   string
	}{
		"a later version":            {func(g *api.Grant) { g.Version = 2 }, "version 2"},
		"no UID":                     {func(g *api.Grant) { g.UID = "" }, "no pod UID"},
		"no node":                    {func(g *api.Grant) { g.Node = "" }, "no node"},
		"generation 0":               {func(g *api.Grant) { g.Generation = 0 }, "generation 0"},
		"no containers":              {func(g *api.Grant) { g.Containers = nil }, "no containers"},
		"a container without a name": {func(g *api.Grant) { g.Containers[""] = g.Containers["app"] }, "without a name"},
		"a container without a card": {func(g *api.Grant) { g.Containers["app"] = nil }, "0 cards"},
		"too many cards":             {func(g *api.Grant) { g.Containers["app"] = make([]api.CardGrant, 17) }, "17 cards"},
		"a card twice":               {func(g *api.Grant) { g.Containers["app"] = append(g.Containers["app"], g.Containers["app"][0]) }, "twice"},
		"no card":                    {first(func(c *api.CardGrant) { c.Card = "" }), "not a UUID"},
		"a card's name that is long": {first(func(c *api.CardGrant) { c.Card = strings.Repeat("x", 81) }), "not a UUID"},
		"an unknown mode":            {first(func(c *api.CardGrant) { c.Mode = "free" }), `"free"`},
		"negative memory":            {first(func(c *api.CardGrant) { c.MemMiB = -1 }), "-1 MiB"},
		"memory beyond any card":     {first(func(c *api.CardGrant) { c.MemMiB = 1 << 40 }), "MiB"},
		"a share without memory":     {first(func(c *api.CardGrant) { c.MemMiB = 0 }), "mode vgpu without memory"},
		"an MPS share without any":   {first(func(c *api.CardGrant) { c.MemMiB, c.Mode = 0, api.ModeMPS }), "mode mps without memory"},
		"a time slice without any":   {first(func(c *api.CardGrant) { c.MemMiB, c.Mode = 0, api.ModeTimeslice }), "mode timeslice without memory"},
		"a time slice and a policy":  {first(func(c *api.CardGrant) { c.Mode, c.Managed = api.ModeTimeslice, api.ManagedCount }), "holds no program to a share"},
		"two cards, one under MPS": {func(g *api.Grant) {
			g.Containers["app"] = []api.CardGrant{{Card: "GPU-a", MemMiB: 1, Mode: api.ModeVGPU}, {Card: "GPU-b", MemMiB: 1, Mode: api.ModeMPS}}
		}, "one MPS daemon"},
		"101 percent":                {first(func(c *api.CardGrant) { c.Cores = 101 }), "101 percent"},
		"an unknown policy":          {first(func(c *api.CardGrant) { c.Managed = "charge" }), `"charge"`},
		"a way to oversell":          {first(func(c *api.CardGrant) { c.Oversell = "disk" }), `"disk"`},
		"oversold what is forbidden": {first(func(c *api.CardGrant) { c.Oversell, c.Managed = api.OversellHost, api.ManagedForbid }), "forbidden"},
		"a policy without a share":   {first(func(c *api.CardGrant) { c.Mode, c.Managed = api.ModeExclusive, api.ManagedCount }), "holds no program to a share"},
		"an oversold card":           {first(func(c *api.CardGrant) { c.Mode, c.Oversell = api.ModeExclusive, api.OversellHost }), "holds no program to a share"},
		"an instance without place":  {first(func(c *api.CardGrant) { c.Mode, c.Profile = api.ModeMIG, "1g.10gb" }), "start"},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := grant(c.change).Encode(); err == nil || !strings.Contains(err.Error(), c.want) {
				t.Fatalf("error %v, want %q", err, c.want)
			}
		})
	}
	for _, s := range []string{"x", "[]", `{"v":1}`, example[:40], strings.Repeat(" ", 64<<10) + example, `{"v":"1"}`} {
		if g, err := api.DecodeGrant(s); err == nil || !reflect.DeepEqual(g, api.Grant{}) {
			t.Errorf("%.40q was read: %+v", s, g)
		}
	}
}

// An agent of before the policies on memory reads a grant that has them, and takes it
// for one without: managed memory is charged, and nothing is oversold.
func TestPoliciesOnMemoryMayBeOverlooked(t *testing.T) {
	s, err := grant(func(g *api.Grant) {
		g.Containers["app"][0].Managed, g.Containers["app"][0].Oversell = api.ManagedCount, api.OversellHost
	}).Encode()
	if err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(s, `{"v":1,`) || !strings.Contains(s, `"managed":"count","oversell":"host"`) {
		t.Errorf("%s", s)
	}
}

func genGrant(t *rapid.T) api.Grant {
	g := api.Grant{Version: 1, UID: rapid.StringMatching(`[0-9a-f-]{1,36}`).Draw(t, "uid"), Node: rapid.StringMatching(`[a-z0-9.-]{1,20}`).Draw(t, "node"),
		Generation: rapid.IntRange(1, 1000).Draw(t, "gen"), Containers: map[string][]api.CardGrant{}}
	for range rapid.IntRange(1, 4).Draw(t, "containers") {
		var cards []api.CardGrant
		for i := range rapid.IntRange(1, 4).Draw(t, "cards") {
			c := api.CardGrant{Card: "GPU-" + string(rune('a'+i)), Mode: rapid.SampledFrom([]api.Mode{api.ModeVGPU, api.ModeMIG, api.ModeExclusive, api.ModeMPS, api.ModeTimeslice}).Draw(t, "mode")}
			switch c.Mode {
			case api.ModeTimeslice, api.ModeMPS:
				c.MemMiB, c.Cores = rapid.Int64Range(1, 1<<24).Draw(t, "mem"), rapid.IntRange(0, 100).Draw(t, "cores")
			case api.ModeVGPU:
				c.MemMiB, c.Cores = rapid.Int64Range(1, 1<<24).Draw(t, "mem"), rapid.IntRange(0, 100).Draw(t, "cores")
				c.Managed = rapid.SampledFrom([]api.ManagedMemory{"", api.ManagedCount, api.ManagedForbid}).Draw(t, "managed")
				if c.Managed != api.ManagedForbid {
					c.Oversell = rapid.SampledFrom([]api.Oversell{"", api.OversellHost}).Draw(t, "oversell")
				}
				c.Fixed, c.Low = rapid.Bool().Draw(t, "fixed"), rapid.Bool().Draw(t, "low")
			case api.ModeMIG:
				start := rapid.IntRange(0, 7).Draw(t, "start")
				c.Profile, c.Start = "1g.10gb", &start
			}
			if c.Mode == api.ModeMPS { // one card a container
				cards = []api.CardGrant{c}
				break
			}
			cards = append(cards, c)
		}
		g.Containers[rapid.StringMatching(`[a-z][a-z0-9-]{0,10}`).Draw(t, "name")] = cards
	}
	return g
}

func TestGrantsComeBackAsTheyWere(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		g := genGrant(t)
		s, err := g.Encode()
		if err != nil {
			t.Fatal(err)
		}
		back, err := api.DecodeGrant(s)
		if err != nil || !reflect.DeepEqual(back, g) {
			t.Fatalf("%+v, %v\nwant %+v", back, err, g)
		}
	})
}

func FuzzDecodeGrant(f *testing.F) {
	f.Add(example)
	f.Add(`{"v":1,"uid":"u","node":"n","gen":1,"containers":{"a":[{"card":"GPU-a","mode":"exclusive"}]}}`)
	f.Add(`{"v":1,"containers":{"a":null}}`)
	f.Add(`{"v":1e0}`)
	f.Add(``)
	f.Fuzz(func(t *testing.T, s string) {
		g, err := api.DecodeGrant(s)
		if err != nil {
			return
		}
		if err := g.Validate(); err != nil {
			t.Fatalf("read, but not valid: %v", err)
		}
		out, err := g.Encode()
		if err != nil {
			t.Fatalf("read, but not written: %v", err)
		}
		again, err := api.DecodeGrant(out)
		if err != nil || !reflect.DeepEqual(again, g) {
			t.Fatalf("%+v, then %+v, %v", g, again, err)
		}
	})
}
