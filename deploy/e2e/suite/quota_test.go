package suite

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// setQuota bounds the tests' namespace until the test's end.
func setQuota(t *testing.T, hard corev1.ResourceList) {
	t.Helper()
	quotas := cluster.Client.CoreV1().ResourceQuotas(ns)
	q := &corev1.ResourceQuota{ObjectMeta: metav1.ObjectMeta{Name: "gpus"}, Spec: corev1.ResourceQuotaSpec{Hard: hard}}
	if _, err := quotas.Create(t.Context(), q, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := quotas.Delete(context.Background(), "gpus", metav1.DeleteOptions{}); err != nil {
			t.Error(err)
		}
	})
	eventually(t, "the quota to be in force", func(ctx context.Context) string {
		q, err := quotas.Get(ctx, "gpus", metav1.GetOptions{})
		if err != nil || len(q.Status.Hard) < len(hard) {
			return fmt.Sprint(err)
		}
		return ""
	})
}

// TestGrownSharesAndTheQuota: Kubernetes counts what pods asked for when they were
// made. A share that has grown since is counted when the next pod comes, which
// waits, and says so, until the share shrinks or the quota is raised.
func TestGrownSharesAndTheQuota(t *testing.T) {
	const memory = "requests.nvidia.com/gpumem"
	setQuota(t, corev1.ResourceList{memory: resource.MustParse("10k")})
	create(t, pod("grows", container("app", share{"gpumem": "1000"})))
	running(t, "grows")
	wantResized(t, "grows", "--gpumem", "10000")
	create(t, pod("next", container("app", share{"gpumem": "9000"}))) // 1,000 and 9,000 are asked for
	wantPending(t, "next", "ResourceQuota "+ns+"/gpus allows "+memory+" of 10000", "hold 10000 and the pod takes 9000 more", "grows (asked 1000, holds 10000)")
	if e := decoded[explained](t, "explain", "pod", "next", "-n", ns); e.Verdict != "quota" || len(e.Nodes) != 1 || !strings.Contains(e.Nodes[0].Message, "grows (asked 1000, holds 10000)") {
		t.Errorf("explain: %+v", e)
	}
	agree(t)

	// What a pod is told to give up and uses is still its own: the node refuses,
	// and nobody had it meanwhile.
	s := allocateAndHold(t, "grows", "app", 5000<<20)
	defer s.end()
	wantRefused(t, "grows", func() { wantTotal(t, s, 10000) }, []string{"--gpumem", "1000"}, "container app uses ", "would leave it 1000 MiB")
	wantPending(t, "next", "grows (asked 1000, holds 10000)")

	s.free()
	wantResized(t, "grows", "--gpumem", "1000")
	running(t, "next")
	wantShare(t, "next", "app", 9000)
	agree(t)

	// The other way: the quota is raised.
	remove(t, "next")
	wantResized(t, "grows", "--gpumem", "10000")
	create(t, pod("raised", container("app", share{"gpumem": "9000"})))
	wantPending(t, "raised", "hold 10000 and the pod takes 9000 more")
	body, err := json.Marshal(map[string]any{"spec": map[string]any{"hard": map[string]string{memory: "19k"}}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := cluster.Client.CoreV1().ResourceQuotas(ns).Patch(t.Context(), "gpus", types.MergePatchType, body, metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	running(t, "raised")
	wantShare(t, "raised", "app", 9000)
	agree(t)
}
