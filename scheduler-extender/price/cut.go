package price

import (
	"cmp"
	"slices"
)

// One is the value of a whole card that is free.
const One = 1 << 20

// Percent is a part of a card.
const full = 100

// Slot is a share that pods ask of cards: percents of compute and of memory, and how much of
// the demand it is.
type Slot struct {
	Cores, Mem int
	Demand     float64
}

// Table is what is left of a card, and its value. It is never changed.
//
// Where all shares are of equal parts of compute and memory, or of memory alone, one number
// says what is left; otherwise it takes two.
type Table struct {
	unit       int // percent
	line       bool
	freeCores  bool // compute isn't asked for at all
	cores, mem int  // states along each axis; the axis of cores has one where line
	value      []int64
	slots      []Slot  // ascending
	prices     []int64 // of the slots
	cards      float64
}

// Cut makes the table of cards that are shared by such slots. oversell is how much compute of
// a card is handed out, in percent of it, at least 100. unit is the grain, in percent: sizes
// are rounded up to it.
func Cut(slots []Slot, oversell, unit int) *Table {
	t := &Table{unit: max(1, unit), line: true, freeCores: true}
	t.slots = merge(slots, max(full, oversell))
	if len(t.slots) > maxKinds {
		t.slots = most(t.slots)
	}
	for _, s := range t.slots {
		t.freeCores = t.freeCores && s.Cores == 0
		t.line = t.line && s.Cores == s.Mem
	}
	t.line = t.line || t.freeCores
	t.cores, t.mem = max(full, oversell)/t.unit+1, full/t.unit+1
	if t.line {
		t.unit, t.cores, t.mem = 1, 1, full+1
	}
	c := cutter{table: t, float: make([]float64, t.cores*t.mem), from: make([]int32, t.cores*t.mem)}
	demand, alone := make([]float64, len(t.slots)), make([]int, len(t.slots))
	for k, s := range t.slots {
		demand[k] = s.Demand
		size := t.size(s)
		c.size = append(c.size, size)
		alone[k] = full / t.unit / max(1, size.mem)
		if size.cores > 0 {
			alone[k] = min(alone[k], (t.cores-1)/size.cores)
		}
	}
	prices, cards := cover(demand, alone, c.best)
	t.cards = cards
	t.prices = make([]int64, len(prices))
	for k := range prices {
		t.prices[k] = int64(prices[k]*One + 0.5)
	}
	t.value = c.values(t.prices)
	return t
}

// maxKinds bounds the work: it grows with the square of the kinds. Rare ones have no price of
// their own, then, but the value of their room.
const maxKinds = 48

// most are the slots that are asked for most.
func most(slots []Slot) []Slot {
	out := slices.Clone(slots)
	slices.SortStableFunc(out, func(a, b Slot) int { return cmp.Compare(b.Demand*float64(b.Mem), a.Demand*float64(a.Mem)) })
	out = out[:maxKinds]
	slices.SortFunc(out, bySize)
	return out
}

func bySize(a, b Slot) int { return cmp.Or(cmp.Compare(a.Mem, b.Mem), cmp.Compare(a.Cores, b.Cores)) }

// merge joins slots of one size, leaves out what can't be and sorts.
func merge(slots []Slot, oversell int) []Slot {
	var out []Slot
	for _, s := range slots {
		s.Cores = max(0, s.Cores)
		if s.Mem < 1 || s.Mem > full || s.Cores > oversell || s.Demand <= 0 {
			continue
		}
		at := slices.IndexFunc(out, func(o Slot) bool { return o.Cores == s.Cores && o.Mem == s.Mem })
		if at < 0 {
			out = append(out, s)
			continue
		}
		out[at].Demand += s.Demand
	}
	slices.SortFunc(out, bySize)
	return out
}

// units is a size, or what is left, in the table's grain.
type units struct{ cores, mem int }

// size rounds up.
func (t *Table) size(s Slot) units {
	mem := (s.Mem + t.unit - 1) / t.unit
	if t.line {
		return units{0, mem}
	}
	return units{min(t.cores-1, (s.Cores+t.unit-1)/t.unit), min(t.mem-1, mem)}
}

// States is how many states of a card the table tells apart; they are numbered from 0.
func (t *Table) States() int { return len(t.value) }

// State is that of a card with so many percent of compute and of memory left.
func (t *Table) State(cores, mem int) int {
	mem = min(max(mem, 0), full) / t.unit
	switch {
	case t.freeCores:
		return mem
	case t.line:
		return min(mem, min(max(cores, 0), full))
	}
	return min(max(cores, 0)/t.unit, t.cores-1)*t.mem + mem
}

// Value of what is left in a state, in parts of One. It never falls when more is left, and two
// rests together are worth what they are alone, or more.
func (t *Table) Value(state int) int64 { return t.value[state] }

// Price of a share: that of its slot, or, where no slot is of its size, the value of just as
// much room.
func (t *Table) Price(cores, mem int) int64 {
	for k, s := range t.slots {
		if s.Mem == mem && (s.Cores == cores || t.freeCores) {
			return t.prices[k]
		}
	}
	return t.value[t.State(cores, mem)]
}

// Cards is how many cards the demand takes at the least: what the program is solved for.
func (t *Table) Cards() float64 { return t.cards }

// Amount is how much of a card is left in a state, in parts of One: the mean of compute and
// memory where both count.
func (t *Table) Amount(state int) int64 {
	if t.line {
		return int64(state) * One / full
	}
	return int64(state/t.mem+state%t.mem) * int64(t.unit) * One / (2 * full)
}

// AmountOf is how much of a card a share takes, by the same measure.
func (t *Table) AmountOf(cores, mem int) int64 {
	s := t.size(Slot{Cores: cores, Mem: mem})
	return t.Amount(s.cores*t.mem + s.mem)
}

// Fits is how often a share fits into what is left in a state.
func (t *Table) Fits(state, cores, mem int) int {
	s := t.size(Slot{Cores: cores, Mem: mem})
	n := full * full
	if s.mem > 0 {
		n = state % t.mem / s.mem
	}
	if s.cores > 0 {
		n = min(n, state/t.mem/s.cores)
	}
	return n
}

// cutter finds the best patterns.
type cutter struct {
	table *Table
	size  []units
	float []float64
	from  []int32 // by state: the slot that was put in last, plus one; 0 where nothing was
	count pattern
}

// best is the most valuable pattern: a knapsack of any number of slots of each kind, by dynamic
// programming over states, kind by kind.
func (c *cutter) best(prices []float64) (pattern, float64) {
	t := c.table
	clear(c.float)
	clear(c.from)
	for k, s := range c.size {
		price := prices[k]
		if price <= 0 {
			continue
		}
		for cores := s.cores; cores < t.cores; cores++ {
			row, from := c.float[cores*t.mem:(cores+1)*t.mem], c.from[cores*t.mem:(cores+1)*t.mem]
			rest := c.float[(cores-s.cores)*t.mem:]
			for mem := s.mem; mem < len(row); mem++ {
				if w := price + rest[mem-s.mem]; w > row[mem]+1e-12 {
					row[mem], from[mem] = w, int32(k+1)
				}
			}
		}
	}
	whole := len(c.float) - 1
	c.count = append(c.count[:0], make([]int, len(prices))...)
	for state := whole; c.from[state] != 0; {
		k := c.from[state] - 1
		c.count[k]++
		state -= c.size[k].cores*t.mem + c.size[k].mem
	}
	return c.count, c.float[whole]
}

// values is the same in whole numbers, for all states.
func (c *cutter) values(prices []int64) []int64 {
	t := c.table
	value := make([]int64, len(c.float))
	for k, s := range c.size {
		for cores := s.cores; cores < t.cores; cores++ {
			row, rest := value[cores*t.mem:(cores+1)*t.mem], value[(cores-s.cores)*t.mem:]
			for mem := s.mem; mem < len(row); mem++ {
				row[mem] = max(row[mem], prices[k]+rest[mem-s.mem])
			}
		}
	}
	return value
}
