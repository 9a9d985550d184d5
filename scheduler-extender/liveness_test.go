package extender_test

import (
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/scheduler-extender/fit"
)

// leaving is the agent's pod while it is being deleted; it still says ready.
func leaving(node string) *corev1.Pod {
	p := agentPod(node, true)
	now := metav1.Now()
	p.DeletionTimestamp, p.Finalizers = &now, []string{"test/keep"}
	return p
}

// A node takes pods only while its agent is there, ready and not on its way
// out, and a pod that was refused for it is woken when it is back.
func TestPodsWaitForTheAgent(t *testing.T) {
	gone := func(r *rig) {
		if err := r.kube.Tracker().Delete(corev1.SchemeGroupVersion.WithResource("pods"), api.Namespace, "carve-node-n1"); err != nil {
			r.t.Fatal(err)
		}
	}
	crashing := agentPod("n1", false)
	crashing.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "node", State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "CrashLoopBackOff"}}}}
	failed := agentPod("n1", true)
	failed.Status.Phase, failed.Status.Reason = corev1.PodFailed, "Evicted"
	for name, c := range map[string]struct {
		down func(r *rig)
		says string
	}{
		"no pod of it":                 {gone, "n1: carve's agent on the node is down (no pod of it is there); what runs there goes on, new pods wait until it is back; look at: kubectl -n carve-system describe daemonset carve-node"},
		"its pod isn't ready":          {func(r *rig) { r.agent(agentPod("n1", false)) }, "n1: carve's agent on the node is down (its pod is not ready); what runs there goes on, new pods wait until it is back; look at: kubectl -n carve-system describe pod carve-node-n1"},
		"its pod crashes":              {func(r *rig) { r.agent(crashing) }, "(its pod is not ready: CrashLoopBackOff)"},
		"its pod was evicted":          {func(r *rig) { r.agent(failed) }, "(its pod is not ready: Evicted)"},
		"its pod is on its way out":    {func(r *rig) { r.agent(leaving("n1")) }, "(its pod is being deleted)"},
		"its pod has moved to another": {func(r *rig) { gone(r); r.agent(agentPod("n2", true)) }, "no pod of it is there"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			r.managed("n1")
			c.down(r)
			r.blocked("n1", fit.ReasonAgentDown)
			waiting := r.create(newPod("waiting", "8000"))
			if f := r.filter(waiting, "n1"); f.NodeNames == nil || len(*f.NodeNames) != 0 || !strings.Contains(f.FailedNodes["n1"], c.says) {
				t.Fatalf("%+v", f)
			}
			if r.pod("waiting").Annotations[api.AnnotationWake] != "" {
				t.Fatal("woken while the agent is down")
			}
			back := time.Now()
			r.agent(agentPod("n1", true))
			r.until("the wake", func() bool { return r.pod("waiting").Annotations[api.AnnotationWake] != "" })
			// A stated aim is a second; the machine may be busy.
			if d := time.Since(back); d > 5*time.Second {
				t.Errorf("woken after %v", d)
			} else {
				t.Logf("woken after %v", d)
			}
			r.bound(waiting, "n1")
		})
	}
}

// bound takes a pod through filter and bind.
func (r *rig) bound(p *corev1.Pod, node string) {
	r.t.Helper()
	if f := r.filter(p, node); len(*f.NodeNames) != 1 {
		r.t.Fatalf("%+v", f)
	}
	if e := r.bindTo(p, node); e != "" {
		r.t.Fatal(e)
	}
}

// An offer that was made just before the agent went away isn't bound, and is
// given back; a repeated bind of a pod that is bound answers success still.
func TestAnOfferIsNotBoundWhenTheAgentIsGone(t *testing.T) {
	r := newRig(t)
	r.managed("n1")
	before := r.run(newPod("before", "8000"), "n1")
	p := r.create(newPod("a", "60000"))
	if f := r.filter(p, "n1"); len(*f.NodeNames) != 1 {
		t.Fatalf("%+v", f)
	}
	r.agent(leaving("n1"))
	r.blocked("n1", fit.ReasonAgentDown)
	if e := r.bindTo(p, "n1"); !strings.Contains(e, "bind pod default/a to n1: the node takes no pods now: n1: carve's agent on the node is down (its pod is being deleted)") {
		t.Fatalf("error %q", e)
	}
	if r.pod("a").Spec.NodeName != "" || r.used("n1") != 8000 {
		t.Fatalf("bound to %q, %d MiB in use", r.pod("a").Spec.NodeName, r.used("n1"))
	}
	if e := r.bindTo(before, "n1"); e != "" {
		t.Fatal(e)
	}
	// kube-scheduler comes again, waits, and is served when the agent is back.
	if f := r.filter(p, "n1"); len(*f.NodeNames) != 0 {
		t.Fatalf("%+v", f)
	}
	r.agent(agentPod("n1", true))
	r.until("the wake", func() bool { return r.pod("a").Annotations[api.AnnotationWake] != "" })
	r.bound(p, "n1")
}

// However often the agent comes and goes, each of its returns wakes the pod:
// the pauses of waking in vain are for pods that something else holds back.
func TestAFlappingAgentLosesNoWake(t *testing.T) {
	r := newRig(t)
	r.managed("n1")
	p := r.create(newPod("a", "8000"))
	last := ""
	for i := range 8 {
		r.agent(agentPod("n1", false))
		r.blocked("n1", fit.ReasonAgentDown)
		if f := r.filter(p, "n1"); len(*f.NodeNames) != 0 {
			t.Fatalf("%+v", f)
		}
		r.agent(agentPod("n1", true))
		start := time.Now()
		r.until("a wake", func() bool { return r.pod("a").Annotations[api.AnnotationWake] != last })
		if d := time.Since(start); d > 5*time.Second {
			t.Errorf("round %d: woken after %v", i, d)
		}
		last = r.pod("a").Annotations[api.AnnotationWake]
	}
}

// While a DaemonSet rolls, or a pod lingers, there can be two agents on a node:
// the one that is ready speaks for it.
func TestTheReadyOneOfTwoAgentsSpeaksForTheNode(t *testing.T) {
	r := newRig(t)
	r.managed("n1")
	second := agentPod("n1", false)
	second.Name, second.UID = "carve-node-a", types.UID("uid-second")
	r.agent(second)
	r.agent(leaving("n1"))
	r.blocked("n1", fit.ReasonAgentDown)
	second = agentPod("n1", true)
	second.Name, second.UID = "carve-node-a", types.UID("uid-second")
	r.agent(second)
	r.blocked("n1", "")
	// The old one going changes nothing.
	if err := r.kube.Tracker().Delete(corev1.SchemeGroupVersion.WithResource("pods"), api.Namespace, "carve-node-n1"); err != nil {
		t.Fatal(err)
	}
	r.run(newPod("a", "8000"), "n1")
}

// A report that says that the hook is down is believed as long as an agent is
// there to write it, and says more than that its pod isn't ready.
func TestTheReasonIsTheOneThatHelps(t *testing.T) {
	r := newRig(t)
	r.managed("n1")
	hookless := gpuNode("n1")
	hookless.Status.HookConnectedSince = nil
	r.reports.Modify(hookless)
	r.blocked("n1", fit.ReasonHookDown)
	r.agent(agentPod("n1", false))
	r.agent(leaving("n1"))
	r.blocked("n1", fit.ReasonAgentDown)
}

// share-22: whatever the clocks of nodes, agents and API server say, liveness
// is what the API shows now. A restarted extender sees the same.
func TestClocksDoNotMatterForLiveness(t *testing.T) {
	r := newRig(t)
	r.managed("n1")
	for _, skew := range []time.Duration{-24 * time.Hour, -2 * time.Minute, 2 * time.Minute, 24 * time.Hour} {
		at := metav1.NewTime(time.Now().Add(skew))
		g := gpuNode("n1")
		g.Status.HookConnectedSince = &at
		r.reports.Modify(g)
		p := agentPod("n1", true)
		p.Status.Conditions[0].LastTransitionTime, p.Status.Conditions[0].LastProbeTime = at, at
		p.CreationTimestamp = at
		r.agent(p)
		r.start()
		r.blocked("n1", "")
		name := "p" + skew.String()
		r.run(newPod(name, "1000"), "n1")
	}
	// A roll of the agent takes nothing away from what runs.
	r.agent(leaving("n1"))
	r.blocked("n1", fit.ReasonAgentDown)
	if r.used("n1") != 4000 || len(r.ledger.Node("n1").Snapshot().View.Cards) != 1 {
		t.Fatalf("%+v", r.ledger.Node("n1").Snapshot().View)
	}
}

// Pods of others don't pass for agents, wherever they run and whatever they
// are called.
func TestOtherPodsAreNoAgents(t *testing.T) {
	r := newRig(t)
	r.reports.Add(gpuNode("n1"))
	elsewhere, unlabelled := agentPod("n1", true), agentPod("n1", true)
	elsewhere.Namespace = "default"
	unlabelled.Labels = nil
	r.agent(elsewhere)
	r.agent(unlabelled)
	r.node("n1", true)
	r.until("the report", func() bool { return len(r.ledger.Node("n1").Snapshot().View.Cards) == 1 })
	if f := r.filter(r.create(newPod("a", "8000")), "n1"); !strings.Contains(f.FailedNodes["n1"], "no pod of it is there") {
		t.Fatalf("%+v", f)
	}
}

// While the node carries the taint kube-scheduler would turn the pod away, so
// the wake is kept until the taint is off.
func TestAPodIsWokenAfterTheTaintIsOff(t *testing.T) {
	r := newRig(t)
	r.managed("n1")
	r.agent(agentPod("n1", false))
	r.blocked("n1", fit.ReasonAgentDown)
	r.filter(r.create(newPod("a", "8000")), "n1")
	taint := func(taints ...corev1.Taint) {
		n, err := r.kube.CoreV1().Nodes().Get(t.Context(), "n1", metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		n.Spec.Taints = taints
		if err := r.kube.Tracker().Update(corev1.SchemeGroupVersion.WithResource("nodes"), n, ""); err != nil {
			t.Fatal(err)
		}
		r.until("the taint's change", func() bool { return r.source.Tainted("n1") == (len(taints) > 0) })
	}
	taint(corev1.Taint{Key: api.TaintHookDown, Effect: corev1.TaintEffectNoSchedule})
	r.agent(agentPod("n1", true))
	r.blocked("n1", "")
	// The waker takes a node off the ledger's list in its first round, so from
	// here on it has looked at it.
	r.until("the waker's look", func() bool { return len(r.ledger.Freed()) == 0 })
	time.Sleep(300 * time.Millisecond) // three rounds in which nothing may happen
	if r.pod("a").Annotations[api.AnnotationWake] != "" {
		t.Fatal("woken while the node is tainted")
	}
	taint()
	r.until("the wake", func() bool { return r.pod("a").Annotations[api.AnnotationWake] != "" })
}

// What an operator sees: the reason in the refusals, and the nodes by reason.
func TestMetricsTellOfAgentsThatAreDown(t *testing.T) {
	r := newRig(t)
	r.managed("n1")
	r.managed("n2")
	r.agent(agentPod("n1", false))
	r.blocked("n1", fit.ReasonAgentDown)
	r.filter(r.create(newPod("a", "8000")), "n1")
	resp, err := http.Get(r.plain + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{`carve_extender_refusals_total{reason="agent-down"} 1`, `carve_ledger_blocked_nodes{reason="agent-down"} 1`, `carve_ledger_blocked_nodes{reason="hook-down"} 0`} {
		if !strings.Contains(string(b), want) {
			t.Errorf("no %s", want)
		}
	}
}
