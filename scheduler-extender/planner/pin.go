package planner

import (
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/carve-gpu/carve/api"
)

// pinnable reports whether all that decides on the pod's nodes is known here, and whether there
// is a controller that makes it anew should its nodes be lost. It reads a pod as package
// cluster keeps it.
func pinnable(p *corev1.Pod) bool {
	owner := metav1.GetControllerOfNoCopy(p)
	switch {
	case owner == nil || owner.Kind == "DaemonSet": // whose controller reads one term of the affinity only
		return false
	case len(p.Spec.Volumes) > 0: // those that are kept may be where some nodes aren't
		return false
	case len(p.Spec.ResourceClaims) > 0 || p.Spec.HostNetwork:
		return false
	case slices.ContainsFunc(p.Spec.TopologySpreadConstraints, func(c corev1.TopologySpreadConstraint) bool { return c.WhenUnsatisfiable == corev1.DoNotSchedule }):
		return false
	}
	if a := p.Spec.Affinity; a != nil {
		if a.PodAffinity != nil && len(a.PodAffinity.RequiredDuringSchedulingIgnoredDuringExecution) > 0 ||
			a.PodAntiAffinity != nil && len(a.PodAntiAffinity.RequiredDuringSchedulingIgnoredDuringExecution) > 0 {
			return false
		}
	}
	for _, c := range slices.Concat(p.Spec.InitContainers, p.Spec.Containers) {
		if len(c.Ports) > 0 { // those that are kept are the host's
			return false
		}
		for name := range c.Resources.Requests {
			if !known(name) {
				return false
			}
		}
		for name := range c.Resources.Limits {
			if !known(name) {
				return false
			}
		}
	}
	return true
}

// known reports whether the ledger counts a resource.
func known(name corev1.ResourceName) bool {
	return name == corev1.ResourceCPU || name == corev1.ResourceMemory || strings.HasPrefix(string(name), "nvidia.com/")
}

// pinned is the pod's required node affinity with the nodes added, and how many of them it
// names. nil says that it can't be: the pod names nodes itself. A pod without terms gets one for
// each node, of which any will do; the API server lets others only be made narrower, so that
// each of their terms gets the first node.
func pinned(p *corev1.Pod, nodes []string) (*corev1.NodeSelector, int) {
	field := func(node string) corev1.NodeSelectorRequirement {
		return corev1.NodeSelectorRequirement{Key: metav1.ObjectNameField, Operator: corev1.NodeSelectorOpIn, Values: []string{node}}
	}
	var own []corev1.NodeSelectorTerm
	if a := p.Spec.Affinity; a != nil && a.NodeAffinity != nil && a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution != nil {
		own = a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms
	}
	out := &corev1.NodeSelector{}
	if len(own) == 0 {
		for _, n := range nodes {
			out.NodeSelectorTerms = append(out.NodeSelectorTerms, corev1.NodeSelectorTerm{MatchFields: []corev1.NodeSelectorRequirement{field(n)}})
		}
		return out, len(nodes)
	}
	for _, t := range own {
		if len(t.MatchFields) > 0 {
			return nil, 0
		}
		if len(t.MatchExpressions) > 0 { // an empty term matches nothing, and must stay so
			t.MatchFields = []corev1.NodeSelectorRequirement{field(nodes[0])}
		}
		out.NodeSelectorTerms = append(out.NodeSelectorTerms, t)
	}
	return out, 1
}

// planOf is a pod's plan, where it has one that speaks of it.
func planOf(p *corev1.Pod) (api.Plan, bool) {
	plan, err := api.DecodePlan(p.Annotations[api.AnnotationPlan])
	return plan, err == nil && plan.UID == string(p.UID)
}
