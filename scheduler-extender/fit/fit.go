package fit

import (
	"sort"

	"github.com/carve-gpu/carve/api"
)

// searchSteps bounds the search for pods with several containers to a few
// milliseconds. Real pods need a few steps; only contrived mixes get here.
const searchSteps = 2000

// Prefer orders cards for a container: the lowest value is tried first. after
// is what would be in use on the card with the container on it. Equal values
// are ordered by position, so the choice is deterministic.
type Prefer func(c *Card, after Amount) int64

// Placement holds, for each container of an Ask, its cards as positions in
// Node.Cards, ascending.
type Placement [][]int

// Fit places the ask on the node's cards, or says why it can't be. It is
// exact: if there is a placement, one is found (within a step limit that has a
// refusal of its own). No card is booked twice by containers that run at the
// same time, and a container's cards are different ones.
func Fit(n *Node, a *Ask, prefer Prefer) (Placement, *Refusal) {
	if n.Blocked != "" {
		return nil, &Refusal{Reason: n.Blocked, Card: -1, Detail: n.Why, distance: distanceNode}
	}
	if r := n.short(a); r != nil {
		return nil, r
	}
	p, ok, limit := choose(n, a, prefer)
	if !ok {
		return nil, explain(n, a, limit)
	}
	return p, nil
}

// Choose is Fit for who asks many nodes and needs no reason from those that refuse.
func Choose(n *Node, a *Ask, prefer Prefer) (Placement, bool) {
	if n.Blocked != "" || !n.hosts(a) {
		return nil, false
	}
	p, ok, _ := choose(n, a, prefer)
	return p, ok
}

// choose looks at cards alone. limit is true where the search was given up.
func choose(n *Node, a *Ask, prefer Prefer) (p Placement, ok, limit bool) {
	switch len(a.Containers) {
	case 0:
		return Placement{}, true, false
	case 1:
		cards := fitOne(n, a, &a.Containers[0], prefer)
		if cards == nil {
			return nil, false, false
		}
		return Placement{cards}, true, false
	}
	s := search{node: n, ask: a, prefer: prefer, open: make([]bool, len(n.Cards)),
		on: make([]uint64, len(n.Cards)), place: make(Placement, len(a.Containers))}
	for i := range n.Cards {
		s.open[i] = n.Cards[i].Blocked == "" && a.admits(&n.Cards[i]) == ""
	}
	if !s.container(0) {
		return nil, false, s.steps >= searchSteps
	}
	for _, cards := range s.place {
		sort.Ints(cards)
	}
	return s.place, true, false
}

// fits reports whether the container, alone of its pod, fits on the card.
func fits(card *Card, c *Container, amount Amount) bool {
	return c.suits(card) && card.holds(amount, c.slots(card))
}

// suits reports whether the container may be on the card, whatever it takes of it.
func (c *Container) suits(card *Card) bool {
	return !card.Whole && c.bars(card) == 0 && (!c.whole(card) || !card.Touched && card.MemMiB >= c.MemMiB)
}

// holds reports whether the card has room for the amount, where it takes so many
// containers.
func (c *Card) holds(a Amount, slots int) bool {
	return c.Used.MemMiB+a.MemMiB <= c.MemMiB &&
		(a.Cores == 0 || c.Used.Cores+a.Cores <= allCores) &&
		c.Used.Slots+a.Slots <= slots
}

// fitOne is Fit for pods with one container: the k best cards, without search.
func fitOne(n *Node, a *Ask, c *Container, prefer Prefer) []int {
	if c.Cards > len(n.Cards) {
		return nil
	}
	if c.Whole && c.Isolation == "" && c.Cards > 1 && replicas(n) {
		// Whole cards or replicas, and a container has all of one kind.
		for _, mode := range [...]api.Mode{api.ModeTimeslice, api.ModeExclusive} {
			kind := *c
			kind.Isolation, kind.Mode = mode, mode
			kind.Whole, kind.usual = mode == api.ModeExclusive, mode == api.ModeExclusive
			if best := fitOne(n, a, &kind, prefer); best != nil {
				return best
			}
		}
		return nil
	}
	best := make([]int, 0, c.Cards)
	var room [16]int64
	costs := room[:0]
	for i := range n.Cards {
		card := &n.Cards[i]
		if card.Blocked != "" {
			continue
		}
		amount := c.On(card)
		if !fits(card, c, amount) || a.admits(card) != "" {
			continue
		}
		cost := prefer(card, card.Used.Plus(amount))
		at := len(costs)
		for at > 0 && cost < costs[at-1] {
			at--
		}
		if at == c.Cards {
			continue
		}
		if len(costs) < c.Cards {
			costs, best = append(costs, 0), append(best, 0)
		}
		copy(costs[at+1:], costs[at:])
		copy(best[at+1:], best[at:])
		costs[at], best[at] = cost, i
	}
	if len(best) < c.Cards {
		return nil
	}
	sort.Ints(best)
	return best
}

// search is a depth-first search over containers, then over the cards of each.
type search struct {
	node   *Node
	ask    *Ask
	prefer Prefer
	open   []bool   // cards that may be used at all
	on     []uint64 // per card, the containers placed on it so far
	place  Placement
	steps  int
	uses   []Use // scratch
}

// candidate is a card that a container could take now.
type candidate struct {
	card    int
	covered bool // the pod's peak on the card doesn't grow
	cost    int64
}

// held is the pod's peak on a card with the given containers on it.
func (s *search) held(card int, on uint64) Amount {
	s.uses = s.uses[:0]
	for i := range s.ask.Containers {
		if on&(1<<i) != 0 {
			c := &s.ask.Containers[i]
			s.uses = append(s.uses, Use{c.Kind, c.On(&s.node.Cards[card])})
		}
	}
	return Peak(s.uses)
}

func (s *search) container(depth int) bool {
	if depth == len(s.ask.order) {
		return true
	}
	ci := s.ask.order[depth]
	c := &s.ask.Containers[ci]
	var list []candidate
	for i := range s.node.Cards {
		card := &s.node.Cards[i]
		if !s.open[i] || !c.suits(card) {
			continue
		}
		before, now := s.held(i, s.on[i]), s.held(i, s.on[i]|1<<ci)
		if !card.holds(now, c.slots(card)) {
			continue
		}
		list = append(list, candidate{i, now == before, s.prefer(card, card.Used.Plus(now))})
	}
	if len(list) < c.Cards {
		return false
	}
	sort.SliceStable(list, func(i, j int) bool {
		if list[i].covered != list[j].covered {
			return list[i].covered
		}
		return list[i].cost < list[j].cost
	})
	return s.cards(depth, list, 0, c.Cards)
}

// cards chooses the remaining cards of the container from list[from:].
func (s *search) cards(depth int, list []candidate, from, remaining int) bool {
	if remaining == 0 {
		return s.container(depth + 1)
	}
	ci := s.ask.order[depth]
	failed := -1
	for i := from; len(list)-i >= remaining; i++ {
		card := list[i].card
		// A card in the same state as one that led nowhere leads nowhere.
		if failed >= 0 && s.same(failed, card) {
			continue
		}
		if p := s.place[ci]; len(p) > 0 {
			// A container has whole cards or replicas, and not both.
			c := &s.ask.Containers[ci]
			if c.Modality(&s.node.Cards[p[0]]) != c.Modality(&s.node.Cards[card]) {
				continue
			}
		}
		if s.steps++; s.steps > searchSteps {
			return false
		}
		s.on[card] |= 1 << ci
		s.place[ci] = append(s.place[ci], card)
		if s.cards(depth, list, i+1, remaining-1) {
			return true
		}
		s.place[ci] = s.place[ci][:len(s.place[ci])-1]
		s.on[card] &^= 1 << ci
		failed = card
	}
	return false
}

// same reports whether two cards are interchangeable for the rest of the search.
func (s *search) same(i, j int) bool {
	a, b := &s.node.Cards[i], &s.node.Cards[j]
	return s.on[i] == s.on[j] && a.MemMiB == b.MemMiB && a.Slots == b.Slots &&
		a.Used == b.Used && a.Touched == b.Touched && a.Whole == b.Whole && SameModes(a, b) // hence, of two that suit a container, the same mode
}

// replicas reports whether some card of the node is given in replicas.
func replicas(n *Node) bool {
	for i := range n.Cards {
		if n.Cards[i].Replicated() {
			return true
		}
	}
	return false
}

// Apply books a placement on a copy of the node, so that a caller can go on
// placing further pods in its head. The node itself isn't changed.
func Apply(n *Node, a *Ask, p Placement) *Node {
	out := *n
	out.Cards = append([]Card(nil), n.Cards...)
	if n.HostKnown {
		out.Host = n.Host.Minus(a.Host)
	}
	s := search{node: n, ask: a, on: make([]uint64, len(n.Cards))}
	for ci, cards := range p {
		for _, i := range cards {
			s.on[i] |= 1 << ci
			// By the card as it was: what it is given as doesn't change on the way.
			if c := &a.Containers[ci]; c.whole(&n.Cards[i]) {
				out.Cards[i].Whole = true
			} else {
				out.Cards[i].Mode = JoinModes(out.Cards[i].Mode, c.Modality(&n.Cards[i]))
			}
		}
	}
	for i := range out.Cards {
		if s.on[i] != 0 {
			out.Cards[i].Used = out.Cards[i].Used.Plus(s.held(i, s.on[i]))
			out.Cards[i].Touched = true
		}
	}
	return &out
}
