package ledger_test

import (
	"errors"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/v1alpha1"
	"github.com/carve-gpu/carve/scheduler-extender/fit"
	"github.com/carve-gpu/carve/scheduler-extender/ledger"
	"github.com/carve-gpu/carve/scheduler-extender/score"
)

var epoch = time.Unix(1_700_000_000, 0)

// report has n cards of the given memory, with slices as "card uid container MiB".
func report(node string, memMiB int64, cards int, slices ...v1alpha1.Slice) *v1alpha1.GPUNode {
	g := &v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: node}}
	since := metav1.NewTime(epoch)
	g.Status.HookConnectedSince = &since
	for i := range cards {
		g.Status.Cards = append(g.Status.Cards, v1alpha1.Card{UUID: fmt.Sprintf("GPU-%s-%d", node, i), Index: int32(i), Model: "NVIDIA A100", MemoryMiB: memMiB,
			Health: v1alpha1.Health{State: v1alpha1.Healthy}})
	}
	g.Status.Cards[0].Slices = slices
	return g
}

func slice(uid, container string, mib int64) v1alpha1.Slice {
	return v1alpha1.Slice{PodUID: uid, Container: container, Namespace: "default", Pod: uid, MemMiB: mib, Mode: "vgpu", Generation: 1, State: v1alpha1.Active}
}

// books is a ledger with one managed node n1 that has one card.
func books(t testing.TB, memMiB int64) *ledger.Ledger {
	t.Helper()
	l := ledger.New(ledger.Config{})
	l.SetNode("n1", ledger.NodeInfo{Managed: true})
	l.SetAgent("n1", ledger.Agent{Ready: true})
	l.SetReport(report("n1", memMiB, 1), epoch)
	return l
}

func ref(name string) ledger.Ref {
	return ledger.Ref{UID: "uid-" + name, Namespace: "default", Name: name}
}

func share(t testing.TB, mib int64) *fit.Ask {
	t.Helper()
	a, refusal := fit.NewAsk(api.Request{Containers: []api.ContainerRequest{{Name: "app", Cards: 1, MemMiB: mib}}})
	if refusal != nil {
		t.Fatal(refusal)
	}
	return a
}

// offer books a share of n1, as a placer would.
func offer(t testing.TB, l *ledger.Ledger, name string, mib int64, now time.Time) error {
	t.Helper()
	n := l.Node("n1")
	s := n.Snapshot()
	a := share(t, mib)
	p, refusal := fit.Fit(&s.View, a, score.Binpack.Card)
	if refusal != nil {
		return fmt.Errorf("refused: %s", refusal.Reason)
	}
	return l.Offer(ledger.Offer{Ref: ref(name), Node: n, Version: s.Version, Ask: a, Place: p, Prefer: score.Binpack.Card}, now)
}

// bind takes an offer all the way.
func bind(t testing.TB, l *ledger.Ledger, name string, mib int64) api.Grant {
	t.Helper()
	if err := offer(t, l, name, mib, epoch); err != nil {
		t.Fatal(err)
	}
	g, bound, err := l.BeginBind(ref(name), "n1", epoch)
	if err != nil || bound {
		t.Fatalf("bound %t, error %v", bound, err)
	}
	l.EndBind("uid-"+name, ledger.Written, epoch)
	return g
}

// seen is the informer's event for a bound pod.
func seen(name string, g api.Grant) ledger.Pod {
	return ledger.Pod{Ref: ref(name), Node: "n1", Grant: &g, Containers: []ledger.Container{{Name: "app"}}}
}

func used(t testing.TB, l *ledger.Ledger) int64 {
	t.Helper()
	s := l.Node("n1").Snapshot()
	if len(s.View.Cards) == 0 {
		t.Fatal("the node has no cards")
	}
	return s.View.Cards[0].Used.MemMiB
}

func wantUsed(t testing.TB, l *ledger.Ledger, want int64) {
	t.Helper()
	if got := used(t, l); got != want {
		t.Fatalf("%d MiB in use, want %d", got, want)
	}
}

// released is a report of an empty node that says of whom it let go.
func released(uids ...string) *v1alpha1.GPUNode {
	r := report("n1", 80000, 1)
	r.Status.Released = uids
	return r
}

func TestALifeOfAShare(t *testing.T) {
	l := books(t, 80000)
	g := bind(t, l, "a", 8000)
	wantUsed(t, l, 8000)
	l.SetPod(seen("a", g), epoch)
	wantUsed(t, l, 8000)
	l.SetReport(report("n1", 80000, 1, slice("uid-a", "app", 8000)), epoch)
	wantUsed(t, l, 8000) // once, not twice
	l.DropPod("uid-a", epoch)
	wantUsed(t, l, 8000) // the node still has it
	if h, _ := l.Held("uid-a"); h.State != ledger.Releasing {
		t.Fatalf("state %v", h.State)
	}
	l.SetReport(report("n1", 80000, 1), epoch)
	wantUsed(t, l, 0)
	if _, ok := l.Held("uid-a"); ok {
		t.Fatal("the entry stayed")
	}
}

func TestWhatCounts(t *testing.T) {
	pod := func(l *ledger.Ledger, t *testing.T) { l.SetPod(seen("a", bind(t, l, "a", 8000)), epoch) }
	for name, c := range map[string]struct {
		do   func(l *ledger.Ledger, t *testing.T)
		want int64
	}{
		"the larger of grant and report, the report": {func(l *ledger.Ledger, t *testing.T) {
			pod(l, t)
			l.SetReport(report("n1", 80000, 1, slice("uid-a", "app", 9000)), epoch)
		}, 9000},
		"the larger of grant and report, the grant": {func(l *ledger.Ledger, t *testing.T) {
			pod(l, t)
			l.SetReport(report("n1", 80000, 1, slice("uid-a", "app", 7000)), epoch)
		}, 8000},
		"a slice of a pod that nobody knows": {func(l *ledger.Ledger, _ *testing.T) {
			l.SetReport(report("n1", 80000, 1, slice("uid-x", "app", 5000)), epoch)
		}, 5000},
		"a slice of a container that the pod doesn't have": {func(l *ledger.Ledger, t *testing.T) {
			pod(l, t)
			l.SetReport(report("n1", 80000, 1, slice("uid-a", "app", 8000), slice("uid-a", "debug", 100)), epoch)
		}, 8100},
		"of an ended pod what the report shows": {func(l *ledger.Ledger, t *testing.T) {
			pod(l, t)
			l.SetReport(report("n1", 80000, 1, slice("uid-a", "app", 7000)), epoch)
			l.SetPod(ledger.Pod{Ref: ref("a"), Ended: true}, epoch)
		}, 7000},
		"of an ended pod nothing that no report shows": {func(l *ledger.Ledger, t *testing.T) {
			pod(l, t)
			l.SetPod(ledger.Pod{Ref: ref("a"), Ended: true}, epoch)
		}, 0},
		"share-2: of a pod deleted before it started nothing, at once": {func(l *ledger.Ledger, t *testing.T) {
			pod(l, t)
			l.SetPod(ledger.Pod{Ref: ref("a"), Ended: true}, epoch) // by kubelet
			l.DropPod("uid-a", epoch)
		}, 0},
		"of a pod that vanished unreported all, for a while: its node may be starting it": {func(l *ledger.Ledger, t *testing.T) {
			pod(l, t)
			l.DropPod("uid-a", epoch) // by force
			l.Sweep(epoch.Add(5 * time.Second))
		}, 8000},
		"and nothing once its node let go of it": {func(l *ledger.Ledger, t *testing.T) {
			pod(l, t)
			l.DropPod("uid-a", epoch)
			l.SetReport(released("uid-a"), epoch)
		}, 0},
		"and its slice where it was started all the same": {func(l *ledger.Ledger, t *testing.T) {
			pod(l, t)
			l.DropPod("uid-a", epoch)
			l.SetReport(report("n1", 80000, 1, slice("uid-a", "app", 8000)), epoch)
			l.Sweep(epoch.Add(time.Minute))
		}, 8000},
		"of a pod that ran and ended unreported all, for a while": {func(l *ledger.Ledger, t *testing.T) {
			pod(l, t)
			l.SetPod(ledger.Pod{Ref: ref("a"), Ended: true, Started: true}, epoch)
			l.SetReport(report("n1", 80000, 1), epoch) // from before
			l.Sweep(epoch.Add(5 * time.Second))
		}, 8000},
		"and nothing once its node told of it": {func(l *ledger.Ledger, t *testing.T) {
			pod(l, t)
			l.SetPod(ledger.Pod{Ref: ref("a"), Ended: true, Started: true}, epoch)
			l.SetReport(released("uid-b", "uid-a"), epoch)
		}, 0},
		"nor where its node told of it before": {func(l *ledger.Ledger, t *testing.T) {
			pod(l, t)
			l.SetReport(released("uid-a"), epoch)
			l.SetPod(ledger.Pod{Ref: ref("a"), Ended: true, Started: true}, epoch)
		}, 0},
		"of a pod that vanished while it was bound all, for a while": {func(l *ledger.Ledger, t *testing.T) {
			if err := offer(t, l, "a", 8000, epoch); err != nil {
				t.Fatal(err)
			}
			if _, _, err := l.BeginBind(ref("a"), "n1", epoch); err != nil {
				t.Fatal(err)
			}
			l.DropPod("uid-a", epoch)
			l.EndBind("uid-a", ledger.Written, epoch)
		}, 8000},
		"also where nobody knows whether it was bound": {func(l *ledger.Ledger, t *testing.T) {
			if err := offer(t, l, "a", 8000, epoch); err != nil {
				t.Fatal(err)
			}
			if _, _, err := l.BeginBind(ref("a"), "n1", epoch); err != nil {
				t.Fatal(err)
			}
			l.DropPod("uid-a", epoch)
			l.EndBind("uid-a", ledger.Unknown, epoch)
		}, 8000},
		"of a pod that ran and vanished unreported all, for a while": {func(l *ledger.Ledger, t *testing.T) {
			p := seen("a", bind(t, l, "a", 8000))
			p.Started = true
			l.SetPod(p, epoch)
			l.DropPod("uid-a", epoch)
			l.Sweep(epoch.Add(5 * time.Second))
		}, 8000},
		"and nothing when the while is over": {func(l *ledger.Ledger, t *testing.T) {
			p := seen("a", bind(t, l, "a", 8000))
			p.Started = true
			l.SetPod(p, epoch)
			l.DropPod("uid-a", epoch)
			l.Sweep(epoch.Add(11 * time.Second))
		}, 0},
		"of a pod that ran, was reported and then not, nothing": {func(l *ledger.Ledger, t *testing.T) {
			p := seen("a", bind(t, l, "a", 8000))
			p.Started = true
			l.SetPod(p, epoch)
			l.SetReport(report("n1", 80000, 1, slice("uid-a", "app", 8000)), epoch)
			l.SetReport(report("n1", 80000, 1), epoch)
			l.DropPod("uid-a", epoch)
		}, 0},
		"a pod that ended while its bind is in flight, until the reply": {func(l *ledger.Ledger, t *testing.T) {
			if err := offer(t, l, "a", 8000, epoch); err != nil {
				t.Fatal(err)
			}
			if _, _, err := l.BeginBind(ref("a"), "n1", epoch); err != nil {
				t.Fatal(err)
			}
			l.SetPod(ledger.Pod{Ref: ref("a"), Ended: true}, epoch)
		}, 8000},
		"share-13, share-14: a grant on a pod without a node is nobody's": {func(l *ledger.Ledger, t *testing.T) {
			g := api.Grant{Version: 1, UID: "uid-a", Node: "n1", Generation: 1, Containers: map[string][]api.CardGrant{"app": {{Card: "GPU-n1-0", MemMiB: 100, Mode: "vgpu"}}}}
			p := seen("a", g)
			p.Node = ""
			l.SetPod(p, epoch)
		}, 0},
		"a resized grant": {func(l *ledger.Ledger, t *testing.T) {
			pod(l, t)
			g := api.Grant{Version: 1, UID: "uid-a", Node: "n1", Generation: 2, Containers: map[string][]api.CardGrant{"app": {{Card: "GPU-n1-0", MemMiB: 12000, Mode: "vgpu"}}}}
			l.SetPod(seen("a", g), epoch)
		}, 12000},
		"a pod that was there before the ledger": {func(l *ledger.Ledger, t *testing.T) {
			g := api.Grant{Version: 1, UID: "uid-a", Node: "n1", Generation: 1, Containers: map[string][]api.CardGrant{"app": {{Card: "GPU-n1-0", MemMiB: 12000, Mode: "vgpu"}}}}
			l.SetPod(seen("a", g), epoch)
		}, 12000},
		"the peak of init, sidecar and app, once": {func(l *ledger.Ledger, t *testing.T) {
			card := func(mib int64) []api.CardGrant { return []api.CardGrant{{Card: "GPU-n1-0", MemMiB: mib, Mode: "vgpu"}} }
			g := api.Grant{Version: 1, UID: "uid-a", Node: "n1", Generation: 1, Containers: map[string][]api.CardGrant{"i": card(9000), "s": card(2000), "app": card(5000)}}
			l.SetPod(ledger.Pod{Ref: ref("a"), Node: "n1", Grant: &g, Containers: []ledger.Container{{Name: "i", Kind: api.Init}, {Name: "s", Kind: api.Sidecar}, {Name: "app"}}}, epoch)
			l.SetReport(report("n1", 80000, 1, slice("uid-a", "i", 9000), slice("uid-a", "app", 5000)), epoch)
		}, 9000},
	} {
		t.Run(name, func(t *testing.T) {
			l := books(t, 80000)
			c.do(l, t)
			wantUsed(t, l, c.want)
		})
	}
}

func TestAWholeCardIsHeldByOne(t *testing.T) {
	l := books(t, 80000)
	a, _ := fit.NewAsk(api.Request{Containers: []api.ContainerRequest{{Name: "app", Cards: 1, Whole: true}}})
	n := l.Node("n1")
	if err := l.Offer(ledger.Offer{Ref: ref("a"), Node: n, Ask: a, Prefer: score.Binpack.Card}, epoch); err != nil {
		t.Fatal(err)
	}
	if c := n.Snapshot().View.Cards[0]; !c.Whole || c.Free() != (fit.Amount{}) {
		t.Fatalf("card %+v", c)
	}
	if err := l.Offer(ledger.Offer{Ref: ref("b"), Node: n, Ask: share(t, 1), Prefer: score.Binpack.Card}, epoch); !errors.Is(err, ledger.ErrNoRoom) {
		t.Fatalf("error %v", err)
	}
}

func TestDebtIsNeverNegativeFree(t *testing.T) {
	l := books(t, 80000)
	l.SetPod(seen("a", bind(t, l, "a", 60000)), epoch)
	l.SetReport(report("n1", 50000, 1), epoch)
	s := l.Node("n1").Snapshot()
	if s.DebtMiB != 10000 || s.View.Cards[0].Free().MemMiB != 0 {
		t.Fatalf("debt %d, free %d", s.DebtMiB, s.View.Cards[0].Free().MemMiB)
	}
	if err := offer(t, l, "b", 1, epoch); err == nil {
		t.Fatal("a card in debt was offered")
	}
}

func TestNodesThatTakeNothing(t *testing.T) {
	for name, c := range map[string]struct {
		do   func(l *ledger.Ledger)
		want fit.Reason
	}{
		"the hook is down": {func(l *ledger.Ledger) {
			g := report("n1", 80000, 1)
			g.Status.HookConnectedSince = nil
			l.SetReport(g, epoch)
		}, fit.ReasonHookDown},
		"the report is gone":      {func(l *ledger.Ledger) { l.DropReport("n1", epoch) }, fit.ReasonNoReport},
		"the Node object is gone": {func(l *ledger.Ledger) { l.DropNode("n1", epoch) }, fit.ReasonUnknownNode},
	} {
		t.Run(name, func(t *testing.T) {
			l := books(t, 80000)
			c.do(l)
			s := l.Node("n1").Snapshot()
			if s.View.Blocked != c.want {
				t.Fatalf("blocked %q, want %q", s.View.Blocked, c.want)
			}
			if err := l.Offer(ledger.Offer{Ref: ref("a"), Node: l.Node("n1"), Ask: share(t, 1), Prefer: score.Binpack.Card}, epoch); err == nil {
				t.Fatal("it was offered")
			}
		})
	}
	t.Run("cards", func(t *testing.T) {
		l := books(t, 80000)
		g := report("n1", 80000, 4)
		g.Status.Cards[0].Health.State = v1alpha1.Degraded
		g.Status.Cards[1].MIGMode = "enabled"
		g.Spec.CordonedCards = []string{g.Status.Cards[2].UUID}
		l.SetReport(g, epoch)
		var got []fit.Reason
		for _, c := range l.Node("n1").Snapshot().View.Cards {
			got = append(got, c.Blocked)
		}
		if fmt.Sprint(got) != "[unhealthy mig-mode cordoned ]" {
			t.Fatalf("blocked %v", got)
		}
	})
}

func TestADeletedNodeOwesNothing(t *testing.T) {
	l := books(t, 80000)
	l.SetPod(seen("a", bind(t, l, "a", 8000)), epoch)
	l.SetReport(report("n1", 80000, 1, slice("uid-a", "app", 8000)), epoch)
	l.DropPod("uid-a", epoch)
	l.DropNode("n1", epoch)
	if _, ok := l.Held("uid-a"); ok {
		t.Fatal("a leaving pod stayed on a node that is gone")
	}
	l.DropReport("n1", epoch)
	l.SetAgent("n1", ledger.Agent{})
	if l.Node("n1") != nil {
		t.Fatal("the node stayed")
	}
	l.SetNode("n1", ledger.NodeInfo{Managed: true})
	l.SetAgent("n1", ledger.Agent{Ready: true})
	l.SetReport(report("n1", 80000, 1), epoch)
	wantUsed(t, l, 0)
}

func TestOffersEnd(t *testing.T) {
	l := books(t, 80000)
	if err := offer(t, l, "a", 8000, epoch); err != nil {
		t.Fatal(err)
	}
	if ended, _ := l.Sweep(epoch.Add(14 * time.Second)); ended != 0 {
		t.Fatal("ended early")
	}
	if !l.Renew("uid-a", epoch.Add(14*time.Second)) {
		t.Fatal("not renewed")
	}
	if ended, _ := l.Sweep(epoch.Add(28 * time.Second)); ended != 0 {
		t.Fatal("ended in spite of being renewed")
	}
	// One that is due can't be bound even if no sweep came by.
	if _, _, err := l.BeginBind(ref("a"), "n1", epoch.Add(time.Minute)); !errors.Is(err, ledger.ErrNoOffer) {
		t.Fatalf("error %v", err)
	}
	if ended, _ := l.Sweep(epoch.Add(time.Minute)); ended != 1 {
		t.Fatal("did not end")
	}
	wantUsed(t, l, 0)
}

func TestAnOfferInABindDoesNotEnd(t *testing.T) {
	l := books(t, 80000)
	if err := offer(t, l, "a", 8000, epoch); err != nil {
		t.Fatal(err)
	}
	if _, _, err := l.BeginBind(ref("a"), "n1", epoch); err != nil {
		t.Fatal(err)
	}
	l.Sweep(epoch.Add(time.Hour))
	wantUsed(t, l, 8000)
	if _, _, err := l.BeginBind(ref("a"), "n1", epoch); !errors.Is(err, ledger.ErrInFlight) {
		t.Fatalf("error %v", err)
	}
	if l.Renew("uid-a", epoch) {
		t.Fatal("renewed while binding")
	}
	l.Withdraw("uid-a")
	wantUsed(t, l, 8000)
}

// share-5: what a write that failed leaves behind.
func TestEndBind(t *testing.T) {
	for name, c := range map[string]struct {
		outcome ledger.Outcome
		gone    bool
		used    int64
		state   ledger.State
		held    bool
	}{
		"written":                    {ledger.Written, false, 8000, ledger.Bound, true},
		"refused":                    {ledger.Refused, false, 0, 0, false},
		"unknown":                    {ledger.Unknown, false, 8000, ledger.Offered, true},
		"written, deleted meanwhile": {ledger.Written, true, 8000, ledger.Releasing, true},
		"refused, deleted meanwhile": {ledger.Refused, true, 0, 0, false},
		"unknown, deleted meanwhile": {ledger.Unknown, true, 8000, ledger.Releasing, true},
	} {
		t.Run(name, func(t *testing.T) {
			l := books(t, 80000)
			if err := offer(t, l, "a", 8000, epoch); err != nil {
				t.Fatal(err)
			}
			if _, _, err := l.BeginBind(ref("a"), "n1", epoch); err != nil {
				t.Fatal(err)
			}
			if c.gone {
				l.DropPod("uid-a", epoch)
				wantUsed(t, l, 8000)
			}
			l.EndBind("uid-a", c.outcome, epoch)
			wantUsed(t, l, c.used)
			if h, ok := l.Held("uid-a"); ok != c.held || h.State != c.state || h.Binding {
				t.Fatalf("held %v %+v", ok, h)
			}
		})
	}
}

// gang-22: bind done but reply lost.
func TestABoundPodIsBoundAgainOnTheSameNodeOnly(t *testing.T) {
	l := books(t, 80000)
	g := bind(t, l, "a", 8000)
	again, bound, err := l.BeginBind(ref("a"), "n1", epoch)
	if err != nil || !bound || again.UID != g.UID {
		t.Fatalf("bound %t, grant %+v, error %v", bound, again, err)
	}
	if _, _, err := l.BeginBind(ref("a"), "n2", epoch); !errors.Is(err, ledger.ErrOtherNode) {
		t.Fatalf("error %v", err)
	}
	wantUsed(t, l, 8000)
}

// share-13: nothing that a caller makes up drops or takes a reservation.
func TestBogusBinds(t *testing.T) {
	l := books(t, 80000)
	if err := offer(t, l, "victim", 8000, epoch); err != nil {
		t.Fatal(err)
	}
	for name, r := range map[string]ledger.Ref{
		"another UID":       {UID: "uid-x", Namespace: "default", Name: "victim"},
		"another name":      {UID: "uid-victim", Namespace: "default", Name: "x"},
		"another namespace": {UID: "uid-victim", Namespace: "x", Name: "victim"},
	} {
		if _, _, err := l.BeginBind(r, "n1", epoch); !errors.Is(err, ledger.ErrNoOffer) {
			t.Errorf("%s: error %v", name, err)
		}
		l.EndBind(r.UID, ledger.Refused, epoch)
		wantUsed(t, l, 8000)
	}
	if _, _, err := l.BeginBind(ref("victim"), "n2", epoch); !errors.Is(err, ledger.ErrOtherNode) {
		t.Errorf("another node: error %v", err)
	}
	wantUsed(t, l, 8000)
	if _, _, err := l.BeginBind(ref("victim"), "n1", epoch); err != nil {
		t.Fatalf("the victim itself: %v", err)
	}
}

func TestTheSchedulerMayChooseAnAllowedNode(t *testing.T) {
	l := books(t, 80000)
	l.SetNode("n2", ledger.NodeInfo{Managed: true})
	l.SetAgent("n2", ledger.Agent{Ready: true})
	l.SetReport(report("n2", 80000, 1), epoch)
	o := func(name string) ledger.Offer {
		return ledger.Offer{Ref: ref(name), Node: l.Node("n1"), Ask: share(t, 50000), Prefer: score.Binpack.Card, Allowed: []*ledger.Node{l.Node("n2")}}
	}
	if err := l.Offer(o("a"), epoch); err != nil {
		t.Fatal(err)
	}
	g, _, err := l.BeginBind(ref("a"), "n2", epoch)
	if err != nil || g.Node != "n2" || g.Containers["app"][0].Card != "GPU-n2-0" {
		t.Fatalf("grant %+v, error %v", g, err)
	}
	wantUsed(t, l, 0) // n1 is free again
	if err := l.Offer(o("b"), epoch); err != nil {
		t.Fatal(err)
	}
	if _, _, err := l.BeginBind(ref("b"), "n2", epoch); !errors.Is(err, ledger.ErrNoRoom) {
		t.Fatalf("error %v", err)
	}
}

func TestAPodBoundPastUsVoidsItsOffer(t *testing.T) {
	l := books(t, 80000)
	if err := offer(t, l, "a", 8000, epoch); err != nil {
		t.Fatal(err)
	}
	l.SetPod(ledger.Pod{Ref: ref("a"), Node: "elsewhere"}, epoch)
	wantUsed(t, l, 0)
}

// A bind of which no event ever tells: the pod was gone before.
func TestUnconfirmedBindsAreLookedUp(t *testing.T) {
	l := books(t, 80000)
	bind(t, l, "a", 8000)
	if _, look := l.Sweep(epoch.Add(29 * time.Second)); len(look) != 0 {
		t.Fatal("looked up early")
	}
	_, look := l.Sweep(epoch.Add(31 * time.Second))
	if len(look) != 1 || look[0] != ref("a") {
		t.Fatalf("look %v", look)
	}
	l.DropPod("uid-a", epoch)
	wantUsed(t, l, 0)
}

func TestHoldersNameEverybodyOnACard(t *testing.T) {
	l := books(t, 80000)
	l.SetPod(seen("a", bind(t, l, "a", 8000)), epoch)
	if err := offer(t, l, "b", 16000, epoch); err != nil {
		t.Fatal(err)
	}
	l.SetReport(report("n1", 80000, 1, slice("uid-x", "app", 100), slice("uid-x", "side", 11)), epoch)
	got := fmt.Sprint(l.Holders(l.Node("n1"), "GPU-n1-0"))
	if want := "[{default/b 16000 false offered 0 vgpu} {default/a 8000 false bound 0 vgpu} {default/uid-x 111 false releasing 0 vgpu}]"; got != want {
		t.Fatalf("holders %s", got)
	}
}

func TestRoomThatAppearsIsTold(t *testing.T) {
	l := books(t, 80000)
	l.TakeFreed()
	g := bind(t, l, "a", 8000)
	l.SetPod(seen("a", g), epoch)
	l.SetReport(report("n1", 80000, 1, slice("uid-a", "app", 8000)), epoch)
	if freed := l.TakeFreed(); len(freed) != 0 {
		t.Fatalf("freed %d nodes by taking room", len(freed))
	}
	l.DropPod("uid-a", epoch)
	if freed := l.TakeFreed(); len(freed) != 0 {
		t.Fatal("freed while the node still has it")
	}
	before := l.FreedCount()
	l.SetReport(report("n1", 80000, 1), epoch)
	if freed := l.TakeFreed(); len(freed) != 1 || freed[0].Name != "n1" || l.FreedCount() == before {
		t.Fatalf("freed %v", freed)
	}
	select {
	case <-l.Freed():
	default:
		t.Fatal("no signal")
	}
}

// What a card can be given as changes without anybody leaving it: a waiting pod is woken
// for that too.
func TestACardThatIsGivenOtherwiseIsTold(t *testing.T) {
	l := books(t, 80000)
	say := func(modes []string, sharing *v1alpha1.Sharing, mps *v1alpha1.MPS, slices ...v1alpha1.Slice) {
		r := report("n1", 80000, 1, slices...)
		r.Status.Cards[0].Modes, r.Status.Cards[0].Sharing, r.Status.Cards[0].MPS = modes, sharing, mps
		l.SetReport(r, epoch)
	}
	both := []string{"timeslice", "mps"}
	l.TakeFreed()
	told := func(what string, want bool) {
		t.Helper()
		if freed := l.TakeFreed(); len(freed) > 0 != want {
			t.Errorf("%s: freed %v", what, freed)
		}
	}
	say(both, nil, nil)
	told("the keeper has come", true)
	say(both, nil, nil)
	told("nothing has changed", false)
	say(both, nil, &v1alpha1.MPS{Reason: "it died"})
	l.TakeFreed()
	say(both, nil, &v1alpha1.MPS{Ready: true})
	told("a daemon is back", true)
	say(both, &v1alpha1.Sharing{Mode: "timeslice", Replicas: 4}, nil)
	told("it is given in replicas", true)
	if c := l.Node("n1").Snapshot().View.Cards[0]; c.Slots != 4 || c.Modes.Only != api.ModeTimeslice {
		t.Errorf("%+v", c)
	}
	say(both, &v1alpha1.Sharing{Mode: "timeslice", Replicas: 5}, nil)
	told("in more of them", true)
	a, b := slice("uid-a", "app", 100), slice("uid-b", "app", 100)
	a.Mode, b.Mode = "mps", "timeslice"
	say(both, nil, nil, a, b)
	if c := l.Node("n1").Snapshot().View.Cards[0]; c.Mode != fit.Mixed {
		t.Errorf("%+v", c)
	}
	l.TakeFreed()
	say(both, nil, nil, b)
	told("what was mixed has one mode", true)
}

// share-7, gang-23 at the ledger: many at once for the last room.
func TestOneOfManyGetsTheLastRoom(t *testing.T) {
	for range 50 {
		l := books(t, 10000)
		n := l.Node("n1")
		s := n.Snapshot()
		var won atomic.Int32
		var all sync.WaitGroup
		for i := range 16 {
			name := fmt.Sprint("p", i)
			a := share(t, 10000)
			p, refusal := fit.Fit(&s.View, a, score.Binpack.Card)
			if refusal != nil {
				t.Fatal(refusal)
			}
			all.Go(func() {
				// All of them decided on the same snapshot.
				err := l.Offer(ledger.Offer{Ref: ref(name), Node: n, Version: s.Version, Ask: a, Place: p, Prefer: score.Binpack.Card}, epoch)
				if err != nil {
					return
				}
				if _, _, err := l.BeginBind(ref(name), "n1", epoch); err == nil {
					won.Add(1)
					l.EndBind("uid-"+name, ledger.Written, epoch)
				}
			})
		}
		all.Wait()
		if won.Load() != 1 {
			t.Fatalf("%d won", won.Load())
		}
		wantUsed(t, l, 10000)
	}
}

// Whatever a report says, its sums don't wrap into room that isn't there.
func TestAnAbsurdReportOffersNothing(t *testing.T) {
	l := ledger.New(ledger.Config{})
	l.SetNode("n1", ledger.NodeInfo{Managed: true})
	l.SetAgent("n1", ledger.Agent{Ready: true})
	l.SetReport(report("n1", 81050, 1, slice("uid-a", "app", math.MaxInt64), slice("uid-b", "app", math.MaxInt64)), epoch)
	if free := l.Node("n1").Snapshot().View.Cards[0].Free().MemMiB; free > 0 {
		t.Errorf("%d MiB are free on a full card", free)
	}
}
