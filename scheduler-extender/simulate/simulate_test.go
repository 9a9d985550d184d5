package simulate_test

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/v1alpha1"
	"github.com/carve-gpu/carve/scheduler-extender/cluster"
	"github.com/carve-gpu/carve/scheduler-extender/place"
	"github.com/carve-gpu/carve/scheduler-extender/score"
	"github.com/carve-gpu/carve/scheduler-extender/simulate"
)

var now = time.Unix(1_700_000_000, 0)

// world is nodes of two cards of 80,000 MiB and 8 processors each.
func world(nodes ...string) cluster.Lists {
	var in cluster.Lists
	since := metav1.NewTime(now)
	for _, name := range nodes {
		in.Nodes = append(in.Nodes, corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{api.LabelManaged: "true", "zone": name}},
			Status: corev1.NodeStatus{Allocatable: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("8"), corev1.ResourceMemory: resource.MustParse("64Gi"), corev1.ResourcePods: resource.MustParse("110")}}})
		r := v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: name}, Status: v1alpha1.GPUNodeStatus{HookConnectedSince: &since}}
		for i := range 2 {
			r.Status.Cards = append(r.Status.Cards, v1alpha1.Card{UUID: fmt.Sprintf("GPU-%s-%d", name, i), Index: int32(i), Model: "NVIDIA A100-SXM4-80GB", MemoryMiB: 80000, Health: v1alpha1.Health{State: v1alpha1.Healthy}})
		}
		in.Reports = append(in.Reports, r)
		in.Pods = append(in.Pods, corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: api.Namespace, Name: "carve-node-" + name, Labels: map[string]string{api.LabelName: api.AgentName}},
			Spec: corev1.PodSpec{NodeName: name}, Status: corev1.PodStatus{Phase: corev1.PodRunning, Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}}})
	}
	return in
}

func read(t *testing.T, text string) []*corev1.Pod {
	t.Helper()
	pods, _, err := simulate.Read(strings.NewReader(text), "here")
	if err != nil {
		t.Fatal(err)
	}
	return pods
}

const deployment = `
apiVersion: apps/v1
kind: Deployment
metadata: {name: infer}
spec:
  replicas: %d
  selector: {matchLabels: {a: b}}
  template:
    metadata: {labels: {a: b}, annotations: {carve.dev/card-policy: binpack}}
    spec:
      %s
      containers:
      - name: app
        image: x
        resources: {limits: {nvidia.com/gpu: 1, nvidia.com/gpumem: %d, nvidia.com/gpucores: 20}}
`

func run(t *testing.T, in cluster.Lists, text string) simulate.Report {
	t.Helper()
	r, err := simulate.Run(in, read(t, text), place.Config{Policy: score.Binpack}, now)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func TestReplicasArePlacedOneAfterTheOther(t *testing.T) {
	r := run(t, world("n1"), fmt.Sprintf(deployment, 5, "", 40000))
	var at []int
	for _, p := range r.Placements {
		if p.Node == "" {
			continue
		}
		at = append(at, p.Cards[0].Index)
		if c := p.Cards[0]; p.Node != "n1" || c.MemMiB != 40000 || c.Cores != 20 || c.Mode != "vgpu" || c.Container != "app" || p.Namespace != "here" {
			t.Errorf("%+v", p)
		}
	}
	if !slices.Equal(at, []int{0, 0, 1, 1}) || r.Placed != 4 || r.Refused != 1 || r.Given != 160000 || r.Has != 160000 {
		t.Errorf("cards %v, report %+v", at, r)
	}
	last := r.Placements[4]
	if last.Never || !strings.Contains(last.Why, "asked 40000 MiB") || !strings.Contains(last.Why, "here/infer-") {
		t.Errorf("the fifth: %+v", last)
	}
}

func TestWhatRunsCounts(t *testing.T) {
	in := world("n1")
	in.Pods = append(in.Pods, corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "x", Name: "runs", UID: "uid-runs",
		Annotations: map[string]string{api.AnnotationGrant: `{"v":1,"uid":"uid-runs","node":"n1","gen":1,"containers":{"app":[{"card":"GPU-n1-0","memMiB":50000,"mode":"vgpu"}]}}`}},
		Spec: corev1.PodSpec{NodeName: "n1", Containers: []corev1.Container{{Name: "app", Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{api.ResourceMemory: resource.MustParse("50000")}}}}}})
	before := fmt.Sprintf("%+v", in)
	r := run(t, in, fmt.Sprintf(deployment, 3, "", 40000))
	if r.Placed != 2 || r.Placements[0].Cards[0].Index != 1 {
		t.Errorf("%+v", r)
	}
	if fmt.Sprintf("%+v", in) != before {
		t.Error("the lists were changed")
	}
}

func TestNodesThatDoNotSuit(t *testing.T) {
	for name, c := range map[string]struct {
		spec, why string
		never     bool
		mib       int
		change    func(*cluster.Lists)
	}{
		"by label":      {spec: "nodeSelector: {zone: n9}", why: "no node has the labels"},
		"cordoned":      {why: "no node has the labels", change: func(in *cluster.Lists) { in.Nodes[0].Spec.Unschedulable = true }},
		"tainted":       {why: "no node has the labels", change: func(in *cluster.Lists) { in.Nodes[0].Spec.Taints = []corev1.Taint{{Key: "x", Effect: "NoSchedule"}} }},
		"processors":    {spec: "initContainers: [{name: i, image: x, resources: {requests: {cpu: 9}}}]", why: "cpu"},
		"a larger card": {mib: 90000, why: "90000", never: true},
		"nobody there":  {why: "agent", change: func(in *cluster.Lists) { in.Pods = nil }},
	} {
		t.Run(name, func(t *testing.T) {
			in := world("n1")
			if c.change != nil {
				c.change(&in)
			}
			mib := c.mib
			if mib == 0 {
				mib = 8000
			}
			p := run(t, in, fmt.Sprintf(deployment, 1, c.spec, mib)).Placements[0]
			if p.Node != "" || p.Never != c.never || !strings.Contains(p.Why, c.why) {
				t.Errorf("%+v", p)
			}
		})
	}
}

func TestReadMakesThePodsThatKubernetesWould(t *testing.T) {
	pods, skipped, err := simulate.Read(strings.NewReader(`
apiVersion: v1
kind: Pod
metadata: {name: alone, namespace: there}
spec: {nodeName: n7, containers: [{name: app, image: x}]}
---
# nothing
---
{"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "j"}, "spec": {"parallelism": 3, "completions": 2, "template": {"spec": {"containers": [{"name": "app", "image": "x"}]}}}}
---
apiVersion: v1
kind: Service
metadata: {name: s}
---
apiVersion: kueue.x-k8s.io/v1beta1
kind: ClusterQueue
metadata: {name: q}
---
apiVersion: apps/v1
kind: StatefulSet
metadata: {name: s}
spec: {serviceName: s, selector: {matchLabels: {a: b}}, template: {metadata: {labels: {a: b}}, spec: {containers: [{name: app, image: x}]}}}
`), "here")
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, p := range pods {
		names = append(names, p.Namespace+"/"+p.Name)
		if p.Spec.NodeName != "" || p.UID == "" {
			t.Errorf("%s is on %q, UID %q", p.Name, p.Spec.NodeName, p.UID)
		}
	}
	if want := []string{"there/alone", "here/j-0", "here/j-1", "here/s-0"}; !slices.Equal(names, want) {
		t.Errorf("pods %v, want %v", names, want)
	}
	if want := []string{"document 4: Service", "document 5: ClusterQueue"}; !slices.Equal(skipped, want) {
		t.Errorf("left out %v, want %v", skipped, want)
	}
	if c := metav1.GetControllerOf(pods[3]); c == nil || c.Kind != "StatefulSet" {
		t.Errorf("the controller is %+v", c)
	}
}

func TestReadSaysWhatIsWrong(t *testing.T) {
	for name, c := range map[string]struct{ text, want string }{
		"no YAML":    {"a: [", "document 1"},
		"the second": {"apiVersion: v1\nkind: Pod\nmetadata: {name: a}\n---\nkind: [", "document 2"},
		"a type":     {"apiVersion: v1\nkind: Pod\nmetadata: 7\n", "document 1"},
		"no kind":    {"metadata: {name: a}\n", "document 1"},
		"too many":   {fmt.Sprintf(deployment, 200_000, "", 1), "more than 100000"},
	} {
		if _, _, err := simulate.Read(strings.NewReader(c.text), "x"); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// The same file on the same cluster says the same, whatever the policy.
func TestTheSameEachTime(t *testing.T) {
	var names []string
	for i := range 20 {
		names = append(names, fmt.Sprint("n", i))
	}
	for _, policy := range []string{"price", "binpack", "spread"} {
		p, _ := score.ByName(policy)
		once := func() simulate.Report {
			r, err := simulate.Run(world(names...), read(t, strings.Replace(fmt.Sprintf(deployment, 70, "", 30000), "carve.dev/card-policy: binpack", "", 1)), place.Config{Policy: p}, now)
			if err != nil {
				t.Fatal(err)
			}
			return r
		}
		if a, b := once(), once(); !reflect.DeepEqual(a, b) || a.Placed == 0 {
			t.Errorf("%s: %d and %d placed, differently", policy, a.Placed, b.Placed)
		}
	}
}
