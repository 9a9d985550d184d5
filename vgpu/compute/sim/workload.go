package sim

import (
	"math"
	"math/rand/v2"
)

// Error is how far a tenant was from its share in a window, in points of the card:
// positive for more than its share, negative for less than its share of the time
// in which it had work.
func (w Window) Error(sharePPM uint32, elastic bool) float64 {
	share := float64(sharePPM) / 1e6
	got := float64(w.Busy) / float64(w.Length)
	due := share * float64(w.Demanded) / float64(w.Length)
	switch {
	case got > share && !elastic:
		return 100 * (got - share)
	case got < due:
		return 100 * (got - due)
	}
	return 0
}

// Members draws size tenants whose shares sum up to 98 %: kernels of 10 µs to
// 100 ms, one or four streams. With bursts, half of them stop to think.
func Members(seed uint64, size int, bursts bool) []Member {
	r := rand.New(rand.NewPCG(seed, uint64(size)))
	logUniform := func(low, high float64) float64 { return low * math.Exp(r.Float64()*math.Log(high/low)) }
	weights, sum := make([]float64, size), 0.0
	for i := range weights {
		weights[i] = 0.3 + r.Float64()
		sum += weights[i]
	}
	members := make([]Member, size)
	for i := range members {
		m := &members[i]
		m.SharePPM = uint32(980_000 * weights[i] / sum)
		base := logUniform(14e3, 77e3*1e3)
		for range 1 + r.IntN(3) {
			m.Program.Means = append(m.Program.Means, int64(min(max(base*logUniform(0.25, 4), 14e3), 77e6)))
		}
		m.Program.Streams = 1
		if r.IntN(4) == 0 {
			m.Program.Streams = 4
		}
		if bursts && (i == 0 || r.IntN(2) == 0) {
			m.Program.BurstWork = int64(logUniform(20e6, 500e6))
			m.Program.ThinkTime = int64(logUniform(10e6, 500e6))
		}
	}
	return members
}

// Outcome sums up many runs.
type Outcome struct {
	Runs, Failed      int
	Over, Under, Mean float64 // points
	Delivered         float64 // part of the card, mean
	windows           int
}

// Goal is the error that a run must keep within, in points.
const Goal = 2.0

// Add counts one run.
func (o *Outcome) Add(members []Member, run Run) {
	failed := false
	for i, windows := range run.Windows {
		for _, w := range windows {
			e := w.Error(members[i].SharePPM, members[i].Elastic)
			o.Over, o.Under = max(o.Over, e), max(o.Under, -e)
			o.Mean += math.Abs(e)
			o.Delivered += float64(w.Busy) / float64(w.Length) * float64(len(members))
			o.windows++
			failed = failed || math.Abs(e) > Goal
		}
	}
	o.Runs++
	if failed {
		o.Failed++
	}
}

// Close makes means of sums.
func (o *Outcome) Close() {
	o.Mean /= float64(max(o.windows, 1))
	o.Delivered /= float64(max(o.windows, 1))
}

// Contend runs a design with fresh members for each seed and size.
func Contend(design Design, seeds []uint64, bursts bool) Outcome {
	var o Outcome
	for _, seed := range seeds {
		for _, size := range []int{2, 4, 8} {
			members := Members(seed, size, bursts)
			o.Add(members, Simulate(design, members, seed, 3*Second, 5*Second, 2, false))
		}
	}
	o.Close()
	return o
}
