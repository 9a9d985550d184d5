package agent

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/v1alpha1"
	"github.com/carve-gpu/carve/vgpu/region"
)

// The environment of a process that plays a container: the directories of its
// share and of its root.
const (
	boxShare = "CARVE_TEST_BOX_SHARE"
	boxRoot  = "CARVE_TEST_BOX_ROOT"
)

func init() {
	if share := os.Getenv(boxShare); share != "" {
		box(share, os.Getenv(boxRoot))
	}
}

// box is the whole of a process that has the files of a share mounted as a
// container has, in a root of its own, until its input ends. "hide" makes it go
// into another root, and "limit" has it say what it may use.
func box(share, root string) {
	must := func(err error) {
		if err != nil {
			fmt.Println("failed:", err)
			os.Exit(1)
		}
	}
	must(unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""))
	for inside, outside := range map[string]string{limitsInside: "limits", usageInside: "usage.d/usage"} {
		at := filepath.Join(root, inside)
		must(os.MkdirAll(filepath.Dir(at), 0o755))
		must(os.WriteFile(at, nil, 0o644))
		must(unix.Mount(filepath.Join(share, outside), at, "", unix.MS_BIND, ""))
	}
	must(os.MkdirAll(filepath.Join(root, "empty"), 0o755))
	must(unix.Chroot(root))
	must(os.Chdir("/"))
	page, err := os.Open(limitsInside)
	must(err)
	mapped, err := unix.Mmap(int(page.Fd()), 0, region.LimitsBytes, unix.PROT_READ, unix.MAP_SHARED)
	must(err)
	fmt.Println("ready")
	in := bufio.NewScanner(os.Stdin)
	for in.Scan() {
		switch in.Text() {
		case "hide":
			must(unix.Chroot("/empty"))
			fmt.Println("hidden")
		case "limit":
			l, err := region.DecodeLimits(bytes.Clone(mapped))
			if err != nil {
				fmt.Println("damaged")
				continue
			}
			fmt.Println(l.Cards[0].LimitBytes>>20, l.Generation)
		}
	}
	os.Exit(0)
}

// boxed is a process that plays a container.
type boxed struct {
	t      *testing.T
	number int
	cmd    *exec.Cmd
	in     io.WriteCloser
	out    *bufio.Reader
}

// runBox starts a container with a share that is prepared, as the runtime would.
func (n *testNode) runBox(uid, container string) *boxed {
	n.t.Helper()
	b := n.newBox(uid, container)
	n.Adjusted(RuntimeContainer{ID: b.id(), PodUID: uid, Name: container})
	n.Started(b.id(), b.cmd.Process.Pid)
	return b
}

// boxes tells them apart.
var boxes atomic.Int32

// newBox starts one without telling the agent.
func (n *testNode) newBox(uid, container string) *boxed {
	n.t.Helper()
	b := &boxed{t: n.t, number: int(boxes.Add(1)), cmd: exec.Command("/proc/self/exe")}
	b.cmd.Env = append(os.Environ(), boxShare+"="+n.files.slice(uid, container), boxRoot+"="+n.t.TempDir())
	b.cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	b.cmd.Stderr = os.Stderr
	out, err := b.cmd.StdoutPipe()
	if err == nil {
		b.in, err = b.cmd.StdinPipe()
	}
	if err == nil {
		err = b.cmd.Start()
	}
	if err != nil {
		n.t.Fatal(err)
	}
	b.out = bufio.NewReader(out)
	n.t.Cleanup(b.end)
	if line, err := b.out.ReadString('\n'); line != "ready\n" {
		n.t.Fatalf("a container didn't start: %q, %v", line, err)
	}
	return b
}

// id is a part of the list of its cgroups, as a container's is, and another one
// than that of the box before.
func (b *boxed) id() string {
	b.t.Helper()
	groups, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		b.t.Fatal(err)
	}
	list := strings.TrimSpace(string(groups))
	return list[b.number%(len(list)/2):]
}

func (b *boxed) say(what string) string {
	b.t.Helper()
	if _, err := io.WriteString(b.in, what+"\n"); err != nil {
		b.t.Fatal(err)
	}
	line, err := b.out.ReadString('\n')
	if err != nil {
		b.t.Fatal(err)
	}
	return strings.TrimSpace(line)
}

// limit is what it may use, in MiB, as it sees it.
func (b *boxed) limit() string { return strings.Fields(b.say("limit"))[0] }

func (b *boxed) end() {
	b.in.Close()
	b.cmd.Process.Kill()
	b.cmd.Wait()
}

// dead reports whether it was killed.
func (b *boxed) dead() bool {
	return hasEnded(b.cmd.Process.Pid)
}

// gone ends it, and tells the agent.
func (n *testNode) gone(b *boxed) {
	b.end()
	n.Exited(b.id())
}

// boxedShare starts a node with one container that runs with 1000 MiB.
func boxedShare(t *testing.T, edit ...func(*Config)) (*testNode, *boxed, string) {
	t.Helper()
	n := startNode(t, edit...)
	n.link()
	n.api.setPod(podWith(t, "uid-1", appWith(1, 1000)))
	eventually(t, "the slice is prepared", func() bool { return n.prepared("uid-1", "app") })
	b := n.runBox("uid-1", "app")
	eventually(t, "its files are known", func() bool {
		n.mu.Lock()
		defer n.mu.Unlock()
		_, kept := n.held["uid-1"].kept["app"]
		return n.sightOf(b.id()).known && kept
	})
	return n, b, n.files.limits("uid-1", "app")
}

func appWith(generation int, memMiB int64) api.Grant {
	return grantOf("uid-1", generation, map[string][]api.CardGrant{"app": shareOf(cardA, memMiB, 0)})
}

// slice is the one slice of the report.
func (n *testNode) slice() v1alpha1.Slice {
	s, _ := n.api.report()
	for _, c := range s.Cards {
		for _, x := range c.Slices {
			return x
		}
	}
	return v1alpha1.Slice{}
}

// scribble writes into a limits file as somebody who may.
func scribble(t *testing.T, path string, at int64, b []byte) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.WriteAt(b, at); err != nil {
		t.Fatal(err)
	}
}

// forge makes the content of a limits file that grants 70,000 MiB.
func forge(t *testing.T) []byte {
	t.Helper()
	want, err := limitsOf(shareOf(cardA, 70000, 0), anyFacts)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "limits")
	if err := region.CreateLimits(path, want); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// What others write into a limits file is put right in the file that the container
// has, said on its pod once, and counted.
func TestAForeignWriteIsPutRightInPlace(t *testing.T) {
	n, b, path := boxedShare(t)
	before, err := idOf(path)
	if err != nil {
		t.Fatal(err)
	}
	forged := forge(t)
	for i, c := range []struct {
		name  string
		write func()
		said  wrong
	}{
		{"four bytes of the header", func() { scribble(t, path, 0, []byte("XXXX")) }, damaged},
		{"a bit of the bank in force", func() { scribble(t, path, 64+88, []byte{0xff}) }, damaged},
		{"another limit, all of it valid", func() { scribble(t, path, 0, forged) }, differs},
		{"the same again", func() { scribble(t, path, 0, forged) }, differs},
		{"zeroes", func() { scribble(t, path, 0, make([]byte, region.LimitsBytes)) }, damaged},
		{"a generation that can't be counted on", func() {
			scribble(t, path, 16, binary.LittleEndian.AppendUint64(nil, 1<<64-1))
		}, damaged},
		{"shortened", func() {
			if err := os.Truncate(path, 100); err != nil {
				t.Fatal(err)
			}
		}, damaged},
		{"not to be opened", func() {
			if err := os.Chmod(path, 0o600); err != nil {
				t.Fatal(err)
			}
		}, unopened},
	} {
		c.write()
		eventually(t, c.name+" is put right", func() bool { return n.View().LimitsRestored == uint64(i+1) })
		if got := b.limit(); got != "1000" {
			t.Errorf("%s: the container may use %s MiB", c.name, got)
		}
		eventually(t, "an event", func() bool {
			return strings.Contains(n.api.said(), "pod-uid-1 LimitsRestored: the limits file of container app on the node "+string(c.said))
		})
	}
	if after, err := idOf(path); err != nil || after != before {
		t.Errorf("it is another file (%v)", err)
	}
	if s := n.api.said(); strings.Count(s, "LimitsRestored") != 3 {
		t.Errorf("the pod was told more than once of each kind:\n%s", s)
	}
	if v := n.View(); v.CutOff != 0 || v.Slices[0].Fault != "" {
		t.Errorf("%d cut off: %+v", v.CutOff, v.Slices)
	}
	// And a resize of a damaged file reaches the container.
	scribble(t, path, 0, []byte("XXXX"))
	n.api.setPod(podWith(t, "uid-1", appWith(2, 900)))
	eventually(t, "the resize is in force", func() bool { return n.slice().Generation == 2 })
	if got := b.limit(); got != "900" {
		t.Errorf("after a resize the container may use %s MiB", got)
	}
}

// A container whose file is gone keeps its limits and its room: a resize is
// refused, for as long as it runs.
func TestAContainerThatLostItsFileIsNotResized(t *testing.T) {
	for name, lose := range map[string]func(path, usage string) error{
		"limits removed":      func(path, _ string) error { return os.Remove(path) },
		"the directory":       func(path, _ string) error { os.RemoveAll(filepath.Dir(path)); return nil },
		"a link in its place": func(path, _ string) error { return errors2(os.Remove(path), os.Symlink("/etc/hostname", path)) },
		"a directory":         func(path, _ string) error { return errors2(os.Remove(path), os.Mkdir(path, 0o755)) },
		"a copy in its place": func(path, _ string) error {
			b, err := os.ReadFile(path)
			return errors2(err, errors2(os.WriteFile(path+".2", b, 0o644), os.Rename(path+".2", path)))
		},
		"usage removed": func(_, usage string) error { return os.Remove(usage) },
	} {
		t.Run(name, func(t *testing.T) {
			n, b, path := boxedShare(t)
			file := "limits"
			reason := reasonLimitsLost
			if strings.HasPrefix(name, "usage") {
				file, reason = "usage", reasonUsageLost
			}
			if err := lose(path, n.files.usage("uid-1", "app")); err != nil {
				t.Fatal(err)
			}
			// At once, and before the reaper looks.
			n.api.setPod(podWith(t, "uid-1", appWith(2, 100)))
			eventually(t, "it is refused", func() bool { return n.slice().RefusedGeneration == 2 })
			if s := n.slice(); s.MemMiB != 1000 || s.Generation != 1 || !strings.Contains(s.Refusal, "container app runs with a "+file+" file that is no longer the node's") {
				t.Errorf("the report has %+v", s)
			}
			n.api.setPod(podWith(t, "uid-1", appWith(3, 1000)))
			eventually(t, "the report says so", func() bool { return strings.Contains(n.slice().Fault, file+" file that is no longer the node's") })
			eventually(t, "an event", func() bool {
				return strings.Contains(n.api.said(), "pod-uid-1 "+reason+": container app runs with a "+file+" file")
			})
			n.api.setPod(podWith(t, "uid-1", appWith(4, 2000)))
			eventually(t, "growth is refused", func() bool { return n.slice().RefusedGeneration == 4 })
			n.api.setPod(podWith(t, "uid-1", appWith(5, 1000)))
			eventually(t, "it has what it had", func() bool { return n.slice().Generation == 5 })
			if got := b.limit(); got != "1000" {
				t.Errorf("the container may use %s MiB", got)
			}
			if b.dead() {
				t.Error("it was stopped, though its limits are as granted")
			}
			if v := n.View(); v.CutOff != 1 {
				t.Errorf("%d cut off", v.CutOff)
			}
			if s := n.api.said(); strings.Count(s, reason) != 1 {
				t.Errorf("said more than once:\n%s", s)
			}
			// Another agent finds the same.
			n.stop()
			n.start()
			n.link(RuntimeContainer{ID: b.id(), PodUID: "uid-1", Name: "app", Adjusted: true, HostPID: b.cmd.Process.Pid})
			eventually(t, "the next agent sees it", func() bool { return n.View().CutOff == 1 })
			// The next attempt has the node's file, and all is well.
			n.gone(b)
			again := n.runBox("uid-1", "app")
			n.api.setPod(podWith(t, "uid-1", appWith(6, 400)))
			eventually(t, "the next container is resized", func() bool { return n.slice().Generation == 6 && n.slice().Fault == "" })
			if got := again.limit(); got != "400" {
				t.Errorf("the next container may use %s MiB", got)
			}
		})
	}
}

func errors2(a, b error) error {
	if a != nil {
		return a
	}
	return b
}

// One that reads something else than its limits is stopped, if the agent may.
func TestAContainerThatHoldsNoLimitIsStopped(t *testing.T) {
	for name, c := range map[string]struct {
		write []byte
		may   bool
		said  string
	}{
		"more than granted":                 {forge(t), true, "allows more than was granted: it is stopped, so that it starts again"},
		"nothing that can be read":          {make([]byte, region.LimitsBytes), true, "so it can't use its cards: it is stopped"},
		"more than granted, and it is kept": {forge(t), false, "allows more than was granted"},
	} {
		t.Run(name, func(t *testing.T) {
			n, b, path := boxedShare(t, func(k *Config) { k.StopUnadjusted = c.may })
			f, err := os.OpenFile(path, os.O_WRONLY, 0)
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			// Written to what the container has, when the node has it no more.
			n.mu.Lock()
			err = errors2(os.Remove(path), func() error { _, err := f.WriteAt(c.write, 0); return err }())
			n.mu.Unlock()
			if err != nil {
				t.Fatal(err)
			}
			eventually(t, "an event", func() bool { return strings.Contains(n.api.said(), c.said) })
			if c.may {
				eventually(t, "it is stopped", b.dead)
			} else if time.Sleep(2 * reclaimEvery); b.dead() {
				t.Error("it was stopped")
			}
		})
	}
}

// A container that one can't look into is not at fault, but what happened to the
// node's file while it ran counts.
func TestAContainerThatHidesItsFiles(t *testing.T) {
	n := startNode(t)
	n.link()
	n.api.setPod(podWith(t, "uid-1", appWith(1, 1000)))
	eventually(t, "the slice is prepared", func() bool { return n.prepared("uid-1", "app") })
	path := n.files.limits("uid-1", "app")
	b := n.runBox("uid-1", "app")
	if said := b.say("hide"); said != "hidden" {
		t.Fatal(said)
	}
	// As after a restart of the agent, which looked at it before.
	n.stop()
	n.start()
	n.link(RuntimeContainer{ID: b.id(), PodUID: "uid-1", Name: "app", Adjusted: true, HostPID: b.cmd.Process.Pid})
	eventually(t, "its share was looked at", func() bool {
		n.mu.Lock()
		defer n.mu.Unlock()
		h := n.held["uid-1"]
		return h != nil && h.kept["app"] != [2]fileID{}
	})
	n.api.setPod(podWith(t, "uid-1", appWith(2, 900)))
	eventually(t, "it is resized", func() bool { return n.slice().Generation == 2 })
	if v := n.View(); v.CutOff != 0 {
		t.Errorf("%d cut off", v.CutOff)
	}
	if got := b.limit(); got != "900" {
		t.Errorf("the container may use %s MiB", got)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	n.api.setPod(podWith(t, "uid-1", appWith(3, 100)))
	eventually(t, "it is refused", func() bool { return n.slice().RefusedGeneration == 3 })
	if got := b.limit(); got != "900" || b.dead() {
		t.Errorf("the container may use %s MiB, dead %v", got, b.dead())
	}
}

// Killed at any step of putting right, the next agent goes on: the file is right, and
// a resize reaches the container or is refused.
func TestKilledWhilePuttingRight(t *testing.T) {
	const uid = "uid-goes" // that playRuntime has a container of
	with := func(generation int, memMiB int64) api.Grant {
		return grantOf(uid, generation, map[string][]api.CardGrant{"app": shareOf(cardA, memMiB, 0)})
	}
	for _, c := range []struct {
		harm, at string
		reaches  bool // a resize afterwards
	}{
		{"damaged", "limits-restore", true}, {"damaged", "limits-restored", true},
		{"forged", "limits-restore", true}, {"forged", "limits-restored", true},
		{"removed", "files-remake", false}, {"removed", "files-remade", false},
		{"removed and resized", "files-remake", false}, {"removed and resized", "files-remade", false},
	} {
		t.Run(c.harm+", "+c.at, func(t *testing.T) {
			n := newCrashNode(t)
			f := n.slices()
			n.Agent = &Agent{files: f} // for the path of its files
			path := f.limits(uid, "app")
			var b *boxed
			killed := n.killAtNamed(c.at, func(until func(func() bool)) {
				n.api.setPod(podWith(t, uid, with(1, 1000)))
				until(func() bool { return limitOf(f, uid, "app") == 1000<<20 && n.slice().State == v1alpha1.Active })
				b = n.newBox(uid, "app")
				// Looked at once, so that there is something to compare with.
				time.Sleep(2 * reclaimEvery)
				switch c.harm {
				case "damaged":
					scribble(t, path, 0, []byte("XXXX"))
				case "forged":
					scribble(t, path, 0, forge(t))
				default:
					if err := os.Remove(path); err != nil {
						t.Error(err)
					}
				}
				if c.harm == "removed and resized" {
					n.api.setPod(podWith(t, uid, with(2, 100)))
				}
				until(func() bool { return false })
			})
			t.Cleanup(func() { f.clear(uid) })
			if killed != c.at {
				t.Fatalf("killed at %q", killed)
			}
			if r, err := readRecord(filepath.Join(n.dir, "state", "journal", uid+".json")); err != nil || r.Grant.Generation != 1 {
				t.Errorf("the journal has %+v, %v", r.Grant, err)
			}
			n.api.setPod(podWith(t, uid, with(1, 1000)))
			n.start()
			n.link(RuntimeContainer{ID: b.id(), PodUID: uid, Name: "app", Adjusted: true, HostPID: b.cmd.Process.Pid})
			n.check()
			n.api.setPod(podWith(t, uid, with(2, 100)))
			want := "100"
			if c.reaches {
				eventually(t, "it is resized", func() bool { return n.slice().Generation == 2 })
			} else {
				want = "1000"
				eventually(t, "the resize is refused", func() bool { return n.slice().RefusedGeneration == 2 })
			}
			if got := b.limit(); got != want {
				t.Errorf("the container may use %s MiB, want %s", got, want)
			}
			n.stop()
		})
	}
}

// Looking at 32 containers takes well under a millisecond.
func BenchmarkWatchFiles(b *testing.B) {
	dir := b.TempDir()
	s := newAPIServer(b)
	makeRoot(b, dir)
	a, err := New(b.Context(), testConfig(b, dir, s, &twoCards{}))
	if err != nil {
		b.Fatal(err)
	}
	defer a.lock.Close()
	defer a.queue.ShutDown()
	for i := range 32 {
		uid := fmt.Sprintf("uid-%d", i)
		r := record{Version: recordVersion, State: stateHeld, Grant: grantOf(uid, 1, map[string][]api.CardGrant{"app": shareOf(cardA, 1000, 0)})}
		if err := a.prepareFiles(r); err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() { a.files.clear(uid) })
		a.held[uid] = &holding{record: r, prepared: true}
		a.containers[uid] = use{uid: uid, container: "app", adjusted: true, hostPID: os.Getpid()}
		kept, err := a.filesOf(watched{uid: uid, container: "app"})
		if err != nil {
			b.Fatal(err)
		}
		a.sights[uid] = &sight{known: true, limits: kept[0], usage: kept[1]}
	}
	r := newReaper(a)
	for b.Loop() {
		r.watchFiles()
	}
	if n := a.queue.Len(); n != 0 {
		b.Fatalf("%d pods are queued", n)
	}
}

func TestLimitsThatAllowMoreThanGranted(t *testing.T) {
	one := func(ppm uint32, fixed bool) region.Limits {
		return region.Limits{Cards: []region.Card{{LimitBytes: 5, ComputePPM: ppm, ComputeFixed: fixed}}}
	}
	for _, c := range []struct {
		have, want region.Limits
		within     bool
	}{
		{one(300_000, true), one(300_000, true), true}, {one(200_000, true), one(300_000, false), true}, {one(300_000, true), one(0, false), true},
		{one(0, false), one(0, false), true}, {one(0, false), one(300_000, false), false}, {one(400_000, true), one(300_000, true), false},
		{one(300_000, false), one(300_000, true), false},
	} {
		if got := withinGranted(c.have, c.want); got != c.within {
			t.Errorf("%+v of %+v: %v", c.have.Cards[0], c.want.Cards[0], got)
		}
	}
}
