// Package compare names the policies, runs them side by side and sums up what came out.
package compare

import (
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/carve-gpu/carve/scheduler-extender/packing/bound"
	"github.com/carve-gpu/carve/scheduler-extender/packing/carve"
	"github.com/carve-gpu/carve/scheduler-extender/packing/openb"
	"github.com/carve-gpu/carve/scheduler-extender/packing/replay"
	"github.com/carve-gpu/carve/scheduler-extender/packing/rival"
)

// Names of the policies. Those with random ties take any of the nodes that cost the least, as a
// stock kube-scheduler does with scores.
func Names() []string {
	return []string{"carve", "carve_random_ties", "fgd", "fgd_random_ties", "bestfit", "gpupacking", "random"}
}

// Run is one run of a policy. known tells carve's what pods will ask.
func Run(name string, trace *openb.Trace, seed int64, known bool) (replay.Result, error) {
	order := openb.Arrivals(trace, replay.Ratio, seed)
	o := replay.Options{Seed: seed, Ties: replay.FirstRank}
	var policy replay.Policy
	switch name {
	case "carve", "carve_random_ties":
		p := carve.New(order.Nodes)
		if known {
			if err := p.Know(trace.Pods); err != nil {
				return replay.Result{}, err
			}
		}
		if policy, o.Ties = p, replay.ByPod; name == "carve_random_ties" {
			o.Ties = replay.Random
		}
	case "fgd":
		policy = rival.NewFGD(trace.Pods)
	case "fgd_random_ties":
		policy, o.Ties = rival.NewFGD(trace.Pods), replay.Random
	case "bestfit":
		policy = rival.BestFit{}
	case "gpupacking":
		policy = rival.GPUPacking{}
	case "random":
		policy, o.Ties = rival.NewRandom(seed), replay.Random
	default:
		return replay.Result{}, fmt.Errorf("there is no policy %q; %v are known", name, Names())
	}
	return replay.Run(order, policy, o)
}

// Bound is the most that could have arrived before somebody must be turned away, in percent.
func Bound(trace *openb.Trace, seed int64) float64 {
	return bound.Prefix(openb.Arrivals(trace, replay.Ratio, seed))
}

// Decisions are how long decisions took.
type Decisions struct{ P50, Mean, P99 time.Duration }

// Speed measures carve's decisions on so many times the trace's cluster. What they take
// includes asking nodes anew that changed, or all of them where prices are new; making prices
// isn't part of it, since the extender does that beside decisions.
func Speed(trace *openb.Trace, times int, seed int64) (Decisions, error) {
	large := &openb.Trace{Name: trace.Name}
	for range times {
		large.Nodes = append(large.Nodes, trace.Nodes...)
		large.Pods = append(large.Pods, trace.Pods...)
	}
	order := openb.Arrivals(large, replay.Ratio, seed)
	r, err := replay.Run(order, carve.New(order.Nodes), replay.Options{Ties: replay.ByPod, Timed: true})
	if err != nil {
		return Decisions{}, err
	}
	var sum time.Duration
	for _, d := range r.Decisions {
		sum += d
	}
	n := len(r.Decisions)
	slices.Sort(r.Decisions)
	return Decisions{r.Decisions[n/2], sum / time.Duration(n), r.Decisions[n*99/100]}, nil
}

// Summary sums up the runs of one policy on one workload.
type Summary struct {
	allocated       []float64
	early           float64
	eight, rejected int
}

// Add takes in a run.
func (s *Summary) Add(r replay.Result) {
	s.allocated = append(s.allocated, r.Allocated)
	s.early += r.Early
	s.eight += r.Arrived[replay.EightCards]
	s.rejected += r.Rejected[replay.EightCards]
}

// Mean of what was allocated in the end, in percent of all cards.
func (s *Summary) Mean() float64 {
	sum := 0.0
	for _, a := range s.allocated {
		sum += a
	}
	return sum / float64(len(s.allocated))
}

// Deviation of that from run to run, in points.
func (s *Summary) Deviation() float64 {
	if len(s.allocated) < 2 {
		return 0
	}
	mean, sum := s.Mean(), 0.0
	for _, a := range s.allocated {
		sum += (a - mean) * (a - mean)
	}
	return math.Sqrt(sum / float64(len(s.allocated)-1))
}

// Early is what was turned away while at most 92 % had arrived, in percent of all cards.
func (s *Summary) Early() float64 { return s.early / float64(len(s.allocated)) }

// EightRejected is the part of the pods of eight cards that were turned away, in percent.
func (s *Summary) EightRejected() float64 {
	return 100 * float64(s.rejected) / float64(max(1, s.eight))
}
