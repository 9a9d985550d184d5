package sim

import "testing"

// spare are tenants whose shares leave a part of the card to nobody.
func spare(seed uint64, size int, bursts bool, sold float64, fixed int) []Member {
	members := Members(seed, size, bursts)
	for i := range members {
		members[i].Elastic = i >= fixed
		members[i].SharePPM = uint32(float64(members[i].SharePPM) * sold)
	}
	return members
}

// What nobody was granted is used by who may borrow, and everybody has its share all the
// same.
func TestNothingIsLeftUnused(t *testing.T) {
	for _, d := range []Design{D5(), D6()} {
		for _, sold := range []float64{0.5, 0.9} {
			for _, fixed := range []int{0, 1} {
				var o Outcome
				for _, seed := range seeds() {
					for _, size := range []int{2, 4, 8} {
						m := spare(seed, size, false, sold, fixed)
						o.Add(m, Simulate(d, m, seed, 3*Second, 5*Second, 2, false))
					}
				}
				o.Close()
				t.Logf("%s, %.0f %% granted, %d fixed: under %.2f, mean %.3f points; %d of %d failed; %.1f %% delivered", d.Name, 98*sold, fixed, o.Under, o.Mean, o.Failed, o.Runs, 100*o.Delivered)
				if o.Failed*100 > o.Runs {
					t.Errorf("%s: in %d of %d runs somebody had less than its share", d.Name, o.Failed, o.Runs)
				}
				if o.Delivered < 0.96 {
					t.Errorf("%s: %.1f %% of the card are used", d.Name, 100*o.Delivered)
				}
			}
		}
	}
}
