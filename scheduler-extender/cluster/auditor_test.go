package cluster

import (
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/cache"
	cachetesting "k8s.io/client-go/tools/cache/testing"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/v1alpha1"
	"github.com/carve-gpu/carve/scheduler-extender/ledger"
)

// audited is a source with an auditor whose rounds a test makes.
type audited struct {
	*Auditor
	t        *testing.T
	kube     *fake.Clientset
	registry *prometheus.Registry
}

func newAudited(t *testing.T) *audited {
	t.Helper()
	kube := fake.NewClientset(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1", Labels: map[string]string{api.LabelManaged: "true"}}}, agentPod("n1", true))
	reports := cachetesting.NewFakeControllerSource()
	since := metav1.NewTime(time.Unix(1_700_000_000, 0))
	reports.Add(&v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: "n1"}, Status: v1alpha1.GPUNodeStatus{HookConnectedSince: &since,
		Cards: []v1alpha1.Card{{UUID: "GPU-a", MemoryMiB: 81920, Health: v1alpha1.Health{State: v1alpha1.Healthy}}}}})
	s, err := NewSource(Config{Kube: kube, Reports: cache.NewSharedIndexInformer(reports, &v1alpha1.GPUNode{}, 0, cache.Indexers{}),
		Ledger: ledger.New(ledger.Config{}), Forget: func(string) {}, Log: slog.New(slog.DiscardHandler), Now: time.Now})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var parts sync.WaitGroup
	parts.Go(func() { _ = s.Run(ctx) })
	t.Cleanup(func() { cancel(); parts.Wait(); reports.Shutdown() })
	a := &audited{t: t, kube: kube, registry: prometheus.NewRegistry()}
	a.Auditor = NewAuditor(s, time.Hour, a.registry, s.Log)
	a.until("ready", s.Ready)
	return a
}

func (a *audited) until(what string, ok func() bool) {
	a.t.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			a.t.Fatalf("never seen: %s", what)
		}
	}
}

// drifts is what was counted of a kind.
func (a *audited) drifts(kind string) float64 {
	a.t.Helper()
	families, err := a.registry.Gather()
	if err != nil {
		a.t.Fatal(err)
	}
	for _, m := range families[0].Metric {
		if m.Label[0].GetValue() == kind {
			return m.Counter.GetValue()
		}
	}
	return 0
}

func boundPod(name string, generation, mib int) *corev1.Pod {
	p := gpuPod(name)
	p.Annotations = map[string]string{api.AnnotationGrant: fmt.Sprintf(`{"v":1,"uid":"uid-%s","node":"n1","gen":%d,"containers":{"app":[{"card":"GPU-a","memMiB":%d,"mode":"vgpu"}]}}`, name, generation, mib)}
	return p
}

func (a *audited) create(p *corev1.Pod) {
	a.t.Helper()
	if _, err := a.kube.CoreV1().Pods("default").Create(a.t.Context(), p, metav1.CreateOptions{}); err != nil {
		a.t.Fatal(err)
	}
	a.until("it is in the ledger", func() bool { _, ok := a.Source.Ledger.Held(string(p.UID)); return ok })
}

func (a *audited) used() int64 { return a.Source.Ledger.Totals().UsedMiB }

// An event that is lost is found in the second round, and not before: in the first it might
// have been on its way.
func TestDriftIsFoundAndPutRight(t *testing.T) {
	for kind, lose := range map[string]func(a *audited){
		driftMissing: func(a *audited) {
			a.Source.Ledger.SetPod(ledger.Pod{Ref: ref(gpuPod("a")), Ended: true}, time.Now())
			a.Source.Ledger.Sweep(time.Now().Add(time.Minute))
		},
		driftGhost: func(a *audited) {
			p := boundPod("ghost", 1, 16000)
			g, err := grantOf(p)
			if err != nil {
				a.t.Fatal(err)
			}
			a.Source.Ledger.SetPod(ledger.Pod{Ref: ref(p), Node: "n1", Grant: g, Containers: []ledger.Container{{Name: "app"}}}, time.Now().Add(-time.Minute))
		},
		driftGrant: func(a *audited) {
			g, err := grantOf(boundPod("a", 2, 20000))
			if err != nil {
				a.t.Fatal(err)
			}
			a.Source.Ledger.SetPod(ledger.Pod{Ref: ref(gpuPod("a")), Node: "n1", Grant: g, Containers: []ledger.Container{{Name: "app"}}}, time.Now())
		},
	} {
		t.Run(kind, func(t *testing.T) {
			a := newAudited(t)
			a.create(boundPod("a", 1, 8000))
			a.round()
			a.round()
			if a.used() != 8000 || a.drifts(kind) != 0 {
				t.Fatalf("%d MiB in use, %g drifts before anything was lost", a.used(), a.drifts(kind))
			}
			lose(a)
			lost := a.used()
			a.round()
			if lost == 8000 || a.used() != lost || a.drifts(kind) != 0 {
				t.Fatalf("after the first round %d MiB in use, %d before, %g drifts", a.used(), lost, a.drifts(kind))
			}
			a.round()
			if a.drifts(kind) != 1 {
				t.Fatalf("%g drifts after the second round", a.drifts(kind))
			}
			a.Source.Ledger.Sweep(time.Now().Add(time.Minute)) // the grace of one that vanished
			if a.used() != 8000 {
				t.Errorf("%d MiB in use", a.used())
			}
			a.round()
			a.round()
			if a.drifts(kind) != 1 {
				t.Errorf("%g drifts in the end", a.drifts(kind))
			}
		})
	}
}

// Rounds at any moment of a history of which nothing is lost find nothing.
func TestNoDriftWhereNothingIsLost(t *testing.T) {
	a := newAudited(t)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 0))
	pods := a.kube.CoreV1().Pods("default")
	alive := map[string]int{}
	for i := range 300 {
		name := fmt.Sprint("p", r.IntN(20))
		generation, is := alive[name]
		var err error
		switch {
		case !is:
			alive[name] = 1
			_, err = pods.Create(t.Context(), boundPod(name, 1, 1000), metav1.CreateOptions{})
		case r.IntN(3) == 0:
			delete(alive, name)
			err = pods.Delete(t.Context(), name, metav1.DeleteOptions{})
		case r.IntN(3) == 0:
			p := boundPod(name, generation, 1000)
			p.Status.Phase = corev1.PodSucceeded
			_, err = pods.Update(t.Context(), p, metav1.UpdateOptions{})
		default:
			alive[name]++
			_, err = pods.Update(t.Context(), boundPod(name, generation+1, 1000+100*generation), metav1.UpdateOptions{})
		}
		if err != nil {
			t.Fatalf("step %d: %v", i, err)
		}
		// Two rounds are a minute apart; by then a watch has told.
		if r.IntN(10) == 0 {
			a.round()
			time.Sleep(20 * time.Millisecond)
		}
	}
	for _, kind := range []string{driftMissing, driftGhost, driftGrant} {
		if n := a.drifts(kind); n != 0 {
			t.Errorf("%g times %s", n, kind)
		}
	}
}
