// Package carve runs the extender's own packing in the experiment: the scorer that is shipped,
// with the mix of pods learnt from those that arrive.
package carve

import (
	"github.com/carve-gpu/carve/scheduler-extender/fit"
	"github.com/carve-gpu/carve/scheduler-extender/packing/openb"
	"github.com/carve-gpu/carve/scheduler-extender/packing/replay"
	"github.com/carve-gpu/carve/scheduler-extender/price"
	"github.com/carve-gpu/carve/scheduler-extender/score"
)

// Policy implements replay.Policy.
type Policy struct {
	learner *score.Learner
	scorer  *score.Scorer
}

// New makes a policy that knows the cluster's nodes, and nothing of the pods.
func New(nodes []openb.Node) *Policy {
	l := score.NewLearner(score.FleetOf(replay.NewCluster(nodes).Nodes))
	return &Policy{l, score.NewScorer(l.Prices())}
}

// Know tells the policy what pods will ask, as published policies are told.
func (p *Policy) Know(pods []openb.Pod) error {
	arrivals, err := replay.NewArrivals(pods)
	if err != nil {
		return err
	}
	mix := price.NewMix(-1)
	for i := range arrivals {
		mix.Add(arrivals[i].Ask)
	}
	p.learner.Know(mix.Shapes())
	p.scorer.Use(p.learner.Prices())
	return nil
}

// Judge implements replay.Policy.
func (p *Policy) Judge(n *fit.Node, a *fit.Ask) (fit.Placement, int64, bool) {
	return p.scorer.Judge(n, a)
}

// Learn implements replay.Policy.
func (p *Policy) Learn(a *fit.Ask, placed bool) bool {
	if !p.learner.Arrived(a, placed) {
		return false
	}
	p.scorer.Use(p.learner.Prices())
	return true
}

var _ replay.Policy = (*Policy)(nil)
