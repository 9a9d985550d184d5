package compute

import "time"

const (
	// longKernel is the estimate from which a launch that runs counts by its progress.
	longKernel = int64(2 * time.Millisecond)
	// mostSettled is settled at a time, either way.
	mostSettled = int64(250 * time.Millisecond)
)

// ledger is what a process paid more than it used, and has not been given back.
type ledger struct {
	known      bool // a first truth was read
	paid, used int64
	owed       int64
}

// Truth settles the account of a process against what the driver says that it used
// since some fixed moment, in nanoseconds, read now: after Tick, with Now as read
// at the same instant. Truth that comes late is fine, since only differences count.
func (c *Card) Truth(p *Process, now, used int64) {
	paid := p.Now.Charged + c.progress(p, now)
	if c.config.Mode != Credit {
		paid = p.turn.charged
	}
	l := &p.ledger
	if !l.known {
		l.known, l.paid, l.used = true, paid, used
		return
	}
	dPaid, dUsed := paid-l.paid, used-l.used
	l.paid, l.used = paid, used
	p.turn.scale(dPaid, dUsed)
	l.owed += dPaid - dUsed
	settled := min(max(int64(c.config.Gain*float64(l.owed)), -mostSettled), mostSettled)
	l.owed -= settled
	p.Terms.Correction += settled
	if c.config.Mode != Credit {
		p.turn.have += settled
	}
}

// Unsettled takes what a process paid since its last truth for right: the driver's word
// on that time is missing. The next truth is compared with this moment.
func (p *Process) Unsettled() { p.ledger.known = false }

// Anew is for when its card is divided in another way from now on: what the process has
// and owes of turns is of the way before.
func (p *Process) Anew() {
	p.turn = account{}
	p.Unsettled()
}

// progress is what a process will have to pay for what ran already: it publishes
// since when its unpaid work can have run, and nobody in it may be there to look.
func (c *Card) progress(p *Process, now int64) int64 {
	if p.Now.Since == 0 || p.Now.Committed <= longKernel {
		return 0
	}
	return min(max(c.pace.At(now)-c.pace.At(p.Now.Since), 0), p.Now.Committed)
}

// Used turns a driver's utilization into time: percent, rounded down, of a period.
// What the rounding took is half a percent on average; a process that was idle
// used nothing.
func Used(percent int, period int64, idle bool) int64 {
	if idle && percent == 0 {
		return 0
	}
	return (int64(2*percent) + 1) * period / 200
}
