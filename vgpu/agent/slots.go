package agent

import (
	"time"

	"github.com/carve-gpu/carve/api/v1alpha1"
)

// fewerAfter is how long what there was more of counts on: slots towards the kubelet, and
// replicas of a card towards grants. Pods that were bound by the larger number are on
// their way: the report is written, the extender reads it, and what it bound a moment
// before comes to the kubelet, which turns it away for good where it finds no slot. The
// extender goes by the report, so nobody is placed in what is counted longer.
const fewerAfter = 30 * time.Second

func (a *Agent) fewerLater() time.Duration {
	if a.fewerAfter > 0 {
		return a.fewerAfter
	}
	return fewerAfter
}

// toldSlots is what the device plugin knows.
type toldSlots struct {
	// slots were told last, fewer are there since a while and not told yet; since is
	// zero where none are.
	slots, fewer int
	since        time.Time
}

// tellSlots tells the device plugin how many slots there are, if that has changed. Of
// changes at once the last one is told last. More are told at once, fewer after a while.
func (a *Agent) tellSlots() {
	if a.SlotsChanged == nil {
		return
	}
	a.tellMu.Lock()
	defer a.tellMu.Unlock()
	n, t := a.countSlots(), &a.told
	switch now := time.Now(); {
	case n == t.slots:
		t.since = time.Time{}
		return
	case n < t.slots && (t.since.IsZero() || n < t.fewer):
		t.fewer, t.since = n, now
		time.AfterFunc(a.fewerLater(), a.tellSlots)
		return
	case n < t.slots && now.Sub(t.since) < a.fewerLater():
		return // another call is on its way
	}
	*t = toldSlots{slots: n}
	a.SlotsChanged(n)
}

// countSlots counts what the cards may take. Where more is on a card than that, or on its
// way there, it counts so much: it keeps its slots, and must not use up those of other
// cards.
func (a *Agent) countSlots() int {
	perCard := int(a.slotsPerCard())
	a.mu.Lock()
	defer a.mu.Unlock()
	on, n := map[string]int{}, 0
	for _, r := range a.ledger().held {
		for _, cards := range r.Grant.Containers {
			for _, c := range cards {
				on[c.Card]++
			}
		}
	}
	for _, c := range a.hardware.inventory.Cards {
		n += max(a.slotsOf(c.UUID, perCard), on[c.UUID])
	}
	return n
}

// moreReplicas is how many replicas a card had until it had fewer.
type moreReplicas struct {
	replicas int
	until    time.Time
}

// noteFewer notes which cards are about to have fewer replicas. a.mu is held.
func (a *Agent) noteFewer(next map[string]v1alpha1.Sharing) {
	for uuid, was := range a.sharing {
		if int(was.Replicas) > int(next[uuid].Replicas) && int(was.Replicas) >= a.moreOf(uuid) {
			a.hadReplicas[uuid] = moreReplicas{int(was.Replicas), time.Now()}
		}
	}
}

// moreOf is how many replicas a card had a moment ago, 0 where it had no more than now.
// a.mu is held.
func (a *Agent) moreOf(uuid string) int {
	if had, ok := a.hadReplicas[uuid]; ok && time.Since(had.until) < a.fewerLater() {
		return had.replicas
	}
	return 0
}

// replicas are how many containers grants may put on the cards that NVIDIA's
// configuration divides. a.mu is held.
func (a *Agent) replicas() map[string]int {
	out := map[string]int{}
	for uuid, s := range a.sharing {
		out[uuid] = max(int(s.Replicas), a.moreOf(uuid))
	}
	return out
}
