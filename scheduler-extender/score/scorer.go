package score

import (
	"math"

	"github.com/carve-gpu/carve/scheduler-extender/fit"
)

// Scorer prices placements. It has room to reckon in, so each goroutine needs its own.
type Scorer struct {
	prices *Prices
	weight struct{ regret, fill, cpuPoor, slots, model, fragment int64 }

	node *fit.Node // as it is, without the pod
	load load
	// Of a share on one card: what is reckoned once for the node, and what cards in the same
	// state cost.
	before     standing
	cpu, mem   int64 // left on the node with the pod
	model      int64 // cost of the model, and of processors
	size       share
	amount     int64 // of cards that the pod takes
	least      int64
	memo       []int64
	stamps     []uint32 // of the memo's entries that are this node's
	stamp      uint32
	shareCost  fit.Prefer
	after      load // room for the node with the pod
	wholeFirst fit.Prefer
}

// NewScorer makes a scorer.
func NewScorer(p *Prices) *Scorer {
	s := &Scorer{}
	s.shareCost, s.wholeFirst = s.priceShare, func(c *fit.Card, after fit.Amount) int64 { return s.prices.preferCard(c, after) }
	s.Use(p)
	return s
}

// weightBits is the grain of weights.
const weightBits = 10

// Use goes on with other prices.
func (s *Scorer) Use(p *Prices) {
	s.prices = p
	whole := func(w float64) int64 { return int64(w*(1<<weightBits) + .5) }
	w := p.weights
	s.weight.regret, s.weight.fill, s.weight.cpuPoor = whole(w.Regret), whole(w.Fill), whole(w.CPUPoor)
	s.weight.slots, s.weight.model, s.weight.fragment = whole(w.Slots), whole(w.Model), whole(w.Fragment)
}

// Judge places the ask on the node's best cards. The lower the cost the better the node; costs
// are comparable within a generation of prices.
func (s *Scorer) Judge(n *fit.Node, a *fit.Ask) (fit.Placement, int64, bool) {
	s.node = n
	if len(a.Containers) == 1 && a.Containers[0].Cards == 1 && !a.Containers[0].Whole && len(n.Cards) > 0 {
		return s.judgeShare(a)
	}
	p, ok := fit.Choose(n, a, s.wholeFirst)
	if !ok {
		return nil, 0, false
	}
	return p, s.rounded(s.cost(a, p)), true
}

// cost is that of a placement on the node, in the grain of weights.
func (s *Scorer) cost(a *fit.Ask, p fit.Placement) int64 {
	l := &s.load
	l.take(s.prices, s.node, s.weight.fragment != 0)
	before := l.standing(l.cpu, l.mem)
	if len(a.Containers) > 1 || len(a.Containers) == 1 && !a.Containers[0].Whole {
		return s.several(a, p, before)
	}
	// No card, or whole ones: nothing is left of them to be priced.
	cards := 0
	for _, on := range p {
		cards += len(on)
	}
	cost := s.common(a, int64(cards)*one)
	for range cards {
		l.put(l.family.untouched, -1)
	}
	l.whole -= int64(cards)
	return cost + s.change(before, l.standing(l.without(a.Host)))
}

// several is the cost of pods that ask for shares on several cards.
func (s *Scorer) several(a *fit.Ask, p fit.Placement, before standing) int64 {
	f, n := s.load.family, s.node
	s.after.take(s.prices, fit.Apply(n, a, p), s.weight.fragment != 0)
	amount, worth := int64(0), int64(0)
	for ci, cards := range p {
		for _, at := range cards {
			c := &a.Containers[ci]
			if c.Whole {
				amount, worth = amount+one, worth+one
				continue
			}
			sh := percent(c.On(&n.Cards[at]), n.Cards[at].MemMiB)
			amount += f.table.AmountOf(sh.cores, sh.mem)
			worth += f.table.Price(sh.cores, sh.mem)
		}
	}
	regret := max(0, s.load.values-s.after.values-worth)
	return s.weight.regret*regret + s.common(a, amount) + s.change(before, s.after.standing(s.after.cpu, s.after.mem))
}

// judgeShare is Judge for what most pods with a share ask: one card of it.
func (s *Scorer) judgeShare(a *fit.Ask) (fit.Placement, int64, bool) {
	c := &a.Containers[0]
	s.least, s.stamp = math.MaxInt64, s.stamp+1
	p, ok := fit.Choose(s.node, a, func(card *fit.Card, after fit.Amount) int64 {
		if s.least == math.MaxInt64 {
			// The first card that fits: only now it is worth summing up the node.
			s.load.take(s.prices, s.node, s.weight.fragment != 0)
			s.before = s.load.standing(s.load.cpu, s.load.mem)
			s.cpu, s.mem = s.load.without(a.Host)
			s.size = percent(c.On(card), card.MemMiB)
			s.model = s.common(a, s.load.family.table.AmountOf(s.size.cores, s.size.mem))
		}
		cost := s.rounded(s.shareCost(card, after))
		s.least = min(s.least, cost)
		// Of cards between which prices see no difference the one that is in use already.
		if !card.Touched {
			cost++
		}
		return cost
	})
	return p, s.least, ok
}

// priceShare is what a share costs on a card of the node.
func (s *Scorer) priceShare(c *fit.Card, after fit.Amount) int64 {
	l, f := &s.load, s.load.family
	was, is := f.state(c, c.Used), f.state(c, after)
	key := 2 * was
	if c.Touched {
		key++
	}
	if len(s.memo) < 2*len(f.amount) {
		s.memo, s.stamps = make([]int64, 2*len(f.amount)), make([]uint32, 2*len(f.amount))
	}
	if s.stamps[key] == s.stamp {
		return s.memo[key]
	}
	regret := max(0, f.table.Value(was)-f.table.Value(is)-f.table.Price(s.size.cores, s.size.mem))
	l.move(was, is, !c.Touched)
	cost := s.weight.regret*regret + s.model + s.change(s.before, l.standing(s.cpu, s.mem))
	l.move(is, was, false)
	if !c.Touched {
		l.whole++
	}
	s.memo[key], s.stamps[key] = cost, s.stamp
	return cost
}

// common is what a placement costs on whichever cards of the node: for processors and model.
func (s *Scorer) common(a *fit.Ask, amount int64) int64 {
	l := &s.load
	if s.amount = amount; amount == 0 {
		return 0
	}
	cost := s.weight.model * (amount * l.market.insist / one)
	if cpu := a.Host.CPUMilli; s.node.HostKnown && l.cpu > 0 {
		cost += s.weight.cpuPoor * max(0, cpu*l.free/l.cpu-amount)
	}
	return cost
}

// change is what it costs that the node is good for less.
func (s *Scorer) change(was, is standing) int64 {
	return s.weight.fill*(is.unused-was.unused) + s.weight.slots*(was.places-is.places) + s.weight.fragment*(is.fragment-was.fragment)
}

// rounded is a cost without what is too little to count: less than a bucket, or on a node of
// one card, where there are no others to be kept whole, than a tenth of the share.
func (s *Scorer) rounded(cost int64) int64 {
	grain := int64(bucket)
	if len(s.node.Cards) == 1 && s.amount > 0 {
		grain = min(grain, s.amount/10)
	}
	grain = max(1, grain<<weightBits)
	rest := cost % grain
	if rest < 0 {
		rest += grain
	}
	return cost - rest
}

// load is a node in numbers.
type load struct {
	market *market
	family *family
	cpu    int64   // left on the node; where that isn't known, as much as anybody wants
	mem    int64   // likewise
	free   int64   // of all cards, in parts of One
	whole  int64   // cards that nothing is on
	fits   []int64 // by size: how many shares go into what is left
	small  []int64 // by size: what is left of cards that none goes into; where wanted
	values int64   // of the cards
}

const unknown = math.MaxInt64 / 2

func (l *load) take(p *Prices, n *fit.Node, fragment bool) {
	l.free, l.whole, l.values = 0, 0, 0
	l.cpu, l.mem = unknown, unknown
	if n.HostKnown {
		l.cpu, l.mem = max(0, n.Host.CPUMilli), max(0, n.Host.MemMiB)
	}
	l.market, l.family = p.other, p.families[0]
	if len(n.Cards) > 0 {
		l.market, l.family = p.market(n.Cards[0].Model), p.family(n.Cards[0].MemMiB)
	}
	l.fits = append(l.fits[:0], l.family.none...)
	l.small = l.small[:0]
	if fragment {
		l.small = append(l.small, l.family.none...)
	}
	for i := range n.Cards {
		if c := &n.Cards[i]; !c.Whole && c.Blocked == "" {
			l.put(l.family.state(c, c.Used), 1)
			if !c.Touched {
				l.whole++
			}
		}
	}
}

// put adds a card in a state, or takes it away.
func (l *load) put(state int, sign int64) {
	l.free += sign * l.family.amount[state]
	l.values += sign * l.family.table.Value(state)
	for k, f := range l.family.fits[state] {
		l.fits[k] += sign * f
		if f == 0 && len(l.small) > 0 {
			l.small[k] += sign * l.family.amount[state]
		}
	}
}

// move changes a card's state.
func (l *load) move(was, is int, opens bool) {
	l.put(was, -1)
	l.put(is, 1)
	if opens {
		l.whole--
	}
}

// without is what the pod leaves of the host.
func (l *load) without(h fit.Host) (cpu, mem int64) {
	return max(0, l.cpu-h.CPUMilli), max(0, l.mem-h.MemMiB)
}

// standing is what a node is good for.
type standing struct {
	unused   int64 // of free cards, when the node is filled with pods of one kind; mean over kinds
	places   int64 // for pods of several cards, by worth
	fragment int64 // of free cards, what the typical pod can't use; mean over all pods
}

func (l *load) standing(cpu, mem int64) standing {
	var used, lost int64 // in parts of One of parts of One
	fragment := len(l.small) > 0
	for i := range l.market.shapes {
		s := &l.market.shapes[i]
		n := s.times(l)
		if n > 0 && n*s.cpu > cpu {
			n = cpu / s.cpu
		}
		used += s.part * (n * s.amount)
		if fragment {
			switch {
			case n == 0:
				lost += s.part * l.free
			case s.cards > 0:
				lost += s.part * (l.free - l.whole*one)
			default:
				lost += s.part * l.small[s.size]
			}
		}
	}
	m := standing{unused: l.free - used/one}
	if fragment {
		lost += (l.market.others + l.market.noCards) * l.free
		m.fragment = lost / (one + l.market.noCards)
	}
	for i := range l.market.several {
		s := &l.market.several[i]
		n := l.whole / int64(s.cards)
		if n > 0 && n*s.cpu > cpu {
			n = cpu / s.cpu
		}
		if n > 0 && n*s.mem > mem {
			n = mem / s.mem
		}
		m.places += n * s.worth
	}
	return m
}

// times is how many pods of the shape the node's cards have room for.
func (s *kind) times(l *load) int64 {
	if s.cards > 0 {
		return l.whole / int64(s.cards)
	}
	return l.fits[s.size]
}
