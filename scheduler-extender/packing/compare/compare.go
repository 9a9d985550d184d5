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
	policy, o, err := newPolicy(name, trace, seed, known)
	if err != nil {
		return replay.Result{}, err
	}
	return replay.Run(order, policy, o)
}

// Churn is one run with departures.
func Churn(name string, trace *openb.Trace, load float64, seed int64) (replay.Churned, error) {
	policy, o, err := newPolicy(name, trace, seed, false)
	if err != nil {
		return replay.Churned{}, err
	}
	return replay.Churn(trace, policy, load, seed, o)
}

func newPolicy(name string, trace *openb.Trace, seed int64, known bool) (replay.Policy, replay.Options, error) {
	o := replay.Options{Seed: seed, Ties: replay.FirstRank}
	switch name {
	case "carve", "carve_random_ties":
		p := carve.New(trace.Nodes)
		if known {
			if err := p.Know(trace.Pods); err != nil {
				return nil, o, err
			}
		}
		if o.Ties = replay.ByPod; name == "carve_random_ties" {
			o.Ties = replay.Random
		}
		return p, o, nil
	case "fgd":
		return rival.NewFGD(trace.Pods), o, nil
	case "fgd_random_ties":
		o.Ties = replay.Random
		return rival.NewFGD(trace.Pods), o, nil
	case "bestfit":
		return rival.BestFit{}, o, nil
	case "gpupacking":
		return rival.GPUPacking{}, o, nil
	case "random":
		o.Ties = replay.Random
		return rival.NewRandom(seed), o, nil
	}
	return nil, o, fmt.Errorf("there is no policy %q; %v are known", name, Names())
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
