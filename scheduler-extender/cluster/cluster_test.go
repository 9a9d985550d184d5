package cluster

import (
	"context"
	"log/slog"
	"reflect"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/cache"
	cachetesting "k8s.io/client-go/tools/cache/testing"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/v1alpha1"
	"github.com/carve-gpu/carve/scheduler-extender/fit"
	"github.com/carve-gpu/carve/scheduler-extender/ledger"
	"github.com/carve-gpu/carve/scheduler-extender/score"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func gpuPod(name string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID("uid-" + name), Labels: map[string]string{"app": "x"},
			Annotations:   map[string]string{api.AnnotationGrant: "g", "other": "x"},
			ManagedFields: []metav1.ManagedFieldsEntry{{Manager: "x"}}},
		Spec: corev1.PodSpec{NodeName: "n1", ServiceAccountName: "x", Containers: []corev1.Container{{Name: "app", Image: "x", Env: []corev1.EnvVar{{Name: "A"}},
			Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{api.ResourceMemory: resource.MustParse("8000"), corev1.ResourceCPU: resource.MustParse("4")}}}}},
		Status: corev1.PodStatus{Phase: corev1.PodRunning, ContainerStatuses: []corev1.ContainerStatus{{Name: "app", Image: "x", State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}}}},
	}
}

// agentPod is the agent's pod of a node.
func agentPod(node string, ready bool) *corev1.Pod {
	status := corev1.ConditionFalse
	if ready {
		status = corev1.ConditionTrue
	}
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: api.Namespace, Name: "carve-node-" + node, UID: types.UID("uid-agent-" + node),
			Labels: map[string]string{api.LabelName: api.AgentName}},
		Spec:   corev1.PodSpec{NodeName: node},
		Status: corev1.PodStatus{Phase: corev1.PodRunning, Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: status}}},
	}
}

func TestInformersKeepNoMoreThanIsRead(t *testing.T) {
	got, err := trimPod(gpuPod("a"))
	if err != nil {
		t.Fatal(err)
	}
	want := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "a", UID: "uid-a", Annotations: map[string]string{api.AnnotationGrant: "g"}},
		Spec: corev1.PodSpec{NodeName: "n1", InitContainers: []corev1.Container{}, Containers: []corev1.Container{{Name: "app",
			Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{api.ResourceMemory: resource.MustParse("8000")}}}}},
		Status: corev1.PodStatus{Phase: corev1.PodRunning, InitContainerStatuses: []corev1.ContainerStatus{}, ContainerStatuses: []corev1.ContainerStatus{{Name: "app", State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}}}},
	}
	if !reflect.DeepEqual(got, want) {
		t.Fatalf("pod %+v", got)
	}
	plain := gpuPod("b")
	plain.Annotations, plain.Spec.Containers[0].Resources = nil, corev1.ResourceRequirements{}
	if got, _ := trimPod(plain); !reflect.DeepEqual(got, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "b", UID: "uid-b"},
		Spec: corev1.PodSpec{NodeName: "n1"}, Status: corev1.PodStatus{Phase: corev1.PodRunning}}) {
		t.Fatalf("pod %+v", got)
	}
	n, _ := trimNode(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1", Labels: map[string]string{api.LabelManaged: "true", "x": "y"}},
		Status: corev1.NodeStatus{Images: []corev1.ContainerImage{{}}, Allocatable: corev1.ResourceList{api.ResourceGPU: resource.MustParse("8"), corev1.ResourceCPU: resource.MustParse("4"), corev1.ResourceEphemeralStorage: resource.MustParse("4Gi")}}})
	if !reflect.DeepEqual(n, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1", Labels: map[string]string{api.LabelManaged: "true", "x": "y"}},
		Status: corev1.NodeStatus{Allocatable: corev1.ResourceList{api.ResourceGPU: resource.MustParse("8"), corev1.ResourceCPU: resource.MustParse("4")}}}) {
		t.Fatalf("node %+v", n)
	}
	for _, f := range []cache.TransformFunc{trimPod, trimNode, trimAgent, trimReport} {
		tomb := cache.DeletedFinalStateUnknown{Key: "x"}
		if o, err := f(tomb); err != nil || o != tomb {
			t.Fatal("a tombstone was changed")
		}
	}
}

func TestGrantsAreTakenFromTheirPodOnItsNodeOnly(t *testing.T) {
	valid := `{"v":1,"uid":"uid-a","node":"n1","gen":1,"containers":{"app":[{"card":"GPU-a","memMiB":8000,"mode":"vgpu"}]}}`
	for name, c := range map[string]struct {
		change func(p *corev1.Pod)
		ok     bool
	}{
		"its own":            {func(*corev1.Pod) {}, true},
		"of another pod":     {func(p *corev1.Pod) { p.UID = "uid-b" }, false},
		"of another node":    {func(p *corev1.Pod) { p.Spec.NodeName = "n2" }, false},
		"that can't be read": {func(p *corev1.Pod) { p.Annotations[api.AnnotationGrant] = "{" }, false},
	} {
		p := gpuPod("a")
		p.Annotations[api.AnnotationGrant] = valid
		c.change(p)
		if g, err := grantOf(p); (g != nil) != c.ok || (err == nil) != c.ok {
			t.Errorf("%s: %+v, %v", name, g, err)
		}
	}
	p := gpuPod("a")
	p.Annotations = nil
	if g, err := grantOf(p); g != nil || err != nil {
		t.Errorf("none: %+v, %v", g, err)
	}
}

func TestStarted(t *testing.T) {
	for name, c := range map[string]struct {
		status corev1.ContainerStatus
		want   bool
	}{
		"unknown":    {corev1.ContainerStatus{}, false},
		"waiting":    {corev1.ContainerStatus{State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{}}}, false},
		"running":    {corev1.ContainerStatus{State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}}, true},
		"terminated": {corev1.ContainerStatus{State: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{}}}, true},
		"restarting": {corev1.ContainerStatus{RestartCount: 1, State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{}}}, true},
	} {
		p := gpuPod("a")
		p.Status.ContainerStatuses = []corev1.ContainerStatus{c.status}
		o, _ := trimPod(p)
		if got := started(o.(*corev1.Pod)); got != c.want {
			t.Errorf("%s: %t", name, got)
		}
	}
}

// A pod that was bound and then vanished between two lists of the informer is
// found out, and its share comes back.
func TestABoundPodThatNoEventShowedIsFoundOut(t *testing.T) {
	now := time.Unix(1_700_000_000, 0)
	clock := func() time.Time { return now }
	l := ledger.New(ledger.Config{})
	reports := cachetesting.NewFakeControllerSource()
	defer reports.Shutdown()
	since := metav1.NewTime(now)
	reports.Add(&v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: "n1"}, Status: v1alpha1.GPUNodeStatus{HookConnectedSince: &since,
		Cards: []v1alpha1.Card{{UUID: "GPU-a", MemoryMiB: 81920, Health: v1alpha1.Health{State: v1alpha1.Healthy}}}}})
	kube := fake.NewClientset(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1", Labels: map[string]string{api.LabelManaged: "true"}}}, agentPod("n1", true))
	s, err := NewSource(Config{Kube: kube, Reports: cache.NewSharedIndexInformer(reports, &v1alpha1.GPUNode{}, 0, cache.Indexers{}),
		Ledger: l, Forget: func(string) {}, Log: slog.New(slog.DiscardHandler), Now: clock})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var run sync.WaitGroup
	run.Go(func() {
		if err := s.Run(ctx); err != nil {
			t.Error(err)
		}
	})
	defer run.Wait()
	defer cancel()
	for end := time.Now().Add(10 * time.Second); !s.Ready(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("never ready")
		}
	}
	a, refusal := fit.NewAsk(api.Request{Containers: []api.ContainerRequest{{Name: "app", Cards: 1, MemMiB: 8000}}})
	if refusal != nil {
		t.Fatal(refusal)
	}
	ref := ledger.Ref{UID: "uid-a", Namespace: "default", Name: "a"}
	if err := l.Offer(ledger.Offer{Ref: ref, Node: l.Node("n1"), Ask: a, Prefer: score.Binpack.Card}, now); err != nil {
		t.Fatal(err)
	}
	if _, _, err := l.BeginBind(ref, "n1", now); err != nil {
		t.Fatal(err)
	}
	l.EndBind("uid-a", ledger.Written, now)
	cancel()
	run.Wait() // so that this test's clock is moved by one goroutine
	now = now.Add(31 * time.Second)
	s.sweep()
	if _, ok := l.Held("uid-a"); ok {
		t.Fatal("the entry stayed")
	}
	if s.Ready() {
		t.Fatal("ready after its end")
	}
}
