package sim

// #include "credit.h"
import "C"

import (
	"math/rand/v2"
	"slices"

	"github.com/carve-gpu/carve/vgpu/compute"
)

// Units of time.
const (
	Microsecond = int64(1000)
	Millisecond = 1000 * Microsecond
	Second      = 1000 * Millisecond
)

// Member is a tenant of a run.
type Member struct {
	SharePPM uint32
	Elastic  bool
	// Rest is one without a share of its own; it is elastic.
	Rest    bool
	Program Program
}

// Window is what was seen of one tenant between two moments.
type Window struct {
	Busy, Demanded, Length int64
}

// Run is what was seen of all tenants.
type Run struct {
	// Windows are by tenant, then by window.
	Windows [][]Window
	// Waits are how long launches were held back, where asked for.
	Waits []int64
	// Returned is, for each tenant that began late, how long after its beginning it got
	// its share; -1: it didn't begin late.
	Returned []int64
}

type simulation struct {
	design Design
	random *rand.Rand
	now    int64
	card   card
	pace   pace
	agent  *compute.Card
	waits  *[]int64

	periods []period // of truth, published late
}

// period is the driver's word on one period.
type period struct {
	readable int64
	percent  []int
}

func (s *simulation) latency() int64 { return 8*Microsecond + s.random.Int64N(12*Microsecond) }

func (s *simulation) overshoot() int64 {
	return int64(s.random.ExpFloat64() * float64(s.design.Overshoot))
}

// Simulate runs members under a design for as long as the last window needs: each
// Length long, from From on.
func Simulate(design Design, members []Member, seed uint64, from, length int64, windows int, wantWaits bool) Run {
	s := &simulation{design: design, random: rand.New(rand.NewPCG(seed, 77))}
	s.agent = compute.NewCard(design.Agent)
	s.card = card{quantum: design.Quantum, switchCost: design.Switch}
	var run Run
	if wantWaits {
		s.waits = &run.Waits
	}
	for i, m := range members {
		t := &tenant{program: m.Program, share: m.SharePPM, elastic: m.Elastic, random: rand.New(rand.NewPCG(seed, uint64(i)))}
		t.streams = make([]stream, max(m.Program.Streams, 1))
		t.account.costs = make([]C.struct_carve_cost, len(m.Program.Means))
		t.process = &compute.Process{}
		t.tenant = &compute.Tenant{SharePPM: m.SharePPM, Elastic: m.Elastic, Rest: m.Rest, Processes: []*compute.Process{t.process}}
		t.wake = m.Program.IdleUntil + t.random.Int64N(Millisecond)
		t.waits, t.thinkAt = thinking, 0
		s.agent.Tenants = append(s.agent.Tenants, t.tenant)
		s.card.tenants = append(s.card.tenants, t)
	}
	run.Windows = make([][]Window, len(members))
	s.tick()
	ticks, truths, edge := s.period(), design.TruthEvery, from
	at := make([]Window, len(members))
	for n := 0; ; {
		next := min(ticks, truths, edge)
		for _, t := range s.card.tenants {
			next = min(next, t.wake)
		}
		next = max(next, s.now)
		s.card.advance(next)
		s.now = s.card.now
		for _, t := range s.card.tenants {
			if t.wake == 0 && t.waits != nothing {
				t.wake = s.now + s.latency()
			}
		}
		if s.now < next {
			continue
		}
		for _, t := range s.card.tenants {
			if t.wake <= s.now {
				t.step(s)
			}
		}
		if truths <= s.now {
			s.truth()
			truths += design.TruthEvery
		}
		if ticks <= s.now {
			ticks = s.now + s.period()
			if s.tick() {
				ticks = s.now + 200*Microsecond
			}
			s.note()
		}
		if edge <= s.now {
			for i, t := range s.card.tenants {
				seen := Window{Busy: t.busy, Demanded: s.now - t.idle(s.now), Length: s.now}
				if n > 0 {
					run.Windows[i] = append(run.Windows[i], Window{seen.Busy - at[i].Busy, seen.Demanded - at[i].Demanded, seen.Length - at[i].Length})
				}
				at[i] = seen
			}
			if n == windows {
				for _, t := range s.card.tenants {
					run.Returned = append(run.Returned, t.returned())
				}
				return run
			}
			n++
			edge += length
		}
	}
}

// idle is how long the process wanted nothing of the card.
func (t *tenant) idle(now int64) int64 {
	if t.waits == thinking {
		return t.thought + now - t.thinkAt
	}
	return t.thought
}

func (s *simulation) period() int64 {
	return s.design.TickLeast + s.random.Int64N(s.design.TickMost-s.design.TickLeast+1)
}

// tick is the agent's look at the card.
func (s *simulation) tick() bool {
	for _, t := range s.card.tenants {
		t.process.Now = t.published()
	}
	again := s.agent.Tick(s.now)
	for len(s.periods) > 0 && s.periods[0].readable <= s.now {
		for i, t := range s.card.tenants {
			c := t.process.Now
			idle := c.Charged == t.charged && c.Since == 0
			t.charged = c.Charged
			t.used += compute.Used(s.periods[0].percent[i], s.design.TruthEvery, idle)
			if !s.design.Agent.NoTruth {
				s.agent.Truth(t.process, s.now, t.used)
			}
		}
		s.periods = s.periods[1:]
	}
	newest, contexts, most := s.agent.Pace()
	s.pace.publish(newest.At, newest.Value, contexts, most)
	for _, t := range s.card.tenants {
		terms := t.process.Terms
		opened := t.waits == forGate && terms.Gate != compute.Shut
		t.account.terms = C.struct_carve_terms{
			share_ppm: C.uint32_t(terms.SharePPM), gate: C.uint32_t(terms.Gate), elastic: C.bool(t.elastic),
			borrow: C.bool(terms.Borrow), beside: C.bool(most > 1), correction: C.int64_t(terms.Correction),
			truth_ns: C.uint64_t(s.design.TruthEvery), ahead_ns: C.int64_t(s.design.Ahead),
		}
		if opened {
			t.wake = min(t.wake, s.now+s.latency()+40*Microsecond)
		}
	}
	return again
}

// truth closes a period of the driver's: whole percents, and late.
func (s *simulation) truth() {
	p := period{readable: s.now + s.design.TruthLate + s.random.Int64N(s.design.TruthSpread+1)}
	for _, t := range s.card.tenants {
		busy := float64(t.busy-t.truth) * (1 + s.design.TruthNoise*s.random.NormFloat64())
		p.percent = append(p.percent, min(max(int(busy*100/float64(s.design.TruthEvery)), 0), 100))
		t.truth = t.busy
	}
	s.periods = append(s.periods, p)
}

// note keeps what tenants that begin late had got, for the time of returned.
func (s *simulation) note() {
	for _, t := range s.card.tenants {
		if t.program.IdleUntil > 0 && s.now >= t.program.IdleUntil && s.now < t.program.IdleUntil+Second {
			t.history = append(t.history, compute.Point{At: s.now, Value: t.busy})
		}
	}
}

// returned is how long after its beginning a late tenant had its rate: from then on it
// got 95 % of its share, less a kernel, for a tenth of a second. -1: it wasn't late.
func (t *tenant) returned() int64 {
	const span = 100 * Millisecond
	if len(t.history) == 0 {
		return -1
	}
	due := 0.95*float64(span)*float64(t.share)/1e6 - float64(slices.Max(t.program.Means))
	ahead := 0
	for _, from := range t.history {
		for ahead < len(t.history) && t.history[ahead].At < from.At+span {
			ahead++
		}
		if ahead == len(t.history) {
			break
		}
		if float64(t.history[ahead].Value-from.Value) >= due {
			return from.At - t.program.IdleUntil
		}
	}
	return Second
}
