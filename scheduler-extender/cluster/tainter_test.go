package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/cache"
	cachetesting "k8s.io/client-go/tools/cache/testing"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/v1alpha1"
	"github.com/carve-gpu/carve/scheduler-extender/ledger"
)

// taintRig is a source and a tainter over client-go's fake API server. The
// tainter's rounds are run by the test, on a clock of its own.
type taintRig struct {
	t       *testing.T
	kube    *fake.Clientset
	source  *Source
	ledger  *ledger.Ledger
	reports *cachetesting.FakeControllerSource
	tainter *Tainter
	now     time.Time
}

func managedNode(name string, taints ...corev1.Taint) *corev1.Node {
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID("uid-" + name), ResourceVersion: "1", Labels: map[string]string{api.LabelManaged: "true"}},
		Spec: corev1.NodeSpec{Taints: taints}}
}

var (
	ourTaint = corev1.Taint{Key: api.TaintHookDown, Effect: corev1.TaintEffectNoSchedule}
	tenant   = corev1.Taint{Key: "example.com/tenant", Value: "a", Effect: corev1.TaintEffectNoSchedule}
	hard     = corev1.Taint{Key: api.TaintHookDown, Value: "x", Effect: corev1.TaintEffectNoExecute} // somebody else's
)

func newTaintRig(t *testing.T, objects ...runtime.Object) *taintRig {
	t.Helper()
	r := &taintRig{t: t, kube: fake.NewClientset(objects...), reports: cachetesting.NewFakeControllerSource(),
		ledger: ledger.New(ledger.Config{}), now: time.Unix(1_700_000_000, 0)}
	t.Cleanup(r.reports.Shutdown)
	since := metav1.NewTime(r.now)
	for _, o := range objects {
		if n, ok := o.(*corev1.Node); ok {
			r.reports.Add(&v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: n.Name}, Status: v1alpha1.GPUNodeStatus{HookConnectedSince: &since}})
		}
	}
	s, err := NewSource(Config{Kube: r.kube, Reports: cache.NewSharedIndexInformer(r.reports, &v1alpha1.GPUNode{}, 0, cache.Indexers{}),
		Ledger: r.ledger, Forget: func(string) {}, Log: slog.New(slog.DiscardHandler), Now: time.Now})
	if err != nil {
		t.Fatal(err)
	}
	r.source = s
	r.restart()
	ctx, cancel := context.WithCancel(t.Context())
	var run sync.WaitGroup
	run.Go(func() {
		if err := s.Run(ctx); err != nil && ctx.Err() == nil {
			t.Error(err)
		}
	})
	t.Cleanup(func() { cancel(); run.Wait() })
	r.until("the source is ready", s.Ready)
	return r
}

// restart is what a new process begins with.
func (r *taintRig) restart() {
	r.tainter = &Tainter{Kube: r.kube, Ledger: r.ledger, Nodes: r.source, Ready: r.source.Ready, Log: slog.New(slog.DiscardHandler), Now: func() time.Time { return r.now }}
}

func (r *taintRig) until(what string, ok func() bool) {
	r.t.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			r.t.Fatalf("never seen: %s", what)
		}
	}
}

// agent changes the agent's pod of a node and waits until the ledger knows.
func (r *taintRig) agent(node string, ready bool) {
	r.t.Helper()
	if err := r.kube.Tracker().Update(corev1.SchemeGroupVersion.WithResource("pods"), agentPod(node, ready), api.Namespace); err != nil {
		r.t.Fatal(err)
	}
	r.until("the agent's change", func() bool { return (r.ledger.Node(node).Snapshot().View.Blocked == "") == ready })
}

// pass lets so much time go by, with a round each half second and one at the end.
func (r *taintRig) pass(d time.Duration) {
	r.t.Helper()
	end := r.now.Add(d)
	for {
		r.tainter.round(r.t.Context())
		if !r.now.Before(end) {
			return
		}
		if r.now = r.now.Add(taintEvery); r.now.After(end) {
			r.now = end
		}
	}
}

func (r *taintRig) want(node string, taints ...corev1.Taint) {
	r.t.Helper()
	n, err := r.kube.CoreV1().Nodes().Get(r.t.Context(), node, metav1.GetOptions{})
	if err != nil {
		r.t.Fatal(err)
	}
	if !slices.Equal(n.Spec.Taints, taints) {
		r.t.Fatalf("%s has the taints %v, want %v", node, n.Spec.Taints, taints)
	}
	// Until the watch shows it, a round looks at the node once more.
	r.until("the taint in the cache", func() bool { return r.source.Tainted(node) == slices.ContainsFunc(taints, isOurs) })
}

func (r *taintRig) wantWrites(want int) {
	r.t.Helper()
	got := 0
	for _, a := range r.kube.Actions() {
		if v := a.GetVerb(); v != "get" && v != "list" && v != "watch" {
			got++
			if v != "patch" || a.GetResource().Resource != "nodes" || a.GetSubresource() != "" {
				r.t.Errorf("write: %s %s/%s", v, a.GetResource().Resource, a.GetSubresource())
			}
		}
	}
	if got != want {
		r.t.Fatalf("%d writes, want %d", got, want)
	}
}

func TestTheTaintComesAndGoes(t *testing.T) {
	r := newTaintRig(t, managedNode("n1", tenant, hard), managedNode("n2"), agentPod("n1", true), agentPod("n2", true))
	r.pass(time.Minute)
	r.wantWrites(0)
	r.agent("n1", false)
	r.pass(taintAfter - time.Millisecond)
	r.want("n1", tenant, hard)
	r.pass(time.Millisecond)
	r.want("n1", tenant, hard, ourTaint)
	r.want("n2")
	r.pass(time.Hour)
	r.wantWrites(1)
	r.agent("n1", true)
	r.pass(0)
	r.want("n1", tenant, hard)
	r.pass(time.Hour)
	r.wantWrites(2)
}

// A hook that lost the runtime counts as much as an agent that is gone.
func TestTheTaintIsForTheHookToo(t *testing.T) {
	r := newTaintRig(t, managedNode("n1"), agentPod("n1", true))
	r.reports.Modify(&v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: "n1"}})
	r.until("the hook is down", func() bool { return r.tainter.away("n1") })
	r.pass(taintAfter)
	r.want("n1", ourTaint)
}

func TestAFlappingAgentIsNotTainted(t *testing.T) {
	r := newTaintRig(t, managedNode("n1"), agentPod("n1", true))
	for range 10 {
		r.agent("n1", false)
		r.pass(taintAfter - time.Second)
		r.agent("n1", true)
		r.pass(time.Second)
	}
	r.wantWrites(0)
}

// After a start nothing is known of how long a node has been down: none is
// tainted before ten seconds have passed, and what is tainted stays so without
// a write. A node that serves loses the taint at once.
func TestARestartTaintsNobodyAtOnce(t *testing.T) {
	r := newTaintRig(t, managedNode("down"), managedNode("was-down", ourTaint), managedNode("back", ourTaint),
		agentPod("down", false), agentPod("was-down", false), agentPod("back", true))
	r.pass(taintAfter - time.Second)
	r.want("down")
	r.want("was-down", ourTaint)
	r.want("back")
	r.wantWrites(1)
	r.restart()
	r.pass(taintAfter - time.Second)
	r.want("down")
	r.wantWrites(1)
	r.pass(time.Second)
	r.want("down", ourTaint)
	r.wantWrites(2)
}

func TestANodeThatIsNotManagedLosesTheTaint(t *testing.T) {
	free := managedNode("free", tenant, ourTaint)
	free.Labels = nil
	r := newTaintRig(t, free, managedNode("n1", ourTaint), agentPod("n1", false))
	r.pass(0)
	r.want("free", tenant)
	r.want("n1", ourTaint)
	n, _ := r.kube.CoreV1().Nodes().Get(t.Context(), "n1", metav1.GetOptions{})
	n.Labels = nil
	if err := r.kube.Tracker().Update(corev1.SchemeGroupVersion.WithResource("nodes"), n, ""); err != nil {
		t.Fatal(err)
	}
	r.until("the label is gone", func() bool { return !r.ledger.Node("n1").Snapshot().Managed })
	r.pass(0)
	r.want("n1")
}

// Others write taints between our look and our write: theirs stay, and ours
// gets there.
func TestTaintsOfOthersSurviveARace(t *testing.T) {
	r := newTaintRig(t, managedNode("n1", tenant), agentPod("n1", false))
	gvr := corev1.SchemeGroupVersion.WithResource("nodes")
	rivals := 3
	r.kube.PrependReactor("patch", "nodes", func(a clienttesting.Action) (bool, runtime.Object, error) {
		var p struct {
			Metadata struct{ ResourceVersion, UID string }
		}
		if err := json.Unmarshal(a.(clienttesting.PatchAction).GetPatch(), &p); err != nil || p.Metadata.ResourceVersion == "" || p.Metadata.UID != "uid-n1" {
			return true, nil, fmt.Errorf("a patch without preconditions: %s", a.(clienttesting.PatchAction).GetPatch())
		}
		o, err := r.kube.Tracker().Get(gvr, "", "n1")
		if err != nil {
			return true, nil, err
		}
		n := o.(*corev1.Node).DeepCopy()
		if rivals > 0 {
			n.Spec.Taints = append(n.Spec.Taints, corev1.Taint{Key: fmt.Sprint("rival-", rivals), Effect: corev1.TaintEffectNoExecute})
			n.ResourceVersion += "1"
			rivals--
			if err := r.kube.Tracker().Update(gvr, n, ""); err != nil {
				return true, nil, err
			}
		}
		if p.Metadata.ResourceVersion != n.ResourceVersion {
			return true, nil, apierrors.NewConflict(gvr.GroupResource(), "n1", errors.New("the object has been modified"))
		}
		return false, nil, nil
	})
	r.pass(taintAfter)
	n, err := r.kube.CoreV1().Nodes().Get(t.Context(), "n1", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	var keys []string
	for _, taint := range n.Spec.Taints {
		keys = append(keys, taint.Key)
	}
	if want := []string{"example.com/tenant", "rival-3", "rival-2", "rival-1", api.TaintHookDown}; !slices.Equal(keys, want) {
		t.Fatalf("taints %v, want %v", keys, want)
	}
}

// A write that fails is tried again, less and less often, and holds nobody else
// up.
func TestAFailingWriteIsTriedAgain(t *testing.T) {
	r := newTaintRig(t, managedNode("n1"), managedNode("n2"), agentPod("n1", false), agentPod("n2", false))
	fail := true
	tries := 0
	r.kube.PrependReactor("patch", "nodes", func(a clienttesting.Action) (bool, runtime.Object, error) {
		if !fail || a.(clienttesting.PatchAction).GetName() != "n1" {
			return false, nil, nil
		}
		tries++
		return true, nil, apierrors.NewForbidden(corev1.Resource("nodes"), "n1", errors.New("no"))
	})
	r.pass(taintAfter + time.Minute)
	r.want("n2", ourTaint)
	if tries < 4 || tries > 10 {
		t.Fatalf("tried %d times in a minute", tries)
	}
	fail = false
	r.pass(maxTaintPause + time.Second)
	r.want("n1", ourTaint)
}
