package explain

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/v1alpha1"
)

// A node whose agent overlooks what was granted on memory shows as one that differs.
func TestPoliciesOnMemoryThatAreNotInForce(t *testing.T) {
	for name, c := range map[string]struct {
		granted  api.CardGrant
		reported v1alpha1.Slice
		want     string
	}{
		"none":                            {api.CardGrant{}, v1alpha1.Slice{}, ""},
		"both":                            {api.CardGrant{Managed: api.ManagedCount, Oversell: api.OversellHost}, v1alpha1.Slice{Managed: "count", Oversell: "host"}, ""},
		"an agent that oversells nothing": {api.CardGrant{Oversell: api.OversellHost}, v1alpha1.Slice{}, "in force is managed-memory: charge, granted is managed-memory: charge, oversell: host"},
		"one that forbids nothing":        {api.CardGrant{Managed: api.ManagedForbid}, v1alpha1.Slice{}, "in force is managed-memory: charge, granted is managed-memory: forbid"},
	} {
		p := &corev1.Pod{Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "app"}}}}
		p.UID = "u"
		c.granted.Card, c.granted.MemMiB, c.granted.Mode = "GPU-a", 1000, api.ModeVGPU
		c.reported.PodUID, c.reported.Container, c.reported.MemMiB, c.reported.Mode, c.reported.Generation = "u", "app", 1000, "vgpu", 1
		report := &v1alpha1.GPUNode{Status: v1alpha1.GPUNodeStatus{Cards: []v1alpha1.Card{{UUID: "GPU-a", Health: v1alpha1.Health{State: v1alpha1.Healthy}, Slices: []v1alpha1.Slice{c.reported}}}}}
		got := slicesOf(p, api.Grant{Generation: 1, Containers: map[string][]api.CardGrant{"app": {c.granted}}}, report)
		if len(got) != 1 || (got[0].Drift == "") != (c.want == "") || !strings.HasPrefix(got[0].Drift, c.want) {
			t.Errorf("%s: %+v, want %q", name, got, c.want)
		}
	}
}

// What is said of a pod's limits is what holds on its weakest card.
func TestWhatHoldsAPodsLimits(t *testing.T) {
	slice := func(mode api.Mode, layers ...string) Slice {
		return Slice{Container: "app", Mode: string(mode), Layers: layers}
	}
	in := func(container string, s Slice) Slice { s.Container = container; return s }
	for name, c := range map[string]struct {
		slices []Slice
		want   string
	}{
		"nobody has said":        {[]Slice{slice(api.ModeVGPU)}, ""},
		"a whole card":           {[]Slice{slice(api.ModeExclusive, "library")}, ""},
		"the library":            {[]Slice{slice(api.ModeVGPU, "library")}, "advisory"},
		"the kernel":             {[]Slice{slice(api.ModeVGPU, "dmem", "library")}, "held by dmem beside"},
		"on one of two cards":    {[]Slice{slice(api.ModeVGPU, "dmem", "library"), slice(api.ModeVGPU, "library")}, "advisory"},
		"the library and MPS":    {[]Slice{slice(api.ModeMPS, "library")}, "advisory, held by the library, and once more by MPS: " + api.AdvisoryMPSMeans},
		"MPS beside the kernel":  {[]Slice{slice(api.ModeMPS, "dmem", "library")}, "advisory, held by the library, and once more by MPS: "},
		"a slice of time":        {[]Slice{slice(api.ModeTimeslice, "library")}, "none: "},
		"two layers on two":      {[]Slice{slice(api.ModeVGPU, "dmem", "library"), slice(api.ModeVGPU, "guard", "library")}, "held by dmem, guard beside"},
		"a whole card beside it": {[]Slice{slice(api.ModeExclusive, "library"), slice(api.ModeVGPU, "dmem", "library")}, "held by dmem beside"},
		// Of containers that are held otherwise each is said.
		"a slice of time beside a share":      {[]Slice{slice(api.ModeVGPU, "dmem", "library"), in("b", slice(api.ModeTimeslice, "library"))}, "app: held by dmem beside the library, whatever a program does; b: none: in mode timeslice"},
		"two slices of time":                  {[]Slice{slice(api.ModeTimeslice, "library"), in("b", slice(api.ModeTimeslice, "library"))}, "none: in mode timeslice"},
		"a whole card of another container's": {[]Slice{in("b", slice(api.ModeExclusive, "library")), slice(api.ModeTimeslice, "library")}, "app: none: in mode timeslice"},
	} {
		got := limits(c.slices)
		if (got == "") != (c.want == "") || !strings.HasPrefix(got, c.want) {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
		if c.want == "advisory" && !strings.Contains(got, api.AdvisoryMeans) {
			t.Errorf("%s: %q doesn't say what that means", name, got)
		}
	}
}

// Who asked for cards alone and got replicas of them isn't said to have asked for whole ones.
func TestAReplicaIsNoWholeCard(t *testing.T) {
	request := api.Request{Containers: []api.ContainerRequest{{Name: "one", Cards: 1, Whole: true}, {Name: "two", Cards: 2, Whole: true}, {Name: "whole", Cards: 1, Whole: true}, {Name: "all", Cards: 1, Whole: true}}}
	r := Report{Asks: asks(request)}
	replica := api.CardGrant{Card: "GPU-a", MemMiB: 20000, Cores: 25, Mode: api.ModeTimeslice}
	r.replicas(request, api.Grant{Containers: map[string][]api.CardGrant{"one": {replica}, "two": {replica, replica}, "whole": {{Card: "GPU-b", Mode: api.ModeExclusive}}, "all": {{Card: "GPU-c", MemMiB: 80000, Mode: api.ModeVGPU}}}})
	for i, want := range []string{"1 replica of a card", "2 replicas of cards", "1 whole card", "1 whole card"} {
		if r.Asks[i].Text != want {
			t.Errorf("%q, want %q", r.Asks[i].Text, want)
		}
	}
}
