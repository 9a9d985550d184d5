package price

import (
	"fmt"
	"math"
	"math/rand"
	"testing"

	"pgregory.net/rapid"
)

func drawSlots(t *rapid.T, kinds int, plane bool) []Slot {
	var out []Slot
	for range rapid.IntRange(1, kinds).Draw(t, "kinds") {
		s := Slot{Mem: rapid.IntRange(15, 100).Draw(t, "mem"), Demand: float64(rapid.IntRange(1, 50).Draw(t, "demand"))}
		if s.Cores = s.Mem; plane {
			s.Cores = 5 * rapid.IntRange(3, 20).Draw(t, "cores")
			s.Mem = 5 * max(3, s.Mem/5)
		}
		out = append(out, s)
	}
	return out
}

// patterns are all ways to cut a card, by trying.
func patterns(t *Table, at int, cores, mem int, so pattern, do func(pattern)) {
	if at == len(t.slots) {
		do(so)
		return
	}
	s := t.slots[at]
	for n := 0; n*s.Mem <= mem && (t.line || n*s.Cores <= cores); n++ {
		so[at] = n
		patterns(t, at+1, cores-n*s.Cores, mem-n*s.Mem, so, do)
	}
	so[at] = 0
}

// solve is the least number of cards by trying every basis: all ways to use as many patterns,
// or slots too many, as there are kinds.
func solve(demand []float64, columns [][]float64) float64 {
	m, least := len(demand), math.Inf(1)
	for k := range m {
		extra := make([]float64, m+1) // the last number is the cost
		extra[k] = -1
		columns = append(columns, extra)
	}
	var choose func(from int, chosen []int)
	choose = func(from int, chosen []int) {
		if len(chosen) == m {
			a := make([][]float64, m)
			for i := range a {
				for _, c := range chosen {
					a[i] = append(a[i], columns[c][i])
				}
				a[i] = append(a[i], demand[i])
			}
			if x := eliminate(a); x != nil {
				cost := 0.0
				for i, c := range chosen {
					if x[i] < -1e-9 {
						return
					}
					cost += x[i] * columns[c][m]
				}
				least = min(least, cost)
			}
			return
		}
		for c := from; c < len(columns); c++ {
			choose(c+1, append(chosen, c))
		}
	}
	choose(0, nil)
	return least
}

func eliminate(a [][]float64) []float64 {
	m := len(a)
	for i := range m {
		p := i
		for r := i; r < m; r++ {
			if math.Abs(a[r][i]) > math.Abs(a[p][i]) {
				p = r
			}
		}
		if math.Abs(a[p][i]) < 1e-12 {
			return nil
		}
		a[i], a[p] = a[p], a[i]
		for r := range m {
			if f := a[r][i] / a[i][i]; r != i {
				for c := i; c <= m; c++ {
					a[r][c] -= f * a[i][c]
				}
			}
		}
	}
	x := make([]float64, m)
	for i := range x {
		x[i] = a[i][m] / a[i][i]
	}
	return x
}

// TestTheFewestCardsAreThoseOfTryingEverything also holds the prices to what they are: no
// pattern is worth more than a card, and the demand is worth the cards that it takes.
func TestTheFewestCardsAreThoseOfTryingEverything(t *testing.T) {
	for _, plane := range []bool{false, true} {
		t.Run(fmt.Sprintf("plane %t", plane), func(t *testing.T) {
			rapid.Check(t, func(t *rapid.T) {
				table := Cut(drawSlots(t, 3, plane), full, 5)
				var columns [][]float64
				patterns(table, 0, full, full, make(pattern, len(table.slots)), func(p pattern) {
					column, worth := make([]float64, len(p)+1), int64(0)
					for k, n := range p {
						column[k] = float64(n)
						worth += int64(n) * table.prices[k]
					}
					column[len(p)] = 1
					if worth > One+int64(len(p))*full {
						t.Fatalf("pattern %v is worth %d of %d", p, worth, One)
					}
					columns = append(columns, column)
				})
				var demand []float64
				worth := 0.0
				for k, s := range table.slots {
					demand = append(demand, s.Demand)
					worth += s.Demand * float64(table.prices[k]) / One
				}
				want := solve(demand, columns)
				if math.Abs(table.Cards()-want) > 1e-6*want || math.Abs(worth-want) > 1e-4*want {
					t.Fatalf("%d slots: %v cards, prices say %v, trying says %v", len(demand), table.Cards(), worth, want)
				}
			})
		})
	}
}

// TestValuesNeverFallAndAddUp holds what makes regret never negative.
func TestValuesNeverFallAndAddUp(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		plane := rapid.Bool().Draw(t, "plane")
		oversell := rapid.SampledFrom([]int{100, 150}).Draw(t, "oversell")
		table := Cut(drawSlots(t, 12, plane), oversell, rapid.SampledFrom([]int{2, 5, 10}).Draw(t, "unit"))
		cores, mem := 0, full
		if !table.line {
			cores = oversell
		}
		for range 200 {
			part := func(of int, name string) (int, int) {
				a := rapid.IntRange(0, of).Draw(t, name)
				return a, rapid.IntRange(0, of-a).Draw(t, name)
			}
			am, bm := part(mem, "mem")
			ac, bc := part(cores, "cores")
			if table.line {
				ac, bc = full, full
			}
			at := func(c, m int) int64 { return table.Value(table.State(min(c, max(full, oversell)), m)) }
			a, b, both := at(ac, am), at(bc, bm), at(ac+bc, am+bm)
			if a+b > both {
				t.Fatalf("(%d,%d) is worth %d, (%d,%d) %d, both %d", ac, am, a, bc, bm, b, both)
			}
			if a < 0 || a > both {
				t.Fatalf("(%d,%d) is worth %d, with more %d", ac, am, a, both)
			}
		}
		for k, s := range table.slots {
			if p := table.Price(s.Cores, s.Mem); p != table.prices[k] || p < 0 || p > One {
				t.Fatalf("slot %+v costs %d", s, p)
			}
		}
	})
}

func TestTablesAreTheSameByteForByte(t *testing.T) {
	slots := []Slot{{81, 81, 1078}, {47, 47, 750}, {32, 32, 328}, {65, 65, 253}, {23, 23, 140}, {46, 46, 128}, {59, 59, 75}, {16, 16, 74}, {55, 55, 72},
		{22, 22, 62}, {37, 37, 47}, {11, 11, 24}, {48, 48, 19}, {5, 5, 7}, {33, 33, 7}, {35, 35, 6}, {27, 27, 4}, {44, 44, 2}, {14, 14, 1}, {29, 29, 1}}
	want := Cut(slots, full, 1)
	for seed := range int64(20) {
		rand.New(rand.NewSource(seed)).Shuffle(len(slots), func(i, j int) { slots[i], slots[j] = slots[j], slots[i] })
		if got := Cut(slots, full, 1); fmt.Sprint(*got) != fmt.Sprint(*want) {
			t.Fatalf("another order of the same demand gave other tables:\n%v\n%v", got.prices, want.prices)
		}
	}
	// The openb trace's own prices, by which size goes with which.
	for _, c := range []struct {
		size  int
		price float64
	}{{81, 1}, {65, 2. / 3}, {59, 2. / 3}, {55, 2. / 3}, {47, 1. / 2}, {46, 1. / 2}, {32, 1. / 3}, {23, 1. / 4}, {22, 1. / 12}, {5, 0}} {
		if got := float64(want.Price(c.size, c.size)) / One; math.Abs(got-c.price) > 1e-5 {
			t.Errorf("a slot of %d %% costs %.4f cards, should %.4f", c.size, got, c.price)
		}
	}
}

func BenchmarkCutLine(b *testing.B) {
	r := rand.New(rand.NewSource(1))
	var slots []Slot
	for range 20 {
		s := 5 + r.Intn(90)
		slots = append(slots, Slot{s, s, r.Float64()})
	}
	for b.Loop() {
		Cut(slots, full, 1)
	}
}

func BenchmarkCutPlane(b *testing.B) {
	r := rand.New(rand.NewSource(1))
	var slots []Slot
	for range 20 {
		slots = append(slots, Slot{5 + r.Intn(90), 5 + r.Intn(90), r.Float64()})
	}
	for b.Loop() {
		Cut(slots, 100, 1)
	}
}
