package agent

import (
	"encoding/binary"
	"fmt"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/carve-gpu/carve/vgpu/gpu"
	"github.com/carve-gpu/carve/vgpu/region"
)

// lookUntil lets the agent look until something is so.
func (s *softCard) lookUntil(t *testing.T, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(60 * time.Second); !is(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("not seen: %s", what)
		}
		s.look()
	}
}

func (s *softCard) slots(t *testing.T, pod int) []region.Slot {
	t.Helper()
	u, err := region.ReadUsage(s.files.usage(fmt.Sprintf("pod-%d", pod), "app"), 1)
	if err != nil {
		t.Fatal(err)
	}
	return u.Slots
}

func (s *softCard) charged(t *testing.T, pod int) (mib uint64) {
	t.Helper()
	for _, slot := range s.slots(t, pod) {
		mib += slot.Cards[0].UsedBytes >> 20
	}
	return mib
}

// taken lets the agent look until it is convinced that a pod's first slot has lost its
// owner, and look on for a while then.
func (s *softCard) taken(t *testing.T, what string) {
	t.Helper()
	o := share{uid: "pod-0", container: "app"}.owner(s.slots(t, 0)[0])
	s.lookUntil(t, what, func() bool { return s.gone[o] >= 6 || s.charged(t, 0) == 0 })
}

// order gives an order that nothing answers.
func (p *program) order(order string) {
	p.t.Helper()
	if _, err := fmt.Fprintln(p.in, order); err != nil {
		p.t.Fatal(err)
	}
}

// kill ends a program that doesn't listen any more.
func (p *program) kill() {
	syscall.Kill(p.pid, syscall.SIGKILL)
	p.cmd.Wait()
}

// A process goes on as a program that doesn't use the card: its memory went at exec,
// and its charge goes, too, however long it lives.
func TestTheChargeOfAProgramThatWasReplacedGoes(t *testing.T) {
	s := newSoftCard(t, 4000)
	stays, p := s.run(t, 0, false), s.run(t, 0, false)
	stays.alloc(500 << 20)
	before := s.charged(t, 0)
	if !p.alloc(1000 << 20) {
		t.Fatal("refused")
	}
	for range 5 {
		s.look()
	}
	if now := s.charged(t, 0); now != before+1000 {
		t.Fatalf("%d MiB charged, want %d", now, before+1000)
	}
	p.order("exec sleep 1000")
	defer p.kill()
	// What it had, its context included.
	s.lookUntil(t, "its charge is taken off", func() bool { return s.charged(t, 0) < before })
	if err := syscall.Kill(p.pid, 0); err != nil {
		t.Fatalf("the process has ended: %v", err)
	}
	left := s.charged(t, 0)
	for range 10 {
		s.look()
	}
	if now := s.charged(t, 0); now != left || now < 500 {
		t.Errorf("%d MiB charged to the program that stayed, then %d", left, now)
	}
}

// Who lets go of its usage file keeps its charge as long as the driver has its memory.
func TestWhoUnmapsItsUsageFileStaysCharged(t *testing.T) {
	s := newSoftCard(t, 4000)
	p := s.run(t, 0, false)
	p.alloc(1000 << 20)
	before := s.charged(t, 0)
	o := share{uid: "pod-0", container: "app"}.owner(s.slots(t, 0)[0])
	s.lookUntil(t, "its owner", func() bool { return s.mappings.has(o) })
	if m := p.say("unmap /usr/lib/carve/usage", "unmap"); m["ok"] != true {
		t.Fatal("the program can't unmap the file")
	}
	// The same program, as far as can be seen: asked again after a while only.
	s.mappings.mu.Lock()
	for c, f := range s.mappings.found {
		f.at = f.at.Add(-mapsEvery)
		s.mappings.found[c] = f
	}
	s.mappings.mu.Unlock()
	s.taken(t, "it has the file no more")
	if now := s.charged(t, 0); now != before {
		t.Errorf("%d MiB charged, want %d as before", now, before)
	}
	p.order("exec sleep 1000")
	defer p.kill()
	s.lookUntil(t, "its charge is taken off", func() bool { return s.charged(t, 0) == 0 })
}

// A process without /proc knows neither its start nor its PID namespace. Others of
// the node with its pid aren't it.
func TestAProcessWithoutProcIsFoundByItsFile(t *testing.T) {
	s := newSoftCard(t, 4000, 4000)
	s.run(t, 1, false) // pid 1 of another container
	p := s.runAfter(t, 0, "while umount -l /proc 2>/dev/null; do :; done")
	p.alloc(1000 << 20)
	slot := s.slots(t, 0)[0]
	if slot.StartTicks != 0 || slot.PIDNamespace != 0 || slot.PID != 1 {
		t.Fatalf("%+v", slot)
	}
	before := s.charged(t, 0)
	o := share{uid: "pod-0", container: "app"}.owner(slot)
	s.lookUntil(t, "its owner", func() bool { return s.hostPID[o] == p.pid && s.mappings.has(o) })
	for range 10 {
		s.look()
	}
	if now := s.charged(t, 0); now != before {
		t.Fatalf("%d MiB charged, want %d: it lives", now, before)
	}
	// Its successor can't mark it, and has another image.
	p.order("exec " + absolute(t, softDir+"/build/gpuprobe") + " serve")
	s.lookUntil(t, "the next program has a slot, and the first one none", func() bool {
		slots := s.slots(t, 0)
		return len(slots) == 2 && !slots[0].Charged() && slots[1].Charged()
	})
	if image, err := region.ReadImage(procRoot, p.pid); err != nil || image != s.slots(t, 0)[1].Image {
		t.Errorf("its image is %#x, the slot says %#x (%v)", image, s.slots(t, 0)[1].Image, err)
	}
	left := s.charged(t, 0)
	for range 10 {
		s.look()
	}
	if now := s.charged(t, 0); now != left {
		t.Errorf("%d MiB charged, want %d: the next program lives", now, left)
	}
	s.run(t, 0, false)
	p.kill()
	s.lookUntil(t, "its charge is taken off", func() bool { return !s.slots(t, 0)[1].Charged() })
}

// has says that the owner of a slot was seen with the file.
func (m *mappings) has(o owner) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	for c, f := range m.found {
		if c.owner == o && f.known && f.has {
			return true
		}
	}
	return false
}

// A slot that names nobody may be that of a process which is on the card and has none:
// its times may be another namespace's, or it was written over.
func TestAProcessThatItsSlotDoesNotNameStaysCharged(t *testing.T) {
	s := newSoftCard(t, 4000)
	p := s.run(t, 0, false)
	p.alloc(1000 << 20)
	s.run(t, 0, false) // another of the container, that isn't hidden
	before := s.charged(t, 0)
	f, err := os.OpenFile(s.files.usage("pod-0", "app"), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	start := binary.LittleEndian.AppendUint64(nil, s.slots(t, 0)[0].StartTicks+100)
	if _, err := f.WriteAt(start, 4096+8); err != nil {
		t.Fatal(err)
	}
	s.taken(t, "the slot's owner is gone")
	if now := s.charged(t, 0); now != before {
		t.Errorf("%d MiB charged, want %d as before", now, before)
	}
	p.kill()
	s.lookUntil(t, "its charge is taken off", func() bool { return !s.slots(t, 0)[0].Charged() })
}

// That a driver doesn't list a process is believed only where it lists them by the
// pids that are seen here.
func TestADriverThatDoesNotNameProcessesFreesNobody(t *testing.T) {
	s := newSoftCard(t, 4000)
	cards := &twoCards{}
	s.hardware.door = cards
	lives, p := tenant(t)
	others, _ := tenant(t)
	ended, _ := tenant(t)
	ended.Process.Kill()
	ended.Wait()
	usage := s.files.usage("pod-0", "app")
	pid := p.HostPID
	p.HostPID = 0 // it has the file not mapped
	takeSlot(t, usage, 0, p, 500<<20, 0)
	for name, listed := range map[string][]gpu.Process{
		"itself":                {{PID: pid, UsedBytes: 500 << 20}, {PID: others.Process.Pid}},
		"nobody":                nil,
		"one that isn't seen":   {{PID: ended.Process.Pid}, {PID: others.Process.Pid}},
		"itself, without bytes": {{PID: lives.Process.Pid}},
	} {
		cards.mu.Lock()
		cards.processes = listed
		cards.mu.Unlock()
		clear(s.gone)
		s.taken(t, "it has the file not mapped")
		if now := s.charged(t, 0); now != 500 {
			t.Fatalf("the driver lists %s: %d MiB charged, want 500", name, now)
		}
	}
	cards.mu.Lock()
	cards.processes = []gpu.Process{{PID: others.Process.Pid, UsedBytes: 1 << 30}}
	cards.mu.Unlock()
	s.lookUntil(t, "its charge is taken off", func() bool { return s.charged(t, 0) == 0 })
}

// What a process was seen without before it took a slot says nothing of the slot.
func TestWhatWasSeenBeforeASlotWasTakenDoesNotCount(t *testing.T) {
	s := newSoftCard(t, 4000)
	cards := &twoCards{}
	others, _ := tenant(t)
	cards.processes = []gpu.Process{{PID: others.Process.Pid}}
	s.hardware.door = cards
	_, p := tenant(t)
	bare := p
	bare.HostPID = 0
	usage := s.files.usage("pod-0", "app")
	takeSlot(t, usage, 0, bare, 500<<20, 0)
	s.lookUntil(t, "its charge is taken off", func() bool { return s.charged(t, 0) == 0 })
	takeSlot(t, usage, 1, p, 300<<20, 0)
	for range 20 {
		s.look()
	}
	if now := s.charged(t, 0); now != 300 {
		t.Errorf("%d MiB charged, want 300", now)
	}
}
