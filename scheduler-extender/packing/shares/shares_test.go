package shares_test

import (
	"testing"

	"github.com/carve-gpu/carve/scheduler-extender/packing/shares"
)

func TestUnequalSharesArePackedTowardsTheBound(t *testing.T) {
	for _, m := range shares.Mixes {
		for _, p := range shares.Policies() {
			first, memory := 0.0, 0.0
			for seed := range int64(3) {
				r, err := shares.Run(m, p, seed)
				if err != nil {
					t.Fatal(err)
				}
				first, memory = first+r.FirstRejected/3, memory+r.Memory/3
			}
			t.Logf("%s %s: first rejected at %.1f %% of the bound, memory %.1f %%", m.Name, p, first, memory)
			if p == "carve" && first < 96 {
				t.Errorf("%s: the first is turned away at %.1f %% of the bound", m.Name, first)
			}
		}
	}
}
