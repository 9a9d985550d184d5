package region

import (
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

const mib = 1 << 20

func testUUID(n byte) UUID {
	var id UUID
	for i := range id {
		id[i] = n*16 + byte(i)
	}
	return id
}

func twoCards() Limits {
	return Limits{
		Generation:  1,
		SelfVisible: true,
		Cards: []Card{
			{UUID: testUUID(1), LimitBytes: 8000 * mib, ContextBytes: 400 * mib, ComputePPM: 300_000, Priority: 1},
			{UUID: testUUID(2), LimitBytes: 16000 * mib, ComputeFixed: true, Managed: ManagedCount, Oversell: true},
		},
		Live: make([]Live, 2),
	}
}

func createLimits(t *testing.T, l Limits) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "limits")
	if err := CreateLimits(path, l); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestLimitsAreReadAsWritten(t *testing.T) {
	want := twoCards()
	path := createLimits(t, want)
	got, err := ReadLimits(path)
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("got %+v\nwant %+v", got, want)
	}
	st, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	if st.Mode() != 0o644 || st.Size() != LimitsFileBytes {
		t.Errorf("mode %v, %d bytes", st.Mode(), st.Size())
	}
	if left, _ := filepath.Glob(filepath.Join(filepath.Dir(path), ".*")); len(left) != 0 {
		t.Errorf("left behind: %v", left)
	}
}

func TestCreateNeverReplacesAFile(t *testing.T) {
	path := createLimits(t, twoCards())
	other := twoCards()
	other.Cards[0].LimitBytes = 1
	if err := CreateLimits(path, other); !errors.Is(err, os.ErrExist) {
		t.Errorf("limits: error %v, want one that is os.ErrExist", err)
	}
	if got, err := ReadLimits(path); err != nil || got.Cards[0].LimitBytes != 8000*mib {
		t.Errorf("limits changed: %+v, %v", got, err)
	}
	usage := filepath.Join(filepath.Dir(path), "usage")
	if err := CreateUsage(usage); err != nil {
		t.Fatal(err)
	}
	if err := CreateUsage(usage); !errors.Is(err, os.ErrExist) {
		t.Errorf("usage: error %v, want one that is os.ErrExist", err)
	}
	if left, _ := filepath.Glob(filepath.Join(filepath.Dir(path), ".*")); len(left) != 0 {
		t.Errorf("left behind: %v", left)
	}
}

func TestUpdateKeepsTheInodeAndCountsGenerations(t *testing.T) {
	path := createLimits(t, twoCards())
	before, _ := os.Stat(path)
	for i := range 5 {
		l := twoCards()
		l.Cards[0].LimitBytes = uint64(i) * mib
		if err := UpdateLimits(path, l); err != nil {
			t.Fatal(err)
		}
		got, err := ReadLimits(path)
		if err != nil {
			t.Fatal(err)
		}
		if got.Generation != uint64(i)+2 || got.Cards[0].LimitBytes != uint64(i)*mib {
			t.Errorf("update %d: generation %d, limit %d", i, got.Generation, got.Cards[0].LimitBytes)
		}
	}
	after, _ := os.Stat(path)
	if !os.SameFile(before, after) {
		t.Error("the update made another file: a container that has the old one mounted would not see it")
	}
}

func TestUpdateKeepsCardsInPlace(t *testing.T) {
	path := createLimits(t, twoCards())
	swapped := twoCards()
	swapped.Cards[0], swapped.Cards[1] = swapped.Cards[1], swapped.Cards[0]
	fewer := twoCards()
	fewer.Cards = fewer.Cards[:1]
	for name, l := range map[string]Limits{"cards swapped": swapped, "a card taken away": fewer} {
		if err := UpdateLimits(path, l); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	more := twoCards()
	more.Cards = append(more.Cards, Card{UUID: testUUID(3), LimitBytes: 1})
	if err := UpdateLimits(path, more); err != nil {
		t.Errorf("a card added behind the others: %v", err)
	}
	if got, _ := ReadLimits(path); len(got.Cards) != 3 {
		t.Errorf("%d cards after adding one", len(got.Cards))
	}
}

func TestImpossibleLimitsAreRefused(t *testing.T) {
	twice := twoCards()
	twice.Cards[1].UUID = twice.Cards[0].UUID
	much := twoCards()
	much.Cards[0].ComputePPM = 1_000_001
	many := Limits{}
	for i := range MaxCards + 1 {
		many.Cards = append(many.Cards, Card{UUID: testUUID(byte(i)), LimitBytes: 1})
	}
	for name, l := range map[string]Limits{"none": {}, "twice": twice, "much": much, "many": many} {
		path := filepath.Join(t.TempDir(), "limits")
		if err := CreateLimits(path, l); err == nil {
			t.Errorf("%s: accepted", name)
		}
		if _, err := os.Stat(path); !os.IsNotExist(err) {
			t.Errorf("%s: left a file", name)
		}
	}
}

// A writer that dies at any byte of an update leaves the old limits in force, and the next update works.
func TestAWriterThatDiesHalfWayLeavesTheOldLimits(t *testing.T) {
	for _, written := range []int{0, 1, 8, 9, 100, bankBytes / 2, bankBytes} {
		path := createLimits(t, twoCards())
		next := twoCards()
		next.Cards[0].LimitBytes = 77 * mib
		bank := make([]byte, bankBytes)
		putBank(bank, 2, next)
		f, err := os.OpenFile(path, os.O_WRONLY, 0)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.WriteAt(bank[:written], int64(bankAt(2))); err != nil {
			t.Fatal(err)
		}
		f.Close()
		if got, err := ReadLimits(path); err != nil || got.Cards[0].LimitBytes != 8000*mib {
			t.Errorf("%d bytes written: %+v, %v", written, got, err)
		}
		if err := UpdateLimits(path, next); err != nil {
			t.Errorf("%d bytes written: update: %v", written, err)
		}
		if got, err := ReadLimits(path); err != nil || got.Cards[0].LimitBytes != 77*mib {
			t.Errorf("%d bytes written, then updated: %+v, %v", written, got, err)
		}
	}
}

// Readers beside a writer see whole updates only: both cards always have the same number.
func TestReadersSeeWholeUpdates(t *testing.T) {
	path := createLimits(t, twoCards())
	f, err := OpenLimits(path)
	if err != nil {
		t.Fatal(err)
	}
	stop, failed := make(chan struct{}), make(chan error, 1)
	go func() {
		defer close(failed)
		l := twoCards()
		for i := uint64(1); ; i++ {
			select {
			case <-stop:
				return
			default:
			}
			l.Cards[0].LimitBytes, l.Cards[1].LimitBytes = i, i
			if err := f.Update(l); err != nil {
				failed <- err
				return
			}
		}
	}()
	seen := map[uint64]bool{}
	for range 3000 {
		l, err := ReadLimits(path)
		if err != nil {
			t.Error(err)
			break
		}
		seen[l.Generation] = true
		if l.Generation > 1 && (l.Cards[0].LimitBytes != l.Cards[1].LimitBytes || l.Cards[0].LimitBytes != l.Generation-1) {
			t.Errorf("generation %d has limits %d and %d", l.Generation, l.Cards[0].LimitBytes, l.Cards[1].LimitBytes)
			break
		}
	}
	close(stop)
	if err := <-failed; err != nil {
		t.Error(err)
	}
	if len(seen) < 2 {
		t.Errorf("%d generations met: nothing was tested", len(seen))
	}
	if err := f.Close(); err != nil {
		t.Error(err)
	}
}

func TestTwoWritersWaitForOneAnother(t *testing.T) {
	path := createLimits(t, twoCards())
	const each = 200
	failed := make(chan error, 2)
	for range 2 {
		go func() {
			var err error
			for range each {
				err = errors.Join(err, UpdateLimits(path, twoCards()))
			}
			failed <- err
		}()
	}
	if err := errors.Join(<-failed, <-failed); err != nil {
		t.Fatal(err)
	}
	if l, err := ReadLimits(path); err != nil || l.Generation != 2*each+1 {
		t.Errorf("generation %d after %d updates, %v", l.Generation, 2*each, err)
	}
}

func TestLiveWordsChangeWithoutAnUpdate(t *testing.T) {
	path := createLimits(t, twoCards())
	f, err := OpenLimits(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	want := Live{ResidualBytes: 5 * mib, GateClosed: true, BusyContexts: 3, CalibrationPPM: 990_000, ResidualSequence: 1}
	if err := f.SetLive(1, want); err != nil {
		t.Fatal(err)
	}
	got, err := ReadLimits(path)
	if err != nil {
		t.Fatal(err)
	}
	if got.Live[1] != want || got.Live[0] != (Live{}) || got.Generation != 1 {
		t.Errorf("got %+v", got)
	}
	// The residual alone leaves the other words to whoever writes them.
	if err := f.SetResidual(1, 7*mib); err != nil {
		t.Fatal(err)
	}
	want.ResidualBytes, want.ResidualSequence = 7*mib, 2
	if got, err := ReadLimits(path); err != nil || got.Live[1] != want || got.Live[0] != (Live{}) || got.Generation != 1 {
		t.Errorf("got %+v, %v", got, err)
	}
	for _, card := range []int{-1, MaxCards} {
		if f.SetLive(card, want) == nil || f.SetResidual(card, 1) == nil {
			t.Errorf("card %d accepted", card)
		}
	}
}

func TestDamagedLimitsAreRefused(t *testing.T) {
	le := binary.LittleEndian
	for name, damage := range map[string]func([]byte) []byte{
		"empty":      func([]byte) []byte { return nil },
		"short":      func(b []byte) []byte { return b[:LimitsBytes-1] },
		"magic":      func(b []byte) []byte { b[0]++; return b },
		"version":    func(b []byte) []byte { le.PutUint32(b[limitsABIAt:], 2); return b },
		"size":       func(b []byte) []byte { le.PutUint32(b[limitsSizeAt:], 1); return b },
		"generation": func(b []byte) []byte { le.PutUint64(b[limitsGenerationAt:], 3); return b },
		"other bank": func(b []byte) []byte { le.PutUint64(b[limitsGenerationAt:], 2); return b },
		"a bit":      func(b []byte) []byte { b[bankAt(1)+bankCardsAt+cardLimitAt] ^= 1; return b },
		"zeroed":     func(b []byte) []byte { clear(b); return b },
	} {
		path := createLimits(t, twoCards())
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, damage(b), 0o644); err != nil {
			t.Fatal(err)
		}
		if l, err := ReadLimits(path); !errors.Is(err, ErrDamaged) {
			t.Errorf("%s: %+v, %v", name, l, err)
		}
		if err := UpdateLimits(path, twoCards()); err == nil {
			t.Errorf("%s: updated", name)
		}
	}
}

func TestUUIDForms(t *testing.T) {
	const card = "GPU-10111213-1415-1617-1819-1a1b1c1d1e1f"
	for _, text := range []string{card, strings.TrimPrefix(card, "GPU-"), "MIG-" + strings.TrimPrefix(card, "GPU-"), strings.ToUpper(card)} {
		if id, err := ParseUUID(text); err != nil || id != testUUID(1) {
			t.Errorf("%s: %v, %v", text, id, err)
		}
	}
	if got := testUUID(1).String(); got != card {
		t.Errorf("got %s", got)
	}
	for _, text := range []string{"", "GPU-", "GPU-10111213", "GPU-1011121314151617-1819-1a1b1c1d1e1f-", "MIG-" + card + "/1/0", "GPU-1011121g-1415-1617-1819-1a1b1c1d1e1f"} {
		if id, err := ParseUUID(text); err == nil {
			t.Errorf("%q accepted as %v", text, id)
		}
	}
}

func FuzzDecodeLimits(f *testing.F) {
	dir := f.TempDir()
	path := filepath.Join(dir, "limits")
	if err := CreateLimits(path, twoCards()); err != nil {
		f.Fatal(err)
	}
	whole, err := os.ReadFile(path)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(whole, true)
	f.Add([]byte("CARVELIM"), false)
	f.Fuzz(func(t *testing.T, b []byte, mend bool) {
		// With a right checksum the fuzzer gets behind it.
		if mend && len(b) == LimitsBytes {
			b = append([]byte(nil), b...)
			bank := b[bankAt(binary.LittleEndian.Uint64(b[limitsGenerationAt:])):][:bankBytes]
			binary.LittleEndian.PutUint64(bank[bankChecksumAt:], bankChecksum(bank))
		}
		l, err := decodeLimits(b)
		if err != nil {
			return
		}
		if err := l.Validate(); err != nil {
			t.Errorf("read what could not be written: %v", err)
		}
		if len(l.Live) != len(l.Cards) {
			t.Errorf("%d cards, %d live lines", len(l.Cards), len(l.Live))
		}
	})
}

// A library that doesn't know of MPS reads no share of compute there, so it limits
// nothing beside MPS; one that does reads no client in a file that an older agent made.
func TestClientsOfMPSInFilesOfBothAges(t *testing.T) {
	l := twoCards()
	l.Cards[0].ComputePPM, l.Cards[0].MPSPercent, l.Cards[0].Multiprocessors = 0, 30, 108
	path := createLimits(t, l)
	got, err := ReadLimits(path)
	if err != nil || !reflect.DeepEqual(got, l) {
		t.Errorf("got %+v, %v\nwant %+v", got, err, l)
	}
	file, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	card := file[bankAt(1)+bankCardsAt:][:cardBytes]
	if ppm := binary.LittleEndian.Uint32(card[cardComputePPMAt:]); ppm != 0 || file[limitsComputeAt] != 0 {
		t.Errorf("an older library finds a share of %d ppm", ppm)
	}
	// What an older agent wrote: zero in all that was reserved.
	older := createLimits(t, twoCards())
	if got, err := ReadLimits(older); err != nil || got.Cards[0].MPSPercent != 0 || got.Cards[0].ComputePPM != 300_000 {
		t.Errorf("%+v, %v", got, err)
	}
	for what, c := range map[string]Card{
		"101 percent":                     {UUID: testUUID(1), MPSPercent: 101},
		"MPS and a share of compute, too": {UUID: testUUID(1), MPSPercent: 30, ComputePPM: 300_000},
	} {
		if err := CreateLimits(filepath.Join(t.TempDir(), "limits"), Limits{Cards: []Card{c}}); err == nil || !strings.Contains(err.Error(), "percent of MPS") {
			t.Errorf("%s: %v", what, err)
		}
	}
}
