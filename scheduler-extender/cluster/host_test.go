package cluster

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/carve-gpu/carve/api/v1alpha1"
	"github.com/carve-gpu/carve/scheduler-extender/fit"
	"github.com/carve-gpu/carve/scheduler-extender/ledger"
)

func list(cpu, memory string) corev1.ResourceList {
	out := corev1.ResourceList{}
	if cpu != "" {
		out[corev1.ResourceCPU] = resource.MustParse(cpu)
	}
	if memory != "" {
		out[corev1.ResourceMemory] = resource.MustParse(memory)
	}
	return out
}

// What a pod asks of its node is counted as kube-scheduler does it, and is still there once
// the informer has trimmed the pod.
func TestWhatAPodAsksOfItsNode(t *testing.T) {
	always := corev1.ContainerRestartPolicyAlways
	asks := func(cpu, memory string) corev1.Container {
		return corev1.Container{Resources: corev1.ResourceRequirements{Requests: list(cpu, memory)}}
	}
	sidecar := func(cpu, memory string) corev1.Container {
		c := asks(cpu, memory)
		c.RestartPolicy = &always
		return c
	}
	for name, c := range map[string]struct {
		spec corev1.PodSpec
		want fit.Host
	}{
		"nothing":            {corev1.PodSpec{Containers: []corev1.Container{asks("", "")}}, fit.Host{Pods: 1}},
		"several together":   {corev1.PodSpec{Containers: []corev1.Container{asks("100m", "1Gi"), asks("1", "100Mi")}}, fit.Host{CPUMilli: 1100, MemMiB: 1124, Pods: 1}},
		"part of a MiB":      {corev1.PodSpec{Containers: []corev1.Container{asks("", "1")}}, fit.Host{MemMiB: 1, Pods: 1}},
		"start needs more":   {corev1.PodSpec{InitContainers: []corev1.Container{asks("3", "10Mi")}, Containers: []corev1.Container{asks("1", "20Mi")}}, fit.Host{CPUMilli: 3000, MemMiB: 20, Pods: 1}},
		"sidecars stay":      {corev1.PodSpec{InitContainers: []corev1.Container{sidecar("1", ""), asks("3", "")}, Containers: []corev1.Container{asks("1", "")}}, fit.Host{CPUMilli: 4000, Pods: 1}},
		"a later sidecar":    {corev1.PodSpec{InitContainers: []corev1.Container{asks("3", ""), sidecar("1", "")}, Containers: []corev1.Container{asks("1", "")}}, fit.Host{CPUMilli: 3000, Pods: 1}},
		"overhead":           {corev1.PodSpec{Overhead: list("250m", "16Mi"), Containers: []corev1.Container{asks("1", "")}}, fit.Host{CPUMilli: 1250, MemMiB: 16, Pods: 1}},
		"the pod as a whole": {corev1.PodSpec{Resources: &corev1.ResourceRequirements{Requests: list("5", "")}, Containers: []corev1.Container{asks("1", "8Mi")}}, fit.Host{CPUMilli: 5000, MemMiB: 8, Pods: 1}},
	} {
		t.Run(name, func(t *testing.T) {
			p := gpuPod("a")
			c.spec.NodeName = "n1"
			p.Spec = c.spec
			if got := HostOf(p); got != c.want {
				t.Errorf("asks %+v, want %+v", got, c.want)
			}
			trimmed, err := trimPod(p)
			if err != nil {
				t.Fatal(err)
			}
			if got := keptHost(trimmed.(*corev1.Pod)); got != c.want {
				t.Errorf("kept %+v, want %+v", got, c.want)
			}
		})
	}
}

// gang-32: a node's number of pods counts, and pods without cards count.
func TestNodesHaveWhatPodsLeaveOfThem(t *testing.T) {
	n := &corev1.Node{}
	n.Name, n.Status.Allocatable = "n1", list("4", "8Gi")
	n.Status.Allocatable[corev1.ResourcePods] = resource.MustParse("2")
	plain, done, waiting := gpuPod("plain"), gpuPod("done"), gpuPod("waiting")
	for _, p := range []*corev1.Pod{plain, done, waiting} {
		p.Annotations, p.Spec.Containers[0].Resources = nil, corev1.ResourceRequirements{Requests: list("1500m", "1Gi")}
	}
	done.Status.Phase, waiting.Spec.NodeName = corev1.PodSucceeded, ""
	books := Snapshot(Lists{Nodes: []corev1.Node{*n}, Reports: []v1alpha1.GPUNode{{ObjectMeta: metav1.ObjectMeta{Name: "n1"}}}, Pods: []corev1.Pod{*plain, *done, *waiting}}, time.Unix(1_700_000_000, 0))
	if v := books.Node("n1").Snapshot().View; !v.HostKnown || v.Host != (fit.Host{CPUMilli: 2500, MemMiB: 7168, Pods: 1}) {
		t.Errorf("left %+v, known %t", v.Host, v.HostKnown)
	}
	unsaid := ledger.New(ledger.Config{})
	unsaid.SetNode("n1", ledger.NodeInfo{Managed: true})
	if unsaid.Node("n1").Snapshot().View.HostKnown {
		t.Error("what a node doesn't say is known")
	}
}
