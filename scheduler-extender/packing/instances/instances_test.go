package instances_test

import (
	"testing"

	"github.com/carve-gpu/carve/scheduler-extender/packing/instances"
)

func TestInstancesArePackedTowardsTheBound(t *testing.T) {
	for _, m := range instances.Mixes {
		mean := map[string]float64{}
		for _, p := range instances.Policies() {
			const seeds = 10
			for seed := range int64(seeds) {
				is, err := instances.Run(m, p, seed)
				if err != nil {
					t.Fatal(err)
				}
				mean[p] += is / seeds
			}
		}
		t.Logf("%s: %v, bound %.1f", m.Name, mean, instances.Bound(m))
		if m.Name == "1g2g3g" && mean["carve"] < 97.0 {
			t.Errorf("%s: %.2f %% of the compute slices are allocated", m.Name, mean["carve"])
		}
	}
}
