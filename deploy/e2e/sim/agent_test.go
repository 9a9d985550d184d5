package sim

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/v1alpha1"
)

// granted is a pod with an init container, a sidecar and a container that hold
// so many MiB of one card; 0 for none, less for the whole card.
func granted(t *testing.T, uid, node, card string, init, side, app int64) *corev1.Pod {
	t.Helper()
	always := corev1.ContainerRestartPolicyAlways
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: uid, UID: types.UID(uid)},
		Spec: corev1.PodSpec{NodeName: node,
			InitContainers: []corev1.Container{{Name: "init"}, {Name: "side", RestartPolicy: &always}},
			Containers:     []corev1.Container{{Name: "app"}}},
	}
	g := api.Grant{Version: api.GrantVersion, UID: uid, Node: node, Generation: 1, Containers: map[string][]api.CardGrant{}}
	for name, mib := range map[string]int64{"init": init, "side": side, "app": app} {
		switch {
		case mib < 0:
			g.Containers[name] = []api.CardGrant{{Card: card, Mode: api.ModeExclusive}}
		case mib > 0:
			g.Containers[name] = []api.CardGrant{{Card: card, MemMiB: mib, Mode: api.ModeVGPU}}
		}
	}
	text, err := g.Encode()
	if err != nil {
		t.Fatal(err)
	}
	p.Annotations = map[string]string{api.AnnotationGrant: text}
	return p
}

func TestANodeTakesWhatItsCardHoldsAndNoMore(t *testing.T) {
	n := newNode(Node{Name: "n", Cards: Same(2, Model{Name: "card", PhysicalMiB: 10000})}, 0)
	one, two := CardUUID("n", 0), CardUUID("n", 1)
	for _, c := range []struct {
		what, refusal string
		pod           *corev1.Pod
	}{
		{"a share", "", granted(t, "a", "n", one, 0, 0, 6000)},
		{"the same again", "", granted(t, "a", "n", one, 0, 0, 6000)},
		{"an init container that needs what the others do", "", granted(t, "b", "n", one, 4000, 1000, 3000)},
		{"one MiB more than there is", "granted are 10001", granted(t, "c", "n", one, 0, 0, 1)},
		{"a whole card", "", granted(t, "d", "n", two, 0, 0, -1)},
		{"a share of a card that is whole", "granted whole", granted(t, "e", "n", two, 0, 0, 1)},
		{"a card of another node", "no card", granted(t, "f", "n", "GPU-x", 0, 0, 1)},
		{"another node's grant", "node m", granted(t, "g", "m", one, 0, 0, 1)},
	} {
		err := n.take(c.pod)
		if (err == nil) != (c.refusal == "") || err != nil && !strings.Contains(err.Error(), c.refusal) {
			t.Errorf("%s: %v, want %q", c.what, err, c.refusal)
		}
	}
	n.mu.Lock()
	s := n.status()
	n.mu.Unlock()
	if s.Summary != (v1alpha1.Summary{Cards: 2, Slices: 5, MemoryMiB: 20000, GrantedMiB: 20000}) {
		t.Errorf("the report says %+v", s.Summary)
	}
	n.activate("b")
	n.drop("a")
	n.mu.Lock()
	s = n.status()
	n.mu.Unlock()
	// b's init container has ended.
	if s.Summary.Slices != 3 || s.Cards[0].Slices[0].Container != "app" || s.Cards[0].Slices[0].State != v1alpha1.Active {
		t.Errorf("the report says %+v of %+v", s.Summary, s.Cards[0].Slices)
	}
	if err := n.take(granted(t, "h", "n", one, 0, 0, 6000)); err != nil {
		t.Errorf("what was dropped isn't free: %v", err)
	}
}

// The software GPU and the simulated nodes are to have the same cards.
func TestModelsHaveWhatCanBeHandedOut(t *testing.T) {
	for key, m := range Models {
		if m.MemoryMiB() <= 0 || m.MemoryMiB() >= m.PhysicalMiB || m.Name == "" {
			t.Errorf("%s: %+v", key, m)
		}
	}
}
