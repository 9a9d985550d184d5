package region

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func createUsage(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "usage")
	if err := CreateUsage(path); err != nil {
		t.Fatal(err)
	}
	return path
}

// writeSlot does what the library does, by the layout's numbers.
func writeSlot(t *testing.T, path string, s Slot) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	le := binary.LittleEndian
	// The high water comes first: nothing beyond it is looked at.
	high := make([]byte, 4)
	if _, err := f.ReadAt(high, usageHighWaterAt); err != nil {
		t.Fatal(err)
	}
	if le.Uint32(high) <= uint32(s.Index) {
		le.PutUint32(high, uint32(s.Index)+1)
		if _, err := f.WriteAt(high, usageHighWaterAt); err != nil {
			t.Fatal(err)
		}
	}
	p := make([]byte, processBytes)
	le.PutUint64(p[processStatePIDAt:], uint64(s.State)|uint64(s.PID)<<32)
	le.PutUint64(p[processStartTicksAt:], s.StartTicks)
	le.PutUint64(p[processPIDNamespaceAt:], s.PIDNamespace)
	le.PutUint64(p[processImageAt:], s.Image)
	le.PutUint32(p[processLibraryABIAt:], s.LibraryABI)
	if _, err := f.WriteAt(p, int64(usageProcesses+s.Index*processBytes)); err != nil {
		t.Fatal(err)
	}
	for c, u := range s.Cards {
		b := make([]byte, lineBytes)
		le.PutUint64(b[lineChargeAt:], u.UsedBytes>>unitShift<<32|u.PendingBytes>>unitShift)
		le.PutUint64(b[lineSequenceAt:], u.Sequence)
		le.PutUint64(b[lineContextAt:], u.ContextBytes)
		le.PutUint64(b[lineManagedAt:], u.ManagedBytes)
		le.PutUint64(b[lineAllocationsAt:], u.Allocations)
		le.PutUint64(b[lineRefusalsAt:], u.Refusals)
		le.PutUint64(b[lineLastRefusedAt:], u.LastRefusedBytes)
		le.PutUint64(b[linePeakAt:], u.PeakBytes)
		le.PutUint64(b[lineUnchargedAt:], u.UnchargedBytes)
		le.PutUint64(b[lineImportedAt:], u.ImportedBytes)
		if _, err := f.WriteAt(b, int64(usageLines+c*usageColumnBytes+s.Index*lineBytes)); err != nil {
			t.Fatal(err)
		}
	}
}

func testSlot(index int, pid uint32) Slot {
	return Slot{
		Index: index, State: SlotLive, PID: pid, StartTicks: 1000 + uint64(pid), PIDNamespace: 4026531836, Image: 99, LibraryABI: ABI,
		Cards: []CardUsage{
			{UsedBytes: 1000 * mib, PendingBytes: 512, ContextBytes: 400 * mib, ManagedBytes: 2 * mib, Sequence: 8,
				Allocations: 3, Refusals: 2, LastRefusedBytes: 9000 * mib, PeakBytes: 1200 * mib,
				UnchargedBytes: 50 * mib, ImportedBytes: 60 * mib},
			{UsedBytes: 7 * mib, Sequence: 2, Allocations: 1, PeakBytes: 7 * mib},
		},
	}
}

func TestUsageIsReadAsTheLibraryLeavesIt(t *testing.T) {
	path := createUsage(t)
	if u, err := ReadUsage(path, 2); err != nil || len(u.Slots) != 0 || u.Damage != 0 {
		t.Errorf("new file: %+v, %v", u, err)
	}
	want := []Slot{testSlot(0, 7), testSlot(5, 8), testSlot(MaxSlots-1, 9)}
	for _, s := range want {
		writeSlot(t, path, s)
	}
	u, err := ReadUsage(path, 2)
	if err != nil || u.Damage != 0 {
		t.Fatalf("%v, damage %s", err, u.Damage)
	}
	if !reflect.DeepEqual(u.Slots, want) {
		t.Errorf("got %+v\nwant %+v", u.Slots, want)
	}
	if got := u.Total(0); got.UsedBytes != 3000*mib || got.PendingBytes != 3*512 || got.ContextBytes != 1200*mib || got.Refusals != 6 {
		t.Errorf("total %+v", got)
	}
	if got := u.Total(2); got != (CardUsage{}) {
		t.Errorf("total of a card that isn't there: %+v", got)
	}
	st, err := os.Stat(path)
	if err != nil || st.Mode() != 0o666 || st.Size() != UsageBytes {
		t.Errorf("%v, mode %v, %d bytes", err, st.Mode(), st.Size())
	}
	for _, cards := range []int{-1, 0, MaxCards + 1} {
		if _, err := ReadUsage(path, cards); err == nil {
			t.Errorf("%d cards accepted", cards)
		}
	}
}

// Whatever the container put there, reading ends, stays within bounds and says what is wrong.
func TestDamagedUsageIsReadAsFarAsItGoes(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for name, tc := range map[string]struct {
		damage func(t *testing.T, path string)
		want   Damage
	}{
		"zeroed":    {func(t *testing.T, p string) { write(t, p, make([]byte, UsageBytes)) }, DamageHeader},
		"all ones":  {func(t *testing.T, p string) { write(t, p, bytes.Repeat([]byte{255}, UsageBytes)) }, DamageHeader | DamageState},
		"truncated": {func(t *testing.T, p string) { truncate(t, p, 5000) }, DamageShort},
		"emptied":   {func(t *testing.T, p string) { truncate(t, p, 0) }, DamageShort | DamageHeader},
		"grown":     {func(t *testing.T, p string) { truncate(t, p, 1<<40) }, DamageLong},
		"noise": {func(t *testing.T, p string) {
			b := make([]byte, UsageBytes)
			for i := range b {
				b[i] = byte(random.Uint32())
			}
			write(t, p, b)
		}, DamageHeader | DamageState},
	} {
		path := createUsage(t)
		writeSlot(t, path, testSlot(0, 7))
		tc.damage(t, path)
		u, err := ReadUsage(path, 2)
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if u.Damage != tc.want {
			t.Errorf("%s: damage %s, want %s", name, u.Damage, tc.want)
		}
		checkBounds(t, u, 2)
		if changed, err := RestoreUsage(path); err != nil || !changed {
			t.Errorf("%s: restore: %v, %v", name, changed, err)
		}
		if u, err := ReadUsage(path, 2); err != nil || u.Damage&(DamageHeader|DamageShort|DamageLong) != 0 {
			t.Errorf("%s: restored: damage %s, %v", name, u.Damage, err)
		}
		if changed, err := RestoreUsage(path); err != nil || changed {
			t.Errorf("%s: restored twice: %v, %v", name, changed, err)
		}
	}
}

func write(t *testing.T, path string, b []byte) {
	t.Helper()
	if err := os.WriteFile(path, b, 0o666); err != nil {
		t.Fatal(err)
	}
}

func truncate(t *testing.T, path string, size int64) {
	t.Helper()
	if err := os.Truncate(path, size); err != nil {
		t.Fatal(err)
	}
}

func checkBounds(t *testing.T, u Usage, cards int) {
	t.Helper()
	const most = uint64(1<<32-1) << unitShift
	if len(u.Slots) > MaxSlots {
		t.Errorf("%d slots", len(u.Slots))
	}
	for _, s := range u.Slots {
		if s.Index < 0 || s.Index >= MaxSlots || len(s.Cards) != cards {
			t.Errorf("slot %d with %d cards", s.Index, len(s.Cards))
		}
		for _, c := range s.Cards {
			if c.UsedBytes > most || c.PendingBytes > most || c.ContextBytes+c.ManagedBytes > c.UsedBytes {
				t.Errorf("slot %d out of bounds: %+v", s.Index, c)
			}
		}
	}
	for c := range cards {
		if total := u.Total(c); total.UsedBytes > most*MaxSlots {
			t.Errorf("total %d", total.UsedBytes)
		}
	}
}

// What stands at the path may be anything: a link to a file of the node, a pipe that nobody writes to.
func TestNothingButARegularFileIsRead(t *testing.T) {
	dir := t.TempDir()
	secret := filepath.Join(dir, "secret")
	if err := CreateUsage(secret); err != nil {
		t.Fatal(err)
	}
	link, fifo := filepath.Join(dir, "link"), filepath.Join(dir, "fifo")
	if err := os.Symlink(secret, link); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mkfifo(fifo, 0o666); err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{link, fifo, dir, "/dev/zero", filepath.Join(dir, "absent")} {
		done := make(chan struct{})
		go func() {
			defer close(done)
			if _, err := ReadUsage(path, 1); err == nil {
				t.Errorf("%s was read", path)
			}
			if err := ReclaimSlot(path, testSlot(0, 1)); err == nil {
				t.Errorf("%s was written", path)
			}
			if _, err := RestoreUsage(path); err == nil {
				t.Errorf("%s was restored", path)
			}
			if _, err := ReadLimits(path); err == nil {
				t.Errorf("%s was read as limits", path)
			}
		}()
		select {
		case <-done:
		case <-time.After(20 * time.Second):
			t.Fatalf("%s: hangs", path)
		}
	}
}

func TestReclaimTakesTheChargeOffADeadSlot(t *testing.T) {
	path := createUsage(t)
	dead, other := testSlot(3, 7), testSlot(4, 8)
	writeSlot(t, path, dead)
	writeSlot(t, path, other)
	if err := ReclaimSlot(path, dead); err != nil {
		t.Fatal(err)
	}
	u, err := ReadUsage(path, 2)
	if err != nil || len(u.Slots) != 2 {
		t.Fatalf("%+v, %v", u, err)
	}
	got := u.Slots[0]
	if got.State != SlotDead || got.PID != 7 || got.Charged() || !reflect.DeepEqual(got.Cards, make([]CardUsage, 2)) {
		t.Errorf("reclaimed slot: %+v", got)
	}
	if !reflect.DeepEqual(u.Slots[1], other) {
		t.Errorf("the slot beside: %+v", u.Slots[1])
	}
	// Again, on a slot without a charge: nothing to do, and nothing done to whoever takes it now.
	if err := ReclaimSlot(path, got); err != nil {
		t.Error(err)
	}
}

func TestReclaimLeavesASlotThatChanged(t *testing.T) {
	for name, change := range map[string]func(*Slot){
		"another pid":        func(s *Slot) { s.PID++ },
		"another start":      func(s *Slot) { s.StartTicks++ },
		"another namespace":  func(s *Slot) { s.PIDNamespace++ },
		"another program":    func(s *Slot) { s.Image++ },
		"more charged":       func(s *Slot) { s.Cards[0].UsedBytes += 512 },
		"more pending":       func(s *Slot) { s.Cards[1].PendingBytes += 512 },
		"freed and reserved": func(s *Slot) { s.Cards[0].Sequence += 2 },
	} {
		path := createUsage(t)
		seen, now := testSlot(3, 7), testSlot(3, 7)
		change(&now)
		writeSlot(t, path, now)
		if err := ReclaimSlot(path, seen); !errors.Is(err, ErrSlotChanged) {
			t.Errorf("%s: error %v", name, err)
		}
		if u, err := ReadUsage(path, 2); err != nil || !reflect.DeepEqual(u.Slots, []Slot{now}) {
			t.Errorf("%s: slot became %+v, %v", name, u.Slots, err)
		}
	}
	// A sibling's mark isn't a change of owner.
	path := createUsage(t)
	seen, now := testSlot(3, 7), testSlot(3, 7)
	now.State = SlotDying
	writeSlot(t, path, now)
	if err := ReclaimSlot(path, seen); err != nil {
		t.Error(err)
	}
	for _, index := range []int{-1, MaxSlots} {
		bad := testSlot(0, 1)
		bad.Index = index
		if err := ReclaimSlot(path, bad); err == nil {
			t.Errorf("slot %d accepted", index)
		}
	}
}

func TestAProcessIsMatchedWithItsSlot(t *testing.T) {
	p, err := ReadProcess("/proc", os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	if p.HostPID != os.Getpid() || p.PID == 0 || p.StartTicks == 0 || p.PIDNamespace == 0 {
		t.Errorf("self: %+v", p)
	}
	s := Slot{PID: p.PID, StartTicks: p.StartTicks, PIDNamespace: p.PIDNamespace}
	if !p.Owns(s) {
		t.Error("own slot not recognised")
	}
	if s.StartTicks = 0; !p.Owns(s) {
		t.Error("own slot, taken a moment ago, not recognised")
	}
	for name, other := range map[string]Slot{
		"pid":       {PID: p.PID + 1, StartTicks: p.StartTicks, PIDNamespace: p.PIDNamespace},
		"start":     {PID: p.PID, StartTicks: p.StartTicks + 1, PIDNamespace: p.PIDNamespace},
		"namespace": {PID: p.PID, StartTicks: p.StartTicks, PIDNamespace: p.PIDNamespace + 1},
	} {
		if p.Owns(other) {
			t.Errorf("slot with another %s taken for its own", name)
		}
	}
}

func TestADeadProcessIsGone(t *testing.T) {
	cmd := exec.Command("true")
	if err := cmd.Run(); err != nil {
		t.Fatal(err)
	}
	if p, err := ReadProcess("/proc", cmd.Process.Pid); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%+v, %v", p, err)
	}
}

func TestStatFieldsAreCountedBehindTheName(t *testing.T) {
	const stat = "12 (a) b (c)) %s 1 12 12 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 %d 0 4711 1000 10 18446744073709551615\n"
	for _, c := range []struct {
		state   string
		threads int
		ended   bool
	}{{"S", 1, false}, {"R", 3, false}, {"Z", 2, false}, {"Z", 1, true}, {"Z", 0, true}, {"X", 0, true}} {
		var p Process
		if err := p.readStat(fmt.Appendf(nil, stat, c.state, c.threads)); err != nil || p.StartTicks != 4711 || p.Ended != c.ended {
			t.Errorf("%+v: %+v, %v", c, p, err)
		}
	}
	for _, bad := range []string{"", "12", "12 (a) S", "12 (a) S 1 12 12 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 x",
		"12 (a) S 1 12 12 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 x 0 1"} {
		var p Process
		if err := p.readStat([]byte(bad)); err == nil {
			t.Errorf("%q gave %+v", bad, p)
		}
	}
	if got, err := innermostPID([]byte("Name:\tx\nNSpid:\t4711\t12\t1\n")); err != nil || got != 1 {
		t.Errorf("%d, %v", got, err)
	}
	for _, bad := range []string{"", "NSpid:\n", "NSpid:\tx\n", "Name:\tNSpid:\t1\n"} {
		if got, err := innermostPID([]byte(bad)); err == nil {
			t.Errorf("%q gave %d", bad, got)
		}
	}
}

func FuzzReadUsage(f *testing.F) {
	f.Add([]byte("CARVEUSE"), uint16(0), uint8(1))
	f.Add(bytes.Repeat([]byte{255}, 128), uint16(32), uint8(16))
	f.Fuzz(func(t *testing.T, b []byte, at uint16, cards uint8) {
		// The bytes at some place of an otherwise empty file, so that slots are reached too.
		file := append(make([]byte, int(at)*128), b...)
		n := int(cards)%MaxCards + 1
		u, err := readUsage(bytes.NewReader(file), n)
		if err != nil {
			t.Fatal(err)
		}
		checkBounds(t, u, n)
		_ = u.Damage.String()
	})
}
