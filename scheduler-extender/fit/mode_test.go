package fit_test

import (
	"fmt"
	"reflect"
	"strings"
	"testing"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/scheduler-extender/fit"
	"github.com/carve-gpu/carve/scheduler-extender/score"
)

// Each card with what it answers to each pod: the mode that the pod gets there, or the
// words of the refusal.
func TestModesOfACard(t *testing.T) {
	serves := &fit.Modes{MPS: true, Timeslice: true}
	replicas := func(mode api.Mode, n int) *fit.Modes {
		return &fit.Modes{MPS: true, Timeslice: true, Only: mode, Replicas: n}
	}
	with := func(change func(c *fit.Card)) fit.Card { c := card(0); change(&c); return c }
	taken := func(mode api.Mode, m *fit.Modes) fit.Card {
		return with(func(c *fit.Card) {
			c.Modes, c.Mode, c.Touched, c.Used = m, mode, true, fit.Amount{MemMiB: 100, Slots: 1}
		})
	}
	pods := map[string]api.Request{
		"plain":      {Containers: []api.ContainerRequest{{Name: "app", Cards: 1, Whole: true}}},
		"two":        {Containers: []api.ContainerRequest{{Name: "app", Cards: 2, Whole: true}}},
		"share":      {Containers: []api.ContainerRequest{mem("app", api.App, 8000)}},
		"exclusive":  {Isolation: api.ModeExclusive, Containers: []api.ContainerRequest{{Name: "app", Cards: 1, Whole: true}}},
		"vgpu":       {Isolation: api.ModeVGPU, Containers: []api.ContainerRequest{mem("app", api.App, 8000)}},
		"mps":        {Isolation: api.ModeMPS, Containers: []api.ContainerRequest{mem("app", api.App, 8000)}},
		"mps plain":  {Isolation: api.ModeMPS, Containers: []api.ContainerRequest{{Name: "app", Cards: 1, Whole: true}}},
		"slice":      {Isolation: api.ModeTimeslice, Containers: []api.ContainerRequest{mem("app", api.App, 8000)}},
		"part of it": {Isolation: api.ModeTimeslice, Containers: []api.ContainerRequest{{Name: "app", Cards: 1, Cores: 30}}},
	}
	for name, c := range map[string]struct {
		card fit.Card
		want map[string]string
	}{
		"an empty card of a node that serves all": {with(func(c *fit.Card) { c.Modes = serves }), map[string]string{
			"plain": "exclusive", "share": "vgpu", "exclusive": "exclusive", "vgpu": "vgpu", "mps": "mps", "slice": "timeslice",
			"mps plain":  "isolation mps needs nvidia.com/gpumem or nvidia.com/gpumem-percentage, except on cards that NVIDIA's configuration gives in replicas",
			"part of it": "isolation timeslice needs nvidia.com/gpumem"}},
		"one of an agent from before": {card(0), map[string]string{
			"plain": "exclusive", "share": "vgpu", "mps": "the node doesn't serve mode mps on the card: it needs the MPS keeper", "slice": "the node doesn't serve mode timeslice"}},
		"one with pods under MPS": {taken(api.ModeMPS, serves), map[string]string{
			"plain": "asked the whole card, which is shared", "share": "asked mode vgpu, the card is in mode mps until its pods are gone",
			"mps": "mps", "slice": "asked mode timeslice, the card is in mode mps"}},
		"one with shares": {taken(api.ModeVGPU, serves), map[string]string{"share": "vgpu", "mps": "asked mode mps, the card is in mode vgpu", "slice": "asked mode timeslice, the card is in mode vgpu"}},
		"one whose pods are in several modes": {taken(fit.Mixed, serves), map[string]string{
			"share": "its pods are in several modes", "mps": "its pods are in several modes", "slice": "its pods are in several modes"}},
		"one whose MPS daemon is down": {with(func(c *fit.Card) { c.Modes = &fit.Modes{MPS: true, Timeslice: true, MPSDown: "it died twice"} }), map[string]string{
			"share": "MPS has the card still: it died twice", "slice": "MPS has the card still", "plain": "MPS has the card still",
			"mps": "the card takes nothing new in mode mps: it died twice"}},
		"one in four time slices": {with(func(c *fit.Card) { c.Modes, c.Slots = replicas(api.ModeTimeslice, 4), 4 }), map[string]string{
			"plain": "timeslice", "slice": "timeslice", "part of it": "timeslice",
			"share":     "asked a share without isolation, NVIDIA's configuration gives the card in 4 replicas of mode timeslice, where nothing holds a share",
			"exclusive": "asked isolation exclusive, NVIDIA's configuration gives the card in 4 replicas of mode timeslice",
			"vgpu":      "asked isolation vgpu", "mps": "asked isolation mps", "mps plain": "asked isolation mps"}},
		"one in four replicas under MPS": {with(func(c *fit.Card) { c.Modes, c.Slots = replicas(api.ModeMPS, 4), 4 }), map[string]string{
			"plain": "mps", "share": "mps", "mps": "mps", "mps plain": "mps", "slice": "asked isolation timeslice", "exclusive": "asked isolation exclusive"}},
		"one in replicas that is still full of shares": {taken(api.ModeVGPU, replicas(api.ModeTimeslice, 4)), map[string]string{
			"plain": "asked mode timeslice, the card is in mode vgpu until its pods are gone", "share": "asked a share without isolation"}},
		"one whose replicas are all taken": {with(func(c *fit.Card) {
			c.Modes, c.Mode, c.Slots, c.Touched, c.Used = replicas(api.ModeTimeslice, 2), api.ModeTimeslice, 2, true, fit.Amount{MemMiB: 80 * gib, Cores: 100, Slots: 2}
		}), map[string]string{
			"plain": "asked a replica; the card, in 2 replicas, takes 2 containers and has 2", "slice": "asked a share; the card, in 2 replicas, takes 2 containers and has 2"}},
	} {
		for pod, want := range c.want {
			t.Run(name+"/"+pod, func(t *testing.T) {
				a, refusal := fit.NewAsk(pods[pod])
				if refusal != nil {
					t.Fatal(refusal)
				}
				n := node(c.card)
				p, refusal := fit.Fit(n, a, score.Binpack.Card)
				got := ""
				if refusal != nil {
					got = refusal.Message(n, a, "")
				} else {
					got = string(a.Grant(n, p, "u").Containers["app"][0].Mode)
				}
				if got != want && (refusal == nil || !strings.HasPrefix(got, "n1: card 0 (GPU-a, A100-80): "+want)) {
					t.Fatalf("%q, want %q", got, want)
				}
			})
		}
	}
}

// node-18: two replicas for one container are of two cards, or refused.
func TestReplicasOfSeveralCards(t *testing.T) {
	replicated := func(mode api.Mode, one bool) fit.Card {
		c := card(0)
		c.Modes, c.Slots = &fit.Modes{MPS: true, Timeslice: true, Only: mode, Replicas: 4, OneOnly: one}, 4
		return c
	}
	two := api.Request{Containers: []api.ContainerRequest{{Name: "app", Cards: 2, Whole: true}}}
	for name, c := range map[string]struct {
		node *fit.Node
		want string
	}{
		"two cards in replicas":   {node(replicated(api.ModeTimeslice, false), replicated(api.ModeTimeslice, false)), "timeslice 20480 25"},
		"two whole ones":          {node(replicated(api.ModeTimeslice, false), card(0), card(0)), "exclusive 0 0"},
		"one of each":             {node(replicated(api.ModeTimeslice, false), card(0)), "n1: asked 2 cards, 1 could be whole and 1 replicas: a container's cards are all of one kind"},
		"the file allows one":     {node(replicated(api.ModeTimeslice, true), replicated(api.ModeTimeslice, true)), "0 of 2 cards fit; nearest miss card 0 (GPU-a, A100-80): asked 2 cards; NVIDIA's configuration has failRequestsGreaterThanOne"},
		"one card under MPS each": {node(replicated(api.ModeMPS, false), replicated(api.ModeMPS, false)), "in mode mps a container has one card"},
	} {
		t.Run(name, func(t *testing.T) {
			a, _ := fit.NewAsk(two)
			p, refusal := fit.Fit(c.node, a, score.Binpack.Card)
			got := ""
			if refusal != nil {
				got = refusal.Message(c.node, a, "")
			} else {
				g := a.Grant(c.node, p, "u").Containers["app"][1]
				got = fmt.Sprint(g.Mode, " ", g.MemMiB, " ", g.Cores)
			}
			if !strings.Contains(got, c.want) {
				t.Fatalf("%q, want %q", got, c.want)
			}
		})
	}
	// Who is content with a replica leaves the whole cards to others.
	a, _ := fit.NewAsk(api.Request{Containers: []api.ContainerRequest{{Name: "app", Cards: 1, Whole: true}}})
	for _, policy := range []score.Policy{score.Binpack, score.Spread} {
		mixed := node(card(0), replicated(api.ModeTimeslice, false))
		p, _ := fit.Fit(mixed, a, policy.Card)
		if p[0][0] != 1 {
			t.Errorf("%s: the whole card goes first", policy.Name)
		}
		whole, some := node(card(0)), node(replicated(api.ModeTimeslice, false))
		pw, _ := fit.Fit(whole, a, policy.Card)
		ps, _ := fit.Fit(some, a, policy.Card)
		if policy.Node(some, a, ps) >= policy.Node(whole, a, pw) {
			t.Errorf("%s: the node with the whole card goes first", policy.Name)
		}
	}
}

// Pods of several containers take the search, which must know what cards differ in.
func TestSeveralContainersAndReplicas(t *testing.T) {
	sliced := card(0)
	sliced.Modes = &fit.Modes{Timeslice: true, Only: api.ModeTimeslice, Replicas: 32}
	any := func(*fit.Card, fit.Amount) int64 { return 0 }
	plain := func(name string, cards int) api.ContainerRequest {
		return api.ContainerRequest{Name: name, Cards: cards, Whole: true}
	}
	// The share can't be on the second card, so the other container must: that the
	// first led nowhere says nothing of it.
	n := node(card(0), sliced)
	a := ask(t, plain("a", 1), mem("b", api.App, 8000))
	if p, refusal := fit.Fit(n, a, any); !reflect.DeepEqual(p, fit.Placement{{1}, {0}}) {
		t.Errorf("%v, %+v", p, refusal)
	}
	// One whole card and one replica aren't two cards.
	n = node(sliced, card(0), card(gib))
	a = ask(t, plain("a", 2), mem("b", api.App, 8000))
	if p, refusal := fit.Fit(n, a, any); refusal == nil || !strings.Contains(refusal.Message(n, a, ""), "1 could be whole and 1 replicas") {
		t.Errorf("%v, %+v", p, refusal)
	}
	n = node(sliced, card(0), sliced, card(gib))
	if p, refusal := fit.Fit(n, a, any); !reflect.DeepEqual(p, fit.Placement{{0, 2}, {1}}) && !reflect.DeepEqual(p, fit.Placement{{0, 2}, {3}}) {
		t.Errorf("%v, %+v", p, refusal)
	}
}

// A card that doesn't serve a mode may do so some day; one of another model never will. The
// pod waits for the first, so that is the nearer miss.
func TestAModeThatIsNotServedYetIsNearerThanAnotherModel(t *testing.T) {
	r := api.Request{Isolation: api.ModeMPS, Models: api.Selector{Only: []string{"A100"}}, Containers: []api.ContainerRequest{mem("app", api.App, 8000)}}
	a, refusal := fit.NewAsk(r)
	if refusal != nil {
		t.Fatal(refusal)
	}
	any := func(*fit.Card, fit.Amount) int64 { return 0 }
	unserved, other := card(0), card(0)
	unserved.Modes = &fit.Modes{Timeslice: true}
	other.Model = "L20"
	_, not := fit.Fit(node(unserved), a, any)
	_, never := fit.Fit(node(other), a, any)
	if not == nil || never == nil || not.Never || !never.Never || !not.Nearer(never) || never.Nearer(not) {
		t.Errorf("%+v and %+v", not, never)
	}
}

// A privileged container sees every card of its node whole, so its node refuses it a share,
// and no policy knows of replicas that a configuration makes: it isn't placed where it would
// be refused for ever, and is served elsewhere.
func TestPrivilegedContainersGetNoReplicaUnderMPS(t *testing.T) {
	replicated := func(mode api.Mode) fit.Card {
		c := card(0)
		c.Modes, c.Slots = &fit.Modes{MPS: true, Timeslice: true, Only: mode, Replicas: 4}, 4
		return c
	}
	plain := func(name string, privileged bool) api.ContainerRequest {
		return api.ContainerRequest{Name: name, Cards: 1, Whole: true, Privileged: privileged}
	}
	for name, c := range map[string]struct {
		isolation  api.Mode
		containers []api.ContainerRequest
		node       *fit.Node
		want       string // the modes of app, or the refusal
	}{
		"on a card under MPS alone": {"", []api.ContainerRequest{plain("app", true)}, node(replicated(api.ModeMPS)),
			"n1: card 0 (GPU-a, A100-80): a privileged container sees the node's cards whole, so nothing holds it to a replica of mode mps: it is served on cards in other modes"},
		"beside a whole card":            {"", []api.ContainerRequest{plain("app", true)}, node(replicated(api.ModeMPS), card(0)), "exclusive"},
		"beside a slice of time":         {"", []api.ContainerRequest{plain("app", true)}, node(replicated(api.ModeMPS), replicated(api.ModeTimeslice)), "timeslice"},
		"without the privilege":          {"", []api.ContainerRequest{plain("app", false)}, node(replicated(api.ModeMPS), card(0)), "mps"},
		"where another container has it": {"", []api.ContainerRequest{plain("app", false), plain("b", true)}, node(replicated(api.ModeMPS), card(0)), "mps"},
		// That passes the policy only where the namespace lets it.
		"asked for by name": {api.ModeMPS, []api.ContainerRequest{plain("app", true)}, node(replicated(api.ModeMPS), card(0)), "mps"},
	} {
		t.Run(name, func(t *testing.T) {
			a, refusal := fit.NewAsk(api.Request{Isolation: c.isolation, Containers: c.containers})
			if refusal != nil {
				t.Fatal(refusal)
			}
			p, refusal := fit.Fit(c.node, a, score.Binpack.Card)
			got := ""
			if refusal != nil {
				got = refusal.Message(c.node, a, "")
			} else {
				got = string(a.Grant(c.node, p, "u").Containers["app"][0].Mode)
			}
			if got != c.want {
				t.Fatalf("%q, want %q", got, c.want)
			}
		})
	}
	with, _ := fit.NewAsk(api.Request{Containers: []api.ContainerRequest{plain("app", true)}})
	without, _ := fit.NewAsk(api.Request{Containers: []api.ContainerRequest{plain("app", false)}})
	if with.Key() == without.Key() {
		t.Error("the answers to one are given to the other")
	}
}

// An MPS server takes so many clients, and each container is one at least: the next one is
// told, and isn't placed where its contexts would fail.
func TestClientsOfAnMPSServerAreCounted(t *testing.T) {
	with := func(slots, clients, used int) fit.Card {
		c := card(0)
		c.Modes = &fit.Modes{MPS: true, Timeslice: true, Clients: clients}
		if c.Slots = slots; used > 0 {
			c.Mode, c.Touched, c.Used = api.ModeMPS, true, fit.Amount{MemMiB: int64(used), Slots: used}
		}
		return c
	}
	some := func(n int) (out []api.ContainerRequest) {
		for i := range n {
			out = append(out, mem(fmt.Sprint("c", i), api.App, 100))
		}
		return out
	}
	for name, c := range map[string]struct {
		isolation  api.Mode
		containers []api.ContainerRequest
		card       fit.Card
		want       string // of the refusal, empty for none
	}{
		"the last one before Volta": {api.ModeMPS, some(1), with(32, 16, 15), ""},
		"one more":                  {api.ModeMPS, some(1), with(32, 16, 16), "asked to be a client of the card's MPS server, which takes 16; the 16 containers there are one each at least"},
		"the last of 48":            {api.ModeMPS, some(1), with(256, 48, 47), ""},
		"one more of 48":            {api.ModeMPS, some(1), with(256, 48, 48), "which takes 48"},
		"two where there is one":    {api.ModeMPS, some(2), with(32, 16, 15), "each container fits alone, together they don't"},
		"fewer slots than clients":  {api.ModeMPS, some(1), with(4, 48, 4), "asked a slot, free 0 of 4"},
		"seventeen at once":         {api.ModeMPS, some(17), with(32, 16, 0), "together they don't"},
		"seventeen of the library":  {"", some(17), with(32, 16, 0), ""},
	} {
		t.Run(name, func(t *testing.T) {
			a, refusal := fit.NewAsk(api.Request{Isolation: c.isolation, Containers: c.containers})
			if refusal != nil {
				t.Fatal(refusal)
			}
			n := node(c.card)
			p, refusal := fit.Fit(n, a, score.Binpack.Card)
			got := ""
			if refusal != nil {
				got = refusal.Message(n, a, "")
			} else if !a.Stands(n, a.Grant(n, p, "u")) {
				t.Error("what was just placed doesn't stand")
			}
			if (got == "") != (c.want == "") || !strings.Contains(got, c.want) {
				t.Fatalf("%q, want %q", got, c.want)
			}
		})
	}
}
