package agent

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/v1alpha1"
	"github.com/carve-gpu/carve/vgpu/gpu"
	"github.com/carve-gpu/carve/vgpu/region"
)

// fakeLayer holds containers in a map.
type fakeLayer struct {
	mu sync.Mutex
	// cant says why a card can't be held, fault why a container can't.
	cant  map[string]string
	fault error
	// limits are those in force, by container; used is what it counts.
	limits map[string]map[string]uint64
	used   map[string]uint64
	// log has each change.
	log []string
}

func (l *fakeLayer) Name() string { return "dmem" }

func (l *fakeLayer) Look(cards []gpu.Card) map[string]error {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := map[string]error{}
	for _, c := range cards {
		out[c.UUID] = nil
		if why := l.cant[c.UUID]; why != "" {
			out[c.UUID] = errors.New(why)
		}
	}
	return out
}

func (l *fakeLayer) Hold(pid int, id string, limits map[string]uint64) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.fault != nil:
		return l.fault
	case pid == 0:
		return errors.New("its process isn't known")
	}
	for card, bytes := range limits {
		if bytes < l.used[card] {
			return fmt.Errorf("the limit of %s stays: %w", card, gpu.ErrInUse)
		}
	}
	if !maps.Equal(l.limits[id], limits) {
		l.log = append(l.log, fmt.Sprintf("%s %d", id, limits[cardA]>>20))
		if l.limits == nil {
			l.limits = map[string]map[string]uint64{}
		}
		l.limits[id] = maps.Clone(limits)
	}
	return nil
}

func (l *fakeLayer) Used(int, string) (map[string]uint64, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return maps.Clone(l.used), nil
}

func (l *fakeLayer) set(change func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	change()
}

func (l *fakeLayer) said() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Join(l.log, ", ")
}

func withLayer(l *fakeLayer) func(*Config) { return func(c *Config) { c.Layers = []Layer{l} } }

// inForce is what the report says of the node and its first card.
func (n *testNode) inForce() string {
	s, _ := n.api.report()
	if len(s.Cards) == 0 {
		return ""
	}
	return s.Enforcement + " " + strings.Join(s.Cards[0].Layers, ",") + " " + s.EnforcementReason
}

func TestTheReportSaysWhichLayersHold(t *testing.T) {
	plain := startNode(t)
	eventually(t, "a report", func() bool { return plain.inForce() == "advisory library no other layer is set up" })

	l := &fakeLayer{cant: map[string]string{cardA: "no region of the card", cardB: "no region of the card"}}
	n := startNode(t, withLayer(l))
	n.link()
	eventually(t, "advisory, with the reason once", func() bool { return n.inForce() == "advisory library dmem: no region of the card" })
	l.set(func() { l.cant = map[string]string{cardB: "it's a MIG card"} })
	n.readCards()
	// On one of two cards: the node's limits are as good as the weakest.
	eventually(t, "one card", func() bool { return n.inForce() == "advisory dmem,library dmem: it's a MIG card" })
	l.set(func() { l.cant = nil })
	n.readCards()
	eventually(t, "both cards", func() bool { return n.inForce() == "dmem dmem,library " })
	_, writes := n.api.report()
	for range 5 {
		n.readCards()
		n.report()
		time.Sleep(100 * time.Millisecond)
	}
	if _, now := n.api.report(); now != writes {
		t.Errorf("%d writes though nothing changed", now-writes)
	}
}

// The memory of a card in mode mps is its server's, so no layer that counts by container
// holds it there.
func TestNoLayerHoldsACardInModeMPS(t *testing.T) {
	n := startNode(t, withLayer(&fakeLayer{}))
	n.link()
	eventually(t, "the layer is known", func() bool { return n.inForce() == "dmem dmem,library " })
	n.api.setPod(podWith(t, "u", grantOf("u", 1, modeShare(cardA, 1000, 10, api.ModeMPS))))
	eventually(t, "it isn't in force", func() bool {
		return strings.HasPrefix(n.inForce(), "advisory library dmem: in mode mps the memory is the MPS server's")
	})
	n.api.deletePod("u")
	eventually(t, "it is again", func() bool { return n.inForce() == "dmem dmem,library " })
}

func TestALayerHoldsAContainerBeforeItStarts(t *testing.T) {
	l := &fakeLayer{}
	n := startNode(t, withLayer(l))
	n.link()
	eventually(t, "the layer is known", func() bool { return strings.HasPrefix(n.inForce(), "dmem ") })
	n.api.setPod(podWith(t, "uid-1", grantOf("uid-1", 1, map[string][]api.CardGrant{"app": shareOf(cardA, 4000, 0)})))
	eventually(t, "the slice is prepared", func() bool { return n.prepared("uid-1", "app") })
	n.Adjusted(RuntimeContainer{ID: "c1", PodUID: "uid-1", Name: "app"})
	if err := n.Starting("c1", 7); err != nil {
		t.Fatal(err)
	}
	if got := l.said(); got != "c1 4000" {
		t.Fatalf("held before the start: %q", got)
	}
	n.Started("c1", 7)

	// A resize: down in the layer once the library is lowered and it fits, up before
	// the library is raised.
	resize := func(generation int, mib int64) {
		p := podWith(t, "uid-1", grantOf("uid-1", generation, map[string][]api.CardGrant{"app": shareOf(cardA, mib, 0)}))
		n.api.setPod(p)
	}
	// The process isn't real, so it would be ended soon; it isn't looked at here.
	limit := func() uint64 {
		f, err := region.ReadLimits(n.files.limits("uid-1", "app"))
		if err != nil {
			t.Fatal(err)
		}
		return f.Cards[0].LimitBytes >> 20
	}
	resize(2, 6000)
	eventually(t, "it is in force", func() bool { return limit() == 6000 })
	resize(3, 2000)
	eventually(t, "it is in force", func() bool { return l.said() == "c1 4000, c1 6000, c1 2000" && limit() == 2000 })
	l.set(func() { l.used = map[string]uint64{cardA: 1500 << 20} })
	resize(4, 1000)
	eventually(t, "it is refused", func() bool {
		s, _ := n.api.report()
		return len(s.Cards) > 0 && len(s.Cards[0].Slices) == 1 && s.Cards[0].Slices[0].RefusedGeneration == 4 && limit() == 2000
	})
	if got := l.said(); got != "c1 4000, c1 6000, c1 2000" {
		t.Errorf("held as %q", got)
	}
}

func TestALayerThatFailsIsReportedAndTheLibraryHolds(t *testing.T) {
	l := &fakeLayer{fault: errors.New("read-only file system")}
	n := startNode(t, withLayer(l))
	n.link()
	n.api.setPod(podWith(t, "uid-1", grantOf("uid-1", 1, map[string][]api.CardGrant{"app": shareOf(cardA, 4000, 0)})))
	eventually(t, "the slice is prepared", func() bool { return n.prepared("uid-1", "app") })
	eventually(t, "the layer is known", func() bool { return strings.HasPrefix(n.inForce(), "dmem ") })
	cmd, _ := tenant(t)
	n.Adjusted(RuntimeContainer{ID: "c1", PodUID: "uid-1", Name: "app"})
	if err := n.Starting("c1", cmd.Process.Pid); err != nil {
		t.Fatalf("the container isn't started: %v", err)
	}
	n.Started("c1", cmd.Process.Pid)
	eventually(t, "advisory", func() bool { return n.inForce() == "advisory library dmem: read-only file system" })
	s, _ := n.api.report()
	if got := strings.Join(s.Cards[1].Layers, ","); got != "dmem,library" {
		t.Errorf("the other card has %s", got)
	}
	// A container that has ended is no fault, and what is mended is seen.
	l.set(func() { l.fault = nil })
	eventually(t, "in force again", func() bool { return n.inForce() == "dmem dmem,library " && l.said() == "c1 4000" })
	l.set(func() { l.fault = fmt.Errorf("hold: %w", gpu.ErrEnded); l.limits = nil })
	_, writes := n.api.report()
	time.Sleep(2 * reclaimEvery)
	if _, now := n.api.report(); now != writes || n.inForce() != "dmem dmem,library " {
		t.Errorf("a container that ended: %s, %d writes", n.inForce(), now-writes)
	}
	// After a restart of the agent it is held at once.
	l.set(func() { l.fault, l.log = nil, nil })
	n.stop()
	n.start()
	n.link(RuntimeContainer{ID: "c1", PodUID: "uid-1", Name: "app", Adjusted: true, HostPID: cmd.Process.Pid})
	eventually(t, "held after a restart", func() bool { return l.said() == "c1 4000" })
}

// What a layer counts takes the place of the driver's figures, and isn't added to
// them: it is of the same memory.
func TestTheLayersFigureTakesThePlaceOfTheDrivers(t *testing.T) {
	l := &fakeLayer{}
	inC1 := func(c *Config) { c.groupsOf = func(int) (string, error) { return "0::/c1", nil } }
	n := startNode(t, withLayer(l), inC1)
	n.link()
	n.api.setPod(podWith(t, "uid-1", grantOf("uid-1", 1, map[string][]api.CardGrant{"app": shareOf(cardA, 4000, 0)})))
	eventually(t, "the slice is prepared", func() bool { return n.prepared("uid-1", "app") })
	cmd, p := tenant(t)
	n.Adjusted(RuntimeContainer{ID: "c1", PodUID: "uid-1", Name: "app"})
	n.Started("c1", cmd.Process.Pid)
	usage := n.files.usage("uid-1", "app")
	takeSlot(t, usage, 0, p, 1000<<20, 0)
	n.cards.mu.Lock()
	n.cards.processes = []gpu.Process{{PID: cmd.Process.Pid, UsedBytes: 3000 << 20}}
	n.cards.mu.Unlock()
	residual := func() uint64 {
		f, err := region.ReadLimits(n.files.limits("uid-1", "app"))
		if err != nil {
			t.Fatal(err)
		}
		return f.Live[0].ResidualBytes >> 20
	}
	eventually(t, "the driver's figure", func() bool { return residual() == 2000 })
	l.set(func() { l.used = map[string]uint64{cardA: 1300 << 20} })
	eventually(t, "the layer's figure", func() bool { return residual() == 300 })
	l.set(func() { l.used = map[string]uint64{cardB: 1} })
	eventually(t, "the driver's, as the layer doesn't count this card", func() bool { return residual() == 2000 })
	s, _ := n.api.report()
	for _, c := range s.Cards {
		for _, x := range c.Slices {
			if x.State == v1alpha1.Active && (x.ResidualMiB < 200 || x.ResidualMiB > 2000) {
				t.Errorf("the report says %d MiB", x.ResidualMiB)
			}
		}
	}
}

func TestBeyondWhatALayerCounts(t *testing.T) {
	managed := slotOf(1, 500, 0)
	managed.Cards[0].ManagedBytes = 300
	oversold, endless := slotOf(1, 300, 0), slotOf(1, 300, 0)
	oversold.Cards[0].UnchargedBytes, endless.Cards[0].UnchargedBytes = 2000, math.MaxUint64
	dead := slotOf(2, 400, 0)
	dead.State = region.SlotDying
	for name, c := range map[string]struct {
		before, after region.Usage
		used          uint64
		want          span
		beside        bool
	}{
		"what isn't charged, where that is granted":   {usageOf(oversold), usageOf(oversold), 2300, span{0, 0}, true},
		"what isn't charged, of a share that may not": {usageOf(oversold), usageOf(oversold), 2300, span{2000, 2000}, false},
		"more than that":                  {usageOf(oversold), usageOf(oversold), 2350, span{50, 50}, true},
		"while it moves":                  {usageOf(slotOf(1, 300, 0)), usageOf(oversold), 2400, span{100, 2400}, true},
		"a figure that can't be":          {usageOf(endless), usageOf(endless), 2300, span{0, 0}, true},
		"all of it charged":               {usageOf(slotOf(1, 300, 0)), usageOf(slotOf(1, 300, 0)), 300, span{0, 0}, false},
		"more":                            {usageOf(slotOf(1, 300, 0)), usageOf(slotOf(1, 300, 0)), 750, span{450, 450}, false},
		"managed memory may be in it":     {usageOf(managed), usageOf(managed), 500, span{0, 0}, false},
		"what the dead held is in both":   {usageOf(slotOf(1, 300, 0), dead), usageOf(slotOf(1, 300, 0), dead), 700, span{0, 0}, false},
		"a slot that doesn't stand still": {usageOf(slotOf(1, 300, 2)), usageOf(slotOf(1, 300, 4)), 700, span{400, 700}, false},
	} {
		if got := beyondAll(c.before, c.after, 0, c.used, 1000, c.beside); got != c.want {
			t.Errorf("%s: %+v, want %+v", name, got, c.want)
		}
	}
}
