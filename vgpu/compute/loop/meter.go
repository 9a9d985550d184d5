package loop

import (
	"sync"
	"time"
)

// Use is what a container used of a card's compute, as the driver says.
type Use struct {
	// Time is the card's time that it had since it began to run or since the agent
	// started, whichever came last.
	Time time.Duration
	// Ratio is the part of the card's time that it had in the driver's last period,
	// 0 to 1.
	Ratio float64
}

type meterKey struct {
	Key
	card string
}

// meter adds up what containers use. Others read it while the loop runs.
type meter struct {
	mu   sync.Mutex
	uses map[meterKey]*Use
	// told are the cards of which the driver says anything.
	told map[string]bool
	// faults say why what the driver says of a card isn't used.
	faults map[string]string
}

// fault notes why what the driver says of a card isn't used, "" where it is; whether
// that is new.
func (m *meter) fault(card, why string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.faults[card] == why {
		return false
	}
	if why == "" {
		delete(m.faults, card)
		return true
	}
	if m.faults == nil {
		m.faults = map[string]string{}
	}
	m.faults[card] = why
	delete(m.told, card)
	return true
}

// Fault says why the compute of a card is given in turns, without the driver's word on
// what its processes use; "" where it isn't. It may be called while the loop runs.
func (l *Loop) Fault(card string) string {
	l.meter.mu.Lock()
	defer l.meter.mu.Unlock()
	return l.meter.faults[card]
}

// keep forgets shares that don't run any more.
func (m *meter) keep(shares []Share) {
	m.mu.Lock()
	defer m.mu.Unlock()
	uses := make(map[meterKey]*Use, len(m.uses))
	for _, s := range shares {
		for _, c := range s.Cards {
			k := meterKey{s.Key, c.UUID}
			if u := m.uses[k]; u != nil {
				uses[k] = u
			} else {
				uses[k] = &Use{}
			}
		}
	}
	m.uses = uses
}

// add counts a period of a card: the percents that containers had of it.
func (m *meter) add(card string, percents map[Key]int, period time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.says(card)
	for k, u := range m.uses {
		if k.card != card {
			continue
		}
		percent := min(percents[k.Key], 100)
		u.Ratio = float64(percent) / 100
		u.Time += period * time.Duration(percent) / 100
	}
}

// says notes that the driver tells what is used of a card. m.mu is held.
func (m *meter) says(card string) {
	if m.told == nil {
		m.told = map[string]bool{}
	}
	m.told[card] = true
}

// rest says that the driver has nothing new of a card; idle, that nobody works on it.
func (m *meter) rest(card string, idle bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.says(card)
	if !idle {
		return
	}
	for k, u := range m.uses {
		if k.card == card {
			u.Ratio = 0
		}
	}
}

// Used is what a container used of a card; false where the driver doesn't say. It may
// be called while the loop runs.
func (l *Loop) Used(key Key, card string) (Use, bool) {
	l.meter.mu.Lock()
	defer l.meter.mu.Unlock()
	u := l.meter.uses[meterKey{key, card}]
	if u == nil || !l.meter.told[card] || l.meter.faults[card] != "" {
		return Use{}, false
	}
	return *u, true
}
