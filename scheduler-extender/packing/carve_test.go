package packing_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/carve-gpu/carve/scheduler-extender/packing/compare"
	"github.com/carve-gpu/carve/scheduler-extender/packing/openb"
)

// workload is the trace's default one where it is at hand, and one of its distribution
// otherwise.
func workload(t *testing.T, seed int64) *openb.Trace {
	if dir := os.Getenv("CARVE_TRACES"); dir != "" {
		trace, err := openb.Load(filepath.Join(dir, "openb"), "default")
		if err != nil {
			t.Fatal(err)
		}
		return trace
	}
	trace, err := openb.Draw(seed)
	if err != nil {
		t.Fatal(err)
	}
	t.Log("CARVE_TRACES isn't set: pods are drawn from the trace's published distribution")
	return trace
}

// TestPackingHoldsItsLevel is the gate of the extender's packing: what it allocates, that it
// turns nobody away early, and that it doesn't do it by starving pods of eight cards.
func TestPackingHoldsItsLevel(t *testing.T) {
	seeds := []int64{42, 43}
	sums := map[string]*compare.Summary{}
	for _, name := range []string{"carve", "carve_random_ties", "fgd"} {
		sums[name] = &compare.Summary{}
		for _, seed := range seeds {
			r, err := compare.Run(name, workload(t, seed), seed, false)
			if err != nil {
				t.Fatalf("%s, seed %d: %v", name, seed, err)
			}
			sums[name].Add(r)
		}
		s := sums[name]
		t.Logf("%s: %.2f %%, early %.3f %%, 8-card pods rejected %.1f %%", name, s.Mean(), s.Early(), s.EightRejected())
	}
	ours, random, fgd := sums["carve"], sums["carve_random_ties"], sums["fgd"]
	if ours.Mean() < 96.0 || random.Mean() < 95.9 {
		t.Errorf("%.2f %% are allocated, with random ties %.2f", ours.Mean(), random.Mean())
	}
	if ours.Mean() < fgd.Mean()+0.1 {
		t.Errorf("%.2f %% are allocated, FGD has %.2f", ours.Mean(), fgd.Mean())
	}
	if ours.Early() > 0.1 {
		t.Errorf("%.3f %% are turned away early", ours.Early())
	}
	// Half a pod of the few that come is let pass.
	if ours.EightRejected() > fgd.EightRejected()+1 {
		t.Errorf("%.1f %% of the pods of eight cards are turned away, by FGD %.1f", ours.EightRejected(), fgd.EightRejected())
	}
}

// TestTheSameArrivalsGetTheSamePlaces runs twice and compares every figure.
func TestTheSameArrivalsGetTheSamePlaces(t *testing.T) {
	trace := workload(t, 44)
	trace.Nodes, trace.Pods = trace.Nodes[:120], trace.Pods[:800]
	first, err := compare.Run("carve", trace, 44, false)
	if err != nil {
		t.Fatal(err)
	}
	if again, err := compare.Run("carve", trace, 44, false); err != nil || again.Allocated != first.Allocated || again.Rejected != first.Rejected || again.Judged != first.Judged {
		t.Fatalf("%+v, then %+v, %v", first, again, err)
	}
}

// TestPodsThatLeaveGiveAllBack runs with departures on part of the cluster: Churn itself holds
// that nothing is left of those that left.
func TestPodsThatLeaveGiveAllBack(t *testing.T) {
	trace, err := openb.Draw(1)
	if err != nil {
		t.Fatal(err)
	}
	trace.Nodes = trace.Nodes[:150]
	for _, load := range []float64{0.5, 1.1} {
		c, err := compare.Churn("carve", trace, load, 1)
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("load %.1f: %.1f %% used, %.1f %% turned away", load, c.Used, c.Rejected)
		if load < 1 && (c.Rejected > 1 || c.Used < 40 || c.Used > 60) || load > 1 && (c.Used < 85 || c.Used > 100 || c.Rejected < 5 || c.Rejected > 25) {
			t.Errorf("load %.1f: %.1f %% used, %.1f %% turned away", load, c.Used, c.Rejected)
		}
	}
}
