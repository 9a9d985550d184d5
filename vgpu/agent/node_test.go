package agent

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/carve-gpu/carve/api"
)

// node-28: one card that can't be sampled doesn't take the others along.
func TestOneCardThatCannotBeSampled(t *testing.T) {
	n := startNode(t)
	n.cards.mu.Lock()
	n.cards.sick = cardA
	n.cards.mu.Unlock()
	eventually(t, "the cards are known", n.hardwareReady)
	v := n.View()
	if len(v.Cards) != 2 || v.Cards[0].Fault != "Unknown Error" || v.Cards[1].Fault != "" || v.Cards[1].Sample.UsedBytes != 1<<30 {
		t.Errorf("%+v", v.Cards)
	}
}

func TestANodeWithoutALinkSaysWhy(t *testing.T) {
	n := startNode(t)
	eventually(t, "all else is known", func() bool { n.mu.Lock(); defer n.mu.Unlock(); return n.watched && n.hardware.known })
	const why = "/run/nri.sock doesn't exist: NRI is off"
	n.LinkFault(why)
	time.Sleep(50 * time.Millisecond)
	if said := n.api.said(); strings.Contains(said, "HookDown") {
		t.Errorf("said at once, as if a restart of the runtime were a fault: %s", said)
	}
	n.mu.Lock()
	n.downSince = time.Now().Add(-linkGrace)
	n.mu.Unlock()
	if err := n.Ready(); err == nil || !strings.Contains(err.Error(), why) {
		t.Errorf("readiness says %v", err)
	}
	if why2, _, _ := n.missing("default", "any", "app"); !strings.Contains(why2, why) {
		t.Errorf("the kubelet is told %q", why2)
	}
	eventually(t, "an event on the node", func() bool {
		return strings.Contains(n.api.said(), nodeName+" HookDown: carve's hook has no link to the container runtime: "+why)
	})
	n.link()
	if err := n.Ready(); err != nil {
		t.Errorf("linked again, readiness says %v", err)
	}
	eventually(t, "an event that it is back", func() bool { return strings.Contains(n.api.said(), nodeName+" HookUp") })
	if got := strings.Count(n.api.said(), "HookDown"); got != 1 {
		t.Errorf("said %d times", got)
	}
}

// node-2: after a reboot the driver may be loaded late. The plugin registers
// with as many slots as before, the operator's wish included.
func TestSlotsAreKnownBeforeTheDriverIs(t *testing.T) {
	n := startNode(t)
	eventually(t, "a report", func() bool { s, _ := n.api.report(); return s.SlotsPerCard == api.SlotsPerCard })
	n.api.mu.Lock()
	wish := int32(4)
	n.api.version++
	n.api.node = n.api.node.DeepCopy()
	n.api.node.Spec.SlotsPerCard = &wish
	n.api.node.ResourceVersion = "1" + n.api.node.ResourceVersion
	n.api.note("gpunodes", "MODIFIED", n.api.node)
	n.api.mu.Unlock()
	eventually(t, "the wish is in force", func() bool { return n.slotsPerCard() == 4 })
	n.stop()
	n.cards.mu.Lock()
	n.cards.err = errors.New("no driver yet")
	n.cards.mu.Unlock()
	n.api.setAway(true)
	slots := make(chan int, 8)
	n.edit = []func(*Config){func(c *Config) { c.SlotsChanged = func(s int) { slots <- s } }}
	n.start() // returns when the agent could serve
	select {
	case s := <-slots:
		if s != 8 {
			t.Errorf("%d slots, want 8 as before", s)
		}
	default:
		t.Error("the plugin has no slots when it starts")
	}
	n.api.setAway(false)
}
