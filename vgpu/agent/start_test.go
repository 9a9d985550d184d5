package agent

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/v1alpha1"
)

// share-20, node-1: one card fails, the other is served on.
func TestOneFailingCard(t *testing.T) {
	n := startNode(t)
	n.link()
	eventually(t, "both are healthy", func() bool {
		s, _ := n.api.report()
		return len(s.Cards) == 2 && s.Cards[0].Health.State == v1alpha1.Healthy && s.Cards[1].Health.State == v1alpha1.Healthy
	})
	n.api.setPod(podWith(t, "uid-old", grantOf("uid-old", 1, map[string][]api.CardGrant{"app": shareOf(cardA, 100, 0)})))
	eventually(t, "the slice is prepared", func() bool { return n.prepared("uid-old", "app") })
	var slots int
	n.SlotsChanged = func(s int) { slots = s }
	n.cards.mu.Lock()
	n.cards.fault = map[string]string{cardA: "GPU is lost"}
	n.cards.mu.Unlock()
	n.readCards()
	eventually(t, "it is reported", func() bool {
		s, _ := n.api.report()
		return s.Cards[0].Health.State == v1alpha1.Quarantined && s.Cards[0].Health.Reason == "GPU is lost" && s.Cards[1].Health.State == v1alpha1.Healthy
	})
	if slots != 2*api.SlotsPerCard {
		t.Errorf("%d slots: fewer would turn away pods that hold a grant for the other card", slots)
	}
	n.api.setPod(podWith(t, "uid-a", grantOf("uid-a", 1, map[string][]api.CardGrant{"app": shareOf(cardA, 100, 0)})))
	n.api.setPod(podWith(t, "uid-b", grantOf("uid-b", 1, map[string][]api.CardGrant{"app": shareOf(cardB, 100, 0)})))
	eventually(t, "the healthy one is served", func() bool { return n.prepared("uid-b", "app") })
	eventually(t, "the other is refused", func() bool { return strings.Contains(n.refusal("uid-a"), "GPU is lost") })
	if !n.prepared("uid-old", "app") {
		t.Error("what was there before lost its slice")
	}
}

func TestADriverThatDoesNotAnswerAtStart(t *testing.T) {
	n := startNode(t)
	eventually(t, "cards are known", func() bool { n.mu.Lock(); defer n.mu.Unlock(); return n.hardware.known })
	n.stop()
	n.cards.mu.Lock()
	n.cards.err = errors.New("driver/library version mismatch")
	n.cards.mu.Unlock()
	n.start()
	n.link()
	eventually(t, "the last cards are reported, with the reason", func() bool {
		s, _ := n.api.report()
		return len(s.Cards) == 2 && strings.Contains(s.Cards[1].Health.Reason, "version mismatch")
	})
	if err := n.Ready(); err == nil || !strings.Contains(err.Error(), "version mismatch") {
		t.Errorf("ready: %v", err)
	}
	n.api.setPod(podWith(t, "uid-1", grantOf("uid-1", 1, map[string][]api.CardGrant{"app": shareOf(cardA, 100, 0)})))
	n.cards.mu.Lock()
	n.cards.err = nil
	n.cards.mu.Unlock()
	n.readCards()
	eventually(t, "the slice is prepared once it answers", func() bool { return n.prepared("uid-1", "app") })
	eventually(t, "the agent is ready", func() bool { return n.Ready() == nil })
}

func TestASecondAgentWaitsForTheFirst(t *testing.T) {
	n := startNode(t)
	ctx, cancel := context.WithTimeout(t.Context(), 150*time.Millisecond)
	defer cancel()
	if _, err := New(ctx, testConfig(t, n.dir, n.api, n.cards)); err == nil || !strings.Contains(err.Error(), "another agent holds") {
		t.Fatalf("two agents own one journal: %v", err)
	}
	second := make(chan error, 1)
	go func() {
		a, err := New(t.Context(), testConfig(t, n.dir, n.api, n.cards))
		if err == nil {
			a.lock.Close()
			a.queue.ShutDown()
		}
		second <- err
	}()
	eventually(t, "the first knows that it is followed", n.Followed)
	n.stop()
	if err := <-second; err != nil {
		t.Error(err)
	}
	if n.Followed() {
		t.Error("followed by an agent that doesn't wait any more")
	}
}

func TestOperatorsSlotsReachThePlugin(t *testing.T) {
	n := startNode(t)
	eventually(t, "a report", func() bool { s, _ := n.api.report(); return s.SlotsPerCard == api.SlotsPerCard })
	got := make(chan int, 8)
	n.mu.Lock()
	n.SlotsChanged = func(s int) { got <- s }
	n.mu.Unlock()
	n.api.mu.Lock()
	wish := int32(4)
	n.api.version++
	n.api.node.Spec.SlotsPerCard = &wish
	n.api.node = n.api.node.DeepCopy()
	n.api.node.ResourceVersion = "1" + n.api.node.ResourceVersion
	n.api.note("gpunodes", "MODIFIED", n.api.node)
	n.api.mu.Unlock()
	if s := <-got; s != 8 {
		t.Errorf("%d slots, want 8", s)
	}
}
