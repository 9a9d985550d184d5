package packing_test

import (
	"compress/gzip"
	"encoding/csv"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/carve-gpu/carve/scheduler-extender/packing/openb"
	"github.com/carve-gpu/carve/scheduler-extender/packing/replay"
	"github.com/carve-gpu/carve/scheduler-extender/packing/rival"
)

// traces is the folder that has the trace, or skips the test.
func traces(t *testing.T) string {
	dir := os.Getenv("CARVE_TRACES")
	if dir == "" {
		t.Skip("CARVE_TRACES doesn't name a folder with openb/, Alibaba's trace, which isn't part of this repository")
	}
	return filepath.Join(dir, "openb")
}

// published is what the authors' 1,020 runs allocated in the end, in percent of the cards, by
// workload, policy and seed.
func published(t *testing.T, dir string) map[string]map[string]map[int64]float64 {
	f, err := os.Open(filepath.Join(dir, "published_alloc_1020runs.csv.gz"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	lines, err := csv.NewReader(z).ReadAll()
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]map[string]map[int64]float64{}
	for _, l := range lines[1:] {
		seed, err1 := strconv.ParseInt(l[2], 10, 64)
		is, err2 := strconv.ParseFloat(l[7], 64)
		if err1 != nil || err2 != nil {
			t.Fatal(l, err1, err2)
		}
		if out[l[0]] == nil {
			out[l[0]] = map[string]map[int64]float64{}
		}
		if out[l[0]][l[1]] == nil {
			out[l[0]][l[1]] = map[int64]float64{}
		}
		out[l[0]][l[1]][seed] = is
	}
	return out
}

// TestPublishedRunsAreReproduced is the gate of the experiment: who gets the authors' figures
// seed by seed measures what they measured.
func TestPublishedRunsAreReproduced(t *testing.T) {
	dir := traces(t)
	want := published(t, dir)
	seeds := []int64{42, 43}
	if testing.Short() {
		seeds = seeds[:1]
	}
	if os.Getenv("CARVE_PACKING_LONG") != "" {
		seeds = []int64{42, 43, 44, 45, 46, 47, 48, 49, 50, 51}
	}
	for _, workload := range []string{"default", "gpushare60", "gpuspec20", "multigpu30", "cpu200", "gpushare100"} {
		trace, err := openb.Load(dir, workload)
		if err != nil {
			t.Fatal(err)
		}
		for name, policy := range map[string]func() replay.Policy{
			"BestFit":    func() replay.Policy { return rival.BestFit{} },
			"FGD":        func() replay.Policy { return rival.NewFGD(trace.Pods) },
			"GpuPacking": func() replay.Policy { return rival.GPUPacking{} },
		} {
			var sum float64
			for _, seed := range seeds {
				r, err := replay.Run(openb.Arrivals(trace, replay.Ratio, seed), policy(), replay.Options{})
				if err != nil {
					t.Fatalf("%s %s %d: %v", workload, name, seed, err)
				}
				was := want[workload][name][seed]
				t.Logf("%s %s %d: %.2f, published %.2f", workload, name, seed, r.Allocated, was)
				if workload == "default" && math.Abs(r.Allocated-was) > 0.0105 {
					t.Errorf("%s %s %d: %.3f %%, published is %.2f", workload, name, seed, r.Allocated, was)
				}
				sum += r.Allocated - was
			}
			if mean := sum / float64(len(seeds)); math.Abs(mean) > 0.06 {
				t.Errorf("%s %s: %.3f points from what is published", workload, name, mean)
			}
			if workload != "default" && testing.Short() {
				break
			}
		}
	}
}
