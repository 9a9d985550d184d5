package loop

import (
	"errors"
	"slices"
	"time"

	"github.com/carve-gpu/carve/vgpu/compute"
	"github.com/carve-gpu/carve/vgpu/gpu"
	"github.com/carve-gpu/carve/vgpu/region"
)

const (
	// usualPeriod is how often drivers sample what processes use; their documentation
	// says a sixth of a second to a second.
	usualPeriod = time.Second / 6
	leastSample = 50 * time.Millisecond
	mostSample  = 1500 * time.Millisecond
	// askEvery is how often the driver is asked for a new sample. What it says late is
	// compared with what was paid in the meantime, so it is asked often.
	askEvery = 20 * time.Millisecond
	// askWait is how long the look that asks waits for the answer. A driver that takes
	// longer answers a later look, which doesn't wait: other cards are to be looked at.
	askWait = 2 * time.Millisecond
	// faultEvery is how often a driver is asked that doesn't tell.
	faultEvery = time.Second
	// silentAfter is how long the driver may have nothing new while somebody works: its
	// clock is the machine's and may have been set back.
	silentAfter = int64(3 * time.Second)
	// restingAfter is how long the driver has nothing new of a card before it counts as
	// idle.
	restingAfter = int64(time.Second)
	// blindAfter is how many periods, or silences, make it sure that the driver's word on
	// a card doesn't reach the agent. Its time is given in turns then, and the driver
	// asked again every drainedEvery.
	blindAfter   = 3
	drainedEvery = int64(30 * time.Second)
	// paidAtLeast is the part of a time, in percent, that processes have paid for who must
	// be in the driver's word on it.
	paidAtLeast = 5
	// periodsKept is how many periods are remembered, to know the usual one.
	periodsKept = 16
)

// truth is what the driver said of one card.
type truth struct {
	answers chan answer // has room for one; nil while nobody asks
	next    int64
	at      uint64 // up to here all is known, of the driver's clock; 0: nothing
	atNow   int64  // the same moment of our clock, or somewhat later
	heard   int64  // when the driver last had something new
	periods []uint64
	fault   string
	blind   int   // periods, or silences, in a row without a word on those who worked
	paid    int64 // by all processes, when the driver last had something new
}

// rest moves on over periods in which nobody worked: drivers differ in whether what they
// say next counts these in.
func (t *truth) rest(now int64) {
	if t.at == 0 || len(t.periods) == 0 {
		return
	}
	period := int64(slices.Min(t.periods)) * int64(time.Microsecond)
	// The newest may not be told yet.
	if n := (now-t.atNow)/period - 2; n > 0 {
		t.at += uint64(n * period / int64(time.Microsecond))
		t.atNow += n * period
	}
}

// usual is the driver's period, microseconds: the shortest of late, since longer ones
// have a time in them in which nobody worked.
func (t *truth) usual(newest uint64) uint64 {
	t.periods = append(t.periods, newest)
	if len(t.periods) > periodsKept {
		t.periods = t.periods[1:]
	}
	return slices.Min(t.periods)
}

type answer struct {
	gpu.Utilization
	err error
}

// settle asks the driver what processes really used, and settles their accounts.
func (l *Loop) settle(c *card, now int64) {
	t := &c.truth
	if t.answers != nil {
		select {
		case a := <-t.answers:
			l.answered(c, now, a)
		default:
		}
		return
	}
	driver := l.Driver()
	if now < t.next || driver == nil {
		return
	}
	t.answers = make(chan answer, 1)
	go func(answers chan<- answer, since uint64) {
		u, err := driver.Utilization(c.uuid, since)
		answers <- answer{u, err}
	}(t.answers, t.at)
	timer := time.NewTimer(askWait)
	defer timer.Stop()
	select {
	case a := <-t.answers:
		l.answered(c, now, a)
	case <-timer.C:
	}
}

func (l *Loop) answered(c *card, now int64, a answer) {
	c.truth.answers, c.truth.next = nil, now+int64(askEvery)
	l.take(c, now, a)
	// The periods of a card whose time is given in turns are told one after the other, too,
	// but only until it is known whether the driver's word reaches us.
	if c.mode == compute.Drained && c.truth.at == 0 {
		c.truth.next = now + drainedEvery
	}
}

// lost says why the driver's word on a card isn't used; its time is given in turns.
func (l *Loop) lost(c *card, why string) {
	if l.meter.fault(c.uuid, why) {
		l.Log.Warn("the time of a card is given in turns, since what its processes use isn't known", "card", c.uuid, "reason", why)
	}
	c.truth.at, c.truth.blind = 0, 0
	if c.mode != compute.Drained {
		c.divide(compute.Config{Mode: compute.Drained, NoTruth: true})
	}
}

// take takes an answer in.
func (l *Loop) take(c *card, now int64, a answer) {
	t := &c.truth
	switch {
	case errors.Is(a.err, gpu.ErrNotSupported):
		l.lost(c, "the driver doesn't say how much of the card each process uses")
		return
	case a.err != nil:
		t.next = now + int64(faultEvery)
		if t.fault != a.err.Error() {
			t.fault = a.err.Error()
			l.Log.Warn("the driver doesn't say how much of a card each process uses; shares are less exact until it does", "card", c.uuid, "error", a.err)
		}
		c.unsettled()
		return
	}
	t.fault = ""
	if a.At <= t.at {
		// Nothing new, or nobody had work.
		t.rest(now)
		if now-t.heard > silentAfter && c.active() {
			if t.heard != 0 && c.paid()-t.paid > (now-t.heard)*paidAtLeast/100 {
				t.blind++
			}
			t.at, t.heard, t.paid = 0, now, c.paid()
			if t.blind >= blindAfter {
				l.lost(c, "the driver says nothing of the processes that use the card")
			}
		}
		l.meter.rest(c.uuid, now-t.heard > restingAfter)
		return
	}
	period := a.At - t.at
	first := t.at == 0
	t.at, t.atNow, t.heard = a.At, now, now
	paid := c.paid() - t.paid
	t.paid = c.paid()
	if first || period < uint64(leastSample/time.Microsecond) {
		c.unsettled()
		return
	}
	usual := t.usual(min(period, uint64(mostSample/time.Microsecond)))
	c.truthEvery = time.Duration(usual) * time.Microsecond
	used, shared := map[*process]int{}, map[Key]int{}
	known, strange := false, 0
	for pid, percent := range a.Percent {
		host, key, ok := l.Process(pid)
		if !ok {
			strange += percent
			continue
		}
		shared[key] += percent
		if p := c.find(host, key); p != nil {
			used[p] += percent
			known = true
		}
	}
	if !known && strange > 0 && paid > int64(period)*int64(time.Microsecond)*paidAtLeast/100 {
		// Who worked isn't in it, unless under a name that isn't known here: it would be taken
		// for idle, and given all back that it paid.
		c.unsettled()
		if t.blind++; t.blind >= blindAfter {
			l.lost(c, "the driver names the card's processes by pids that the agent doesn't find: it has to see the node's (hostPID: true)")
		}
		return
	}
	if known {
		t.blind = 0
		l.meter.fault(c.uuid, "")
		if c.mode == compute.Drained && l.Mode != compute.Drained {
			l.Log.Info("the driver says again what processes use of a card", "card", c.uuid)
			c.divide(compute.Config{Mode: l.Mode})
		}
	}
	if c.mode == compute.Drained {
		return
	}
	l.meter.add(c.uuid, shared, time.Duration(min(period, 2*usual))*time.Microsecond)
	if period > usual+usual/2 {
		// Nobody had work for a part of it, and drivers differ in whether that counts.
		c.unsettled()
		return
	}
	span := int64(period) * int64(time.Microsecond)
	for _, m := range c.members {
		for _, p := range m.byName {
			idle := p.told && p.Now.Charged == p.charged && p.Now.Since == 0
			p.charged, p.told = p.Now.Charged, true
			p.used += compute.Used(used[p], span, idle)
			c.division.Truth(&p.Process, now, p.used)
		}
	}
}

// find is a process of a share on a card, nil for one that has no share of its
// compute.
func (c *card) find(host region.Process, key Key) *process {
	for _, m := range c.members {
		if m.seat.Key != key {
			continue
		}
		for o, p := range m.byName {
			if host.Owns(o.Slot()) {
				return p
			}
		}
	}
	return nil
}

// unsettled marks a time of which the driver says nothing.
func (c *card) unsettled() {
	for _, m := range c.members {
		for _, p := range m.byName {
			p.Unsettled()
		}
	}
}

// paid is what all processes of the card have paid.
func (c *card) paid() (sum int64) {
	for _, m := range c.members {
		for _, p := range m.byName {
			sum += p.Now.Charged
		}
	}
	return sum
}

// divide divides the card in another way from now on.
func (c *card) divide(config compute.Config) {
	c.mode = config.Mode
	tenants := c.division.Tenants
	c.division = compute.NewCard(config)
	c.division.Tenants = tenants
	for _, m := range c.members {
		for _, p := range m.byName {
			p.Anew()
		}
	}
}
