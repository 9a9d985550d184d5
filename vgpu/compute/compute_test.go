package compute

import (
	"math"
	"testing"
	"time"
)

const ms = int64(time.Millisecond)

func TestPace(t *testing.T) {
	var p Pace
	if p.At(5) != 5 {
		t.Error("without points the pace is the clock's")
	}
	p.move(1000, 1)
	p.move(2000, 1)
	p.move(3000, 2) // half of the time at 1, half at 1/2
	for at, want := range map[int64]int64{500: 500, 1000: 1000, 2000: 2000, 2500: 2375, 3000: 2750, 3400: 2950} {
		if got := p.At(at); got != want {
			t.Errorf("At(%d) is %d, want %d", at, got, want)
		}
	}
	for i := range int64(3000) {
		p.move(4000+i*1000, 4)
	}
	last := p.Last()
	if got := last.Value - p.At(last.At-1500); got != 375 {
		t.Errorf("a turn of the ring later 1500 ns are %d at a quarter", got)
	}
	if p.At(last.At) < p.At(0) {
		t.Error("what is forgotten must not be in the future")
	}
}

// Work that takes much longer than it was thought to is done, unless its process waits
// for it and would have seen that.
func TestWorkThatTakesLonger(t *testing.T) {
	for _, waiting := range []bool{false, true} {
		c := NewCard(Config{})
		a, pa := one(500_000, false)
		c.Tenants = []*Tenant{a}
		pa.Now = Counters{Since: ms, Committed: ms / 100, Waiting: waiting}
		for now := 2 * ms; now < 50*ms; now += 3 * ms {
			c.Tick(now)
		}
		if pa.busy != waiting {
			t.Errorf("waiting %v: has work %v", waiting, pa.busy)
		}
	}
}

func TestUsed(t *testing.T) {
	for _, c := range []struct {
		percent int
		idle    bool
		want    int64
	}{{0, true, 0}, {0, false, 50}, {30, true, 3050}, {30, false, 3050}} {
		if got := Used(c.percent, 10_000, c.idle); got != c.want {
			t.Errorf("Used(%d, idle %v) = %d, want %d", c.percent, c.idle, got, c.want)
		}
	}
}

func one(share uint32, elastic bool) (*Tenant, *Process) {
	p := &Process{}
	return &Tenant{SharePPM: share, Elastic: elastic, Processes: []*Process{p}}, p
}

// The ledger gives back what was paid too much, in parts, and in the end all of it.
func TestTruth(t *testing.T) {
	c := NewCard(Config{})
	tenant, p := one(300_000, false)
	c.Tenants = []*Tenant{tenant}
	c.Truth(p, 1, 0)
	p.Now.Charged = 100 * ms
	c.Truth(p, 2, 60*ms)
	if got, want := p.Terms.Correction, 28*ms; got != want {
		t.Errorf("of 40 ms 0.7 are given back: %d, want %d", got, want)
	}
	for i := range int64(20) {
		c.Truth(p, 3+i, 60*ms)
	}
	if got := p.Terms.Correction; got < 40*ms-10 || got > 40*ms {
		t.Errorf("in the end %d of 40 ms", got)
	}
	p.Now.Charged += 1000 * ms
	before := p.Terms.Correction
	c.Truth(p, 50, 60*ms)
	if got := p.Terms.Correction - before; got != 250*ms {
		t.Errorf("%d at a time", got)
	}
}

func TestSharesUnderContention(t *testing.T) {
	c := NewCard(Config{})
	a, pa := one(700_000, false)
	b, pb := one(700_000, false)
	c.Tenants = []*Tenant{a, b}
	pa.Now.Waiting = true
	c.Tick(ms)
	if pa.Terms.SharePPM != 700_000 {
		t.Errorf("alone it is %d", pa.Terms.SharePPM)
	}
	pb.Now.Waiting = true
	c.Tick(5 * ms)
	if pa.Terms.SharePPM != 490_000 || pb.Terms.SharePPM != 490_000 {
		t.Errorf("two that want 140 %% get 98 by their shares: %d and %d", pa.Terms.SharePPM, pb.Terms.SharePPM)
	}
	pb.Now.Waiting = false
	c.Tick(150 * ms)
	if pa.Terms.SharePPM != 490_000 {
		t.Error("a short pause isn't the end of demand")
	}
	c.Tick(250 * ms)
	if pa.Terms.SharePPM != 700_000 {
		t.Error("a long one is")
	}
	// Two processes of one container.
	second := &Process{}
	a.Processes = append(a.Processes, second)
	second.Now.Waiting = true
	c.Tick(255 * ms)
	if pa.Terms.SharePPM != 350_000 || second.Terms.SharePPM != 350_000 {
		t.Errorf("two processes of one container get halves: %d and %d", pa.Terms.SharePPM, second.Terms.SharePPM)
	}
}

func TestBorrowing(t *testing.T) {
	c := NewCard(Config{})
	a, pa := one(300_000, true)
	b, pb := one(300_000, true)
	fixed, pf := one(300_000, false)
	c.Tenants = []*Tenant{a, b, fixed}
	now := int64(0)
	tick := func(creditA, creditB, creditF int64, wantsB, wantsF bool) {
		now += 3 * ms
		pa.Now = Counters{Waiting: true, Credit: creditA, CreditAt: now}
		pb.Now = Counters{Waiting: wantsB, Credit: creditB, CreditAt: now}
		pf.Now = Counters{Waiting: wantsF, Credit: creditF, CreditAt: now}
		c.Tick(now)
	}
	tick(5*ms, 0, 0, false, false)
	if pa.Terms.Borrow {
		t.Error("who has credit needs no loan")
	}
	tick(-ms, 0, 0, false, false)
	if !pa.Terms.Borrow {
		t.Error("nobody else wants anything")
	}
	tick(-ms, 5*ms, 0, true, false)
	if pa.Terms.Borrow {
		t.Error("a loan ends when another is hungry")
	}
	tick(-ms, -ms, -ms, true, true)
	if pa.Terms.Borrow == pb.Terms.Borrow || pf.Terms.Borrow {
		t.Error("one of two gets the loan, and a fixed share never")
	}
	first := pa.Terms.Borrow
	for range 5 {
		tick(-ms, -ms, -ms, true, true)
	}
	if pa.Terms.Borrow == first {
		t.Error("the next loan goes to the other")
	}
}

// Several processes of one tenant have its loan in turn.
func TestOneOfSeveralBorrows(t *testing.T) {
	c := NewCard(Config{})
	a, _ := one(300_000, true)
	a.Processes = append(a.Processes, &Process{}, &Process{})
	c.Tenants = []*Tenant{a}
	had := map[*Process]bool{}
	for now := 3 * ms; now < 60*ms; now += 3 * ms {
		for _, p := range a.Processes {
			p.Now = Counters{Waiting: true, Credit: -ms, CreditAt: now}
		}
		c.Tick(now)
		borrow := 0
		for _, p := range a.Processes {
			if p.Terms.Borrow {
				borrow++
				had[p] = true
			}
		}
		if borrow > 1 || borrow == 0 && now > 6*ms {
			t.Errorf("at %d ms %d of three have a loan", now/ms, borrow)
		}
	}
	if len(had) != 3 {
		t.Errorf("only %d of three had a loan", len(had))
	}
	// One that wants nothing any more leaves it to another.
	for _, p := range a.Processes[1:] {
		p.Now = Counters{}
	}
	for now := 60 * ms; now < 75*ms; now += 3 * ms {
		a.Processes[0].Now = Counters{Waiting: true, Credit: -ms, CreditAt: now}
		c.Tick(now)
	}
	if !a.Processes[0].Terms.Borrow {
		t.Error("the only one that wants a loan hasn't any")
	}
}

// Kernels so short that their queue runs dry now and then: one look at which there is
// nothing out doesn't make the program one that wants nothing, or a loan that is given at
// that moment takes the card for long.
func TestNoLoanInAGapOfShortKernels(t *testing.T) {
	c := NewCard(Config{})
	a, pa := one(300_000, true)
	b, pb := one(600_000, false)
	c.Tenants = []*Tenant{a, b}
	now := int64(0)
	tick := func(out bool) {
		now += 3 * ms
		pa.Now = Counters{Waiting: true, Credit: -ms, CreditAt: now}
		pb.Now.Since, pb.Now.Committed = 0, 0
		if out {
			pb.Now.Since, pb.Now.Committed = now-ms, 5*ms
		}
		pb.Now.Charged += ms
		pb.Now.Credit, pb.Now.CreditAt = 60*ms, now
		c.Tick(now)
	}
	tick(true)
	tick(false)
	if !pa.Terms.Borrow {
		t.Error("who had work at one look only holds nobody off")
	}
	for range 20 {
		tick(true)
	}
	tick(false)
	tick(true)
	tick(false)
	if pa.Terms.Borrow {
		t.Error("a loan in a gap between short kernels")
	}
	tick(false)
	tick(false)
	if !pa.Terms.Borrow {
		t.Error("no loan though nobody wants anything any more")
	}
}

func TestTurnsGoToWhoIsBehind(t *testing.T) {
	for _, mode := range []Mode{Turns, Drained} {
		c := NewCard(Config{Mode: mode})
		a, pa := one(600_000, false)
		b, pb := one(380_000, false)
		c.Tenants = []*Tenant{a, b}
		// The model of the model: who has the turn works all the time.
		for i := range int64(5000) {
			now := i * 2 * ms
			for _, p := range []*Process{pa, pb} {
				p.Now.Waiting = true
				p.Now.Since = 0
				if p.Terms.Gate == Turn {
					p.Now.Charged += 2 * ms
				}
			}
			c.Tick(now)
			if pa.Terms.Gate == Turn && pb.Terms.Gate == Turn {
				t.Fatalf("mode %d: two turns at once", mode)
			}
		}
		got := float64(pa.Now.Charged) / float64(10_000*ms)
		if math.Abs(got-0.6) > 0.01 {
			t.Errorf("mode %d: %.3f of 0.6", mode, got)
		}
	}
}

// A drained turn isn't handed over while its holder has work on the card.
func TestDrainedHandOver(t *testing.T) {
	c := NewCard(Config{Mode: Drained})
	a, pa := one(600_000, false)
	b, pb := one(380_000, false)
	c.Tenants = []*Tenant{a, b}
	pa.Now.Waiting = true
	for now := int64(0); now < 10*ms; now += 2 * ms {
		c.Tick(now)
	}
	if pa.Terms.Gate != Turn {
		t.Fatal("it is alone")
	}
	pb.Now.Waiting = true
	pa.Now = Counters{Waiting: true, Since: 10 * ms, Committed: 1000 * ms}
	again := false
	for now := 10 * ms; now < 60*ms; now += 2 * ms {
		again = c.Tick(now)
		if pb.Terms.Gate == Turn {
			t.Fatal("the other got a turn while the first still works")
		}
	}
	if !again || pa.Terms.Gate != Shut {
		t.Error("at the end of its turn the gate is shut, and the agent looks again at once")
	}
	pa.Now = Counters{Waiting: true, Charged: 50 * ms}
	c.Tick(60 * ms)
	if pb.Terms.Gate != Turn {
		t.Error("then it is the other's turn")
	}
}

// Whatever a process says of itself, the agent neither stops nor disturbs others.
func FuzzCounters(f *testing.F) {
	f.Add(int64(0), int64(0), int64(0), int64(0), int64(0), false)
	f.Add(int64(math.MaxInt64), int64(math.MinInt64), int64(-1), int64(math.MaxInt64), int64(1), true)
	f.Fuzz(func(t *testing.T, charged, since, committed, credit, creditAt int64, waiting bool) {
		for _, mode := range []Mode{Credit, Turns, Drained} {
			c := NewCard(Config{Mode: mode})
			liar, pl := one(500_000, true)
			honest, ph := one(480_000, false)
			c.Tenants = []*Tenant{liar, honest}
			for now := ms; now < 400*ms; now += 3 * ms {
				pl.Now = Counters{charged, since, committed, credit, creditAt, waiting}
				ph.Now = Counters{Waiting: true, Charged: now / 3}
				c.Tick(now)
				if now%(170*ms) < 3*ms {
					c.Truth(pl, now, now/2)
					c.Truth(ph, now, now/3)
				}
				if s := ph.Terms.SharePPM; s < 400_000 || s > 480_000 {
					t.Fatalf("the honest one's share is %d", s)
				}
			}
			if ph.Terms.Correction < -10*ms || ph.Terms.Correction > 10*ms {
				t.Fatalf("the honest one was corrected by %d", ph.Terms.Correction)
			}
		}
	})
}

// Who is of low priority waits while one of high priority has work, but not for ever,
// and keeps nobody from borrowing.
func TestPriorities(t *testing.T) {
	for _, mode := range []Mode{Credit, Turns, Drained} {
		c := NewCard(Config{Mode: mode})
		high, ph := one(300_000, true)
		low, pl := one(600_000, false)
		low.Low = true
		c.Tenants = []*Tenant{high, low}
		now, open, waited, longest, borrowed := int64(0), 0, int64(0), int64(0), 0
		run := func(span int64, busy bool) {
			open, borrowed, waited, longest = 0, 0, 0, 0
			for end := now + span; now < end; now += 2 * ms {
				ph.Now = Counters{Waiting: busy, Credit: -ms, CreditAt: now, Charged: ph.Now.Charged}
				pl.Now = Counters{Waiting: true, Credit: 5 * ms, CreditAt: now, Charged: pl.Now.Charged}
				for _, p := range []*Process{ph, pl} {
					if p.Terms.Gate == Turn && p.Now.Waiting {
						p.Now.Charged += 2 * ms
					}
				}
				c.Tick(now)
				if pl.Terms.Gate != Shut {
					open++
					waited = 0
				} else if waited += 2 * ms; waited > longest {
					longest = waited
				}
				if ph.Terms.Borrow || ph.Terms.Gate == Turn {
					borrowed++
				}
			}
		}
		now = ms
		run(2000*ms, true)
		if open > 1000/10 || open < 1000/40 || longest > 300*ms {
			t.Errorf("mode %d: beside a busy one it may launch in %d of 1000 looks, and waits for up to %d ms", mode, open, longest/ms)
		}
		if borrowed < 800 {
			t.Errorf("mode %d: what it doesn't use is had by the other in %d of 1000 looks", mode, borrowed)
		}
		run(20*ms, false)
		if open < 6 {
			t.Errorf("mode %d: with the other idle it may launch in %d of 10 looks", mode, open)
		}
		run(20*ms, true)
		if open > 8 {
			t.Errorf("mode %d: it doesn't make way: open in %d of 10 looks", mode, open)
		}
	}
}

func TestTruthThatIsMissing(t *testing.T) {
	c := NewCard(Config{})
	tenant, p := one(300_000, false)
	c.Tenants = []*Tenant{tenant}
	c.Truth(p, 1, 0)
	p.Now.Charged = 100 * ms
	p.Unsettled()
	c.Truth(p, 2, 10*ms)
	if p.Terms.Correction != 0 {
		t.Errorf("corrected by %d for a time of which nothing is known", p.Terms.Correction)
	}
	p.Now.Charged += 50 * ms
	c.Truth(p, 3, 40*ms)
	if got, want := p.Terms.Correction, 14*ms; got != want {
		t.Errorf("then by %d, want %d", got, want)
	}
}

// Who has no share of its own has a part of what nobody was granted, and some of the card
// where all of it was.
func TestWithoutAShare(t *testing.T) {
	for _, c := range []struct {
		granted      []uint32
		elastic      bool
		others, want uint32
	}{
		{[]uint32{300_000}, false, 1, 680_000},
		{[]uint32{300_000}, false, 2, 340_000},
		{[]uint32{300_000, 400_000}, true, 2, 70_000}, // each of four
		{[]uint32{980_000}, false, 2, 2_500},
		{[]uint32{1_000_000}, true, 1, 5_000},
	} {
		card := NewCard(Config{})
		for _, share := range c.granted {
			tenant, p := one(share, c.elastic)
			p.Now.Waiting = true
			card.Tenants = append(card.Tenants, tenant)
		}
		var others []*Tenant
		for range c.others {
			tenant, p := one(0, true)
			tenant.Rest = true
			p.Now.Waiting = true
			others = append(others, tenant)
		}
		idle, _ := one(0, true)
		idle.Rest = true
		card.Tenants = append(append(card.Tenants, others...), idle)
		card.Tick(ms)
		for _, o := range others {
			if o.SharePPM != c.want {
				t.Errorf("beside %v (elastic %v) one of %d has %d, want %d", c.granted, c.elastic, c.others, o.SharePPM, c.want)
			}
		}
		if idle.SharePPM == 0 || idle.SharePPM >= c.want {
			t.Errorf("beside %v one that may begin has %d, those that work %d", c.granted, idle.SharePPM, c.want)
		}
	}
}
