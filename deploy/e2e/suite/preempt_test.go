package suite

import (
	"context"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TestNobodyIsEvictedForNothing: where processors are short kube-scheduler evicts who has them, by
// what it counts itself. Where the pod would then find no card, that helps nobody.
func TestNobodyIsEvictedForNothing(t *testing.T) {
	class := &schedulingv1.PriorityClass{ObjectMeta: metav1.ObjectMeta{Name: "urgent"}, Value: 1000}
	if _, err := cluster.Client.SchedulingV1().PriorityClasses().Create(t.Context(), class, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := cluster.Client.SchedulingV1().PriorityClasses().Delete(context.Background(), "urgent", metav1.DeleteOptions{}); err != nil {
			t.Error(err)
		}
	})
	create(t, pod("full-0", container("app", share{"gpu": "1"})))
	create(t, pod("full-1", container("app", share{"gpu": "1"})))
	running(t, "full-0")
	running(t, "full-1")
	node, err := cluster.Client.CoreV1().Nodes().Get(t.Context(), cluster.Lab.Config().Node.Name, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	// More than half of the processors, so that two such pods don't fit.
	most := resource.NewMilliQuantity(node.Status.Allocatable.Cpu().MilliValue()*6/10, resource.DecimalSI)
	hog := pod("hog", container("app", nil))
	hog.Spec.Containers[0].Resources.Requests = corev1.ResourceList{corev1.ResourceCPU: *most}
	uid := create(t, hog).UID
	running(t, "hog")

	asked := sample(extenderMetrics(t), "carve_extender_verb_seconds_count", `verb="preempt"`)
	urgent := func() *corev1.Pod {
		p := pod("urgent", container("app", share{"gpumem": "8000"}))
		p.Spec.PriorityClassName = "urgent"
		p.Spec.Containers[0].Resources.Requests = corev1.ResourceList{corev1.ResourceCPU: *most}
		return p
	}
	create(t, urgent())
	eventually(t, "kube-scheduler to ask whom to evict", func(ctx context.Context) string {
		if sample(extenderMetrics(t), "carve_extender_verb_seconds_count", `verb="preempt"`) == asked {
			return "it hasn't asked"
		}
		if why := unscheduled(get(ctx, t, "urgent")); !strings.Contains(why, "Insufficient cpu") {
			return "the pod's condition is: " + why
		}
		return ""
	})
	if p := get(t.Context(), t, "hog"); p.UID != uid || p.DeletionTimestamp != nil {
		t.Fatal("a pod was evicted for one that finds no card")
	}
	// With a card to be had it is worth it. (The pod is made anew: kube-scheduler waits for the
	// processors that it lacks, and looks at it for nothing else within five minutes.)
	remove(t, "urgent")
	remove(t, "full-0")
	create(t, urgent())
	running(t, "urgent")
	if p := get(t.Context(), t, "full-1"); p.DeletionTimestamp != nil {
		t.Error("a pod was evicted that was in nobody's way")
	}
}
