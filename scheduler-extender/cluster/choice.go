package cluster

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	helpers "k8s.io/component-helpers/scheduling/corev1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
	"k8s.io/klog/v2"
)

// Choice is what a pod says of the nodes on which it may be.
type Choice struct {
	affinity    nodeaffinity.RequiredNodeAffinity
	tolerations []corev1.Toleration
}

// ChoiceOf reads what a pod says.
func ChoiceOf(p *corev1.Pod) Choice {
	return Choice{nodeaffinity.GetRequiredNodeAffinity(p), p.Spec.Tolerations}
}

// Takes reports whether the pod may be on a node, as kube-scheduler's plugins NodeAffinity,
// TaintToleration and NodeUnschedulable have it. An error is of the pod's own affinity.
func (c *Choice) Takes(n *corev1.Node) (bool, error) {
	if n.Spec.Unschedulable && !helpers.TolerationsTolerateTaint(klog.Background(), c.tolerations, &unschedulable, false) {
		return false, nil
	}
	if _, bad := helpers.FindMatchingUntoleratedTaint(klog.Background(), n.Spec.Taints, c.tolerations, keepsOff, false); bad {
		return false, nil
	}
	ok, err := c.affinity.Match(n)
	if err != nil {
		return false, fmt.Errorf("read the pod's node affinity: %w", err)
	}
	return ok, nil
}

var unschedulable = corev1.Taint{Key: corev1.TaintNodeUnschedulable, Effect: corev1.TaintEffectNoSchedule}

// keepsOff says of a taint whether it keeps pods off that aren't on the node yet.
func keepsOff(t *corev1.Taint) bool {
	return t.Effect == corev1.TaintEffectNoSchedule || t.Effect == corev1.TaintEffectNoExecute
}
