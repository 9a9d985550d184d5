package region

import (
	"encoding/binary"
	"errors"
	"fmt"
	"runtime/debug"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// How long a writer waits for another one. The lock can be held for ever by anyone who can read the slice's
// directory, so nobody waits for ever; a second agent of the node, for which it is there, holds it for
// microseconds.
const (
	updateWait  = 10 * time.Second
	restoreWait = time.Second
	lockLook    = time.Millisecond
)

// farGeneration is more than any file gets to by updates: what stands there was not counted.
const farGeneration = 1 << 63

// RestoreLimits puts l in force in the file at path whatever stands in it now, in place: containers that
// have it mapped see it. Its live words become l.Live, zero where that has none. It returns the file's new
// generation, which is later than after and than any that the file had.
//
// Nobody takes a wrong value meanwhile, also if the writer dies half way: the generation becomes 0 first,
// which no reader takes, and gets its new value last. Restoring can be repeated from each point between.
//
// What compute is divided by stays, but for whether it is. A file that was shortened gets its size again first; a process that looks at it before has been killed by
// the kernel (SIGBUS). What is not a regular file can't be restored: the error is ErrDamaged.
func RestoreLimits(path string, l Limits, after uint64) (generation uint64, err error) {
	if err := l.Validate(); err != nil {
		return 0, fmt.Errorf("restore %s: %w", path, err)
	}
	f, err := openRegular(path, unix.O_RDWR, 0)
	if err != nil {
		return 0, fmt.Errorf("restore limits: %w", err)
	}
	if err := errors.Join(reserveCompute(f, len(l.Cards)), f.Chmod(0o644), f.Close()); err != nil {
		return 0, fmt.Errorf("restore limits: %w", err)
	}
	m, err := OpenLimits(path)
	if err != nil {
		return 0, fmt.Errorf("restore: %w", err)
	}
	generation, err = m.restore(l, after, func() {})
	return generation, errors.Join(err, m.Close())
}

// restore calls step after each word, for tests.
func (f *LimitsFile) restore(l Limits, after uint64, step func()) (generation uint64, err error) {
	// Whoever holds the lock all this time isn't an agent.
	if f.lock(restoreWait) == nil {
		defer flock(f.dir, unix.LOCK_UN)
	}
	err = guarded(func() {
		generation = after
		for _, at := range []int{limitsGenerationAt, bankAt(0) + bankGenerationAt, bankAt(1) + bankGenerationAt} {
			if g := atomic.LoadUint64(f.word64(at)); g < farGeneration {
				generation = max(generation, g)
			}
		}
		generation++
		page := make([]byte, LimitsBytes)
		putHeader(page)
		putBank(page[bankAt(generation):][:bankBytes], generation, l)
		le := binary.LittleEndian
		for i, live := range l.Live[:min(len(l.Live), len(l.Cards))] {
			words := page[limitsLiveAt+i*liveBytes:]
			le.PutUint64(words[liveResidualAt:], live.ResidualBytes)
			le.PutUint64(words[liveResidualSequenceAt:], live.ResidualSequence)
			if live.GateClosed {
				le.PutUint32(words[liveGateAt:], 1)
			}
			le.PutUint32(words[liveBusyContextsAt:], live.BusyContexts)
			le.PutUint32(words[liveCalibrationAt:], live.CalibrationPPM)
		}
		atomic.StoreUint64(f.word64(limitsGenerationAt), 0)
		step()
		for i := 0; i < LimitsBytes; i += 8 {
			if i != limitsGenerationAt {
				atomic.StoreUint64(f.word64(i), le.Uint64(page[i:]))
				step()
			}
		}
		atomic.StoreUint64(f.word64(limitsGenerationAt), generation)
		step()
	})
	if err != nil {
		return 0, fmt.Errorf("restore limits %s: %w", f.path, err)
	}
	return generation, nil
}

// guarded runs a function that touches mapped pages. A file that somebody shortens meanwhile, or that a full
// file system has no page for, is an error then and not the end of the process.
func guarded(touch func()) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if p := recover(); p != nil {
			if _, fault := p.(interface{ Addr() uintptr }); !fault {
				panic(p)
			}
			err = fmt.Errorf("its pages can't be reached, it was shortened or the file system is full: %w", ErrDamaged)
		}
	}()
	touch()
	return nil
}

// lock waits for other writers.
func (f *LimitsFile) lock(wait time.Duration) error {
	for end := time.Now().Add(wait); ; time.Sleep(lockLook) {
		err := flock(f.dir, unix.LOCK_EX|unix.LOCK_NB)
		if !errors.Is(err, unix.EWOULDBLOCK) || time.Now().After(end) {
			return err
		}
	}
}

// DecodeLimits reads the limits in force out of the bytes of a limits file.
func DecodeLimits(file []byte) (Limits, error) { return decodeLimits(file) }
