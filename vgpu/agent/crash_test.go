package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/gpunodes"
	"github.com/carve-gpu/carve/vgpu/gpu"
	"github.com/carve-gpu/carve/vgpu/region"
)

// The environment of an agent that is to be killed.
const (
	crashDir  = "CARVE_TEST_CRASH_DIR"
	crashURL  = "CARVE_TEST_CRASH_URL"
	crashStep = "CARVE_TEST_CRASH_STEP"
)

// crashingAgent is the whole of a process that runs an agent and kills itself
// at the given durable step.
func crashingAgent(dir string) {
	at := os.Getenv(crashStep)
	left, err := strconv.Atoi(at)
	if err != nil {
		left = -1 // it is a name
	}
	config := &rest.Config{Host: os.Getenv(crashURL), ContentConfig: rest.ContentConfig{ContentType: "application/json"}, QPS: -1}
	pods, err := kubernetes.NewForConfig(config)
	if err != nil {
		panic(err)
	}
	reports, err := gpunodes.New(config)
	if err != nil {
		panic(err)
	}
	steps := make(chan int, 1)
	steps <- left
	a, err := New(context.Background(), Config{
		Node: nodeName, RunDir: filepath.Join(dir, "run"), StateDir: filepath.Join(dir, "state"), LibDir: filepath.Join(dir, "lib"),
		Root:         gpu.Root{Path: filepath.Join(dir, "driver")},
		OpenHardware: func() (Hardware, error) { return &twoCards{}, nil },
		Pods:         pods, Reports: reports, Log: slog.New(slog.DiscardHandler),
		step: func(name string) {
			n := <-steps
			if !slices.Contains(undurable, name) {
				n--
			}
			if n == 0 || left < 0 && name == at {
				os.Stdout.WriteString(name)
				syscall.Kill(os.Getpid(), syscall.SIGKILL)
				select {}
			}
			steps <- n
		},
	})
	if err != nil {
		panic(err)
	}
	a.Synchronize(nil)
	a.LinkChanged(true)
	if left < 0 {
		go playRuntime(a, dir)
	}
	a.Run(context.Background())
}

// mountsBelow counts the mounts below a directory.
func mountsBelow(t *testing.T, dir string) int {
	t.Helper()
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) > 4 && strings.HasPrefix(f[4], dir+"/") {
			n++
		}
	}
	return n
}

// check looks for anything that must never be: a slice that the hook would
// hand out and whose files aren't its grant's. While a resize is under way the
// files are those of the grant before, so a fault counts once it stays.
func (n *testNode) check() {
	n.t.Helper()
	var faults []error
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		if faults = n.faults(); faults == nil {
			return
		}
	}
	n.t.Error(errors.Join(faults...))
}

func (n *testNode) faults() (faults []error) {
	n.mu.Lock()
	held := map[string]holding{}
	for uid, h := range n.held {
		held[uid] = *h
	}
	n.mu.Unlock()
	for uid, h := range held {
		if !h.prepared {
			continue
		}
		for name, cards := range h.Grant.Containers {
			want, err := limitsOf(cards, anyFacts)
			if err != nil {
				faults = append(faults, err)
			}
			have, err := region.ReadLimits(n.files.limits(uid, name))
			if err != nil || !sameLimits(have, want) {
				faults = append(faults, fmt.Errorf("slice %s/%s is handed out with limits %+v, want %+v (%v)", uid, name, have, want, err))
			}
			if _, err := region.ReadUsage(n.files.usage(uid, name), len(cards)); err != nil {
				faults = append(faults, err)
			}
		}
	}
	return faults
}

// newCrashNode makes a node whose agent doesn't run yet.
func newCrashNode(t *testing.T) *testNode {
	n := &testNode{t: t, dir: t.TempDir(), cards: &twoCards{}, api: newAPIServer(t)}
	makeRoot(t, n.dir)
	return n
}

func (n *testNode) slices() files { return files{dir: filepath.Join(n.dir, "run", "slices")} }

// limitOf is the memory that a limits file allows of its container's first card.
func limitOf(f files, uid, container string) uint64 {
	l, err := region.ReadLimits(f.limits(uid, container))
	if err != nil {
		return 0
	}
	return l.Cards[0].LimitBytes
}

// killAt runs an agent in a process of its own that kills itself at its n-th
// durable step, while drive is at work; until waits for a condition, or for the
// death. It returns the step's name, or nothing if there are fewer steps.
func (n *testNode) killAt(step int, drive func(until func(holds func() bool))) string {
	n.t.Helper()
	return n.killAtNamed(strconv.Itoa(step), drive)
}

// killAtNamed is killAt for the first step of a name, or for a number of steps.
func (n *testNode) killAtNamed(at string, drive func(until func(holds func() bool))) string {
	n.t.Helper()
	cmd := exec.Command("/proc/self/exe")
	var out strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &out
	cmd.Env = append(os.Environ(), crashDir+"="+n.dir, crashURL+"="+n.api.URL, crashStep+"="+at)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		n.t.Fatal(err)
	}
	died := make(chan error, 1)
	go func() { died <- cmd.Wait() }()
	dead := false
	drive(func(holds func() bool) {
		for !dead && !holds() {
			select {
			case <-died:
				dead = true
			case <-time.After(2 * time.Millisecond):
			}
		}
	})
	if !dead {
		// The last step may be after what drive waits for: give it its chance.
		select {
		case <-died:
		case <-time.After(200 * time.Millisecond):
			cmd.Process.Kill()
			<-died
			return ""
		}
	}
	return out.String()
}

// TestKilledAtEveryStep runs a pod that stays and is resized, and one that
// goes, kills the agent at its n-th durable step, starts it again, and wants
// the same end each time.
func TestKilledAtEveryStep(t *testing.T) {
	stays := func(generation int, memMiB int64) api.Grant {
		return grantOf("uid-stays", generation, map[string][]api.CardGrant{"app": shareOf(cardA, memMiB, 10), "side": shareOf(cardB, memMiB/2, 0)})
	}
	goes := grantOf("uid-goes", 1, map[string][]api.CardGrant{"app": shareOf(cardA, 512, 0)})
	steps := map[string]int{}
	// round kills at a step, by its number or its name, and tells which it was.
	round := func(at string) string {
		n := newCrashNode(t)
		f := n.slices()
		killed := n.killAtNamed(at, func(until func(func() bool)) {
			n.api.setPod(podWith(t, "uid-stays", stays(1, 1000)))
			n.api.setPod(podWith(t, "uid-goes", goes))
			until(func() bool {
				return limitOf(f, "uid-stays", "side") == 500<<20 && limitOf(f, "uid-goes", "app") == 512<<20
			})
			n.api.setPod(podWith(t, "uid-stays", stays(2, 2000)))
			until(func() bool {
				return limitOf(f, "uid-stays", "app") == 2000<<20 && limitOf(f, "uid-stays", "side") == 1000<<20
			})
			n.api.deletePod("uid-goes")
			journal := filepath.Join(n.dir, "state", "journal", "uid-goes.json")
			until(func() bool { _, err := os.Stat(journal); return os.IsNotExist(err) })
		})
		steps[killed]++

		n.start()
		n.check()
		n.link()
		eventually(t, "after step "+killed+" the slices are as they should be", func() bool {
			return n.prepared("uid-stays", "app") && limitOf(f, "uid-stays", "app") == 2000<<20 && limitOf(f, "uid-stays", "side") == 1000<<20 &&
				strings.Join(n.leftovers(), " ") == "run/slices/uid-stays state/journal/uid-stays.json"
		})
		n.check()
		if m := mountsBelow(t, n.dir); m != 2 {
			t.Errorf("after step %s there are %d mounts, want 2", killed, m)
		}
		n.api.deletePod("uid-stays")
		eventually(t, "after step "+killed+" nothing is left", func() bool { return len(n.leftovers()) == 0 })
		if m := mountsBelow(t, n.dir); m != 0 {
			t.Errorf("after step %s there are %d mounts left", killed, m)
		}
		n.stop()
		return killed
	}
	for step := 1; round(strconv.Itoa(step)) != ""; step++ {
		if step > 200 {
			t.Fatal("the agent never got through its steps")
		}
	}
	for _, want := range []string{"journal-hold", "journal-held", "files-prepare", "files-prepared", "journal-release", "journal-releasing", "files-clear", "files-cleared", "journal-removed"} {
		if steps[want] == 0 {
			// Pods are worked on side by side, so numbers aren't the same steps each time.
			round(want)
		}
		if steps[want] == 0 {
			t.Errorf("the agent was never killed at %s: %v", want, steps)
		}
	}
	t.Logf("killed at %v", steps)
}
