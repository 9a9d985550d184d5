package ledger_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/scheduler-extender/fit"
	"github.com/carve-gpu/carve/scheduler-extender/ledger"
	"github.com/carve-gpu/carve/scheduler-extender/score"
)

// asking is the event of a pod that asks for so much and has a grant.
func asking(name string, g api.Grant, mib int64, cores int) ledger.Pod {
	p := seen(name, g)
	p.Containers = []ledger.Container{{Name: "app", MemMiB: mib, Cores: cores}}
	return p
}

// grown has a pod "a" that asked 1,000 MiB and holds as much as said, in force,
// in a namespace that may hold 10,000.
func grown(t testing.TB, mib int64, cores int) *ledger.Ledger {
	t.Helper()
	l := books(t, 80000)
	l.SetQuota("default", ledger.Quota{Name: "q", MemMiB: 10000, Cores: 50})
	g := bind(t, l, "a", 1000)
	l.SetPod(asking("a", g, 1000, 0), epoch)
	l.SetReport(report("n1", 80000, 1, of("uid-a", "app", 1000, 1)), epoch)
	resized(t, l, mib, cores)
	l.SetReport(report("n1", 80000, 1, of("uid-a", "app", mib, 2)), epoch)
	l.TakeRelaxed()
	return l
}

// resized takes the pod "a" through a resize, up to the event that shows it.
func resized(t testing.TB, l *ledger.Ledger, mib int64, cores int) {
	t.Helper()
	g, err := l.BeginResize(ref("a"), resizeTo("app", mib, cores))
	if err != nil {
		t.Fatal(err)
	}
	l.EndResize("uid-a", ledger.Written)
	l.SetPod(asking("a", g, 1000, 0), epoch)
}

func wantOver(t testing.TB, l *ledger.Ledger, name string, mib int64, want string) {
	t.Helper()
	var over *ledger.QuotaRefusal
	err := offer(t, l, name, mib, epoch)
	if !errors.As(err, &over) || over.Reason != fit.ReasonQuota || over.Amount.MemMiB != mib || !strings.Contains(err.Error(), want) {
		t.Fatalf("an offer of %d MiB: %v", mib, err)
	}
	if _, held := l.Held("uid-" + name); held {
		t.Fatal("a pod that was refused holds something")
	}
}

// A share that grew is counted when the next pod comes: Kubernetes let that in by
// what the first one asked.
func TestAPodOnTopOfAGrownShareIsRefused(t *testing.T) {
	l := grown(t, 9500, 10)
	wantOver(t, l, "b", 501, "ResourceQuota default/q allows requests.nvidia.com/gpumem of 10000; the namespace's shares hold 9500 and the pod takes 501 more; grown since they were made: a (asked 1000, holds 9500)")
	if err := offer(t, l, "c", 500, epoch); err != nil {
		t.Fatal(err)
	}
	wantOver(t, l, "d", 1, "hold 10000") // offers count
	l.Withdraw("uid-c")
	if err := offer(t, l, "d", 1, epoch); err != nil {
		t.Fatal(err)
	}
	elsewhere := ledger.Ref{UID: "uid-e", Namespace: "other", Name: "e"}
	if err := l.Offer(ledger.Offer{Ref: elsewhere, Node: l.Node("n1"), Ask: share(t, 9000), Prefer: score.Binpack.Card}, epoch); err != nil {
		t.Fatalf("in another namespace: %v", err)
	}
}

// Where nothing has grown in a resource, Kubernetes' own count is all there is,
// also where it counts less than is held: an amount on each of two cards.
func TestWithoutGrownSharesTheQuotaIsKubernetesAffair(t *testing.T) {
	l := ledger.New(ledger.Config{})
	l.SetNode("n1", ledger.NodeInfo{Managed: true})
	l.SetAgent("n1", ledger.Agent{Ready: true})
	l.SetReport(report("n1", 80000, 2), epoch)
	l.SetQuota("default", ledger.Quota{Name: "q", MemMiB: 10000, Cores: 10})
	take := func(name string, mib int64, cores int) error {
		a, refusal := fit.NewAsk(api.Request{Containers: []api.ContainerRequest{{Name: "app", Cards: 2, MemMiB: mib, Cores: cores}}})
		if refusal != nil {
			t.Fatal(refusal)
		}
		return l.Offer(ledger.Offer{Ref: ref(name), Node: l.Node("n1"), Ask: a, Prefer: score.Binpack.Card}, epoch)
	}
	if err := take("a", 6000, 10); err != nil {
		t.Fatal(err)
	}
	if err := take("b", 6000, 10); err != nil {
		t.Fatal(err)
	}
	// Growth in compute says nothing of memory, nor the other way round.
	l = grown(t, 1000, 30)
	if err := offer(t, l, "b", 20000, epoch); err != nil {
		t.Fatalf("memory where only compute has grown: %v", err)
	}
	a, refusal := fit.NewAsk(api.Request{Containers: []api.ContainerRequest{{Name: "app", Cards: 1, MemMiB: 100, Cores: 21}}})
	if refusal != nil {
		t.Fatal(refusal)
	}
	err := l.Offer(ledger.Offer{Ref: ref("c"), Node: l.Node("n1"), Ask: a, Prefer: score.Binpack.Card}, epoch)
	if err == nil || !strings.Contains(err.Error(), "requests.nvidia.com/gpucores of 50; the namespace's shares hold 30 and the pod takes 21 more; grown since they were made: a (asked 0, holds 30)") {
		t.Fatalf("%v", err)
	}
	// One that went back to what it asked for, or below it, hasn't grown.
	l = grown(t, 9000, 0)
	resized(t, l, 900, 0)
	l.SetReport(report("n1", 80000, 1, of("uid-a", "app", 900, 3)), epoch)
	if err := offer(t, l, "b", 20000, epoch); err != nil {
		t.Fatal(err)
	}
	// Neither has a percentage of a card that is the same as before.
	l = books(t, 80000)
	l.SetQuota("default", ledger.Quota{Name: "q", MemMiB: 10000, Cores: -1})
	g := api.Grant{Version: 1, UID: "uid-a", Node: "n1", Generation: 4, Containers: map[string][]api.CardGrant{"app": {{Card: "GPU-n1-0", MemMiB: 40000, Mode: api.ModeVGPU}}}}
	p := seen("a", g)
	p.Containers[0].MemPercent = 50
	l.SetPod(p, epoch)
	if err := offer(t, l, "b", 20000, epoch); err != nil {
		t.Fatal(err)
	}
	l.SetReport(report("n1", 70000, 1), epoch) // now it is more than that
	if err := offer(t, l, "c", 100, epoch); err == nil {
		t.Fatal("40,000 MiB are no half of 70,000")
	}
}

// What gives a namespace more room is told, so that those who wait are woken.
func TestWhatRelaxesAQuota(t *testing.T) {
	for name, c := range map[string]struct {
		change func(l *ledger.Ledger)
		told   bool
	}{
		"the quota is raised":      {func(l *ledger.Ledger) { l.SetQuota("default", ledger.Quota{Name: "q", MemMiB: 20000, Cores: -1}) }, true},
		"the quota is gone":        {func(l *ledger.Ledger) { l.DropQuota("default", "q") }, true},
		"the grown pod ends":       {func(l *ledger.Ledger) { l.SetPod(ledger.Pod{Ref: ref("a"), Ended: true}, epoch) }, true},
		"the grown pod is deleted": {func(l *ledger.Ledger) { l.DropPod("uid-a", epoch) }, true},
		"an offer ends":            {func(l *ledger.Ledger) { l.Sweep(epoch.Add(time.Hour)) }, true},
		"the node reports it shrunk": {func(l *ledger.Ledger) {
			resized(t, l, 1000, 0)
			wantOver(t, l, "x", 600, "hold 9600") // the node may yet refuse
			l.SetReport(report("n1", 80000, 1, of("uid-a", "app", 1000, 3)), epoch)
		}, true},
		"another quota is gone":     {func(l *ledger.Ledger) { l.DropQuota("default", "x") }, false},
		"the same quota again":      {func(l *ledger.Ledger) { l.SetQuota("default", ledger.Quota{Name: "q", MemMiB: 10000, Cores: 50}) }, false},
		"the report comes again":    {func(l *ledger.Ledger) { l.SetReport(report("n1", 80000, 1, of("uid-a", "app", 9500, 2)), epoch) }, false},
		"a pod ends somewhere else": {func(l *ledger.Ledger) { l.DropPod("uid-z", epoch) }, false},
	} {
		t.Run(name, func(t *testing.T) {
			l := grown(t, 9500, 10)
			if err := offer(t, l, "b", 100, epoch); err != nil {
				t.Fatal(err)
			}
			before := l.FreedCount()
			c.change(l)
			told := slices.Equal(l.TakeRelaxed(), []string{"default"})
			if told != c.told || told && l.FreedCount() == before || len(l.TakeRelaxed()) > 0 {
				t.Fatalf("told %t, want %t", told, c.told)
			}
			if c.told && name != "an offer ends" {
				if err := offer(t, l, "y", 600, epoch); err != nil {
					t.Fatal(err)
				}
			}
		})
	}
}

// A bound that came after the offer holds at the bind.
func TestBindLooksAtTheQuotaAgain(t *testing.T) {
	l := grown(t, 5000, 0)
	if err := offer(t, l, "b", 4000, epoch); err != nil {
		t.Fatal(err)
	}
	l.SetQuota("default", ledger.Quota{Name: "q", MemMiB: 8999, Cores: -1})
	var over *ledger.QuotaRefusal
	if _, _, err := l.BeginBind(ref("b"), "n1", epoch); !errors.As(err, &over) || !strings.Contains(err.Error(), "hold 5000 and the pod takes 4000 more") {
		t.Fatalf("%v", err)
	}
	if _, held := l.Held("uid-b"); held {
		t.Fatal("the offer stands")
	}
	l.SetQuota("default", ledger.Quota{Name: "q", MemMiB: 9000, Cores: -1})
	bind(t, l, "b", 4000)
	wantUsed(t, l, 9000)
}

// Those that grew most are named, and not all of many.
func TestARefusalNamesWhoGrew(t *testing.T) {
	l := books(t, 80000)
	l.SetQuota("default", ledger.Quota{Name: "q", MemMiB: 100, Cores: -1})
	for i := range 5 {
		name := fmt.Sprint("p", i)
		g := api.Grant{Version: 1, UID: "uid-" + name, Node: "n1", Generation: 2, Containers: map[string][]api.CardGrant{"app": {{Card: "GPU-n1-0", MemMiB: int64(100 + i), Mode: api.ModeVGPU}}}}
		l.SetPod(asking(name, g, 100, 0), epoch)
	}
	wantOver(t, l, "b", 1, "grown since they were made: p4 (asked 100, holds 104), p3 (asked 100, holds 103), p2 (asked 100, holds 102) and 1 more")
}

// Pods that run on cards by another plugin's grace shut their node for newcomers
// until they are gone.
func TestPodsOnCardsThatCarveDidNotGive(t *testing.T) {
	on := func(name string, on bool) ledger.Pod {
		return ledger.Pod{Ref: ref(name), Node: "n1", OnCards: on}
	}
	l := books(t, 80000)
	g := bind(t, l, "mine", 1000)
	l.SetPod(seen("mine", g), epoch)
	if err := offer(t, l, "before", 1000, epoch); err != nil {
		t.Fatal(err)
	}
	l.SetPod(on("waits", false), epoch) // its container doesn't run
	if b := l.Node("n1").Snapshot().View.Blocked; b != "" {
		t.Fatalf("blocked: %s", b)
	}
	l.SetPod(on("old", true), epoch)
	l.SetPod(on("older", true), epoch)
	v := l.Node("n1").Snapshot().View
	if v.Blocked != fit.ReasonForeignPods || !strings.Contains(v.Why, "default/old and 1 more runs there on cards that carve didn't give it") {
		t.Fatalf("%s: %s", v.Blocked, v.Why)
	}
	if _, _, err := l.BeginBind(ref("before"), "n1", epoch); !errors.Is(err, ledger.ErrBlocked) {
		t.Fatalf("a bind of an older offer: %v", err)
	}
	if err := offer(t, l, "new", 1000, epoch); err == nil {
		t.Fatal("the node takes a pod")
	}
	wantUsed(t, l, 1000) // ours stays
	l.TakeFreed()
	l.SetPod(ledger.Pod{Ref: ref("old"), Node: "n1", Ended: true}, epoch)
	l.DropPod("uid-older", epoch)
	if f := l.TakeFreed(); len(f) != 1 || l.Node("n1").Snapshot().View.Blocked != "" {
		t.Fatal("nobody is told that the node takes pods again")
	}
	if err := offer(t, l, "new", 1000, epoch); err != nil {
		t.Fatal(err)
	}
	// One that this node gave a card itself is in its report.
	l.SetPod(on("local", true), epoch)
	l.SetReport(report("n1", 80000, 1, slice("uid-local", "app", 500)), epoch)
	if b := l.Node("n1").Snapshot().View.Blocked; b != "" {
		t.Fatalf("blocked: %s", b)
	}

	// It came before the label did, and the node's object after the pod's.
	l = ledger.New(ledger.Config{})
	l.SetPod(on("old", true), epoch)
	l.SetNode("n1", ledger.NodeInfo{Cards: true})
	l.SetAgent("n1", ledger.Agent{Ready: true})
	l.SetReport(report("n1", 80000, 1), epoch)
	if b := l.Node("n1").Snapshot().View.Blocked; b != "" {
		t.Fatalf("a node that carve doesn't manage is blocked: %s", b)
	}
	l.SetNode("n1", ledger.NodeInfo{Managed: true})
	if b := l.Node("n1").Snapshot().View.Blocked; b != fit.ReasonForeignPods {
		t.Fatalf("blocked: %q", b)
	}
	l.DropReport("n1", epoch)
	l.SetAgent("n1", ledger.Agent{})
	l.DropNode("n1", epoch)
	l.DropPod("uid-old", epoch)
	if l.Node("n1") != nil {
		t.Fatal("the node is remembered for ever")
	}
}
