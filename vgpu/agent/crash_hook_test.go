package agent

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/carve-gpu/carve/api"
)

// undurable are the steps between which nothing is written: the hook's answers,
// and the report, which tells of what is. They come in any order with the
// durable ones, so they aren't counted, but named.
var undurable = []string{"hook-adjusting", "hook-adjusted", "hook-started", "hook-exiting", "hook-exited", "report-write", "report-written"}

// The one container that playRuntime has. What the runtime knows of it is in
// files of these names: it outlasts the agent.
const (
	crashContainer = "c1"
	crashCreated   = "runtime-created"
	crashExited    = "runtime-exited"
)

// playRuntime has a container made as soon as its slice is there, and ends it
// when the test says so.
func playRuntime(a *Agent, dir string) {
	until := func(holds func() bool) {
		for !holds() {
			time.Sleep(time.Millisecond)
		}
	}
	c := RuntimeContainer{ID: crashContainer, PodUID: "uid-goes", Name: "app"}
	until(func() bool { p, err := a.Slice(c); return err == nil && p != nil })
	a.step("hook-adjusting")
	a.Adjusted(c)
	a.step("hook-adjusted")
	// The runtime goes on when the hook has answered, and not before.
	os.WriteFile(filepath.Join(dir, crashCreated), nil, 0o600)
	a.Started(crashContainer, 0)
	a.step("hook-started")
	until(func() bool { _, err := os.Stat(filepath.Join(dir, crashExited)); return err == nil })
	a.step("hook-exiting")
	a.Exited(crashContainer)
	a.step("hook-exited")
}

// TestKilledAtTheHooksAnswers kills the agent at each of them and at its report,
// with a container that starts, runs while its pod is deleted, and ends: the
// slice is there as long as the container is, and gone afterwards.
func TestKilledAtTheHooksAnswers(t *testing.T) {
	for _, at := range undurable {
		n := newCrashNode(t)
		f := n.slices()
		has := func(name string) bool { _, err := os.Stat(filepath.Join(n.dir, name)); return err == nil }
		slice := filepath.Join(f.dir, "uid-goes")
		killed := n.killAtNamed(at, func(until func(func() bool)) {
			n.api.setPod(podWith(t, "uid-goes", grantOf("uid-goes", 1, map[string][]api.CardGrant{"app": shareOf(cardA, 512, 0)})))
			until(func() bool { return has(crashCreated) })
			n.api.deletePod("uid-goes")
			if at == "hook-exiting" || at == "hook-exited" {
				if err := os.WriteFile(filepath.Join(n.dir, crashExited), nil, 0o600); err != nil {
					t.Fatal(err)
				}
			}
			until(func() bool { return false })
		})
		if killed != at {
			t.Errorf("killed at %q, want %q", killed, at)
		}
		n.start()
		n.check()
		if has(crashCreated) && !has(crashExited) {
			n.link(RuntimeContainer{ID: crashContainer, PodUID: "uid-goes", Name: "app", Adjusted: true})
			time.Sleep(100 * time.Millisecond)
			if _, err := os.Stat(slice); err != nil {
				t.Errorf("after %s the slice of a running container is gone", at)
			}
			n.Exited(crashContainer)
		} else {
			n.link()
		}
		eventually(t, "after "+at+" nothing is left", func() bool { return len(n.leftovers()) == 0 })
		eventually(t, "after "+at+" the report shows no slice", func() bool {
			s, _ := n.api.report()
			return len(s.Cards) == 2 && slicesOf(s, cardA) == ""
		})
		if m := mountsBelow(t, n.dir); m != 0 {
			t.Errorf("after %s there are %d mounts left", at, m)
		}
		n.stop()
	}
}
