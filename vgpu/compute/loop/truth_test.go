package loop

import (
	"log/slog"
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
