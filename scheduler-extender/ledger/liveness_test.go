package ledger_test

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/scheduler-extender/fit"
	"github.com/carve-gpu/carve/scheduler-extender/ledger"
	"github.com/carve-gpu/carve/scheduler-extender/score"
)

var (
	up      = ledger.Agent{Ready: true, Namespace: "carve-system", Pod: "carve-node-a"}
	down    = ledger.Agent{Namespace: "carve-system", Pod: "carve-node-a", Why: "CrashLoopBackOff"}
	leaving = ledger.Agent{Namespace: "carve-system", Pod: "carve-node-a", Leaving: true}
)

func TestWhyANodeIsBlocked(t *testing.T) {
	hookless := report("n1", 80000, 1)
	hookless.Status.HookConnectedSince = nil
	for name, c := range map[string]struct {
		do   func(l *ledger.Ledger)
		want fit.Reason
		says string
	}{
		"it isn't":                             {func(l *ledger.Ledger) { l.SetAgent("n1", up) }, "", ""},
		"no agent":                             {func(l *ledger.Ledger) { l.SetAgent("n1", ledger.Agent{}) }, fit.ReasonAgentDown, "no pod of it is there"},
		"its agent isn't ready":                {func(l *ledger.Ledger) { l.SetAgent("n1", down) }, fit.ReasonAgentDown, "its pod is not ready: CrashLoopBackOff"},
		"its agent is being deleted":           {func(l *ledger.Ledger) { l.SetAgent("n1", leaving) }, fit.ReasonAgentDown, "its pod is being deleted"},
		"its agent is up without a report":     {func(l *ledger.Ledger) { l.DropReport("n1", epoch) }, fit.ReasonNoReport, ""},
		"the hook, as a ready agent says":      {func(l *ledger.Ledger) { l.SetReport(hookless, epoch) }, fit.ReasonHookDown, ""},
		"the hook, as an unready agent says":   {func(l *ledger.Ledger) { l.SetReport(hookless, epoch); l.SetAgent("n1", down) }, fit.ReasonHookDown, ""},
		"the agent, whatever it said at last":  {func(l *ledger.Ledger) { l.SetReport(hookless, epoch); l.SetAgent("n1", leaving) }, fit.ReasonAgentDown, "its pod is being deleted"},
		"the agent, that never came so far":    {func(l *ledger.Ledger) { l.DropReport("n1", epoch); l.SetAgent("n1", ledger.Agent{}) }, fit.ReasonAgentDown, "no pod of it is there"},
		"a Node object that isn't there":       {func(l *ledger.Ledger) { l.DropNode("n1", epoch) }, fit.ReasonUnknownNode, ""},
		"an agent seen before its Node object": {func(l *ledger.Ledger) { l.DropNode("n1", epoch); l.SetNode("n1", ledger.NodeInfo{Managed: true}) }, "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			l := books(t, 80000)
			c.do(l)
			v := l.Node("n1").Snapshot().View
			if v.Blocked != c.want || !strings.Contains(v.Why, c.says) || (c.says == "") != (v.Why == "") {
				t.Fatalf("blocked by %q, %q", v.Blocked, v.Why)
			}
			if err := offer(t, l, "a", 1, epoch); (err == nil) != (c.want == "") {
				t.Fatalf("offer: %v", err)
			}
		})
	}
}

// An agent of a node that nobody knows of is remembered, as the events come in
// any order, and forgotten with it.
func TestAgentsOfUnknownNodes(t *testing.T) {
	l := ledger.New(ledger.Config{})
	l.SetAgent("n1", ledger.Agent{})
	if l.Node("n1") != nil {
		t.Fatal("a node was made of nothing")
	}
	l.SetAgent("n1", up)
	l.SetReport(report("n1", 80000, 1), epoch)
	l.SetNode("n1", ledger.NodeInfo{Managed: true})
	if b := l.Node("n1").Snapshot().View.Blocked; b != "" {
		t.Fatalf("blocked by %s", b)
	}
	l.DropNode("n1", epoch)
	l.DropReport("n1", epoch)
	l.SetAgent("n1", ledger.Agent{})
	if l.Node("n1") != nil {
		t.Fatal("the node stayed")
	}
}

// The offer was good when it was made. It is given back at once, unless an
// earlier write of it may have had an effect.
func TestABlockedNodeRefusesTheBind(t *testing.T) {
	for name, c := range map[string]struct {
		unknown bool
		used    int64
	}{"a first try": {false, 0}, "after a write of unknown outcome": {true, 8000}} {
		t.Run(name, func(t *testing.T) {
			l := books(t, 80000)
			if err := offer(t, l, "a", 8000, epoch); err != nil {
				t.Fatal(err)
			}
			if c.unknown {
				if _, _, err := l.BeginBind(ref("a"), "n1", epoch); err != nil {
					t.Fatal(err)
				}
				l.EndBind("uid-a", ledger.Unknown, epoch)
			}
			l.SetAgent("n1", leaving)
			_, bound, err := l.BeginBind(ref("a"), "n1", epoch)
			if !errors.Is(err, ledger.ErrBlocked) || bound || !strings.Contains(err.Error(), "n1: carve's agent on the node is down (its pod is being deleted)") {
				t.Fatalf("bound %t, error %v", bound, err)
			}
			wantUsed(t, l, c.used)
			l.Sweep(epoch.Add(time.Minute))
			wantUsed(t, l, 0)
		})
	}
	t.Run("another node than the offer's", func(t *testing.T) {
		l := books(t, 80000)
		l.SetNode("n2", ledger.NodeInfo{Managed: true})
		l.SetReport(report("n2", 80000, 1), epoch)
		o := ledger.Offer{Ref: ref("a"), Node: l.Node("n1"), Ask: share(t, 8000), Prefer: score.Binpack.Card, Allowed: []*ledger.Node{l.Node("n2")}}
		if err := l.Offer(o, epoch); err != nil {
			t.Fatal(err)
		}
		if _, _, err := l.BeginBind(ref("a"), "n2", epoch); !errors.Is(err, ledger.ErrBlocked) || !strings.Contains(err.Error(), "n2: ") {
			t.Fatalf("error %v", err)
		}
		wantUsed(t, l, 0)
	})
	t.Run("a pod that is bound stays so", func(t *testing.T) {
		l := books(t, 80000)
		l.SetPod(seen("a", bind(t, l, "a", 8000)), epoch)
		l.SetAgent("n1", leaving)
		if _, bound, err := l.BeginBind(ref("a"), "n1", epoch); err != nil || !bound {
			t.Fatalf("bound %t, error %v", bound, err)
		}
		wantUsed(t, l, 8000)
	})
}

// gang-30: a node is away and comes back. What runs there stays where
// spec.nodeName says, counted as before, whatever happens around it.
func TestARecordFollowsTheNodeNameOnly(t *testing.T) {
	l := books(t, 80000)
	l.SetNode("n2", ledger.NodeInfo{Managed: true})
	l.SetAgent("n2", up)
	l.SetReport(report("n2", 80000, 1), epoch)
	p := seen("a", bind(t, l, "a", 60000))
	p.Started = true
	l.SetPod(p, epoch)
	l.SetReport(report("n1", 80000, 1, slice("uid-a", "app", 60000)), epoch)
	steps := []func(){
		func() { l.SetAgent("n1", down) },
		func() { l.SetAgent("n1", ledger.Agent{}) },
		func() { l.Sweep(epoch.Add(10 * time.Minute)) },
		func() { l.SetPod(p, epoch) }, // its status changes while the node is away
		func() { l.SetNode("n1", ledger.NodeInfo{Managed: true, OutOfService: true}) },
		func() { l.SetNode("n1", ledger.NodeInfo{}) }, // the label is off
		func() { l.SetNode("n1", ledger.NodeInfo{Managed: true}) },
		func() { l.SetAgent("n1", up) },
		func() { l.SetReport(report("n1", 80000, 1), epoch) }, // a restarted agent that has not adopted it yet
		func() { l.SetReport(report("n1", 80000, 1, slice("uid-a", "app", 60000)), epoch) },
	}
	for i, step := range steps {
		step()
		if h, ok := l.Held("uid-a"); !ok || h.State != ledger.Bound || h.Node.Name != "n1" {
			t.Fatalf("step %d: held %t, %v on %s", i, ok, h.State, h.Node.Name)
		}
		wantUsed(t, l, 60000)
		if u := l.Node("n2").Snapshot().View.Cards[0].Used.MemMiB; u != 0 {
			t.Fatalf("step %d: %d MiB in use on the other node", i, u)
		}
	}
	if err := offer(t, l, "b", 40000, epoch); err == nil {
		t.Fatal("the room was given away")
	}
}

// A pod that was force-deleted may run on: its share counts until somebody who
// can know says that it is over.
func TestWhatIsLeavingCountsUntilItHasLeft(t *testing.T) {
	reported := func(t *testing.T, l *ledger.Ledger) {
		l.SetPod(seen("a", bind(t, l, "a", 8000)), epoch)
		l.SetReport(report("n1", 80000, 1, slice("uid-a", "app", 8000)), epoch)
		l.DropPod("uid-a", epoch)
	}
	// It ran, and its agent went away before it could report it.
	unreported := func(t *testing.T, l *ledger.Ledger) {
		p := seen("a", bind(t, l, "a", 8000))
		p.Started = true
		l.SetPod(p, epoch)
		l.SetAgent("n1", leaving)
		l.DropPod("uid-a", epoch)
	}
	for name, c := range map[string]struct {
		leave func(t *testing.T, l *ledger.Ledger)
		do    func(l *ledger.Ledger)
		want  int64
	}{
		"force-deleted, the report still shows it": {reported, func(l *ledger.Ledger) { l.Sweep(epoch.Add(time.Hour)) }, 8000},
		"and its agent is gone":                    {reported, func(l *ledger.Ledger) { l.SetAgent("n1", ledger.Agent{}); l.Sweep(epoch.Add(time.Hour)) }, 8000},
		"and its agent is back and reports it":     {reported, func(l *ledger.Ledger) { l.SetReport(report("n1", 80000, 1, slice("uid-a", "app", 8000)), epoch) }, 8000},
		"the report drops it":                      {reported, func(l *ledger.Ledger) { l.SetReport(report("n1", 80000, 1), epoch) }, 0},
		"the node is declared out of service":      {reported, func(l *ledger.Ledger) { l.SetNode("n1", ledger.NodeInfo{Managed: true, OutOfService: true}) }, 0},
		"the node was out of service before":       {func(*testing.T, *ledger.Ledger) {}, func(l *ledger.Ledger) { outOfServiceFirst(l) }, 0},
		"never reported, and nobody could":         {unreported, func(l *ledger.Ledger) { sweeps(l, time.Hour) }, 8000},
		"never reported, the agent is just back":   {unreported, func(l *ledger.Ledger) { sweeps(l, time.Hour); l.SetAgent("n1", up) }, 8000},
		"never reported, the agent has been back":  {unreported, func(l *ledger.Ledger) { l.SetAgent("n1", up); sweeps(l, 11*time.Second) }, 0},
		"never reported, then reported": {unreported, func(l *ledger.Ledger) {
			l.SetAgent("n1", up)
			l.SetReport(report("n1", 80000, 1, slice("uid-a", "app", 8000)), epoch)
			sweeps(l, time.Hour)
		}, 8000},
		"never reported, the node out of service":   {unreported, func(l *ledger.Ledger) { l.SetNode("n1", ledger.NodeInfo{Managed: true, OutOfService: true}) }, 0},
		"the node is managed by others from now on": {unreported, func(l *ledger.Ledger) { l.SetNode("n1", ledger.NodeInfo{}); sweeps(l, time.Hour) }, 0},
	} {
		t.Run(name, func(t *testing.T) {
			l := books(t, 80000)
			c.leave(t, l)
			c.do(l)
			wantUsed(t, l, c.want)
			if _, ok := l.Held("uid-a"); ok != (c.want > 0) {
				t.Fatalf("held %t", ok)
			}
		})
	}
}

// sweeps goes on for so long, second by second.
func sweeps(l *ledger.Ledger, d time.Duration) {
	for at := time.Duration(0); at <= d; at += time.Second {
		l.Sweep(epoch.Add(at))
	}
}

func outOfServiceFirst(l *ledger.Ledger) {
	g := api.Grant{Version: 1, UID: "uid-a", Node: "n1", Generation: 1, Containers: map[string][]api.CardGrant{"app": {{Card: "GPU-n1-0", MemMiB: 8000, Mode: "vgpu"}}}}
	p := seen("a", g)
	p.Started = true
	l.SetPod(p, epoch)
	l.SetNode("n1", ledger.NodeInfo{Managed: true, OutOfService: true})
	l.SetReport(report("n1", 80000, 1, slice("uid-a", "app", 8000)), epoch)
	l.DropPod("uid-a", epoch)
}

// A node that is deleted and made again under its name owes nothing of its
// former life but what a report says is there, and takes no pod before an agent
// of its new life has reported.
func TestANodeThatIsMadeAgain(t *testing.T) {
	l := books(t, 80000)
	l.SetAgent("n1", up)
	l.SetPod(seen("a", bind(t, l, "a", 8000)), epoch)
	l.SetReport(report("n1", 80000, 1, slice("uid-a", "app", 8000)), epoch)
	l.DropNode("n1", epoch)
	l.SetAgent("n1", ledger.Agent{})
	l.DropPod("uid-a", epoch) // the garbage collector's work
	if _, ok := l.Held("uid-a"); ok {
		t.Fatal("an entry stayed on a node that is gone")
	}
	l.SetNode("n1", ledger.NodeInfo{Managed: true})
	// The GPUNode object outlives the Node: it is of the old life still.
	if err := offer(t, l, "b", 1, epoch); err == nil {
		t.Fatal("offered on a node without an agent")
	}
	l.SetReport(report("n1", 80000, 1), epoch)
	l.SetAgent("n1", up)
	wantUsed(t, l, 0)
	bind(t, l, "b", 80000)
}

// A reboot: the agent comes back with nothing on the node, and pods that are
// still bound there start again with their grants.
func TestARebootTakesNothingFromThePodsThatStay(t *testing.T) {
	l := books(t, 80000)
	l.SetAgent("n1", up)
	for _, name := range []string{"stays", "goes"} {
		p := seen(name, bind(t, l, name, 30000))
		p.Started = true
		l.SetPod(p, epoch)
	}
	l.SetReport(report("n1", 80000, 1, slice("uid-stays", "app", 30000), slice("uid-goes", "app", 30000)), epoch)
	l.SetAgent("n1", down)
	l.DropPod("uid-goes", epoch) // deleted while the node was down
	wantUsed(t, l, 60000)
	l.SetReport(report("n1", 80000, 1), epoch) // the new agent, before it has prepared anything
	l.SetAgent("n1", up)
	wantUsed(t, l, 30000)
	l.SetReport(report("n1", 80000, 1, slice("uid-stays", "app", 30000)), epoch)
	wantUsed(t, l, 30000)
	bind(t, l, "next", 50000)
}
