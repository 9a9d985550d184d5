package agent

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/vgpu/region"
)

const (
	// reclaimEvery is the pace of looking at processes; reclaimSoon that while
	// the charge of a dead one waits to be taken off.
	reclaimEvery = time.Second
	reclaimSoon  = 250 * time.Millisecond
	// reclaimSoonLooks is at how many looks it may still wait for that.
	reclaimSoonLooks = 240

	procRoot = "/proc"
)

// share is a slice whose usage file is looked at.
type share struct {
	uid, container string
	cards          []string
	limits         []uint64 // of memory, by card
	beside         []bool   // may have memory on the card that isn't charged, by card
	usage          string
	mps            bool     // its processes are clients of an MPS server
	running        bool     // a container with it hasn't exited
	ids            []string // of those containers
}

// shareKey is a share's identity.
type shareKey struct{ uid, container string }

func (s share) key() shareKey { return shareKey{s.uid, s.container} }

// shares lists the slices that have been used.
func (a *Agent) shares() []share {
	a.mu.Lock()
	defer a.mu.Unlock()
	running := map[[2]string][]string{}
	cut := map[[2]string]bool{} // runs, and the usage file says nothing of it
	for id, u := range a.containers {
		key := [2]string{u.uid, u.container}
		if s := a.sights[id]; s != nil && s.lost == lostUsage {
			cut[key] = true
			continue
		}
		running[key] = append(running[key], id)
	}
	var out []share
	for uid, h := range a.held {
		if !h.prepared {
			continue
		}
		for name, cards := range h.Grant.Containers {
			if !fronted(cards[0].Mode) || !h.used[name] {
				continue
			}
			s := share{uid: uid, container: name, usage: a.files.usage(uid, name), mps: cards[0].Mode == api.ModeMPS,
				// Until the runtime has told, each may be running.
				running: !a.listed || cut[[2]string{uid, name}], ids: running[[2]string{uid, name}]}
			s.running = s.running || len(s.ids) > 0
			for _, c := range cards {
				s.cards = append(s.cards, c.Card)
				s.limits = append(s.limits, uint64(c.MemMiB)<<20)
				s.beside = append(s.beside, c.Managed == api.ManagedCount || c.Oversell != "")
			}
			out = append(out, s)
		}
	}
	return out
}

// owner identifies the process that took a slot of a share.
type owner struct {
	uid, container string
	slot           int
	pid            uint32
	start, image   uint64
}

// reaper takes off the charge of processes that are gone. It belongs to one
// goroutine.
type reaper struct {
	*Agent
	// hostPID is where the owner of a slot was last seen.
	hostPID map[owner]int
	// lastPID is hostPID, kept for owners that are gone.
	lastPID map[owner]int
	// gone counts the looks at which an owner was gone.
	gone map[owner]int
	// refusals are those that an owner counted last, on each card.
	refusals map[owner][]uint64
	samples  samples
	mappings *mappings
	now      time.Time // of this look
}

// tally is what is counted of a share of one card over its life. A slot's own
// counts start again with its next owner.
type tally struct {
	refusals  uint64
	peakBytes uint64
	// residualBytes is what is held now beyond what the slots say, toldMiB what the
	// report says of it, since toldAt; overSaid that the pod was told.
	residualBytes uint64
	toldMiB       int64
	toldAt        time.Time
	overSaid      bool
}

func newReaper(a *Agent) *reaper {
	return &reaper{
		Agent: a, hostPID: map[owner]int{}, lastPID: map[owner]int{}, gone: map[owner]int{}, refusals: map[owner][]uint64{},
		samples: samples{histories: map[shareKey][]history{}}, mappings: newMappings(),
	}
}

// reclaimLoop looks at the processes of all shares until ctx ends. While no
// container runs with one and no dead process is charged, it sleeps.
func (a *Agent) reclaimLoop(ctx context.Context) {
	r := newReaper(a)
	var dead map[string]bool
	var unseen, looked time.Time
	waiting := false
	for {
		// What is found at two looks in a row is believed, so they keep apart
		// however often something happens in between.
		now := time.Now()
		a.looks.Add(1)
		if now.Sub(unseen) >= reclaimEvery {
			dead, unseen = a.endUnseen(procRoot, dead), now
		}
		due := now.Sub(looked) >= reclaimSoon
		if due {
			waiting, looked = r.look(), now
		}
		_ = a.holdAll() // noted where it can't be
		r.sampleResiduals(now)
		var again <-chan time.Time
		switch {
		case waiting || !due:
			again = time.After(reclaimSoon)
		case a.inUse():
			again = time.After(reclaimEvery)
		}
		select {
		case <-ctx.Done():
			return
		case <-a.stirred:
		case <-again:
		}
	}
}

// inUse reports whether a container runs, as far as is known, in a pod that holds
// slices.
func (a *Agent) inUse() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, u := range a.containers {
		if a.held[u.uid] != nil {
			return true
		}
	}
	return false
}

// stir has the processes of shares looked at now.
func (a *Agent) stir() {
	select {
	case a.stirred <- struct{}{}:
	default:
	}
}

// endUnseen ends containers whose first process is gone, though the runtime never
// said so: one that exits while the runtime lists its containers to a new hook
// can be on the list and its end told to nobody (seen with containerd 2.4, the
// agent killed among a hundred starting containers). Normally the runtime's word
// comes within milliseconds, so a container must have been dead at the look before,
// too; endUnseen returns those that are dead at this one.
func (a *Agent) endUnseen(proc string, before map[string]bool) map[string]bool {
	a.mu.Lock()
	pids := map[string]int{}
	for id, u := range a.containers {
		if u.hostPID != 0 {
			pids[id] = u.hostPID
		}
	}
	a.mu.Unlock()
	dead := map[string]bool{}
	for id, pid := range pids {
		if _, err := os.Stat(filepath.Join(proc, strconv.Itoa(pid))); !errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if before[id] {
			a.Log.Info("a container ended unseen", "id", id)
			a.Exited(id)
			continue
		}
		dead[id] = true
	}
	return dead
}

// look goes through all shares once and reports whether a charge waits to be
// taken off.
func (r *reaper) look() (waiting bool) {
	r.watchFiles()
	r.now = time.Now()
	processes := &processTable{groupsOf: r.groupsOf}
	seen := map[owner]bool{}
	known := newTruth()
	usages := map[shareKey]string{}
	for _, s := range r.shares() {
		usages[s.key()] = s.usage
		taken := 0
		u, err := region.ReadUsage(s.usage, len(s.cards))
		if err != nil {
			if !errors.Is(err, fs.ErrNotExist) {
				r.Log.Warn("a usage file can't be read", "error", err)
			}
			continue
		}
		if u.Damage&(region.DamageHeader|region.DamageShort) != 0 {
			if _, err := region.RestoreUsage(s.usage); err != nil {
				r.Log.Warn("a usage file that its container damaged can't be restored", "error", err)
			}
		}
		r.count(s, u, seen)
		for _, slot := range u.Slots {
			if !slot.Charged() {
				continue
			}
			o := s.owner(slot)
			gone, was := r.isGone(o, s, slot, u, processes)
			if !gone {
				delete(r.gone, o)
				continue
			}
			r.gone[o]++
			// Who holds on to its memory can do so for ever.
			waiting = waiting || r.gone[o] < reclaimSoonLooks
			// Twice, so that a slot that was being taken at the first look is
			// seen as what it became.
			if r.gone[o] < 2 || !r.freed(o, s, slot, u, was, known) {
				continue
			}
			err := region.ReclaimSlot(s.usage, slot)
			switch {
			case errors.Is(err, region.ErrSlotChanged):
			case err != nil:
				r.Log.Warn("the charge of a dead process can't be taken off", "error", err)
			default:
				taken++
			}
		}
		if taken > 0 {
			// A tenant can make this happen at every look.
			r.Log.Debug("took off the charge of dead processes", "uid", s.uid, "container", s.container, "processes", taken)
		}
	}
	r.mappings.ask(usages, r.stir)
	for o := range r.hostPID {
		if !seen[o] {
			delete(r.hostPID, o)
		}
	}
	for o := range r.lastPID {
		if !seen[o] {
			delete(r.lastPID, o)
		}
	}
	for o := range r.gone {
		if !seen[o] {
			delete(r.gone, o)
		}
	}
	for o := range r.refusals {
		if !seen[o] {
			delete(r.refusals, o)
		}
	}
	return waiting
}

func (s share) owner(slot region.Slot) owner {
	return owner{s.uid, s.container, slot.Index, slot.PID, slot.StartTicks, slot.Image}
}

// count adds what is new in a reading to the share's tallies.
func (r *reaper) count(s share, u region.Usage, seen map[owner]bool) {
	more := make([]tally, len(s.cards))
	for _, slot := range u.Slots {
		o := s.owner(slot)
		seen[o] = true
		last := r.refusals[o]
		now := make([]uint64, len(s.cards))
		for i, c := range slot.Cards {
			now[i] = c.Refusals
			if last == nil {
				more[i].refusals += c.Refusals
			} else if c.Refusals > last[i] {
				more[i].refusals += c.Refusals - last[i]
			}
			more[i].peakBytes = max(more[i].peakBytes, c.PeakBytes)
		}
		r.refusals[o] = now
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	t := r.tallies(s)
	for i := range t {
		t[i].refusals += more[i].refusals
		t[i].peakBytes = max(t[i].peakBytes, more[i].peakBytes, u.Total(i).UsedBytes)
	}
}

// tallies are a share's, by card; nil if it is gone. a.mu is held.
func (a *Agent) tallies(s share) []tally {
	h := a.held[s.uid]
	if h == nil {
		return nil
	}
	if h.tallies == nil {
		h.tallies = map[string][]tally{}
	}
	t := h.tallies[s.container]
	if len(t) != len(s.cards) {
		t = make([]tally, len(s.cards))
		h.tallies[s.container] = t
	}
	return t
}

// isGone reports whether a slot's owner has ended, or runs another program. was are
// then living processes that have been its owner, or may have been.
func (r *reaper) isGone(o owner, s share, slot region.Slot, u region.Usage, t *processTable) (gone bool, was []int) {
	if pid, ok := r.hostPID[o]; ok {
		p, err := region.ReadProcess(procRoot, pid)
		switch {
		case err == nil:
			switch r.standing(o, s, slot, u, p) {
			case ownerIs:
				return false, nil
			case ownerWas:
				if sure(slot) {
					return true, []int{pid} // no other process has its names
				}
			}
		case s.running && !errors.Is(err, os.ErrNotExist):
			return false, nil // it can't be read just now
		}
		delete(r.hostPID, o)
	}
	for _, p := range t.all() {
		is := r.standing(o, s, slot, u, p)
		if is == stranger {
			continue
		}
		if sure(slot) {
			r.lastPID[o] = p.HostPID
		}
		r.hostPID[o] = p.HostPID
		if is == ownerIs {
			return false, nil
		}
		was = append(was, p.HostPID)
	}
	if !s.running || len(was) > 0 {
		return true, was // the whole container is gone, or its processes are seen
	}
	if t.partial {
		return false, nil // it may be the one that can't be read
	}
	// No such process is seen. That counts only where this process can see the
	// container's others; without the node's PID namespace it sees none. An
	// owner of an earlier attempt has taken its namespace with it, so the
	// processes of this attempt count as well.
	for _, p := range t.all() {
		if slot.PIDNamespace != 0 && p.PIDNamespace == slot.PIDNamespace {
			return true, nil
		}
	}
	return t.hasProcessOf(s.ids), nil
}

func (r *reaper) occupants(uuid string) occupants {
	r.mu.Lock()
	door := r.hardware.door
	r.mu.Unlock()
	if door == nil {
		return occupants{unknown: true}
	}
	s, err := door.Occupancy(uuid)
	if err != nil {
		return occupants{unknown: true}
	}
	on := occupants{dead: map[int]bool{}, living: map[int]bool{}, usedBytes: s.UsedBytes}
	for _, p := range s.Processes {
		if hasEnded(p.PID) {
			on.dead[p.PID] = true
		} else {
			on.living[p.PID] = true
		}
	}
	return on
}

// processTable reads the node's processes once, if anyone asks.
type processTable struct {
	read      bool
	partial   bool // some processes couldn't be read
	processes []region.Process
	groups    []string // the cgroups of each process, once somebody asked
	groupsOf  func(pid int) (string, error)
}

// hasProcessOf reports whether a process of one of these containers is seen:
// one in a cgroup that is named after it.
func (t *processTable) hasProcessOf(ids []string) bool {
	if t.groups == nil {
		for _, p := range t.all() {
			groups, err := t.groupsOf(p.HostPID)
			if err != nil {
				groups = "" // it has just ended
			}
			t.groups = append(t.groups, groups)
		}
	}
	for _, group := range t.groups {
		for _, id := range ids {
			if strings.Contains(group, id) {
				return true
			}
		}
	}
	return false
}

func (t *processTable) all() []region.Process {
	if t.read {
		return t.processes
	}
	t.read = true
	entries, err := os.ReadDir(procRoot)
	if err != nil {
		t.partial = true
		return nil
	}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		p, err := region.ReadProcess(procRoot, pid)
		switch {
		case err == nil:
			t.processes = append(t.processes, p)
		case !errors.Is(err, os.ErrNotExist):
			t.partial = true
		}
	}
	return t.processes
}

// hasEnded reports whether a process has ended, whether its parent knows it or not yet. One that can't be read
// hasn't: what its slots hold would be given away.
func hasEnded(pid int) bool {
	p, err := region.ReadProcess(procRoot, pid)
	if err != nil {
		return errors.Is(err, os.ErrNotExist)
	}
	return p.Ended
}
