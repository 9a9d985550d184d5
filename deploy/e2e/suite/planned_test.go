package suite

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/carve-gpu/carve/api"
)

// planned has a pod's place decided before kube-scheduler sees it.
func planned(p *corev1.Pod) *corev1.Pod {
	p.Annotations = map[string]string{api.AnnotationPlacement: string(api.Planned)}
	return p
}

// planOf reads a pod's plan.
func planOf(t *testing.T, p *corev1.Pod) api.Plan {
	t.Helper()
	plan, err := api.DecodePlan(p.Annotations[api.AnnotationPlan])
	if err != nil || plan.UID != string(p.UID) {
		t.Fatalf("pod %s has the plan %q: %v", p.Name, p.Annotations[api.AnnotationPlan], err)
	}
	return plan
}

// gatedFor waits until a pod has been told why it is held back.
func gatedFor(t *testing.T, name string) {
	t.Helper()
	eventually(t, name+" to be held back with a reason", func(ctx context.Context) string {
		if p := get(ctx, t, name); !slices.Contains(p.Spec.SchedulingGates, corev1.PodSchedulingGate{Name: api.GatePlan}) {
			return fmt.Sprintf("its gates are %v, its node %q", p.Spec.SchedulingGates, p.Spec.NodeName)
		}
		if len(events(ctx, t, name, "WaitingForCards")) == 0 {
			return "no event says why it waits"
		}
		return ""
	})
}

// neverRefused wants that kube-scheduler had a node for a pod each time that it looked.
func neverRefused(t *testing.T, name string) {
	t.Helper()
	for _, e := range events(t.Context(), t, name, "FailedScheduling") {
		// It may have come to the pod before the extender listened.
		if strings.Contains(e, "nodes are available") {
			t.Errorf("kube-scheduler refused %s: %s", name, e)
		}
	}
}

// TestPlannedPods: decided over all nodes, one patch, and kube-scheduler sees nothing but the
// chosen one.
func TestPlannedPods(t *testing.T) {
	node := cluster.Lab.Config().Node.Name
	t.Run("one of a Job is pinned", func(t *testing.T) {
		p := planned(pod("", container("app", share{"gpumem": "8000"})))
		job := &batchv1.Job{ObjectMeta: metav1.ObjectMeta{Name: "planned", Namespace: ns},
			Spec: batchv1.JobSpec{Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Annotations: p.Annotations}, Spec: p.Spec}}}
		if _, err := cluster.Client.BatchV1().Jobs(ns).Create(t.Context(), job, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			background := metav1.DeletePropagationBackground
			if err := cluster.Client.BatchV1().Jobs(ns).Delete(context.Background(), "planned", metav1.DeleteOptions{PropagationPolicy: &background}); err != nil {
				t.Error(err)
			}
		})
		name := ""
		eventually(t, "the job's pod", func(ctx context.Context) string {
			l, err := cluster.Client.CoreV1().Pods(ns).List(ctx, metav1.ListOptions{LabelSelector: "batch.kubernetes.io/job-name=planned"})
			if err != nil {
				return err.Error()
			}
			if len(l.Items) == 0 {
				return "there is none"
			}
			name = l.Items[0].Name
			return ""
		})
		t.Cleanup(func() { remove(t, name) })
		p = running(t, name)
		if plan := planOf(t, p); !plan.Pinned || plan.Nodes[0] != node || p.Annotations[api.AnnotationGrant] == "" {
			t.Errorf("plan %+v, grant %q", plan, p.Annotations[api.AnnotationGrant])
		}
		neverRefused(t, name)
	})
	t.Run("one by itself is nominated", func(t *testing.T) {
		create(t, planned(pod("alone", container("app", share{"gpumem": "8000"}))))
		if plan := planOf(t, running(t, "alone")); plan.Pinned || plan.Nodes[0] != node {
			t.Errorf("plan %+v", plan)
		}
		remove(t, "alone")
	})

	// Both cards are in use from here on, also between the parts.
	whole := t
	create(t, pod("full-0", container("app", share{"gpu": "1"})))
	create(t, pod("full-1", container("app", share{"gpu": "1"})))
	running(t, "full-0")
	running(t, "full-1")
	t.Run("it waits gated and goes when there is room", func(t *testing.T) {
		create(whole, planned(pod("planned-next", container("app", share{"gpu": "1"}))))
		gatedFor(t, "planned-next")
		begin := time.Now()
		remove(t, "full-0")
		freed := time.Now()
		running(t, "planned-next")
		t.Logf("a planned pod ran %v after the pod in its way was deleted, %v after its slice was gone", time.Since(begin).Round(time.Millisecond), time.Since(freed).Round(time.Millisecond))
		neverRefused(t, "planned-next")
	})
	t.Run("also where the extender died meanwhile", func(t *testing.T) {
		create(t, planned(pod("orphan", container("app", share{"gpu": "1"}))))
		gatedFor(t, "orphan")
		extender := partByName("extender")
		if err := extender.kill(t.Context()); err != nil {
			t.Fatal(err)
		}
		remove(t, "full-1")
		if err := extender.back(t.Context()); err != nil {
			t.Fatal(err)
		}
		planOf(t, running(t, "orphan"))
	})
	t.Run("and is let go where no node could ever have it", func(t *testing.T) {
		create(t, planned(pod("giant", container("app", share{"gpumem": "900000"}))))
		eventually(t, "it to be kube-scheduler's", func(ctx context.Context) string {
			if p := get(ctx, t, "giant"); len(p.Spec.SchedulingGates) > 0 || unscheduled(p) == "" {
				return fmt.Sprintf("gates %v, %s", p.Spec.SchedulingGates, unscheduled(p))
			}
			return ""
		})
	})
}
