package main

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/gpunodes"
	"github.com/carve-gpu/carve/api/v1alpha1"
	"github.com/carve-gpu/carve/scheduler-extender/explain"
)

var explainNow = time.Unix(1_790_000_600, 0)

// world is a cluster that each situation changes: two managed nodes with two
// cards each and a ready agent, and the holders of gpuNodes.
type world struct {
	pod     *corev1.Pod
	nodes   []*corev1.Node
	reports []*v1alpha1.GPUNode
	pods    []*corev1.Pod
	events  []*corev1.Event
	quotas  []*corev1.ResourceQuota
	// forbidden are resources that may not be listed cluster-wide.
	forbidden map[string]bool
}

func askingPod(limits map[string]string) *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "team-c", Name: "mine", UID: "uid-mine"},
		Spec:   corev1.PodSpec{SchedulerName: "default-scheduler", Containers: []corev1.Container{{Name: "app"}}},
		Status: corev1.PodStatus{Phase: corev1.PodPending}}
	for k, v := range limits {
		metaLimits(&p.Spec.Containers[0])[corev1.ResourceName("nvidia.com/"+k)] = resource.MustParse(v)
	}
	return p
}

func metaLimits(c *corev1.Container) corev1.ResourceList {
	if c.Resources.Limits == nil {
		c.Resources.Limits = corev1.ResourceList{}
	}
	return c.Resources.Limits
}

func (w *world) says(message string) {
	w.pod.Status.Conditions = append(w.pod.Status.Conditions, corev1.PodCondition{Type: corev1.PodScheduled, Status: corev1.ConditionFalse,
		Reason: "Unschedulable", Message: message, LastTransitionTime: metav1.NewTime(explainNow.Add(-2 * time.Minute))})
}

// granted puts the pod on a node with a grant, and with slices if state is set.
func (w *world) granted(t *testing.T, node string, change func(*api.Grant), state string) {
	t.Helper()
	g := api.Grant{Version: 1, UID: "uid-mine", Node: node, Generation: 1, Containers: map[string][]api.CardGrant{"app": {{Card: "GPU-a", MemMiB: 8000, Cores: 30, Mode: api.ModeVGPU}}}}
	if change != nil {
		change(&g)
	}
	v, err := g.Encode()
	if err != nil {
		t.Fatal(err)
	}
	w.pod.Annotations = map[string]string{api.AnnotationGrant: v}
	w.pod.Spec.NodeName = node
	if state != "" {
		c := w.card(node, "GPU-a")
		c.Slices = append(c.Slices, v1alpha1.Slice{PodUID: "uid-mine", Namespace: "team-c", Pod: "mine", Container: "app", MemMiB: 8000, Cores: 30, Mode: "vgpu", Generation: 1, State: state})
	}
}

func extenderPod(ready corev1.ConditionStatus) *corev1.Pod {
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: api.Namespace, Name: "carve-extender-1", Labels: map[string]string{api.LabelName: api.ExtenderName}},
		Status: corev1.PodStatus{Phase: corev1.PodRunning, Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: ready}}}}
}

// withoutExtender takes the extender's pod out.
func (w *world) withoutExtender() {
	w.pods = slices.DeleteFunc(w.pods, func(p *corev1.Pod) bool { return p.Labels[api.LabelName] == api.ExtenderName })
}

func (w *world) card(node, uuid string) *v1alpha1.Card {
	for _, n := range w.reports {
		for i := range n.Status.Cards {
			if n.Name == node && n.Status.Cards[i].UUID == uuid {
				return &n.Status.Cards[i]
			}
		}
	}
	panic("no card " + uuid + " on " + node)
}

func newWorld(t *testing.T, limits map[string]string) *world {
	t.Helper()
	w := &world{pod: askingPod(limits), forbidden: map[string]bool{}}
	for _, n := range gpuNodes() {
		n.Spec = v1alpha1.GPUNodeSpec{}
		since := metav1.NewTime(explainNow.Add(-time.Hour))
		n.Status.HookConnectedSince = &since
		for i := range n.Status.Cards {
			n.Status.Cards[i].Health = v1alpha1.Health{State: v1alpha1.Healthy}
			n.Status.Cards[i].Layers = []string{v1alpha1.LayerLibrary}
			if n.Name == "n2" {
				n.Status.Cards[i].Layers = []string{v1alpha1.EnforcementDmem, v1alpha1.LayerLibrary}
			}
			for j := range n.Status.Cards[i].Slices {
				s := &n.Status.Cards[i].Slices[j]
				s.PodUID, s.Generation = "uid-"+s.Pod, 1
			}
		}
		w.reports = append(w.reports, &n)
		w.nodes = append(w.nodes, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: n.Name, Labels: map[string]string{api.LabelManaged: "true"}}})
		agent := agentPod(n.Name)
		agent.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
		w.pods = append(w.pods, agent)
	}
	w.pods = append(w.pods, extenderPod(corev1.ConditionTrue))
	for name, c := range map[string]struct {
		namespace string
		grant     api.CardGrant
	}{
		"infer-a": {"default", api.CardGrant{Card: "GPU-a", MemMiB: 8000, Cores: 30, Mode: api.ModeVGPU}},
		"infer-b": {"team-b", api.CardGrant{Card: "GPU-a", MemMiB: 16000, Mode: api.ModeVGPU}},
		"train":   {"default", api.CardGrant{Card: "GPU-b", Mode: api.ModeExclusive}},
	} {
		p := askingPod(map[string]string{"gpu": "1"})
		p.Name, p.Namespace, p.UID, p.Spec.NodeName = name, c.namespace, types.UID("uid-"+name), "n1"
		v, err := api.Grant{Version: 1, UID: string(p.UID), Node: "n1", Generation: 1, Containers: map[string][]api.CardGrant{"app": {c.grant}}}.Encode()
		if err != nil {
			t.Fatal(err)
		}
		p.Annotations = map[string]string{api.AnnotationGrant: v}
		w.pods = append(w.pods, p)
	}
	return w
}

// clients answer with what the world has.
func (w *world) clients(t *testing.T) (*fake.Clientset, *gpunodes.Client) {
	t.Helper()
	objects := []runtime.Object{w.pod}
	for _, p := range w.pods {
		objects = append(objects, p)
	}
	for _, n := range w.nodes {
		objects = append(objects, n)
	}
	for _, e := range w.events {
		objects = append(objects, e)
	}
	for _, q := range w.quotas {
		objects = append(objects, q)
	}
	kube := fake.NewClientset(objects...)
	kube.PrependReactor("list", "*", func(a clienttesting.Action) (bool, runtime.Object, error) {
		if (a.GetNamespace() == "" || a.GetResource().Resource == "resourcequotas") && w.forbidden[a.GetResource().Resource] {
			return true, nil, apierrors.NewForbidden(schema.GroupResource{Resource: a.GetResource().Resource}, "", fmt.Errorf("not you"))
		}
		return false, nil, nil
	})
	server, nodes := cordonRig(t)
	clear(server.nodes)
	for _, n := range w.reports {
		server.nodes[n.Name] = n
	}
	if w.forbidden["gpunodes"] {
		server.forbidden = "not you"
	}
	return kube, nodes
}

// explained runs the command's parts against a fake API server.
func (w *world) explained(t *testing.T, name string) (string, *explain.Report) {
	t.Helper()
	kube, nodes := w.clients(t)
	in, err := gather(t.Context(), kube, nodes, "team-c", name, explainNow)
	if err != nil {
		return "error: " + err.Error() + "\n", nil
	}
	r := explain.Explain(in)
	var out bytes.Buffer
	if err := printExplained(&out, r, explainNow, false); err != nil {
		t.Fatal(err)
	}
	return out.String(), &r
}

func TestExplainTexts(t *testing.T) {
	share := map[string]string{"gpu": "1", "gpumem": "60000", "gpucores": "30"}
	full := func(w *world) { // n2 is full as well
		for _, u := range []string{"GPU-a", "GPU-b"} {
			w.card("n2", u).Slices = []v1alpha1.Slice{{PodUID: "uid-x" + u, Namespace: "team-x", Pod: "big", Container: "app", MemMiB: 40000, Mode: "vgpu", Generation: 1, State: "active"}}
		}
	}
	// A pod of the same namespace has grown to all that the quota allows.
	grown := func(w *world) {
		w.quotas = []*corev1.ResourceQuota{{ObjectMeta: metav1.ObjectMeta{Namespace: "team-c", Name: "gpus"},
			Spec: corev1.ResourceQuotaSpec{Hard: corev1.ResourceList{"requests.nvidia.com/gpumem": resource.MustParse("61k")}}}}
		p := askingPod(map[string]string{"gpu": "1", "gpumem": "1000"})
		p.Name, p.UID, p.Spec.NodeName = "grows", "uid-grows", "n2"
		v, err := api.Grant{Version: 1, UID: "uid-grows", Node: "n2", Generation: 2, Containers: map[string][]api.CardGrant{"app": {{Card: "GPU-a", MemMiB: 20000, Mode: api.ModeVGPU}}}}.Encode()
		if err != nil {
			t.Fatal(err)
		}
		p.Annotations = map[string]string{api.AnnotationGrant: v}
		w.pods = append(w.pods, p)
	}
	situations := []struct {
		name    string
		limits  map[string]string
		verdict explain.Verdict
		change  func(*world)
	}{
		{"it asks for nothing", nil, explain.NoRequest, nil},
		{"a percentage that can't be", map[string]string{"gpu": "1", "gpucores": "130"}, explain.Invalid, nil},
		{"more memory than any card has", map[string]string{"gpumem": "90000"}, explain.Never, nil},
		{"more memory than any card has, and one node is away", map[string]string{"gpumem": "90000"}, explain.Never, func(w *world) { w.reports[0].Status.HookConnectedSince = nil }},
		{"the extender is gone, and a card is free", share, explain.ExtenderDown, func(w *world) {
			w.withoutExtender()
			w.says("0/2 nodes are available: Post \"https://10.96.8.1:443/filter\": dial tcp 10.96.8.1:443: connect: connection refused.")
		}},
		{"the extender crashes, and no card is free", share, explain.ExtenderDown, func(w *world) {
			full(w)
			w.withoutExtender()
			p := extenderPod(corev1.ConditionFalse)
			p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "extender", State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "CrashLoopBackOff"}}}}
			w.pods = append(w.pods, p)
		}},
		{"the extender is gone, and no card can hold it", map[string]string{"gpumem": "90000"}, explain.Never, (*world).withoutExtender},
		{"the extender is gone, for a reader who sees no pods of others", share, explain.NotLookedAt, func(w *world) {
			w.withoutExtender()
			w.forbidden = map[string]bool{"pods": true}
		}},
		{"the extender is gone, and it runs", share, explain.Running, func(w *world) {
			w.withoutExtender()
			w.granted(t, "n1", nil, v1alpha1.Active)
		}},
		{"an instance beside a share", share, explain.Invalid, func(w *world) {
			w.pod.Spec.Containers = append(w.pod.Spec.Containers, corev1.Container{Name: "cut", Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{"nvidia.com/mig-1g.10gb": resource.MustParse("1")}}}, corev1.Container{Name: "none"})
		}},
		{"a misspelt resource beside a share", map[string]string{"gpumem": "60000", "gpucore": "30"}, explain.NotLookedAt, nil},
		{"a mode that isn't served", share, explain.Invalid, func(w *world) { w.pod.Annotations = map[string]string{api.AnnotationIsolation: "mig"} }},
		{"a mode that the nodes don't serve", share, explain.Isolation, func(w *world) { w.pod.Annotations = map[string]string{api.AnnotationIsolation: "mps"} }},
		{"a privileged pod where all cards are in replicas under MPS", map[string]string{"gpu": "1"}, explain.Isolation, func(w *world) {
			yes := true
			w.pod.Spec.Containers[0].SecurityContext = &corev1.SecurityContext{Privileged: &yes}
			for _, n := range w.reports {
				for i := range n.Status.Cards {
					n.Status.Cards[i].Modes, n.Status.Cards[i].Sharing = []string{"timeslice", "mps"}, &v1alpha1.Sharing{Mode: "mps", Replicas: 4}
				}
			}
		}},
		{"cards in other modes", share, explain.NoRoom, func(w *world) {
			w.pod.Annotations = map[string]string{api.AnnotationIsolation: "timeslice"}
			for i := range w.reports {
				for j := range w.reports[i].Status.Cards {
					w.reports[i].Status.Cards[j].Modes = []string{"timeslice"}
				}
			}
			w.card("n2", "GPU-a").Sharing = &v1alpha1.Sharing{Mode: "mps", Replicas: 4}
			w.card("n2", "GPU-b").Health = v1alpha1.Health{State: v1alpha1.Lost}
		}},
		{"no managed node", share, explain.NoManagedNode, func(w *world) {
			for _, n := range w.nodes {
				n.Labels = nil
			}
		}},
		{"whole cards and no managed node", map[string]string{"gpu": "2"}, explain.NoManagedNode, func(w *world) {
			for _, n := range w.nodes {
				n.Labels = nil
			}
			w.says("0/2 nodes are available: 2 Insufficient nvidia.com/gpu.")
		}},
		{"all cards are full", share, explain.NoRoom, func(w *world) {
			full(w)
			w.says("0/2 nodes are available: n2: card 0 (GPU-a, A100-SXM4-80GB): asked 60000 MiB, free 41050 of 81050 MiB; held by team-x/big (40000 MiB).")
		}},
		{"cards that were taken out, and one that is ill", share, explain.NoRoom, func(w *world) {
			w.reports[0].Spec.CordonedCards = []string{"GPU-a"}
			w.reports[0].Spec.CordonReasons = map[string]v1alpha1.CordonReason{"GPU-a": "ECC errors"}
			w.card("n2", "GPU-b").Health = v1alpha1.Health{State: v1alpha1.Lost, Reason: "it fell off the bus"}
		}},
		{"the hook is down on one node and the agent on the other", share, explain.HookDown, func(w *world) {
			w.reports[0].Status.HookConnectedSince = nil
			for _, p := range w.pods {
				if p.Spec.NodeName == "n1" && p.Namespace == api.Namespace {
					p.Status.Conditions[0].Status = corev1.ConditionFalse
				}
			}
		}},
		{"no agent was ever there", share, explain.AgentDown, func(w *world) {
			w.pods, w.reports = []*corev1.Pod{extenderPod(corev1.ConditionTrue)}, nil
		}},
		{"the agent is down where there is room", share, explain.AgentDown, func(w *world) {
			w.pods = slices.DeleteFunc(w.pods, func(p *corev1.Pod) bool { return p.Labels[api.LabelName] == api.AgentName })
		}},
		{"the cards with room are cordoned", map[string]string{"gpumem": "50000"}, explain.Cordoned, func(w *world) {
			for _, n := range w.reports {
				n.Spec.CordonedCards = []string{"GPU-a", "GPU-b"}
				n.Spec.CordonReasons = map[string]v1alpha1.CordonReason{"GPU-a": "ECC errors"}
			}
		}},
		{"an agent is away, for a reader who sees no pods of others", share, explain.AgentDown, func(w *world) {
			full(w)
			w.card("n2", "GPU-b").Slices = nil
			w.nodes[0].Spec.Taints = []corev1.Taint{{Key: api.TaintHookDown, Effect: corev1.TaintEffectNoSchedule}}
			w.forbidden = map[string]bool{"pods": true}
		}},
		{"its namespace's shares have grown up to the quota", share, explain.Quota, grown},
		{"the same, for a reader who sees no quotas", share, explain.WaitsForOther, func(w *world) {
			grown(w)
			w.forbidden = map[string]bool{"resourcequotas": true}
			w.says("0/2 nodes are available: ResourceQuota team-c/gpus allows requests.nvidia.com/gpumem of 61000; the namespace's shares hold 20000 and the pod takes 60000 more; grown since they were made: grows (asked 1000, holds 20000).")
		}},
		{"pods are on the cards by another plugin's grace", map[string]string{"gpumem": "50000"}, explain.ForeignPods, func(w *world) {
			for _, n := range []string{"n1", "n2"} {
				p := askingPod(map[string]string{"gpu": "1"})
				p.Name, p.UID, p.Spec.NodeName = "old-"+n, types.UID("uid-old-"+n), n
				p.Status = corev1.PodStatus{Phase: corev1.PodRunning, ContainerStatuses: []corev1.ContainerStatus{{Name: "app", State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}}}}
				w.pods = append(w.pods, p)
			}
		}},
		{"an amount of zero", map[string]string{"gpumem": "0"}, explain.NoRequest, nil},
		{"an init container that has ended", share, explain.Running, func(w *world) {
			w.pod.Spec.InitContainers = []corev1.Container{*w.pod.Spec.Containers[0].DeepCopy()}
			w.pod.Spec.InitContainers[0].Name = "load"
			w.pod.Status.InitContainerStatuses = []corev1.ContainerStatus{{Name: "load", State: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{Reason: "Completed"}}}}
			w.granted(t, "n1", func(g *api.Grant) { g.Containers["load"] = g.Containers["app"] }, v1alpha1.Active)
			w.pod.Status.Phase = corev1.PodRunning
		}},
		{"it waits for nothing of ours", share, explain.WaitsForOther, func(w *world) { w.says("0/2 nodes are available: 2 Insufficient cpu.") }},
		{"Kubernetes keeps it off the nodes with room", share, explain.WaitsForOther, func(w *world) {
			w.pod.Spec.NodeSelector = map[string]string{"zone": "a"}
			w.nodes[0].Spec.Taints = []corev1.Taint{{Key: corev1.TaintNodeUnschedulable, Effect: corev1.TaintEffectNoSchedule}}
		}},
		{"its scheduler has not looked", share, explain.NotLookedAt, func(w *world) { w.pod.Spec.SchedulerName = "carve-schedulr" }},
		{"it is gated", share, explain.Gated, func(w *world) {
			w.pod.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: "kueue.x-k8s.io/admission"}}
		}},
		{"carve plans it in a moment", share, explain.Gated, func(w *world) {
			w.pod.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: api.GatePlan}}
		}},
		{"carve holds it back for want of room", map[string]string{"gpumem": "50000"}, explain.NoRoom, func(w *world) {
			w.pod.Spec.SchedulingGates = []corev1.PodSchedulingGate{{Name: api.GatePlan}}
			w.pod.Spec.Containers = append(w.pod.Spec.Containers, *w.pod.Spec.Containers[0].DeepCopy())
			w.pod.Spec.Containers[1].Name = "side"
			w.reports[0].Status.Cards = w.reports[0].Status.Cards[:1]
			w.card("n1", "GPU-a").Slices = w.card("n1", "GPU-a").Slices[:1]
		}},
		{"two containers that fit alone", map[string]string{"gpumem": "50000"}, explain.NoRoom, func(w *world) {
			w.pod.Spec.Containers = append(w.pod.Spec.Containers, *w.pod.Spec.Containers[0].DeepCopy())
			w.pod.Spec.Containers[1].Name = "side"
			w.reports[0].Status.Cards = w.reports[0].Status.Cards[:1]
			w.card("n1", "GPU-a").Slices = w.card("n1", "GPU-a").Slices[:1]
		}},
		{"it excludes the models that are there", map[string]string{"gpu": "2", "gpumem-percentage": "50"}, explain.Never, func(w *world) {
			w.pod.Annotations = map[string]string{api.AnnotationCardModels: "H100", api.AnnotationCardPolicy: "spread"}
		}},
		{"a tenant that sees no nodes", share, explain.Unknown, func(w *world) {
			w.forbidden = map[string]bool{"pods": true, "nodes": true, "gpunodes": true}
			w.says("0/2 nodes are available: n1: card 0 (GPU-a, A100-SXM4-80GB): asked 60000 MiB, free 57050 of 81050 MiB.")
		}},
		{"a reader who sees no pods of others", share, explain.NoRoom, func(w *world) { full(w); w.forbidden = map[string]bool{"pods": true} }},
		{"bound, not prepared", share, explain.NotPrepared, func(w *world) { w.granted(t, "n1", nil, "") }},
		{"bound, not prepared, and the agent is down", share, explain.NotPrepared, func(w *world) {
			w.granted(t, "n1", nil, "")
			w.pods = w.pods[2:]
			for i, p := range w.pods {
				if p.Namespace == api.Namespace && p.Spec.NodeName == "n1" {
					w.pods = append(w.pods[:i], w.pods[i+1:]...)
					break
				}
			}
		}},
		{"its node refuses the grant", share, explain.Refused, func(w *world) {
			w.granted(t, "n1", nil, "")
			w.events = []*corev1.Event{{ObjectMeta: metav1.ObjectMeta{Namespace: "team-c", Name: "e1"}, Source: corev1.EventSource{Component: "carve-node"}, Type: "Warning", Reason: "GrantRefused",
				Message: "card GPU-a has 57050 MiB left, the grant is for 60000 MiB", LastTimestamp: metav1.NewTime(explainNow.Add(-30 * time.Second)), Count: 3}}
		}},
		{"a grant of another pod", share, explain.Refused, func(w *world) { w.granted(t, "n1", func(g *api.Grant) { g.UID = "uid-other" }, "") }},
		{"a grant that can't be read", share, explain.Refused, func(w *world) {
			w.pod.Spec.NodeName, w.pod.Annotations = "n1", map[string]string{api.AnnotationGrant: `{"v":9}`}
		}},
		{"bound past the extender", share, explain.Ungranted, func(w *world) { w.pod.Spec.NodeName = "n1" }},
		{"it was there before carve managed the node", map[string]string{"gpu": "1"}, explain.Ungranted, func(w *world) {
			w.pod.Spec.NodeName = "n1"
			w.pod.Status = corev1.PodStatus{Phase: corev1.PodRunning, ContainerStatuses: []corev1.ContainerStatus{{Name: "app", State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}}}}
		}},
		{"on a node of another plugin", map[string]string{"gpu": "1"}, explain.Elsewhere, func(w *world) {
			w.pod.Spec.NodeName = "n3"
			w.nodes = append(w.nodes, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n3"}})
		}},
		{"prepared, its image is missing", share, explain.Prepared, func(w *world) {
			w.granted(t, "n1", nil, v1alpha1.Prepared)
			w.pod.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "app", State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "ImagePullBackOff", Message: "no such image"}}}}
		}},
		{"it runs", share, explain.Running, func(w *world) {
			w.granted(t, "n1", nil, v1alpha1.Active)
			w.pod.Status.Phase = corev1.PodRunning
			w.pod.Annotations[api.AnnotationResizeResult] = `{"v":1,"id":"r1","outcome":"refused","gen":1,"message":"card 0 has 0 MiB left"}`
		}},
		{"it runs and leaves", share, explain.Running, func(w *world) {
			w.granted(t, "n1", nil, v1alpha1.Active)
			w.pod.Status.Phase = corev1.PodRunning
			w.pod.DeletionTimestamp, w.pod.Finalizers = &metav1.Time{Time: explainNow}, []string{"x"}
		}},
		{"the node is a generation behind", share, explain.Drifted, func(w *world) {
			w.granted(t, "n1", func(g *api.Grant) { g.Generation = 2 }, v1alpha1.Active)
			w.pod.Status.Phase = corev1.PodRunning
			w.pod.Annotations[api.AnnotationResize] = `{"v":1,"id":"r2","containers":{"app":{"memMiB":9000}}}`
		}},
		{"its card fell off", share, explain.Drifted, func(w *world) {
			w.granted(t, "n1", nil, v1alpha1.Active)
			w.card("n1", "GPU-a").Health = v1alpha1.Health{State: v1alpha1.Lost, Reason: "it fell off the bus"}
		}},
		{"its container's file was removed from the node", share, explain.CutOff, func(w *world) {
			w.granted(t, "n1", nil, v1alpha1.Active)
			c := w.card("n1", "GPU-a")
			c.Slices[len(c.Slices)-1].Fault = "container app runs with a limits file that is no longer the node's"
		}},
		{"a running pod, for a tenant", share, explain.Running, func(w *world) {
			w.granted(t, "n1", nil, v1alpha1.Active)
			w.pod.Status.Phase = corev1.PodRunning
			w.pod.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "app", State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}}}
			w.forbidden = map[string]bool{"pods": true, "nodes": true, "gpunodes": true}
		}},
		{"it has ended", share, explain.Ended, func(w *world) {
			w.granted(t, "n1", nil, "")
			w.pod.Status.Phase = corev1.PodSucceeded
		}},
		{"it has ended and its node has not let go", share, explain.Ended, func(w *world) {
			w.granted(t, "n1", nil, v1alpha1.Active)
			w.pod.Status.Phase = corev1.PodFailed
		}},
	}
	var out bytes.Buffer
	for _, s := range situations {
		w := newWorld(t, s.limits)
		if s.change != nil {
			s.change(w)
		}
		text, r := w.explained(t, "mine")
		fmt.Fprintf(&out, "### %s\n%s\n", s.name, text)
		if r == nil || r.Verdict != s.verdict {
			t.Errorf("%s: the verdict isn't %s", s.name, s.verdict)
		}
	}
	text, _ := newWorld(t, nil).explained(t, "nobody")
	fmt.Fprintf(&out, "### no such pod\n%s", text)
	wantGolden(t, "explain.txt", out.Bytes())
}

// A thousand nodes make no thousand lines.
func TestExplainListsTheNearestNodes(t *testing.T) {
	w := newWorld(t, map[string]string{"gpumem": "60000"})
	for i := range 50 {
		name := fmt.Sprintf("m%02d", i)
		n := w.reports[0].DeepCopy()
		n.Name, n.Spec = name, v1alpha1.GPUNodeSpec{CordonedCards: []string{"GPU-a", "GPU-b"}}
		w.reports = append(w.reports, n)
		w.nodes = append(w.nodes, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{api.LabelManaged: "true"}}})
		agent := agentPod(name)
		agent.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
		w.pods = append(w.pods, agent)
	}
	for _, u := range []string{"GPU-a", "GPU-b"} {
		w.card("n2", u).Slices = []v1alpha1.Slice{{PodUID: "uid-x", Namespace: "x", Pod: "big", Container: "app", MemMiB: 50000, Mode: "vgpu", State: "active"}}
	}
	text, r := w.explained(t, "mine")
	if len(r.Nodes) != 52 || r.Nodes[0].Name != "n1" || !strings.Contains(text, "and 46 more nodes (46 cordoned)") || strings.Count(text, "\n") > 60 {
		t.Errorf("%d nodes, the nearest is %s\n%s", len(r.Nodes), r.Nodes[0].Name, text)
	}
}
