package agent

import (
	"strings"
	"testing"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/vgpu/gpu"
)

func appOrder(names ...string) []podContainer {
	var out []podContainer
	for _, n := range names {
		out = append(out, podContainer{Name: n})
	}
	return out
}

func whole(card string) []api.CardGrant {
	return []api.CardGrant{{Card: card, Mode: api.ModeExclusive}}
}

func TestAdmit(t *testing.T) {
	cards := map[string]gpu.Card{}
	inventory, _ := (&twoCards{}).Inventory()
	for _, c := range inventory.Cards {
		cards[c.UUID] = c
	}
	bad := cards[cardB]
	bad.UUID, bad.Fault = "GPU-bad", "fell off the bus"
	cards[bad.UUID] = bad
	capacity := bad.MemoryMiB() // 81408
	app := func(cards []api.CardGrant) map[string][]api.CardGrant {
		return map[string][]api.CardGrant{"app": cards}
	}
	hold := func(uid string, g map[string][]api.CardGrant) map[string]record {
		return map[string]record{uid: {State: stateHeld, Grant: grantOf(uid, 2, g), Order: appOrder("app")}}
	}
	other := grantOf("u", 1, app(shareOf(cardA, 1, 0)))
	other.Node = "n2"
	for name, c := range map[string]struct {
		grant api.Grant
		held  map[string]record
		want  string // "" admits
	}{
		"fits":                           {grantOf("u", 1, app(shareOf(cardA, 8000, 30))), nil, ""},
		"fills the card to the last MiB": {grantOf("u", 1, app(shareOf(cardA, capacity, 100))), nil, ""},
		"one MiB more":                   {grantOf("u", 1, app(shareOf(cardA, capacity+1, 0))), nil, "has 81408 MiB, 0 are in use"},
		"beside another, to the last MiB": {grantOf("u", 1, app(shareOf(cardA, capacity-1000, 0))),
			hold("v", app(shareOf(cardA, 1000, 0))), ""},
		"beside another, one MiB more": {grantOf("u", 1, app(shareOf(cardA, capacity-999, 0))),
			hold("v", app(shareOf(cardA, 1000, 0))), "1000 are in use by other pods"},
		"the other is on another card": {grantOf("u", 1, app(shareOf(cardA, capacity, 0))),
			hold("v", app(shareOf(cardB, 1000, 0))), ""},
		"compute beside another": {grantOf("u", 1, app(shareOf(cardA, 1, 71))),
			hold("v", app(shareOf(cardA, 1, 30))), "30 percent"},
		"a whole card":               {grantOf("u", 1, app(whole(cardA))), nil, ""},
		"a whole card that is taken": {grantOf("u", 1, app(whole(cardA))), hold("v", app(shareOf(cardA, 1, 0))), "can't be handed out whole"},
		"a share of a card held whole": {grantOf("u", 1, app(shareOf(cardA, 1, 0))),
			hold("v", app(whole(cardA))), "held whole by another pod"},
		"of another pod":  {grantOf("w", 1, app(shareOf(cardA, 1, 0))), nil, "copied or forged"},
		"of another node": {other, nil, "is for node n2"},
		"a card that isn't here": {grantOf("u", 1, app(shareOf("GPU-elsewhere", 1, 0))), nil,
			"which this node doesn't have"},
		"a card that fails": {grantOf("u", 1, app(shareOf("GPU-bad", 1, 0))), nil, "fell off the bus"},
		"a card that fails, resized": {grantOf("u", 3, app(shareOf("GPU-bad", 2, 0))),
			hold("u", app(shareOf("GPU-bad", 1, 0))), ""},
		"a container that the pod doesn't have": {grantOf("u", 1, map[string][]api.CardGrant{"ghost": shareOf(cardA, 1, 0)}), nil, "names container ghost"},
		"a name that is a path":                 {grantOf("u", 1, map[string][]api.CardGrant{"../../etc": shareOf(cardA, 1, 0)}), nil, "no container name"},
		"a mode of later days": {grantOf("u", 1, app([]api.CardGrant{{Card: cardA, Mode: api.ModeMIG}})), nil,
			"mode mig, which this agent doesn't serve"},
		"a share and a whole card at once": {grantOf("u", 1, app(append(shareOf(cardA, 1, 0), whole(cardB)...))), nil, "of one kind only"},
		"a resize":                         {grantOf("u", 3, app(shareOf(cardA, 2, 0))), hold("u", app(shareOf(cardA, 1, 0))), ""},
		"a stale generation":               {grantOf("u", 1, app(shareOf(cardA, 2, 0))), hold("u", app(shareOf(cardA, 1, 0))), "it is stale"},
		"the same generation, other amount": {grantOf("u", 2, app(shareOf(cardA, 2, 0))),
			hold("u", app(shareOf(cardA, 1, 0))), "same generation 2"},
		"a resize to another card": {grantOf("u", 3, app(shareOf(cardB, 1, 0))), hold("u", app(shareOf(cardA, 1, 0))), "moves container app"},
		"a resize to more cards": {grantOf("u", 3, app(append(shareOf(cardA, 1, 0), shareOf(cardB, 1, 0)...))),
			hold("u", app(shareOf(cardA, 1, 0))), "changes amounts only"},
	} {
		t.Run(name, func(t *testing.T) {
			n := node{name: nodeName, cards: cards, held: c.held}
			err := n.admit(candidate{grant: c.grant, uid: "u", order: appOrder("app", "../../etc")})
			if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want %q", err, c.want)
			}
		})
	}
}

// share-11, share-12, share-28, node-22: a GPU-less init container first, an
// init container, a sidecar and two app containers, each with a grant of its own.
func TestPeaks(t *testing.T) {
	order := []podContainer{
		{"copy", api.Init}, {"before", api.Init}, {"side", api.Sidecar}, {"after", api.Init}, {"a", api.App}, {"b", api.App},
	}
	for name, c := range map[string]struct {
		containers map[string][]api.CardGrant
		want       amount
	}{
		"a sidecar adds to the app containers": {map[string][]api.CardGrant{"side": shareOf(cardA, 60000, 10), "a": shareOf(cardA, 60000, 20)}, amount{memMiB: 120000, cores: 30, slots: 2}},
		"app containers add up":                {map[string][]api.CardGrant{"a": shareOf(cardA, 1, 1), "b": shareOf(cardA, 2, 2)}, amount{memMiB: 3, cores: 3, slots: 2}},
		"an init container shares the peak":    {map[string][]api.CardGrant{"before": shareOf(cardA, 5, 0), "a": shareOf(cardA, 4, 9)}, amount{memMiB: 5, cores: 9, slots: 1}},
		"one that runs beside the sidecar":     {map[string][]api.CardGrant{"side": shareOf(cardA, 3, 0), "after": shareOf(cardA, 5, 0), "a": shareOf(cardA, 4, 0)}, amount{memMiB: 8, slots: 2}},
		"one that ran before the sidecar":      {map[string][]api.CardGrant{"side": shareOf(cardA, 3, 0), "before": shareOf(cardA, 5, 0), "a": shareOf(cardA, 1, 0)}, amount{memMiB: 5, slots: 2}},
		"a sidecar alone":                      {map[string][]api.CardGrant{"side": shareOf(cardA, 3, 1)}, amount{memMiB: 3, cores: 1, slots: 1}},
		"a whole card":                         {map[string][]api.CardGrant{"a": whole(cardA)}, amount{slots: 1, whole: true}},
	} {
		t.Run(name, func(t *testing.T) {
			g := grantOf("u", 1, c.containers)
			// What is on another card doesn't count here.
			g.Containers["b"] = append(g.Containers["b"], shareOf(cardB, 7, 7)...)
			got := peaks(g, order)
			if got[cardA] != c.want || got[cardB] != (amount{memMiB: 7, cores: 7, slots: 1}) || len(got) != 2 {
				t.Errorf("got %+v, want %+v", got, c.want)
			}
		})
	}
}
