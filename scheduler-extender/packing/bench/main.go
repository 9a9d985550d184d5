// Command bench runs the packing experiment and prints one line for each figure, and nothing
// else on stdout. CARVE_TRACES names a folder with openb/, Alibaba's trace; without it, pods
// are drawn from the trace's published distribution, and the figures are named "drawn".
package main

import (
	"cmp"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/carve-gpu/carve/scheduler-extender/packing/compare"
	"github.com/carve-gpu/carve/scheduler-extender/packing/openb"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1)
	}
}

func run() error {
	names := flag.String("traces", "default", "workloads of the trace, separated by commas; all is every one in the folder")
	seedList := flag.String("seeds", "42-51", "seeds: 42-51, or 42,43")
	policyList := flag.String("policies", "all", "policies, separated by commas: "+strings.Join(compare.Names(), ", "))
	known := flag.Bool("known", false, "tell carve what pods will ask, as FGD is told, in the place of learning it")
	parts := flag.String("parts", "trace,speed,shares,instances", "what is measured: allocation on traces, decisions, shares of unequal compute and memory, MIG instances, and churn: pods that leave again")
	detail := flag.Bool("detail", false, "print each run, and rejections by kind, on stderr")
	flag.Parse()
	if flag.NArg() > 0 {
		return fmt.Errorf("what is %q? there are flags only", flag.Arg(0))
	}
	seeds, err := parseSeeds(*seedList)
	if err != nil {
		return err
	}
	policies := compare.Names()
	if *policyList != "all" {
		policies = strings.Split(*policyList, ",")
	}
	load, workloads, err := source(*names)
	if err != nil {
		return err
	}
	has := func(part string) bool { return slices.Contains(strings.Split(*parts, ","), part) }
	if has("shares") {
		if err := measureShares(seeds); err != nil {
			return err
		}
	}
	if has("instances") {
		if err := measureInstances(seeds); err != nil {
			return err
		}
	}
	for _, w := range workloads {
		if !has("trace") {
			break
		}
		if err := measure(w, load, seeds, policies, *known, *detail); err != nil {
			return err
		}
	}
	if has("churn") {
		for _, w := range workloads {
			if err := measureChurn(w, load, seeds, policies); err != nil {
				return err
			}
		}
	}
	if !has("speed") {
		return nil
	}
	trace, err := load(workloads[0], seeds[0])
	if err != nil {
		return err
	}
	for _, times := range []int{1, 10} {
		progress("decisions on %d nodes", times*len(trace.Nodes))
		d, err := compare.Speed(trace, times, seeds[0])
		if err != nil {
			return err
		}
		suffix := ""
		if times > 1 {
			suffix = fmt.Sprintf("_%d", times*len(trace.Nodes))
		}
		us := func(d time.Duration) float64 { return float64(d.Nanoseconds()) / 1000 }
		fmt.Printf("decision_p50_us%s %.1f us\n", suffix, us(d.P50))
		fmt.Printf("decision_mean_us%s %.1f us\n", suffix, us(d.Mean))
		fmt.Printf("decision_p99_us%s %.1f us\n", suffix, us(d.P99))
	}
	return nil
}

// loader gives a workload; where pods are drawn, those of the seed.
type loader func(workload string, seed int64) (*openb.Trace, error)

// source is where workloads come from, and which there are.
func source(names string) (loader, []string, error) {
	dir := os.Getenv("CARVE_TRACES")
	if dir == "" {
		progress("CARVE_TRACES isn't set: pods are drawn from the trace's published distribution")
		return func(_ string, seed int64) (*openb.Trace, error) { return openb.Draw(seed) }, []string{openb.Drawn}, nil
	}
	dir = filepath.Join(dir, "openb")
	known := map[string]*openb.Trace{}
	load := func(workload string, _ int64) (*openb.Trace, error) {
		if t := known[workload]; t != nil {
			return t, nil
		}
		t, err := openb.Load(dir, workload)
		known[workload] = t
		return t, err
	}
	if names != "all" {
		return load, strings.Split(names, ","), nil
	}
	files, err := filepath.Glob(filepath.Join(dir, "openb_pod_list_*.csv*"))
	if err == nil && len(files) == 0 {
		err = fmt.Errorf("%s: %w", dir, fs.ErrNotExist)
	}
	var all []string
	for _, f := range files {
		f = strings.TrimSuffix(strings.TrimSuffix(filepath.Base(f), ".gz"), ".csv")
		all = append(all, strings.TrimPrefix(f, "openb_pod_list_"))
	}
	slices.Sort(all)
	return load, slices.Compact(all), err
}

func measure(workload string, load loader, seeds []int64, policies []string, known, detail bool) error {
	bounds := make([]float64, 0, len(seeds))
	for _, name := range policies {
		var sum compare.Summary
		for _, seed := range seeds {
			trace, err := load(workload, seed)
			if err != nil {
				return err
			}
			if len(bounds) < len(seeds) {
				bounds = append(bounds, compare.Bound(trace, seed))
			}
			start := time.Now()
			r, err := compare.Run(name, trace, seed, known)
			if err != nil {
				return fmt.Errorf("%s, %s, seed %d: %w", workload, name, seed, err)
			}
			sum.Add(r)
			progress("%s %s, seed %d: %.2f %% in %.1f s", workload, name, seed, r.Allocated, time.Since(start).Seconds())
			if detail {
				progress("  at 100 %%: %.2f, first rejected at %.2f, early %.3f, rejected %v of %v (cpu, share, 1, 2-7, 8 cards)", r.At100, r.FirstRejected, r.Early, r.Rejected, r.Arrived)
			}
		}
		fmt.Printf("alloc_percent_%s_%s %.2f %%\n", name, workload, sum.Mean())
		fmt.Printf("alloc_stdev_%s_%s %.2f points\n", name, workload, sum.Deviation())
		fmt.Printf("early_rejected_percent_%s_%s %.3f %%\n", name, workload, sum.Early())
		fmt.Printf("rejected_8card_percent_%s_%s %.1f %%\n", name, workload, sum.EightRejected())
	}
	mean := 0.0
	for _, b := range bounds {
		mean += b / float64(len(bounds))
	}
	fmt.Printf("bound_percent_%s %.2f %%\n", workload, mean)
	return nil
}

func parseSeeds(text string) ([]int64, error) {
	var out []int64
	for _, part := range strings.Split(text, ",") {
		first, last, isRange := strings.Cut(part, "-")
		a, err1 := strconv.ParseInt(first, 10, 64)
		b, err2 := strconv.ParseInt(cmp.Or(last, first), 10, 64)
		if err := errors.Join(err1, err2); err != nil || isRange && last == "" || b < a || b-a > 9999 {
			return nil, fmt.Errorf("seeds %q: 42-51, or 42,43 are understood", text)
		}
		for s := a; s <= b; s++ {
			out = append(out, s)
		}
	}
	return out, nil
}

func progress(format string, args ...any) { fmt.Fprintf(os.Stderr, format+"\n", args...) }
