package cluster

import (
	"context"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/scheduler-extender/ledger"
)

// Kinds of drift.
const (
	driftMissing = "missing" // a pod that is bound isn't in the ledger
	driftGhost   = "ghost"   // the ledger has a pod that is gone or has ended
	driftGrant   = "grant"   // it has an earlier or later grant
)

// Auditor compares the ledger with what the watches have, again and again, and puts right what
// differs: an event that was lost would otherwise hold a share for ever, or give it away twice.
// Nothing is known that loses one; the metric says whether anything does.
type Auditor struct {
	Source *Source
	// Every is how often. What differs twice running is drift; once it may be on its way.
	Every time.Duration
	Log   *slog.Logger

	drift    *prometheus.CounterVec
	suspects map[suspect]bool
}

type suspect struct {
	uid, kind  string
	generation int
}

// NewAuditor makes an auditor and registers its metric.
func NewAuditor(s *Source, every time.Duration, registry prometheus.Registerer, log *slog.Logger) *Auditor {
	a := &Auditor{Source: s, Every: every, Log: log, drift: prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "carve_extender_ledger_drift_total",
		Help: "Pods of which the ledger was found to differ from the API, and was put right, by kind: missing, ghost (gone or ended), grant.",
	}, []string{"kind"})}
	for _, kind := range []string{driftMissing, driftGhost, driftGrant} {
		a.drift.WithLabelValues(kind)
	}
	registry.MustRegister(a.drift)
	return a
}

// Run audits until the context ends.
func (a *Auditor) Run(ctx context.Context) {
	tick := time.NewTicker(a.Every)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			if a.Source.Ready() {
				a.round()
			}
		}
	}
}

// round compares once. It holds the ledger's lock for one node at a time.
func (a *Auditor) round() {
	found := map[suspect]bool{}
	is := func(uid, kind string, generation int) bool {
		s := suspect{uid, kind, generation}
		found[s] = true
		return a.suspects[s]
	}
	want := map[string]*api.Grant{}
	for _, o := range a.Source.pods.GetStore().List() {
		p := o.(*corev1.Pod)
		if p.Spec.NodeName == "" || ended(p) || p.Annotations[api.AnnotationGrant] == "" {
			continue
		}
		g, err := grantOf(p)
		if err != nil {
			continue // the ledger doesn't take it either
		}
		want[string(p.UID)] = g
		if h, held := a.Source.Ledger.Held(string(p.UID)); (!held || h.State == ledger.Releasing) && is(string(p.UID), driftMissing, g.Generation) {
			a.told(driftMissing, ref(p), p.Spec.NodeName)
			a.Source.setPod(p)
		}
	}
	for _, n := range a.Source.Ledger.Nodes() {
		for _, b := range a.Source.Ledger.BoundOn(n) {
			g := want[b.UID]
			kind := ""
			switch {
			case g == nil:
				kind = driftGhost
			case g.Node != b.Grant.Node || g.Generation != b.Grant.Generation:
				kind = driftGrant
			}
			if kind == "" || !is(b.UID, kind, b.Grant.Generation) {
				continue
			}
			// As it is now, which may be later than when the round began. A pod whose grant
			// somebody took off keeps its share here as it does on its node.
			switch p := a.Source.pod(b.Ref); {
			case p == nil:
				a.told(kind, b.Ref, n.Name)
				a.Source.Ledger.DropPod(b.UID, a.Source.Now())
			case kind == driftGrant || ended(p):
				a.told(kind, b.Ref, n.Name)
				a.Source.setPod(p)
			}
		}
	}
	a.suspects = found
}

func (a *Auditor) told(kind string, r ledger.Ref, node string) {
	a.drift.WithLabelValues(kind).Inc()
	a.Log.Error("the ledger differed from the API and was put right", "kind", kind, "pod", r.Namespace+"/"+r.Name, "uid", r.UID, "node", node)
}

func ref(p *corev1.Pod) ledger.Ref {
	return ledger.Ref{UID: string(p.UID), Namespace: p.Namespace, Name: p.Name}
}
