package agent

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/client-go/util/workqueue"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/vgpu/gpu"
	"github.com/carve-gpu/carve/vgpu/region"
)

// takeSlot plays the front library: it takes a slot for a process and charges
// it. The places are those of carve_region.h.
func takeSlot(t *testing.T, path string, slot int, p region.Process, usedBytes, refusals uint64) {
	t.Helper()
	if order, ok := tenants.Load(p.HostPID); ok {
		order.(func(string))(path)
	}
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	put := func(at int, v uint64) {
		if _, err := f.WriteAt(binary.LittleEndian.AppendUint64(nil, v), int64(at)); err != nil {
			t.Fatal(err)
		}
	}
	high := make([]byte, 4)
	if _, err := f.ReadAt(high, 24); err != nil {
		t.Fatal(err)
	}
	high = binary.LittleEndian.AppendUint32(nil, max(binary.LittleEndian.Uint32(high), uint32(slot)+1))
	if _, err := f.WriteAt(high, 24); err != nil {
		t.Fatal(err)
	}
	process := 4096 + slot*128
	put(process, uint64(region.SlotLive)|uint64(p.PID)<<32)
	put(process+8, p.StartTicks)
	put(process+16, p.PIDNamespace)
	line := 4096 + region.MaxSlots*128 + slot*128
	put(line, usedBytes/region.UnitBytes<<32)
	put(line+40, refusals)
	put(line+56, usedBytes)
}

// startShare starts a node with one share in use, and returns its usage file.
func startShare(t *testing.T) (*testNode, string) {
	t.Helper()
	n := startNode(t)
	n.link()
	n.api.setPod(podWith(t, "uid-1", grantOf("uid-1", 1, map[string][]api.CardGrant{"app": shareOf(cardA, 100, 0)})))
	eventually(t, "the slice is prepared", func() bool { return n.prepared("uid-1", "app") })
	n.Adjusted(RuntimeContainer{ID: "reclaim-test-1", PodUID: "uid-1", Name: "app"})
	return n, n.files.usage("uid-1", "app")
}

// asTenant says that the process plays a container's.
const asTenant = "CARVE_TEST_AS_TENANT"

// beTenant maps the files that it is told to, as the front library does.
func beTenant() {
	orders := bufio.NewScanner(os.Stdin)
	for fmt.Println("ready"); orders.Scan(); fmt.Println("ready") {
		f, err := os.Open(orders.Text())
		if err == nil {
			_, err = unix.Mmap(int(f.Fd()), 0, region.UsageBytes, unix.PROT_READ, unix.MAP_SHARED)
			f.Close()
		}
		if err != nil {
			fmt.Println(err)
		}
	}
}

// tenants are the orders of those that were started, by pid.
var tenants sync.Map

// tenant starts a process in a PID namespace of its own, as a container's.
func tenant(t *testing.T) (*exec.Cmd, region.Process) {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), asTenant+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID, Pdeathsig: syscall.SIGKILL}
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	answers := bufio.NewReader(out)
	order := func(path string) {
		t.Helper()
		if path != "" {
			fmt.Fprintln(in, path)
		}
		if line, err := answers.ReadString('\n'); err != nil || line != "ready\n" {
			t.Fatalf("the tenant says %q (%v)", line, err)
		}
	}
	order("")
	tenants.Store(cmd.Process.Pid, order)
	p, err := region.ReadProcess(procRoot, cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	if p.PID != 1 {
		t.Fatalf("the tenant knows itself as %d, want 1", p.PID)
	}
	return cmd, p
}

func TestTheChargeOfADeadProcessGoesWhenTheDriverHasLetGo(t *testing.T) {
	n, usage := startShare(t)
	charged := func() uint64 {
		t.Helper()
		u, err := region.ReadUsage(usage, 1)
		if err != nil {
			t.Fatal(err)
		}
		return u.Total(0).UsedBytes
	}
	lives, p := tenant(t)
	dies, q := tenant(t)
	takeSlot(t, usage, 0, p, 10<<20, 3)
	takeSlot(t, usage, 1, q, 20<<20, 4)
	n.cards.mu.Lock()
	n.cards.processes = []gpu.Process{{PID: lives.Process.Pid}, {PID: dies.Process.Pid}}
	n.cards.mu.Unlock()
	time.Sleep(3 * reclaimEvery)
	if c := charged(); c != 30<<20 {
		t.Fatalf("%d bytes charged while both run", c)
	}
	// Ended, but not waited for: a zombie's memory is the driver's business.
	if err := dies.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	time.Sleep(3 * reclaimEvery)
	if c := charged(); c != 30<<20 {
		t.Fatalf("%d bytes charged while the driver still lists the dead process", c)
	}
	n.cards.mu.Lock()
	n.cards.processes = n.cards.processes[:1]
	n.cards.mu.Unlock()
	eventually(t, "its charge is taken off", func() bool { return charged() == 10<<20 })
	v := n.View()
	if len(v.Slices) != 1 || v.Slices[0].Refusals != 7 || v.Slices[0].PeakBytes != 30<<20 || v.Slices[0].Usage.UsedBytes != 10<<20 || !v.Slices[0].Active {
		t.Errorf("the view says %+v", v.Slices)
	}
	// The container ends, and with it the rest.
	lives.Process.Kill()
	lives.Wait()
	n.cards.mu.Lock()
	n.cards.processes = nil
	n.cards.mu.Unlock()
	n.Exited("reclaim-test-1")
	eventually(t, "all is taken off", func() bool { return charged() == 0 })
}

// A container that ended while no agent was there leaves the charge of its
// processes behind: an init container that runs again would find it.
func TestTheChargeOfAContainerThatEndedUnseenGoes(t *testing.T) {
	n, usage := startShare(t)
	dies, p := tenant(t)
	takeSlot(t, usage, 0, p, 10<<20, 0)
	n.stop()
	dies.Process.Kill()
	dies.Wait()
	n.start()
	n.link()
	eventually(t, "its charge is taken off", func() bool {
		u, err := region.ReadUsage(usage, 1)
		return err == nil && u.Total(0).UsedBytes == 0
	})
}

// Before the runtime has told what runs, a container that isn't known may run.
func TestNothingIsTakenOffBeforeTheRuntimeHasTold(t *testing.T) {
	n, usage := startShare(t)
	takeSlot(t, usage, 0, region.Process{PID: 7, StartTicks: 1, PIDNamespace: 12345}, 10<<20, 0)
	n.stop()
	n.start()
	time.Sleep(3 * reclaimEvery)
	if u, err := region.ReadUsage(usage, 1); err != nil || u.Total(0).UsedBytes != 10<<20 {
		t.Errorf("%+v, %v", u, err)
	}
}

func TestAnOwnerThatCannotBeSeenIsNotTakenForDead(t *testing.T) {
	_, usage := startShare(t)
	// A PID namespace of which no process is seen here, as for an agent that
	// doesn't share the node's.
	takeSlot(t, usage, 0, region.Process{PID: 7, StartTicks: 1, PIDNamespace: 12345}, 10<<20, 0)
	time.Sleep(3 * reclaimEvery)
	if u, err := region.ReadUsage(usage, 1); err != nil || u.Total(0).UsedBytes != 10<<20 {
		t.Errorf("%+v, %v", u, err)
	}
}

// A container that crashes leaves the charge of its processes to the attempt
// after it, and their PID namespace is gone with them.
func TestTheOwnerOfAnEarlierAttemptIsGone(t *testing.T) {
	const id = "4f1c0ffee"
	r := &reaper{hostPID: map[owner]int{}, lastPID: map[owner]int{}}
	slot := region.Slot{State: region.SlotLive, PID: 7, StartTicks: 1, PIDNamespace: 12345}
	others := []region.Process{{HostPID: 1, PID: 1, StartTicks: 2, PIDNamespace: 1}, {HostPID: 70, PID: 7, StartTicks: 9, PIDNamespace: 67890}}
	for name, c := range map[string]struct {
		share  share
		groups []string
		gone   bool
		unread bool
	}{
		"a process of the container is seen":                {share{running: true, ids: []string{id}}, []string{"0::/init", "3:devices:/kubepods/pod1/" + id}, true, false},
		"one is seen, and some can't be read":               {share{running: true, ids: []string{id}}, []string{"0::/init", "3:devices:/kubepods/pod1/" + id}, false, true},
		"none is seen":                                      {share{running: true, ids: []string{id}}, []string{"0::/init", "0::/other"}, false, false},
		"the runtime hasn't told yet":                       {share{running: true}, []string{"0::/init", "3:devices:/kubepods/pod1/" + id}, false, false},
		"no container of it runs, whatever processes there": {share{}, []string{"0::/init", "0::/other"}, true, true},
	} {
		table := &processTable{read: true, partial: c.unread, processes: others, groups: c.groups}
		if got, _ := r.isGone(c.share.owner(slot), c.share, slot, region.Usage{}, table); got != c.gone {
			t.Errorf("%s: gone is %v", name, got)
		}
	}
}

func TestATenantsFileHurtsNobody(t *testing.T) {
	n := startNode(t)
	n.link()
	for _, uid := range []string{"uid-1", "uid-2"} {
		n.api.setPod(podWith(t, uid, grantOf(uid, 1, map[string][]api.CardGrant{"app": shareOf(cardA, 100, 0)})))
		eventually(t, "the slice is prepared", func() bool { return n.prepared(uid, "app") })
		n.Adjusted(RuntimeContainer{ID: "c-" + uid, PodUID: uid, Name: "app"})
	}
	usage := n.files.usage("uid-1", "app")
	neighbour, err := os.ReadFile(n.files.usage("uid-2", "app"))
	if err != nil {
		t.Fatal(err)
	}
	for name, harm := range map[string]func() error{
		"zeroed":    func() error { return os.WriteFile(usage, make([]byte, 8192), 0o666) },
		"truncated": func() error { return os.Truncate(usage, 0) },
		"scribbled": func() error {
			return os.WriteFile(usage, []byte(strings.Repeat("\xff", region.UsageBytes)), 0o666)
		},
		"grown": func() error {
			f, err := os.OpenFile(usage, os.O_WRONLY|os.O_APPEND, 0)
			if err != nil {
				return err
			}
			defer f.Close()
			// Until the file system is full; the node's isn't.
			for range 1024 {
				if _, err = f.Write(make([]byte, 64<<10)); err != nil {
					break
				}
			}
			if err == nil {
				t.Error("a tenant can write 64 MiB into its usage file")
			}
			return nil
		},
	} {
		if err := harm(); err != nil && !strings.Contains(err.Error(), unix.ENOSPC.Error()) {
			t.Fatalf("%s: %v", name, err)
		}
		n.View()
		time.Sleep(2 * reclaimEvery)
		if !n.prepared("uid-1", "app") || !n.prepared("uid-2", "app") {
			t.Errorf("%s: slices are gone", name)
		}
		if l, err := region.ReadLimits(n.files.limits("uid-1", "app")); err != nil || l.Cards[0].LimitBytes != 100<<20 {
			t.Errorf("%s: limits %+v, %v", name, l, err)
		}
	}
	if now, err := os.ReadFile(n.files.usage("uid-2", "app")); err != nil || string(now) != string(neighbour) {
		t.Errorf("the neighbour's file changed (%v)", err)
	}
	if err := os.Truncate(usage, 0); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the file is usable again", func() bool {
		u, err := region.ReadUsage(usage, 1)
		return err == nil && u.Damage == 0
	})
}

func TestOnlyAProcessOfThatContainerIsKilled(t *testing.T) {
	cmd, _ := tenant(t)
	if err := killContainer(cmd.Process.Pid, "0123456789abcdef"); err == nil {
		t.Error("a process of another cgroup was killed")
	}
	if err := killContainer(cmd.Process.Pid, ""); err == nil {
		t.Error("a process was killed for a container without an ID")
	}
	groups, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		t.Fatal(err)
	}
	// A container's ID is a part of its cgroup's path.
	id := strings.TrimSpace(strings.SplitN(string(groups), "\n", 2)[0])
	if err := killContainer(cmd.Process.Pid, id); err != nil {
		t.Error(err)
	}
	if err := cmd.Wait(); err == nil || !strings.Contains(err.Error(), "killed") {
		t.Errorf("it ended with %v", err)
	}
	if err := killContainer(cmd.Process.Pid, id); err != nil {
		t.Errorf("one that is gone: %v", err)
	}
}

// A tenant that claims a thousand dead processes costs the driver no more than
// one that claims a single one, and is rid of them at once.
func TestAFloodOfDeadSlotsCostsOneSample(t *testing.T) {
	n, usage := startShare(t)
	_, lives := tenant(t) // its namespace is seen here, so others in it count as dead
	samples := func() int { n.cards.mu.Lock(); defer n.cards.mu.Unlock(); return n.cards.samples }
	before := samples()
	const claims = 1000
	for i := range claims {
		takeSlot(t, usage, i, region.Process{PID: uint32(i + 100000), StartTicks: uint64(i), PIDNamespace: lives.PIDNamespace}, 1<<20, 0)
	}
	eventually(t, "all are taken off", func() bool {
		u, err := region.ReadUsage(usage, 1)
		return err == nil && u.Total(0).UsedBytes == 0
	})
	// The view samples each second too.
	if took := samples() - before; took > 100 {
		t.Errorf("%d samples of the card for %d claims", took, claims)
	}
}

// What the driver still holds for one dead process is no reason to keep another
// one charged.
func TestANeighboursCorpseDelaysNobody(t *testing.T) {
	n, usage := startShare(t)
	dies, p := tenant(t)
	neighbour, _ := tenant(t)
	takeSlot(t, usage, 0, p, 10<<20, 0)
	time.Sleep(3 * reclaimEvery) // both are seen alive
	neighbour.Process.Kill()
	dies.Process.Kill()
	n.cards.mu.Lock()
	n.cards.processes = []gpu.Process{{PID: neighbour.Process.Pid}}
	n.cards.mu.Unlock()
	eventually(t, "its charge is taken off", func() bool {
		u, err := region.ReadUsage(usage, 1)
		return err == nil && u.Total(0).UsedBytes == 0
	})
}

// node-29: a container may exit while the runtime tells a new agent of it.
func TestAContainerWhoseEndNobodyToldIsEnded(t *testing.T) {
	proc := t.TempDir()
	a := &Agent{Config: Config{Log: slog.New(slog.DiscardHandler)}, dirty: make(chan struct{}, 1),
		queue: workqueue.NewTypedRateLimitingQueue(workqueue.DefaultTypedControllerRateLimiter[string]()),
		containers: map[string]use{
			"lives": {uid: "uid-1", container: "app", hostPID: 11, started: true, adjusted: true},
			"dead":  {uid: "uid-1", container: "load", hostPID: 12, started: true, adjusted: true},
			"new":   {uid: "uid-2", container: "app", adjusted: true}, // has no process yet
		}}
	t.Cleanup(a.queue.ShutDown)
	if err := os.Mkdir(filepath.Join(proc, "11"), 0o755); err != nil {
		t.Fatal(err)
	}
	dead := a.endUnseen(proc, nil)
	if len(a.containers) != 3 {
		t.Errorf("%d containers after the first look: the runtime's word may be on its way", len(a.containers))
	}
	dead = a.endUnseen(proc, dead)
	if _, there := a.containers["dead"]; there || len(a.containers) != 2 || len(dead) != 0 {
		t.Errorf("left are %v, dead %v", a.containers, dead)
	}
	if n := a.queue.Len(); n != 1 {
		t.Errorf("%d pods are looked at, want the one whose container ended", n)
	}
}

// A node on which no container runs with a share doesn't wake to look.
func TestAnIdleNodeSleeps(t *testing.T) {
	n, _ := startShare(t)
	// As often as it takes to be sure that it goes on while one runs.
	before := n.looks.Load()
	eventually(t, "looks while a container runs", func() bool { return n.looks.Load() >= before+3 })
	n.Synchronize([]RuntimeContainer{{ID: "other", PodUID: "uid-of-a-pod-without-cards", Name: "app", HostPID: 1}})
	time.Sleep(3 * reclaimEvery)
	before = n.looks.Load()
	time.Sleep(4 * reclaimEvery)
	if more := n.looks.Load() - before; more != 0 {
		t.Errorf("%d looks though no container runs with a share", more)
	}
	n.Adjusted(RuntimeContainer{ID: "again", PodUID: "uid-1", Name: "app"})
	eventually(t, "looks again", func() bool { return n.looks.Load() >= before+3 })
}

// A process that can't be read, for want of descriptors here, hasn't ended for that.
func TestWhoCannotBeReadHasNotEnded(t *testing.T) {
	self, err := region.ReadProcess(procRoot, os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	slot := region.Slot{State: region.SlotLive, PID: self.PID, StartTicks: self.StartTicks, PIDNamespace: self.PIDNamespace}
	s := share{running: true}
	var was syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &was); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: 0, Max: was.Max}); err != nil {
		t.Fatal(err)
	}
	ended := hasEnded(self.HostPID)
	known := &reaper{hostPID: map[owner]int{s.owner(slot): self.HostPID}, lastPID: map[owner]int{}}
	goneKnown, _ := known.isGone(s.owner(slot), s, slot, region.Usage{}, &processTable{})
	fresh := &reaper{hostPID: map[owner]int{}, lastPID: map[owner]int{}}
	table := &processTable{}
	goneFresh, _ := fresh.isGone(s.owner(slot), s, slot, region.Usage{}, table)
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &was); err != nil {
		t.Fatal(err)
	}
	if ended || goneKnown || goneFresh {
		t.Errorf("ended %v; gone %v where its pid is known, %v where it isn't", ended, goneKnown, goneFresh)
	}
	if !table.partial {
		t.Error("the table of processes is said to be whole")
	}
}
