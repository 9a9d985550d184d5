package suite

import (
	"context"
	"fmt"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/carve-gpu/carve/api"
)

// extenders are the extender's pods that are ready, and the one that answers.
func extenders(ctx context.Context, t *testing.T) (ready int, leader string) {
	t.Helper()
	l, err := cluster.Client.CoreV1().Pods(api.Namespace).List(ctx, metav1.ListOptions{LabelSelector: api.LabelName + "=carve-extender"})
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range l.Items {
		for _, c := range p.Status.Conditions {
			if c.Type != corev1.PodReady || c.Status != corev1.ConditionTrue || p.DeletionTimestamp != nil {
				continue
			}
			if ready++; p.Labels[api.LabelLeading] == "true" {
				leader = p.Name
			}
		}
	}
	return ready, leader
}

// scaleExtender sets the number of replicas and waits until they are ready and one leads.
func scaleExtender(t *testing.T, replicas int) {
	t.Helper()
	if _, err := cluster.Client.AppsV1().Deployments(api.Namespace).Patch(context.Background(), "carve-extender", types.MergePatchType,
		fmt.Appendf(nil, `{"spec":{"replicas":%d}}`, replicas), metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, fmt.Sprintf("%d extenders, one of which answers", replicas), func(ctx context.Context) string {
		if ready, leader := extenders(ctx, t); ready != replicas || leader == "" {
			return fmt.Sprintf("%d are ready, %q answers", ready, leader)
		}
		return ""
	})
}

// TestTheNextExtenderTakesOver: of two one answers. Whichever way it ends, the other goes on with
// all that it bound: no card is given twice, and pods that waited are served.
func TestTheNextExtenderTakesOver(t *testing.T) {
	scaleExtender(t, 2)
	t.Cleanup(func() { scaleExtender(t, 1) })
	create(t, pod("before", container("app", share{"gpumem": "50000"})))
	running(t, "before")
	create(t, pod("beside", container("app", share{"gpumem": "60000"})))
	running(t, "beside")
	create(t, pod("waits", container("app", share{"gpumem": "70000"})))
	wantPending(t, "waits", "70000", "50000")

	for i, end := range []struct {
		how  string
		kill func(ctx context.Context, leader string) error
	}{
		{"killed", killPod},
		{"deleted", func(ctx context.Context, leader string) error {
			return cluster.Client.CoreV1().Pods(api.Namespace).Delete(ctx, leader, metav1.DeleteOptions{})
		}},
	} {
		t.Run("the leader is "+end.how, func(t *testing.T) {
			_, leader := extenders(t.Context(), t)
			begin := time.Now()
			if err := end.kill(t.Context(), leader); err != nil {
				t.Fatal(err)
			}
			name := fmt.Sprint("after-", i)
			create(t, pod(name, container("app", share{"gpumem": "10000"})))
			running(t, name)
			t.Logf("the next pod ran %v after the leader was %s", time.Since(begin).Round(time.Millisecond), end.how)
			agree(t)
			remove(t, name)
			eventually(t, "two extenders again", func(ctx context.Context) string {
				if ready, leader := extenders(ctx, t); ready != 2 || leader == "" {
					return fmt.Sprintf("%d are ready, %q answers", ready, leader)
				}
				return ""
			})
		})
	}
	// The one that answers now never refused this pod.
	remove(t, "before")
	running(t, "waits")
	agree(t)
}

// killPod ends the extender's process in a pod.
func killPod(ctx context.Context, name string) error {
	all, err := unfinished(ctx)
	if err != nil {
		return err
	}
	for _, c := range all {
		if c.Labels[labelPod] == name && c.Labels[labelContainer] == "extender" && c.State == cri.ContainerState_CONTAINER_RUNNING {
			return signalContainer(ctx, c.Id, unix.SIGKILL)
		}
	}
	return fmt.Errorf("kill %s: no container of it runs", name)
}
