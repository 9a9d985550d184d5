package region

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/fnv"
	"math"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// ErrDamaged is wrapped by the errors about a file whose content is not what this package or the library
// writes: a wrong magic, version or size, a count out of range, a wrong checksum.
var ErrDamaged = errors.New("not a valid file of this kind")

// Limits is what a resize changes, for all cards of one container.
type Limits struct {
	// Generation counts the updates of the file, from 1. It is set by the file: readers get it, writers
	// ignore it.
	Generation uint64
	// SelfVisible says that NVML inside this container lists the container's own processes under their
	// own pids, so that the library may learn there what the driver took for a context.
	SelfVisible bool
	// Cards are the container's cards, 1 to MaxCards of them. A card's index is its index in the usage
	// file, so it stays the same for the life of the file.
	Cards []Card
	// Live are the words that change without an update, one for each card. Readers get them, writers
	// ignore them: see LimitsFile.SetLive and SetResidual.
	Live []Live
}

// Card is the share of one card.
type Card struct {
	UUID UUID
	// LimitBytes is the device memory that the container may hold on the card, contexts included.
	LimitBytes uint64
	// ContextBytes is what one context costs on this card with this driver, where that is known; 0 lets
	// the library admit contexts by its own, generous figure.
	ContextBytes uint64
	// ComputePPM is the share of the card's compute in millionths, 0 to 1,000,000; 0: no share of its own.
	ComputePPM uint32
	// ComputeFixed makes ComputePPM a hard cap; otherwise it is a guarantee that may borrow.
	ComputeFixed bool
	// Managed says what becomes of managed memory.
	Managed ManagedPolicy
	// Oversell lets a program have more than LimitBytes by cuMemAlloc: as managed memory, which the
	// driver keeps on the host where the card has no room. It is counted, not charged.
	Oversell bool
	// Priority is the class of the container on the card, 0 the highest.
	Priority uint32
	// MPSPercent says that programs use the card as clients of MPS, with that percentage of its
	// multiprocessors, and not otherwise; 0: they aren't clients. ComputePPM is 0 with it, since MPS holds
	// them.
	MPSPercent uint32
	// Multiprocessors is how many the whole card has, with MPSPercent; 0: not known.
	Multiprocessors uint32
}

// ManagedPolicy is what becomes of a program's managed memory.
type ManagedPolicy uint8

const (
	// ManagedCharge charges it in full, since all of it can be on the card at once.
	ManagedCharge ManagedPolicy = iota
	// ManagedCount counts it and charges nothing.
	ManagedCount
	// ManagedForbid refuses it.
	ManagedForbid
)

// Live are the words of one card that the agent stores while the container runs.
type Live struct {
	// ResidualBytes is what the container uses on the card beyond what its usage file says. The library
	// counts it as charged.
	ResidualBytes uint64
	// ResidualSequence grows by one with each SetLive or SetResidual. It is set by the file.
	ResidualSequence uint64
	// GateClosed holds back launches on the card.
	GateClosed bool
	// BusyContexts is the number of contexts with work outstanding on the card.
	BusyContexts uint32
	// CalibrationPPM is the scale of charged to true GPU time in millionths; 0: not known.
	CalibrationPPM uint32
}

// Validate says what keeps l from being written: no card or too many, a card named twice, an impossible
// share.
func (l Limits) Validate() error {
	if len(l.Cards) == 0 || len(l.Cards) > MaxCards {
		return fmt.Errorf("limits for %d cards: want 1 to %d", len(l.Cards), MaxCards)
	}
	seen := make(map[UUID]int, len(l.Cards))
	for i, c := range l.Cards {
		if first, ok := seen[c.UUID]; ok {
			return fmt.Errorf("limits: cards %d and %d are both %s", first, i, c.UUID)
		}
		seen[c.UUID] = i
		if c.ComputePPM > 1_000_000 {
			return fmt.Errorf("limits: card %s: compute %d ppm: want at most 1000000", c.UUID, c.ComputePPM)
		}
		if c.Managed > ManagedForbid {
			return fmt.Errorf("limits: card %s: managed memory policy %d: want 0 to %d", c.UUID, c.Managed, ManagedForbid)
		}
		if c.MPSPercent > 100 || c.MPSPercent != 0 && c.ComputePPM != 0 {
			return fmt.Errorf("limits: card %s: %d percent of MPS beside %d ppm of compute: want at most 100, and one of them", c.UUID, c.MPSPercent, c.ComputePPM)
		}
	}
	return nil
}

// CreateLimits makes the limits file at path, complete or not at all, readable by everyone. It fails with
// an error that is os.ErrExist where there is something at path: a container may have that file mounted,
// and a new one in its place wouldn't reach it.
func CreateLimits(path string, l Limits) error {
	if err := l.Validate(); err != nil {
		return fmt.Errorf("create %s: %w", path, err)
	}
	file := make([]byte, LimitsBytes)
	putHeader(file)
	binary.LittleEndian.PutUint64(file[limitsGenerationAt:], 1)
	putBank(file[bankAt(1):bankAt(1)+bankBytes], 1, l)
	return createWhole(path, 0o644, func(f *os.File) error {
		if _, err := f.Write(file); err != nil {
			return err
		}
		return reserveCompute(f, len(l.Cards))
	})
}

// UpdateLimits puts l in force in the file at path while containers have it mapped: they see the old
// limits or the new ones, never a mixture, also if the writer dies half way. The cards that the file has
// must come first in l and in the same order.
func UpdateLimits(path string, l Limits) error {
	f, err := OpenLimits(path)
	if err != nil {
		return err
	}
	return errors.Join(f.Update(l), f.Close())
}

// ReadLimits reads the limits in force in the file at path.
func ReadLimits(path string) (Limits, error) {
	f, err := openRegular(path, unix.O_RDONLY, LimitsBytes)
	if err != nil {
		return Limits{}, fmt.Errorf("read limits: %w", err)
	}
	defer f.Close()
	file := make([]byte, LimitsBytes)
	// One read may meet an update half way. A second update can't start before the first is in force, so
	// a few more reads are enough unless someone updates without end.
	for range 16 {
		if _, err = f.ReadAt(file, 0); err != nil {
			return Limits{}, fmt.Errorf("read limits %s: %w", path, err)
		}
		var l Limits
		if l, err = decodeLimits(file); err == nil {
			return l, nil
		}
	}
	return Limits{}, fmt.Errorf("read limits %s: %w", path, err)
}

func bankAt(generation uint64) int { return limitsBanksAt + int(generation&1)*bankBytes }

// putHeader writes what never changes.
func putHeader(file []byte) {
	le := binary.LittleEndian
	le.PutUint64(file[limitsMagicAt:], limitsMagic)
	le.PutUint32(file[limitsABIAt:], ABI)
	le.PutUint32(file[limitsSizeAt:], LimitsBytes)
}

// putBank writes a whole bank.
func putBank(bank []byte, generation uint64, l Limits) {
	clear(bank)
	le := binary.LittleEndian
	le.PutUint64(bank[bankGenerationAt:], generation)
	le.PutUint32(bank[bankCardCountAt:], uint32(len(l.Cards)))
	if l.SelfVisible {
		le.PutUint32(bank[bankFlagsAt:], limitsSelfVisible)
	}
	for i, c := range l.Cards {
		card := bank[bankCardsAt+i*cardBytes:]
		copy(card[cardUUIDAt:], c.UUID[:])
		le.PutUint64(card[cardLimitAt:], c.LimitBytes)
		le.PutUint64(card[cardContextAt:], c.ContextBytes)
		le.PutUint32(card[cardComputePPMAt:], c.ComputePPM)
		le.PutUint32(card[cardFlagsAt:], cardFlags(c))
		le.PutUint32(card[cardPriorityAt:], c.Priority)
		le.PutUint32(card[cardMPSPercentAt:], c.MPSPercent)
		le.PutUint32(card[cardProcessorsAt:], c.Multiprocessors)
	}
	le.PutUint64(bank[bankChecksumAt:], bankChecksum(bank))
}

func cardFlags(c Card) uint32 {
	var flags uint32
	if c.ComputeFixed {
		flags |= cardComputeFixed
	}
	switch c.Managed {
	case ManagedCount:
		flags |= cardManagedCount
	case ManagedForbid:
		flags |= cardManagedForbid
	}
	if c.Oversell {
		flags |= cardOversell
	}
	return flags
}

// managedPolicy takes both flags for the stricter one.
func managedPolicy(flags uint32) ManagedPolicy {
	switch {
	case flags&cardManagedForbid != 0:
		return ManagedForbid
	case flags&cardManagedCount != 0:
		return ManagedCount
	}
	return ManagedCharge
}

// bankChecksum takes the checksum field as zero.
func bankChecksum(bank []byte) uint64 {
	h := fnv.New64a()
	h.Write(bank[:bankChecksumAt])
	h.Write(make([]byte, 8))
	h.Write(bank[bankChecksumAt+8 : bankBytes])
	return h.Sum64()
}

// decodeLimits reads the bank in force out of a file's bytes.
func decodeLimits(file []byte) (Limits, error) {
	var l Limits
	le := binary.LittleEndian
	if len(file) != LimitsBytes {
		return l, fmt.Errorf("%d bytes: %w", len(file), ErrDamaged)
	}
	if got := le.Uint64(file[limitsMagicAt:]); got != limitsMagic {
		return l, fmt.Errorf("magic %#x: %w", got, ErrDamaged)
	}
	if got := le.Uint32(file[limitsABIAt:]); got != ABI {
		return l, fmt.Errorf("ABI version %d, want %d: %w", got, ABI, ErrDamaged)
	}
	if got := le.Uint32(file[limitsSizeAt:]); got != LimitsBytes {
		return l, fmt.Errorf("size field %d: %w", got, ErrDamaged)
	}
	l.Generation = le.Uint64(file[limitsGenerationAt:])
	bank := file[bankAt(l.Generation):][:bankBytes]
	if got := le.Uint64(bank[bankGenerationAt:]); got != l.Generation || got == 0 {
		return l, fmt.Errorf("generation %d in force, bank has %d: %w", l.Generation, got, ErrDamaged)
	}
	if le.Uint64(bank[bankChecksumAt:]) != bankChecksum(bank) {
		return l, fmt.Errorf("checksum of generation %d: %w", l.Generation, ErrDamaged)
	}
	count := le.Uint32(bank[bankCardCountAt:])
	if count == 0 || count > MaxCards {
		return l, fmt.Errorf("%d cards: %w", count, ErrDamaged)
	}
	l.SelfVisible = le.Uint32(bank[bankFlagsAt:])&limitsSelfVisible != 0
	for i := range int(count) {
		card := bank[bankCardsAt+i*cardBytes:][:cardBytes]
		flags := le.Uint32(card[cardFlagsAt:])
		l.Cards = append(l.Cards, Card{
			UUID:         UUID(card[cardUUIDAt : cardUUIDAt+16]),
			LimitBytes:   le.Uint64(card[cardLimitAt:]),
			ContextBytes: le.Uint64(card[cardContextAt:]),
			ComputePPM:   le.Uint32(card[cardComputePPMAt:]),
			ComputeFixed: flags&cardComputeFixed != 0,
			Managed:      managedPolicy(flags),
			Oversell:     flags&cardOversell != 0,
			Priority:     le.Uint32(card[cardPriorityAt:]),

			MPSPercent:      le.Uint32(card[cardMPSPercentAt:]),
			Multiprocessors: le.Uint32(card[cardProcessorsAt:]),
		})
		live := file[limitsLiveAt+i*liveBytes:][:liveBytes]
		l.Live = append(l.Live, Live{
			ResidualBytes:    le.Uint64(live[liveResidualAt:]),
			ResidualSequence: le.Uint64(live[liveResidualSequenceAt:]),
			GateClosed:       le.Uint32(live[liveGateAt:]) != 0,
			BusyContexts:     le.Uint32(live[liveBusyContextsAt:]),
			CalibrationPPM:   le.Uint32(live[liveCalibrationAt:]),
		})
	}
	if err := l.Validate(); err != nil {
		return l, errors.Join(err, ErrDamaged)
	}
	return l, nil
}

// openRegular opens a regular file of at least minBytes without following a link in its last element and
// without waiting on whatever stands there instead.
func openRegular(path string, flags int, minBytes int64) (*os.File, error) {
	fd, err := unix.Open(path, flags|unix.O_NOFOLLOW|unix.O_NONBLOCK|unix.O_CLOEXEC|unix.O_NOCTTY, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		unix.Close(fd)
		return nil, &os.PathError{Op: "stat", Path: path, Err: err}
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		unix.Close(fd)
		return nil, fmt.Errorf("open %s: mode %#o is not a regular file: %w", path, st.Mode, ErrDamaged)
	}
	if st.Size < minBytes {
		unix.Close(fd)
		return nil, fmt.Errorf("open %s: %d bytes, want %d: %w", path, st.Size, minBytes, ErrDamaged)
	}
	return os.NewFile(uintptr(fd), path), nil
}

// createWhole makes the file at path by fill under another name beside it and gives it its name last, so
// that nobody sees it half made. It never replaces a file.
func createWhole(path string, mode os.FileMode, fill func(*os.File) error) (err error) {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".new-")
	if err != nil {
		return fmt.Errorf("create %s: %w", path, err)
	}
	defer func() {
		if err != nil {
			os.Remove(f.Name())
		}
	}()
	err = fill(f)
	if err == nil {
		err = f.Chmod(mode) // past the umask
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("create %s: %w", path, err)
	}
	err = unix.Renameat2(unix.AT_FDCWD, f.Name(), unix.AT_FDCWD, path, unix.RENAME_NOREPLACE)
	if err != nil {
		return fmt.Errorf("create: %w", &os.LinkError{Op: "rename", Old: f.Name(), New: path, Err: err})
	}
	return nil
}

// unitBytes turns units into bytes; the result fits for every count of units.
func unitBytes(units uint64) uint64 {
	if units > math.MaxUint64>>unitShift {
		return math.MaxUint64
	}
	return units << unitShift
}
