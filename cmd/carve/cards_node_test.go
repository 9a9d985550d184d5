package main

import (
	"bytes"
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/v1alpha1"
)

func states(cards []cardView) string {
	var out []string
	for _, c := range cards {
		out = append(out, c.Node+": "+state(c))
	}
	return strings.Join(out, "; ")
}

// A dead agent's report says that all is well; the Node says more.
func TestCardsOfADeadAgentAreShownAsSuch(t *testing.T) {
	node := func(name string, tainted bool) *corev1.Node {
		n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{api.LabelManaged: "true"}}}
		n.Spec.Taints = []corev1.Taint{{Key: "example.com/other", Effect: corev1.TaintEffectNoSchedule}}
		if tainted {
			n.Spec.Taints = append(n.Spec.Taints, corev1.Taint{Key: api.TaintHookDown, Effect: corev1.TaintEffectNoSchedule})
		}
		return n
	}
	for name, c := range map[string]struct {
		nodes []runtime.Object
		want  string
	}{
		"all well":              {[]runtime.Object{node("n1", false), node("n2", false)}, "n1: healthy; n1: healthy; n2: lost (it fell off the bus), hook down; n2: healthy, cordoned, hook down"},
		"the agent is gone":     {[]runtime.Object{node("n1", true), node("n2", false)}, "n1: healthy, agent down; n1: healthy, agent down; n2: lost (it fell off the bus), hook down; n2: healthy, cordoned, hook down"},
		"the hook lost its way": {[]runtime.Object{node("n1", false), node("n2", true)}, "n1: healthy; n1: healthy; n2: lost (it fell off the bus), hook down; n2: healthy, cordoned, hook down"},
		"the Node is gone":      {[]runtime.Object{node("n2", false)}, "n1: healthy, not managed; n1: healthy, not managed; n2: lost (it fell off the bus), hook down; n2: healthy, cordoned, hook down"},
	} {
		t.Run(name, func(t *testing.T) {
			managed, err := managedNodes(t.Context(), fake.NewClientset(c.nodes...), metav1.ListOptions{})
			if err != nil {
				t.Fatal(err)
			}
			cards := viewCards(gpuNodes())
			if markNodes(cards, managed); states(cards) != c.want {
				t.Errorf("got  %s\nwant %s", states(cards), c.want)
			}
		})
	}
	kube := fake.NewClientset()
	kube.PrependReactor("list", "nodes", func(clienttesting.Action) (bool, runtime.Object, error) {
		return true, nil, apierrors.NewForbidden(corev1.Resource("nodes"), "", nil)
	})
	if _, err := managedNodes(context.Background(), kube, metav1.ListOptions{}); err == nil {
		t.Error("a refusal went unnoticed")
	}
}

// A tenant who may not list Nodes gets the plain table on stdout, a note on
// stderr, and success.
func TestCardsForATenant(t *testing.T) {
	api := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		if strings.HasPrefix(r.URL.Path, "/apis/carve.dev/") {
			_ = json.NewEncoder(w).Encode(&v1alpha1.GPUNodeList{TypeMeta: metav1.TypeMeta{APIVersion: "carve.dev/v1alpha1", Kind: "GPUNodeList"}, Items: gpuNodes()})
			return
		}
		w.WriteHeader(http.StatusForbidden)
		_ = json.NewEncoder(w).Encode(metav1.Status{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}, Status: "Failure", Reason: metav1.StatusReasonForbidden, Code: http.StatusForbidden, Message: "nodes is forbidden"})
	}))
	defer api.Close()
	file := filepath.Join(t.TempDir(), "config")
	if err := os.WriteFile(file, []byte("apiVersion: v1\nkind: Config\nclusters: [{name: c, cluster: {server: '"+api.URL+"'}}]\ncontexts: [{name: c, context: {cluster: c, user: u}}]\nusers: [{name: u, user: {}}]\ncurrent-context: c\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	cmd := newCardsCommand()
	var out, errs bytes.Buffer
	cmd.SetOut(&out)
	cmd.SetErr(&errs)
	cmd.SetArgs([]string{"--kubeconfig", file})
	if err := cmd.ExecuteContext(t.Context()); err != nil {
		t.Fatal(err)
	}
	wantGolden(t, "cards.txt", out.Bytes())
	if !strings.HasPrefix(errs.String(), "note: whether the nodes' agents are up isn't shown: list Nodes: ") || !strings.Contains(errs.String(), "forbidden") {
		t.Errorf("stderr %q", errs.String())
	}
}
