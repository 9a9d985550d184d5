package sim

import (
	"math/rand/v2"
	"slices"

	"github.com/carve-gpu/carve/vgpu/compute"
)

// what a process waits for.
type waiting int

const (
	nothing  waiting = iota
	forRoom          // in the launch queue
	forDone          // that a sampled launch is done
	forAll           // that all work is done
	forGate          // the agent
	thinking         // nothing of the card's
)

// Program is what a process does.
type Program struct {
	// Means are the mean durations of its functions in nanoseconds; a launch takes
	// ±30 % of it.
	Means []int64
	// Streams are used in turn.
	Streams int
	// BurstWork is how much work a burst holds, ThinkTime how long it thinks after
	// waiting for it to end, both ±50 %. 0: it never stops.
	BurstWork, ThinkTime int64
	// SyncEach waits for each launch.
	SyncEach bool
	// IdleUntil is when it begins.
	IdleUntil int64
}

// tenant is one process with a share.
type tenant struct {
	program Program
	share   uint32
	elastic bool
	random  *rand.Rand

	// On the card.
	streams []stream
	queued  int
	busy    int64

	// In the process.
	account  account
	waits    waiting
	wake     int64
	next     kernel // to be launched; left 0: none drawn
	function int
	lane     int
	burst    int64 // left of this burst
	firstAsk int64 // when the launch in hand was asked for
	thinkAt  int64 // since when it thinks
	thought  int64 // all that it thought

	// At the agent.
	tenant  *compute.Tenant
	process *compute.Process
	used    int64
	truth   int64 // busy at the end of the last period
	charged int64
	history []compute.Point
}

// satisfied says whether a process that waited for the card is to be woken, and
// sets when.
func (t *tenant) satisfied() bool {
	switch t.waits {
	case forRoom:
		if t.queued >= depth {
			return false
		}
	case forDone:
		if !slices.ContainsFunc(t.streams, func(l stream) bool { return len(l.pending) > 0 && l.pending[0].end >= 0 }) {
			return false
		}
	case forAll:
		if t.queued > 0 {
			return false
		}
	default:
		return false
	}
	t.wake = 0 // the caller puts the time and the latency in
	return true
}

// draw picks the next launch.
func (t *tenant) draw() {
	t.function = t.random.IntN(len(t.program.Means))
	mean := float64(t.program.Means[t.function])
	t.next.left = max(int64(mean*(0.7+0.6*t.random.Float64())), 1)
	t.lane = (t.lane + 1) % len(t.streams)
}

// harvest pays for what is done, in the order in which it ended.
func (t *tenant) harvest(s *simulation) {
	for {
		var first *stream
		for i := range t.streams {
			l := &t.streams[i]
			if len(l.pending) > 0 && l.pending[0].end >= 0 && (first == nil || l.pending[0].end < first.pending[0].end) {
				first = l
			}
		}
		if first == nil {
			return
		}
		done := first.pending[0]
		first.pending = first.pending[1:]
		p := &s.pace
		switch s.design.Price {
		case ByEvents:
			p = &clocks
		case ByCount:
			_, n, _ := s.agent.Pace()
			p = t.account.divided(done, n)
		}
		t.account.done(done, p, s.now)
	}
}

// step is what a process does when it runs.
func (t *tenant) step(s *simulation) {
	if t.waits == thinking {
		t.thought += s.now - t.thinkAt
		t.waits = nothing
		if t.program.BurstWork > 0 {
			t.burst = int64(float64(t.program.BurstWork) * (0.5 + t.random.Float64()))
		}
	}
	t.harvest(s)
	if t.waits == forAll {
		t.waits = nothing
		if t.program.ThinkTime > 0 && t.burst <= 0 {
			t.waits, t.thinkAt = thinking, s.now
			t.wake = s.now + int64(float64(t.program.ThinkTime)*(0.5+t.random.Float64()))
			return
		}
	}
	t.waits = nothing
	if t.next.left == 0 {
		t.draw()
		t.firstAsk = s.now
	}
	if t.queued >= depth {
		t.waits, t.wake = forRoom, never
		return
	}
	sampled := &sample{function: t.function, begin: -1, end: -1}
	verdict, until := t.account.ask(t.function, s.now, &sampled.ticket)
	switch verdict {
	case sleeps:
		t.wake = until + s.overshoot()
		return
	case waitsGate:
		t.waits, t.wake = forGate, until+s.overshoot()
		return
	case waitsDone:
		t.waits, t.wake = forDone, never
		if t.satisfied() {
			t.wake = s.now + s.latency()
		}
		return
	}
	lane := &t.streams[t.lane]
	if sampled.ticket.sampled {
		t.next.sample = sampled
		lane.pending = append(lane.pending, sampled)
	}
	if t.queued == 0 {
		s.card.runnable++
	}
	t.queued++
	t.burst -= t.next.left
	lane.push(t.next)
	t.next = kernel{}
	if s.waits != nil {
		*s.waits = append(*s.waits, s.now-t.firstAsk)
	}
	if t.program.SyncEach || t.program.BurstWork > 0 && t.burst <= 0 {
		t.waits, t.wake = forAll, never
		return
	}
	t.wake = s.now + 2500 + t.random.Int64N(1500)
}

// published is what the agent sees.
func (t *tenant) published() compute.Counters {
	c := &t.account.credit
	return compute.Counters{
		Charged: int64(c.charged_ns), Since: int64(c.since), Committed: int64(c.committed_ns),
		Credit: int64(c.credit_ns), CreditAt: int64(c.refilled_at), Waiting: bool(c.waiting),
	}
}
