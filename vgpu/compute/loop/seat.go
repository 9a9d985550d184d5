package loop

import (
	"errors"
	"maps"
	"slices"
	"time"

	"github.com/carve-gpu/carve/vgpu/compute"
	"github.com/carve-gpu/carve/vgpu/region"
)

// seat is a share with its files open.
type seat struct {
	Share
	limits  *region.ComputeFile
	usage   *region.ComputeReader
	members []*member
}

// member is a seat at one card.
type member struct {
	seat   *seat
	index  int // of the card in the container
	tenant *compute.Tenant
	byName map[region.Owner]*process
	// Of the last look, index by index.
	owners []region.Owner
	said   []region.ComputeUsage
	known  []bool
	fault  error
	share  uint32 // of all together, as published
	// ownersAt is when the owners were read, workedAt when one of them had work last.
	ownersAt, workedAt int64
}

// process is a process of a member.
type process struct {
	compute.Process
	owner     region.Owner
	published region.Terms
	isNew     bool
	present   bool // at the last look at the owners
	// used is what the driver says, charged what was paid at the last truth.
	used, charged int64
	told          bool // a truth was told
}

func (l *Loop) open(s Share) (*seat, error) {
	limits, err := region.OpenCompute(s.Limits, len(s.Cards))
	if err != nil {
		return nil, err
	}
	usage, err := region.OpenComputeReader(s.Usage, len(s.Cards))
	if err != nil {
		return nil, errors.Join(err, limits.Close())
	}
	return &seat{Share: s, limits: limits, usage: usage}, nil
}

func (s *seat) same(other Share) bool {
	return s.Limits == other.Limits && s.Usage == other.Usage && slices.Equal(s.Cards, other.Cards) && !s.failed()
}

// failed says that the files should be opened again.
func (s *seat) failed() bool {
	return slices.ContainsFunc(s.members, func(m *member) bool { return m.fault != nil })
}

// enter takes a seat at its cards.
func (l *Loop) enter(s *seat, now int64) {
	for i, share := range s.Cards {
		if !share.divided() {
			continue
		}
		c := l.cards[share.UUID]
		if c == nil {
			c = newCard(share.UUID, l.Mode)
			l.cards[share.UUID] = c
		}
		m := &member{
			seat: s, index: i, byName: map[region.Owner]*process{},
			tenant: &compute.Tenant{SharePPM: share.SharePPM, Rest: share.rest, Elastic: share.Elastic || share.rest, Low: share.Low},
		}
		s.members = append(s.members, m)
		c.members = append(c.members, m)
		c.division.Tenants = append(c.division.Tenants, m.tenant)
		c.activeAt, c.next = now, now
	}
}

// free takes off what a container without any share of its own was held to.
func (s *seat) free() error {
	if slices.ContainsFunc(s.Cards, func(c CardShare) bool { return c.SharePPM != 0 }) {
		return nil
	}
	return s.limits.Divide(false)
}

// leave gives a seat up. What it has stays in force.
func (l *Loop) leave(s *seat) {
	delete(l.seats, s.Key)
	for _, c := range l.cards {
		c.members = slices.DeleteFunc(c.members, func(m *member) bool { return m.seat == s })
		c.division.Tenants = nil
		for _, m := range c.members {
			c.division.Tenants = append(c.division.Tenants, m.tenant)
		}
	}
	if err := errors.Join(s.limits.Close(), s.usage.Close()); err != nil {
		l.Log.Debug("the files of a share can't be closed", "error", err)
	}
}

// mostTime is more than any clock shows: what a container writes is bounded by it, so
// that sums of it are numbers.
const mostTime = int64(1) << 60

// read follows what the container's processes say. What can't be read leaves them as
// they were.
func (m *member) read(now int64) {
	fresh := m.ownersAt == 0 || now-m.ownersAt >= ownersEvery || len(m.owners) <= fewOwners && now-m.workedAt <= restAfter
	if !fresh && now-m.workedAt > restAfter {
		return
	}
	if fresh {
		owners, err := m.seat.usage.Owners()
		if m.fault = err; err != nil {
			return
		}
		m.ownersAt = now
		m.meet(owners)
	}
	if m.fault = m.seat.usage.Read(m.index, m.owners, m.said, m.known); m.fault != nil {
		return
	}
	for i, o := range m.owners {
		if p := m.byName[o]; m.known[i] {
			p.Now = counters(m.said[i])
			if p.Now.Since != 0 || p.Now.Waiting {
				m.workedAt = now
			}
		}
	}
}

// meet takes in who has the slots now.
func (m *member) meet(owners []region.Owner) {
	if slices.Equal(owners, m.owners) {
		return
	}
	m.owners = append(m.owners[:0], owners...)
	m.said = append(m.said[:0], make([]region.ComputeUsage, len(owners))...)
	m.known = append(m.known[:0], make([]bool, len(owners))...)
	for _, p := range m.byName {
		p.present = false
	}
	for _, o := range m.owners {
		p := m.byName[o]
		if p == nil {
			p = &process{owner: o, isNew: true}
			// Where an earlier agent left off.
			if t, ok, err := m.seat.limits.Terms(m.index, o); err == nil && ok {
				p.Terms.Correction, p.published, p.isNew = t.CorrectionNS, t, false
			}
			m.byName[o] = p
			m.tenant.Processes = append(m.tenant.Processes, &p.Process)
		}
		p.present = true
	}
	if len(m.byName) > len(m.owners) {
		m.tenant.Processes = m.tenant.Processes[:0]
		for _, o := range m.owners {
			m.tenant.Processes = append(m.tenant.Processes, &m.byName[o].Process)
		}
		maps.DeleteFunc(m.byName, func(_ region.Owner, p *process) bool { return !p.present })
	}
}

func counters(u region.ComputeUsage) compute.Counters {
	bound := func(v int64) int64 { return min(max(v, -mostTime), mostTime) }
	return compute.Counters{
		Charged: bound(u.ChargedNS), Since: bound(max(u.SinceNS, 0)), Committed: bound(u.CommittedNS),
		Credit: bound(u.CreditNS), CreditAt: bound(u.CreditAtNS), Waiting: u.Waiting,
	}
}

// publish writes what holds now into the container's limits file.
func (m *member) publish(now int64, c *card, pace region.Pace) error {
	if m.fault != nil {
		return m.fault
	}
	err := m.seat.limits.Look(m.index, now, int64(c.truthEvery), c.ahead(), pace)
	if share := m.tenant.InForcePPM(); share != m.share {
		err = errors.Join(err, m.seat.limits.SetShare(m.index, share))
		m.share = share
	}
	for _, p := range m.byName {
		t := region.Terms{
			CorrectionNS: p.Terms.Correction, SharePPM: p.Terms.SharePPM, Gate: gateOf(p.Terms.Gate), Borrow: p.Terms.Borrow,
		}
		if t == p.published && !p.isNew {
			continue
		}
		if e := m.seat.limits.SetTerms(m.index, p.owner, t); e != nil {
			err = errors.Join(err, e)
			continue
		}
		p.published, p.isNew = t, false
	}
	m.fault = errors.Join(err, m.seat.limits.Divide(true))
	return m.fault
}

func gateOf(g compute.Gate) region.Gate {
	switch g {
	case compute.Shut:
		return region.GateClosed
	case compute.Turn:
		return region.GateTurn
	}
	return region.GateCredit
}

// card is one card with all that share it.
type card struct {
	uuid     string
	mode     compute.Mode
	division *compute.Card
	members  []*member
	next     int64
	activeAt int64
	truth    truth
	// truthEvery is how often the driver tells the truth.
	truthEvery time.Duration
}

func newCard(uuid string, mode compute.Mode) *card {
	return &card{uuid: uuid, mode: mode, division: compute.NewCard(compute.Config{Mode: mode}), truthEvery: usualPeriod}
}

// active says that somebody has work or had it at this look.
func (c *card) active() bool {
	for _, m := range c.members {
		for _, p := range m.byName {
			if p.Now.Since != 0 || p.Now.Waiting {
				return true
			}
		}
	}
	return false
}

func (c *card) ahead() int64 {
	if c.mode == compute.Credit {
		return ahead
	}
	return turnsAhead
}
