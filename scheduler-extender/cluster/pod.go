package cluster

import (
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/scheduler-extender/ledger"
	"github.com/carve-gpu/carve/scheduler-extender/place"
)

// PodOf gives a pod in the terms of package place, as the filter call reads it from
// kube-scheduler's JSON. The error is that of the request, and the pod is complete without it.
func PodOf(p *corev1.Pod) (place.Pod, error) {
	out := place.Pod{
		Ref: ledger.Ref{UID: string(p.UID), Namespace: p.Namespace, Name: p.Name}, Created: p.CreationTimestamp.Time, Host: HostOf(p),
	}
	if p.Spec.Priority != nil {
		out.Priority = *p.Spec.Priority
	}
	if c := metav1.GetControllerOfNoCopy(p); c != nil {
		out.Owner, out.Serves = string(c.UID), c.Kind == "ReplicaSet" || c.Kind == "StatefulSet" || c.Kind == "ReplicationController"
	}
	if a := p.Spec.Affinity; a != nil {
		out.Soft = a.NodeAffinity != nil && len(a.NodeAffinity.PreferredDuringSchedulingIgnoredDuringExecution) > 0 ||
			a.PodAffinity != nil && len(a.PodAffinity.PreferredDuringSchedulingIgnoredDuringExecution) > 0 ||
			a.PodAntiAffinity != nil && len(a.PodAntiAffinity.PreferredDuringSchedulingIgnoredDuringExecution) > 0
	}
	for _, s := range p.Spec.TopologySpreadConstraints {
		out.Soft = out.Soft || s.WhenUnsatisfiable == corev1.ScheduleAnyway
	}
	all := specs(p)
	asked := map[string]corev1.ResourceList{}
	for _, c := range append(p.Spec.InitContainers[:len(p.Spec.InitContainers):len(p.Spec.InitContainers)], p.Spec.Containers...) {
		asked[c.Name] = c.Resources.Requests
	}
	for i := range all {
		for name, q := range asked[all[i].Name] {
			if !strings.HasPrefix(string(name), "nvidia.com/") {
				continue
			}
			if all[i].Requests == nil {
				all[i].Requests = map[string]string{}
			}
			all[i].Requests[string(name)] = q.String()
		}
	}
	var err error
	out.Request, err = api.ParseRequest(all, p.Annotations)
	return out, err
}
