package sim

import (
	"math/rand/v2"
	"slices"
)

// ContendElastic is Contend with shares that may borrow: nobody may get less than
// its share of the time in which it has work.
func ContendElastic(design Design, seeds []uint64) Outcome {
	var o Outcome
	for _, seed := range seeds {
		for _, size := range []int{2, 4, 8} {
			members := Members(seed, size, true)
			for i := range members {
				members[i].Elastic = true
			}
			o.Add(members, Simulate(design, members, seed, 3*Second, 5*Second, 2, false))
		}
	}
	o.Close()
	return o
}

// Returns are how long tenants that begin while others have borrowed their time
// wait until they have had their share of it since they began, sorted; those that
// never had it within 3 s count as that. Kernels last up to longest ±30 %.
func Returns(design Design, seeds []uint64, size int, longest int64) []int64 {
	var all []int64
	for _, seed := range seeds {
		members := Members(seed, size, false)
		r := rand.New(rand.NewPCG(seed, 5))
		for i := range members {
			members[i].Elastic = true
			for f := range members[i].Program.Means {
				members[i].Program.Means[f] = min(members[i].Program.Means[f], longest-r.Int64N(longest/2))
			}
		}
		owner := r.IntN(size)
		members[owner].Program.IdleUntil = 3*Second + r.Int64N(100*Millisecond)
		run := Simulate(design, members, seed, 3*Second, 3*Second, 1, false)
		took := run.Returned[owner]
		if took < 0 {
			took = 3 * Second
		}
		all = append(all, took)
	}
	slices.Sort(all)
	return all
}

// Percentile of sorted values.
func Percentile(sorted []int64, percent int) int64 {
	return sorted[min(len(sorted)*percent/100, len(sorted)-1)]
}
