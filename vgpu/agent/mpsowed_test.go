package agent

import (
	"bytes"
	"log/slog"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/vgpu/gpu"
)

// node-21: who was told that a card takes no more, that it is down, or was stopped for it, hears
// that it serves again, once, and also from another process of the agent.
func TestWordThatACardServesAgainOutlivesTheAgent(t *testing.T) {
	n := startNode(t, func(c *Config) { c.grace = time.Hour })
	k := withKeeper(n)
	n.link()
	var containers []RuntimeContainer
	for _, uid := range []string{"one", "gone"} {
		n.api.setPod(podWith(t, uid, grantOf(uid, 1, modeShare(cardA, 1000, 10, api.ModeMPS))))
		k.wanted(cardA, true)
		k.says(cardA, serving(1))
		eventually(t, uid+" is prepared", func() bool { return n.prepared(uid, "app") })
		c := RuntimeContainer{ID: "c-" + uid, PodUID: uid, Name: "app", Adjusted: true}
		containers = append(containers, c)
		n.Adjusted(c)
	}
	closed := serving(1)
	closed.Ready, closed.GoOn, closed.Error = false, true, "the card can't be held to one process: Unknown Error"
	k.says(cardA, closed)
	eventually(t, "the pods are told", func() bool {
		return strings.Contains(n.api.said(), "pod-one MPSClosed: ") && strings.Contains(n.api.said(), "pod-gone MPSClosed: ")
	})
	n.stop()
	n.api.deletePod("gone")
	k.says(cardA, serving(1))
	again := func() {
		n.start()
		n.link(containers[:1]...)
	}
	const word = "pod-one MPSServes: card 0 (" + cardA + "): MPS serves again on the card, and takes programs of container app"
	again()
	eventually(t, "the one that is there is told", func() bool { return strings.Contains(n.api.said(), word) })
	n.stop()
	again()
	n.lookAtMPS()
	// In the same epoch: nothing was lost, so nothing but this tells.
	k.says(cardA, down(1, "the MPS server is in fault"))
	eventually(t, "the outage is told", func() bool { return strings.Contains(n.api.said(), "pod-one MPSDown: ") })
	k.says(cardA, serving(1))
	eventually(t, "its end is told", func() bool { return strings.Count(n.api.said(), word) == 2 })
	if said := n.api.said(); strings.Contains(said, "pod-gone MPSServes") || strings.Contains(said, "MPSRestarted") {
		t.Errorf("told:\n%s", said)
	}
	// A new daemon: what was there is gone, which is all that is to be said.
	k.says(cardA, down(1, "the MPS daemon (process 77) has ended: signal: killed"))
	eventually(t, "the next outage is told", func() bool { return strings.Count(n.api.said(), "pod-one MPSDown: ") == 2 })
	n.stop()
	k.says(cardA, serving(2))
	again()
	eventually(t, "a new daemon is told", func() bool { return strings.Contains(n.api.said(), "pod-one MPSRestarted: ") })
	n.lookAtMPS()
	if said := n.api.said(); strings.Count(said, word) != 2 {
		t.Errorf("told:\n%s", said)
	}
}

func TestWhoWasStoppedHearsItFromTheNextAgent(t *testing.T) {
	n := startNode(t, func(c *Config) { c.grace = time.Millisecond })
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
	eventually(t, "it is stopped", b.dead)
	eventually(t, "its pod is told", func() bool { return strings.Contains(n.api.said(), "pod-idle MPSContextLost: ") })
	n.gone(b)
	eventually(t, "that is kept", func() bool {
		b, err := os.ReadFile(n.lastOwed())
		return err == nil && strings.Contains(string(b), `"stopped":true`)
	})
	n.stop()
	k.says(cardA, serving(2))
	n.start()
	n.link()
	eventually(t, "it hears that it can start", func() bool {
		return strings.Contains(n.api.said(), "pod-idle MPSRestarted: card 0 ("+cardA+"): its MPS daemon serves again, and container app, which was stopped for it, can start")
	})
	eventually(t, "nothing is owed", func() bool {
		b, err := os.ReadFile(n.lastOwed())
		return err == nil && !strings.Contains(string(b), "idle")
	})
}

// What is kept and can't be read holds nobody, and is said.
func TestWhatIsOwedAndCantBeRead(t *testing.T) {
	var mu sync.Mutex
	var text bytes.Buffer
	n := startNode(t, func(c *Config) {
		c.Log = slog.New(slog.NewTextHandler(writes(func(b []byte) (int, error) { mu.Lock(); defer mu.Unlock(); return text.Write(b) }), nil))
	})
	for what, content := range map[string]string{
		"cut short":    `{"v":1,"cards":{"` + cardA + `":[{"ui`,
		"of tomorrow":  `{"v":2,"cards":{}}`,
		"not of ours":  "[]",
		"empty":        "",
		"of strangers": `{"v":1,"cards":{"` + cardA + `":[{"uid":"","container":"app"}]}}`,
	} {
		n.stop()
		if err := os.WriteFile(n.lastOwed(), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		mu.Lock()
		text.Reset()
		mu.Unlock()
		n.start()
		n.mu.Lock()
		owed := len(n.owed)
		n.mu.Unlock()
		mu.Lock()
		said := strings.Contains(text.String(), "which pods wait for word that MPS serves again is forgotten")
		mu.Unlock()
		if owed != 0 || said != (what != "of strangers") {
			t.Errorf("%s: owed to %d, said %v", what, owed, said)
		}
	}
}

type writes func([]byte) (int, error)

func (w writes) Write(b []byte) (int, error) { return w(b) }
