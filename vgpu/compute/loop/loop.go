package loop

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/carve-gpu/carve/vgpu/compute"
	"github.com/carve-gpu/carve/vgpu/gpu"
	"github.com/carve-gpu/carve/vgpu/region"
)

const (
	// Between two looks at cards with work pass 2 to 5 ms, at random, so that no
	// program falls in step with them; with turns 2 ms.
	leastPeriod = 2 * time.Millisecond
	mostPeriod  = 5 * time.Millisecond
	// handOver is the period while a turn is being handed over.
	handOver = 200 * time.Microsecond
	// idlePeriod is that of cards without work. It bounds how long two processes that
	// begin together pay as if they were alone, and keeps the heartbeat alive.
	idlePeriod = 20 * time.Millisecond
	// ownersEvery is how soon a new process of a container is seen. Containers without
	// work for restAfter are looked at that often only: a look costs system calls.
	ownersEvery = int64(10 * time.Millisecond)
	restAfter   = int64(100 * time.Millisecond)
	// fewOwners is how many processes of a container with work are looked for each time:
	// one that runs them one after another has another one by then, and how many work is
	// what the pace is made of.
	fewOwners = 16
	// watchPeriod is that of cards of which nobody has a share of compute.
	watchPeriod = 100 * time.Millisecond
	// quietAfter is how long a card is looked at often after its last work.
	quietAfter = int64(time.Second)
	// refreshEvery is how soon new shares are seen, restEvery the same on a node
	// without any.
	refreshEvery = 100 * time.Millisecond
	restEvery    = 500 * time.Millisecond

	// ahead is the work that a process may have on a card at once; with turns less,
	// since it delays the next one's.
	ahead      = int64(8 * time.Millisecond)
	turnsAhead = int64(2 * time.Millisecond)
)

// Clock is where the time comes from: that of the limits files, CLOCK_MONOTONIC, or
// the software GPU's.
type Clock interface {
	// Now is in nanoseconds.
	Now() int64
	// Sleep returns at the given time, or sooner when ctx ends.
	Sleep(ctx context.Context, until int64)
}

// Driver tells how much of a card each process really used.
type Driver interface {
	Utilization(uuid string, since uint64) (gpu.Utilization, error)
}

// Key names a share: one container of one pod.
type Key struct{ UID, Container string }

// Share is a container that runs with shares of cards.
type Share struct {
	Key
	// Limits and Usage are the paths of its files.
	Limits, Usage string
	// Cards are in the order of the limits file.
	Cards []CardShare
}

// CardShare is a container's part of a card's compute.
type CardShare struct {
	// UUID is the card's.
	UUID string
	// SharePPM is in millionths; 0 for a container without a share of its own. It isn't
	// held back, unless others have shares of the card: then it gets what they leave.
	SharePPM uint32
	// Elastic shares may borrow.
	Elastic bool
	// Low priority waits while one of high priority has work.
	Low bool

	rest bool // it has none, and others have
}

// Config is what a Loop is made of.
type Config struct {
	Clock Clock
	// Shares lists those that run. It is called every tenth of a second.
	Shares func() []Share
	// Driver is nil where there is none yet.
	Driver func() Driver
	// Process finds the process of a pid that the driver names, and whose it is; false
	// for one that has ended, or that no share has.
	Process func(pid int) (region.Process, Key, bool)
	// Mode is compute.Credit, or compute.Turns. Cards whose driver doesn't say what
	// processes use are always divided by compute.Drained.
	Mode compute.Mode
	Log  *slog.Logger
	// Seed is for tests; 0: random.
	Seed uint64
}

// Loop divides the cards of one node. It belongs to one goroutine.
type Loop struct {
	Config
	random *rand.Rand
	cards  map[string]*card
	seats  map[Key]*seat
	// faults are what was said of each share's files, so that it is said once.
	faults map[Key]string
	meter  meter
}

// New makes a loop that has looked at nothing.
func New(c Config) *Loop {
	seed := c.Seed
	if seed == 0 {
		seed = rand.Uint64()
	}
	return &Loop{
		Config: c, random: rand.New(rand.NewPCG(seed, 0)), cards: map[string]*card{}, seats: map[Key]*seat{}, faults: map[Key]string{},
	}
}

// Run looks until ctx ends. Shares stay in force then.
func (l *Loop) Run(ctx context.Context) {
	defer l.close()
	var refresh int64
	for ctx.Err() == nil {
		now := l.Clock.Now()
		if now >= refresh {
			l.refresh(now)
			refresh = now + int64(refreshEvery)
			if len(l.seats) == 0 {
				refresh = now + int64(restEvery)
			}
		}
		next := refresh
		for _, c := range l.cards {
			if c.next <= now {
				c.next = now + int64(l.look(c, now))
			}
			next = min(next, c.next)
		}
		l.Clock.Sleep(ctx, next)
	}
}

// refresh brings the cards and seats to the shares that run now.
func (l *Loop) refresh(now int64) {
	wanted := map[Key]bool{}
	shares := withRest(l.Shares())
	l.meter.keep(shares)
	l.watch(shares)
	for _, s := range shares {
		if !slices.ContainsFunc(s.Cards, CardShare.divided) {
			continue
		}
		wanted[s.Key] = true
		old := l.seats[s.Key]
		if old != nil && old.same(s) {
			continue
		}
		if old != nil {
			l.leave(old)
		}
		seat, err := l.open(s)
		if err != nil {
			l.say(s.Key, err)
			continue
		}
		// A fault that was said is over once something is published.
		l.seats[s.Key] = seat
		l.enter(seat, now)
	}
	for key, s := range l.seats {
		if !wanted[key] {
			if err := s.free(); err != nil {
				l.Log.Warn("a container without a share of compute stays held to what others left, for some seconds", "uid", key.UID, "container", key.Container, "error", err)
			}
			l.leave(s)
		}
	}
	for key := range l.faults {
		if !wanted[key] {
			delete(l.faults, key)
		}
	}
}

// divided says that the container's compute of a card is held to something.
func (c CardShare) divided() bool { return c.SharePPM != 0 || c.rest }

// withRest finds out which containers without a share of a card are on one of which
// others have shares.
func withRest(shares []Share) []Share {
	granted := map[string]bool{}
	for _, s := range shares {
		for _, c := range s.Cards {
			granted[c.UUID] = granted[c.UUID] || c.SharePPM != 0
		}
	}
	out := slices.Clone(shares)
	for i := range out {
		out[i].Cards = slices.Clone(out[i].Cards)
		for j := range out[i].Cards {
			c := &out[i].Cards[j]
			c.rest = c.SharePPM == 0 && granted[c.UUID]
		}
	}
	return out
}

// say reports a fault of a share's files once, until it changes.
func (l *Loop) say(key Key, err error) {
	text := ""
	if err != nil {
		text = err.Error()
	}
	if l.faults[key] == text {
		return
	}
	l.faults[key] = text
	if err != nil {
		l.Log.Warn("the compute of a container can't be divided; it keeps its share as it is", "uid", key.UID, "container", key.Container, "error", err)
	} else {
		delete(l.faults, key)
	}
}

// watch keeps an eye on all cards that somebody shares: what is used of them is told even
// where it isn't divided.
func (l *Loop) watch(shares []Share) {
	shared := map[string]bool{}
	for _, s := range shares {
		for _, c := range s.Cards {
			shared[c.UUID] = true
			if l.cards[c.UUID] == nil {
				l.cards[c.UUID] = newCard(c.UUID, l.Mode)
			}
		}
	}
	for uuid, c := range l.cards {
		if !shared[uuid] && len(c.members) == 0 {
			delete(l.cards, uuid)
			l.meter.fault(uuid, "")
		}
	}
}

func (l *Loop) close() {
	for _, s := range l.seats {
		l.leave(s)
	}
}

// look is one look at a card; it returns when the next is due.
func (l *Loop) look(c *card, now int64) time.Duration {
	if len(c.members) == 0 {
		l.settle(c, now)
		return watchPeriod
	}
	for _, m := range c.members {
		m.read(now)
	}
	again := c.division.Tick(now)
	if c.active() {
		c.activeAt = now
	}
	l.settle(c, now)
	newest, contexts, most := c.division.Pace()
	pace := region.Pace{At: newest.At, Value: newest.Value, Contexts: uint32(contexts), Most: uint32(most)}
	for _, m := range c.members {
		l.say(m.seat.Key, m.publish(now, c, pace))
	}
	switch {
	case again:
		return handOver
	case now-c.activeAt > quietAfter:
		return idlePeriod
	case c.mode != compute.Credit:
		return leastPeriod
	}
	return leastPeriod + time.Duration(l.random.Int64N(int64(mostPeriod-leastPeriod)+1))
}
