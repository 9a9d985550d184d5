package agent

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/vgpu/gpu"
	"github.com/carve-gpu/carve/vgpu/region"
)

// A container can use memory that its usage file says nothing of: a program that
// calls past the front library, a call that isn't hooked, code that the driver
// loads later. The residual is what the driver says that the container's processes
// use, less what their slots say. It is written into the limits file, where the
// library counts it as charged, so that all that the container has together stays
// within its limit as soon as it was seen, and new requests are refused until then.
//
// It must not refuse what a right count would grant. So:
//
//   - slots and driver are compared only where a slot says the same before and
//     after the driver was asked. A slot that doesn't stand still counts with the
//     most that it can have held, and can't raise what is published by being looked
//     at in an unlucky moment;
//   - what is published is the least of three samples in a row, a second apart. It
//     rises when all three show it, three seconds after memory was taken, and
//     falls with the first that doesn't;
//   - a process that the driver doesn't list (it has no context yet, or belongs to
//     another PID namespace than the agent can see) is left out, and so are its
//     slots; so is one that has ended: the driver is about to take its memory back,
//     and its slot stays charged until then;
//   - managed memory isn't in the driver's figure of a process, so it is left out of
//     both, charged or not. It is in a layer's figure of a container; there what is
//     charged counts, and where the grant leaves managed memory uncharged (a policy, or
//     a share that is oversold) that as well: all of it may be on the card;
//   - memory that two processes share can be in the figures of both. The sum of all
//     processes is more than the card's own figure then, and the difference isn't
//     held against anyone.
const (
	residualEvery   = time.Second
	residualSamples = 3
	// residualTries is how often slots that don't stand still are looked at again
	// within one sample.
	residualTries = 4
)

// holder is a living process of a share that the driver lists on a card.
type holder struct {
	region.Process
	bytes uint64
}

// span is a figure that isn't known better than to lie between two others, both of
// them included.
type span struct{ low, high uint64 }

func (s span) exact() bool { return s.low == s.high }

// near is the value of a span that is nearest to another one.
func (s span) near(v uint64) uint64 { return min(max(v, s.low), s.high) }

// less takes what slots say off what the driver says, never below zero.
func less(a, b uint64) uint64 {
	if b > a {
		return 0
	}
	return a - b
}

// slotKey is what makes a slot the same at two looks.
type slotKey struct {
	index              int
	pid                uint32
	start, space, exec uint64
}

func keyOf(s region.Slot) slotKey {
	return slotKey{s.Index, s.PID, s.StartTicks, s.PIDNamespace, s.Image}
}

// still reports whether a slot's charge on a card was the same all the while
// between two looks.
func still(before, after region.CardUsage) bool {
	return before.Sequence == after.Sequence && before.UsedBytes == after.UsedBytes &&
		before.PendingBytes == after.PendingBytes && before.ManagedBytes == after.ManagedBytes &&
		before.UnchargedBytes == after.UnchargedBytes
}

// counting says which memory of the slots is in a figure that they are compared with.
type counting uint8

const (
	// unmanaged is all but managed memory.
	unmanaged counting = iota
	// chargedOnly is all that is charged.
	chargedOnly
	// withUncharged is managed memory besides that isn't charged.
	withUncharged
)

// of is what a slot holds of it.
func (n counting) of(c region.CardUsage) uint64 {
	all := addUp(c.UsedBytes, c.PendingBytes)
	switch n {
	case unmanaged:
		return less(all, c.ManagedBytes)
	case withUncharged:
		return addUp(all, c.UnchargedBytes)
	}
	return all
}

// addUp adds what a container says, which may be anything.
func addUp(a, b uint64) uint64 {
	if a+b < a {
		return math.MaxUint64
	}
	return a + b
}

// charged says what slots held on a card at a moment between two looks. A process of
// the container can't have had more charged than the limit, however its charge moved.
func charged(before, after []region.Slot, card int, limit uint64, n counting) span {
	was := map[slotKey]region.CardUsage{}
	for _, s := range before {
		was[keyOf(s)] = s.Cards[card]
	}
	var sure, moving, uncharged uint64
	unsure := false
	for _, s := range after {
		c := s.Cards[card]
		b, known := was[keyOf(s)]
		delete(was, keyOf(s))
		switch {
		case known && still(b, c):
			sure = addUp(sure, n.of(c))
		case !known && c.UsedBytes == 0 && c.PendingBytes == 0 && c.PeakBytes == 0 && c.UnchargedBytes == 0:
			// It has just been taken, and nothing was charged to it.
		default:
			unsure = true
			moving = addUp(moving, max(c.PeakBytes, addUp(c.UsedBytes, c.PendingBytes), addUp(b.UsedBytes, b.PendingBytes)))
			uncharged = addUp(uncharged, max(b.UnchargedBytes, c.UnchargedBytes))
		}
	}
	for _, b := range was {
		if b.UsedBytes > 0 || b.PendingBytes > 0 || b.UnchargedBytes > 0 {
			unsure = true
			moving = addUp(moving, addUp(b.UsedBytes, b.PendingBytes))
			uncharged = addUp(uncharged, b.UnchargedBytes)
		}
	}
	if !unsure {
		return span{sure, sure}
	}
	high := addUp(sure, min(moving, less(limit, sure)))
	if n == withUncharged {
		high = addUp(addUp(sure, min(moving, limit)), uncharged)
	}
	return span{sure, high}
}

// owned are the slots that one of the processes took.
func owned(slots []region.Slot, by []holder) []region.Slot {
	var out []region.Slot
	for _, s := range slots {
		if slices.ContainsFunc(by, func(h holder) bool { return h.Owns(s) }) {
			out = append(out, s)
		}
	}
	return out
}

// beyond is what processes hold on a card beyond their slots. doubled is what the
// driver may have counted twice.
func beyond(before, after region.Usage, card int, holders []holder, limit, doubled uint64) span {
	var sum, most uint64
	for _, h := range holders {
		sum += h.bytes
		most = max(most, h.bytes)
	}
	// A process' own figure has nothing twice.
	sum = max(most, less(sum, doubled))
	c := charged(owned(before.Slots, holders), owned(after.Slots, holders), card, limit, unmanaged)
	return span{less(sum, c.high), less(sum, c.low)}
}

// beyondAll is the same where a layer says what the whole container holds. That has
// what its dead processes held, until the driver has taken it back, as their slots
// have; and it may have managed memory, so all that is charged counts, and what isn't
// where the grant allows for that (beside).
func beyondAll(before, after region.Usage, card int, used, limit uint64, beside bool) span {
	n := chargedOnly
	if beside {
		n = withUncharged
	}
	c := charged(before.Slots, after.Slots, card, limit, n)
	return span{less(used, c.high), less(used, c.low)}
}

// history is what was seen of one share on one card.
type history struct {
	// last are the samples before this one, the latest last.
	last      []uint64
	published uint64
}

// add takes a sample in and returns what is to be published.
func (h *history) add(s span) uint64 {
	h.last = append(h.last, s.near(h.published))
	if len(h.last) > residualSamples {
		h.last = h.last[1:]
	}
	if len(h.last) < residualSamples {
		// What an earlier process of the agent published holds until it is seen
		// to be too much.
		return min(h.published, slices.Min(h.last))
	}
	return slices.Min(h.last)
}

// samples are what the residual needs of the past. It belongs to the goroutine of
// the reaper.
type samples struct {
	histories map[shareKey][]history // by card
	// contexts are the processes that had nothing but a context at the sample
	// before, and how much that was.
	contexts map[owner]uint64
	next     time.Time
}

// sampleResiduals looks at all shares that containers run with, and publishes what
// they hold beyond their slots.
func (r *reaper) sampleResiduals(now time.Time) {
	all := r.shares()
	r.dropHistories(all)
	for _, s := range all {
		if !s.running {
			// At once: the next container with this share starts with nothing.
			r.forgive(s)
		}
	}
	if now.Before(r.samples.next) {
		return
	}
	r.samples.next = now.Add(residualEvery)
	on := map[string][]share{}
	for _, s := range all {
		if len(s.ids) == 0 {
			continue // it doesn't run, or the runtime hasn't told which processes are its own
		}
		for _, c := range s.cards {
			on[c] = append(on[c], s)
		}
	}
	contexts := map[owner]uint64{}
	for uuid, shares := range on {
		r.sampleCard(uuid, shares, contexts)
	}
	r.samples.contexts = contexts
}

// sampleCard compares the shares of one card with the driver.
func (r *reaper) sampleCard(uuid string, shares []share, contexts map[owner]uint64) {
	r.mu.Lock()
	door := r.hardware.door
	r.mu.Unlock()
	if door == nil {
		return
	}
	for try := 1; len(shares) > 0; try++ {
		before := r.readAll(shares)
		seen, err := door.Occupancy(uuid)
		if err != nil {
			// What is published stays: nobody can tell better.
			r.Log.Debug("a card can't be sampled; what containers hold past their library isn't known", "card", uuid, "error", err)
			return
		}
		figures := make([]uint64, len(shares))
		counted := make([]bool, len(shares))
		for i, s := range shares {
			figures[i], counted[i] = r.usedByLayer(s, uuid)
		}
		after := r.readAll(shares)
		holders := r.holders(seen.Processes, shares)
		doubled := twice(seen)
		var again []share
		for i, s := range shares {
			if before[i] == nil || after[i] == nil {
				continue
			}
			card := slices.Index(s.cards, uuid)
			var h span
			if counted[i] {
				h = beyondAll(*before[i], *after[i], card, figures[i], s.limits[card], s.beside[card])
			} else {
				h = beyond(*before[i], *after[i], card, holders[i], s.limits[card], doubled)
			}
			if !h.exact() && try < residualTries {
				again = append(again, s)
				continue
			}
			r.publish(s, card, h, after[i].Total(card).UsedBytes)
			r.learnContexts(s, card, *before[i], *after[i], holders[i], contexts)
		}
		shares = again
	}
}

// twice is how much more the driver says of a card's processes than of the card.
func twice(s gpu.Sample) uint64 {
	var sum uint64
	for _, p := range s.Processes {
		sum += p.UsedBytes
	}
	return less(sum, s.UsedBytes)
}

func (r *reaper) readAll(shares []share) []*region.Usage {
	out := make([]*region.Usage, len(shares))
	for i, s := range shares {
		// The reaper says what is wrong with a file.
		if u, err := region.ReadUsage(s.usage, len(s.cards)); err == nil {
			out[i] = &u
		}
	}
	return out
}

// holders are the living processes of each share among those that the driver
// lists.
func (r *reaper) holders(listed []gpu.Process, shares []share) [][]holder {
	out := make([][]holder, len(shares))
	for _, p := range listed {
		if p.UsedBytes == 0 {
			continue // the driver doesn't say
		}
		groups, err := r.groupsOf(p.PID)
		if err != nil {
			continue // it has ended
		}
		at := slices.IndexFunc(shares, func(s share) bool { return s.names(groups) })
		if at < 0 {
			continue // not a share's
		}
		process, err := region.ReadProcess(procRoot, p.PID)
		if err != nil || process.Ended {
			continue
		}
		out[at] = append(out[at], holder{process, p.UsedBytes})
	}
	return out
}

// cgroupsOf are the cgroups of a process, a line for each hierarchy.
func cgroupsOf(pid int) (string, error) {
	b, err := os.ReadFile(filepath.Join(procRoot, strconv.Itoa(pid), "cgroup"))
	return string(b), err
}

// names reports whether a process' list of cgroups has one of a container of the
// share.
func (s share) names(groups string) bool {
	return slices.ContainsFunc(s.ids, func(id string) bool { return id != "" && strings.Contains(groups, id) })
}

// dropHistories forgets shares that are gone.
func (r *reaper) dropHistories(all []share) {
	kept := map[shareKey][]history{}
	for _, s := range all {
		if h := r.samples.histories[s.key()]; h != nil {
			kept[s.key()] = h
		}
	}
	r.samples.histories = kept
}

// history finds what is known of a share on its cards; of one that wasn't sampled
// before, what the limits file has.
func (r *reaper) history(s share) []history {
	if h := r.samples.histories[s.key()]; len(h) == len(s.cards) {
		return h
	}
	h := make([]history, len(s.cards))
	if l, err := region.ReadLimits(r.files.limits(s.uid, s.container)); err == nil {
		for i := range min(len(h), len(l.Live)) {
			h[i].published = l.Live[i].ResidualBytes
		}
	}
	r.samples.histories[s.key()] = h
	return h
}

// publish takes a sample in and tells the library.
func (r *reaper) publish(s share, card int, seen span, charged uint64) {
	h := &r.history(s)[card]
	r.put(s, card, h, h.add(seen), charged)
}

// forgive starts a share anew on all its cards.
func (r *reaper) forgive(s share) {
	for card := range s.cards {
		h := &r.history(s)[card]
		h.last = nil
		r.put(s, card, h, 0, 0)
	}
}

// put publishes a figure. charged is what the slots say beside it.
func (r *reaper) put(s share, card int, h *history, bytes, charged uint64) {
	if bytes != h.published {
		f, err := region.OpenLimits(r.files.limits(s.uid, s.container))
		if err == nil {
			err = f.SetResidual(card, bytes)
			f.Close()
		}
		if err != nil {
			r.Log.Warn("what a container holds past its library can't be published", "uid", s.uid, "container", s.container, "error", err)
			return
		}
		h.published = bytes
	}
	r.noteResidual(s, card, bytes, charged)
}

const (
	// tellLeastMiB is the least residual that the report tells: the driver loads
	// code as it is called, and that is nobody's concern.
	tellLeastMiB = 64
	// tellApart is how long the report leaves a figure that has become too large as
	// it is, so that a program can't have it written again and again.
	tellApart = time.Minute
)

// told is a residual in MiB as the report says it: as it was when it last grew by
// half or shrank to half. age is how old the last figure is.
func told(was, now int64, age time.Duration) int64 {
	if now < tellLeastMiB {
		now = 0
	}
	if now > was+was/2 || now < was-was/2 && age >= tellApart {
		return now
	}
	return was
}

// toldResidual is what the report says of a container's residual on its card i.
func (h *holding) toldResidual(container string, i int) int64 {
	if t := h.tallies[container]; i < len(t) {
		return t[i].toldMiB
	}
	return 0
}

// noteResidual remembers what was published, for people. It goes into the report,
// and on the pod once it has the container beyond its limit.
func (r *reaper) noteResidual(s share, card int, bytes, charged uint64) {
	now := time.Now()
	r.mu.Lock()
	all := r.tallies(s)
	if all == nil {
		r.mu.Unlock()
		return
	}
	t := &all[card]
	t.residualBytes = bytes
	mib := told(t.toldMiB, int64((bytes+api.MiB-1)/api.MiB), now.Sub(t.toldAt))
	changed := mib != t.toldMiB
	if changed {
		t.toldMiB, t.toldAt = mib, now
	}
	over := mib > 0 && charged+bytes > s.limits[card]
	say := over && !t.overSaid
	t.overSaid = mib > 0 && (t.overSaid || over)
	p := r.named(s.uid)
	r.mu.Unlock()
	if changed {
		r.report()
	}
	if say {
		message := fmt.Sprintf("container %s holds %d MiB of card %s, its limit is %d MiB: %d MiB of that were taken past carve's library (by a driver library of its own, or a call that isn't counted); nothing more is granted to it until it is below",
			s.container, (charged+bytes)/api.MiB, s.cards[card], s.limits[card]/api.MiB, bytes/api.MiB)
		r.Log.Warn("a container holds more than its limit", "pod", p.namespace+"/"+p.name, "message", message)
		r.event(p, corev1.EventTypeWarning, reasonOverLimit, message)
	}
}
