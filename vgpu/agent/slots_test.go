package agent

import (
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/v1alpha1"
	"github.com/carve-gpu/carve/vgpu/gpu"
)

// heard is a device plugin that notes what it is told.
type heard struct {
	mu  sync.Mutex
	all []int
}

func (h *heard) tell(n int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.all = append(h.all, n)
}

func (h *heard) said() []int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.all)
}

func (h *heard) last() int {
	if all := h.said(); len(all) > 0 {
		return all[len(all)-1]
	}
	return 0
}

func slicedTime(replicas int32) map[string]v1alpha1.Sharing {
	return map[string]v1alpha1.Sharing{cardA: {Mode: "timeslice", Replicas: replicas}, cardB: {Mode: "timeslice", Replicas: replicas}}
}

// Two changes at once: the device plugin is left with the later one.
func TestTheLastNumberOfSlotsIsToldLast(t *testing.T) {
	var told heard
	var first atomic.Bool
	entered, release := make(chan struct{}), make(chan struct{})
	n := startNode(t)
	eventually(t, "the cards are known", n.hardwareReady)
	n.tellMu.Lock()
	n.SlotsChanged = func(s int) {
		if first.CompareAndSwap(false, true) {
			close(entered)
			<-release
		}
		told.tell(s)
	}
	n.tellMu.Unlock()
	both := []string{cardA, cardB}
	var calls sync.WaitGroup
	calls.Go(func() { n.SetSharing(both, slicedTime(100)) })
	<-entered
	second := make(chan struct{})
	calls.Go(func() { n.SetSharing(both, slicedTime(200)); close(second) })
	// The second is known before the first was told; to be told it waits, or not.
	eventually(t, "the second is in force", func() bool {
		n.mu.Lock()
		defer n.mu.Unlock()
		return n.sharing[cardA].Replicas == 200
	})
	select {
	case <-second:
	case <-time.After(100 * time.Millisecond): // it could only be too fast
	}
	close(release)
	calls.Wait()
	if got := told.last(); got != 400 {
		t.Errorf("told %v: the last should be 400", told.said())
	}
}

// A pod that was bound while there were more slots is on its way to the kubelet, which
// turns it away for good where it finds fewer.
func TestFewerSlotsAreToldLater(t *testing.T) {
	var told heard
	n := startNode(t, func(c *Config) { c.SlotsChanged, c.fewerAfter = told.tell, time.Hour })
	both := []string{cardA, cardB}
	n.SetSharing(both, slicedTime(40))
	eventually(t, "replicas", func() bool { return told.last() == 80 })
	n.SetSharing(both, slicedTime(4))
	eventually(t, "a report of them", func() bool {
		s, _ := n.api.report()
		return len(s.Cards) == 2 && s.Cards[0].Sharing != nil && s.Cards[0].Sharing.Replicas == 4
	})
	if told.last() != 80 {
		t.Errorf("told %v, when pods may be on their way that were bound by 80", told.said())
	}
	// More than there were before are told at once.
	n.SetSharing(both, slicedTime(50))
	eventually(t, "more", func() bool { return told.last() == 100 })
	n.stop()

	n.edit = []func(*Config){func(c *Config) { c.SlotsChanged, c.fewerAfter = told.tell, 300*time.Millisecond }}
	n.start()
	n.SetSharing(both, slicedTime(50))
	eventually(t, "as before", func() bool { return told.last() == 100 })
	n.SetSharing(both, slicedTime(4))
	eventually(t, "fewer, with nothing else to make it look", func() bool { return told.last() == 8 })
}

// A grant that the watch has shown keeps its slot from then on, in place or not.
func TestAGrantOnItsWayKeepsItsSlot(t *testing.T) {
	var told heard
	n := startNode(t, func(c *Config) { c.SlotsChanged, c.fewerAfter = told.tell, time.Millisecond })
	both := []string{cardA, cardB}
	n.SetSharing(both, slicedTime(4))
	eventually(t, "replicas", func() bool { return told.last() == 8 })
	n.mu.Lock()
	for _, uid := range []string{"v", "w", "x"} {
		n.pods[uid] = readPod(podWith(t, uid, grantOf(uid, 1, modeShare(cardA, 100, 1, api.ModeTimeslice))))
	}
	n.mu.Unlock()
	n.SetSharing(both, slicedTime(2))
	eventually(t, "three on their way and two replicas", func() bool { return told.last() == 5 })
	if all := told.said(); slices.Contains(all, 4) {
		t.Errorf("told %v", all)
	}
}

// node-23: a pod that another scheduler bound doesn't become one replica too many.
func TestNoMoreContainersThanReplicas(t *testing.T) {
	n := startNode(t)
	n.link()
	n.SetSharing([]string{cardA, cardB}, map[string]v1alpha1.Sharing{cardA: {Mode: "timeslice", Replicas: 2}})
	slice := func(uid, card string) {
		n.api.setPod(podWith(t, uid, grantOf(uid, 1, modeShare(card, 100, 1, api.ModeTimeslice))))
	}
	for _, uid := range []string{"u1", "u2"} {
		slice(uid, cardA)
		eventually(t, "it has its replica", func() bool { return n.prepared(uid, "app") })
	}
	slice("u3", cardA)
	eventually(t, "one more is refused", func() bool {
		return strings.Contains(n.refusal("u3"), "card "+cardA+" has 2 replicas, 2 are in use by other pods of this node and the grant takes 1")
	})
	slice("u4", cardB)
	eventually(t, "another card isn't concerned", func() bool { return n.prepared("u4", "app") })
	// What runs is left alone by fewer replicas.
	n.SetSharing([]string{cardA, cardB}, map[string]v1alpha1.Sharing{cardA: {Mode: "timeslice", Replicas: 1}})
	n.queueAll()
	eventually(t, "a report of it", func() bool {
		s, _ := n.api.report()
		return len(s.Cards) == 2 && s.Cards[0].Sharing != nil && s.Cards[0].Sharing.Replicas == 1
	})
	if !n.prepared("u1", "app") || !n.prepared("u2", "app") {
		t.Error("a replica that runs was taken away")
	}
}

// Nor one client too many of an MPS server.
func TestNoMoreClientsThanAServerTakes(t *testing.T) {
	inventory, _ := (&twoCards{}).Inventory()
	old, recent := inventory.Cards[0], inventory.Cards[1]
	old.ComputeMajor, recent.ComputeMajor = 6, 8
	for _, c := range []struct {
		card string
		held int
		want string
	}{
		{old.UUID, 15, ""}, {old.UUID, 16, "an MPS server takes 16 clients on card " + old.UUID},
		{recent.UUID, 47, ""}, {recent.UUID, 48, "an MPS server takes 48 clients on card " + recent.UUID},
	} {
		n := node{name: nodeName, cards: map[string]gpu.Card{old.UUID: old, recent.UUID: recent}, held: map[string]record{}}
		for i := range c.held {
			uid := strings.Repeat("v", i+1)
			n.held[uid] = record{State: stateHeld, Grant: grantOf(uid, 1, modeShare(c.card, 10, 1, api.ModeMPS)), Order: appOrder("app")}
		}
		err := n.admit(candidate{grant: grantOf("u", 1, modeShare(c.card, 10, 1, api.ModeMPS)), uid: "u", order: appOrder("app")})
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
			t.Errorf("%d beside it: %v, want %q", c.held, err, c.want)
		}
	}
}
