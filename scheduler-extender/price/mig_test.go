package price

import (
	"fmt"
	"math"
	"testing"

	"pgregory.net/rapid"
)

// cuts are all ways to cut a card into instances, as how many there are of each profile.
func cuts(g *Geometry) map[string]pattern {
	out := map[string]pattern{}
	var walk func(m Mask, so pattern)
	walk = func(m Mask, so pattern) {
		key := fmt.Sprint(so)
		out[key] = append(pattern(nil), so...)
		for p := range g.Profiles {
			for _, s := range g.Profiles[p].Starts {
				if after, ok := g.Put(m, p, s); ok {
					so[p]++
					walk(after, so)
					so[p]--
				}
			}
		}
	}
	walk(Mask{}, make(pattern, len(g.Profiles)))
	return out
}

func TestALayoutTakesTheFewestCards(t *testing.T) {
	all := cuts(&A100)
	// 78 with the card on which nothing is, as NVIDIA's placement rules give.
	if len(all) != 78 && len(all) != 79 {
		t.Errorf("%d ways to cut a card", len(all))
	}
	rapid.Check(t, func(t *rapid.T) {
		demand := make([]float64, len(A100.Profiles))
		var asked []int
		for range rapid.IntRange(1, 2).Draw(t, "kinds") {
			p := rapid.IntRange(0, len(demand)-1).Draw(t, "profile")
			if demand[p] == 0 {
				asked = append(asked, p)
			}
			demand[p] += float64(rapid.IntRange(1, 20).Draw(t, "demand"))
		}
		l := Lay(A100, demand)
		var columns [][]float64
		for _, c := range all {
			column, worth := make([]float64, len(asked)+1), int64(0)
			for k, p := range asked {
				column[k] = float64(c[p])
				worth += int64(c[p]) * l.Price(p)
			}
			column[len(asked)] = 1
			if worth > One+8 {
				t.Fatalf("%v is worth %d of %d", c, worth, One)
			}
			columns = append(columns, column)
		}
		var need []float64
		for _, p := range asked {
			need = append(need, demand[p])
		}
		if want := solve(need, columns); math.Abs(l.Cards()-want) > 1e-6*want {
			t.Fatalf("%v: %v cards, trying says %v", demand, l.Cards(), want)
		}
	})
}

func TestAnInstanceNeverGainsValue(t *testing.T) {
	l := Lay(A100, []float64{5, 1, 3, 3, 1, 1})
	for taken := range 1 << A100.Memory {
		for compute := range A100.Compute + 1 {
			m := Mask{uint16(taken), compute}
			for p := range A100.Profiles {
				for _, s := range A100.Profiles[p].Starts {
					after, ok := A100.Put(m, p, s)
					if ok && l.Value(after)+l.Price(p) > l.Value(m) {
						t.Fatalf("%+v is worth %d, with %s at %d %d", m, l.Value(m), A100.Profiles[p].Name, s, l.Value(after))
					}
				}
				if start, cost, ok := l.Best(m, p); ok != A100.Fits(m, p) || ok && cost < 0 {
					t.Fatalf("%+v %s: start %d, cost %d, %t", m, A100.Profiles[p].Name, start, cost, ok)
				}
			}
		}
	}
}

func BenchmarkLay(b *testing.B) {
	for b.Loop() {
		Lay(A100, []float64{5, 1, 3, 3, 1, 1})
	}
}
