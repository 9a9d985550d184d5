package price

import "math/bits"

// Profile is a kind of MIG instance.
type Profile struct {
	Name    string
	Compute int   // compute slices, of Geometry.Compute
	Memory  int   // memory slices, side by side
	Starts  []int // of the memory slices where it may begin
}

// Geometry is how cards of a model may be cut into instances.
type Geometry struct {
	Compute, Memory int
	Profiles        []Profile
}

// A100 is the geometry of A100 cards with 80 GB and of those that are cut like them. A node's
// own driver says which one holds there.
var A100 = Geometry{Compute: 7, Memory: 8, Profiles: []Profile{
	{"1g.10gb", 1, 1, []int{0, 1, 2, 3, 4, 5, 6}},
	{"1g.20gb", 1, 2, []int{0, 2, 4, 6}},
	{"2g.20gb", 2, 2, []int{0, 2, 4}},
	{"3g.40gb", 3, 4, []int{0, 4}},
	{"4g.40gb", 4, 4, []int{0}},
	{"7g.80gb", 7, 8, []int{0}},
}}

// Mask is a card in instances: the memory slices that are taken, one bit each, and how many
// compute slices are.
type Mask struct {
	Taken   uint16
	Compute int
}

// Layout is what is left of a card in instances, and its value: the same as Table, with the
// states that the geometry allows. It is never changed.
type Layout struct {
	geometry Geometry
	prices   []int64
	value    []int64 // by taken slices, then by compute
	cards    float64
}

// Lay makes the layout of cards that are asked for instances: demand says how often each of the
// geometry's profiles is.
func Lay(g Geometry, demand []float64) *Layout {
	l := &Layout{geometry: g}
	var asked []int // profiles that are
	var need []float64
	total := 0.0
	for i := range g.Profiles {
		if i < len(demand) {
			total += max(0, demand[i])
		}
	}
	for i := range g.Profiles {
		if i < len(demand) && demand[i] > rare*total {
			asked, need = append(asked, i), append(need, demand[i])
		}
	}
	w := &worths[float64]{g: g, asked: asked}
	w.reach()
	alone := make([]int, len(asked))
	for k := range asked {
		only := make([]float64, len(asked))
		only[k] = 1
		_, n := w.best(only)
		alone[k] = max(1, int(n+.5))
	}
	prices, cards := cover(need, alone, w.best)
	l.cards = cards
	l.prices = make([]int64, len(g.Profiles))
	whole := make([]int64, len(asked))
	for k, i := range asked {
		whole[k] = int64(prices[k]*One + 0.5)
		l.prices[i] = whole[k]
	}
	exact := &worths[int64]{g: g, asked: asked}
	for taken := 1<<g.Memory - 1; taken >= 0; taken-- {
		for compute := g.Compute; compute >= 0; compute-- {
			exact.add(Mask{uint16(taken), compute})
		}
	}
	exact.fill(whole)
	l.value = exact.value
	return l
}

// Cards is how many cards the demand takes at the least.
func (l *Layout) Cards() float64 { return l.cards }

// Price of a profile.
func (l *Layout) Price(profile int) int64 { return l.prices[profile] }

// rare is the part of the demand from which on a kind has a price. Were room worth what a kind
// pays that hardly comes, it would be kept for nobody.
const rare = 0.01

// Value of what is left, in parts of One.
func (l *Layout) Value(m Mask) int64 { return l.value[int(m.Taken)*(l.geometry.Compute+1)+m.Compute] }

// Put is the card with an instance on it, and whether there is room for it at this start.
func (g *Geometry) Put(m Mask, profile, start int) (Mask, bool) {
	p := &g.Profiles[profile]
	at := (uint16(1)<<p.Memory - 1) << start
	if m.Taken&at != 0 || m.Compute+p.Compute > g.Compute {
		return m, false
	}
	return Mask{m.Taken | at, m.Compute + p.Compute}, true
}

// Fits reports whether an instance has room somewhere.
func (g *Geometry) Fits(m Mask, profile int) bool {
	for _, s := range g.Profiles[profile].Starts {
		if _, ok := g.Put(m, profile, s); ok {
			return true
		}
	}
	return false
}

// Best is where on a card an instance costs the least, and what: the value that the card loses
// beyond the instance's price. Among equals the fuller card should be taken, so that is in the
// cost's last bits.
func (l *Layout) Best(m Mask, profile int) (start int, cost int64, ok bool) {
	g := &l.geometry
	for _, s := range g.Profiles[profile].Starts {
		after, fits := g.Put(m, profile, s)
		if !fits {
			continue
		}
		// Prices are rounded, so what should be equal differs by a little. Of equal starts the last
		// one bars the fewest others.
		c := max(0, l.Value(m)-l.Value(after)-l.prices[profile])>>10<<8 + int64(g.Memory-bits.OnesCount16(m.Taken))
		if !ok || c <= cost {
			start, cost, ok = s, c, true
		}
	}
	return start, cost, ok
}

// worths are the values of states at given prices.
type worths[N int64 | float64] struct {
	g     Geometry
	asked []int
	moves []move // those that lead away from a state come before those that lead to it
	value []N
	count pattern
}

// move is an instance put on a card.
type move struct{ from, to, kind int }

func (w *worths[N]) at(m Mask) int { return int(m.Taken)*(w.g.Compute+1) + m.Compute }

// reach adds the states that an empty card can come to.
func (w *worths[N]) reach() {
	seen := map[Mask]bool{}
	var visit func(m Mask)
	visit = func(m Mask) {
		if seen[m] {
			return
		}
		seen[m] = true
		for _, profile := range w.asked {
			for _, s := range w.g.Profiles[profile].Starts {
				if after, ok := w.g.Put(m, profile, s); ok {
					visit(after)
				}
			}
		}
		w.add(m)
	}
	visit(Mask{})
}

// add adds a state. Those that it leads to were added before.
func (w *worths[N]) add(m Mask) {
	for k, profile := range w.asked {
		for _, s := range w.g.Profiles[profile].Starts {
			if after, ok := w.g.Put(m, profile, s); ok {
				w.moves = append(w.moves, move{w.at(m), w.at(after), k})
			}
		}
	}
}

func (w *worths[N]) fill(prices []N) {
	w.value = append(w.value[:0], make([]N, (w.g.Compute+1)<<w.g.Memory)...)
	for _, m := range w.moves {
		w.value[m.from] = max(w.value[m.from], prices[m.kind]+w.value[m.to])
	}
}

// best is the most valuable way to cut a card.
func (w *worths[N]) best(prices []N) (pattern, N) {
	w.fill(prices)
	w.count = append(w.count[:0], make(pattern, len(prices))...)
	at := 0
	// Backwards, what leads away from a state comes after what leads to it.
	for i := len(w.moves) - 1; i >= 0; i-- {
		if m := w.moves[i]; m.from == at && prices[m.kind] > 0 && prices[m.kind]+w.value[m.to] == w.value[at] {
			w.count[m.kind]++
			at = m.to
		}
	}
	return w.count, w.value[0]
}
