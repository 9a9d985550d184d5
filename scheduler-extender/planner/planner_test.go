package planner_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/cache"
	cachetesting "k8s.io/client-go/tools/cache/testing"
	"k8s.io/client-go/tools/record"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/v1alpha1"
	"github.com/carve-gpu/carve/scheduler-extender/cluster"
	"github.com/carve-gpu/carve/scheduler-extender/ledger"
	"github.com/carve-gpu/carve/scheduler-extender/place"
	"github.com/carve-gpu/carve/scheduler-extender/planner"
	"github.com/carve-gpu/carve/scheduler-extender/score"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// rig is a planner with all that it is told by, against client-go's fake API server.
type rig struct {
	*testing.T
	kube    *fake.Clientset
	reports *cachetesting.FakeControllerSource
	books   *ledger.Ledger
	placer  *place.Placer
	planner *planner.Planner
	events  *record.FakeRecorder
	stop    func()
	ahead   atomic.Int64 // of the clock
	release time.Duration
	// hold is called with each patch of a pod before it is done; an error is the answer.
	hold atomic.Pointer[func(clienttesting.PatchAction) error]
}

func (r *rig) now() time.Time { return time.Now().Add(time.Duration(r.ahead.Load())) }

func newRig(t *testing.T, objects ...runtime.Object) *rig {
	r := &rig{T: t, kube: fake.NewClientset(objects...), reports: cachetesting.NewFakeControllerSource()}
	t.Cleanup(r.reports.Shutdown)
	r.kube.PrependReactor("patch", "pods", func(a clienttesting.Action) (bool, runtime.Object, error) {
		if f := r.hold.Load(); f != nil {
			if err := (*f)(a.(clienttesting.PatchAction)); err != nil {
				return true, nil, err
			}
		}
		return false, nil, nil
	})
	return r
}

// start runs an extender's part that plans; called again it is a restart.
func (r *rig) start() {
	r.Helper()
	if r.stop != nil {
		r.stop()
	}
	log := slog.New(slog.DiscardHandler)
	if testing.Verbose() {
		log = slog.New(slog.NewTextHandler(r.Output(), &slog.HandlerOptions{Level: slog.LevelDebug}))
	}
	r.books = ledger.New(ledger.Config{})
	r.placer = place.New(r.books, place.Config{Policy: score.Binpack})
	source, err := cluster.NewSource(cluster.Config{
		Kube: r.kube, Reports: cache.NewSharedIndexInformer(r.reports, &v1alpha1.GPUNode{}, 0, cache.Indexers{}),
		Ledger: r.books, Forget: func(uid string) { r.placer.Forget(uid) }, Log: log, Now: r.now,
	})
	if err != nil {
		r.Fatal(err)
	}
	r.events = record.NewFakeRecorder(100)
	leads := new(atomic.Bool)
	r.planner = planner.New(planner.Config{Kube: r.kube, Ledger: r.books, Placer: r.placer, Ready: leads.Load, ReleaseAfter: r.release,
		Events: r.events, Registry: prometheus.NewRegistry(), Log: log, Now: r.now})
	source.Planner = r.planner
	waker := cluster.Waker{Kube: r.kube, Ledger: r.books, Placer: r.placer, Ready: source.Ready, Planner: r.planner, Log: log, Now: r.now}
	ctx, cancel := context.WithCancel(context.Background())
	var parts sync.WaitGroup
	parts.Go(func() {
		if err := source.Run(ctx); err != nil && ctx.Err() == nil {
			r.Errorf("source: %v", err)
		}
	})
	parts.Go(func() { waker.Run(ctx) })
	parts.Go(func() { r.planner.Run(ctx) })
	r.stop = sync.OnceFunc(func() { cancel(); parts.Wait() })
	r.Cleanup(r.stop)
	r.until("ready", source.Ready)
	r.planner.Restore()
	leads.Store(true)
}

func (r *rig) until(what string, ok func() bool) {
	r.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			r.Fatalf("never seen: %s", what)
		}
	}
}

// node is one that carve manages, of 8 processors and 64 GiB, with its agent's pod.
func node(name string, change ...func(*corev1.Node)) []runtime.Object {
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{api.LabelManaged: "true", "kubernetes.io/hostname": name}},
		Status: corev1.NodeStatus{Allocatable: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("8"), corev1.ResourceMemory: resource.MustParse("64Gi"), corev1.ResourcePods: resource.MustParse("110")}}}
	for _, c := range change {
		c(n)
	}
	return []runtime.Object{n, &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: api.Namespace, Name: "carve-node-" + name, UID: types.UID("uid-agent-" + name), Labels: map[string]string{api.LabelName: api.AgentName}},
		Spec:       corev1.PodSpec{NodeName: name},
		Status:     corev1.PodStatus{Phase: corev1.PodRunning, Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}},
	}}
}

// report is one card of 80,000 MiB with slices of pods that nobody knows.
func (r *rig) report(name string, usedMiB int64) {
	since := metav1.NewTime(time.Unix(1_700_000_000, 0))
	g := &v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: name}, Status: v1alpha1.GPUNodeStatus{HookConnectedSince: &since,
		Cards: []v1alpha1.Card{{UUID: "GPU-" + name, MemoryMiB: 80000, Health: v1alpha1.Health{State: v1alpha1.Healthy}}}}}
	if usedMiB > 0 {
		g.Status.Cards[0].Slices = []v1alpha1.Slice{{PodUID: "uid-other-" + name, Container: "app", MemMiB: usedMiB, Mode: "vgpu", State: v1alpha1.Active}}
	}
	r.reports.Modify(g)
}

// gated is a pod as the webhook leaves it.
func gated(name string, mib int, change ...func(*corev1.Pod)) *corev1.Pod {
	yes := true
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID("uid-" + name), CreationTimestamp: metav1.Unix(1_700_000_000, 0),
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "batch/v1", Kind: "Job", Name: "job", UID: "uid-job", Controller: &yes}}},
		Spec: corev1.PodSpec{SchedulingGates: []corev1.PodSchedulingGate{{Name: api.GatePlan}}, Containers: []corev1.Container{{Name: "app",
			Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{api.ResourceGPU: resource.MustParse("1"), api.ResourceMemory: resource.MustParse(fmt.Sprint(mib))}}}}},
	}
	for _, c := range change {
		c(p)
	}
	return p
}

func bare(p *corev1.Pod) { p.OwnerReferences = nil }

func (r *rig) create(pods ...*corev1.Pod) {
	r.Helper()
	for _, p := range pods {
		if _, err := r.kube.CoreV1().Pods(p.Namespace).Create(r.Context(), p, metav1.CreateOptions{}); err != nil {
			r.Fatal(err)
		}
	}
}

func (r *rig) pod(name string) *corev1.Pod {
	r.Helper()
	p, err := r.kube.CoreV1().Pods("default").Get(r.Context(), name, metav1.GetOptions{})
	if err != nil {
		r.Fatal(err)
	}
	return p
}

// ungated waits until a pod's gate is off.
func (r *rig) ungated(name string) *corev1.Pod {
	r.Helper()
	var p *corev1.Pod
	r.until("the gate of "+name+" is off", func() bool { p = r.pod(name); return len(p.Spec.SchedulingGates) == 0 })
	return p
}

// pins are the nodes that a pod's affinity names.
func pins(p *corev1.Pod) (names []string) {
	if p.Spec.Affinity == nil || p.Spec.Affinity.NodeAffinity == nil || p.Spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution == nil {
		return nil
	}
	for _, t := range p.Spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms {
		for _, f := range t.MatchFields {
			names = append(names, f.Values...)
		}
	}
	return names
}

// filter asks as kube-scheduler does.
func (r *rig) filter(p *corev1.Pod, names ...string) place.Filtered {
	r.Helper()
	asked, err := cluster.PodOf(p)
	if err != nil {
		r.Fatal(err)
	}
	var raw [][]byte
	for _, n := range names {
		raw = append(raw, []byte(n))
	}
	return r.placer.Filter(asked, raw, r.now())
}

func three() []runtime.Object {
	return slices.Concat(node("n1"), node("n2"), node("n3"))
}

func TestAGatedPodIsPinned(t *testing.T) {
	r := newRig(t, three()...)
	for _, n := range []string{"n1", "n2", "n3"} {
		r.report(n, 1000)
	}
	r.report("n2", 30000) // binpack's first
	r.start()
	r.create(gated("a", 20000))
	p := r.ungated("a")
	plan, err := api.DecodePlan(p.Annotations[api.AnnotationPlan])
	if err != nil || plan.UID != "uid-a" || !plan.Pinned || plan.Nodes[0] != "n2" || len(plan.Nodes) != 3 {
		t.Fatalf("plan %+v, %v", plan, err)
	}
	if got := pins(p); !slices.Equal(got, plan.Nodes) {
		t.Fatalf("pinned to %v", got)
	}
	if h, ok := r.books.Held("uid-a"); !ok || h.Node.Name != "n2" || h.State != ledger.Offered {
		t.Fatalf("held %+v", h)
	}
	// The scheduler hears of the planned node alone, and of a spare where that one is gone.
	if f := r.filter(p, plan.Nodes...); !slices.Equal(f.Nodes, []string{"n2"}) {
		t.Fatalf("filter: %+v", f)
	}
	if f := r.filter(p, plan.Nodes[1:]...); len(f.Nodes) != 1 || f.Nodes[0] == "n2" {
		t.Fatalf("filter without the planned node: %+v", f)
	}
}

// What isn't known here may forbid the nodes that are: kube-scheduler must be able to take others.
func TestPodsThatAreNotPinnedAreNominated(t *testing.T) {
	term := corev1.PodAffinityTerm{TopologyKey: "kubernetes.io/hostname"}
	for name, change := range map[string]func(*corev1.Pod){
		"no controller": bare,
		"a claim": func(p *corev1.Pod) {
			p.Spec.Volumes = []corev1.Volume{{Name: "v", VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "c"}}}}
		},
		"a port of the host": func(p *corev1.Pod) {
			p.Spec.Containers[0].Ports = []corev1.ContainerPort{{ContainerPort: 1, HostPort: 1}}
		},
		"neighbours": func(p *corev1.Pod) {
			p.Spec.Affinity = &corev1.Affinity{PodAntiAffinity: &corev1.PodAntiAffinity{RequiredDuringSchedulingIgnoredDuringExecution: []corev1.PodAffinityTerm{term}}}
		},
		"spread": func(p *corev1.Pod) {
			p.Spec.TopologySpreadConstraints = []corev1.TopologySpreadConstraint{{WhenUnsatisfiable: corev1.DoNotSchedule}}
		},
		"another resource": func(p *corev1.Pod) {
			p.Spec.Containers[0].Resources.Requests = corev1.ResourceList{"rdma/hca": resource.MustParse("1")}
		},
		"a node by name": func(p *corev1.Pod) {
			p.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{
				{MatchFields: []corev1.NodeSelectorRequirement{{Key: "metadata.name", Operator: corev1.NodeSelectorOpIn, Values: []string{"n1"}}}}}}}}
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, node("n1")...)
			r.report("n1", 0)
			r.start()
			p := gated("a", 8000, change)
			own := pins(p)
			r.create(p)
			p = r.ungated("a")
			plan, err := api.DecodePlan(p.Annotations[api.AnnotationPlan])
			if err != nil || plan.Pinned || !slices.Equal(plan.Nodes, []string{"n1"}) || p.Status.NominatedNodeName != "n1" || !slices.Equal(pins(p), own) {
				t.Errorf("plan %+v, %v, nominated %q, pinned to %v", plan, err, p.Status.NominatedNodeName, pins(p))
			}
		})
	}
}

// A pod's own terms are made narrower, each of them.
func TestOwnAffinityStays(t *testing.T) {
	r := newRig(t, three()...)
	for _, n := range []string{"n1", "n2", "n3"} {
		r.report(n, 0)
	}
	r.start()
	is := func(n ...string) corev1.NodeSelectorTerm {
		return corev1.NodeSelectorTerm{MatchExpressions: []corev1.NodeSelectorRequirement{{Key: "kubernetes.io/hostname", Operator: corev1.NodeSelectorOpIn, Values: n}}}
	}
	p := gated("a", 8000, func(p *corev1.Pod) {
		p.Spec.Affinity = &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{
			RequiredDuringSchedulingIgnoredDuringExecution:  &corev1.NodeSelector{NodeSelectorTerms: []corev1.NodeSelectorTerm{is("n3"), is("n9")}},
			PreferredDuringSchedulingIgnoredDuringExecution: []corev1.PreferredSchedulingTerm{{Weight: 1, Preference: is("n3")}}}}
	})
	r.create(p)
	got := r.ungated("a").Spec.Affinity.NodeAffinity
	terms := got.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms
	if len(terms) != 2 || len(got.PreferredDuringSchedulingIgnoredDuringExecution) != 1 {
		t.Fatalf("%+v", got)
	}
	for i, own := range p.Spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms {
		if len(terms[i].MatchFields) != 1 || terms[i].MatchFields[0].Values[0] != "n3" || terms[i].MatchExpressions[0].Values[0] != own.MatchExpressions[0].Values[0] {
			t.Errorf("term %d: %+v", i, terms[i])
		}
	}
}

func TestAPodStaysGatedUntilThereIsRoom(t *testing.T) {
	r := newRig(t, three()...)
	for _, n := range []string{"n1", "n2", "n3"} {
		r.report(n, 70000)
	}
	r.start()
	young := gated("young", 40000, func(p *corev1.Pod) { p.CreationTimestamp = metav1.Unix(1_700_000_010, 0) })
	urgent := int32(10)
	first := gated("urgent", 40000, func(p *corev1.Pod) { p.CreationTimestamp, p.Spec.Priority = metav1.Unix(1_700_000_020, 0), &urgent })
	r.create(gated("old", 40000), young, first)
	for range 3 {
		if e := <-r.events.Events; !strings.Contains(e, "WaitingForCards") || !strings.Contains(e, "asked 40000 MiB") {
			t.Fatalf("event %q", e)
		}
	}
	if h, ok := r.books.Held("uid-old"); ok {
		t.Fatalf("a pod without a place holds %+v", h)
	}
	r.report("n2", 30000) // room for one
	p := r.ungated("urgent")
	if got := pins(p); !slices.Equal(got, []string{"n2"}) {
		t.Fatalf("pinned to %v", got)
	}
	r.report("n3", 0) // room for two
	r.ungated("old")
	r.ungated("young")
}

// What kube-scheduler's plugins say of a node counts as what the ledger says.
func TestNodesThatDoNotSuitThePod(t *testing.T) {
	for name, c := range map[string]struct {
		node func(*corev1.Node)
		pod  func(*corev1.Pod)
	}{
		"cordoned": {node: func(n *corev1.Node) { n.Spec.Unschedulable = true }},
		"tainted":  {node: func(n *corev1.Node) { n.Spec.Taints = []corev1.Taint{{Key: "x", Effect: corev1.TaintEffectNoSchedule}} }},
		"evicting": {node: func(n *corev1.Node) { n.Spec.Taints = []corev1.Taint{{Key: "x", Effect: corev1.TaintEffectNoExecute}} }},
		"no label": {pod: func(p *corev1.Pod) { p.Spec.NodeSelector = map[string]string{"disk": "ssd"} }},
		"processors": {pod: func(p *corev1.Pod) {
			p.Spec.Containers[0].Resources.Requests = corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("9")}
		}},
	} {
		t.Run(name, func(t *testing.T) {
			// n1 suits any pod, but has no room at first: that another has wouldn't matter.
			changes := []func(*corev1.Node){}
			if c.node != nil {
				changes = append(changes, c.node)
			}
			r := newRig(t, slices.Concat(node("n1", func(n *corev1.Node) {
				n.Labels["disk"] = "ssd"
				n.Status.Allocatable[corev1.ResourceCPU] = resource.MustParse("16")
			}), node("n2", changes...))...)
			r.report("n1", 79000)
			r.report("n2", 0)
			r.start()
			p := gated("a", 8000)
			if c.pod != nil {
				c.pod(p)
			}
			r.create(p)
			<-r.events.Events
			r.report("n1", 0)
			if got := pins(r.ungated("a")); !slices.Equal(got, []string{"n1"}) {
				t.Errorf("pinned to %v", got)
			}
		})
	}
}

// A node that is opened to a pod by a label or a taint is news, though no card changed.
func TestANodeThatIsOpenedIsNews(t *testing.T) {
	r := newRig(t, slices.Concat(node("n1"), node("n2", func(n *corev1.Node) { n.Spec.Unschedulable = true }))...)
	r.report("n1", 79000)
	r.report("n2", 0)
	r.start()
	r.create(gated("a", 8000))
	<-r.events.Events
	n := node("n2")[0].(*corev1.Node)
	if _, err := r.kube.CoreV1().Nodes().Update(t.Context(), n, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	if got := pins(r.ungated("a")); !slices.Equal(got, []string{"n2"}) {
		t.Errorf("pinned to %v", got)
	}
}

// An autoscaler doesn't see gated pods.
func TestPodsThatAreLetGo(t *testing.T) {
	for name, c := range map[string]struct {
		mib    int
		change func(*corev1.Pod)
		after  time.Duration
	}{
		"no card is that large":         {mib: 90000},
		"no node suits":                 {mib: 8000, change: func(p *corev1.Pod) { p.Spec.NodeSelector = map[string]string{"no": "such"} }},
		"it has waited for long enough": {mib: 40000, after: time.Millisecond},
		"it asks for nothing of ours":   {change: func(p *corev1.Pod) { p.Spec.Containers[0].Resources = corev1.ResourceRequirements{} }},
		"its request can't be read": {mib: 1, change: func(p *corev1.Pod) {
			p.Spec.Containers[0].Resources.Limits[api.ResourceCores] = resource.MustParse("101")
		}},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, node("n1")...)
			r.release = c.after
			r.report("n1", 70000)
			r.start()
			p := gated("a", c.mib)
			if c.change != nil {
				c.change(p)
			}
			r.create(p)
			if p := r.ungated("a"); p.Annotations[api.AnnotationPlan] != "" || len(pins(p)) > 0 || p.Status.NominatedNodeName != "" {
				t.Errorf("%+v", p)
			}
			if r.placer.Waiting() != 0 {
				t.Error("it waits still")
			}
		})
	}
}

// Pods of gates of others aren't to start yet.
func TestOtherGatesComeFirst(t *testing.T) {
	r := newRig(t, node("n1")...)
	r.report("n1", 0)
	r.start()
	r.create(gated("kept", 80000, func(p *corev1.Pod) {
		p.Spec.SchedulingGates = append(p.Spec.SchedulingGates, corev1.PodSchedulingGate{Name: "kueue.x-k8s.io/admission"})
	}), gated("free", 80000))
	r.ungated("free") // all of the card, so nothing was kept for the other
}

// A planner that died between its patch and the bind left a plan: its room is booked again
// before anything is placed.
func TestPlansOutliveThePlanner(t *testing.T) {
	r := newRig(t, three()...)
	for _, n := range []string{"n1", "n2", "n3"} {
		r.report(n, 0)
	}
	r.start()
	r.create(gated("a", 60000))
	was := pins(r.ungated("a"))
	r.start()
	h, ok := r.books.Held("uid-a")
	if !ok || h.Node.Name != was[0] {
		t.Fatalf("planned to %v, after the restart it holds %+v", was, h)
	}
	// Nobody gets that room: two pods of the same size find the other two nodes.
	r.create(gated("b", 60000), gated("c", 60000), gated("d", 60000))
	r.until("two are planned, one waits", func() bool { return r.placer.Waiting() == 1 })
	at := map[string]bool{}
	for _, uid := range []string{"uid-a", "uid-b", "uid-c", "uid-d"} {
		if h, ok := r.books.Held(uid); ok {
			at[h.Node.Name] = true
		}
	}
	if len(at) != 3 {
		t.Errorf("held on %v", at)
	}
}

// One that died before the patch left nothing but a gated pod.
func TestAGatedPodOutlivesThePlanner(t *testing.T) {
	r := newRig(t, node("n1")...)
	r.report("n1", 0)
	down := func(clienttesting.PatchAction) error { return apierrors.NewInternalError(errors.New("down")) }
	r.hold.Store(&down)
	r.start()
	r.create(gated("a", 60000))
	r.until("it is booked", func() bool { _, ok := r.books.Held("uid-a"); return ok })
	r.stop()
	r.hold.Store(nil)
	r.start()
	r.ungated("a")
}

func TestWritesThatFail(t *testing.T) {
	for name, c := range map[string]struct {
		err    error
		pinned bool
	}{
		"it isn't known whether it was written": {apierrors.NewServerTimeout(schema.GroupResource{Resource: "pods"}, "patch", 1), true},
		"the affinity is refused":               {apierrors.NewInvalid(schema.GroupKind{Kind: "Pod"}, "a", nil), false},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, node("n1")...)
			r.report("n1", 0)
			var tries atomic.Int64
			once := func(clienttesting.PatchAction) error {
				if tries.Add(1) == 1 {
					return c.err
				}
				return nil
			}
			r.hold.Store(&once)
			r.start()
			r.create(gated("a", 60000))
			r.until("a try", func() bool { return tries.Load() > 0 })
			r.ahead.Add(int64(2 * time.Second))
			p := r.ungated("a")
			if got := len(pins(p)) > 0; got != c.pinned || (p.Status.NominatedNodeName != "") == c.pinned {
				t.Errorf("pinned %t, nominated %q", got, p.Status.NominatedNodeName)
			}
			if h, ok := r.books.Held("uid-a"); !ok || h.Node.Name != "n1" {
				t.Errorf("held %+v", h)
			}
		})
	}
}

// The patch names the pod's UID: another of the same name isn't changed by it.
func TestThePatchIsForOnePodOnly(t *testing.T) {
	r := newRig(t, node("n1")...)
	r.report("n1", 0)
	seen := make(chan map[string]any, 10)
	look := func(a clienttesting.PatchAction) error {
		var m map[string]any
		if err := json.Unmarshal(a.GetPatch(), &m); err != nil {
			return err
		}
		seen <- m
		return nil
	}
	r.hold.Store(&look)
	r.start()
	r.create(gated("a", 60000))
	if m := <-seen; m["metadata"].(map[string]any)["uid"] != "uid-a" {
		t.Errorf("%+v", m)
	}
	r.ungated("a")
	if n := len(seen); n != 0 {
		t.Errorf("%d more writes: one is enough", n)
	}
}

// A pinned pod whose nodes don't take it is made anew by its controller, and that one is free
// to go elsewhere. A scheduler that is away is no reason.
func TestAPinnedPodThatIsStuckIsMadeAnew(t *testing.T) {
	r := newRig(t, node("n1")...)
	r.report("n1", 0)
	r.start()
	r.create(gated("a", 8000))
	p := r.ungated("a")
	r.ahead.Add(int64(10 * time.Minute))
	time.Sleep(1500 * time.Millisecond) // a look or two
	if got := r.pod("a"); got.UID != p.UID {
		t.Fatal("deleted though no scheduler has looked at it")
	}
	p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable, LastTransitionTime: metav1.NewTime(time.Now().Add(-time.Hour))}}
	if _, err := r.kube.CoreV1().Pods("default").UpdateStatus(t.Context(), p, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	r.until("it is deleted", func() bool {
		_, err := r.kube.CoreV1().Pods("default").Get(t.Context(), "a", metav1.GetOptions{})
		return apierrors.IsNotFound(err)
	})
	r.create(gated("b", 8000)) // of the same controller
	if p := r.ungated("b"); len(pins(p)) > 0 || p.Status.NominatedNodeName != "n1" {
		t.Errorf("pinned to %v, nominated %q", pins(p), p.Status.NominatedNodeName)
	}
}
