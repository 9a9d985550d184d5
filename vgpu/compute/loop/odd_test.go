package loop_test

import (
	"testing"
	"time"

	"github.com/carve-gpu/carve/vgpu/compute/sim"
)

// Programs of which launches aren't what the ones before were, or that can't be measured
// as others can: they and those beside them have their shares.
func TestOddPrograms(t *testing.T) {
	const us, ms = sim.Microsecond, sim.Millisecond
	for name, c := range map[string]struct {
		means []int64
		args  string
	}{
		"one launch in 256 takes 20 ms":                  {[]int64{2 * us, 20 * ms}, "--rare 256"},
		"one launch in 64 takes 1 ms":                    {[]int64{2 * us, ms}, "--rare 64"},
		"every other launch takes 95 us instead of 5":    {[]int64{5 * us, 95 * us}, "--rare 2"},
		"all launches take 0.2 ms after a second":        {[]int64{2 * us, ms / 5}, "--change 1s"},
		"launches of 0.1 ms beside a capture that lasts": {[]int64{100 * us}, "--capture"},
		"launches of 30 ms beside a capture that lasts":  {[]int64{30 * ms}, "--capture"},
		"eight processes, launches of 1 ms":              {[]int64{ms}, "--procs 8"},
		"four processes, launches of 20 ms":              {[]int64{20 * ms}, "--procs 4"},
	} {
		for _, elastic := range []bool{false, true} {
			kind := ", fixed"
			if elastic {
				kind = ", elastic"
			}
			t.Run(name+kind, func(t *testing.T) {
				members := []sim.Member{
					{SharePPM: 200_000, Elastic: elastic, Program: sim.Program{Means: c.means, Streams: 1}},
					{SharePPM: 780_000, Elastic: elastic, Program: sim.Program{Means: []int64{ms}, Streams: 1}},
				}
				r := run(t, members, 1, scene{plan: plan{4 * time.Second, 5 * time.Second, 2}, args: map[int]string{0: c.args}})
				within(t, members, r)
			})
		}
	}
}
