package sim

import "testing"

// rest are tenants without shares of their own.
func rest(seed uint64, n int) []Member {
	members := Members(seed+1000, 8, false)[:n]
	for i := range members {
		members[i].Rest, members[i].Elastic, members[i].SharePPM = true, true, 1
	}
	return members
}

// Tenants with shares have them beside such as have none, whether these could use the
// whole card or not; and what is left is used.
func TestSharesBesideTenantsWithout(t *testing.T) {
	for _, d := range []Design{D5(), D6()} {
		for _, sold := range []float64{0.3, 0.7, 1} {
			for _, elastic := range []bool{false, true} {
				var o Outcome
				had, least := 0.0, 100.0
				for _, seed := range seeds() {
					for _, size := range []int{1, 2, 4} {
						fixed := size
						if elastic {
							fixed = 0
						}
						m := append(spare(seed, size, false, sold, fixed), rest(seed, 2)...)
						r := Simulate(d, m, seed, 3*Second, 5*Second, 2, false)
						o.Add(m, r)
						for _, windows := range r.Windows[size:] {
							for _, w := range windows {
								got := 100 * float64(w.Busy) / float64(w.Length)
								had += got / float64(len(seeds())*3*2)
								least = min(least, got)
							}
						}
					}
				}
				o.Close()
				t.Logf("%s, %.0f %% granted, elastic %v: over %.2f, under %.2f, mean %.3f points; %d of %d failed; %.1f %% delivered; two without have %.1f, one of them %.2f at least",
					d.Name, 98*sold, elastic, o.Over, o.Under, o.Mean, o.Failed, o.Runs, 100*o.Delivered, had, least)
				if o.Failed*100 > o.Runs {
					t.Errorf("%s: in %d of %d runs somebody was more than %v points off", d.Name, o.Failed, o.Runs, Goal)
				}
				if o.Delivered < 0.96 {
					t.Errorf("%s: %.1f %% of the card are used", d.Name, 100*o.Delivered)
				}
				if left := 98 - 98*sold; !elastic && had < left-2 || elastic && sold < 1 && had < left/4 {
					t.Errorf("%s: two without shares have %.1f of the %.1f points that are left", d.Name, had, left)
				}
			}
		}
	}
}

// Where all is granted, and used, those without shares still come to something.
func TestNobodyStarves(t *testing.T) {
	for _, d := range []Design{D5(), D6()} {
		for _, seed := range seeds() {
			m := append(Members(seed, 4, false), rest(seed, 2)...)
			for i := range m[4:] {
				m[4+i].Program.Means = []int64{Millisecond, 3 * Millisecond}
			}
			r := Simulate(d, m, seed, 3*Second, 20*Second, 1, false)
			for i := 4; i < 6; i++ {
				for _, w := range r.Windows[i] {
					if got := 100 * float64(w.Busy) / float64(w.Length); got < 0.1 {
						t.Errorf("%s, seed %d: %.2f points in 20 s", d.Name, seed, got)
					}
				}
			}
		}
	}
}
