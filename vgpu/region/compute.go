package region

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Gate is what a process may launch on a card, as CARVE_GATE_* in the flags of its terms.
type Gate uint32

// The gates.
const (
	GateCredit Gate = 0 // by its own credit
	GateClosed Gate = 1 // nothing
	GateTurn   Gate = 2 // whatever it likes
)

// Terms are what one process may use of one card at this moment.
type Terms struct {
	// CorrectionNS is the sum of all corrections of its account, nanoseconds.
	CorrectionNS int64
	// SharePPM is its part of the card in millionths, 1 to 1,000,000.
	SharePPM uint32
	Gate     Gate
	// Borrow lets it go below its credit.
	Borrow bool
}

// Pace is a point of a card's pace; see struct carve_pace.
type Pace struct {
	At, Value int64
	// Contexts is the number of processes with work since then, Most the largest of late.
	Contexts, Most uint32
}

// ComputeFile is the part of a container's limits file by which the node divides compute, open for writing.
// Its methods may not run at the same time on one ComputeFile, and only one part of one agent writes it.
type ComputeFile struct {
	path  string
	pages []byte
	cards int
}

// OpenCompute opens the compute part of the limits file at path for the container's first cards cards, 1 to
// MaxCards, and makes room for it where the file ends before, as one that an older agent made does. The
// caller closes it.
func OpenCompute(path string, cards int) (*ComputeFile, error) {
	if cards < 1 || cards > MaxCards {
		return nil, fmt.Errorf("open compute %s: %d cards: want 1 to %d", path, cards, MaxCards)
	}
	f, err := openRegular(path, unix.O_RDWR, LimitsBytes)
	if err != nil {
		return nil, fmt.Errorf("open compute: %w", err)
	}
	defer f.Close()
	if err := reserveCompute(f, cards); err != nil {
		return nil, fmt.Errorf("open compute: %w", err)
	}
	pages, err := unix.Mmap(int(f.Fd()), 0, computeAt+cards*computeCardBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("open compute: map %s: %w", path, err)
	}
	return &ComputeFile{path, pages, cards}, nil
}

// reserveCompute gives a limits file its full length, and the pages of so many cards their memory: a process
// that looks at a page for which a full file system has no room is killed by the kernel.
func reserveCompute(f *os.File, cards int) error {
	st, err := f.Stat()
	if err != nil {
		return err
	}
	if st.Size() != LimitsFileBytes {
		if err := f.Truncate(LimitsFileBytes); err != nil {
			return err
		}
	}
	err = unix.Fallocate(int(f.Fd()), 0, computeAt, int64(cards)*computeCardBytes)
	if err != nil && !errors.Is(err, unix.EOPNOTSUPP) {
		return &os.PathError{Op: "fallocate", Path: f.Name(), Err: err}
	}
	return nil
}

// Close unmaps the file. What is in force stays so: shares until another agent comes, gates and loans for
// the tenth of a second after which the library takes the agent for gone.
func (f *ComputeFile) Close() error {
	err := unix.Munmap(f.pages)
	f.pages = nil
	if err != nil {
		return fmt.Errorf("close compute %s: %w", f.path, err)
	}
	return nil
}

// Divide says whether compute is divided in this container.
func (f *ComputeFile) Divide(on bool) error {
	var word uint64
	if on {
		word = 1
	}
	return f.write(func() {
		if at := f.word64(limitsComputeAt); atomic.LoadUint64(at) != word {
			atomic.StoreUint64(at, word)
		}
	})
}

// Look publishes what holds for a whole card: that the agent looked at now, how often accounts are corrected,
// how much estimated work a process may have on the card, and a point of its pace, which must be later than
// the last one. All times are nanoseconds of CLOCK_MONOTONIC.
func (f *ComputeFile) Look(card int, now, truthEvery, ahead int64, p Pace) error {
	at, err := f.card(card)
	if err != nil {
		return err
	}
	return f.write(func() {
		pace := at + computePaceAt
		count := atomic.LoadUint64(f.word64(pace + paceCountAt))
		point := pace + pacePointsAt + int(count%pacePoints)*pacePointBytes
		atomic.StoreUint64(f.word64(point), uint64(p.At))
		atomic.StoreUint64(f.word64(point+8), uint64(p.Value))
		atomic.StoreUint32(f.word32(pace+paceContextsAt), p.Contexts)
		atomic.StoreUint32(f.word32(pace+paceMostAt), p.Most)
		atomic.StoreUint64(f.word64(pace+paceCountAt), count+1)
		atomic.StoreUint64(f.word64(at+computeTruthAt), uint64(truthEvery))
		atomic.StoreUint64(f.word64(at+computeAheadAt), uint64(ahead))
		atomic.StoreUint64(f.word64(at+computeHeartbeatAt), uint64(now))
	})
}

// SetShare publishes the part of a card, in millionths, that the container's processes have together at this
// moment: what one has that the node hasn't seen yet. 0: not known.
func (f *ComputeFile) SetShare(card int, ppm uint32) error {
	at, err := f.card(card)
	if err != nil {
		return err
	}
	return f.write(func() { atomic.StoreUint64(f.word64(at+computeContainerAt), uint64(ppm)) })
}

// SetTerms publishes the terms of the process that has a slot. Where others stood there before, no process
// takes a mixture of both.
func (f *ComputeFile) SetTerms(card int, o Owner, t Terms) error {
	at, err := f.terms(card, o.Index)
	if err != nil {
		return err
	}
	flags := o.tag() | uint32(t.Gate)&termsGate
	if t.Borrow {
		flags |= termsBorrow
	}
	return f.write(func() {
		if atomic.LoadUint32(f.word32(at+termsFlagsAt))&termsOwner != o.tag() {
			atomic.StoreUint32(f.word32(at+termsFlagsAt), 0)
		}
		atomic.StoreUint64(f.word64(at+termsCorrectionAt), uint64(t.CorrectionNS))
		atomic.StoreUint32(f.word32(at+termsShareAt), t.SharePPM)
		atomic.StoreUint32(f.word32(at+termsFlagsAt), flags)
	})
}

// Terms gives the terms of a process, false where those that stand there aren't its own. An agent that starts
// goes on from the correction that an earlier one left.
func (f *ComputeFile) Terms(card int, o Owner) (t Terms, ok bool, err error) {
	at, err := f.terms(card, o.Index)
	if err != nil {
		return t, false, err
	}
	err = f.write(func() {
		flags := atomic.LoadUint32(f.word32(at + termsFlagsAt))
		ok = flags&termsOwner == o.tag()
		if ok {
			t.CorrectionNS = int64(atomic.LoadUint64(f.word64(at + termsCorrectionAt)))
			t.SharePPM = atomic.LoadUint32(f.word32(at + termsShareAt))
			t.Gate = Gate(flags & termsGate)
			t.Borrow = flags&termsBorrow != 0
		}
	})
	return t, ok, err
}

func (f *ComputeFile) write(touch func()) error {
	if err := guarded(touch); err != nil {
		return fmt.Errorf("compute of %s: %w", f.path, err)
	}
	return nil
}

func (f *ComputeFile) card(card int) (at int, err error) {
	if card < 0 || card >= f.cards {
		return 0, fmt.Errorf("compute of %s: card %d: want 0 to %d", f.path, card, f.cards-1)
	}
	return computeAt + card*computeCardBytes, nil
}

func (f *ComputeFile) terms(card, slot int) (at int, err error) {
	at, err = f.card(card)
	if err == nil && (slot < 0 || slot >= MaxSlots) {
		err = fmt.Errorf("compute of %s: slot %d: want 0 to %d", f.path, slot, MaxSlots-1)
	}
	return at + computeTermsAt + slot*termsBytes, err
}

func (f *ComputeFile) word64(at int) *uint64 { return (*uint64)(unsafe.Pointer(&f.pages[at])) }
func (f *ComputeFile) word32(at int) *uint32 { return (*uint32)(unsafe.Pointer(&f.pages[at])) }

// Owner is the process that has a slot.
type Owner struct {
	// Index is the slot's, 0 to MaxSlots-1; the others are as in Slot.
	Index                           int
	PID                             uint32
	StartTicks, PIDNamespace, Image uint64
}

// tag is carve_terms_owner.
func (o Owner) tag() uint32 {
	x := (o.Image<<32 ^ o.StartTicks) + uint64(o.PID)
	return (uint32((x*0x9e3779b97f4a7c15)>>40) | 1) << 8
}

// Slot is the owner as Process.Owns takes it.
func (o Owner) Slot() Slot {
	return Slot{Index: o.Index, State: SlotLive, PID: o.PID, StartTicks: o.StartTicks, PIDNamespace: o.PIDNamespace, Image: o.Image}
}

// ComputeUsage is what a process says of its work on one card. Times are nanoseconds of CLOCK_MONOTONIC.
// Everything in it was written by the container.
type ComputeUsage struct {
	// ChargedNS is all GPU time that was paid since the slot was taken.
	ChargedNS int64
	// SinceNS is the time after which all unpaid work ran; 0: none is out.
	SinceNS int64
	// CommittedNS is the estimate of the unpaid work.
	CommittedNS int64
	// CreditNS is what it may use, as of CreditAtNS.
	CreditNS, CreditAtNS int64
	// Waiting says that a launch is held back.
	Waiting bool
}

// ComputeReader reads the processes of one container, again and again, in few system calls. It isn't safe
// for use by several goroutines.
type ComputeReader struct {
	path   string
	file   *os.File
	cards  int
	owners []Owner
	buffer []byte
	first  []byte
}

// OpenComputeReader opens the usage file at path. The caller closes it.
func OpenComputeReader(path string, cards int) (*ComputeReader, error) {
	if cards < 1 || cards > MaxCards {
		return nil, fmt.Errorf("read compute %s: %d cards: want 1 to %d", path, cards, MaxCards)
	}
	f, err := openRegular(path, unix.O_RDONLY, 0)
	if err != nil {
		return nil, fmt.Errorf("read compute: %w", err)
	}
	return &ComputeReader{path: path, file: f, cards: cards}, nil
}

// Close closes the file.
func (r *ComputeReader) Close() error { return r.file.Close() }

// Owners reads who has the container's slots; the slice is valid until the next call.
func (r *ComputeReader) Owners() ([]Owner, error) {
	r.owners = r.owners[:0]
	le := binary.LittleEndian
	header := r.room(usageHeaderBytes)
	if _, err := readAtMost(r.file, header, 0); err != nil {
		return nil, fmt.Errorf("read compute %s: %w", r.path, err)
	}
	slots := MaxSlots
	if validUsageHeader(header) {
		slots = int(min(le.Uint32(header[usageHighWaterAt:]), MaxSlots))
	}
	processes := r.room(slots * processBytes)
	if _, err := readAtMost(r.file, processes, usageProcesses); err != nil {
		return nil, fmt.Errorf("read compute %s: %w", r.path, err)
	}
	for i := range slots {
		p := processes[i*processBytes:][:processBytes]
		word := le.Uint64(p[processStatePIDAt:])
		if SlotState(uint32(word)) != SlotLive {
			continue
		}
		r.owners = append(r.owners, Owner{
			Index: i, PID: uint32(word >> 32), StartTicks: le.Uint64(p[processStartTicksAt:]),
			PIDNamespace: le.Uint64(p[processPIDNamespaceAt:]), Image: le.Uint64(p[processImageAt:]),
		})
	}
	return r.owners, nil
}

// readTries is how often lines that are being written are read again. Writing one takes nanoseconds.
const readTries = 3

// Read reads what the owners of slots, as Owners gave them, say of one card. known[i] is false for one that
// was being written all the time, and out[i] is left as it was. Both are as long as owners.
func (r *ComputeReader) Read(card int, owners []Owner, out []ComputeUsage, known []bool) error {
	if card < 0 || card >= r.cards {
		return fmt.Errorf("read compute %s: card %d: want 0 to %d", r.path, card, r.cards-1)
	}
	if len(owners) == 0 {
		return nil
	}
	low, high := owners[0].Index, owners[len(owners)-1].Index+1
	if low < 0 || high > MaxSlots || low >= high {
		return fmt.Errorf("read compute %s: slots %d to %d: out of range", r.path, low, high-1)
	}
	at := int64(usageLines + card*usageColumnBytes + low*lineBytes)
	size := (high - low) * lineBytes
	clear(known)
	if cap(r.first) < size {
		r.first = make([]byte, size)
	}
	first, lines := r.first[:size], r.room(size)
	if _, err := readAtMost(r.file, first, at); err != nil {
		return fmt.Errorf("read compute %s: %w", r.path, err)
	}
	for range readTries {
		if _, err := readAtMost(r.file, lines, at); err != nil {
			return fmt.Errorf("read compute %s: %w", r.path, err)
		}
		missing := false
		for i, o := range owners {
			if known[i] {
				continue
			}
			// The writer makes the sequence odd, writes, and makes it even, in that order. So the same words
			// with the same even sequence twice were all there at once in between.
			a, b := first[(o.Index-low)*lineBytes:][:lineBytes], lines[(o.Index-low)*lineBytes:][:lineBytes]
			if string(a[lineComputeSequenceAt:]) == string(b[lineComputeSequenceAt:]) && b[lineComputeSequenceAt]&1 == 0 {
				out[i], known[i] = decodeCompute(b), true
			} else {
				missing = true
			}
		}
		if !missing {
			break
		}
		first, lines = lines, first
	}
	return nil
}

func decodeCompute(line []byte) ComputeUsage {
	le := binary.LittleEndian
	committed := le.Uint64(line[lineCommittedAt:])
	return ComputeUsage{
		ChargedNS:   int64(le.Uint64(line[lineChargedAt:])),
		SinceNS:     int64(le.Uint64(line[lineSinceAt:])),
		CommittedNS: int64(committed &^ computeWaiting),
		CreditNS:    int64(le.Uint64(line[lineCreditAt:])),
		CreditAtNS:  int64(le.Uint64(line[lineCreditTimeAt:])),
		Waiting:     committed&computeWaiting != 0,
	}
}

// room is a buffer of so many bytes, which the next call takes again.
func (r *ComputeReader) room(size int) []byte {
	if cap(r.buffer) < size {
		r.buffer = make([]byte, size)
	}
	return r.buffer[:size]
}
