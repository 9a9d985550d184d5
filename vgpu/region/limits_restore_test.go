package region

import (
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"testing"

	"golang.org/x/sys/unix"
)

// Whatever stands in a file, restoring it puts the limits in force in the same
// file, and nobody who reads meanwhile, or after the writer died at any word, gets
// anything but an error or what was to be put in force.
func TestDamagedLimitsAreRestoredInPlace(t *testing.T) {
	le := binary.LittleEndian
	forged := twoCards()
	forged.Cards[0].LimitBytes = 70000 * mib
	forge := func(b []byte, generation uint64) {
		le.PutUint64(b[limitsGenerationAt:], generation)
		putBank(b[bankAt(generation):][:bankBytes], generation, forged)
	}
	want := twoCards()
	want.Cards[1].ComputePPM = 123_456
	want.Live = []Live{{ResidualBytes: 5 * mib, ResidualSequence: 9}}
	for name, damage := range map[string]func([]byte) []byte{
		"empty":                     func([]byte) []byte { return nil },
		"short":                     func(b []byte) []byte { return b[:LimitsBytes-1] },
		"long":                      func(b []byte) []byte { return append(b, b...) },
		"magic":                     func(b []byte) []byte { copy(b, "XXXX"); return b },
		"version":                   func(b []byte) []byte { le.PutUint32(b[limitsABIAt:], 2); return b },
		"a bit":                     func(b []byte) []byte { b[bankAt(1)+bankCardsAt+cardLimitAt] ^= 1; return b },
		"zeroed":                    func(b []byte) []byte { clear(b); return b },
		"all ones":                  func(b []byte) []byte { return bytesOf(0xff) },
		"forged, same generation":   func(b []byte) []byte { forge(b, 1); return b },
		"forged, a later one":       func(b []byte) []byte { forge(b, 700); return b },
		"forged, the last":          func(b []byte) []byte { forge(b, 1<<64-1); return b },
		"forged bank not in force":  func(b []byte) []byte { forge(b, 2); le.PutUint64(b[limitsGenerationAt:], 1); return b },
		"as it was":                 func(b []byte) []byte { return b },
		"forged, before the latest": func(b []byte) []byte { forge(b, 3); return b },
	} {
		path := createLimits(t, twoCards())
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		b = damage(b)
		before, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		write := func() {
			t.Helper()
			if err := os.WriteFile(path, b, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		write()
		const after = 40
		generation, err := RestoreLimits(path, want, after)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		got, err := ReadLimits(path)
		if err != nil || got.Generation != generation || generation <= after || !reflect.DeepEqual(got.Cards, want.Cards) || got.Live[0] != want.Live[0] || got.Live[1] != (Live{}) {
			t.Errorf("%s: restored to %+v, %v", name, got, err)
		}
		if len(b) >= LimitsBytes {
			if was := le.Uint64(b[limitsGenerationAt:]); was < farGeneration && generation <= was || generation == was {
				t.Errorf("%s: generation %d after %d", name, generation, was)
			}
		}
		now, err := os.Stat(path)
		if err != nil || !os.SameFile(before, now) || now.Size() != LimitsFileBytes || now.Mode().Perm() != 0o644 {
			t.Errorf("%s: it is another file, or of %d bytes, or mode %v (%v)", name, now.Size(), now.Mode(), err)
		}
		if err := UpdateLimits(path, twoCards()); err != nil {
			t.Errorf("%s: update after it: %v", name, err)
		}

		// The writer dies at each word.
		steps := 0
		for stop := 1; ; stop++ {
			write()
			if err := os.Truncate(path, LimitsBytes); err != nil {
				t.Fatal(err)
			}
			f, err := OpenLimits(path)
			if err != nil {
				t.Fatal(err)
			}
			steps = 0
			died := func() (died bool) {
				defer func() {
					if p := recover(); p != nil {
						if p != any("died") {
							panic(p)
						}
						died = true
					}
				}()
				if _, err := f.restore(want, after, func() {
					if got, err := f.Limits(); err == nil && !reflect.DeepEqual(got.Cards, want.Cards) {
						t.Fatalf("%s: a reader after step %d gets %+v", name, steps, got)
					}
					if steps++; steps == stop {
						panic("died")
					}
				}); err != nil {
					t.Fatal(err)
				}
				return false
			}()
			f.Close()
			if !died {
				break
			}
			if _, err := RestoreLimits(path, want, after); err != nil {
				t.Fatalf("%s: after a death at step %d: %v", name, stop, err)
			}
			if got, err := ReadLimits(path); err != nil || !reflect.DeepEqual(got.Cards, want.Cards) {
				t.Fatalf("%s: after a death at step %d: %+v, %v", name, stop, got, err)
			}
			if stop > 3 {
				stop += 40 // most words are alike
			}
		}
		if steps < LimitsBytes/8 {
			t.Errorf("%s: %d steps", name, steps)
		}
	}
}

func bytesOf(b byte) []byte {
	out := make([]byte, LimitsBytes)
	for i := range out {
		out[i] = b
	}
	return out
}

func TestWhatIsNoFileIsNotRestored(t *testing.T) {
	dir := t.TempDir()
	file := createLimits(t, twoCards())
	for name, make := range map[string]func(string) error{
		"a directory": func(p string) error { return os.Mkdir(p, 0o755) },
		"a link":      func(p string) error { return os.Symlink(file, p) },
		"a pipe":      func(p string) error { return unix.Mkfifo(p, 0o644) },
		"nothing":     func(string) error { return nil },
	} {
		path := filepath.Join(dir, name)
		if err := make(path); err != nil {
			t.Fatal(err)
		}
		if _, err := RestoreLimits(path, twoCards(), 0); err == nil {
			t.Errorf("%s was restored", name)
		}
	}
	if got, err := ReadLimits(file); err != nil || got.Generation != 1 {
		t.Errorf("the file behind the link: %+v, %v", got, err)
	}
}

// A page that goes while it is being written to is an error, and not the end of
// the agent.
func TestAFileThatIsShortenedUnderAWriter(t *testing.T) {
	path := createLimits(t, twoCards())
	f, err := OpenLimits(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := os.Truncate(path, 0); err != nil {
		t.Fatal(err)
	}
	if err := f.Update(twoCards()); !errors.Is(err, ErrDamaged) {
		t.Errorf("update: %v", err)
	}
	if err := f.SetLive(0, Live{}); !errors.Is(err, ErrDamaged) {
		t.Errorf("live words: %v", err)
	}
	if _, err := f.restore(twoCards(), 0, func() {}); !errors.Is(err, ErrDamaged) {
		t.Errorf("restore: %v", err)
	}
	if _, err := RestoreLimits(path, twoCards(), 0); err != nil {
		t.Error(err)
	}
	if got, err := f.Limits(); err != nil || got.Cards[0] != twoCards().Cards[0] {
		t.Errorf("who has it mapped sees %+v, %v", got, err)
	}
}

// Who holds the lock for ever keeps nobody from restoring.
func TestALockThatIsNeverGivenBack(t *testing.T) {
	path := createLimits(t, twoCards())
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	if err := flock(dir, unix.LOCK_SH); err != nil {
		t.Fatal(err)
	}
	want := twoCards()
	want.Cards[0].LimitBytes = mib
	if _, err := RestoreLimits(path, want, 0); err != nil {
		t.Error(err)
	}
	if got, err := ReadLimits(path); err != nil || got.Cards[0].LimitBytes != mib {
		t.Errorf("%+v, %v", got, err)
	}
}
