package agent

import (
	"strings"
	"testing"
	"time"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/vgpu/gpu"
	"github.com/carve-gpu/carve/vgpu/mps"
)

// node-21: a program that outlives its server keeps the card from the next one. It is
// stopped, and no other program is.
func TestAProgramThatKeepsItsCardFromTheNextServerIsStopped(t *testing.T) {
	for name, may := range map[string]bool{"stopped": true, "kept": false} {
		t.Run(name, func(t *testing.T) {
			n := startNode(t, func(c *Config) { c.StopUnadjusted, c.grace = may, time.Millisecond })
			k := withKeeper(n)
			n.link()
			for uid, mode := range map[string]api.Mode{"idle": api.ModeMPS, "none": api.ModeMPS} {
				n.api.setPod(podWith(t, uid, grantOf(uid, 1, modeShare(cardA, 1000, 10, mode))))
			}
			n.api.setPod(podWith(t, "other", grantOf("other", 1, map[string][]api.CardGrant{"app": shareOf(cardB, 1000, 0)})))
			k.wanted(cardA, true)
			k.says(cardA, serving(1))
			box := map[string]*boxed{}
			for _, uid := range []string{"idle", "none", "other"} {
				eventually(t, uid+" is prepared", func() bool { return n.prepared(uid, "app") })
				box[uid] = n.runBox(uid, "app")
			}
			n.cards.mu.Lock()
			n.cards.processes = []gpu.Process{{PID: box["idle"].cmd.Process.Pid}}
			n.cards.mu.Unlock()
			n.lookAtMPS()
			n.lookAtMPS()
			if strings.Contains(n.api.said(), reasonMPSStopped) {
				t.Fatal("one was stopped while its daemon serves")
			}
			// With no keeper at work nothing would be gained.
			k.lock.Close()
			k.says(cardA, down(1, "the MPS daemon (process 77) has ended: signal: killed"))
			n.lookAtMPS()
			n.lookAtMPS()
			if strings.Contains(n.api.said(), reasonMPSStopped) {
				t.Fatal("one was stopped for a keeper that isn't there")
			}
			k.begin()
			eventually(t, "the pod is told why", func() bool {
				return strings.Contains(n.api.said(), "pod-idle MPSContextLost: container app lost its context with the MPS server of card 0 ("+cardA+")")
			})
			if may {
				eventually(t, "it is stopped", box["idle"].dead)
				n.gone(box["idle"])
			}
			n.lookAtMPS()
			n.lookAtMPS()
			if !may && box["idle"].dead() || box["none"].dead() || box["other"].dead() {
				t.Error("one was stopped that shouldn't be")
			}
			k.says(cardA, serving(2))
			if may {
				eventually(t, "it hears that it can start", func() bool {
					return strings.Contains(n.api.said(), "pod-idle MPSRestarted: card 0 ("+cardA+"): its MPS daemon serves again")
				})
			}
			eventually(t, "those that run hear it, too", func() bool { return strings.Contains(n.api.said(), "pod-none MPSRestarted: ") })
			if said := n.api.said(); strings.Count(said, reasonMPSStopped) != 1 || strings.Contains(said, "pod-idle MPSContextLost") && strings.Contains(said, "it is stopped") != may {
				t.Errorf("told:\n%s", said)
			}
		})
	}
}

// lostOne starts a container with a context on a card in mode mps whose daemon is down
// then, as State says, and that nobody stops by himself.
func lostOne(t *testing.T) (*keeperSide, *boxed, mps.State) {
	t.Helper()
	n := startNode(t, func(c *Config) { c.StopUnadjusted, c.grace = true, time.Hour })
	k := withKeeper(n)
	n.link()
	n.api.setPod(podWith(t, "idle", grantOf("idle", 1, modeShare(cardA, 1000, 10, api.ModeMPS))))
	k.wanted(cardA, true)
	k.says(cardA, serving(1))
	eventually(t, "it is prepared", func() bool { return n.prepared("idle", "app") })
	b := n.runBox("idle", "app")
	n.cards.mu.Lock()
	n.cards.processes = []gpu.Process{{PID: b.cmd.Process.Pid}}
	n.cards.mu.Unlock()
	k.says(cardA, down(1, "the MPS daemon (process 77) has ended: signal: killed"))
	seen, err := n.mpsDir().State(cardA)
	if err != nil {
		t.Fatal(err)
	}
	return k, b, seen
}

// What a look saw may be over when it comes to stopping somebody.
func TestAContainerThatIsServedAgainIsNotStopped(t *testing.T) {
	k, b, seen := lostOne(t)
	begun := serving(1)
	begun.Ready = false
	for name, s := range map[string]mps.State{
		"it serves again":               serving(1),
		"with a new daemon":             serving(2),
		"it served, and is down again":  down(2, "the MPS daemon (process 78) has ended: signal: killed"),
		"so it was in the same epoch":   down(1, "the MPS daemon (process 77) has ended: signal: killed"),
		"a new server is about to take": begun,
	} {
		k.says(cardA, s)
		since := seen
		if name == "a new server is about to take" {
			var err error
			if since, err = k.mpsDir().State(cardA); err != nil {
				t.Fatal(err)
			}
		}
		if out := k.stopLost(cardA, since); len(out) != 0 || strings.Contains(k.api.said(), reasonMPSStopped) || b.dead() {
			t.Fatalf("%s, and the container was stopped: %v", name, out)
		}
	}
	k.says(cardA, down(2, "x"))
	seen, err := k.mpsDir().State(cardA)
	if err != nil {
		t.Fatal(err)
	}
	if out := k.stopLost(cardA, seen); len(out) != 1 {
		t.Errorf("stopped while it is down: %v", out)
	}
	eventually(t, "it is stopped", b.dead)
	k.gone(b)
}

// One that couldn't be stopped is tried again, and its pod hears the truth once.
func TestAContainerThatCouldNotBeStoppedIsTriedAgain(t *testing.T) {
	k, b, seen := lostOne(t)
	pid := func(pid int) {
		k.mu.Lock()
		defer k.mu.Unlock()
		u := k.containers[b.id()]
		u.hostPID = pid
		k.containers[b.id()] = u
	}
	pid(-1) // which none can be opened by
	for range 2 {
		if out := k.stopLost(cardA, seen); len(out) != 0 || b.dead() {
			t.Fatalf("it was stopped: %v", out)
		}
	}
	eventually(t, "its pod hears that", func() bool {
		return strings.Contains(k.api.said(), "it can't be stopped, which is tried again")
	})
	pid(b.cmd.Process.Pid)
	for range 2 {
		k.stopLost(cardA, seen)
	}
	eventually(t, "it is stopped", b.dead)
	eventually(t, "its pod hears that", func() bool { return strings.Contains(k.api.said(), "it is stopped, so that it starts again") })
	if said := k.api.said(); strings.Count(said, "it can't be stopped") != 1 || strings.Count(said, reasonMPSStopped) != 2 {
		t.Errorf("told:\n%s", said)
	}
	k.gone(b)
}

// node-21: a card that can't be held to one process takes no more clients. Those that it
// has are served, and so aren't told that they aren't, nor stopped.
func TestClientsOfACardThatTakesNoMoreGoOn(t *testing.T) {
	n := startNode(t, func(c *Config) { c.StopUnadjusted, c.grace = true, time.Millisecond })
	k := withKeeper(n)
	n.link()
	for _, uid := range []string{"one", "two"} {
		n.api.setPod(podWith(t, uid, grantOf(uid, 1, modeShare(cardA, 1000, 10, api.ModeMPS))))
	}
	k.wanted(cardA, true)
	k.says(cardA, serving(1))
	eventually(t, "they are prepared", func() bool { return n.prepared("one", "app") && n.prepared("two", "app") })
	b := n.runBox("one", "app")
	n.cards.mu.Lock()
	n.cards.processes = []gpu.Process{{PID: b.cmd.Process.Pid}}
	n.cards.mu.Unlock()
	closed := serving(1)
	closed.Ready, closed.GoOn, closed.Error = false, true, "the card can't be held to one process: Unknown Error"
	k.says(cardA, closed)
	eventually(t, "the report says so", func() bool {
		m := k.card(cardA).MPS
		return m != nil && !m.Ready && strings.Contains(m.Reason, "can't be held to one process")
	})
	eventually(t, "the pod is told", func() bool {
		return strings.Contains(n.api.said(), "pod-one MPSClosed: card 0 ("+cardA+"): the card can't be held to one process: Unknown Error. Programs of container app that have the card go on")
	})
	seen, err := n.mpsDir().State(cardA)
	if err != nil {
		t.Fatal(err)
	}
	n.lookAtMPS()
	n.lookAtMPS()
	if out := n.stopLost(cardA, seen); len(out) != 0 || b.dead() || strings.Contains(n.api.said(), "MPSDown") || strings.Contains(n.api.said(), reasonMPSStopped) {
		t.Errorf("one that is served was stopped, or told that it isn't (%v):\n%s", out, n.api.said())
	}
	for _, s := range k.card(cardA).Slices {
		if s.Fault != "" {
			t.Errorf("its slice is at fault: %s", s.Fault)
		}
	}
	if n.prepared("two", "app") {
		t.Error("a container may start on a card that others can use, too")
	}
	// What ends is told from here as from anywhere.
	k.says(cardA, down(1, "the MPS daemon (process 77) has ended: signal: killed"))
	eventually(t, "the end is told", func() bool { return strings.Contains(n.api.said(), "pod-one MPSDown: ") })
	eventually(t, "it is stopped", b.dead)
	n.gone(b)
	k.says(cardA, closed)
	n.lookAtMPS()
	k.says(cardA, serving(1))
	eventually(t, "the card takes clients again", func() bool { return n.prepared("two", "app") })
}
