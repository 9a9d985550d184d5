package main

import (
	"log/slog"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/client-go/kubernetes"

	"github.com/carve-gpu/carve/scheduler-extender/cluster"
	"github.com/carve-gpu/carve/scheduler-extender/ledger"
)

// newResizer makes the extender's answerer of live resizes, and has the source
// tell it of pods and reports.
func newResizer(kube kubernetes.Interface, books *ledger.Ledger, source *cluster.Source, registry prometheus.Registerer, log *slog.Logger) *cluster.Resizer {
	answers := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "carve_extender_resizes_total", Help: "Live resizes by answer: granted, refused, or taken-back because the node couldn't put it in force.",
	}, []string{"outcome"})
	registry.MustRegister(answers)
	source.Resizer = cluster.NewResizer(cluster.ResizerConfig{
		Kube: kube, Ledger: books, Ready: source.Ready, Pod: source.Pod, Log: log,
		Answered: func(outcome string) { answers.WithLabelValues(outcome).Inc() },
	})
	return source.Resizer
}
