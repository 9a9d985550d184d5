package sim

import (
	"flag"
	"testing"
)

var (
	seedCount = flag.Int("seeds", 2, "seeds for each of 2, 4 and 8 tenants")
	firstSeed = flag.Uint64("seed", 0, "add to each seed")
)

func seeds() []uint64 {
	var all []uint64
	for i := range *seedCount {
		all = append(all, *firstSeed+uint64(1+i))
	}
	return all
}

// atMost: one run in a hundred may fail; with few runs none.
func atMost(t *testing.T, what string, o Outcome) {
	t.Helper()
	t.Logf("%s: over %.2f, under %.2f, mean %.3f points; %d of %d failed; %.1f %% delivered", what, o.Over, o.Under, o.Mean, o.Failed, o.Runs, 100*o.Delivered)
	if o.Failed*100 > o.Runs {
		t.Errorf("%s: in %d of %d runs somebody was more than %v points off", what, o.Failed, o.Runs, Goal)
	}
}

func TestEachGetsItsShareUnderContention(t *testing.T) {
	for _, d := range []Design{D5(), D6()} {
		full := Contend(d, seeds(), false)
		atMost(t, d.Name+", always backlogged", full)
		if full.Delivered < 0.96 {
			t.Errorf("%s: %.1f of 98 %% delivered", d.Name, 100*full.Delivered)
		}
		bursts := Contend(d, seeds(), true)
		atMost(t, d.Name+", with bursts", bursts)
		if full.Mean > 0.5 || bursts.Mean > 0.5 {
			t.Errorf("%s: means of %.2f and %.2f points", d.Name, full.Mean, bursts.Mean)
		}
	}
}

func TestElasticSharesGetTheirGuarantee(t *testing.T) {
	for _, d := range []Design{D5(), D6()} {
		o := ContendElastic(d, seeds())
		atMost(t, d.Name+", elastic", o)
		for _, size := range []int{2, 4, 8} {
			r := Returns(d, seeds(), size, 3*Millisecond)
			if p95 := Percentile(r, 95); p95 > 50*Millisecond {
				t.Errorf("%s: %d tenants: borrowed time came back after %d ms", d.Name, size, p95/Millisecond)
			}
		}
	}
}

// One elastic tenant that is alone uses the card whole; a fixed one keeps to its share.
func TestAloneOnTheCard(t *testing.T) {
	for _, elastic := range []bool{false, true} {
		for _, mean := range []int64{30 * Microsecond, Millisecond, 20 * Millisecond} {
			m := []Member{{SharePPM: 300_000, Elastic: elastic, Program: Program{Means: []int64{mean}, Streams: 1}}}
			w := Simulate(D5(), m, 1, 3*Second, 5*Second, 1, false).Windows[0][0]
			got := 100 * float64(w.Busy) / float64(w.Length)
			if !elastic && (got < 29 || got > 31) || elastic && got < 97 {
				t.Errorf("kernels of %d µs, elastic %v: %.2f points of 30", mean/Microsecond, elastic, got)
			}
		}
	}
}

// Without any truth the drained arbiter is the best there is, and not as good.
func TestWithoutTruth(t *testing.T) {
	o := Contend(Drained(), seeds(), false)
	t.Logf("over %.2f, under %.2f, mean %.3f points; %d of %d failed", o.Over, o.Under, o.Mean, o.Failed, o.Runs)
	if o.Mean > 0.5 || o.Failed*5 > o.Runs {
		t.Errorf("mean %.2f points, %d of %d runs failed", o.Mean, o.Failed, o.Runs)
	}
}

// The instrument sees what is wrong with simpler ways: if it found them good as well,
// what it says of the shipped one would mean nothing.
func TestSimplerDesignsFail(t *testing.T) {
	for _, d := range Designs()[:4] {
		if o := Contend(d, seeds()[:2], false); o.Failed*2 < o.Runs {
			t.Errorf("%s: only %d of %d runs failed", d.Name, o.Failed, o.Runs)
		}
	}
}

func TestSameSeedSameRun(t *testing.T) {
	m := Members(9, 4, true)
	a, b := Simulate(D5(), m, 9, Second, Second, 1, false), Simulate(D5(), m, 9, Second, Second, 1, false)
	for i := range m {
		if a.Windows[i][0] != b.Windows[i][0] {
			t.Errorf("tenant %d: %v, then %v", i, a.Windows[i][0], b.Windows[i][0])
		}
	}
}
