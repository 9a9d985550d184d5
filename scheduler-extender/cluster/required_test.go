package cluster

import (
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/carve-gpu/carve/api"
)

func TestAPodsOwnRequiredPluginsStay(t *testing.T) {
	for name, c := range map[string]struct {
		own, want string
		ok        bool
	}{
		"none":                   {"", `["carve"]`, true},
		"one of its own":         {`["topology"]`, `["topology","carve"]`, true},
		"in block form":          {"- topology\n- \"other\"\n", `["topology","other","carve"]`, true},
		"carve itself":           {`[carve]`, `["carve"]`, true},
		"one that can't be read": {`{"a": 1}`, "", false},
	} {
		got, ok := requireHook(c.own)
		if ok != c.ok || ok && got != c.want {
			t.Errorf("%s: %q, %v, want %q, %v", name, got, ok, c.want, c.ok)
		}
	}
	p := gpuPod("a")
	p.Annotations[api.AnnotationRequiredPlugins] = "[topology]"
	kept, err := trimPod(p)
	if err != nil {
		t.Fatal(err)
	}
	if got := kept.(*corev1.Pod).Annotations[api.AnnotationRequiredPlugins]; got != "[topology]" {
		t.Errorf("the informer keeps %q", got)
	}
}
