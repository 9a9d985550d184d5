package agent

import (
	"bufio"
	"cmp"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	events "k8s.io/client-go/tools/record"
	"k8s.io/client-go/util/workqueue"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/vgpu/gpu"
	"github.com/carve-gpu/carve/vgpu/gpu/nvml"
	"github.com/carve-gpu/carve/vgpu/native"
	"github.com/carve-gpu/carve/vgpu/region"
)

var longTests = flag.Bool("long", false, "run the long form of tests that have one")

// softCard is a software GPU with one card, real processes on it under the front
// library, and an agent that does nothing by itself: a test lets it look. One
// process loads one NVML, so all tests share the root.
type softCard struct {
	*reaper
	t    *testing.T
	card string
	now  time.Time
	// pids are the processes of each container, by host pid.
	mu   sync.Mutex
	pids map[int]string
}

const (
	libDir  = "../lib"
	softDir = "../soft"
)

var soft struct {
	once sync.Once
	root string
	door *nvml.Driver
	card string
	err  error
}

// destroySoft ends the software GPU after all tests.
func destroySoft() {
	if soft.root != "" {
		exec.Command(filepath.Join(softDir, "build/softgpu"), "destroy", soft.root).Run()
		os.RemoveAll(filepath.Dir(soft.root))
	}
}

func startSoft() {
	run := func(name string, args ...string) {
		if soft.err == nil {
			if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
				soft.err = fmt.Errorf("%s %v: %w\n%s", name, args, err, out)
			}
		}
	}
	if soft.err = cmp.Or(native.Make(libDir), native.Make(softDir)); soft.err != nil {
		return
	}
	dir, err := os.MkdirTemp("", "carve-agent-test-")
	if err != nil {
		soft.err = err
		return
	}
	soft.root = filepath.Join(dir, "root")
	run(filepath.Join(softDir, "build/softgpu"), "init", soft.root, "--card", "a100-80", "--seed", "1")
	if soft.err != nil {
		return
	}
	if soft.door, soft.err = nvml.Open(gpu.Root{Path: soft.root}, slog.New(slog.DiscardHandler)); soft.err != nil {
		return
	}
	inventory, err := soft.door.Inventory()
	if err != nil || len(inventory.Cards) != 1 {
		soft.err = fmt.Errorf("%+v, %w", inventory, err)
		return
	}
	soft.card = inventory.Cards[0].UUID
}

// newSoftCard makes an agent with shares of so many MiB on the card, one for each
// pod "pod-0", "pod-1", …, all of them running.
func newSoftCard(t testing.TB, mib ...int64) *softCard {
	t.Helper()
	var shares []api.CardGrant
	for _, m := range mib {
		shares = append(shares, api.CardGrant{MemMiB: m})
	}
	return newSoftShares(t, shares...)
}

// newSoftShares is the same with shares of any kind, of that card.
func newSoftShares(t testing.TB, shares ...api.CardGrant) *softCard {
	t.Helper()
	soft.once.Do(startSoft)
	if soft.err != nil {
		t.Fatal(soft.err)
	}
	dir := t.TempDir()
	inventory, err := soft.door.Inventory()
	if err != nil {
		t.Fatal(err)
	}
	contexts, err := recallContexts(contextsFile(dir))
	if err != nil {
		t.Fatal(err)
	}
	a := &Agent{
		Config: Config{Node: nodeName, StateDir: dir, Log: slog.New(slog.DiscardHandler)},
		files:  files{dir: filepath.Join(dir, "slices")},
		queue:  workqueue.NewTypedRateLimitingQueue(workqueue.DefaultTypedControllerRateLimiter[string]()),
		dirty:  make(chan struct{}, 1), stirred: make(chan struct{}, 1), changed: make(chan struct{}),
		pods: map[string]pod{}, held: map[string]*holding{}, containers: map[string]use{}, sandboxes: map[string]sandbox{},
		contexts: contexts, listed: true, events: &events.FakeRecorder{},
		hardware: hardwareState{door: soft.door, known: true, inventory: inventory},
	}
	s := &softCard{reaper: newReaper(a), card: soft.card, now: time.Now(), pids: map[int]string{}}
	a.groupsOf = func(pid int) (string, error) {
		s.mu.Lock()
		defer s.mu.Unlock()
		return "0::/kubepods/" + s.pids[pid], nil
	}
	for i, share := range shares {
		uid := fmt.Sprintf("pod-%d", i)
		share.Card, share.Mode = s.card, api.ModeVGPU
		g := grantOf(uid, 1, map[string][]api.CardGrant{"app": {share}})
		r := record{Version: recordVersion, State: stateHeld, Namespace: "default", Pod: uid, Grant: g}
		if err := a.prepareFiles(r); err != nil {
			t.Fatal(err)
		}
		a.held[uid] = &holding{record: r, prepared: true, used: map[string]bool{"app": true}}
		a.containers["container-of-"+uid] = use{uid: uid, container: "app", adjusted: true, started: true}
		t.Cleanup(func() { a.files.clear(uid) })
	}
	t.Cleanup(a.queue.ShutDown)
	return s
}

// look lets the agent look once, a second after the last time.
func (s *softCard) look() {
	s.now = s.now.Add(residualEvery)
	s.reaper.look()
	s.sampleResiduals(s.now)
}

func (s *softCard) residual(i int) uint64 {
	l, err := region.ReadLimits(s.files.limits(fmt.Sprintf("pod-%d", i), "app"))
	if err != nil {
		s.t.Fatal(err)
	}
	return l.Live[0].ResidualBytes
}

// program is a gpuprobe serve in the container of a pod.
type program struct {
	t     testing.TB
	cmd   *exec.Cmd
	in    io.WriteCloser
	lines *bufio.Scanner
	held  []uint64 // in the order of its numbers
	pid   int      // as the driver names it
}

// run starts a program in a pod, in namespaces of its own for mounts and pids, as
// a container's. past has it open the driver's own file.
func (s *softCard) run(t testing.TB, i int, past bool) *program {
	t.Helper()
	if past {
		return s.runAfter(t, i, "export LD_LIBRARY_PATH=/usr/lib/carve/driver")
	}
	return s.runAfter(t, i, ":")
}

// runAfter starts a program in a pod after some shell commands.
func (s *softCard) runAfter(t testing.TB, i int, first string) *program {
	t.Helper()
	uid := fmt.Sprintf("pod-%d", i)
	script := fmt.Sprintf(`: > /usr/lib/carve/limits; : > /usr/lib/carve/usage
mount --bind %s /usr/lib/carve/limits && mount -o remount,bind,ro /usr/lib/carve/limits && mount --bind %s /usr/lib/carve/usage
%s
exec %s serve`, s.files.limits(uid, "app"), s.files.usage(uid, "app"), first, absolute(t, softDir+"/build/gpuprobe"))
	cmd := exec.Command(absolute(t, libDir+"/test/inside.sh"), absolute(t, libDir+"/build/libcarve-cuda.so"), absolute(t, libDir+"/build/libcarve-nvml.so"),
		"soft:"+soft.root, "-", "unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", script)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	before := s.listed()
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p := &program{t: t, cmd: cmd, in: in, lines: bufio.NewScanner(out)}
	t.Cleanup(p.end)
	p.say("info", "memory") // it has its context now
	// The pid under which the driver knows it is the one that it didn't before.
	for pid := range s.listed() {
		if !before[pid] {
			s.mu.Lock()
			s.pids[pid] = "container-of-" + uid
			s.mu.Unlock()
			p.pid = pid
			return p
		}
	}
	t.Fatalf("the driver doesn't list the program of %s", uid)
	return nil
}

func (s *softCard) listed() map[int]bool {
	out := map[int]bool{}
	seen, err := soft.door.Occupancy(s.card)
	if err != nil {
		return out
	}
	for _, p := range seen.Processes {
		out[p.PID] = true
	}
	return out
}

func absolute(t testing.TB, path string) string {
	t.Helper()
	p, err := filepath.Abs(path)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// say gives an order and returns the line that answers it.
func (p *program) say(order, step string) map[string]any {
	p.t.Helper()
	if _, err := fmt.Fprintln(p.in, order); err != nil {
		p.t.Fatalf("%s: %v", order, err)
	}
	for p.lines.Scan() {
		var m map[string]any
		if json.Unmarshal(p.lines.Bytes(), &m) == nil && m["step"] == step {
			return m
		}
	}
	p.t.Fatalf("%s: the program ended", order)
	return nil
}

// alloc asks for memory and reports whether it was had.
func (p *program) alloc(bytes uint64) bool {
	p.t.Helper()
	m := p.say(fmt.Sprintf("alloc %dB", bytes), "alloc")
	if m["ok"] == true {
		p.held = append(p.held, bytes)
		return true
	}
	if m["error"] != float64(2) {
		p.t.Fatalf("%v", m)
	}
	return false
}

func (p *program) free(i int) {
	p.t.Helper()
	if m := p.say(fmt.Sprintf("free %d", i), "free"); m["ok"] != true {
		p.t.Fatalf("%v", m)
	}
	last := len(p.held) - 1
	p.held[i] = p.held[last]
	p.held = p.held[:last]
}

func (p *program) end() {
	if p.cmd.ProcessState != nil {
		return
	}
	fmt.Fprintln(p.in, "quit")
	p.in.Close()
	p.cmd.Wait()
}

// A program that opens the driver's own file is beyond the library, and not beyond
// the agent: within three looks what it took counts against the container, whose
// other programs get nothing more; and as soon as it is given back they do.
func TestMemoryTakenPastTheLibraryCounts(t *testing.T) {
	s := newSoftCard(t, 4000, 4000)
	s.t = t
	honest, neighbour := s.run(t, 0, false), s.run(t, 1, false)
	if !honest.alloc(1000<<20) || !neighbour.alloc(3000<<20) {
		t.Fatal("a program within its limit was refused")
	}
	for range 2 * residualSamples {
		s.look()
	}
	if a, b := s.residual(0), s.residual(1); a != 0 || b != 0 {
		t.Fatalf("residuals of %d and %d before anything was taken", a, b)
	}
	past := s.run(t, 0, true)
	if !past.alloc(6000 << 20) {
		t.Fatal("the driver refused a program that goes past the library")
	}
	const taken = 6000 << 20
	for range residualSamples {
		s.look()
	}
	if r := s.residual(0); r < taken || r > taken+(1<<30) {
		t.Errorf("residual of %d after %d looks, taken were %d and a context", r, residualSamples, int64(taken))
	}
	if r := s.residual(1); r != 0 {
		t.Errorf("the neighbour has a residual of %d", r)
	}
	if honest.alloc(2 << 20) {
		t.Error("the container was granted more, with 6000 MiB past its limit of 4000")
	}
	if m := honest.say("info", "memory"); m["freeBytes"] != float64(0) {
		t.Errorf("the container sees %v", m)
	}
	if !neighbour.alloc(100 << 20) {
		t.Error("the neighbour was refused")
	}
	if told := s.held["pod-0"].toldResidual("app", 0); told < 6000 || told > 7000 {
		t.Errorf("the report says %d MiB", told)
	}
	past.free(0)
	s.look()
	if r := s.residual(0); r > 1<<30 {
		t.Errorf("residual of %d one look after it was given back", r)
	}
	if !honest.alloc(1000 << 20) {
		t.Error("refused though there is room again")
	}
	// A process that ended is nobody's residual, though the driver is late.
	past.alloc(6000 << 20)
	for range residualSamples {
		s.look()
	}
	past.end()
	s.look()
	if r := s.residual(0); r != 0 {
		t.Errorf("residual of %d one look after the process ended", r)
	}
	// The container ends: the next one starts with nothing.
	again := s.run(t, 0, true)
	again.alloc(500 << 20)
	for range residualSamples {
		s.look()
	}
	if s.residual(0) == 0 {
		t.Fatal("not caught a second time")
	}
	delete(s.containers, "container-of-pod-0")
	s.sampleResiduals(s.now)
	if r := s.residual(0); r != 0 {
		t.Errorf("residual of %d for the next container", r)
	}
}

// No program is refused what fits, whenever the agent looks, and however many times
// memory goes and comes between two looks.
func TestNoFalseRefusalUnderTheAgentsEyes(t *testing.T) {
	calls := 1500
	if *longTests {
		calls = 10000
	}
	const limit = 3000 << 20
	s := newSoftCard(t, limit>>20)
	s.t = t
	stop, stopped := make(chan struct{}), make(chan struct{})
	var looks atomic.Int64
	go func() {
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			default:
				s.look()
				looks.Add(1)
			}
		}
	}()
	defer func() { close(stop); <-stopped; t.Logf("%d calls under %d looks", 2*calls, looks.Load()) }()
	var wait sync.WaitGroup
	// Two programs that together may fill the limit to the last page.
	const context = 600 << 20 // more than one costs
	share := uint64(limit-2*context) / 2
	var programs []*program
	for range 2 {
		programs = append(programs, s.run(t, 0, false))
	}
	for n, p := range programs {
		wait.Go(func() {
			r := rand.New(rand.NewPCG(uint64(n), 5))
			var used uint64
			for i := 0; i < calls; {
				if r.IntN(2) == 0 && len(p.held) > 0 {
					i++
					at := r.IntN(len(p.held))
					used -= paged(p.held[at])
					p.free(at)
					continue
				}
				bytes := r.Uint64N(300<<20) + 1
				if r.IntN(4) == 0 {
					bytes = share - used // all that is left
				}
				if bytes == 0 || used+paged(bytes) > share {
					continue
				}
				i++
				if !p.alloc(bytes) {
					t.Errorf("program %d, call %d: %d bytes refused with %d of %d in use, residual %d", n, i, bytes, used, share, s.residual(0))
					return
				}
				used += paged(bytes)
			}
		})
	}
	wait.Wait()
	if n := looks.Load(); n < int64(calls/100) {
		t.Errorf("the agent looked %d times only", n)
	}
}

// paged is what the driver takes for a request, at most.
func paged(bytes uint64) uint64 { return (bytes + 2<<20 - 1) / (2 << 20) * (2 << 20) }

// What a context costs shows in a process that has nothing else. It is published,
// kept, and known from the start after that.
func TestContextsAreLearntFromTheCard(t *testing.T) {
	s := newSoftCard(t, 4000, 3000)
	s.t = t
	of := func(i int) uint64 {
		l, err := region.ReadLimits(s.files.limits(fmt.Sprintf("pod-%d", i), "app"))
		if err != nil {
			t.Fatal(err)
		}
		return l.Cards[0].ContextBytes
	}
	busy := s.run(t, 0, false)
	busy.alloc(700 << 20)
	s.look()
	s.look()
	s.look()
	if c := s.factsOf(s.card).contextBytes; c != 0 {
		t.Fatalf("%d bytes learnt from a process that has more", c)
	}
	busy.free(0)
	s.look()
	s.look()
	s.look()
	cost := s.factsOf(s.card).contextBytes
	seen, err := soft.door.Occupancy(s.card)
	if err != nil || len(seen.Processes) != 1 || cost != seen.Processes[0].UsedBytes {
		t.Fatalf("learnt %d, the driver says %+v (%v)", cost, seen.Processes, err)
	}
	for s.queue.Len() > 0 {
		uid, _ := s.queue.Get()
		if err := s.again(s.situation(uid)); err != nil {
			t.Error(err)
		}
		s.queue.Done(uid)
	}
	if of(0) != cost || of(1) != cost {
		t.Errorf("published are %d and %d, want %d", of(0), of(1), cost)
	}
	again, err := recallContexts(contextsFile(s.StateDir))
	if err != nil || again.of(s.hardware.inventory.DriverVersion, s.hardware.inventory.Cards[0].Model) != cost {
		t.Errorf("kept: %+v, %v", again.file(), err)
	}
}

// What the agent costs a node whose 32 containers are in use: CPU each second.
func BenchmarkLookAt32Shares(b *testing.B) {
	mib := make([]int64, 32)
	for i := range mib {
		mib[i] = 2000
	}
	s := newSoftCard(b, mib...)
	for i := range mib {
		s.run(b, i, false).alloc(100 << 20)
	}
	s.look()
	cpu := cpuTime()
	for b.Loop() {
		s.look()
	}
	b.ReportMetric(float64(cpuTime()-cpu)/float64(b.N)/1e6, "agent_look_cpu_ms_per_s")
}

func cpuTime() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		panic(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
