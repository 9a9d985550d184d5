package ledger_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/v1alpha1"
	"github.com/carve-gpu/carve/scheduler-extender/fit"
	"github.com/carve-gpu/carve/scheduler-extender/ledger"
)

// resizeTo asks for amounts; a negative one is left out.
func resizeTo(container string, memMiB int64, cores int) api.Resize {
	var a api.ResizeAmounts
	if memMiB >= 0 {
		a.MemMiB = &memMiB
	}
	if cores >= 0 {
		a.Cores = &cores
	}
	return api.Resize{Version: 1, ID: "r", Containers: map[string]api.ResizeAmounts{container: a}}
}

// of is a slice of a generation.
func of(uid, container string, mib int64, generation int32) v1alpha1.Slice {
	s := slice(uid, container, mib)
	s.Generation = generation
	return s
}

// placed has one pod "a" of 8,000 MiB in force on a card of 80,000.
func placed(t testing.TB) (*ledger.Ledger, api.Grant) {
	t.Helper()
	l := books(t, 80000)
	g := bind(t, l, "a", 8000)
	l.SetPod(seen("a", g), epoch)
	l.SetReport(report("n1", 80000, 1, of("uid-a", "app", 8000, 1)), epoch)
	return l, g
}

func TestALifeOfAResize(t *testing.T) {
	l, old := placed(t)
	g, err := l.BeginResize(ref("a"), resizeTo("app", 12000, 30))
	if err != nil || g.Generation != 2 || g.Containers["app"][0].MemMiB != 12000 || g.Containers["app"][0].Cores != 30 {
		t.Fatalf("%+v, %v", g, err)
	}
	if old.Containers["app"][0].MemMiB != 8000 {
		t.Fatal("the grant in force was changed in place")
	}
	wantUsed(t, l, 12000) // booked before it is written
	if _, err := l.BeginResize(ref("a"), resizeTo("app", 1, -1)); !errors.Is(err, ledger.ErrInFlight) {
		t.Fatalf("two at once: %v", err)
	}
	l.SetPod(seen("a", old), epoch) // an event from before the write
	wantUsed(t, l, 12000)
	l.EndResize("uid-a", ledger.Written)
	l.SetPod(seen("a", old), epoch)
	wantUsed(t, l, 12000)
	l.SetPod(seen("a", g), epoch)
	wantUsed(t, l, 12000)
	// Not in force yet, so nothing may build on it.
	if _, err := l.BeginResize(ref("a"), resizeTo("app", 4000, -1)); !errors.Is(err, ledger.ErrUnsettled) {
		t.Fatalf("on top of an unsettled one: %v", err)
	}
	l.SetReport(report("n1", 80000, 1, of("uid-a", "app", 12000, 2)), epoch)
	wantUsed(t, l, 12000)

	// What is given up is free once the node says that it took it away.
	l.TakeFreed()
	g, err = l.BeginResize(ref("a"), resizeTo("app", 4000, -1))
	if err != nil || g.Generation != 3 || g.Containers["app"][0].Cores != 30 {
		t.Fatalf("%+v, %v", g, err)
	}
	l.EndResize("uid-a", ledger.Written)
	l.SetPod(seen("a", g), epoch)
	wantUsed(t, l, 12000)
	if f := l.TakeFreed(); len(f) > 0 {
		t.Fatal("room was announced before it was there")
	}
	l.SetReport(report("n1", 80000, 1, of("uid-a", "app", 4000, 3)), epoch)
	wantUsed(t, l, 4000)
	if f := l.TakeFreed(); len(f) != 1 {
		t.Fatal("nobody is told of the room")
	}
	// Asking for what is there asks for nothing.
	if same, err := l.BeginResize(ref("a"), resizeTo("app", 4000, 30)); err != nil || same.Generation != 3 {
		t.Fatalf("%+v, %v", same, err)
	}
	if _, err := l.BeginResize(ref("a"), resizeTo("app", 4001, 30)); err != nil {
		t.Fatalf("after one that asked for nothing: %v", err)
	}
}

func TestAWriteOfAResizeThatFails(t *testing.T) {
	l, _ := placed(t)
	if _, err := l.BeginResize(ref("a"), resizeTo("app", 12000, -1)); err != nil {
		t.Fatal(err)
	}
	l.EndResize("uid-a", ledger.Unknown) // it may have happened
	wantUsed(t, l, 12000)
	l.EndResize("uid-a", ledger.Refused)
	wantUsed(t, l, 8000)
	g, err := l.BeginResize(ref("a"), resizeTo("app", 9000, -1))
	if err != nil || g.Generation != 2 {
		t.Fatalf("%+v, %v", g, err)
	}
	l.SetPod(seen("a", g), epoch) // the event is faster than the reply
	l.EndResize("uid-a", ledger.Refused)
	wantUsed(t, l, 9000)
}

func TestAResizeThatTheNodeRefuses(t *testing.T) {
	l, _ := placed(t)
	g, err := l.BeginResize(ref("a"), resizeTo("app", 2000, 10))
	if err != nil {
		t.Fatal(err)
	}
	l.EndResize("uid-a", ledger.Written)
	if _, _, ok := l.BeginRollback("uid-a"); ok {
		t.Fatal("taken back before anybody saw it")
	}
	l.SetPod(seen("a", g), epoch)
	if _, _, ok := l.BeginRollback("uid-a"); ok {
		t.Fatal("taken back without a refusal")
	}
	no := of("uid-a", "app", 8000, 1)
	no.RefusedGeneration, no.Refusal = 2, "5000 MiB are in use"
	l.SetReport(report("n1", 80000, 1, no), epoch)
	back, why, ok := l.BeginRollback("uid-a")
	if !ok || why != "5000 MiB are in use" || back.Generation != 3 || back.Containers["app"][0].MemMiB != 8000 || back.Containers["app"][0].Cores != 0 {
		t.Fatalf("%+v, %q, %t", back, why, ok)
	}
	l.EndResize("uid-a", ledger.Written)
	l.SetPod(seen("a", back), epoch)
	wantUsed(t, l, 8000)
	// The refusal of generation 2 is no refusal of generation 3.
	if _, _, ok := l.BeginRollback("uid-a"); ok {
		t.Fatal("taken back twice")
	}
	l.SetReport(report("n1", 80000, 1, of("uid-a", "app", 8000, 3)), epoch)
	wantUsed(t, l, 8000)
}

func TestResizesThatAreRefused(t *testing.T) {
	rich := func(t *testing.T) *ledger.Ledger {
		l, _ := placed(t)
		g := bind(t, l, "b", 60000)
		l.SetPod(seen("b", g), epoch)
		b := of("uid-b", "app", 60000, 1)
		b.Cores = 70
		l.SetReport(report("n1", 80000, 1, of("uid-a", "app", 8000, 1), b), epoch)
		return l
	}
	none := []ledger.Quota{{Name: "free", MemMiB: -1, Cores: -1}}
	set := func(l *ledger.Ledger, quotas []ledger.Quota) {
		for _, q := range quotas {
			l.SetQuota("default", q)
		}
	}
	for name, c := range map[string]struct {
		ask    api.Resize
		quotas []ledger.Quota
		reason fit.Reason
		want   string
	}{
		"more than the card has":    {resizeTo("app", 80001, -1), nil, fit.ReasonMemory, "n1: card 0 (GPU-n1-0, A100): asked 80001 MiB, the card has 80000 MiB"},
		"more than others leave":    {resizeTo("app", 20001, -1), none, fit.ReasonMemory, "n1: card 0 (GPU-n1-0, A100): asked 20001 MiB, free 20000 of 80000 MiB"},
		"more compute than is left": {resizeTo("app", -1, 31), none, fit.ReasonCores, "asked 31 % of compute, free 30 %"},
		"an unknown container":      {resizeTo("side", 1, -1), nil, fit.ReasonInvalid, "container side has no share; those with one are app"},
		"more than the quota":       {resizeTo("app", 9000, -1), []ledger.Quota{{Name: "q", MemMiB: 68999, Cores: -1}}, fit.ReasonQuota, "ResourceQuota default/q allows requests.nvidia.com/gpumem of 68999; the namespace's shares hold 68000 and the resize takes 1000 more"},
		"compute above the quota":   {resizeTo("app", -1, 20), []ledger.Quota{{Name: "q", MemMiB: -1, Cores: 10}}, fit.ReasonQuota, "requests.nvidia.com/gpucores of 10"},
	} {
		t.Run(name, func(t *testing.T) {
			l := rich(t)
			set(l, c.quotas)
			_, err := l.BeginResize(ref("a"), c.ask)
			var r *ledger.ResizeRefusal
			if !errors.As(err, &r) || r.Reason != c.reason || !strings.Contains(err.Error(), c.want) {
				t.Fatalf("%v", err)
			}
			if strings.Contains(name, "others leave") && (len(r.Holders) != 1 || r.Holders[0].Pod != "default/b") {
				t.Fatalf("holders %+v", r.Holders)
			}
			wantUsed(t, l, 68000)
			for _, q := range c.quotas {
				l.DropQuota("default", q.Name)
			}
			set(l, none)
			if _, err := l.BeginResize(ref("a"), resizeTo("app", 20000, 30)); err != nil {
				t.Fatalf("what fits: %v", err)
			}
		})
	}
	l := rich(t)
	// A quota that is exceeded already is no reason to refuse to shrink.
	set(l, []ledger.Quota{{Name: "q", MemMiB: 10, Cores: 0}})
	if _, err := l.BeginResize(ref("a"), resizeTo("app", 7000, -1)); err != nil {
		t.Fatal(err)
	}
	for what, change := range map[string]func(l *ledger.Ledger){
		"an ended pod":              func(l *ledger.Ledger) { l.SetPod(ledger.Pod{Ref: ref("a"), Ended: true}, epoch) },
		"a pod that is gone":        func(l *ledger.Ledger) { l.DropPod("uid-a", epoch) },
		"a node that is given back": func(l *ledger.Ledger) { l.SetNode("n1", ledger.NodeInfo{}) },
	} {
		l := rich(t)
		change(l)
		var r *ledger.ResizeRefusal
		if _, err := l.BeginResize(ref("a"), resizeTo("app", 1, -1)); !errors.As(err, &r) {
			t.Errorf("%s: %v", what, err)
		}
	}
	cordoned := report("n1", 80000, 1, of("uid-a", "app", 8000, 1))
	cordoned.Spec.CordonedCards = []string{"GPU-n1-0"}
	l, _ = placed(t)
	l.SetReport(cordoned, epoch)
	if _, err := l.BeginResize(ref("a"), resizeTo("app", 8001, -1)); err == nil || !strings.Contains(err.Error(), "cordoned") {
		t.Errorf("growth on a cordoned card: %v", err)
	}
	if _, err := l.BeginResize(ref("a"), resizeTo("app", 7999, -1)); err != nil {
		t.Errorf("shrinking on a cordoned card: %v", err)
	}
}

// Several cards get the amount each, and what containers hold one after another
// counts once.
func TestAResizeOfSeveralCardsAndContainers(t *testing.T) {
	l := ledger.New(ledger.Config{})
	l.SetNode("n1", ledger.NodeInfo{Managed: true})
	cards := func(c ...api.CardGrant) []api.CardGrant { return c }
	share := func(card string, m int64) api.CardGrant {
		return api.CardGrant{Card: card, MemMiB: m, Mode: api.ModeVGPU}
	}
	g := api.Grant{Version: 1, UID: "uid-a", Node: "n1", Generation: 1, Containers: map[string][]api.CardGrant{
		"init": cards(share("GPU-n1-0", 50000)),
		"app":  cards(share("GPU-n1-0", 10000), share("GPU-n1-1", 10000)),
		"side": cards(share("GPU-n1-0", 20000)),
		"all":  cards(api.CardGrant{Card: "GPU-n1-2", Mode: api.ModeExclusive}),
	}}
	l.SetPod(ledger.Pod{Ref: ref("a"), Node: "n1", Grant: &g, Containers: []ledger.Container{{Name: "init", Kind: api.Init}, {Name: "app"}, {Name: "side"}, {Name: "all"}}}, epoch)
	r := report("n1", 80000, 3, of("uid-a", "app", 10000, 1), of("uid-a", "side", 20000, 1))
	r.Status.Cards[1].Slices = []v1alpha1.Slice{of("uid-a", "app", 10000, 1)}
	whole := of("uid-a", "all", 0, 1)
	whole.Mode = "exclusive"
	r.Status.Cards[2].Slices = []v1alpha1.Slice{whole}
	l.SetReport(r, epoch)
	wantUsed(t, l, 50000)
	for container, want := range map[string]string{"all": "mode exclusive", "init": "has ended"} {
		if _, err := l.BeginResize(ref("a"), resizeTo(container, 100, -1)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", container, err)
		}
	}
	if _, err := l.BeginResize(ref("a"), resizeTo("app", 60001, -1)); err == nil || !strings.Contains(err.Error(), "asked 80001 MiB, free 80000 of 80000 MiB") {
		t.Errorf("too large beside the other container: %v", err)
	}
	// A namespace's quota counts the amount on each card, and no whole cards:
	// the pod holds 50,000 and 10,000, then 60,000 and 40,000.
	l.SetQuota("default", ledger.Quota{Name: "q", MemMiB: 99999, Cores: -1})
	if _, err := l.BeginResize(ref("a"), resizeTo("app", 40000, -1)); err == nil || !strings.Contains(err.Error(), "hold 60000 and the resize takes 40000 more") {
		t.Errorf("above the quota: %v", err)
	}
	l.SetQuota("default", ledger.Quota{Name: "q", MemMiB: 100000, Cores: -1})
	next, err := l.BeginResize(ref("a"), resizeTo("app", 40000, -1))
	if err != nil {
		t.Fatal(err)
	}
	if c := next.Containers["app"]; c[0].MemMiB != 40000 || c[1].MemMiB != 40000 || c[0].Card != "GPU-n1-0" {
		t.Fatalf("%+v", c)
	}
	wantUsed(t, l, 60000)
	if m := l.Node("n1").Snapshot().View.Cards[1].Used.MemMiB; m != 40000 {
		t.Fatalf("%d MiB on the second card", m)
	}
}

// A pod that is deleted by force right after it grew stays counted with what it
// grew to, until its node says what is left.
func TestAGrownPodThatVanishes(t *testing.T) {
	l, g := placed(t)
	p := seen("a", g)
	p.Started = true
	l.SetPod(p, epoch)
	if _, err := l.BeginResize(ref("a"), resizeTo("app", 12000, -1)); err != nil {
		t.Fatal(err)
	}
	l.EndResize("uid-a", ledger.Written)
	l.DropPod("uid-a", epoch)
	wantUsed(t, l, 12000)
	l.SetReport(report("n1", 80000, 1, of("uid-a", "app", 8000, 1)), epoch) // an older report
	wantUsed(t, l, 12000)
	l.SetReport(report("n1", 80000, 1, of("uid-a", "app", 12000, 2)), epoch)
	wantUsed(t, l, 12000)
	l.SetReport(report("n1", 80000, 1), epoch)
	wantUsed(t, l, 0)

	l, g = placed(t)
	p = seen("a", g)
	p.Started = true
	l.SetPod(p, epoch)
	l.BeginResize(ref("a"), resizeTo("app", 12000, -1))
	l.DropPod("uid-a", epoch)
	l.EndResize("uid-a", ledger.Refused)
	l.Sweep(epoch.Add(time.Minute))
	wantUsed(t, l, 8000) // the report's alone
}
