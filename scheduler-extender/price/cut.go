package price

import "slices"

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
	for _, s := range t.slots {
		t.freeCores = t.freeCores && s.Cores == 0
		t.line = t.line && s.Cores == s.Mem
	}
	t.line = t.line || t.freeCores
	t.cores, t.mem = max(full, oversell)/t.unit+1, full/t.unit+1
	if t.line {
		t.unit, t.cores, t.mem = 1, 1, full+1
	}
	c := cutter{table: t, whole: t.cores*t.mem - 1, float: make([]float64, t.cores*t.mem), from: make([]int32, t.cores*t.mem)}
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
	slices.SortFunc(out, func(a, b Slot) int {
		if a.Mem != b.Mem {
			return a.Mem - b.Mem
		}
		return a.Cores - b.Cores
	})
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
	whole int
	float []float64
	from  []int32 // by state: the slot that was put in last, or how else it was come by
	count pattern
}

const (
	fromNothing int32 = -1 - iota
	fromLessMem
	fromLessCores
)

// best is the most valuable pattern: a knapsack, by dynamic programming over states.
func (c *cutter) best(prices []float64) (pattern, float64) {
	t := c.table
	for state := range c.float {
		v, from := 0.0, fromNothing
		cores, mem := state/t.mem, state%t.mem
		if mem > 0 {
			v, from = c.float[state-1], fromLessMem
		}
		if cores > 0 && c.float[state-t.mem] > v {
			v, from = c.float[state-t.mem], fromLessCores
		}
		for k, s := range c.size {
			if s.cores <= cores && s.mem <= mem {
				if w := prices[k] + c.float[state-s.cores*t.mem-s.mem]; w > v+1e-12 {
					v, from = w, int32(k)
				}
			}
		}
		c.float[state], c.from[state] = v, from
	}
	c.count = append(c.count[:0], make([]int, len(prices))...)
	for state := c.whole; c.from[state] != fromNothing; {
		switch from := c.from[state]; from {
		case fromLessMem:
			state--
		case fromLessCores:
			state -= t.mem
		default:
			c.count[from]++
			state -= c.size[from].cores*t.mem + c.size[from].mem
		}
	}
	return c.count, c.float[c.whole]
}

// values is the same in whole numbers, for all states.
func (c *cutter) values(prices []int64) []int64 {
	t := c.table
	value := make([]int64, len(c.float))
	for state := range value {
		cores, mem := state/t.mem, state%t.mem
		if mem > 0 {
			value[state] = value[state-1]
		}
		if cores > 0 {
			value[state] = max(value[state], value[state-t.mem])
		}
		for k, s := range c.size {
			if s.cores <= cores && s.mem <= mem {
				value[state] = max(value[state], prices[k]+value[state-s.cores*t.mem-s.mem])
			}
		}
	}
	return value
}
