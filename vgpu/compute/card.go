package compute

import "time"

const (
	// sold is the part of a card that is handed out under contention: switching
	// between processes costs the rest.
	soldPPM = 980_000
	// restPPM is the part of a card that is sure for all tenants without shares of their
	// own together.
	restPPM = 5_000
	// demandLasts is how long after its last sign of work a process still takes
	// part in the division.
	demandLasts = int64(200 * time.Millisecond)
	// borrowLasts is how long a borrow bit stands unless it is renewed.
	borrowLasts = int64(10 * time.Millisecond)
	// hungryFrom is the credit beyond what is committed from which on a process that has
	// work isn't getting its share. One that does has a little now and then, since it
	// looks every few milliseconds.
	hungryFrom = int64(2 * time.Millisecond)
	// steadyFrom is for how long a process must have had work at each look, so that one
	// look without any, up to steadyGap later, doesn't count. A program that launches
	// short kernels as fast as it can has its queue run dry for a moment now and then,
	// and what another borrows in that moment may take the card for long.
	steadyFrom = int64(40 * time.Millisecond)
	steadyGap  = int64(6 * time.Millisecond)
	// highLasts is how long a tenant of high priority keeps those of low priority
	// waiting after its last sign of work, lowTurn what they get in each lowEvery
	// however busy it is, so that nothing of theirs fails for waiting too long.
	highLasts = int64(5 * time.Millisecond)
	lowTurn   = int64(6 * time.Millisecond)
	lowEvery  = int64(200 * time.Millisecond)
)

// Counters are what one process publishes about itself on one card, read at one
// instant. Times are nanoseconds of the clock that Tick is given.
type Counters struct {
	// Charged is all GPU time that the process paid for since its start.
	Charged int64
	// Since is the time after which all unpaid work ran; 0: none is out.
	Since int64
	// Committed is the estimated GPU time of the unpaid work.
	Committed int64
	// Credit is what it may use at CreditAt.
	Credit, CreditAt int64
	// Waiting says that a launch is held back.
	Waiting bool
}

// Gate is what a process may launch by.
type Gate int

// The gates, as in vgpu/lib/src/credit.h.
const (
	ByCredit Gate = iota // by its own credit
	Shut                 // nothing
	Turn                 // whatever it likes: it is its turn
)

// Terms are what the agent publishes for one process on one card.
type Terms struct {
	// SharePPM is the part of the card, in millionths.
	SharePPM uint32
	Gate     Gate
	// Borrow lets the process go below its credit.
	Borrow bool
	// Correction is the sum of all corrections of its account, nanoseconds.
	Correction int64
}

// Mode is how a card's time is divided.
type Mode int

const (
	// Credit leaves the division to the processes' credit: fixed and elastic shares.
	Credit Mode = iota
	// Turns gives turns, which overlap at their ends: a strict guarantee for
	// elastic shares.
	Turns
	// Drained gives turns that don't overlap, so that the processes' own
	// measurements are the truth: for drivers that have no better.
	Drained
)

// Config is how a card is run.
type Config struct {
	Mode Mode
	// Gain is the part of the ledger that is settled with each truth, 0 to 1; 0:
	// 0.7, or 0.3 with turns.
	Gain float64
	// TurnLength is 0 for 30 ms.
	TurnLength time.Duration
	// NoTruth says that Truth will never be called.
	NoTruth bool
}

// Process is one process on one card. The caller fills Now before each Tick.
type Process struct {
	// Now is what the process says.
	Now Counters
	// Terms are what it is told, after each Tick and Truth.
	Terms Terms

	busy       bool
	busyFrom   int64 // since when it has had work, gaps of up to steadyGap aside
	busyAt     int64 // when it had work last; 0: never
	demandedAt int64 // 0: never
	loan       int64 // when the last loan that it had was given to its tenant; 0: it had none
	charged    int64 // at the last tick
	ledger     ledger
	turn       account
}

// Demanding says whether the process had work lately.
func (p *Process) demanding(now int64) bool {
	return p.demandedAt != 0 && now-p.demandedAt <= demandLasts
}

// Tenant is a container with a share of the card.
type Tenant struct {
	// SharePPM is what it was granted, 1 to 1,000,000; of one without a share of its
	// own, what it has at the moment, which Tick sets.
	SharePPM uint32
	// Rest has no share of its own: it gets what others leave, and restPPM at least,
	// with all like it together. It is elastic.
	Rest bool
	// Elastic shares are a guarantee and may borrow; others are a cap.
	Elastic bool
	// Low priority launches nothing while a tenant of high priority has work, but for
	// some hundredths of the time.
	Low bool
	// Processes are those that ever used the card and live.
	Processes []*Process

	inForce     uint32 // what it has of SharePPM at the moment
	borrowUntil int64
	borrowedAt  int64
}

// InForcePPM is the part of the card that the tenant's processes have together, after each
// Tick: SharePPM, or less where more is asked for than there is.
func (t *Tenant) InForcePPM() uint32 { return t.inForce }

func (t *Tenant) demanding(now int64) bool {
	for _, p := range t.Processes {
		if p.demanding(now) {
			return true
		}
	}
	return false
}

// Card divides the time of one card. It isn't safe for use by several goroutines.
type Card struct {
	config  Config
	Tenants []*Tenant
	pace    Pace
	most    int
	mostAt  int64
	turn    turns
	highAt  int64 // when one of high priority had work last
	lowAt   int64 // when those of low priority had their turn last
}

// NewCard has no tenants yet; the caller adds them to Tenants, and takes them off.
func NewCard(config Config) *Card {
	if config.Gain == 0 {
		config.Gain = 0.7
		if config.Mode != Credit {
			config.Gain = 0.3
		}
	}
	if config.TurnLength == 0 {
		config.TurnLength = 30 * time.Millisecond
	}
	return &Card{config: config}
}

// Pace is for publication after each Tick: the newest point, n since then, and the
// largest n of late.
func (c *Card) Pace() (newest Point, contexts, most int) {
	return c.pace.Last(), c.pace.Contexts(), max(c.most, 1)
}

// Tick is one look at the card, every 2 to 5 ms, at uneven distances so that no
// program falls in step with it. It returns whether the caller should look again
// at once, in a fraction of a millisecond, since a turn is being handed over.
func (c *Card) Tick(now int64) (again bool) {
	c.look(now)
	c.shareRest(now)
	var demanded uint64
	for _, t := range c.Tenants {
		if t.demanding(now) {
			demanded += uint64(t.SharePPM)
		}
	}
	for _, t := range c.Tenants {
		c.divide(t, now, demanded)
	}
	lowWaits := c.lowWaits(now)
	if c.config.Mode == Credit {
		for _, t := range c.Tenants {
			for _, p := range t.Processes {
				if t.Low && lowWaits {
					p.Terms.Gate = Shut
				}
			}
		}
		c.lend(now)
		return false
	}
	return c.giveTurns(now, lowWaits)
}

// shareRest says what is sure for tenants without shares of their own: of what nobody
// was granted as much as each elastic tenant that works can hope for, but never nothing.
// What they use beyond that they borrow.
func (c *Card) shareRest(now int64) {
	var granted, elastic, rest uint64
	for _, t := range c.Tenants {
		if !t.Rest {
			granted += uint64(t.SharePPM)
		}
		switch {
		case !t.demanding(now):
		case t.Rest:
			rest++
		case t.Elastic:
			elastic++
		}
	}
	left := soldPPM - min(granted, soldPPM)
	for _, t := range c.Tenants {
		if !t.Rest {
			continue
		}
		n := rest
		if !t.demanding(now) {
			n++ // should it begin
		}
		t.SharePPM = uint32(max(left/(n+elastic), restPPM/n, 1))
	}
}

// lowWaits says that tenants of low priority may not launch now, since one of high
// priority has work.
func (c *Card) lowWaits(now int64) bool {
	low := false
	for _, t := range c.Tenants {
		low = low || t.Low
		for _, p := range t.Processes {
			if !t.Low && (p.busy || p.Now.Waiting) {
				c.highAt = now
			}
		}
	}
	if !low || c.highAt == 0 || now-c.highAt > highLasts {
		c.lowAt = now
		return false
	}
	if now-c.lowAt >= lowEvery {
		c.lowAt = now
	}
	return now-c.lowAt >= lowTurn
}

// look counts who has work on the card and moves the pace.
func (c *Card) look(now int64) {
	busy := 0
	for _, t := range c.Tenants {
		for _, p := range t.Processes {
			// One that holds a launch back looks at its work all the time.
			p.busy = p.Now.Since != 0 && (p.Now.Waiting || !c.surelyDone(p))
			if p.busy {
				busy++
				if p.busyAt == 0 || now-p.busyAt > steadyGap {
					p.busyFrom = now
				}
				p.busyAt = now
			}
			if p.busy || p.Now.Waiting || p.Now.Charged != p.charged {
				p.demandedAt = now
			}
			p.charged = p.Now.Charged
		}
	}
	c.pace.move(now, busy)
	if busy >= c.most || now-c.mostAt > int64(time.Second) {
		c.most, c.mostAt = busy, now
	}
}

// surelyDone says that a process' work must have ended, though the process hasn't
// looked yet: it is busy with something else, and without a thread in it nobody
// else can look.
func (c *Card) surelyDone(p *Process) bool {
	const slack = int64(2 * time.Millisecond)
	return c.pace.At(c.pace.Last().At)-c.pace.At(p.Now.Since) > 2*p.Now.Committed+slack
}

// divide sets the shares of a tenant's processes. Those that have work get equal
// parts of it; those without get the same, should they begin.
func (c *Card) divide(t *Tenant, now int64, demanded uint64) {
	share := uint64(t.SharePPM)
	if demanded > soldPPM {
		share = share * soldPPM / demanded
	}
	t.inForce = uint32(max(share, 1))
	active := uint64(0)
	for _, p := range t.Processes {
		if p.demanding(now) {
			active++
		}
	}
	for _, p := range t.Processes {
		n := active
		if !p.demanding(now) {
			n++
		}
		p.Terms.SharePPM = uint32(max(share/n, 1))
		p.Terms.Gate = ByCredit
	}
}

// credit is what the process has now, as far as it can be told from outside.
func (p *Process) credit(now int64) int64 {
	passed := min(max(now-p.Now.CreditAt, 0), int64(time.Second))
	return p.Now.Credit + passed*int64(p.Terms.SharePPM)/1_000_000
}

// steady says that the process has work, or had it until a moment ago and for long.
func (p *Process) steady(now int64) bool {
	return p.busy || p.busyAt != 0 && now-p.busyAt <= steadyGap && p.busyAt-p.busyFrom >= steadyFrom
}

// hungry says that the tenant has work and isn't getting its share. One that waits
// for others by its priority holds nobody off.
func (t *Tenant) hungry(now int64) bool {
	for _, p := range t.Processes {
		if (p.Now.Waiting || p.steady(now)) && p.Terms.Gate != Shut && p.credit(now)-p.Now.Committed > hungryFrom {
			return true
		}
	}
	return false
}

// shut says that the tenant may launch nothing.
func (t *Tenant) shut() bool {
	for _, p := range t.Processes {
		if p.Terms.Gate != Shut {
			return false
		}
	}
	return true
}

// lend gives a borrow bit to one elastic tenant that has used its share up, while
// no other wants more. The one that borrowed longest ago is next.
func (c *Card) lend(now int64) {
	hungry := 0
	var next *Tenant
	for _, t := range c.Tenants {
		switch {
		case t.hungry(now):
			hungry++
		case t.Elastic && t.demanding(now) && !t.shut():
			if next == nil || t.borrowedAt < next.borrowedAt {
				next = t
			}
		}
	}
	for _, t := range c.Tenants {
		others := hungry
		if t.hungry(now) {
			others--
		}
		if others > 0 {
			t.borrowUntil = 0
		}
	}
	standing := false
	for _, t := range c.Tenants {
		standing = standing || t.borrowUntil > now
	}
	if next != nil && hungry == 0 && !standing {
		next.borrowUntil, next.borrowedAt = now+borrowLasts, now
	}
	for _, t := range c.Tenants {
		borrower := t.borrower(now)
		for _, p := range t.Processes {
			p.Terms.Borrow = p == borrower
		}
	}
}

// borrower is the process that a tenant's loan is for: one of those that have work, in
// turn, since each could put as much on the card as one alone. It keeps the loan as long
// as it has work.
func (t *Tenant) borrower(now int64) *Process {
	if t.borrowUntil <= now {
		return nil
	}
	var next *Process
	for _, p := range t.Processes {
		switch {
		case !p.demanding(now):
		case p.loan == t.borrowedAt && (p.busy || p.Now.Waiting):
			return p
		case next == nil || p.loan < next.loan:
			next = p
		}
	}
	if next != nil {
		next.loan = t.borrowedAt
	}
	return next
}
