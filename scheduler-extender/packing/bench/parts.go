package main

import (
	"fmt"

	"github.com/carve-gpu/carve/scheduler-extender/packing/instances"
	"github.com/carve-gpu/carve/scheduler-extender/packing/shares"
)

// measureShares prints how far pods with shares of unequal compute and memory get.
func measureShares(seeds []int64) error {
	for _, m := range shares.Mixes {
		for _, policy := range shares.Policies() {
			progress("shares of unequal compute and memory: %s, %s", m.Name, policy)
			var first, memory float64
			for _, seed := range seeds {
				r, err := shares.Run(m, policy, seed)
				if err != nil {
					return err
				}
				first, memory = first+r.FirstRejected, memory+r.Memory
			}
			n := float64(len(seeds))
			fmt.Printf("shares_first_rejected_percent_%s_%s %.1f %%\n", policy, m.Name, first/n)
			fmt.Printf("shares_memory_percent_%s_%s %.1f %%\n", policy, m.Name, memory/n)
		}
	}
	return nil
}

// measureInstances prints how full cards get that are cut into MIG instances.
func measureInstances(seeds []int64) error {
	for _, m := range instances.Mixes {
		for _, policy := range instances.Policies() {
			progress("MIG instances: %s, %s", m.Name, policy)
			var sum float64
			for _, seed := range seeds {
				is, err := instances.Run(m, policy, seed)
				if err != nil {
					return err
				}
				sum += is
			}
			fmt.Printf("instances_alloc_percent_%s_%s %.2f %%\n", policy, m.Name, sum/float64(len(seeds)))
		}
		fmt.Printf("instances_bound_percent_%s %.2f %%\n", m.Name, instances.Bound(m))
	}
	return nil
}
