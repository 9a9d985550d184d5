package cluster

import (
	corev1 "k8s.io/api/core/v1"
	"k8s.io/component-helpers/resource"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/scheduler-extender/fit"
)

// HostOf is what a pod asks of its node beside cards, as kube-scheduler counts it: the
// larger of what its containers need together and of what starting them needs, with sidecars,
// overhead, what the pod as a whole asks for, and what a resize has in force.
func HostOf(p *corev1.Pod) fit.Host {
	return host(requests(p))
}

func requests(p *corev1.Pod) corev1.ResourceList {
	return resource.PodRequests(p, resource.PodResourcesOptions{UseStatusResources: true})
}

// host is what one pod with such requests takes.
func host(sum corev1.ResourceList) fit.Host {
	return fit.Host{CPUMilli: sum.Cpu().MilliValue(), MemMiB: mebibytes(sum, true), Pods: 1}
}

// mebibytes of memory in a list, rounded up or down.
func mebibytes(l corev1.ResourceList, up bool) int64 {
	b := l.Memory().Value()
	if up {
		b += api.MiB - 1
	}
	return b / api.MiB
}

// keepHost keeps in a trimmed pod what the pod asks beside cards, as its overhead: then
// keptHost finds it there.
func keepHost(trimmed, p *corev1.Pod) {
	if p.Spec.NodeName == "" || ended(p) {
		return
	}
	sum := requests(p)
	for _, name := range []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory} {
		if q, ok := sum[name]; ok && !q.IsZero() {
			if trimmed.Spec.Overhead == nil {
				trimmed.Spec.Overhead = corev1.ResourceList{}
			}
			trimmed.Spec.Overhead[name] = q
		}
	}
}

func keptHost(trimmed *corev1.Pod) fit.Host { return host(trimmed.Spec.Overhead) }

// allocatable is what pods may have of a node beside cards.
func allocatable(n *corev1.Node) fit.Host {
	a := n.Status.Allocatable
	return fit.Host{CPUMilli: a.Cpu().MilliValue(), MemMiB: mebibytes(a, false), Pods: int(a.Pods().Value())}
}
