package place

import (
	"sync"

	"github.com/carve-gpu/carve/scheduler-extender/fit"
	"github.com/carve-gpu/carve/scheduler-extender/ledger"
	"github.com/carve-gpu/carve/scheduler-extender/score"
)

// What bounds the memory for cached answers: a shape takes about a hundred bytes a
// node. In a small cluster many kinds of pods are remembered, in a large one few.
const (
	leastShapes, mostShapes = 32, 256
	maxAnswers              = 400_000
)

// maxHard bounds the nodes on which one scan may spend the whole search limit.
// A contrived pod must not hold up those behind it.
const maxHard = 20

var tooHard = answer{refusal: &fit.Refusal{Reason: fit.ReasonSearchLimit, Card: -1}}

// answer is what a shape gets on a node in one version of the node.
type answer struct {
	version uint64
	round   uint32
	cost    int64
	place   fit.Placement
	refusal *fit.Refusal // nil if it fits
}

// shape is a kind of request under a policy, with its answers by node.
type shape struct {
	ask    *fit.Ask // of the first pod that came with it
	market *market  // where it goes by prices

	mu      sync.Mutex
	policy  score.Policy
	prices  *score.Prices
	scorer  *score.Scorer
	round   uint32   // of prices; answers of others are out of date
	answers []answer // by Node.ID
	hard    int      // searches of this scan that were given up
	used    uint64   // for eviction; guarded by shapes.mu
}

// begin is called before a round of questions, with the lock held.
func (s *shape) begin(l *ledger.Ledger) {
	s.hard = 0
	if s.market == nil {
		return
	}
	now := s.market.prices(l)
	switch {
	case now == s.prices:
		return
	case s.scorer == nil:
		s.scorer = score.NewScorer(now)
	default:
		s.scorer.Use(now)
	}
	s.prices, s.policy = now, now.Policy()
	s.round++
}

// known is the answer for a node in a version, if there is one. The shape's lock is held.
func (s *shape) known(id int32, version uint64) *answer {
	if int(id) >= len(s.answers) {
		return nil
	}
	if a := &s.answers[id]; a.version == version && a.round == s.round {
		return a
	}
	return nil
}

// at answers for one node. The shape's lock is held; the result is valid until
// the next call.
func (s *shape) at(n *ledger.Node, snap *ledger.Snapshot) *answer {
	if n.ID >= len(s.answers) {
		s.answers = append(s.answers, make([]answer, max(n.ID+1-len(s.answers), len(s.answers)))...)
	}
	a := &s.answers[n.ID]
	if a.version == snap.Version && a.round == s.round {
		return a
	}
	if s.hard >= maxHard {
		return &tooHard
	}
	*a = answer{version: snap.Version, round: s.round}
	if s.scorer != nil {
		ok := false
		if a.place, a.cost, ok = s.scorer.Judge(&snap.View, s.ask); ok {
			return a
		}
	}
	if a.place, a.refusal = fit.Fit(&snap.View, s.ask, s.policy.Card); a.refusal == nil {
		a.cost = s.policy.Node(&snap.View, s.ask, a.place)
	} else if a.refusal.Reason == fit.ReasonSearchLimit {
		s.hard++
	}
	return a
}

// shapes keeps the shapes that were asked for lately.
type shapes struct {
	mu    sync.Mutex
	byKey map[string]*shape
	clock uint64
}

func (ss *shapes) of(a *fit.Ask, policy score.Policy, m *market) *shape {
	key := policy.Name + "|" + a.Key()
	ss.mu.Lock()
	defer ss.mu.Unlock()
	ss.clock++
	s := ss.byKey[key]
	if s == nil {
		if len(ss.byKey) >= ss.room() {
			var oldest string
			for k, o := range ss.byKey {
				if oldest == "" || o.used < ss.byKey[oldest].used {
					oldest = k
				}
			}
			delete(ss.byKey, oldest)
		}
		s = &shape{ask: a, policy: policy, market: m}
		if ss.byKey == nil {
			ss.byKey = map[string]*shape{}
		}
		ss.byKey[key] = s
	}
	s.used = ss.clock
	return s
}

// room is how many shapes may be kept. The lock is held.
func (ss *shapes) room() int {
	most := 0
	for _, s := range ss.byKey {
		s.mu.Lock()
		most = max(most, len(s.answers))
		s.mu.Unlock()
	}
	return min(max(leastShapes, maxAnswers/max(1, most)), mostShapes)
}
