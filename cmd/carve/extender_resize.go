package main

import (
	"context"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	typedv1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/tools/record"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/scheduler-extender/cluster"
	"github.com/carve-gpu/carve/scheduler-extender/ledger"
	"github.com/carve-gpu/carve/scheduler-extender/place"
	"github.com/carve-gpu/carve/scheduler-extender/planner"
)

// Reasons of the extender's events on pods.
const (
	reasonResized       = "Resized"
	reasonResizeRefused = "ResizeRefused"
)

// newResizer makes the extender's answerer of live resizes, and has the source
// tell it of pods and reports.
func newResizer(ctx context.Context, kube kubernetes.Interface, books *ledger.Ledger, source *cluster.Source, ready func() bool, registry prometheus.Registerer, log *slog.Logger) *cluster.Resizer {
	answers := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "carve_extender_resizes_total", Help: "Live resizes by answer: granted, refused, or taken-back because the node couldn't put it in force.",
	}, []string{"outcome"})
	registry.MustRegister(answers)
	events := recorder(ctx, kube)
	source.Resizer = cluster.NewResizer(cluster.ResizerConfig{
		Kube: kube, Ledger: books, Ready: ready, Pod: source.Pod, Log: log,
		Answered: func(pod ledger.Ref, outcome, message string) {
			answers.WithLabelValues(outcome).Inc()
			// Who asked sees it on the pod; this is for those who look later.
			p := &corev1.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: pod.Namespace, Name: pod.Name, UID: types.UID(pod.UID)}
			switch outcome {
			case api.ResizeGranted:
				events.Event(p, corev1.EventTypeNormal, reasonResized, "the share's new size is granted")
			case api.ResizeRefused:
				events.Event(p, corev1.EventTypeWarning, reasonResizeRefused, message)
			} // what a node refuses, the node says itself
		},
	})
	return source.Resizer
}

// recorder writes events in the extender's name.
func recorder(ctx context.Context, kube kubernetes.Interface) record.EventRecorder {
	broadcaster := record.NewBroadcaster(record.WithContext(ctx))
	broadcaster.StartRecordingToSink(&typedv1.EventSinkImpl{Interface: kube.CoreV1().Events("")})
	return broadcaster.NewRecorder(scheme.Scheme, corev1.EventSource{Component: "carve-extender"})
}

// newPlanner makes the planner, which also plans pods that say so where others don't.
func newPlanner(ctx context.Context, kube kubernetes.Interface, books *ledger.Ledger, placer *place.Placer, source *cluster.Source, ready func() bool, releaseAfter time.Duration, registry prometheus.Registerer, log *slog.Logger) *planner.Planner {
	p := planner.New(planner.Config{
		Kube: kube, Ledger: books, Placer: placer, Ready: ready, ReleaseAfter: releaseAfter,
		Events: recorder(ctx, kube), Registry: registry, Log: log, Now: time.Now,
	})
	source.Planner = p
	return p
}
