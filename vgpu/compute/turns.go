package compute

import "time"

const (
	// mostSaved is what a process saves up while it waits for its turn, idleSaved
	// what one without work does.
	mostSaved = int64(300 * time.Millisecond)
	idleSaved = int64(20 * time.Millisecond)
	// mostOwed is what an elastic share owes after borrowing, as the time in which
	// it earns that: the same for large and small shares, or the small ones would
	// pay back while the large ones are let off.
	mostOwed = int64(40 * time.Millisecond)
)

// account is a process' credit as the arbiter keeps it.
type account struct {
	have    int64
	at      int64
	paid    int64   // as the process says
	charged int64   // the same times factor, piece by piece
	factor  float64 // of used to paid; 0: not known
	started bool
}

// scale follows how much more or less than it was charged the process used.
func (a *account) scale(charged, used int64) {
	if charged < int64(5*time.Millisecond) || used <= 0 {
		return
	}
	if a.factor == 0 {
		a.factor = 1
	}
	error := min(max(float64(used)/float64(charged), 0.5), 2) - 1
	a.factor = min(max(a.factor*(1+error/16), 0.5), 2)
}

type turns struct {
	holder  *Process
	until   int64
	closing bool // the holder's gate is shut, its work isn't done
}

// keep moves a process' account to now.
func (c *Card) keep(p *Process, now int64) {
	a := &p.turn
	paid := p.Now.Charged + c.progress(p, now)
	if !a.started {
		a.started, a.at, a.paid = true, now, paid
		return
	}
	cap := idleSaved
	if p.demandedAt == now {
		cap = mostSaved
	}
	f := 1.0
	if a.factor != 0 && !c.config.NoTruth {
		f = a.factor
	}
	a.have += (now - a.at) * int64(p.Terms.SharePPM) / 1_000_000
	charge := int64(f * float64(paid-a.paid))
	a.have -= charge
	a.charged += charge
	a.have = min(a.have, cap)
	a.at, a.paid = now, paid
}

// giveTurns lets one process launch at a time: of those that have work the one
// that is behind most, measured by its share. Fixed shares get no turn on debt.
func (c *Card) giveTurns(now int64, lowWaits bool) (again bool) {
	hungry := false
	for _, t := range c.Tenants {
		for _, p := range t.Processes {
			c.keep(p, now)
			hungry = hungry || (p.busy || p.Now.Waiting) && p.turn.have > 0 && !(t.Low && lowWaits)
		}
	}
	var best *Process
	var bestBehind float64
	holderWants, holderMay := false, false
	for _, t := range c.Tenants {
		for _, p := range t.Processes {
			if t.Elastic && !hungry {
				// What nobody else wanted needn't be paid back in full.
				p.turn.have = max(p.turn.have, -mostOwed*int64(p.Terms.SharePPM)/1_000_000)
			}
			wants := p.busy || p.Now.Waiting
			may := (t.Elastic || p.turn.have > 0) && !(t.Low && lowWaits)
			if p == c.turn.holder {
				holderWants, holderMay = wants || p.demanding(now) && now-p.demandedAt < int64(5*time.Millisecond), may
			}
			if !wants || !may {
				continue
			}
			behind := float64(p.turn.have) / float64(p.Terms.SharePPM)
			if best == nil || behind > bestBehind {
				best, bestBehind = p, behind
			}
		}
	}
	turn := &c.turn
	// Who works on borrowed time makes way at once for one who has credit.
	borrowed := turn.holder != nil && best != nil && best.turn.have > 0 && turn.holder.turn.have < 0
	if turn.holder != nil && !turn.closing && (now >= turn.until || !holderMay || !holderWants || borrowed) {
		turn.closing = true
	}
	if turn.closing && (c.config.Mode == Turns || turn.holder == best || !turn.holder.busy) {
		turn.holder, turn.closing = nil, false
	}
	if turn.holder == nil && best != nil {
		turn.holder, turn.until = best, now+int64(c.config.TurnLength)
	}
	for _, t := range c.Tenants {
		for _, p := range t.Processes {
			p.Terms.Gate = Shut
			if p == turn.holder && !turn.closing {
				p.Terms.Gate = Turn
			}
		}
	}
	return turn.closing
}
