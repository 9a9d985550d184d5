package loop

import (
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/carve-gpu/carve/vgpu/compute"
	"github.com/carve-gpu/carve/vgpu/gpu"
	"github.com/carve-gpu/carve/vgpu/region"
)

const ms = int64(time.Millisecond)

// judged is a card with one process that pays 100 ms in each period, of which the driver
// says that it used half.
type judged struct {
	*Loop
	card    *card
	process *process
	now     int64
}

func newJudged() *judged {
	owner := region.Owner{Index: 0, PID: 7, StartTicks: 3}
	m := &member{seat: &seat{}, tenant: &compute.Tenant{SharePPM: 500_000}, byName: map[region.Owner]*process{}}
	p := &process{owner: owner}
	m.byName[owner] = p
	m.tenant.Processes = []*compute.Process{&p.Process}
	c := newCard("GPU-1", compute.Credit)
	c.members = []*member{m}
	c.division.Tenants = []*compute.Tenant{m.tenant}
	l := New(Config{
		Log: slog.New(slog.DiscardHandler),
		Process: func(pid int) (region.Process, Key, bool) {
			return region.Process{HostPID: pid, PID: 7, StartTicks: 3}, Key{}, pid == 70
		},
	})
	return &judged{Loop: l, card: c, process: p, now: ms}
}

// period lets so many milliseconds of the driver's clock pass, of which the process
// paid 60 % and used percent.
func (j *judged) period(span int64, percent int) {
	j.now += span * ms
	j.process.Now.Charged += span * ms * 6 / 10
	j.process.Now.Since = j.now
	j.card.division.Tick(j.now)
	j.take(j.card, j.now, answer{Utilization: gpu.Utilization{At: j.card.truth.at + uint64(span*1000), Percent: map[int]int{70: percent, 99: 5}}})
}

func (j *judged) corrections(periods int, span int64, percent int) int64 {
	before := j.process.Terms.Correction
	for range periods {
		j.period(span, percent)
	}
	return j.process.Terms.Correction - before
}

func near(got, want int64) bool { return got > want*8/10 && got < want*12/10 }

func TestAccountsFollowTheDriver(t *testing.T) {
	j := newJudged()
	j.card.truth.at = 1_000_000
	j.period(100, 30)
	// Paid 60 of 100, used 30 (and a half, for what rounding took).
	if got := j.corrections(20, 100, 30); !near(got, 20*100*ms*295/1000) {
		t.Errorf("of 600 ms that were paid too much %d ms came back", got/ms)
	}
	if got := j.corrections(20, 100, 59); got > 40*ms {
		t.Errorf("an account that is right was corrected by %d ms", got/ms)
	}
}

// A clock that is set back, or a strange period, costs a few seconds of truth, not all
// of it.
func TestADriverWhoseClockIsSet(t *testing.T) {
	for name, disturb := range map[string]func(j *judged){
		"back by an hour": func(j *judged) {
			real := j.card.truth.at - 3_600_000_000
			for range 60 {
				j.now += 100 * ms
				j.process.Now.Charged += 60 * ms
				j.process.Now.Since = j.now
				j.card.division.Tick(j.now)
				real += 100_000
				u := gpu.Utilization{At: j.card.truth.at, Percent: map[int]int{}}
				if real > j.card.truth.at {
					u = gpu.Utilization{At: real, Percent: map[int]int{70: 30}}
				}
				j.take(j.card, j.now, answer{Utilization: u})
			}
		},
		"forward by an hour":     func(j *judged) { j.card.truth.at += 3_600_000_000; j.period(100, 30) },
		"a short period":         func(j *judged) { j.period(51, 30); j.corrections(20, 100, 30) },
		"nothing to do for long": func(j *judged) { j.period(5000, 1) },
		"it failed for a while": func(j *judged) {
			j.take(j.card, j.now, answer{err: errFailed})
			j.now += 3000 * ms
		},
	} {
		t.Run(name, func(t *testing.T) {
			j := newJudged()
			j.card.truth.at = 10_000_000_000
			j.corrections(20, 100, 30)
			disturb(j)
			j.corrections(2, 100, 30)
			if got := j.corrections(20, 100, 30); !near(got, 20*100*ms*295/1000) {
				t.Errorf("afterwards %d ms of 600 came back", got/ms)
			}
		})
	}
}

type failure struct{}

func (failure) Error() string { return "it failed" }

var errFailed error = failure{}

// said is a period of which the driver says something else.
func (j *judged) said(span int64, paid int64, percent map[int]int) {
	j.now += span * ms
	j.process.Now.Charged += span * ms * paid / 100
	j.process.Now.Since = j.now
	j.card.division.Tick(j.now)
	j.take(j.card, j.now, answer{Utilization: gpu.Utilization{At: j.card.truth.at + uint64(span*1000), Percent: percent}})
}

// An agent that doesn't see the node's pids takes nobody for idle: nothing is given back,
// and the card's time is given in turns until the processes are found.
func TestPidsThatAreNotFound(t *testing.T) {
	j := newJudged()
	j.card.truth.at = 10_000_000_000
	before := j.process.Terms.Correction
	for n := range 4 {
		j.said(100, 60, map[int]int{4711: 50, 4712: 40})
		if got := j.process.Terms.Correction - before; got != 0 {
			t.Fatalf("after %d periods %d ms were given back", n+1, got/ms)
		}
	}
	if j.card.mode != compute.Drained || !strings.Contains(j.Fault("GPU-1"), "hostPID") {
		t.Errorf("mode %v, %q", j.card.mode, j.Fault("GPU-1"))
	}
	if _, known := j.Used(Key{}, "GPU-1"); known {
		t.Error("what is used is said to be known")
	}
	for range 3 {
		j.said(100, 60, map[int]int{70: 30, 4712: 40})
	}
	if j.card.mode != compute.Credit || j.Fault("GPU-1") != "" {
		t.Errorf("found again: mode %v, %q", j.card.mode, j.Fault("GPU-1"))
	}
	if got := j.corrections(20, 100, 30); !near(got, 20*100*ms*295/1000) {
		t.Errorf("then %d ms of 600 came back", got/ms)
	}
}

// A stranger's program beside shares that do nothing, or little, is nothing of that kind.
func TestAStrangerOnTheCard(t *testing.T) {
	j := newJudged()
	j.card.truth.at = 10_000_000_000
	for range 30 {
		j.said(100, 0, map[int]int{4711: 90})
	}
	for range 30 {
		j.said(100, 60, map[int]int{70: 30, 4711: 60})
	}
	if j.card.mode != compute.Credit || j.Fault("GPU-1") != "" {
		t.Errorf("mode %v, %q", j.card.mode, j.Fault("GPU-1"))
	}
}

// Of a card in MIG mode drivers don't say what processes use. When it is out of it they
// do again.
func TestMIGMode(t *testing.T) {
	j := newJudged()
	j.card.truth.at = 10_000_000_000
	j.corrections(5, 100, 30)
	j.take(j.card, j.now, answer{err: fmt.Errorf("read: %w", gpu.ErrNotSupported)})
	if j.card.mode != compute.Drained || j.Fault("GPU-1") == "" {
		t.Errorf("mode %v, %q", j.card.mode, j.Fault("GPU-1"))
	}
	before := j.process.Terms.Correction
	j.now += 40 * int64(time.Second)
	j.card.truth.at = 60_000_000_000
	for range 3 {
		j.said(100, 60, map[int]int{70: 30})
	}
	if j.card.mode != compute.Credit || j.Fault("GPU-1") != "" {
		t.Errorf("out of it: mode %v, %q", j.card.mode, j.Fault("GPU-1"))
	}
	if got := j.process.Terms.Correction - before; got > 70*ms || got < 0 {
		t.Errorf("for the time in between %d ms were given back", got/ms)
	}
}

// A driver that has nothing to say of processes that work doesn't reach the agent.
func TestADriverThatSaysNothing(t *testing.T) {
	j := newJudged()
	j.meter.keep([]Share{{Cards: []CardShare{{UUID: "GPU-1"}}}})
	silent := func(seconds int64, paid int64) {
		for range seconds * 10 {
			j.now += 100 * ms
			j.process.Now.Charged += paid * ms
			j.process.Now.Since = j.now
			j.card.division.Tick(j.now)
			j.take(j.card, j.now, answer{Utilization: gpu.Utilization{At: j.card.truth.at, Percent: map[int]int{}}})
		}
	}
	silent(30, 1)
	if j.card.mode != compute.Credit {
		t.Error("a program that does next to nothing needn't be told of")
	}
	silent(15, 60)
	if j.card.mode != compute.Drained || !strings.Contains(j.Fault("GPU-1"), "nothing") {
		t.Errorf("mode %v, %q", j.card.mode, j.Fault("GPU-1"))
	}
	if u, ok := j.Used(Key{}, "GPU-1"); ok {
		t.Errorf("nobody knows what is used, and it is said to be %+v", u)
	}
}

// What the driver corrected while credit divided the card is no debt of turns: a share
// that was told the truth for long would wait for minutes.
func TestTurnsBeginWithoutDebt(t *testing.T) {
	j := newJudged()
	j.card.truth.at = 1_000_000
	for range 300 {
		j.period(100, 99) // of which it pays 60
	}
	if j.process.Terms.Correction > -5_000*ms {
		t.Fatalf("corrected by %d ms", j.process.Terms.Correction/ms)
	}
	j.card.divide(compute.Config{Mode: compute.Drained, NoTruth: true})
	j.process.Now.Since, j.process.Now.Waiting = 0, true
	for range 100 {
		j.now += 5 * ms
		if j.card.division.Tick(j.now); j.process.Terms.Gate == compute.Turn {
			return
		}
	}
	t.Error("it has no turn within half a second")
}
