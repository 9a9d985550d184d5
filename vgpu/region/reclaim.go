package region

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// ErrSlotChanged is wrapped by ReclaimSlot's error where the slot is not any more what its caller saw.
var ErrSlotChanged = errors.New("slot has changed")

// ReclaimSlot takes the charge off a slot whose owner is gone. seen is the slot as ReadUsage gave it; the
// slot is left alone, with an error that is ErrSlotChanged, if it belongs to another process by now or its
// charge moved. The caller has made sure that the process is gone (or, for a slot in state SlotDying whose
// process lives, that it ran another program by exec) and that the driver has freed its memory, which can
// take some 200 ms longer.
//
// The slot itself is taken again by the next process of the container that needs one. It works by pwrite,
// and only on slots that hold a charge: those no process of the container touches but their owner.
func ReclaimSlot(path string, seen Slot) error {
	if seen.Index < 0 || seen.Index >= MaxSlots || len(seen.Cards) == 0 || len(seen.Cards) > MaxCards {
		return fmt.Errorf("reclaim slot %d of %s with %d cards: out of range", seen.Index, path, len(seen.Cards))
	}
	f, err := openRegular(path, unix.O_RDWR, UsageBytes)
	if err != nil {
		return fmt.Errorf("reclaim slot %d: %w", seen.Index, err)
	}
	defer f.Close()
	if err := reclaim(f, seen); err != nil {
		return fmt.Errorf("reclaim slot %d of %s: %w", seen.Index, path, err)
	}
	return nil
}

func reclaim(f *os.File, seen Slot) error {
	now, err := readSlot(f, seen.Index, len(seen.Cards))
	if err != nil {
		return err
	}
	// A sibling may have marked it dying since; that doesn't change whose it is.
	if now.PID != seen.PID || now.StartTicks != seen.StartTicks || now.PIDNamespace != seen.PIDNamespace || now.Image != seen.Image {
		return fmt.Errorf("owned by pid %d started at %d: %w", now.PID, now.StartTicks, ErrSlotChanged)
	}
	for c := range seen.Cards {
		a, b := now.Cards[c], seen.Cards[c]
		if a.UsedBytes != b.UsedBytes || a.PendingBytes != b.PendingBytes || a.Sequence != b.Sequence {
			return fmt.Errorf("card %d: charge has moved: %w", c, ErrSlotChanged)
		}
	}
	if !now.Charged() {
		return nil
	}
	// First the state, so that no process takes the slot while its lines are being zeroed.
	word := make([]byte, 8)
	binary.LittleEndian.PutUint64(word, uint64(SlotDead)|uint64(now.PID)<<32)
	if _, err := f.WriteAt(word, int64(usageProcesses+seen.Index*processBytes+processStatePIDAt)); err != nil {
		return err
	}
	// From the end of each line to its charge, and all lines before the last charge goes: a slot without
	// any charge can be taken at that moment.
	zero := make([]byte, lineBytes)
	for _, part := range [][2]int{{lineChargeAt + 8, lineBytes}, {lineChargeAt, lineChargeAt + 8}} {
		for c := range seen.Cards {
			at := usageLines + c*usageColumnBytes + seen.Index*lineBytes
			if _, err := f.WriteAt(zero[part[0]:part[1]], int64(at+part[0])); err != nil {
				return err
			}
		}
	}
	return nil
}

// readSlot reads one slot.
func readSlot(f *os.File, index, cards int) (Slot, error) {
	p := make([]byte, processBytes)
	if _, err := f.ReadAt(p, int64(usageProcesses+index*processBytes)); err != nil {
		return Slot{}, err
	}
	le := binary.LittleEndian
	word := le.Uint64(p[processStatePIDAt:])
	s := Slot{
		Index:        index,
		State:        SlotState(uint32(word)),
		PID:          uint32(word >> 32),
		StartTicks:   le.Uint64(p[processStartTicksAt:]),
		PIDNamespace: le.Uint64(p[processPIDNamespaceAt:]),
		Image:        le.Uint64(p[processImageAt:]),
		LibraryABI:   le.Uint32(p[processLibraryABIAt:]),
	}
	line := make([]byte, lineBytes)
	for c := range cards {
		if _, err := f.ReadAt(line, int64(usageLines+c*usageColumnBytes+index*lineBytes)); err != nil {
			return Slot{}, err
		}
		s.Cards = append(s.Cards, decodeLine(line))
	}
	return s, nil
}

// RestoreUsage gives a usage file whose header or size the container changed its header and size again, so
// that further processes of the container can attach, and says whether there was anything to do. Charges
// that were lost come back with the next request of the processes that hold them.
func RestoreUsage(path string) (changed bool, err error) {
	f, err := openRegular(path, unix.O_RDWR, 0)
	if err != nil {
		return false, fmt.Errorf("restore usage: %w", err)
	}
	defer f.Close()
	head := make([]byte, usageHeaderBytes)
	short, err := readAtMost(f, head, 0)
	if err != nil {
		return false, fmt.Errorf("restore usage %s: %w", path, err)
	}
	st, err := f.Stat()
	if err != nil {
		return false, fmt.Errorf("restore usage: %w", err)
	}
	if !short && st.Size() == UsageBytes && validUsageHeader(head) {
		return false, nil
	}
	if err := writeUsageHeader(f); err != nil {
		return false, fmt.Errorf("restore usage %s: %w", path, err)
	}
	// What was the high water before is lost, perhaps; all slots is always right, and libraries leave it at that.
	all := binary.LittleEndian.AppendUint32(nil, MaxSlots)
	if _, err := f.WriteAt(all, usageHighWaterAt); err != nil {
		return false, fmt.Errorf("restore usage %s: %w", path, err)
	}
	return true, nil
}
