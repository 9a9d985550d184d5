package suite

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/v1alpha1"
)

const sharingConfig = "carve-nvidia-config"

// setSharing writes the ConfigMap with NVIDIA's configurations, or deletes it.
func setSharing(t *testing.T, files map[string]string) {
	t.Helper()
	ctx := context.Background()
	maps := cluster.Client.CoreV1().ConfigMaps(api.Namespace)
	if files == nil {
		if err := maps.Delete(ctx, sharingConfig, metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
			t.Fatal(err)
		}
		return
	}
	m := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: sharingConfig, Namespace: api.Namespace}, Data: files}
	_, err := maps.Update(ctx, m, metav1.UpdateOptions{})
	if apierrors.IsNotFound(err) {
		_, err = maps.Create(ctx, m, metav1.CreateOptions{})
	}
	if err != nil {
		t.Fatal(err)
	}
}

// chooseSharing sets the node's label that names a configuration.
func chooseSharing(t *testing.T, name string) {
	t.Helper()
	value := "null"
	if name != "" {
		value = fmt.Sprintf("%q", name)
	}
	body := fmt.Appendf(nil, `{"metadata":{"labels":{%q:%s}}}`, api.LabelNVIDIAConfig, value)
	if _, err := cluster.Client.CoreV1().Nodes().Patch(context.Background(), cluster.Lab.Config().Node.Name, types.MergePatchType, body, metav1.PatchOptions{}); err != nil {
		t.Fatalf("label the node: %v", err)
	}
}

// reported waits until the cards' report says so of their sharing. A change of a
// ConfigMap reaches a pod when the kubelet looks at the pod, which it does within a minute
// or two, and at once when the pod changes.
func reported(t *testing.T, what string, want ...string) {
	t.Helper()
	tries := 0
	eventually(t, what, func(ctx context.Context) string {
		if tries%20 == 0 {
			pods, err := cluster.AgentPods(ctx)
			if err != nil {
				return err.Error()
			}
			for _, p := range pods {
				body := fmt.Appendf(nil, `{"metadata":{"annotations":{"example.com/look":"%d"}}}`, tries)
				if _, err := cluster.Client.CoreV1().Pods(api.Namespace).Patch(ctx, p.Name, types.MergePatchType, body, metav1.PatchOptions{}); err != nil {
					return err.Error()
				}
			}
		}
		tries++
		var is []string
		for _, c := range cards(ctx, t) {
			s := "-"
			if c.Sharing != nil {
				s = fmt.Sprintf("%d×%s", c.Sharing.Replicas, c.Sharing.Mode)
			}
			is = append(is, s)
		}
		if strings.Join(is, " ") != strings.Join(want, " ") {
			return fmt.Sprintf("the report says %v", is)
		}
		return ""
	})
}

// TestReplicasUnderMPS: NVIDIA's configuration with sharing.mps. A card alone and a share
// without a word of isolation are clients of the card's daemon, within their parts.
func TestReplicasUnderMPS(t *testing.T) {
	withMPS(t)
	both := cards(t.Context(), t)
	t.Cleanup(func() {
		setSharing(t, nil)
		chooseSharing(t, "")
		reported(t, "the configuration to be gone", "-", "-")
		eventually(t, "MPS to let go of the card", func(ctx context.Context) string {
			for _, c := range cards(ctx, t) {
				if c.MPS != nil {
					return fmt.Sprintf("card %d: %+v", c.Index, c.MPS)
				}
			}
			return ""
		})
	})
	setSharing(t, map[string]string{"config.yaml": "version: v1\nsharing: {mps: {resources: [{name: nvidia.com/gpu, devices: [0], replicas: 2}]}}"})
	reported(t, "replicas", "2×mps", "-")
	at := func(name string, s share) *corev1.Pod {
		p := pod(name, container("app", s))
		p.Annotations = map[string]string{api.AnnotationCardUUIDs: both[0].UUID}
		return p
	}
	create(t, at("replica", share{"gpu": "1"}))
	create(t, at("share", share{"gpumem": "8000"}))
	half := both[0].MemoryMiB / 2
	for name, want := range map[string]api.CardGrant{
		"replica": {Card: both[0].UUID, MemMiB: half, Cores: 50, Fixed: true, Mode: api.ModeMPS},
		"share":   {Card: both[0].UUID, MemMiB: 8000, Mode: api.ModeMPS},
	} {
		if g := grant(t, running(t, name)).Containers["app"]; len(g) != 1 || g[0] != want {
			t.Errorf("%s has %+v, want %+v", name, g, want)
		}
	}
	if is, all := multiprocessors(t, "replica"), multiprocessors(t, "share"); is*2 != all {
		t.Errorf("the replica has %d multiprocessors of %d", is, all)
	}
	if code := allocate(t, "replica", "app", uint64(half+1000)*mib); code != 2 {
		t.Errorf("allocating beyond a replica gave CUDA error %d, want 2", code)
	}
	create(t, at("third", share{"gpu": "1"}))
	wantPending(t, "third", "asked a replica; the card, in 2 replicas, takes 2 containers and has 2", "default/share (8000 MiB)")
	agree(t)
}

// slicing is a configuration with replicas by card.
func slicing(replicas map[int]int) string {
	s := "version: v1\nsharing:\n  timeSlicing:\n    resources:\n"
	for i := range 2 {
		if n := replicas[i]; n > 0 {
			s += fmt.Sprintf("    - {name: nvidia.com/gpu, devices: [%d], replicas: %d}\n", i, n)
		}
	}
	return s
}

// TestReplicasByCard: node-23. A node with NVIDIA's configuration, replicas by card: pods
// that ask for a card get replicas, one more waits with the reason, and the configuration
// changes while they run.
func TestReplicasByCard(t *testing.T) {
	both := cards(t.Context(), t)
	at := func(name string, card v1alpha1.Card, s share) *corev1.Pod {
		p := pod(name, container("app", s))
		p.Annotations = map[string]string{api.AnnotationCardUUIDs: card.UUID}
		return p
	}
	one := share{"gpu": "1"}
	t.Cleanup(func() {
		setSharing(t, nil)
		chooseSharing(t, "")
		reported(t, "the configuration to be gone", "-", "-")
	})
	// A share that is there before the configuration is.
	create(t, at("before", both[1], share{"gpumem": "8000"}))
	running(t, "before")

	files := map[string]string{"four": slicing(map[int]int{0: 4, 1: 2}), "five": slicing(map[int]int{0: 5, 1: 2}), "wrong": slicing(map[int]int{0: 1}), "first": slicing(map[int]int{0: 5})}
	setSharing(t, files)
	chooseSharing(t, "four")
	reported(t, "replicas", "4×timeslice", "2×timeslice")

	for i := range 4 {
		create(t, at(fmt.Sprint("replica-", i), both[0], one))
	}
	for i := range 4 {
		p := running(t, fmt.Sprint("replica-", i))
		want := api.CardGrant{Card: both[0].UUID, MemMiB: both[0].MemoryMiB / 4, Cores: 25, Mode: api.ModeTimeslice}
		if g := grant(t, p).Containers["app"]; len(g) != 1 || g[0] != want {
			t.Errorf("%s has %+v, want %+v", p.Name, g, want)
		}
	}
	// Nothing holds it: more than a replica is had.
	if code := allocate(t, "replica-0", "app", uint64(both[0].MemoryMiB/4+1000)*mib); code != 0 {
		t.Errorf("allocating beyond a replica gave CUDA error %d", code)
	}
	create(t, at("replica-4", both[0], one))
	wantPending(t, "replica-4", "asked a replica; the card, in 4 replicas, takes 4 containers and has 4", "default/replica-0")
	create(t, at("held", both[0], share{"gpumem": "1000"}))
	wantPending(t, "held", "gives the card in 4 replicas of mode timeslice, where nothing holds a share")
	remove(t, "held")
	// The other card is still in the mode of what was there.
	create(t, at("after", both[1], one))
	wantPending(t, "after", "asked mode timeslice, the card is in mode vgpu until its pods are gone", "default/before (8000 MiB)")
	remove(t, "before")
	running(t, "after")

	// A live change, by the label. What runs isn't touched.
	chooseSharing(t, "five")
	reported(t, "one replica more", "5×timeslice", "2×timeslice")
	// The four have a fourth each, so there is a slot for a fifth and no room.
	wantPending(t, "replica-4", fmt.Sprintf("asked %d MiB", both[0].MemoryMiB/5))
	remove(t, "replica-0")
	if g := grant(t, running(t, "replica-4")).Containers["app"]; len(g) != 1 || g[0].MemMiB != both[0].MemoryMiB/5 || g[0].Cores != 20 {
		t.Errorf("the fifth has %+v", g)
	}
	for i := 1; i < 4; i++ {
		if s := get(t.Context(), t, fmt.Sprint("replica-", i)).Status.ContainerStatuses; len(s) != 1 || s[0].State.Running == nil || s[0].RestartCount > 0 {
			t.Errorf("replica-%d: %+v", i, s)
		}
	}
	// A wrong file keeps the last good one, and is told.
	chooseSharing(t, "wrong")
	eventually(t, "an event on the node", func(ctx context.Context) string {
		all, err := cluster.Client.CoreV1().Events(metav1.NamespaceDefault).List(ctx, metav1.ListOptions{FieldSelector: "reason=SharingConfigRefused"})
		if err != nil {
			return err.Error()
		}
		for _, e := range all.Items {
			if strings.Contains(e.Message, "wrong: sharing.timeSlicing.resources[0].replicas: 1 isn't allowed") {
				return ""
			}
		}
		return fmt.Sprintf("%d events, none of it", len(all.Items))
	})
	reported(t, "the last good one", "5×timeslice", "2×timeslice")
	if found := diagnose(t, []string{"--node"}); !slices.ContainsFunc(found, func(f api.Finding) bool {
		return f.Check == "nvidia-config" && f.Level == api.LevelFail && strings.Contains(f.What, "isn't allowed")
	}) {
		t.Errorf("doctor: %+v", found)
	}
	// A change of the file itself: a card is whole again, once it is empty.
	files["wrong"] = files["first"]
	setSharing(t, files)
	reported(t, "one card whole", "5×timeslice", "-")
	create(t, at("whole", both[1], one))
	wantPending(t, "whole", "asked the whole card, which is shared", "default/after")
	for _, args := range [][]string{{"cards"}, {"cards", "--local"}} {
		if r := carve(t, args...); !strings.Contains(r.stdout, "timeslice, 1 replica and 3 shares of 5") {
			t.Errorf("carve %v:\n%s%s", args, r.stdout, r.stderr)
		}
	}
	remove(t, "after")
	if g := grant(t, running(t, "whole")).Containers["app"]; len(g) != 1 || g[0].Mode != api.ModeExclusive {
		t.Errorf("it has %+v", g)
	}
	agree(t)
}

// TestTimeslicesByPod: without a configuration a pod says so, and how much it takes.
func TestTimeslicesByPod(t *testing.T) {
	both := cards(t.Context(), t)
	sliced := func(name string, s share) *corev1.Pod {
		p := pod(name, container("app", s))
		p.Annotations = map[string]string{api.AnnotationIsolation: "timeslice", api.AnnotationCardUUIDs: both[0].UUID}
		return p
	}
	for _, name := range []string{"slice-a", "slice-b"} {
		create(t, sliced(name, share{"gpumem": "30000"}))
		if g := grant(t, running(t, name)).Containers["app"]; len(g) != 1 || g[0] != (api.CardGrant{Card: both[0].UUID, MemMiB: 30000, Mode: api.ModeTimeslice}) {
			t.Errorf("%s has %+v", name, g)
		}
	}
	create(t, sliced("plain", share{"gpu": "1"}))
	wantPending(t, "plain", "isolation timeslice needs nvidia.com/gpumem or nvidia.com/gpumem-percentage")
	p := pod("library", container("app", share{"gpumem": "1000"}))
	p.Annotations = map[string]string{api.AnnotationCardUUIDs: both[0].UUID}
	create(t, p)
	wantPending(t, "library", "asked mode vgpu, the card is in mode timeslice until its pods are gone", "default/slice-a (30000 MiB counted)")
	if out, err := cluster.Carve(t.Context(), "resize", "pod/slice-a", "-n", ns, "--gpumem", "20000"); err == nil || !strings.Contains(err.Error()+string(out), "nothing holds the program to them") {
		t.Errorf("resize: %v: %s", err, out)
	}
	if out, err := cluster.Carve(t.Context(), "explain", "pod", "slice-a", "-n", ns); err != nil || !strings.Contains(string(out), "mode timeslice") {
		t.Errorf("explain: %v: %s", err, out)
	}
	remove(t, "slice-a")
	remove(t, "slice-b")
	running(t, "library")
	agree(t)
}
