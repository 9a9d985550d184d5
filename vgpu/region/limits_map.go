package region

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// LimitsFile is an open limits file that its owner, the node agent, writes. The methods may not run at the
// same time on one LimitsFile; updates through several of them, also in two processes, wait for one
// another.
type LimitsFile struct {
	path string
	// page is the file, mapped. Containers get the file read-only and can't shorten it; who can on the node
	// makes an error of the next access: see guarded.
	page []byte
	dir  *os.File
}

// OpenLimits opens the limits file at path for writing. The caller closes it.
func OpenLimits(path string) (*LimitsFile, error) {
	f, err := openRegular(path, unix.O_RDWR, LimitsBytes)
	if err != nil {
		return nil, fmt.Errorf("open limits: %w", err)
	}
	defer f.Close()
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return nil, fmt.Errorf("open limits: %w", err)
	}
	page, err := unix.Mmap(int(f.Fd()), 0, LimitsBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		dir.Close()
		return nil, fmt.Errorf("open limits: map %s: %w", path, err)
	}
	return &LimitsFile{path: path, page: page, dir: dir}, nil
}

// Close unmaps the file. The limits in it stay in force.
func (f *LimitsFile) Close() error {
	err := unix.Munmap(f.page)
	f.page = nil
	if err = errors.Join(err, f.dir.Close()); err != nil {
		return fmt.Errorf("close limits %s: %w", f.path, err)
	}
	return nil
}

// Limits gives the limits in force.
func (f *LimitsFile) Limits() (Limits, error) {
	var l Limits
	var err error
	if fault := guarded(func() { l, err = decodeLimits(f.page) }); fault != nil {
		err = fault
	}
	if err != nil {
		return l, fmt.Errorf("read limits %s: %w", f.path, err)
	}
	return l, nil
}

// Update puts l in force; see UpdateLimits.
func (f *LimitsFile) Update(l Limits) (err error) {
	if err := l.Validate(); err != nil {
		return fmt.Errorf("update limits %s: %w", f.path, err)
	}
	// The lock is on the directory and not on the file: a container has the file open for reading, which
	// is enough to hold a lock on it for ever.
	if err := f.lock(updateWait); err != nil {
		return fmt.Errorf("update limits %s: lock: %w", f.path, err)
	}
	defer func() { err = errors.Join(err, flock(f.dir, unix.LOCK_UN)) }()

	old, err := f.Limits()
	if err != nil {
		return fmt.Errorf("update limits: %w", err)
	}
	if len(l.Cards) < len(old.Cards) {
		return fmt.Errorf("update limits %s: %d cards where the file has %d", f.path, len(l.Cards), len(old.Cards))
	}
	for i, c := range old.Cards {
		if l.Cards[i].UUID != c.UUID {
			return fmt.Errorf("update limits %s: card %d is %s, not %s", f.path, i, c.UUID, l.Cards[i].UUID)
		}
	}
	next := old.Generation + 1
	bank := make([]byte, bankBytes)
	putBank(bank, next, l)
	// A word at a time, so that the library never meets half a word in the bank that it still reads if
	// it was stopped between its two looks at the generation.
	at := bankAt(next)
	if err := guarded(func() {
		for i := 0; i < bankBytes; i += 8 {
			atomic.StoreUint64(f.word64(at+i), binary.LittleEndian.Uint64(bank[i:]))
		}
		atomic.StoreUint64(f.word64(limitsGenerationAt), next)
	}); err != nil {
		return fmt.Errorf("update limits %s: %w", f.path, err)
	}
	return nil
}

// SetLive stores the live words of one card, each in one step.
func (f *LimitsFile) SetLive(card int, l Live) error {
	if card < 0 || card >= MaxCards {
		return fmt.Errorf("set live words %s: card %d: want 0 to %d", f.path, card, MaxCards-1)
	}
	at := limitsLiveAt + card*liveBytes
	gate := uint32(0)
	if l.GateClosed {
		gate = 1
	}
	if err := guarded(func() {
		atomic.StoreUint64(f.word64(at+liveResidualAt), l.ResidualBytes)
		atomic.StoreUint32(f.word32(at+liveGateAt), gate)
		atomic.StoreUint32(f.word32(at+liveBusyContextsAt), l.BusyContexts)
		atomic.StoreUint32(f.word32(at+liveCalibrationAt), l.CalibrationPPM)
		atomic.AddUint64(f.word64(at+liveResidualSequenceAt), 1)
	}); err != nil {
		return fmt.Errorf("set live words %s: %w", f.path, err)
	}
	return nil
}

// SetResidual stores one card's residual alone, in one step, and leaves the other live words to whoever
// writes them.
func (f *LimitsFile) SetResidual(card int, bytes uint64) error {
	if card < 0 || card >= MaxCards {
		return fmt.Errorf("set residual %s: card %d: want 0 to %d", f.path, card, MaxCards-1)
	}
	at := limitsLiveAt + card*liveBytes
	if err := guarded(func() {
		atomic.StoreUint64(f.word64(at+liveResidualAt), bytes)
		atomic.AddUint64(f.word64(at+liveResidualSequenceAt), 1)
	}); err != nil {
		return fmt.Errorf("set residual %s: %w", f.path, err)
	}
	return nil
}

// word64 and word32 point into the mapped page; the layout keeps every word aligned.
func (f *LimitsFile) word64(at int) *uint64 { return (*uint64)(unsafe.Pointer(&f.page[at])) }
func (f *LimitsFile) word32(at int) *uint32 { return (*uint32)(unsafe.Pointer(&f.page[at])) }

func flock(f *os.File, how int) error {
	for {
		err := unix.Flock(int(f.Fd()), how)
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}
