package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/v1alpha1"
)

// resizeServer is an API server with one pod, with an extender and an agent
// behind it that answer as they are told.
type resizeServer struct {
	mu        sync.Mutex
	pod       *corev1.Pod
	requests  []api.Resize
	refuse    string // the extender's message
	forbidden string // what the user may not do: patch or gpunodes
	conflicts int
	silent    bool // no extender
	behind    bool // the node hasn't reported the last grant
}

func (s *resizeServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	answer := func(code int, o any) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(code)
		_ = json.NewEncoder(w).Encode(o)
	}
	fail := func(e *apierrors.StatusError) {
		e.ErrStatus.TypeMeta = metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}
		answer(int(e.ErrStatus.Code), e.ErrStatus)
	}
	g, _ := api.DecodeGrant(s.pod.Annotations[api.AnnotationGrant])
	switch {
	case strings.Contains(r.URL.Path, "/gpunodes/"):
		if s.forbidden == "gpunodes" {
			fail(apierrors.NewForbidden(schema.GroupResource{Resource: "gpunodes"}, "n1", nil))
			return
		}
		n := v1alpha1.GPUNode{TypeMeta: metav1.TypeMeta{Kind: "GPUNode", APIVersion: "carve.dev/v1alpha1"}, ObjectMeta: metav1.ObjectMeta{Name: "n1"}}
		n.Status.Cards = []v1alpha1.Card{{UUID: "GPU-a", Slices: []v1alpha1.Slice{{PodUID: "uid-a", Container: "app", Generation: int32(g.Generation)}}}}
		if s.behind {
			n.Status.Cards[0].Slices[0].Generation--
		}
		answer(200, n)
	case r.Method == http.MethodPatch && s.forbidden == "patch":
		fail(apierrors.NewForbidden(schema.GroupResource{Resource: "pods"}, "a", nil))
	case r.Method == http.MethodPatch && s.conflicts > 0:
		s.conflicts--
		fail(apierrors.NewConflict(schema.GroupResource{Resource: "pods"}, "a", nil))
	case r.Method == http.MethodPatch:
		var p corev1.Pod
		_ = json.NewDecoder(r.Body).Decode(&p)
		ask, err := api.DecodeResize(p.Annotations[api.AnnotationResize])
		if err != nil || p.UID != s.pod.UID || p.ResourceVersion != s.pod.ResourceVersion {
			fail(apierrors.NewBadRequest("no resize, or without preconditions"))
			return
		}
		s.requests = append(s.requests, ask)
		result := api.ResizeResult{Version: 1, ID: ask.ID, Outcome: api.ResizeRefused, Generation: g.Generation, Message: s.refuse}
		if s.refuse == "" {
			g.Generation++
			for name, a := range ask.Containers {
				if a.MemMiB != nil {
					g.Containers[name][0].MemMiB = *a.MemMiB
				}
			}
			result.Outcome, result.Generation = api.ResizeGranted, g.Generation
		}
		if s.silent {
			s.pod.Annotations[api.AnnotationResize] = p.Annotations[api.AnnotationResize]
		} else {
			s.pod.Annotations[api.AnnotationGrant], _ = g.Encode()
			s.pod.Annotations[api.AnnotationResizeResult], _ = result.Encode()
		}
		answer(200, s.pod)
	case strings.HasSuffix(r.URL.Path, "/pods/a"):
		answer(200, s.pod)
	default:
		fail(apierrors.NewNotFound(schema.GroupResource{Resource: "pods"}, "b"))
	}
}

// newResizeServer starts a server and returns it with a kubeconfig for it.
func newResizeServer(t *testing.T, containers map[string][]api.CardGrant) (*resizeServer, string) {
	t.Helper()
	g, err := api.Grant{Version: 1, UID: "uid-a", Node: "n1", Generation: 3, Containers: containers}.Encode()
	if err != nil {
		t.Fatal(err)
	}
	s := &resizeServer{pod: &corev1.Pod{TypeMeta: metav1.TypeMeta{Kind: "Pod", APIVersion: "v1"},
		ObjectMeta: metav1.ObjectMeta{Name: "a", Namespace: "team", UID: "uid-a", ResourceVersion: "7", Annotations: map[string]string{api.AnnotationGrant: g}},
		Spec:       corev1.PodSpec{NodeName: "n1"}}}
	server := httptest.NewServer(s)
	t.Cleanup(server.Close)
	path := filepath.Join(t.TempDir(), "config")
	text := `{"apiVersion":"v1","kind":"Config","clusters":[{"name":"c","cluster":{"server":"` + server.URL + `"}}],"contexts":[{"name":"c","context":{"cluster":"c","namespace":"team"}}],"current-context":"c"}`
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return s, path
}

func resizeCommand(config string, args ...string) (stdout, stderr string, err error) {
	root := newRootCommand()
	var out, talk bytes.Buffer
	root.SetOut(&out)
	root.SetErr(&talk)
	root.SetArgs(append([]string{"resize", "--kubeconfig", config}, args...))
	err = root.Execute()
	return out.String(), talk.String(), err
}

var oneShare = map[string][]api.CardGrant{"app": {{Card: "GPU-a", MemMiB: 8000, Cores: 30, Mode: api.ModeVGPU}}}

func TestResizeAsksForWhatWasMeant(t *testing.T) {
	for args, want := range map[string]string{
		"pod/a --gpumem 12000":               `{"memMiB":12000}`,
		"a --gpumem +2000":                   `{"memMiB":10000}`,
		"pods/a --gpumem -1Gi":               `{"memMiB":6976}`,
		"po/a --gpumem 8Gi --gpucores 50":    `{"memMiB":8192,"cores":50}`,
		"pod/a --gpucores -30% -c app":       `{"cores":0}`,
		"pod/a --gpumem 8000 --gpucores +20": `{"cores":50}`,
		"pod/a --gpumem 12000 --wait=false":  `{"memMiB":12000}`,
		"-n team pod/a --gpumem=+1 -o json":  `{"memMiB":8001}`,
	} {
		s, config := newResizeServer(t, oneShare)
		s.conflicts = 2
		stdout, _, err := resizeCommand(config, strings.Fields(args)...)
		if err != nil || len(s.requests) != 1 {
			t.Errorf("%s: %v, %d requests", args, err, len(s.requests))
			continue
		}
		got, _ := json.Marshal(s.requests[0].Containers["app"])
		if string(got) != want {
			t.Errorf("%s: asked for %s, want %s", args, got, want)
		}
		if !strings.Contains(stdout, "team") {
			t.Errorf("%s printed %q", args, stdout)
		}
	}
	s, config := newResizeServer(t, oneShare)
	stdout, _, err := resizeCommand(config, "pod/a", "--gpumem", "12000", "-o", "json")
	var v resizeView
	if err != nil || json.Unmarshal([]byte(stdout), &v) != nil || !v.InForce || v.Outcome != api.ResizeGranted || v.Generation != 4 ||
		v.Cards[0] != (resizedCard{"GPU-a", resizeAmount{8000, 30}, resizeAmount{12000, 30}}) || v.Seconds <= 0 {
		t.Errorf("%v: %s", err, stdout)
	}
	if stdout, _, err = resizeCommand(config, "pod/a", "--gpumem", "+1"); err != nil || !strings.Contains(stdout, "12000 → 12001") || !strings.Contains(stdout, "granted") {
		t.Errorf("%v: %s", err, stdout)
	}
	// What is there already isn't asked for.
	if stdout, _, err = resizeCommand(config, "pod/a", "--gpumem", "12001"); err != nil || !strings.Contains(stdout, "unchanged") || len(s.requests) != 2 {
		t.Errorf("%v: %s, %d requests", err, stdout, len(s.requests))
	}
}

func TestResizesThatFail(t *testing.T) {
	several := map[string][]api.CardGrant{"app": oneShare["app"], "side": {{Card: "GPU-b", Mode: api.ModeExclusive}}}
	for name, c := range map[string]struct {
		args       string
		containers map[string][]api.CardGrant
		change     func(*resizeServer)
		want       string
		usage      bool
	}{
		"refused":              {"pod/a --gpumem 12000", oneShare, func(s *resizeServer) { s.refuse = "asked 12000 MiB, free 9000 of 81920 MiB; held by x/y (7000 MiB)" }, "resize of pod team/a refused: asked 12000 MiB, free 9000", false},
		"forbidden":            {"pod/a --gpumem 12000", oneShare, func(s *resizeServer) { s.forbidden = "patch" }, "ask your administrator for ClusterRole carve-resize in namespace team", false},
		"several containers":   {"pod/a --gpumem 12000", several, nil, "choose one with --container (app, side)", false},
		"a whole card":         {"pod/a -c side --gpumem 12000", several, nil, "in mode exclusive", false},
		"an unknown container": {"pod/a -c x --gpumem 12000", several, nil, "container x has no share; those with one are app, side", false},
		"no such pod":          {"pod/b --gpumem 12000", oneShare, nil, "not found", false},
		"nothing left":         {"pod/a --gpumem -8000", oneShare, nil, "leaves 0 MiB of 8000", false},
		"too much compute":     {"pod/a --gpucores +71", oneShare, nil, "leads to 101 percent", false},
		"one under way":        {"pod/a --gpumem 1", oneShare, func(s *resizeServer) { s.pod.Annotations[api.AnnotationResize] = "{}" }, "under way", false},
		"nobody answers":       {"pod/a --gpumem 1 --timeout 200ms", oneShare, func(s *resizeServer) { s.silent = true }, "the extender hasn't answered: does it run?", false},
		"the node is silent":   {"pod/a --gpumem 1 --timeout 200ms", oneShare, func(s *resizeServer) { s.silent, s.behind = true, true }, "node n1 hasn't reported the pod's last grant (generation 3)", false},
		"an amount forgotten":  {"pod/a --gpumem --gpucores 50", oneShare, nil, `--gpumem needs an amount, and "--gpucores" was taken for one`, true},
		"no amount":            {"pod/a", oneShare, nil, "--gpumem, --gpucores or both are needed", true},
		"another kind":         {"deployment/a --gpumem 1", oneShare, nil, "allowed are pod/NAME and NAME", true},
		"a fraction":           {"pod/a --gpumem 1.5Gi", oneShare, nil, "whole numbers only", true},
		"101 percent":          {"pod/a --gpucores 101", oneShare, nil, "allowed are 0 to 100 percent", true},
		"no pod":               {"--gpumem 1", oneShare, nil, "accepts 1 arg", true},
		"an unknown output":    {"pod/a --gpumem 1 -o xml", oneShare, nil, "--output", true},
	} {
		t.Run(name, func(t *testing.T) {
			s, config := newResizeServer(t, c.containers)
			if c.change != nil {
				c.change(s)
			}
			stdout, _, err := resizeCommand(config, strings.Fields(c.args)...)
			_, usage := err.(usageError)
			if err == nil || !strings.Contains(err.Error(), c.want) || usage != c.usage {
				t.Fatalf("error %v (usage %t), stdout %s", err, usage, stdout)
			}
			if name == "refused" && (!strings.Contains(stdout, "refused") || strings.Contains(stdout, "→")) {
				t.Errorf("printed %s", stdout)
			}
		})
	}
	// A tenant may not see the node; that the extender granted it is enough.
	s, config := newResizeServer(t, oneShare)
	s.forbidden = "gpunodes"
	if stdout, stderr, err := resizeCommand(config, "pod/a", "--gpumem", "9000"); err != nil || !strings.Contains(stdout, "granted") || !strings.Contains(stderr, "can't be seen") {
		t.Errorf("%v: %s %s", err, stdout, stderr)
	}
}

func TestSharersAreCompleted(t *testing.T) {
	v, err := api.Grant{Version: 1, UID: "u", Node: "n1", Generation: 1, Containers: map[string][]api.CardGrant{
		"side": {{Card: "GPU-a", MemMiB: 1000, Mode: api.ModeVGPU}}, "app": {{Card: "GPU-a", MemMiB: 8000, Mode: api.ModeVGPU}}, "whole": {{Card: "GPU-b", Mode: api.ModeExclusive}},
	}}.Encode()
	if err != nil {
		t.Fatal(err)
	}
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{api.AnnotationGrant: v}}}
	if got := fmt.Sprint(sharers(p)); got != "[app side]" {
		t.Errorf("completed are %s", got)
	}
	if got := sharers(&corev1.Pod{}); got != nil {
		t.Errorf("without a grant: %v", got)
	}
}
