package mps

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/carve-gpu/carve/vgpu/gpu"
	"github.com/carve-gpu/carve/vgpu/native"
)

// softDir is the software GPU's, whose programs stand in for NVIDIA's.
const softDir = "../soft"

// quick is a pace at which a test needn't wait long. No outcome depends on it.
var quick = Pace{
	Look: 5 * time.Millisecond, Probe: 20 * time.Millisecond, Answer: 2 * time.Second,
	Sweep: 20 * time.Millisecond,
	Begin: 20 * time.Second, Quit: 5 * time.Second, Fault: 50 * time.Millisecond,
	Again: 5 * time.Millisecond, AgainMost: 50 * time.Millisecond,
}

// In the environment they make this process a keeper: the rig's folder, and the number
// of the step at which it is killed.
const (
	keeperOf = "CARVE_TEST_KEEPER"
	killAt   = "CARVE_TEST_KILL_AT"
)

func TestMain(m *testing.M) {
	if dir := os.Getenv(keeperOf); dir != "" {
		keep(dir)
		return
	}
	if dir := os.Getenv(tenantOf); dir != "" {
		beTenant(dir)
		return
	}
	if os.Getenv(headless) != "" {
		select {} // its first thread has ended: init
	}
	dir, err := os.MkdirTemp("", "carve-mps-")
	if err == nil {
		err = cmp.Or(native.Make(softDir), native.Sources("testdata/standin"))
	}
	if err == nil {
		standin = filepath.Join(dir, "standin")
		build := exec.Command("go", "build", "-o", standin, "./testdata/standin")
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
		var out []byte
		if out, err = build.CombinedOutput(); err != nil {
			err = fmt.Errorf("%w: %s", err, out)
		}
	}
	code := 1
	if err != nil {
		fmt.Fprintln(os.Stderr, "build the stand-ins:", err)
	} else {
		code = m.Run()
	}
	os.RemoveAll(dir)
	os.Exit(code)
}

// standin is a program that does wrong when told so, in the place of the software GPU's.
var standin string

// card0 is the card of the rig that was made last.
var card0 string

// modeFile stands for the card's compute mode, which outlives processes.
type modeFile string

// deaf has the driver answer nothing but errors.
func (f modeFile) deaf(t *testing.T, on bool) {
	t.Helper()
	err := os.WriteFile(string(f)+".deaf", nil, 0o600)
	if !on {
		err = os.Remove(string(f) + ".deaf")
	}
	if err != nil {
		t.Fatal(err)
	}
}

func (f modeFile) ComputeMode(string) (gpu.ComputeMode, error) {
	if _, err := os.Stat(string(f) + ".deaf"); err == nil {
		return "", errors.New("the driver doesn't answer")
	}
	b, err := os.ReadFile(string(f))
	if errors.Is(err, os.ErrNotExist) {
		return gpu.ComputeDefault, nil
	}
	return gpu.ComputeMode(b), err
}

func (f modeFile) SetComputeMode(_ string, mode gpu.ComputeMode) error {
	return os.WriteFile(string(f), []byte(mode), 0o600)
}

// rig is a node: a driver root with the stand-ins, and the folder in which agent and
// keeper meet.
type rig struct {
	t    *testing.T
	base string
	dir  Dir
	mode modeFile
}

func newRig(t *testing.T) *rig {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("mount namespaces and device folders need root")
	}
	r := &rig{t: t, base: t.TempDir()}
	r.dir, r.mode = Dir(filepath.Join(r.base, "run/mps")), modeFile(filepath.Join(r.base, "mode"))
	root := filepath.Join(r.base, "root")
	// Another card each time: the keeper finds processes by it, also those of a test that
	// runs beside this one.
	r.softgpu("init", root, "--card", "a100-80", "--seed", strconv.Itoa(rand.IntN(1<<30)))
	t.Cleanup(func() { r.softgpu("destroy", root) })
	b, err := os.ReadFile(filepath.Join(root, "softgpu/config.json"))
	if err == nil {
		card0 = string(uuidOf.Find(b))
	}
	if err == nil && !uuidForm.MatchString(card0) {
		err = fmt.Errorf("no card in %s", b)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for _, p := range marked(card0) {
			if err := p.kill(); err != nil {
				t.Error(err)
			}
		}
		_ = r.dir.clearDirs(card0)
	})
	return r
}

var uuidOf = regexp.MustCompile(`GPU-[0-9a-f-]{36}`)

func (r *rig) softgpu(args ...string) {
	r.t.Helper()
	if out, err := exec.Command(filepath.Join(softDir, "build/softgpu"), args...).CombinedOutput(); err != nil {
		r.t.Fatalf("softgpu %v: %v\n%s", args, err, out)
	}
}

// wrongable puts programs in the place of the software GPU's that can be told to do wrong.
func (r *rig) wrongable() {
	r.t.Helper()
	err := os.MkdirAll(filepath.Join(r.base, "root/standin"), 0o755)
	for _, name := range []string{gpu.MPSControl, gpu.MPSServer} {
		var b []byte
		if err == nil {
			b, err = os.ReadFile(standin)
		}
		path := filepath.Join(r.base, "root", name)
		if err == nil {
			err = os.Remove(path)
		}
		if err == nil {
			err = os.WriteFile(path, b, 0o755)
		}
	}
	if err != nil {
		r.t.Fatal(err)
	}
}

func configOf(base string) Config {
	return Config{
		Dir: Dir(filepath.Join(base, "run/mps")), Root: gpu.Root{Path: filepath.Join(base, "root")},
		OpenModes: func() (ComputeModes, error) { return modeFile(filepath.Join(base, "mode")), nil },
		Log:       slog.New(slog.NewTextHandler(os.Stderr, nil)), Pace: quick,
	}
}

// keep is a keeper in a process of its own.
func keep(base string) {
	c := configOf(base)
	at, _ := strconv.Atoi(os.Getenv(killAt))
	n := 0
	c.step = func(string) {
		if n++; n == at {
			_ = unix.Kill(os.Getpid(), unix.SIGKILL)
			select {}
		}
	}
	if err := New(c).Run(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// keeper runs one in this process until the test ends, or stop is called.
func (r *rig) keeper() (stop func()) {
	r.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var done sync.WaitGroup
	c := configOf(r.base)
	c.Log = slog.New(slog.NewTextHandler(r.t.Output(), nil))
	done.Go(func() {
		if err := New(c).Run(ctx); err != nil {
			r.t.Error(err)
		}
	})
	stop = sync.OnceFunc(func() { cancel(); done.Wait() })
	r.t.Cleanup(stop)
	return stop
}

func (r *rig) wrong(what string, on bool, text ...string) {
	r.t.Helper()
	path := filepath.Join(r.base, "root/standin", what)
	err := os.WriteFile(path, []byte(strings.Join(text, "\n")), 0o600)
	if !on {
		err = os.Remove(path)
	}
	if err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) want(on bool) {
	r.t.Helper()
	err := r.dir.Want(card0)
	if !on {
		err = r.dir.Unwant(card0)
	}
	if err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) state() State {
	r.t.Helper()
	s, err := r.dir.State(card0)
	if err != nil {
		r.t.Fatal(err)
	}
	return s
}

// until waits for a state.
func (r *rig) until(what string, is func(State) bool) State {
	r.t.Helper()
	deadline := time.Now().Add(30 * time.Second)
	for {
		s := r.state()
		if is(s) {
			return s
		}
		if time.Now().After(deadline) {
			r.t.Fatalf("waited for %s: %+v", what, s)
		}
		time.Sleep(2 * time.Millisecond)
	}
}

func (r *rig) ready(after uint64) State {
	r.t.Helper()
	return r.until(fmt.Sprintf("the daemon to be ready, after epoch %d", after), func(s State) bool { return s.Ready && s.Epoch > after })
}

// holds checks what is true at each moment: no process of MPS on a card that others can
// use, too.
func (r *rig) holds() {
	r.t.Helper()
	live := marked(card0)
	if mode, err := r.mode.ComputeMode(card0); err != nil || mode == gpu.ComputeDefault && len(live) > 0 {
		r.t.Errorf("%d processes of MPS on a card whose compute mode is %s (%v)", len(live), mode, err)
	}
}

// idle waits until nothing of MPS is on the card, and checks that nothing is.
func (r *rig) idle() {
	r.t.Helper()
	r.until("the card to be free of MPS", State.Idle)
	if live := marked(card0); len(live) > 0 {
		r.t.Errorf("processes of MPS are left: %v", live)
	}
	if mode, _ := r.mode.ComputeMode(card0); mode != gpu.ComputeDefault {
		r.t.Errorf("compute mode is %s", mode)
	}
	for _, m := range r.dir.mounts(card0) {
		if mounted, err := IsMountPoint(m.dir); err != nil || mounted {
			r.t.Errorf("the file system on %s is still there: %v", m.dir, err)
		}
	}
}

func TestDaemonLivesWhileItIsWanted(t *testing.T) {
	r := newRig(t)
	r.keeper()
	if r.want(true); !r.dir.KeeperRuns() {
		r.until("the keeper", func(State) bool { return r.dir.KeeperRuns() })
	}
	s := r.ready(0)
	r.holds()
	if len(s.Servers) != 1 || !s.ManyUsers || s.Error != "" || !s.Daemon.isOurs() || !s.Servers[0].isOurs() || len(marked(card0)) != 2 {
		t.Errorf("%+v", s)
	}
	// What clients mount: the socket, and the very file system that the daemon has.
	if _, err := os.Stat(filepath.Join(r.dir.Pipe(card0), "control")); err != nil {
		t.Error(err)
	}
	var ours, theirs unix.Stat_t
	if err := unix.Stat(r.dir.Shm(card0), &ours); err != nil {
		t.Fatal(err)
	}
	if err := unix.Stat(fmt.Sprintf("/proc/%d/root/dev/shm", s.Servers[0].PID), &theirs); err != nil || ours.Dev != theirs.Dev || ours.Mode&0o7777 != 0o1777 {
		t.Errorf("shared memory: %+v and %+v, %v", ours, theirs, err)
	}
	// Nothing of it shows in the driver's root.
	if _, err := os.Stat(filepath.Join(r.base, "root/usr/lib/carve")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a mount of the daemon's namespace shows on the node: %v", err)
	}
	r.want(false)
	r.idle()
	r.want(true)
	if again := r.ready(s.Epoch); again.Epoch != s.Epoch+1 {
		t.Errorf("epoch %d after %d", again.Epoch, s.Epoch)
	}
}

// node-21: whatever ends or stands still is noticed, told and started again, and the
// card is held to one process all the while.
func TestDaemonIsStartedAgain(t *testing.T) {
	for name, c := range map[string]struct {
		harm func(r *rig, s State)
		says string
	}{
		"the daemon is killed": {func(r *rig, s State) { r.signal(*s.Daemon, unix.SIGKILL) }, "has ended: signal: killed"},
		"the server is killed": {func(r *rig, s State) { r.signal(s.Servers[0], unix.SIGKILL) }, "the MPS server (process"},
		"both are killed": {func(r *rig, s State) {
			r.signal(s.Servers[0], unix.SIGKILL)
			r.signal(*s.Daemon, unix.SIGKILL)
		}, "has ended"},
		"the daemon stands still": {func(r *rig, s State) { r.signal(*s.Daemon, unix.SIGSTOP) }, "doesn't answer"},
		"the server is in fault": {func(r *rig, s State) {
			r.wrong("fault", true)
			r.until("the fault to be told", func(s State) bool { return !s.Ready && s.Error != "" })
			r.until("another daemon", func(n State) bool { return n.Daemon != nil && *n.Daemon != *s.Daemon })
			r.wrong("fault", false)
		}, "FAULT"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			if strings.Contains(name, "fault") {
				r.wrongable()
			}
			r.keeper()
			r.want(true)
			before := r.ready(0)
			var told []string
			watching := make(chan struct{})
			var watch sync.WaitGroup
			watch.Go(func() {
				for {
					select {
					case <-watching:
						return
					default:
					}
					if mode, _ := r.mode.ComputeMode(card0); mode == gpu.ComputeDefault {
						t.Error("the card is open to everybody")
					}
					if s, err := r.dir.State(card0); err == nil && s.Error != "" && !s.Ready {
						told = append(told, s.Error)
					}
					r.holds()
					time.Sleep(time.Millisecond)
				}
			})
			c.harm(r, before)
			after := r.ready(before.Epoch)
			close(watching)
			watch.Wait()
			if after.Servers[0] == before.Servers[0] || before.Servers[0].Lives() {
				t.Errorf("the old server (%v) is left beside %v", before.Servers, after.Servers)
			}
			if !strings.Contains(strings.Join(told, "\n"), c.says) {
				t.Errorf("told %q, want %q", told, c.says)
			}
			if n := len(marked(card0)); n != 2 {
				t.Errorf("%d processes of MPS", n)
			}
		})
	}
}

func (r *rig) signal(p Process, s unix.Signal) {
	r.t.Helper()
	if err := unix.Kill(p.PID, s); err != nil {
		r.t.Fatal(err)
	}
}

func TestOneUserAtATimeWhereTheDriverKnowsNoOther(t *testing.T) {
	r := newRig(t)
	r.wrongable()
	r.wrong("single", true)
	r.keeper()
	r.want(true)
	if s := r.ready(0); s.ManyUsers {
		t.Errorf("%+v", s)
	}
}

func TestWhatCannotServeSaysWhy(t *testing.T) {
	r := newRig(t)
	r.wrongable()
	r.wrong("refuse", true)
	r.keeper()
	r.want(true)
	r.until("the reason", func(s State) bool { return !s.Ready && strings.Contains(s.Error, "exit status 1") })
	r.wrong("refuse", false)
	r.ready(0)
	r.want(false)
	r.idle()

	if err := os.Remove(filepath.Join(r.base, "root", gpu.MPSServer)); err != nil {
		t.Fatal(err)
	}
	r.want(true)
	r.until("the reason", func(s State) bool { return strings.Contains(s.Error, "has no "+gpu.MPSServer) })
	r.want(false)
	r.idle()
}

func TestSomebodyElseSetsTheComputeMode(t *testing.T) {
	r := newRig(t)
	r.keeper()
	r.want(true)
	r.ready(0)
	if err := r.mode.SetComputeMode(card0, gpu.ComputeDefault); err != nil {
		t.Fatal(err)
	}
	r.until("the card to be held again", func(State) bool {
		mode, _ := r.mode.ComputeMode(card0)
		return mode == gpu.ComputeExclusiveProcess
	})
}

func TestNextKeeperAdopts(t *testing.T) {
	r := newRig(t)
	stop := r.keeper()
	r.want(true)
	before := r.ready(0)
	stop()
	if r.dir.KeeperRuns() {
		t.Error("a keeper is said to run")
	}
	if !before.Daemon.Lives() || !before.Servers[0].Lives() {
		t.Fatal("they ended with the keeper")
	}
	stop = r.keeper()
	r.until("the keeper", func(State) bool { return r.dir.KeeperRuns() })
	r.signal(before.Servers[0], unix.SIGKILL) // so that it is seen to look
	after := r.ready(before.Epoch)
	if *after.Daemon != *before.Daemon {
		t.Errorf("daemon %v in the place of %v", after.Daemon, before.Daemon)
	}
	stop()
	// Its pid is another's now: nobody's process is ended for it.
	stranger := exec.Command("sleep", "1000")
	if err := stranger.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { stranger.Process.Kill(); stranger.Wait() }()
	p, err := ProcessOf(stranger.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	wrong := after
	wrong.Daemon, wrong.Servers = &p, []Process{p, {p.PID, p.Start + 1}}
	if err := put(r.dir.state(card0), wrong); err != nil {
		t.Fatal(err)
	}
	r.want(false)
	r.keeper()
	r.idle()
	if !p.Lives() {
		t.Error("a stranger's process was ended")
	}
}

func TestDamagedStateIsNotBelieved(t *testing.T) {
	r := newRig(t)
	stop := r.keeper()
	r.want(true)
	before := r.ready(0)
	stop()
	if err := os.WriteFile(r.dir.state(card0), []byte(`{"v":1,"card":`), 0o644); err != nil {
		t.Fatal(err)
	}
	r.keeper()
	deadline := time.Now().Add(30 * time.Second)
	for {
		s, err := r.dir.State(card0)
		if err == nil && s.Ready && s.Epoch != before.Epoch {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("%+v, %v", s, err)
		}
		time.Sleep(2 * time.Millisecond)
	}
	if before.Daemon.Lives() || len(marked(card0)) != 2 {
		t.Errorf("left of the daemon before: %v", marked(card0))
	}
}

// TestKeeperIsKilledAtEachStep kills it at each step of a card's life, once on the way
// up and down, and has another one go on.
func TestKeeperIsKilledAtEachStep(t *testing.T) {
	if testing.Short() {
		t.Skip("takes some seconds")
	}
	// Steps without end come while a daemon is kept, so the last is known by its name.
	met := 0
	for at := 1; ; at++ {
		r := newRig(t)
		cmd := exec.Command("/proc/self/exe")
		cmd.Env = append(os.Environ(), keeperOf+"="+r.base, killAt+"="+strconv.Itoa(at))
		var log strings.Builder
		cmd.Stdout, cmd.Stderr = &log, &log
		r.want(true)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		died := make(chan error, 1)
		go func() { died <- cmd.Wait() }()
		ended := r.whole(died)
		r.holds()
		if ended {
			met++
		} else {
			cmd.Process.Kill()
			<-died
		}
		was := r.state()
		r.want(true)
		stop := r.keeper()
		now := r.until("the next keeper to serve", func(s State) bool { return s.Ready && s.Daemon != nil && s.Daemon.Lives() })
		if now.Epoch < was.Epoch || was.Ready && was.Daemon.Lives() && *was.Daemon != *now.Daemon {
			t.Errorf("killed at step %d: %+v became %+v", at, was, now)
		}
		r.holds()
		if n := len(marked(card0)); n != 2 {
			t.Errorf("killed at step %d: %d processes of MPS\n%s", at, n, log.String())
		}
		r.want(false)
		r.idle()
		stop()
		if t.Failed() {
			t.Fatalf("killed at step %d:\n%s", at, log.String())
		}
		if !ended {
			break
		}
	}
	t.Logf("killed at %d steps", met)
	if met < 15 {
		t.Errorf("killed at %d steps only", met)
	}
}

// whole has a keeper serve and then end, and reports whether it died on the way.
func (r *rig) whole(died <-chan error) bool {
	r.t.Helper()
	wanted := true
	for {
		s, err := r.dir.State(card0)
		switch {
		case err != nil:
			r.t.Fatal(err)
		case wanted && s.Ready:
			r.want(false)
			wanted = false
		case !wanted && s.Idle() && !s.Ready:
			return false
		}
		select {
		case <-died:
			return true
		case <-time.After(2 * time.Millisecond):
		}
	}
}

func TestFilesOfOthersAreRefused(t *testing.T) {
	d := Dir(t.TempDir())
	for _, name := range []string{"", "..", "GPU-../x", "GPU-a b"} {
		if err := d.Want(name); err == nil {
			t.Errorf("%q is taken for a card", name)
		}
	}
	const card0 = "GPU-11111111-2222-3333-4444-555555555555"
	if err := d.Want(card0); err != nil {
		t.Fatal(err)
	}
	for what, text := range map[string]string{
		"another version": `{"v":2,"card":"` + card0 + `"}`,
		"another card":    `{"v":1,"card":"GPU-x"}`,
		"no JSON":         `wanted`,
		"nothing":         ``,
	} {
		if err := os.WriteFile(d.wanted(card0), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		if is, err := d.IsWanted(card0); err == nil || is {
			t.Errorf("%s: wanted is %v, %v", what, is, err)
		}
		if err := os.WriteFile(d.state(card0), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		if s, err := d.State(card0); err == nil {
			t.Errorf("%s: state is %+v", what, s)
		}
	}
	if err := d.Want(card0); err != nil {
		t.Fatal(err)
	}
	if is, err := d.IsWanted(card0); err != nil || !is {
		t.Errorf("after it was written again: %v, %v", is, err)
	}
	var w Wanted
	b, err := os.ReadFile(d.wanted(card0))
	if err == nil {
		err = json.Unmarshal(b, &w)
	}
	if err != nil || w != (Wanted{1, card0}) {
		t.Errorf("%+v, %v", w, err)
	}
	if cards, err := d.Cards(); err != nil || len(cards) != 1 || cards[0] != card0 {
		t.Errorf("cards %v, %v", cards, err)
	}
}
