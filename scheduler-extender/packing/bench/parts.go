package main

import (
	"fmt"

	"github.com/carve-gpu/carve/scheduler-extender/packing/compare"
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

// measureChurn prints how much is used, and how much turned away, where pods leave again.
func measureChurn(workload string, load loader, seeds []int64, policies []string) error {
	for _, offered := range []float64{0.92, 0.96, 1, 1.1} {
		for _, policy := range policies {
			progress("%s, %s, load %.2f with departures", workload, policy, offered)
			var used, rejected float64
			for _, seed := range seeds {
				trace, err := load(workload, seed)
				if err != nil {
					return err
				}
				c, err := compare.Churn(policy, trace, offered, seed)
				if err != nil {
					return fmt.Errorf("%s, load %.2f, seed %d: %w", policy, offered, seed, err)
				}
				used, rejected = used+c.Used, rejected+c.Rejected
			}
			n := float64(len(seeds))
			fmt.Printf("churn_used_percent_%s_%s_%.0f %.2f %%\n", policy, workload, 100*offered, used/n)
			fmt.Printf("churn_rejected_percent_%s_%s_%.0f %.2f %%\n", policy, workload, 100*offered, rejected/n)
		}
	}
	return nil
}
