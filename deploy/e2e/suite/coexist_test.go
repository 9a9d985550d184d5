package suite

import (
	"context"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/carve-gpu/carve/api"
)

// manage sets or takes away the node's label.
func manage(t *testing.T, value any) {
	t.Helper()
	text := "null"
	if value != nil {
		text = fmt.Sprintf("%q", value)
	}
	body := fmt.Appendf(nil, `{"metadata":{"labels":{%q:%s}}}`, api.LabelManaged, text)
	if _, err := cluster.Client.CoreV1().Nodes().Patch(context.Background(), "node1", types.MergePatchType, body, metav1.PatchOptions{}); err != nil {
		t.Fatalf("label the node: %v", err)
	}
}

// TestNodeIsGivenUpAndTakenBack removes the label from a node with pods of ours
// on it and puts it back: they keep their limits and stay counted until they
// end, and no others come.
func TestNodeIsGivenUpAndTakenBack(t *testing.T) {
	create(t, pod("holder", container("app", share{"gpu": "1", "gpumem": "60000"})))
	create(t, pod("other", container("app", share{"gpu": "1", "gpumem": "60000"})))
	running(t, "holder")
	running(t, "other")
	manage(t, nil)
	back := false
	t.Cleanup(func() {
		if !back {
			manage(t, "true")
			if err := cluster.WaitReady(context.Background()); err != nil {
				t.Error(err)
			}
		}
	})
	eventually(t, "the agent to leave, and its slots", func(ctx context.Context) string {
		pods, err := cluster.AgentPods(ctx)
		if err != nil {
			return err.Error()
		}
		if len(pods) > 0 {
			return "its pod is there"
		}
		n, err := cluster.Client.CoreV1().Nodes().Get(ctx, "node1", metav1.GetOptions{})
		if err != nil {
			return err.Error()
		}
		if q := n.Status.Allocatable[api.ResourceGPU]; !q.IsZero() {
			return "the node offers " + q.String() + " slots"
		}
		return ""
	})
	// Neither a share, nor a whole card, nor one by memory alone.
	for name, s := range map[string]share{"new-share": {"gpu": "1", "gpumem": "1000"}, "new-memory": {"gpumem": "1000"}, "new-whole": {"gpu": "1"}} {
		create(t, pod(name, container("app", s)))
	}
	// The kubelet counts no slots any more, so kube-scheduler doesn't come to ask
	// carve; explain knows more.
	for _, name := range []string{"new-share", "new-memory", "new-whole"} {
		eventually(t, "pod "+name+" to have been looked at", func(ctx context.Context) string {
			if unscheduled(get(ctx, t, name)) == "" {
				return "no reason yet"
			}
			return ""
		})
	}
	if out, err := cluster.Carve(t.Context(), "explain", "pod", "new-memory", "-n", ns); err != nil || !strings.Contains(string(out), api.LabelManaged+"=true") {
		t.Errorf("explain says (%v):\n%s", err, out)
	}
	// Those that run go on under their limits.
	for _, name := range []string{"holder", "other"} {
		if code := allocate(t, name, "app", 1000*mib); code != 0 {
			t.Errorf("%s: allocating within the share gave CUDA error %d", name, code)
		}
		if code := allocate(t, name, "app", 61000*mib); code != 2 {
			t.Errorf("%s: allocating beyond the share gave CUDA error %d, want 2", name, code)
		}
	}
	for _, name := range []string{"new-share", "new-memory", "new-whole"} {
		if p := get(t.Context(), t, name); p.Spec.NodeName != "" {
			t.Errorf("pod %s went to the node that was given up", name)
		}
		remove(t, name)
	}
	// One ends meanwhile.
	if err := cluster.Client.CoreV1().Pods(ns).Delete(t.Context(), "other", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}

	manage(t, "true")
	if err := serving(t.Context()); err != nil {
		t.Fatal(err)
	}
	back = true
	wantShare(t, "holder", "app", 60000)
	// The one that runs is counted, the one that ended isn't.
	create(t, pod("fits", container("app", share{"gpu": "1", "gpumem": "70000"})))
	create(t, pod("not", container("app", share{"gpu": "1", "gpumem": "30000"})))
	running(t, "fits")
	wantPending(t, "not", "30000", "default/holder")
	remove(t, "not")
	agree(t)
}

// TestRuntimeWithoutNRI restarts the runtime with NRI switched off, as
// containerd 1.7 ships it: the node takes no pods, doctor says why and how to
// mend it, and after that all is well.
func TestRuntimeWithoutNRI(t *testing.T) {
	create(t, pod("holder", container("app", share{"gpu": "1", "gpumem": "4000"})))
	running(t, "holder")
	if err := cluster.Lab.UseNRI(t.Context(), false); err != nil {
		t.Fatal(err)
	}
	on := false
	t.Cleanup(func() {
		if !on {
			if err := cluster.Lab.UseNRI(context.Background(), true); err != nil {
				t.Error(err)
			}
		}
	})
	eventually(t, "the agent to say that it can't serve", func(ctx context.Context) string {
		pods, err := cluster.AgentPods(ctx)
		if err != nil {
			return err.Error()
		}
		for _, p := range pods {
			for _, c := range p.Status.Conditions {
				if c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue {
					return "its pod is Ready"
				}
			}
		}
		report, err := cluster.Nodes.Get(ctx, "node1")
		if err != nil {
			return err.Error()
		}
		if report.Status.HookConnectedSince != nil {
			return "its report says that the hook is connected"
		}
		return ""
	})
	create(t, pod("slot", container("app", share{"gpu": "1", "gpumem": "5000"})))
	create(t, pod("memory", container("app", share{"gpumem": "6000"})))
	for _, name := range []string{"slot", "memory"} {
		eventually(t, "pod "+name+" to be refused with a reason", func(ctx context.Context) string {
			p := get(ctx, t, name)
			if p.Spec.NodeName != "" {
				t.Fatalf("pod %s was bound to a node without NRI", name)
			}
			if unscheduled(p) == "" {
				return "no reason yet"
			}
			return ""
		})
	}
	// Through the agent's socket, and without an agent.
	for name, args := range map[string][]string{
		"by the agent":  nil,
		"without agent": {"--socket", "/run/none.sock", "--driver-root", "/var/lib/softgpu"},
	} {
		found := false
		for _, f := range diagnose(t, append([]string{"--node"}, args...)) {
			if f.Check != "nri" {
				continue
			}
			found = true
			if f.Level != api.LevelFail || !strings.Contains(f.Where, "containerd.toml") || !strings.Contains(f.Do, "disable = false") || !strings.Contains(f.Do, "restart containerd") {
				t.Errorf("%s: %+v", name, f)
			}
		}
		if !found {
			t.Errorf("%s: doctor says nothing of NRI", name)
		}
	}
	found := false
	for _, f := range diagnose(t, nil) {
		found = found || f.Check == "node" && f.Level == api.LevelFail && strings.Contains(f.Where, "node1")
	}
	if !found {
		t.Error("doctor of the cluster doesn't name the node")
	}
	// What runs goes on under its limit.
	if code := allocate(t, "holder", "app", 4000*mib); code != 2 {
		t.Errorf("allocating beyond the share gave CUDA error %d, want 2", code)
	}

	if err := cluster.Lab.UseNRI(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	on = true
	for name, limit := range map[string]int64{"slot": 5000, "memory": 6000, "holder": 4000} {
		running(t, name)
		wantShare(t, name, "app", limit)
	}
	if err := serving(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, f := range diagnose(t, []string{"--node"}) {
		if f.Level == api.LevelFail {
			t.Errorf("after the mend: %+v", f)
		}
	}
	agree(t)
}

// TestImageThatWantsEveryCard: node-24. A container whose environment names all
// cards and that asks for none sees none, and its pod says so.
func TestImageThatWantsEveryCard(t *testing.T) {
	c := container("app", nil)
	c.Env = []corev1.EnvVar{{Name: "NVIDIA_VISIBLE_DEVICES", Value: "all"}, {Name: "NVIDIA_DRIVER_CAPABILITIES", Value: "all"}}
	create(t, pod("greedy", c))
	uid := running(t, "greedy").UID
	if n := devices(t, "greedy", "app"); n != "0" {
		t.Errorf("it sees %s device nodes", n)
	}
	if r := shell(t, "greedy", "app", "sh", "-c", "echo $NVIDIA_VISIBLE_DEVICES"); strings.TrimSpace(r.stdout) != "void" {
		t.Errorf("it is told of the cards %q", r.stdout)
	}
	eventually(t, "an event on the pod", func(ctx context.Context) string {
		l, err := cluster.Client.CoreV1().Events(ns).List(ctx, metav1.ListOptions{FieldSelector: "involvedObject.uid=" + string(uid)})
		if err != nil {
			return err.Error()
		}
		for _, e := range l.Items {
			if e.Reason == "CardsWithheld" && strings.Contains(e.Message, "NVIDIA_VISIBLE_DEVICES") {
				return ""
			}
		}
		return fmt.Sprintf("it has %d events, none of this", len(l.Items))
	})
}
