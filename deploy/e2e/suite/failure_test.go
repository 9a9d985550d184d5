package suite

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/carve-gpu/carve/api"
)

// agentDown takes the agent off the node and returns what brings it back.
func agentDown(t *testing.T) (up func()) {
	t.Helper()
	patch := func(value string) {
		body := fmt.Appendf(nil, `{"spec":{"template":{"spec":{"nodeSelector":{%q:%q}}}}}`, api.LabelManaged, value)
		if _, err := cluster.Client.AppsV1().DaemonSets(api.Namespace).Patch(context.Background(), "carve-node", types.MergePatchType, body, metav1.PatchOptions{}); err != nil {
			t.Fatalf("patch the DaemonSet: %v", err)
		}
	}
	patch("nowhere")
	eventually(t, "the agent to be gone", func(ctx context.Context) string {
		pods, err := cluster.AgentPods(ctx)
		if err != nil {
			return err.Error()
		}
		if len(pods) > 0 {
			return "its pod is there"
		}
		// A kubelet that lost the plugin and hasn't told the cluster yet is sent
		// pods that it then rejects for good.
		node, err := cluster.Client.CoreV1().Nodes().Get(ctx, "node1", metav1.GetOptions{})
		if err != nil {
			return err.Error()
		}
		if q := node.Status.Allocatable[api.ResourceGPU]; !q.IsZero() {
			return "the node still offers slots: " + q.String()
		}
		return ""
	})
	back := false
	up = func() {
		if back {
			return
		}
		back = true
		patch("true")
		if err := cluster.WaitReady(context.Background()); err != nil {
			t.Error(err)
		}
	}
	t.Cleanup(up)
	return up
}

// devices counts the cards' device nodes in a container.
func devices(t *testing.T, pod, container string) string {
	t.Helper()
	return strings.TrimSpace(shell(t, pod, container, "sh", "-c", "ls /dev | grep -c nvidia").stdout)
}

func TestAgentDown(t *testing.T) {
	create(t, pod("before", container("app", share{"gpu": "1", "gpumem": "4000"})))
	running(t, "before")
	up := agentDown(t)

	// What runs goes on under its limit. (Processes that end meanwhile stay
	// charged until the agent is back, so the exact figures come later.)
	if code := allocate(t, "before", "app", 1000*mib); code != 0 {
		t.Errorf("allocating within the share gave CUDA error %d", code)
	}
	if code := allocate(t, "before", "app", 4000*mib); code != 2 {
		t.Errorf("allocating beyond the share gave CUDA error %d, want 2", code)
	}

	// One that asks for a slot, and one that the device plugin never hears of.
	slot := pod("slot", container("app", share{"gpu": "1", "gpumem": "5000"}))
	bare := pod("bare", container("app", share{"gpumem": "6000"}))
	bare.Spec.RestartPolicy = corev1.RestartPolicyAlways
	slot.Spec.RestartPolicy = corev1.RestartPolicyAlways
	create(t, slot)
	create(t, bare)
	until := time.Now().Add(8 * time.Second)
	for time.Now().Before(until) {
		for _, name := range []string{"slot", "bare"} {
			p := get(t.Context(), t, name)
			for _, s := range p.Status.ContainerStatuses {
				if s.State.Running == nil {
					continue
				}
				if n := devices(t, name, "app"); n != "0" {
					t.Fatalf("%s runs with %s device nodes while the agent is down", name, n)
				}
			}
		}
		time.Sleep(500 * time.Millisecond)
	}
	up()
	for name, limit := range map[string]int64{"before": 4000, "slot": 5000, "bare": 6000} {
		limited(t, name, limit)
	}
}

// limited waits until the container runs under its limit.
func limited(t *testing.T, name string, limitMiB int64) {
	t.Helper()
	eventually(t, "pod "+name+" to run under its limit", func(ctx context.Context) string {
		p := get(ctx, t, name)
		for _, s := range p.Status.ContainerStatuses {
			if s.State.Running == nil {
				return fmt.Sprintf("its container is %+v; %s", s.State, unscheduled(p))
			}
			// Exec into a container that is just being replaced may fail.
			if r := shell(t, name, "app", "sh", "-c", "ls /usr/lib/carve/limits"); r.code != 0 {
				return "no limits yet: " + r.stderr
			}
			return ""
		}
		return "no container yet; " + unscheduled(p)
	})
	wantShare(t, name, "app", limitMiB)
}

func TestRuntimeRestart(t *testing.T) {
	create(t, pod("holder", container("app", share{"gpu": "1", "gpumem": "4000"})))
	running(t, "holder")
	if err := cluster.Lab.Kill(t.Context(), "containerd"); err != nil {
		t.Fatal(err)
	}
	if err := cluster.Lab.StartComponent(t.Context(), "containerd"); err != nil {
		t.Fatal(err)
	}
	create(t, pod("next", container("app", share{"gpu": "1", "gpumem": "5000"})))
	running(t, "next")
	wantShare(t, "next", "app", 5000)
	wantShare(t, "holder", "app", 4000)
}

func TestKubeletRestart(t *testing.T) {
	create(t, pod("holder", container("app", share{"gpu": "1", "gpumem": "4000"})))
	uid := running(t, "holder").UID
	if err := cluster.Lab.Restart(t.Context(), "kubelet"); err != nil {
		t.Fatal(err)
	}
	// Until the plugin has registered with the new kubelet, that one rejects
	// pods for good, and their controller makes new ones: so does this test.
	next := pod("next", container("app", share{"gpu": "1", "gpumem": "5000"}))
	create(t, next)
	rejected := 0
	eventually(t, "a pod to run after the kubelet's restart", func(ctx context.Context) string {
		p := get(ctx, t, "next")
		switch p.Status.Phase {
		case corev1.PodRunning:
			return ""
		case corev1.PodFailed:
			if rejected++; rejected > 3 {
				t.Fatalf("rejected again and again: %s %s", p.Status.Reason, p.Status.Message)
			}
			remove(t, "next")
			create(t, next)
		}
		return "its phase is " + string(p.Status.Phase)
	})
	t.Logf("rejected %d times before the plugin was registered again", rejected)
	wantShare(t, "next", "app", 5000)
	if p := running(t, "holder"); p.UID != uid {
		t.Error("the running pod was replaced")
	}
	wantShare(t, "holder", "app", 4000)
	if err := cluster.WaitReady(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func TestExtenderRestart(t *testing.T) {
	create(t, pod("holder", container("app", share{"gpumem": "60000"})))
	running(t, "holder")
	create(t, pod("holder-2", container("app", share{"gpumem": "60000"})))
	running(t, "holder-2")
	if err := cluster.Client.CoreV1().Pods(api.Namespace).DeleteCollection(t.Context(), metav1.DeleteOptions{}, metav1.ListOptions{LabelSelector: "app.kubernetes.io/name=carve-extender"}); err != nil {
		t.Fatal(err)
	}
	// The new one knows what is taken.
	create(t, pod("fits", container("app", share{"gpumem": "20000"})))
	create(t, pod("not", container("app", share{"gpumem": "50000"})))
	running(t, "fits")
	wantPending(t, "not", "50000", "60000")
}
