package region

import (
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

func computeFile(t *testing.T) (*ComputeFile, string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "limits")
	if err := CreateLimits(path, twoCards()); err != nil {
		t.Fatal(err)
	}
	f, err := OpenCompute(path, 2)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f, path
}

func TestTermsAreOneProcess(t *testing.T) {
	f, _ := computeFile(t)
	first := Owner{Index: 3, PID: 7, StartTicks: 100, Image: 1 << 31}
	second := Owner{Index: 3, PID: 8, StartTicks: 200, Image: 1<<31 + 1}
	if _, ok, err := f.Terms(1, first); ok || err != nil {
		t.Errorf("terms that nobody wrote: %v, %v", ok, err)
	}
	want := Terms{CorrectionNS: -5, SharePPM: 300_000, Gate: GateTurn, Borrow: true}
	if err := f.SetTerms(1, first, want); err != nil {
		t.Fatal(err)
	}
	if got, ok, err := f.Terms(1, first); got != want || !ok || err != nil {
		t.Errorf("%+v, %v, %v", got, ok, err)
	}
	if _, ok, _ := f.Terms(1, second); ok {
		t.Error("another process takes them for its own")
	}
	if _, ok, _ := f.Terms(0, first); ok {
		t.Error("they are of another card as well")
	}
	if err := f.SetTerms(1, second, Terms{SharePPM: 1}); err != nil {
		t.Fatal(err)
	}
	if _, ok, _ := f.Terms(1, first); ok {
		t.Error("the former owner's are still there")
	}
	for _, slot := range []int{-1, MaxSlots} {
		if err := f.SetTerms(0, Owner{Index: slot}, want); err == nil {
			t.Errorf("slot %d", slot)
		}
	}
	if err := f.Look(2, 1, 1, 1, Pace{}); err == nil {
		t.Error("card 2 of 2")
	}
}

func TestLimitsAndComputeShareAFile(t *testing.T) {
	f, path := computeFile(t)
	if err := errors.Join(f.Divide(true), f.Look(0, 9, 170, 8, Pace{At: 9, Value: 4, Contexts: 2, Most: 3})); err != nil {
		t.Fatal(err)
	}
	if err := UpdateLimits(path, twoCards()); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	le := binary.LittleEndian
	pace := b[computeAt+computePaceAt:]
	if le.Uint64(b[limitsComputeAt:]) != 1 || le.Uint64(b[computeAt+computeHeartbeatAt:]) != 9 || le.Uint64(pace[paceCountAt:]) != 1 ||
		le.Uint64(pace[pacePointsAt:]) != 9 || le.Uint64(pace[pacePointsAt+8:]) != 4 || le.Uint32(pace[paceContextsAt:]) != 2 || le.Uint32(pace[paceMostAt:]) != 3 {
		t.Error("an update of the limits changed what compute is divided by")
	}
	for i := range pacePoints + 1 {
		if err := f.Look(0, 10, 170, 8, Pace{At: int64(10 + i), Contexts: 1, Most: 1}); err != nil {
			t.Fatal(err)
		}
	}
	if b, err = os.ReadFile(path); err != nil || le.Uint64(b[computeAt+computePaceAt+pacePointsAt+pacePointBytes:]) != pacePoints+10 {
		t.Errorf("the ring doesn't go round: %v", err)
	}
}

// The files of an older agent end behind the limits, and some file systems are full.
func TestComputeOfAShortFile(t *testing.T) {
	f, path := computeFile(t)
	if err := os.Truncate(path, LimitsBytes); err != nil {
		t.Fatal(err)
	}
	if err := f.Look(0, 1, 1, 1, Pace{}); !errors.Is(err, ErrDamaged) {
		t.Errorf("a file that was shortened: %v", err)
	}
	again, err := OpenCompute(path, 2)
	if err != nil {
		t.Fatal(err)
	}
	defer again.Close()
	if err := errors.Join(again.Look(1, 1, 1, 1, Pace{}), f.Look(0, 1, 1, 1, Pace{})); err != nil {
		t.Errorf("once it has its length again: %v", err)
	}
	if l, err := ReadLimits(path); err != nil || len(l.Cards) != 2 {
		t.Errorf("its limits: %+v, %v", l, err)
	}
	if _, err := OpenCompute(path, 0); err == nil {
		t.Error("no card at all")
	}
}

func TestReadingWhatProcessesSay(t *testing.T) {
	path := filepath.Join(t.TempDir(), "usage")
	if err := CreateUsage(path); err != nil {
		t.Fatal(err)
	}
	file, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	pages, err := unix.Mmap(int(file.Fd()), 0, UsageBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(pages)
	word := func(at int) *uint64 { return (*uint64)(unsafe.Pointer(&pages[at])) }
	r, err := OpenComputeReader(path, 2)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if owners, err := r.Owners(); len(owners) != 0 || err != nil {
		t.Fatalf("%+v, %v", owners, err)
	}
	for slot, state := range map[int]SlotState{1: SlotLive, 2: SlotDying, 4: SlotLive} {
		at := usageProcesses + slot*processBytes
		*word(at + processStartTicksAt) = uint64(1000 + slot)
		*word(at + processImageAt) = 5
		*word(at + processStatePIDAt) = uint64(state) | uint64(slot)<<32
	}
	binary.LittleEndian.PutUint32(pages[usageHighWaterAt:], 5)
	owners, err := r.Owners()
	if err != nil || len(owners) != 2 || owners[0] != (Owner{Index: 1, PID: 1, StartTicks: 1001, Image: 5}) || owners[1].Index != 4 {
		t.Fatalf("%+v, %v", owners, err)
	}

	// A writer at full speed, and one that stopped half way.
	line := usageLines + usageColumnBytes + 4*lineBytes
	*word(line - 3*lineBytes + lineComputeSequenceAt) = 7
	var stop atomic.Bool
	var wait sync.WaitGroup
	wait.Go(func() {
		for n := uint64(1); !stop.Load(); n++ {
			atomic.StoreUint64(word(line+lineComputeSequenceAt), 2*n-1)
			for _, at := range []int{lineChargedAt, lineSinceAt, lineCreditAt, lineCreditTimeAt} {
				atomic.StoreUint64(word(line+at), n)
			}
			atomic.StoreUint64(word(line+lineCommittedAt), n|computeWaiting)
			atomic.StoreUint64(word(line+lineComputeSequenceAt), 2*n)
			for range 100 {
				_ = atomic.LoadUint64(word(line))
			}
		}
	})
	// By what was seen, not by a number of readings: on a busy machine the
	// writer can be taken off its core in the middle of a line for a long time.
	seen := 0
	deadline := time.Now().Add(time.Minute)
	for tries := 0; tries < 20000 || seen < 1000; tries++ {
		if tries%1000 == 0 && time.Now().After(deadline) {
			t.Errorf("only %d of %d readings gave anything", seen, tries)
			break
		}
		out, known := make([]ComputeUsage, 2), make([]bool, 2)
		if err := r.Read(1, owners, out, known); err != nil {
			t.Fatal(err)
		}
		if known[0] {
			t.Fatal("a line in the middle of being written was taken")
		}
		if !known[1] {
			continue
		}
		seen++
		n := out[1].ChargedNS
		if out[1] != (ComputeUsage{n, n, n, n, n, n != 0}) {
			t.Fatalf("a mixture: %+v", out[1])
		}
	}
	stop.Store(true)
	wait.Wait()

	for _, c := range []struct {
		card   int
		owners []Owner
	}{{2, owners}, {0, []Owner{{Index: 5}, {Index: 2}}}, {0, []Owner{{Index: MaxSlots}}}, {0, []Owner{{Index: -1}}}} {
		if err := r.Read(c.card, c.owners, make([]ComputeUsage, 2), make([]bool, 2)); err == nil {
			t.Errorf("card %d, %+v", c.card, c.owners)
		}
	}
	// What the container does to its file.
	binary.LittleEndian.PutUint32(pages[usageHighWaterAt:], 1<<31)
	if owners, err := r.Owners(); len(owners) != 2 || err != nil {
		t.Errorf("high water out of range: %d, %v", len(owners), err)
	}
	if err := os.Truncate(path, 100); err != nil {
		t.Fatal(err)
	}
	if owners, err := r.Owners(); len(owners) != 0 || err != nil {
		t.Errorf("a short file: %d, %v", len(owners), err)
	}
	out, known := make([]ComputeUsage, 2), make([]bool, 2)
	if err := r.Read(0, owners, out, known); err != nil || out[1] != (ComputeUsage{}) {
		t.Errorf("a short file: %+v, %v", out, err)
	}
}
