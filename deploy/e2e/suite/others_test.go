package suite

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"strings"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/carve-gpu/carve/api"
)

// foreign adds a node whose cards somebody else hands out, as objects: a Node
// that stays Ready, with what its device plugin advertises. Nothing runs on it.
func foreign(t *testing.T, name string, labels, annotations map[string]string, offers corev1.ResourceList) {
	t.Helper()
	ctx := t.Context()
	labels = maps.Clone(labels)
	labels[corev1.LabelHostname] = name
	n, err := cluster.Client.CoreV1().Nodes().Create(ctx, &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: name, Labels: labels, Annotations: annotations},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	beat, stop := context.WithCancel(context.Background())
	done := make(chan struct{})
	t.Cleanup(func() {
		stop()
		<-done
		if err := cluster.Client.CoreV1().Nodes().Delete(context.Background(), name, metav1.DeleteOptions{}); err != nil {
			t.Errorf("delete node %s: %v", name, err)
		}
	})
	go func() {
		defer close(done)
		keepLease(beat, n)
	}()
	capacity := corev1.ResourceList{
		corev1.ResourceCPU: resource.MustParse("8"), corev1.ResourceMemory: resource.MustParse("32Gi"), corev1.ResourcePods: resource.MustParse("110"),
	}
	maps.Copy(capacity, offers)
	status, err := json.Marshal(map[string]any{"status": corev1.NodeStatus{
		Capacity: capacity, Allocatable: capacity,
		Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue, Reason: "Test", LastHeartbeatTime: metav1.Now(), LastTransitionTime: metav1.Now()}},
	}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := cluster.Client.CoreV1().Nodes().Patch(ctx, name, types.MergePatchType, status, metav1.PatchOptions{}, "status"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "node "+name+" to take pods", func(ctx context.Context) string {
		n, err := cluster.Client.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return err.Error()
		}
		if len(n.Spec.Taints) > 0 {
			return fmt.Sprintf("taints %v", n.Spec.Taints)
		}
		return ""
	})
}

// keepLease renews the node's lease, by which the controllers take it for alive.
func keepLease(ctx context.Context, n *corev1.Node) {
	leases := cluster.Client.CoordinationV1().Leases("kube-node-lease")
	seconds := int32(40)
	for {
		now := metav1.NewMicroTime(time.Now())
		lease := &coordinationv1.Lease{
			ObjectMeta: metav1.ObjectMeta{Name: n.Name, OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: n.Name, UID: n.UID}}},
			Spec:       coordinationv1.LeaseSpec{HolderIdentity: &n.Name, LeaseDurationSeconds: &seconds, RenewTime: &now},
		}
		if _, err := leases.Create(ctx, lease, metav1.CreateOptions{}); apierrors.IsAlreadyExists(err) {
			if have, err := leases.Get(ctx, n.Name, metav1.GetOptions{}); err == nil {
				have.Spec = lease.Spec
				_, _ = leases.Update(ctx, have, metav1.UpdateOptions{}) // renewed again soon
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(5 * time.Second):
		}
	}
}

// pinned makes a pod stay on a node.
func pinned(node string, p *corev1.Pod) *corev1.Pod {
	p.Spec.NodeSelector = map[string]string{corev1.LabelHostname: node}
	return p
}

// ours lists what carve has written of a pod: its annotations and its name
// among the managers of fields.
func ours(p *corev1.Pod) []string {
	var out []string
	for k := range p.Annotations {
		if strings.HasPrefix(k, "carve.dev/") || strings.Contains(k, "noderesource.dev") {
			out = append(out, k)
		}
	}
	for _, m := range p.ManagedFields {
		if strings.HasPrefix(m.Manager, "carve") {
			out = append(out, "fields of "+m.Manager)
		}
	}
	return out
}

// TestNodesOfOthers keeps carve beside HAMi and NVIDIA's plugin in one cluster:
// whole cards are bound on their nodes plainly, shares never go there, HAMi's
// pods are left alone, and none of that is in the ledger.
func TestNodesOfOthers(t *testing.T) {
	before, err := seenLedger(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	foreign(t, "hami1", map[string]string{"gpu": "on"}, map[string]string{
		"hami.io/node-nvidia-register": "GPU-00000000-0000-0000-0000-0000000000aa,10,81920,100,NVIDIA-A100-SXM4-80GB,0,true,0,hami-core:",
		"hami.io/node-handshake":       "Requesting_2026-11-30 12:00:00",
	}, corev1.ResourceList{api.ResourceGPU: resource.MustParse("10"), api.ResourceMemory: resource.MustParse("81920")})
	foreign(t, "nvidia1", map[string]string{"nvidia.com/gpu.present": "true", "nvidia.com/gpu.product": "NVIDIA-A100-SXM4-80GB"}, nil,
		corev1.ResourceList{api.ResourceGPU: resource.MustParse("8")})

	t.Run("whole cards are bound plainly", func(t *testing.T) {
		for _, node := range []string{"hami1", "nvidia1"} {
			name := "whole-" + node
			create(t, pinned(node, pod(name, container("app", share{"gpu": "2"}))))
			eventually(t, "pod "+name+" to be bound", func(ctx context.Context) string {
				p := get(ctx, t, name)
				if p.Spec.NodeName == "" {
					return "not yet; " + unscheduled(p)
				}
				if w := ours(p); p.Spec.NodeName != node || w != nil {
					t.Fatalf("it is on %s and carries %v", p.Spec.NodeName, w)
				}
				return ""
			})
		}
	})
	t.Run("shares never go there", func(t *testing.T) {
		for _, node := range []string{"hami1", "nvidia1"} {
			create(t, pinned(node, pod("share-"+node, container("app", share{"gpu": "1", "gpumem": "3000"}))))
			create(t, pinned(node, pod("memory-"+node, container("app", share{"gpumem": "3000"}))))
		}
		// More cards than the managed node has, fewer than the others'.
		create(t, pod("wide", container("app", share{"gpu": "3", "gpumem": "1000"})))
		create(t, pod("free", container("app", share{"gpumem": "5000"})))
		if p := running(t, "free"); p.Spec.NodeName != "node1" {
			t.Errorf("a share is on %s", p.Spec.NodeName)
		}
		wantShare(t, "free", "app", 5000)
		for _, name := range []string{"share-hami1", "share-nvidia1", "memory-hami1", "memory-nvidia1"} {
			wantPending(t, name, api.LabelManaged+"=true")
		}
		wantPending(t, "wide", "3")
	})
	t.Run("HAMi's pods are HAMi's", func(t *testing.T) {
		mark := map[string]string{
			"hami.io/vgpu-node": "hami1", "hami.io/bind-phase": "success", "hami.io/bind-time": "1796040000", "hami.io/vgpu-time": "1796040000",
			"hami.io/vgpu-devices-allocated":   "GPU-00000000-0000-0000-0000-0000000000aa,NVIDIA,3000,30:;",
			"hami.io/vgpu-devices-to-allocate": ";", "nvidia.com/use-gputype": "A100",
		}
		theirs := func(name string) *corev1.Pod {
			p := pod(name, container("app", share{"gpu": "1", "gpumem": "3000", "gpucores": "30"}))
			p.Spec.SchedulerName, p.Annotations = "hami-scheduler", maps.Clone(mark)
			return p
		}
		bound := create(t, theirs("hami-bound"))
		create(t, theirs("hami-waiting"))
		if err := cluster.Client.CoreV1().Pods(ns).Bind(t.Context(), &corev1.Binding{
			ObjectMeta: metav1.ObjectMeta{Name: bound.Name, UID: bound.UID}, Target: corev1.ObjectReference{Kind: "Node", Name: "hami1"},
		}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		p := get(t.Context(), t, bound.Name)
		p.Status.Phase = corev1.PodRunning
		if _, err := cluster.Client.CoreV1().Pods(ns).UpdateStatus(t.Context(), p, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		// A pod of carve's comes and goes after them, so that the extender has
		// seen theirs, and has woken whoever it would wake.
		create(t, pod("later", container("app", share{"gpumem": "70000"})))
		running(t, "later")
		remove(t, "later")
		for _, name := range []string{"hami-bound", "hami-waiting"} {
			p := get(t.Context(), t, name)
			if w := ours(p); w != nil {
				t.Errorf("pod %s was touched: %v", name, w)
			}
			if !maps.Equal(p.Annotations, mark) || p.Spec.SchedulerName != "hami-scheduler" {
				t.Errorf("pod %s changed: scheduler %s, %v", name, p.Spec.SchedulerName, p.Annotations)
			}
		}
		if p := get(t.Context(), t, "hami-waiting"); p.Spec.NodeName != "" {
			t.Errorf("somebody bound HAMi's pod to %s", p.Spec.NodeName)
		}
	})
	for _, name := range []string{"hami1", "nvidia1"} {
		if _, err := cluster.Nodes.Get(t.Context(), name); !apierrors.IsNotFound(err) {
			t.Errorf("node %s has a GPUNode: %v", name, err)
		}
	}
	// What is theirs is in no sum of ours.
	eventually(t, "the ledger to be as before", func(ctx context.Context) string {
		now, err := seenLedger(ctx)
		if err != nil {
			return err.Error()
		}
		if now != before {
			return fmt.Sprintf("it has %+v, before it had %+v", now, before)
		}
		return ""
	})
	// And doctor has nothing to say of them.
	for _, f := range diagnose(t, nil) {
		if f.Level != api.LevelOK && (strings.Contains(f.Where, "hami1") || strings.Contains(f.Where, "nvidia1")) {
			t.Errorf("%+v", f)
		}
	}
	agree(t)
}

// TestDoctor: a sound installation has no failure, whoever looks; and a second
// device plugin on the node is one.
func TestDoctor(t *testing.T) {
	create(t, pod("asked", container("app", share{"gpumem": "1000"})))
	running(t, "asked")
	if err := serving(t.Context()); err != nil {
		t.Fatal(err)
	}
	known := map[string]bool{}
	for _, args := range [][]string{nil, {"--node"}, {"--scheduler-config", "/etc/kubernetes/scheduler.yaml"}} {
		for _, f := range diagnose(t, args) {
			known[f.Check] = true
			if f.Level == api.LevelFail {
				t.Errorf("carve doctor %v: %+v", args, f)
			}
			if f.Level == api.LevelWarn && f.Check != "privileged" && f.Check != "software-gpu" && f.Check != "node" && f.Check != "persistence" && f.Check != "limits" {
				t.Errorf("carve doctor %v: %+v", args, f)
			}
		}
	}
	for _, want := range []string{"installed", "extender", "certificates", "scheduler-calls", "scheduler-entry", "double-serving", "nri", "driver", "run-dir", "journal", "front-library", "clock", "agent", "limits"} {
		if !known[want] {
			t.Errorf("nothing was said of %s", want)
		}
	}
	// As a person on the node's own pod would.
	agents, err := cluster.AgentPods(t.Context())
	if err != nil || len(agents) == 0 {
		t.Fatalf("%d agents, %v", len(agents), err)
	}
	out, err := cluster.Lab.Kubectl(t.Context(), "-n", api.Namespace, "exec", agents[0].Name, "--", "carve", "doctor", "--node")
	if err != nil || !strings.Contains(string(out), "0 fail") {
		t.Errorf("in the agent's pod: %v: %s", err, out)
	}

	second := pod("nvidia-device-plugin-daemonset-x", container("nvidia-device-plugin-ctr", nil))
	second.Spec.NodeSelector = map[string]string{corev1.LabelHostname: "node1"}
	second.Spec.Volumes = []corev1.Volume{{Name: "plugins", VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: "/var/lib/kubelet/device-plugins"}}}}
	second.Spec.Containers[0].VolumeMounts = []corev1.VolumeMount{{Name: "plugins", MountPath: "/var/lib/kubelet/device-plugins"}}
	create(t, second)
	running(t, second.Name)
	found := false
	for _, f := range diagnose(t, nil) {
		found = found || f.Check == "double-serving" && f.Level == api.LevelFail && strings.Contains(f.What, second.Name)
	}
	if !found {
		t.Error("a second device plugin is no failure")
	}
}
