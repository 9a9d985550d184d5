package price

// pattern is how many slots of each kind one card is cut into.
type pattern []int

const (
	epsilon   = 1e-9
	maxRounds = 5000
)

// cover is the linear program of cutting stock (Gilmore and Gomory): the fewest cards, in
// fractions, that hold demand[k] slots of each kind k, where a card may be cut by any pattern.
// Patterns are made as they are needed: best returns the one that is worth most at given
// prices. alone[k] is how many slots of kind k fill a card, at least 1.
//
// It returns the price of each kind in cards, so that no pattern is worth more than 1, and the
// number of cards.
//
// The method is the revised simplex on a dense inverse of the basis, which has a row for each
// kind: some twenty. Products are rounded before they are added, so that no machine fuses the
// two and gets another last bit.
func cover(demand []float64, alone []int, best func(prices []float64) (pattern, float64)) (prices []float64, cards float64) {
	m := len(demand)
	inverse := make([][]float64, m)
	amount := make([]float64, m) // of the pattern in each row of the basis
	cost := make([]float64, m)   // 1 for a pattern, 0 for slots that nobody needs
	for k := range m {
		inverse[k] = make([]float64, m)
		inverse[k][k] = 1 / float64(alone[k])
		// The little that is added keeps rows from becoming 0 together, where the method could
		// go round in circles.
		amount[k] = (demand[k] + float64(k+1)*1e-11) / float64(alone[k])
		cost[k] = 1
	}
	prices = make([]float64, m)
	column, change := make([]float64, m), make([]float64, m)
	worth := 1.0
	for range maxRounds {
		for k := range m {
			prices[k] = 0
			for i := range m {
				if cost[i] != 0 {
					prices[k] += inverse[i][k]
				}
			}
		}
		enters := 0.0
		if k := lowest(prices); k >= 0 && prices[k] < -epsilon {
			// More slots of this kind than asked would be a gain.
			clear(column)
			column[k], worth = -1, 1
		} else {
			for k := range prices {
				prices[k] = max(0, prices[k])
			}
			var p pattern
			if p, worth = best(prices); worth <= 1+epsilon {
				break
			}
			for k := range m {
				column[k] = float64(p[k])
			}
			enters = 1
		}
		out := -1
		for i := range m {
			change[i] = 0
			for k := range m {
				change[i] += float64(inverse[i][k] * column[k])
			}
			if change[i] > epsilon && (out < 0 || amount[i]*change[out] < amount[out]*change[i]) {
				out = i
			}
		}
		if out < 0 {
			break // can't be: no pattern is free
		}
		cost[out] = enters
		pivot(inverse, amount, change, out)
	}
	for k := range prices {
		prices[k] = max(0, prices[k]) / max(1, worth)
	}
	for i := range m {
		if cost[i] != 0 {
			cards += amount[i]
		}
	}
	return prices, cards
}

// lowest is the position of the least value, -1 where there is none.
func lowest(values []float64) int {
	at := -1
	for i, v := range values {
		if at < 0 || v < values[at] {
			at = i
		}
	}
	return at
}

// pivot puts a column into the basis in the place of row out.
func pivot(inverse [][]float64, amount, change []float64, out int) {
	by := change[out]
	for k := range inverse[out] {
		inverse[out][k] /= by
	}
	amount[out] /= by
	for i := range inverse {
		if f := change[i]; i != out && f != 0 {
			for k := range inverse[i] {
				inverse[i][k] -= float64(f * inverse[out][k])
			}
			amount[i] = max(0, amount[i]-float64(f*amount[out]))
		}
	}
}
