// Command cmd prints what the simulator finds: the table of designs, elastic shares,
// what the shipped design is sensitive to, and what can't be met.
package main

import (
	"flag"
	"fmt"

	"github.com/carve-gpu/carve/vgpu/compute/sim"
)

func main() {
	count := flag.Int("seeds", 20, "seeds for each of 2, 4 and 8 tenants")
	first := flag.Uint64("first", 1, "first seed")
	part := flag.String("part", "", "only this: designs, elastic, sensitivities, limits, lines")
	flag.Parse()
	var seeds []uint64
	for i := range *count {
		seeds = append(seeds, *first+uint64(i))
	}
	wanted := func(name string) bool { return *part == "" || *part == name }
	if wanted("designs") {
		fmt.Print("error in points: over/under/mean; failed runs (more than 2 points); part of the card delivered\n\n")
		table(sim.Designs(), seeds)
	}
	if wanted("elastic") {
		fmt.Print("\nelastic shares: under/mean; failed runs; delivered; return of borrowed time p50/p95/max in ms by number of tenants\n\n")
		for _, d := range []sim.Design{sim.D5(), sim.D6()} {
			o := sim.ContendElastic(d, seeds)
			fmt.Printf("| %-43s | %.1f/%.2f; %d of %d; %.1f%% ", d.Name, o.Under, o.Mean, o.Failed, o.Runs, 100*o.Delivered)
			for _, longest := range []int64{3, 20} {
				fmt.Printf("| kernels up to %d ms:", longest)
				for _, size := range []int{2, 4, 8} {
					r := sim.Returns(d, seeds, size, longest*sim.Millisecond)
					fmt.Printf(" %d/%d/%d", ms(sim.Percentile(r, 50)), ms(sim.Percentile(r, 95)), ms(sim.Percentile(r, 100)))
				}
				fmt.Print(" ")
			}
			fmt.Println("|")
		}
	}
	if wanted("sensitivities") {
		fmt.Print("\nD5 with\n\n")
		table(sim.Sensitivities(), seeds)
	}
	if wanted("limits") {
		fmt.Print("\nwhat can't be met: points got of points due, first tenant, then the mean of the others\n\n")
		for _, l := range sim.Limits() {
			run := sim.Simulate(sim.D5(), l.Members, *first, 3*sim.Second, 5*sim.Second, 2, false)
			var got, due float64
			for i, m := range l.Members {
				w := run.Windows[i][1]
				g, s := 100*float64(w.Busy)/float64(w.Length), float64(m.SharePPM)/1e4
				if i == 0 {
					fmt.Printf("| %-43s | %.1f of %.1f ", l.Name, g, s)
					continue
				}
				got, due = got+g, due+s
			}
			if n := float64(len(l.Members) - 1); n > 0 {
				fmt.Printf("| %.1f of %.1f ", got/n, due/n)
			}
			fmt.Println("|")
		}
	}
	if *part == "lines" {
		fixed, bursts := sim.Contend(sim.D5(), seeds, false), sim.Contend(sim.D5(), seeds, true)
		fmt.Printf("simulated_error_max_points %.2f points\n", max(fixed.Over, fixed.Under, bursts.Over, bursts.Under))
		fmt.Printf("simulated_error_mean_points %.2f points\n", (fixed.Mean+bursts.Mean)/2)
		fmt.Printf("simulated_failed_percent %.2f %%\n", 100*float64(fixed.Failed+bursts.Failed)/float64(fixed.Runs+bursts.Runs))
		var worst int64
		for _, size := range []int{2, 4, 8} {
			worst = max(worst, sim.Percentile(sim.Returns(sim.D5(), seeds, size, 3*sim.Millisecond), 95))
		}
		fmt.Printf("elastic_return_p95_ms %d ms\n", ms(worst))
	}
}

func ms(ns int64) int64 { return ns / sim.Millisecond }

func table(designs []sim.Design, seeds []uint64) {
	fmt.Println("| | always backlogged | with bursts |\n|---|---|---|")
	for _, d := range designs {
		fmt.Printf("| %s ", d.Name)
		for _, bursts := range []bool{false, true} {
			o := sim.Contend(d, seeds, bursts)
			fmt.Printf("| %.1f/%.1f/%.2f; %d of %d; %.1f%% ", o.Over, o.Under, o.Mean, o.Failed, o.Runs, 100*o.Delivered)
		}
		fmt.Println("|")
	}
}
