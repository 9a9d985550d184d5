package place

import (
	"cmp"
	"slices"
	"strings"
	"sync"

	"github.com/carve-gpu/carve/scheduler-extender/fit"
	"github.com/carve-gpu/carve/scheduler-extender/ledger"
	"github.com/carve-gpu/carve/scheduler-extender/score"
)

// fleetEvery is after how many pods the nodes are counted again.
const fleetEvery = 256

// market makes prices of what pods ask, as they come: the same pods in the same order on the
// same nodes make the same ones. Prices change with the pod after which they do, within a
// few milliseconds and once in hundreds of pods.
type market struct {
	mu      sync.Mutex
	learner *score.Learner // nil before the first pod
	pods    int
}

// prices as of now.
func (m *market) prices(l *ledger.Ledger) *score.Prices {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.start(l)
	return m.learner.Prices()
}

// arrived counts a pod that wasn't there before, and whether it got its place at once.
func (m *market) arrived(l *ledger.Ledger, a *fit.Ask, placed bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.start(l)
	if m.pods++; m.pods%fleetEvery == 0 {
		m.learner.SetFleet(fleet(l))
	}
	m.learner.Arrived(a, placed)
}

// start begins with the nodes and pods that there are. The lock is held.
func (m *market) start(l *ledger.Ledger) {
	if m.learner != nil {
		return
	}
	m.learner = score.NewLearner(fleet(l))
	for _, r := range l.Requests() {
		if a, refusal := fit.NewAsk(r.Request); refusal == nil {
			m.learner.Arrived(a.WithHost(r.Host).Settle(), true)
		}
	}
}

// fleet counts the nodes that pods can be on by kinds, in an order of their own.
func fleet(l *ledger.Ledger) score.Fleet {
	var empty []*fit.Node
	for _, n := range l.Nodes() {
		if s := n.Snapshot(); s.Known && s.Managed {
			v := s.View
			v.Host, v.HostKnown = s.Host, s.Host != fit.Host{}
			empty = append(empty, &v)
		}
	}
	out := score.FleetOf(empty)
	slices.SortFunc(out, func(a, b score.FleetNode) int {
		return cmp.Or(strings.Compare(a.Model, b.Model), cmp.Compare(a.Cards, b.Cards), cmp.Compare(a.CardMiB, b.CardMiB),
			cmp.Compare(a.Host.CPUMilli, b.Host.CPUMilli), cmp.Compare(a.Host.MemMiB, b.Host.MemMiB), cmp.Compare(a.Host.Pods, b.Host.Pods))
	})
	return out
}

// lot decides between places of the same cost, by chance that is the same each time: of a
// pod and a node. Always the first one makes all kinds of pods meet on the same nodes, which
// leaves rests there that suit none of them.
func lot(pod, node uint64) uint64 { return ledger.Mix(pod ^ node) }

// arrived counts a pod where prices are gone by.
func (p *Placer) arrived(c call, placed bool) {
	if p.config.Policy.Name == score.PriceName {
		p.market.arrived(p.ledger, c.ask, placed)
	}
}

// Prices are those that the policy "price" goes by now.
func (p *Placer) Prices() *score.Prices { return p.market.prices(p.ledger) }
