package agent

import (
	"os"
	"slices"
	"sync"
	"time"

	"github.com/carve-gpu/carve/vgpu/region"
)

// A slot says whose it is by a pid, a start time and a PID namespace. That isn't
// all that it takes:
//
//   - a process that runs another program by exec keeps all three, and nothing of
//     what it held;
//   - one that couldn't read /proc knows neither its start nor its namespace, and
//     many processes of a node have its pid.
//
// The library maps the usage file before it takes a slot and never lets go of it, so
// who hasn't it mapped is no owner. Who unmapped it by itself isn't any more either,
// but may have its memory still: there the driver's word counts, see freed.
const (
	// mapsEvery is how often a process is asked again that runs the same program
	// as far as can be seen, and unknownEvery one of which nothing could be said.
	mapsEvery    = time.Minute
	unknownEvery = 5 * time.Second
	// mapsTwice is how many times in a row a process must be seen without the file.
	mapsTwice = 2
)

// claimant is a process of which it is asked whether it is the owner of a slot. The
// owner is in it since what was found before a slot was taken says nothing of it.
type claimant struct {
	owner
	hostPID   int
	hostStart uint64
}

// mapped is what was found of a claimant.
type mapped struct {
	program uint64 // that it ran then
	at      time.Time
	// known is false where nobody can tell. has says that the file is mapped, without
	// how many times in a row it wasn't.
	known, has bool
	without    int
	image      uint64 // of its program, as slots have it; 0: not known
}

// hasNot is sure that the file isn't mapped.
func (m mapped) hasNot() bool { return m.known && !m.has && m.without >= mapsTwice }

// mappings knows who has usage files mapped. To find that out can take as long as
// the process in question likes, so it is done beside the looks, for each share by
// itself: a container that holds it up does so to itself only.
type mappings struct {
	// wanted and touched belong to the looks: who is to be asked next, and who was
	// asked for.
	wanted  map[shareKey][]claimant
	touched map[claimant]bool

	mu     sync.Mutex
	found  map[claimant]mapped
	asking map[shareKey]bool
}

func newMappings() *mappings {
	return &mappings{
		wanted: map[shareKey][]claimant{}, touched: map[claimant]bool{},
		found: map[claimant]mapped{}, asking: map[shareKey]bool{},
	}
}

// of is what is known of a process that may be the owner of a slot; it is asked for
// where it isn't, or was long ago.
func (m *mappings) of(o owner, p region.Process, now time.Time) mapped {
	c := claimant{o, p.HostPID, p.StartTicks}
	m.mu.Lock()
	f, known := m.found[c]
	m.mu.Unlock()
	if f.program != p.Program {
		f, known = mapped{}, false // that was another program
	}
	every := mapsEvery
	if !f.known {
		every = unknownEvery
	}
	if !m.touched[c] && (!known || now.Sub(f.at) >= every || f.known && !f.has && f.without < mapsTwice) {
		key := shareKey{o.uid, o.container}
		m.wanted[key] = append(m.wanted[key], c)
	}
	m.touched[c] = true
	return f
}

// ask has those asked that were wanted in this look, and forgets those that nobody
// wanted to know of. again is called once something is known that matters.
func (m *mappings) ask(usages map[shareKey]string, again func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for c := range m.found {
		if !m.touched[c] {
			delete(m.found, c)
		}
	}
	clear(m.touched)
	for key, all := range m.wanted {
		if len(all) > 0 && !m.asking[key] {
			m.asking[key] = true
			go func() {
				if m.find(usages[key], all) {
					again()
				}
				m.mu.Lock()
				defer m.mu.Unlock()
				delete(m.asking, key)
			}()
		}
	}
	clear(m.wanted)
}

// find asks claimants of one share, each process once, and reports whether one has
// the file not mapped.
func (m *mappings) find(usage string, all []claimant) (missing bool) {
	file, err := region.MappingOf(usage)
	byProcess := map[region.Process]mapped{}
	for _, c := range all {
		p, gone := region.ReadProcess(procRoot, c.hostPID)
		if gone != nil || p.StartTicks != c.hostStart {
			continue
		}
		f, asked := byProcess[p]
		if !asked {
			began := time.Now()
			f = mapped{program: p.Program, at: began}
			if err == nil {
				f.known, f.has, f.image = look(file, p)
			}
			byProcess[p] = f
			// Who has many processes with many mappings costs a node a tenth of a core.
			time.Sleep(9 * time.Since(began))
		}
		m.mu.Lock()
		if last := m.found[c]; f.known && !f.has {
			f.without = 1
			if last.program == f.program {
				f.without += last.without
			}
			missing = true
		}
		m.found[c] = f
		m.mu.Unlock()
	}
	return missing
}

// look asks one process.
func look(file region.Mapping, p region.Process) (known, has bool, image uint64) {
	has, err := file.In(procRoot, p.HostPID)
	if err != nil {
		return false, false, 0
	}
	if has {
		image, err = region.ReadImage(procRoot, p.HostPID)
		if err != nil {
			image = 0
		}
	}
	// It may have ended meanwhile, or begun another program.
	if now, err := region.ReadProcess(procRoot, p.HostPID); err != nil || now.StartTicks != p.StartTicks || now.Program != p.Program {
		return false, false, 0
	}
	return true, has, image
}

// sure says that a slot knows its owner's start and namespace, so that one process
// only can have all that it says.
func sure(s region.Slot) bool { return s.StartTicks != 0 && s.PIDNamespace != 0 }

// standing is what a living process is to a slot.
type standing uint8

const (
	stranger standing = iota
	// ownerIs has the slot. ownerWas has been its owner, or may have been: it has the usage
	// file not mapped, or runs another program.
	ownerIs
	ownerWas
)

// standing finds out what a living process is to a slot of a share.
func (r *reaper) standing(o owner, s share, slot region.Slot, u region.Usage, p region.Process) standing {
	if !p.Owns(slot) || p.HostPID == os.Getpid() || hasEnded(p.HostPID) {
		return stranger
	}
	m := r.mappings.of(o, p, r.now)
	switch {
	case m.hasNot():
		if sure(slot) || r.mayBeOf(s, p) {
			return ownerWas
		}
		return stranger
	case !m.known || !m.has:
		// Nobody can tell, or not yet.
		if !sure(slot) && !r.mayBeOf(s, p) {
			return stranger
		}
	case slot.State == region.SlotLive && m.image != 0 && slot.Image != 0 && m.image != slot.Image && hasSlot(u, slot, p, m.image):
		// A program has one slot. This one is that of its predecessor, or of another process
		// that knew as little of itself.
		return stranger
	}
	if slot.State == region.SlotDying || slot.State == region.SlotDead {
		// A sibling saw it exec: what it held went with the old program.
		return ownerWas
	}
	return ownerIs
}

// mayBeOf reports whether a process belongs to a share's containers, or may, where
// the runtime hasn't told which they are.
func (r *reaper) mayBeOf(s share, p region.Process) bool {
	groups, err := r.groupsOf(p.HostPID)
	return err == nil && (s.names(groups) || s.running && len(s.ids) == 0)
}

// hasSlot reports whether a process has another slot than this for the program with an
// image.
func hasSlot(u region.Usage, but region.Slot, p region.Process, image uint64) bool {
	return slices.ContainsFunc(u.Slots, func(s region.Slot) bool {
		return s.State == region.SlotLive && s.Index != but.Index && s.Image == image && p.Owns(s)
	})
}

// succeeded reports whether a slot's process has taken another one for a program
// that it ran later.
func succeeded(u region.Usage, slot region.Slot) bool {
	return slices.ContainsFunc(u.Slots, func(s region.Slot) bool {
		return s.State == region.SlotLive && s.PID == slot.PID && s.StartTicks == slot.StartTicks &&
			s.PIDNamespace == slot.PIDNamespace && s.Image != slot.Image
	})
}

// occupants are the processes for which the driver holds something on a card. It
// frees memory later than a process is gone.
type occupants struct {
	dead, living map[int]bool
	usedBytes    uint64
	// unknown says that the driver didn't answer.
	unknown bool
}

// truth is what the driver says of cards, asked once a look. A share can claim a
// thousand dead processes at every look, and a sample may take milliseconds. It is
// fresh enough, as only who was gone at the look before matters.
type truth struct {
	cards map[string]occupants
	// nameless are the shares of which a living process is on a card that has none
	// of their slots.
	nameless map[string]map[shareKey]bool
}

func newTruth() *truth {
	return &truth{map[string]occupants{}, map[string]map[shareKey]bool{}}
}

// freed reports whether the driver holds nothing for the owner of a slot on any
// of its cards any more. An owner that was never seen alive can't be told from
// other dead processes, so it waits for all of them; nor from living ones that have
// the usage file and no slot, by whatever their slots say. was are living processes
// that may have been the owner.
func (r *reaper) freed(o owner, s share, slot region.Slot, u region.Usage, was []int, known *truth) bool {
	pid, seen := r.lastPID[o]
	// A program that followed by exec has the pid, and no memory of its predecessor's.
	followed := succeeded(u, slot)
	for i, uuid := range s.cards {
		on, ok := known.cards[uuid]
		if !ok {
			on = r.occupants(uuid)
			known.cards[uuid] = on
		}
		if on.unknown || seen && on.dead[pid] || !seen && len(on.dead) > 0 {
			return false
		}
		if len(was) > 0 && !followed {
			// That one that lives isn't listed means something only where the driver lists
			// processes, and names them as they are seen here.
			charged := slot.Cards[i].UsedBytes
			if len(on.dead) > 0 || charged > 0 && len(on.living) == 0 && on.usedBytes >= charged {
				return false
			}
			for _, pid := range was {
				if on.living[pid] {
					return false
				}
			}
		}
		if !seen && r.nameless(s, u, uuid, on, known) {
			return false
		}
	}
	return true
}

// nameless reports whether a living process of a share is on a card, has the usage
// file, and isn't the owner of any slot by what that says.
func (r *reaper) nameless(s share, u region.Usage, uuid string, on occupants, known *truth) bool {
	if known.nameless[uuid] == nil {
		known.nameless[uuid] = map[shareKey]bool{}
	}
	if is, asked := known.nameless[uuid][s.key()]; asked {
		return is
	}
	is := false
	for pid := range on.living {
		groups, err := r.groupsOf(pid)
		if err != nil || !s.names(groups) {
			continue
		}
		p, err := region.ReadProcess(procRoot, pid)
		if err != nil || ownsAny(p, u) {
			continue
		}
		nobody := owner{uid: s.uid, container: s.container, slot: -1, pid: p.PID, start: p.StartTicks}
		if !r.mappings.of(nobody, p, r.now).hasNot() {
			is = true
			break
		}
	}
	known.nameless[uuid][s.key()] = is
	return is
}

func ownsAny(p region.Process, u region.Usage) bool {
	return slices.ContainsFunc(u.Slots, func(s region.Slot) bool { return s.State == region.SlotLive && p.Owns(s) })
}
