package cluster

import (
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/v1alpha1"
)

// The informers keep every pod and node of the cluster, so they keep no more of
// them than is read.

// trimPod keeps identity, containers' requests of ours, node, what is asked of that
// beside cards, grant, resize and phase. Pods that neither ask for a card nor carry a
// grant have no containers left.
func trimPod(o any) (any, error) {
	p, ok := o.(*corev1.Pod)
	if !ok {
		return o, nil
	}
	out := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
		Namespace: p.Namespace, Name: p.Name, UID: p.UID, ResourceVersion: p.ResourceVersion,
	}}
	for _, key := range []string{api.AnnotationGrant, api.AnnotationRequiredPlugins, api.AnnotationResize, api.AnnotationResizeResult} {
		if v := p.Annotations[key]; v != "" {
			if out.Annotations == nil {
				out.Annotations = map[string]string{}
			}
			out.Annotations[key] = v
		}
	}
	if ToPlan(p) || p.Annotations[api.AnnotationPlan] != "" && p.Spec.NodeName == "" {
		return keepToPlan(out, p), nil
	}
	init, asks := trimContainers(p.Spec.InitContainers)
	apps, asksToo := trimContainers(p.Spec.Containers)
	out.Spec.NodeName, out.Status.Phase = p.Spec.NodeName, p.Status.Phase
	keepHost(out, p)
	if !asks && !asksToo && p.Annotations[api.AnnotationGrant] == "" {
		return out, nil
	}
	if c := metav1.GetControllerOfNoCopy(p); c != nil {
		out.OwnerReferences = []metav1.OwnerReference{{UID: c.UID, Controller: c.Controller}}
	}
	out.Spec.InitContainers, out.Spec.Containers = init, apps
	out.Status.InitContainerStatuses = trimStatuses(p.Status.InitContainerStatuses)
	out.Status.ContainerStatuses = trimStatuses(p.Status.ContainerStatuses)
	return out, nil
}

func trimContainers(cs []corev1.Container) (out []corev1.Container, asks bool) {
	out = make([]corev1.Container, len(cs))
	for i := range cs {
		out[i] = corev1.Container{Name: cs[i].Name, RestartPolicy: cs[i].RestartPolicy}
		for name, q := range cs[i].Resources.Limits {
			if !strings.HasPrefix(string(name), "nvidia.com/") {
				continue
			}
			if out[i].Resources.Limits == nil {
				out[i].Resources.Limits = corev1.ResourceList{}
			}
			out[i].Resources.Limits[name] = q
			asks = true
		}
	}
	return out, asks
}

func trimStatuses(ss []corev1.ContainerStatus) []corev1.ContainerStatus {
	out := make([]corev1.ContainerStatus, 0, len(ss))
	for _, s := range ss {
		t := corev1.ContainerStatus{Name: s.Name, RestartCount: s.RestartCount}
		switch {
		case s.State.Running != nil:
			t.State.Running = &corev1.ContainerStateRunning{}
		case s.State.Terminated != nil:
			t.State.Terminated = &corev1.ContainerStateTerminated{}
		}
		out = append(out, t)
	}
	return out
}

// keepToPlan keeps of a pod that waits for its plan, or for its scheduler, all that says where
// it may go.
func keepToPlan(out, p *corev1.Pod) *corev1.Pod {
	out.Annotations = map[string]string{}
	for k, v := range p.Annotations {
		if k != corev1.LastAppliedConfigAnnotation {
			out.Annotations[k] = v
		}
	}
	out.CreationTimestamp = p.CreationTimestamp
	if c := metav1.GetControllerOfNoCopy(p); c != nil {
		out.OwnerReferences = []metav1.OwnerReference{*c}
	}
	out.Spec = corev1.PodSpec{
		SchedulerName: p.Spec.SchedulerName, SchedulingGates: p.Spec.SchedulingGates, Priority: p.Spec.Priority,
		NodeSelector: p.Spec.NodeSelector, Affinity: p.Spec.Affinity, Tolerations: p.Spec.Tolerations,
		TopologySpreadConstraints: p.Spec.TopologySpreadConstraints, ResourceClaims: p.Spec.ResourceClaims,
		HostNetwork: p.Spec.HostNetwork, Overhead: p.Spec.Overhead, Resources: p.Spec.Resources,
	}
	for _, v := range p.Spec.Volumes {
		// Of volumes only which of them some nodes can't have.
		if v.PersistentVolumeClaim != nil || v.Ephemeral != nil || v.CSI != nil {
			out.Spec.Volumes = append(out.Spec.Volumes, corev1.Volume{Name: v.Name, VolumeSource: v.VolumeSource})
		}
	}
	keep := func(cs []corev1.Container) []corev1.Container {
		kept := make([]corev1.Container, len(cs))
		for i := range cs {
			kept[i] = corev1.Container{Name: cs[i].Name, RestartPolicy: cs[i].RestartPolicy, Resources: cs[i].Resources, SecurityContext: cs[i].SecurityContext}
			for _, port := range cs[i].Ports {
				if port.HostPort != 0 {
					kept[i].Ports = append(kept[i].Ports, port)
				}
			}
		}
		return kept
	}
	out.Spec.InitContainers, out.Spec.Containers = keep(p.Spec.InitContainers), keep(p.Spec.Containers)
	out.Status.Phase, out.Status.NominatedNodeName = p.Status.Phase, p.Status.NominatedNodeName
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodScheduled {
			out.Status.Conditions = []corev1.PodCondition{{Type: c.Type, Status: c.Status, Reason: c.Reason, LastTransitionTime: c.LastTransitionTime}}
		}
	}
	return out
}

// ToPlan reports whether a pod is held back until it has a plan, and for nothing else: one
// with gates of others, Kueue's for one, isn't to start yet.
func ToPlan(p *corev1.Pod) bool {
	return p.Spec.NodeName == "" && p.DeletionTimestamp == nil && len(p.Spec.SchedulingGates) == 1 && p.Spec.SchedulingGates[0].Name == api.GatePlan
}

// trimNode keeps the name, the labels, which pods may be there, and of what they may have
// the cards, processors, memory and number.
func trimNode(o any) (any, error) {
	n, ok := o.(*corev1.Node)
	if !ok {
		return o, nil
	}
	out := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: n.Name, UID: n.UID, ResourceVersion: n.ResourceVersion}}
	out.Labels, out.Spec.Unschedulable = n.Labels, n.Spec.Unschedulable
	for _, t := range n.Spec.Taints {
		out.Spec.Taints = append(out.Spec.Taints, corev1.Taint{Key: t.Key, Value: t.Value, Effect: t.Effect})
	}
	for name, q := range n.Status.Allocatable {
		if strings.HasPrefix(string(name), "nvidia.com/") || name == corev1.ResourceCPU || name == corev1.ResourceMemory || name == corev1.ResourcePods {
			if out.Status.Allocatable == nil {
				out.Status.Allocatable = corev1.ResourceList{}
			}
			out.Status.Allocatable[name] = q
		}
	}
	return out, nil
}

// trimQuota keeps the bounds on cards. A quota with scopes bounds some pods only,
// and is left to Kubernetes' own count at creation.
func trimQuota(o any) (any, error) {
	q, ok := o.(*corev1.ResourceQuota)
	if !ok {
		return o, nil
	}
	out := &corev1.ResourceQuota{ObjectMeta: metav1.ObjectMeta{Namespace: q.Namespace, Name: q.Name, UID: q.UID, ResourceVersion: q.ResourceVersion}}
	if len(q.Spec.Scopes) > 0 || q.Spec.ScopeSelector != nil {
		return out, nil
	}
	for _, name := range []corev1.ResourceName{"requests." + api.ResourceMemory, "requests." + api.ResourceCores} {
		if v, ok := q.Spec.Hard[name]; ok {
			if out.Spec.Hard == nil {
				out.Spec.Hard = corev1.ResourceList{}
			}
			out.Spec.Hard[name] = v
		}
	}
	return out, nil
}

// trimReport drops what only people read.
func trimReport(o any) (any, error) {
	if n, ok := o.(*v1alpha1.GPUNode); ok {
		n.ManagedFields, n.Annotations = nil, nil
		for i := range n.Status.Cards {
			n.Status.Cards[i].Links = nil
		}
	}
	return o, nil
}
