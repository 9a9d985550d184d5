package agent

import (
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/vgpu/gpu"
	"github.com/carve-gpu/carve/vgpu/region"
)

// two is a grant of two containers, one on two cards.
func two(generation int, app, side int64, cores int) api.Grant {
	return grantOf("uid-1", generation, map[string][]api.CardGrant{
		"app":  append(shareOf(cardA, app, cores), shareOf(cardB, app, cores)...),
		"side": shareOf(cardB, side, 0),
	})
}

// agreed says what differs between a pod's journal record, its limits files and
// the report; empty if nothing does and all of them are of the generation.
func (n *testNode) agreed(g api.Grant, refused int) string {
	r, err := readRecord(filepath.Join(n.dir, "state", "journal", g.UID+".json"))
	if err != nil || !reflect.DeepEqual(r.Grant, g) {
		return fmt.Sprintf("the journal has %+v (%v)", r.Grant, err)
	}
	if why := filesAre(n.slices(), g); why != "" {
		return why
	}
	status, _ := n.api.report()
	found := 0
	for _, c := range status.Cards {
		for _, s := range c.Slices {
			for _, want := range g.Containers[s.Container] {
				if want.Card != c.UUID {
					continue
				}
				found++
				if s.MemMiB != want.MemMiB || int(s.Cores) != want.Cores || int(s.Generation) != g.Generation || int(s.RefusedGeneration) != refused || (s.Refusal != "") != (refused > 0) {
					return fmt.Sprintf("the report has %+v", s)
				}
			}
		}
	}
	if found != 3 {
		return fmt.Sprintf("the report has %d slices", found)
	}
	return ""
}

// filesAre compares the limits files of a pod with its grant.
func filesAre(f files, g api.Grant) string {
	for name, cards := range g.Containers {
		want, err := limitsOf(cards, anyFacts)
		if err != nil {
			return err.Error()
		}
		if have, err := region.ReadLimits(f.limits(g.UID, name)); err != nil || !sameLimits(have, want) {
			return fmt.Sprintf("the limits of %s are %+v (%v)", name, have.Cards, err)
		}
	}
	return ""
}

func (n *testNode) wantAgreed(what string, g api.Grant, refused int) {
	n.t.Helper()
	last := ""
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); time.Sleep(2 * time.Millisecond) {
		if last = n.agreed(g, refused); last == "" {
			return
		}
	}
	n.t.Fatalf("%s: %s, want generation %d", what, last, g.Generation)
}

func TestALiveResize(t *testing.T) {
	n := startNode(t)
	n.link()
	n.api.setPod(podWith(t, "uid-1", two(1, 1000, 500, 10)))
	n.wantAgreed("at first", two(1, 1000, 500, 10), 0)
	n.api.setPod(podWith(t, "uid-1", two(2, 2000, 600, 20)))
	n.wantAgreed("after growth", two(2, 2000, 600, 20), 0)
	// One container uses some of its memory on its second card.
	_, owner := tenant(t)
	takeSlot(t, n.files.usage("uid-1", "side"), 0, owner, 400<<20, 0)
	n.api.setPod(podWith(t, "uid-1", two(3, 3000, 400, 20)))
	n.wantAgreed("down to what is in use", two(3, 3000, 400, 20), 0)

	// All or nothing: one that grows doesn't while the other can't shrink.
	n.api.setPod(podWith(t, "uid-1", two(4, 4000, 399, 30)))
	n.wantAgreed("below what is in use", two(3, 3000, 400, 20), 4)
	if why := n.refusal("uid-1"); why != "" {
		t.Errorf("the grant in force is refused: %s", why)
	}
	eventually(t, "an event", func() bool {
		return strings.Contains(n.api.said(), "pod-uid-1 ResizeRefused: container side uses 400 MiB of card "+cardB+", and the resize would leave it 399 MiB")
	})
	// It isn't tried again and again: the limits of a running program would
	// go up and down.
	l, _ := region.ReadLimits(n.files.limits("uid-1", "side"))
	for range 5 {
		p := podWith(t, "uid-1", two(4, 4000, 399, 30))
		p.Labels = map[string]string{"x": fmt.Sprint(time.Now())}
		n.api.setPod(p)
		time.Sleep(5 * time.Millisecond)
	}
	if again, _ := region.ReadLimits(n.files.limits("uid-1", "side")); again.Generation != l.Generation {
		t.Errorf("the limits were written %d times more", again.Generation-l.Generation)
	}
	// The extender takes it back.
	n.api.setPod(podWith(t, "uid-1", two(5, 3000, 400, 20)))
	n.wantAgreed("after it was taken back", two(5, 3000, 400, 20), 0)

	// A grant that this node has no room for is refused in the same way.
	n.api.setPod(podWith(t, "uid-1", two(6, 90000, 400, 20)))
	n.wantAgreed("beyond the card", two(5, 3000, 400, 20), 6)
	// A late one of an earlier generation changes nothing.
	n.api.setPod(podWith(t, "uid-1", two(2, 2000, 600, 20)))
	time.Sleep(20 * time.Millisecond)
	n.wantAgreed("after a late one", two(5, 3000, 400, 20), 6)
}

// The container's own word on what it uses is not the last one.
func TestAContainerThatHidesWhatItUsesCanNotGiveItUp(t *testing.T) {
	n := startNode(t)
	n.link()
	n.api.setPod(podWith(t, "uid-1", two(1, 1000, 500, 0)))
	n.wantAgreed("at first", two(1, 1000, 500, 0), 0)
	groups, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		t.Fatal(err)
	}
	// This process stands for the container's: what its cgroup is called is the
	// container's ID.
	id := strings.TrimSpace(string(groups))
	n.Adjusted(RuntimeContainer{ID: id, PodUID: "uid-1", Name: "side"})
	n.cards.mu.Lock()
	n.cards.processes = []gpu.Process{{PID: os.Getpid(), UsedBytes: 300 << 20}, {PID: 1 << 30, UsedBytes: 1 << 40}}
	n.cards.mu.Unlock()
	n.api.setPod(podWith(t, "uid-1", two(2, 1000, 299, 0)))
	eventually(t, "it is refused", func() bool {
		status, _ := n.api.report()
		for _, c := range status.Cards {
			for _, s := range c.Slices {
				if s.RefusedGeneration == 2 && strings.Contains(s.Refusal, "uses 300 MiB") {
					return true
				}
			}
		}
		return false
	})
	if why := filesAre(n.files, two(1, 1000, 500, 0)); why != "" {
		t.Error(why)
	}
	n.api.setPod(podWith(t, "uid-1", two(3, 1000, 300, 0)))
	eventually(t, "what fits is done", func() bool { return filesAre(n.files, two(3, 1000, 300, 0)) == "" })
}

// A container that starts after a resize gets today's grant and not the one that
// its sandbox was made with; an agent that was away applies what it missed.
func TestAResizeWhileTheAgentIsAwayAndAContainerThatRestarts(t *testing.T) {
	n := startNode(t)
	n.link()
	first := podWith(t, "uid-1", two(1, 1000, 500, 10))
	n.api.setPod(first)
	n.wantAgreed("at first", two(1, 1000, 500, 10), 0)
	n.Adjusted(RuntimeContainer{ID: "c1", PodUID: "uid-1", Name: "app"})
	n.stop()
	n.api.setPod(podWith(t, "uid-1", two(2, 800, 700, 20)))
	n.start()
	n.link()
	n.Synchronize([]RuntimeContainer{{ID: "c1", PodUID: "uid-1", Name: "app", Adjusted: true, HostPID: os.Getpid()}})
	n.wantAgreed("after the agent came back", two(2, 800, 700, 20), 0)
	n.Exited("c1")
	n.SandboxStarted("uid-1", "default", "pod-uid-1", map[string]string{api.AnnotationGrant: first.Annotations[api.AnnotationGrant], configSource: "api"})
	p, err := n.Slice(RuntimeContainer{ID: "c2", PodUID: "uid-1", Name: "app"})
	if err != nil || p == nil || p.Generation != 2 {
		t.Fatalf("%+v, %v", p, err)
	}
	n.wantAgreed("after the container restarted", two(2, 800, 700, 20), 0)
}

// A pod whose one container grows and whose other shrinks has, after a kill at
// any step, limits, journal and report of one generation: of the new one where
// what is in use fits, else of the old one.
func TestAResizeKilledAtEveryStep(t *testing.T) {
	for name, used := range map[string]uint64{"fits": 200 << 20, "doesn't fit": 300 << 20} {
		t.Run(name, func(t *testing.T) {
			old, next := two(1, 1000, 500, 10), two(2, 2000, 250, 20)
			end, refused := next, 0
			if used > 250<<20 {
				end, refused = old, 2
			}
			steps := map[string]int{}
			_, owner := tenant(t)
			owner.HostPID = 0 // no container runs here, so nobody looks whether it has the file
			for step := 1; ; step++ {
				if step > 200 {
					t.Fatal("the agent never got through its steps")
				}
				n := newCrashNode(t)
				killed := n.killAt(step, func(until func(func() bool)) {
					n.api.setPod(podWith(t, "uid-1", old))
					until(func() bool { return n.agreed(old, 0) == "" })
					if _, err := os.Stat(n.slices().usage("uid-1", "side")); err == nil {
						takeSlot(t, n.slices().usage("uid-1", "side"), 0, owner, used, 0)
					}
					n.api.setPod(podWith(t, "uid-1", next))
					until(func() bool { return n.agreed(end, refused) == "" })
				})
				clear := func() {
					if err := n.slices().clear("uid-1"); err != nil {
						t.Error(err)
					}
				}
				if killed == "" {
					clear()
					break
				}
				steps[killed]++
				// With the API server away there is the journal alone to go by.
				n.api.setAway(true)
				n.start()
				// A pod that no record holds starts with what the API shows then.
				want, no := next, 0
				if r, err := readRecord(filepath.Join(n.dir, "state", "journal", "uid-1.json")); err == nil {
					want, no = end, refused
					if why := filesAre(n.slices(), r.Grant); why != "" {
						t.Errorf("killed at %s: the journal has generation %d, but %s", killed, r.Grant.Generation, why)
					}
					takeSlot(t, n.slices().usage("uid-1", "side"), 0, owner, used, 0)
				}
				n.api.setAway(false)
				n.link()
				n.wantAgreed("killed at "+killed, want, no)
				n.stop()
				clear()
			}
			for _, want := range []string{"limits-lower", "limits-lowered", "journal-hold", "journal-held", "files-prepare", "files-prepared"} {
				if steps[want] == 0 && (refused == 0 || strings.HasPrefix(want, "limits")) {
					t.Errorf("the agent was never killed at %s: %v", want, steps)
				}
			}
			t.Logf("killed at %v", steps)
		})
	}
}
