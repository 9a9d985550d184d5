package ledger_test

import (
	"errors"
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
