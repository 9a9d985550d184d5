package ledger_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/v1alpha1"
	"github.com/carve-gpu/carve/scheduler-extender/fit"
	"github.com/carve-gpu/carve/scheduler-extender/ledger"
	"github.com/carve-gpu/carve/scheduler-extender/score"
)

// offerOf books what a request asks for on n1.
func offerOf(t testing.TB, l *ledger.Ledger, name string, r api.Request) error {
	t.Helper()
	a, refusal := fit.NewAsk(r)
	if refusal != nil {
		t.Fatal(refusal)
	}
	return l.Offer(ledger.Offer{Ref: ref(name), Node: l.Node("n1"), Ask: a, Prefer: score.Binpack.Card}, epoch)
}

// What a report says of an MPS server's clients bounds the card's containers in that mode; an
// older agent's says nothing, and has a card of today.
func TestClientsOfAnMPSServerComeFromTheReport(t *testing.T) {
	for clients, want := range map[int32]int{0: api.MaxMPSClients, 16: 16, 48: 48} {
		r := report("n1", 80000, 1)
		r.Status.Cards[0].Modes, r.Status.Cards[0].MPSClients = []string{"timeslice", "mps"}, clients
		l := books(t, 80000)
		l.SetReport(r, epoch)
		if got := l.Node("n1").Snapshot().View.Cards[0].Modes.Clients; got != want {
			t.Errorf("%d reported: %d, want %d", clients, got, want)
		}
	}
	for major, want := range map[int]int{0: 48, 6: 16, 7: 48, 9: 48} {
		if got := api.MPSClients(major); got != want {
			t.Errorf("compute capability %d: %d clients, want %d", major, got, want)
		}
	}
}

func TestSharesOfFixedSizeAreNotResized(t *testing.T) {
	for mode, want := range map[api.Mode]string{
		api.ModeMPS:       "container app has card GPU-n1-0 in mode mps: the limits of a client of MPS are fixed when it starts; only shares of mode vgpu change their size",
		api.ModeTimeslice: "in mode timeslice: its amounts are counted only",
		api.ModeExclusive: "in mode exclusive: only shares of mode vgpu",
	} {
		l := books(t, 80000)
		c := api.CardGrant{Card: "GPU-n1-0", Mode: mode}
		if mode.Share() {
			c.MemMiB = 8000
		}
		g := api.Grant{Version: 1, UID: "uid-a", Node: "n1", Generation: 1, Containers: map[string][]api.CardGrant{"app": {c}}}
		l.SetPod(seen("a", g), epoch)
		_, err := l.BeginResize(ref("a"), resizeTo("app", 9000, -1))
		var refusal *ledger.ResizeRefusal
		if !errors.As(err, &refusal) || refusal.Reason != fit.ReasonIsolation || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", mode, err)
		}
	}
}

// A quota on memory counts what pods ask of it: a replica asks for none, as a whole card
// does.
func TestReplicasAreNoMatterOfTheQuotaOfMemory(t *testing.T) {
	l := grown(t, 9000, 0)
	r := report("n1", 80000, 2, of("uid-a", "app", 9000, 2))
	r.Status.Cards[1].Modes = []string{"timeslice", "mps"}
	r.Status.Cards[1].Sharing = &v1alpha1.Sharing{Mode: "timeslice", Replicas: 4}
	l.SetReport(r, epoch)
	if err := offerOf(t, l, "replica", api.Request{Containers: []api.ContainerRequest{{Name: "app", Cards: 1, Whole: true}}}); err != nil {
		t.Errorf("a replica: %v", err)
	}
	err := offerOf(t, l, "slice", api.Request{Isolation: api.ModeTimeslice, Containers: []api.ContainerRequest{{Name: "app", Cards: 1, MemMiB: 1500}}})
	var over *ledger.QuotaRefusal
	if !errors.As(err, &over) || over.Amount.MemMiB != 1500 {
		t.Errorf("a slice of 1500 MiB: %v", err)
	}
	if err := offerOf(t, l, "small", api.Request{Isolation: api.ModeTimeslice, Containers: []api.ContainerRequest{{Name: "app", Cards: 1, MemMiB: 1000}}}); err != nil {
		t.Errorf("a slice of 1000 MiB: %v", err)
	}
}

// What a card is given as can change between offer and bind: an offer is bound as it would
// be made now, on its node, or not at all.
func TestAnOfferIsCheckedAgainWhenItsCardIsGivenOtherwise(t *testing.T) {
	plain := api.Request{Containers: []api.ContainerRequest{{Name: "app", Cards: 1, Whole: true}}}
	memory := api.Request{Containers: []api.ContainerRequest{{Name: "app", Cards: 1, MemMiB: 8000}}}
	mps := api.Request{Isolation: api.ModeMPS, Containers: memory.Containers}
	replicas := func(mode string, n int32) func(*v1alpha1.Card) {
		return func(c *v1alpha1.Card) { c.Sharing = &v1alpha1.Sharing{Mode: mode, Replicas: n} }
	}
	nothing := func(*v1alpha1.Card) {}
	all := func(r *v1alpha1.GPUNode, change func(*v1alpha1.Card)) {
		for i := range r.Status.Cards {
			change(&r.Status.Cards[i])
		}
	}
	for name, c := range map[string]struct {
		asks   api.Request
		cards  int
		first  func(*v1alpha1.Card)
		change func(*v1alpha1.GPUNode)
		want   string // card, mode and amounts, or nothing
	}{
		"nothing of it changes":          {memory, 2, nothing, func(r *v1alpha1.GPUNode) { r.Status.Cards[1].Sharing = &v1alpha1.Sharing{Mode: "mps", Replicas: 2} }, "GPU-n1-0 vgpu 8000"},
		"there are fewer replicas":       {plain, 1, replicas("timeslice", 4), func(r *v1alpha1.GPUNode) { r.Status.Cards[0].Sharing.Replicas = 2 }, "GPU-n1-0 timeslice 40000"},
		"replicas become whole":          {plain, 1, replicas("timeslice", 4), func(r *v1alpha1.GPUNode) { r.Status.Cards[0].Sharing = nil }, "GPU-n1-0 exclusive 0"},
		"replicas are in another mode":   {plain, 1, replicas("timeslice", 4), func(r *v1alpha1.GPUNode) { r.Status.Cards[0].Sharing.Mode = "mps" }, "GPU-n1-0 mps 20000"},
		"a share's card is in replicas":  {memory, 2, nothing, func(r *v1alpha1.GPUNode) { replicas("timeslice", 4)(&r.Status.Cards[0]) }, "GPU-n1-1 vgpu 8000"},
		"so are all":                     {memory, 2, nothing, func(r *v1alpha1.GPUNode) { all(r, replicas("timeslice", 4)) }, ""},
		"the card is taken out":          {memory, 2, nothing, func(r *v1alpha1.GPUNode) { r.Spec.CordonedCards = []string{"GPU-n1-0"} }, "GPU-n1-1 vgpu 8000"},
		"the card is ill":                {memory, 1, nothing, func(r *v1alpha1.GPUNode) { r.Status.Cards[0].Health.State = v1alpha1.Lost }, ""},
		"the card is gone":               {memory, 2, nothing, func(r *v1alpha1.GPUNode) { r.Status.Cards = r.Status.Cards[1:] }, "GPU-n1-1 vgpu 8000"},
		"the card has less memory":       {memory, 1, nothing, func(r *v1alpha1.GPUNode) { r.Status.Cards[0].MemoryMiB = 4000 }, ""},
		"its MPS daemon is down":         {mps, 2, nothing, func(r *v1alpha1.GPUNode) { r.Status.Cards[0].MPS = &v1alpha1.MPS{Reason: "it died"} }, "GPU-n1-1 mps 8000"},
		"the node serves the mode never": {mps, 2, nothing, func(r *v1alpha1.GPUNode) { all(r, func(c *v1alpha1.Card) { c.Modes = nil }) }, ""},
		"somebody came in another mode": {memory, 1, nothing, func(r *v1alpha1.GPUNode) {
			s := slice("uid-x", "app", 100)
			s.Mode = "mps"
			r.Status.Cards[0].Slices = []v1alpha1.Slice{s}
		}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			node := func() *v1alpha1.GPUNode {
				r := report("n1", 80000, c.cards)
				all(r, func(card *v1alpha1.Card) { card.Modes = []string{"timeslice", "mps"}; c.first(card) })
				return r
			}
			begun := func(l *ledger.Ledger) string {
				g, _, err := l.BeginBind(ref("a"), "n1", epoch)
				if err != nil {
					if !errors.Is(err, ledger.ErrChanged) {
						t.Errorf("error %v", err)
					}
					return ""
				}
				app := g.Containers["app"][0]
				return fmt.Sprint(app.Card, " ", app.Mode, " ", app.MemMiB)
			}
			l := books(t, 80000)
			l.SetReport(node(), epoch)
			if err := offerOf(t, l, "a", c.asks); err != nil {
				t.Fatal(err)
			}
			now := node()
			c.change(now)
			l.SetReport(now, epoch)
			if got := begun(l); got != c.want {
				t.Fatalf("%q, want %q", got, c.want)
			}
			if held, ok := l.Held("uid-a"); ok != (c.want != "") {
				t.Errorf("it holds %+v", held)
			}

			// One whose earlier write may have had an effect holds what it had.
			if c.want == "" {
				l := books(t, 80000)
				l.SetReport(node(), epoch)
				if err := offerOf(t, l, "a", c.asks); err != nil {
					t.Fatal(err)
				}
				if _, _, err := l.BeginBind(ref("a"), "n1", epoch); err != nil {
					t.Fatal(err)
				}
				l.EndBind("uid-a", ledger.Unknown, epoch)
				l.SetReport(now, epoch)
				if got := begun(l); got != "" {
					t.Errorf("%q", got)
				}
				if held, ok := l.Held("uid-a"); !ok || held.State != ledger.Offered {
					t.Errorf("it holds %+v", held)
				}
			}
		})
	}
}
