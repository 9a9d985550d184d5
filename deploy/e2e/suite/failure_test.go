package suite

import (
	"context"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/carve-gpu/carve/api"
)

// A pod that asks for a slot, and one that the device plugin never hears of,
// created right after the agent's pod is deleted: neither ends Failed, neither
// gets a card without its limit, and both run when the agent is back.
func TestAgentDown(t *testing.T) {
	create(t, pod("before", container("app", share{"gpu": "1", "gpumem": "4000"})))
	running(t, "before")
	slot := pod("slot", container("app", share{"gpu": "1", "gpumem": "5000"}))
	bare := pod("bare", container("app", share{"gpumem": "6000"}))
	pods, err := cluster.AgentPods(t.Context())
	if err != nil || len(pods) != 1 {
		t.Fatalf("%d pods of the agent, %v", len(pods), err)
	}
	up := agentAway(t)
	now := int64(0)
	if err := cluster.Client.CoreV1().Pods(api.Namespace).Delete(t.Context(), pods[0].Name, metav1.DeleteOptions{GracePeriodSeconds: &now}); err != nil && !apierrors.IsNotFound(err) {
		t.Fatal(err)
	}
	create(t, slot)
	create(t, bare)
	for _, name := range []string{"slot", "bare"} {
		waitsForAgent(t, name)
		if p := get(t.Context(), t, name); p.Spec.NodeName != "" {
			t.Errorf("pod %s is on %s", name, p.Spec.NodeName)
		}
	}
	// What runs goes on under its limit. (Processes that end meanwhile stay
	// charged until the agent is back, so the exact figures come later.)
	if code := allocate(t, "before", "app", 1000*mib); code != 0 {
		t.Errorf("allocating within the share gave CUDA error %d", code)
	}
	if code := allocate(t, "before", "app", 4000*mib); code != 2 {
		t.Errorf("allocating beyond the share gave CUDA error %d, want 2", code)
	}
	up()
	for name, limit := range map[string]int64{"before": 4000, "slot": 5000, "bare": 6000} {
		running(t, name)
		limited(t, name, limit)
	}
}

// waitsForAgent waits until a pod that isn't on a node waits for the agent and
// somebody says so: the extender, or carve explain where kube-scheduler turned the
// pod away by itself, because the kubelet had counted no slots any more.
func waitsForAgent(t *testing.T, name string) {
	t.Helper()
	eventually(t, "pod "+name+" to wait with a sentence", func(ctx context.Context) string {
		p := get(ctx, t, name)
		said := unscheduled(p)
		if p.Spec.NodeName != "" {
			return ""
		}
		if strings.Contains(said, "Insufficient "+api.ResourceGPU) {
			said = plugin(t, "explain", "pod", name, "-n", ns).stdout
		}
		if !strings.Contains(said, "carve's agent on the node is down (") || !strings.Contains(said, "new pods wait until it is back") {
			return said
		}
		return ""
	})
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

// The runtime keeps the sandbox of a pod that is gone for a while, and lists it
// to a hook that links anew. With the API server away nobody can say whether its
// pod exists; when it is back, nothing may be left of what doesn't.
func TestSandboxOfAGonePodWhileNobodyCanSay(t *testing.T) {
	create(t, pod("stays", container("app", share{"gpumem": "2000"})))
	for i := range 4 {
		create(t, pod(fmt.Sprint("went-", i), container("app", share{"gpumem": "1000"})))
	}
	running(t, "stays")
	for i := range 4 {
		running(t, fmt.Sprint("went-", i))
	}
	for i := range 4 {
		remove(t, fmt.Sprint("went-", i))
	}
	api, runtime := partByName("apiserver"), partByName("containerd")
	linked := sample(metrics(t), "carve_hook_connected_timestamp_seconds", "")
	for _, kill := range []func(context.Context) error{api.kill, runtime.kill, runtime.back} {
		if err := kill(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "the hook to be linked again", func(context.Context) string {
		if now := sample(metrics(t), "carve_hook_connected_timestamp_seconds", ""); now == linked {
			return fmt.Sprint("its link is of ", now)
		}
		return ""
	})
	if err := api.back(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := serving(t.Context()); err != nil {
		t.Fatal(err)
	}
	wantShare(t, "stays", "app", 2000)
	agree(t)
}
