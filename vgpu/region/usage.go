package region

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// SlotState is where a slot of a usage file is in its life.
type SlotState uint32

// The states of a slot. Slots in state SlotFree are not listed by ReadUsage unless a charge is left on
// them.
const (
	SlotFree     SlotState = 0
	SlotClaiming SlotState = 1 // taken a moment ago, or by a process that died while it took it
	SlotLive     SlotState = 2
	SlotDying    SlotState = 3 // a process of the container found the owner dead, or replaced by exec
	SlotDead     SlotState = 4 // ReclaimSlot has begun
)

// String gives the state's word, or its number where the container wrote something else.
func (s SlotState) String() string {
	switch s {
	case SlotFree:
		return "free"
	case SlotClaiming:
		return "claiming"
	case SlotLive:
		return "live"
	case SlotDying:
		return "dying"
	case SlotDead:
		return "dead"
	}
	return fmt.Sprintf("state %d", uint32(s))
}

// Damage says what in a usage file is not as the library leaves it. The rest of the file is still read.
type Damage uint32

// What can be wrong. Each is the container's own doing and harms only its own processes.
const (
	DamageHeader Damage = 1 << iota // magic, version or counts overwritten: no further process can attach
	DamageShort                     // truncated: what is missing reads as zero
	DamageLong                      // grown: what is behind the layout is ignored
	DamageState                     // a slot in no known state
	DamageFree                      // a charge on a slot that is free
)

// String lists the faults in words, "none" for none.
func (d Damage) String() string {
	if d == 0 {
		return "none"
	}
	var words []string
	for i, w := range []string{"header overwritten", "truncated", "grown", "slot in no known state", "charge on a free slot"} {
		if d&(1<<i) != 0 {
			words = append(words, w)
		}
	}
	return strings.Join(words, ", ")
}

// Usage is a bounded reading of a usage file. Everything in it was written by the container.
type Usage struct {
	// Slots are those with an owner or a charge, in the order of their index.
	Slots []Slot
	// Damage is what was found not to be as the library leaves it.
	Damage Damage
}

// Slot is what one process of the container says of itself.
type Slot struct {
	// Index is the slot's place, 0 to MaxSlots-1.
	Index int
	State SlotState
	// PID is the process in its own PID namespace.
	PID uint32
	// StartTicks is field 22 of /proc/<pid>/stat; 0: not known.
	StartTicks uint64
	// PIDNamespace is the inode of /proc/<pid>/ns/pid; 0: not known.
	PIDNamespace uint64
	// Image differs between two programs that one process ran by exec.
	Image uint64
	// LibraryABI is the layout version that the process' library was built for.
	LibraryABI uint32
	// Cards is what the process holds, indexed as Limits.Cards.
	Cards []CardUsage
}

// CardUsage is what one process holds on one card.
type CardUsage struct {
	// UsedBytes is what is charged, contexts and managed memory included. It is below 2 TiB.
	UsedBytes uint64
	// PendingBytes are requests that were being admitted. Those of a dead process never reached the driver.
	PendingBytes uint64
	// ContextBytes and ManagedBytes are parts of UsedBytes; they are never larger than it.
	ContextBytes uint64
	ManagedBytes uint64
	// Sequence changes with each decrease of UsedBytes or PendingBytes: if it and both of them are the
	// same in two readings, nothing changed in between.
	Sequence uint64
	// Allocations is the number of live ones.
	Allocations uint64
	// Refusals counts the requests refused, LastRefusedBytes is the size of the latest.
	Refusals         uint64
	LastRefusedBytes uint64
	// PeakBytes is the largest UsedBytes since the slot was taken.
	PeakBytes uint64
	// UnchargedBytes is managed memory that the card's policy leaves uncharged. Part of it may be on the card.
	UnchargedBytes uint64
	// ImportedBytes is memory of other processes that is open in this one; they are charged for it.
	ImportedBytes uint64
}

// Charged says whether the slot holds a charge on any card.
func (s Slot) Charged() bool {
	for _, c := range s.Cards {
		if c.UsedBytes != 0 || c.PendingBytes != 0 {
			return true
		}
	}
	return false
}

// Total adds up what all slots hold on one card. Peak, sequence and the size last refused have no sum and
// are zero in it.
func (u Usage) Total(card int) CardUsage {
	var t CardUsage
	for _, s := range u.Slots {
		if card < 0 || card >= len(s.Cards) {
			continue
		}
		c := s.Cards[card]
		t.UsedBytes += c.UsedBytes
		t.PendingBytes += c.PendingBytes
		t.ContextBytes += c.ContextBytes
		t.ManagedBytes += c.ManagedBytes
		t.UnchargedBytes = addSaturating(t.UnchargedBytes, c.UnchargedBytes)
		t.ImportedBytes = addSaturating(t.ImportedBytes, c.ImportedBytes)
		t.Allocations = addSaturating(t.Allocations, c.Allocations)
		t.Refusals = addSaturating(t.Refusals, c.Refusals)
	}
	return t
}

// ReadUsage reads the usage file at path for the first cards cards of its container, 1 to MaxCards. It
// reads a bounded number of bytes and never maps. A damaged file is read as far as it goes, with
// Usage.Damage saying what is wrong; an error means that there is no regular file to read.
func ReadUsage(path string, cards int) (Usage, error) {
	if cards < 1 || cards > MaxCards {
		return Usage{}, fmt.Errorf("read usage %s: %d cards: want 1 to %d", path, cards, MaxCards)
	}
	f, err := openRegular(path, unix.O_RDONLY, 0)
	if err != nil {
		return Usage{}, fmt.Errorf("read usage: %w", err)
	}
	defer f.Close()
	u, err := readUsage(f, cards)
	if err != nil {
		return Usage{}, fmt.Errorf("read usage %s: %w", path, err)
	}
	if st, err := f.Stat(); err == nil && st.Size() > UsageBytes {
		u.Damage |= DamageLong
	}
	return u, nil
}

func readUsage(f io.ReaderAt, cards int) (Usage, error) {
	var u Usage
	le := binary.LittleEndian
	header := make([]byte, usageHeaderBytes)
	short, err := readAtMost(f, header, 0)
	if err != nil {
		return u, err
	}
	// Slots beyond the high water have no owner and no charge, and most files have a few only. A container that
	// lowers it wrongly hides its own processes, from figures that it writes anyway.
	slots := int(min(le.Uint32(header[usageHighWaterAt:]), MaxSlots))
	if !validUsageHeader(header) {
		u.Damage |= DamageHeader
		slots = MaxSlots
	}
	processes := make([]byte, slots*processBytes)
	cut, err := readAtMost(f, processes, usageProcesses)
	if err != nil {
		return u, err
	}
	short = short || cut
	columns := make([][]byte, cards)
	for c := range columns {
		columns[c] = make([]byte, slots*lineBytes)
		cut, err := readAtMost(f, columns[c], int64(usageLines+c*usageColumnBytes))
		if err != nil {
			return u, err
		}
		short = short || cut
	}
	// The file may also end behind what was read.
	cut, err = readAtMost(f, make([]byte, 1), int64(usageLines+cards*usageColumnBytes-1))
	if err != nil {
		return u, err
	}
	if short || cut {
		u.Damage |= DamageShort
	}
	for i := range slots {
		p := processes[i*processBytes:][:processBytes]
		word := le.Uint64(p[processStatePIDAt:])
		s := Slot{
			Index:        i,
			State:        SlotState(uint32(word)),
			PID:          uint32(word >> 32),
			StartTicks:   le.Uint64(p[processStartTicksAt:]),
			PIDNamespace: le.Uint64(p[processPIDNamespaceAt:]),
			Image:        le.Uint64(p[processImageAt:]),
			LibraryABI:   le.Uint32(p[processLibraryABIAt:]),
		}
		if s.State > SlotDead {
			u.Damage |= DamageState
		}
		// A free slot without a charge isn't listed, and most are such: look before making the list.
		charged := false
		for _, column := range columns {
			charged = charged || le.Uint64(column[i*lineBytes+lineChargeAt:]) != 0
		}
		if s.State == SlotFree {
			if !charged {
				continue
			}
			u.Damage |= DamageFree
		}
		s.Cards = make([]CardUsage, cards)
		for c, column := range columns {
			s.Cards[c] = decodeLine(column[i*lineBytes:][:lineBytes])
		}
		u.Slots = append(u.Slots, s)
	}
	return u, nil
}

func decodeLine(b []byte) CardUsage {
	le := binary.LittleEndian
	charge := le.Uint64(b[lineChargeAt:])
	c := CardUsage{
		UsedBytes:        unitBytes(charge >> 32),
		PendingBytes:     unitBytes(charge & 0xffffffff),
		Sequence:         le.Uint64(b[lineSequenceAt:]),
		ContextBytes:     le.Uint64(b[lineContextAt:]),
		ManagedBytes:     le.Uint64(b[lineManagedAt:]),
		Allocations:      le.Uint64(b[lineAllocationsAt:]),
		Refusals:         le.Uint64(b[lineRefusalsAt:]),
		LastRefusedBytes: le.Uint64(b[lineLastRefusedAt:]),
		PeakBytes:        le.Uint64(b[linePeakAt:]),
		UnchargedBytes:   le.Uint64(b[lineUnchargedAt:]),
		ImportedBytes:    le.Uint64(b[lineImportedAt:]),
	}
	c.ContextBytes = min(c.ContextBytes, c.UsedBytes)
	c.ManagedBytes = min(c.ManagedBytes, c.UsedBytes-c.ContextBytes)
	c.PeakBytes = min(c.PeakBytes, unitBytes(0xffffffff))
	return c
}

func validUsageHeader(head []byte) bool {
	le := binary.LittleEndian
	return le.Uint64(head[usageMagicAt:]) == usageMagic &&
		le.Uint32(head[usageABIAt:]) == ABI &&
		le.Uint32(head[usageSizeAt:]) == UsageBytes &&
		le.Uint32(head[usageSlotCountAt:]) == MaxSlots &&
		le.Uint32(head[usageCardCountAt:]) == MaxCards
}

// readAtMost fills b from offset at and says whether the file ended before; the rest of b stays zero.
func readAtMost(f io.ReaderAt, b []byte, at int64) (short bool, err error) {
	n, err := f.ReadAt(b, at)
	if n == len(b) || err == nil {
		return false, nil
	}
	if errors.Is(err, io.EOF) {
		clear(b[n:])
		return true, nil
	}
	return false, err
}

func addSaturating(a, b uint64) uint64 {
	if a+b < a {
		return ^uint64(0)
	}
	return a + b
}

// CreateUsage makes an empty usage file at path, complete or not at all, writable by everyone. It fails
// with an error that is os.ErrExist where there is something at path.
func CreateUsage(path string) error {
	return createWhole(path, 0o666, writeUsageHeader)
}

func writeUsageHeader(f *os.File) error {
	header := make([]byte, usageHeaderBytes)
	le := binary.LittleEndian
	le.PutUint64(header[usageMagicAt:], usageMagic)
	le.PutUint32(header[usageABIAt:], ABI)
	le.PutUint32(header[usageSizeAt:], UsageBytes)
	le.PutUint32(header[usageSlotCountAt:], MaxSlots)
	le.PutUint32(header[usageCardCountAt:], MaxCards)
	if err := f.Truncate(UsageBytes); err != nil {
		return err
	}
	// High water is left as it is: it is 0 in a new file, and MaxSlots is always right in a mended one.
	_, err := f.WriteAt(header[:usageHighWaterAt], 0)
	return err
}
