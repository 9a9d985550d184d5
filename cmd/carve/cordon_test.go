package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/rest"

	"github.com/carve-gpu/carve/api/gpunodes"
	"github.com/carve-gpu/carve/api/v1alpha1"
)

// gpuNodeServer is the part of the API server that keeps GPUNodes: optimistic
// locking and merge patches of the spec.
type gpuNodeServer struct {
	mu      sync.Mutex
	nodes   map[string]*v1alpha1.GPUNode
	patches []string
	// forbidden, if set, is why nobody may read.
	forbidden string
	// meanwhile is called once, before the next patch is looked at.
	meanwhile func(*v1alpha1.GPUNode)
}

func (s *gpuNodeServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	name := r.URL.Path[strings.LastIndexByte(r.URL.Path, '/')+1:]
	answer := func(code int, o any) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(code)
		_ = json.NewEncoder(w).Encode(o)
	}
	refuse := func(e *apierrors.StatusError) {
		e.ErrStatus.TypeMeta = metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}
		answer(int(e.ErrStatus.Code), e.ErrStatus)
	}
	if s.forbidden != "" {
		refuse(apierrors.NewForbidden(schema.GroupResource{Group: "carve.dev", Resource: "gpunodes"}, "", errors.New(s.forbidden)))
		return
	}
	if name == "gpunodes" {
		list := v1alpha1.GPUNodeList{TypeMeta: metav1.TypeMeta{Kind: "GPUNodeList", APIVersion: v1alpha1.GroupVersion.String()}}
		only, named := strings.CutPrefix(r.URL.Query().Get("fieldSelector"), "metadata.name=")
		for _, n := range s.nodes {
			if !named || n.Name == only {
				list.Items = append(list.Items, *n)
			}
		}
		answer(http.StatusOK, list)
		return
	}
	n := s.nodes[name]
	if n == nil {
		refuse(apierrors.NewNotFound(schema.GroupResource{Resource: "gpunodes"}, name))
		return
	}
	if r.Method == http.MethodPatch {
		if s.meanwhile != nil {
			s.meanwhile(n)
			n.ResourceVersion += "1"
			s.meanwhile = nil
		}
		body, _ := io.ReadAll(r.Body)
		s.patches = append(s.patches, string(body))
		var patch struct {
			Metadata struct{ ResourceVersion string }
			Spec     struct {
				CordonedCards *[]string
				CordonReasons map[string]*v1alpha1.CordonReason
			}
		}
		if err := json.Unmarshal(body, &patch); err != nil {
			refuse(apierrors.NewBadRequest(err.Error()))
			return
		}
		if patch.Metadata.ResourceVersion != n.ResourceVersion {
			refuse(apierrors.NewConflict(schema.GroupResource{Resource: "gpunodes"}, name, io.ErrUnexpectedEOF))
			return
		}
		if c := patch.Spec.CordonedCards; c != nil {
			n.Spec.CordonedCards = *c
		}
		for u, reason := range patch.Spec.CordonReasons {
			if reason == nil {
				delete(n.Spec.CordonReasons, u)
				continue
			}
			if n.Spec.CordonReasons == nil {
				n.Spec.CordonReasons = map[string]v1alpha1.CordonReason{}
			}
			n.Spec.CordonReasons[u] = *reason
		}
		n.ResourceVersion += "1"
	}
	out := n.DeepCopy()
	out.TypeMeta = metav1.TypeMeta{Kind: "GPUNode", APIVersion: v1alpha1.GroupVersion.String()}
	answer(http.StatusOK, out)
}

func cordonRig(t *testing.T) (*gpuNodeServer, *gpunodes.Client) {
	t.Helper()
	s := &gpuNodeServer{nodes: map[string]*v1alpha1.GPUNode{}}
	for _, n := range gpuNodes() {
		n.ResourceVersion = "1"
		s.nodes[n.Name] = &n
	}
	server := httptest.NewServer(s)
	t.Cleanup(server.Close)
	c, err := gpunodes.New(&rest.Config{Host: server.URL})
	if err != nil {
		t.Fatal(err)
	}
	return s, c
}

func TestCordonTexts(t *testing.T) {
	s, c := cordonRig(t)
	var out bytes.Buffer
	step := func(what, node string, words []string, change func(v1alpha1.GPUNode, []string) v1alpha1.GPUNodeSpec) {
		t.Helper()
		out.WriteString("# " + what + "\n")
		if err := changeCordon(t.Context(), &out, c, node, words, change); err != nil {
			out.WriteString("error: " + err.Error() + "\n")
		}
	}
	taken := func(reason string) func(v1alpha1.GPUNode, []string) v1alpha1.GPUNodeSpec {
		return func(n v1alpha1.GPUNode, cards []string) v1alpha1.GPUNodeSpec { return cordon(n, cards, reason) }
	}
	step("by index, with tenants on it", "n1", []string{"0"}, taken("ECC errors"))
	step("again", "n1", []string{"0"}, taken(""))
	step("again, with another reason", "n1", []string{"0"}, taken("ECC errors, for good"))
	step("the same card by two names", "n1", []string{"1", "GPU-b"}, taken(""))
	step("back", "n1", []string{"GPU-a"}, uncordon)
	step("back, again", "n1", []string{"GPU-a"}, uncordon)
	step("all of a node, one of which is out", "n2", nil, taken(""))
	step("a card that is no card", "n1", []string{"0", "GPU-nonsense"}, taken(""))
	step("an index too high", "n1", []string{"7"}, taken(""))
	step("words that would be a patch", "n1", []string{`"],"x":["`}, taken(""))
	step("a node that reports nothing", "n9", nil, taken(""))
	step("all back", "n2", nil, uncordon)
	wantGolden(t, "cordon.txt", out.Bytes())
	if n := s.nodes["n1"]; len(n.Spec.CordonedCards) != 1 || n.Spec.CordonedCards[0] != "GPU-b" || len(n.Spec.CordonReasons) != 0 {
		t.Errorf("n1 is left with %+v", n.Spec)
	}
	if n := s.nodes["n2"]; len(n.Spec.CordonedCards) != 0 {
		t.Errorf("n2 is left with %+v", n.Spec)
	}
	if len(s.patches) != 6 {
		t.Errorf("%d writes, want 6: what changes nothing writes nothing\n%s", len(s.patches), strings.Join(s.patches, "\n"))
	}
}

// Two operators at the same time: neither loses what the other did.
func TestCordonLosesNobodysWrite(t *testing.T) {
	s, c := cordonRig(t)
	s.meanwhile = func(n *v1alpha1.GPUNode) { n.Spec.CordonedCards = append(n.Spec.CordonedCards, "GPU-b") }
	if err := changeCordon(t.Context(), io.Discard, c, "n1", []string{"0"}, func(n v1alpha1.GPUNode, cards []string) v1alpha1.GPUNodeSpec { return cordon(n, cards, "") }); err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(s.nodes["n1"].Spec.CordonedCards, " "); got != "GPU-b GPU-a" {
		t.Errorf("cordoned are %q, want both", got)
	}
}

func TestCardsByTheBeginningOfTheirUUID(t *testing.T) {
	n := v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: "n"}, Spec: v1alpha1.GPUNodeSpec{CordonedCards: []string{"GPU-9gone"}}}
	for i, u := range []string{"GPU-1a2b-x", "GPU-1a2c-x", "GPU-3"} {
		n.Status.Cards = append(n.Status.Cards, v1alpha1.Card{UUID: u, Index: int32(i)})
	}
	for word, want := range map[string]string{
		"GPU-1a2b": "GPU-1a2b-x", "gpu-1A2C": "GPU-1a2c-x", "GPU-3": "GPU-3", "2": "GPU-3",
		"GPU-9gone": "GPU-9gone", // not reported any more, and still to be uncordoned
		"GPU-1a2":   `"GPU-1a2" is the beginning of 2 UUIDs on node n: 0 (GPU-1a2b-x), 1 (GPU-1a2c-x); name one by its index or by more of it`,
		"GPU-":      `"GPU-" is the beginning of 4 UUIDs on node n: 0 (GPU-1a2b-x), 1 (GPU-1a2c-x), 2 (GPU-3), GPU-9gone (cordoned, not reported); name one by its index or by more of it`,
		"gpu":       `"gpu" is the beginning of 4 UUIDs on node n: 0 (GPU-1a2b-x), 1 (GPU-1a2c-x), 2 (GPU-3), GPU-9gone (cordoned, not reported); name one by its index or by more of it`,
		"1a2":       `"1a2" is the beginning of 2 UUIDs on node n: 0 (GPU-1a2b-x), 1 (GPU-1a2c-x); name one by its index or by more of it`,
		"1a2b":      "GPU-1a2b-x",
		"G9":        `node n has no card "G9"; it has 0 (GPU-1a2b-x), 1 (GPU-1a2c-x), 2 (GPU-3)`,
		"-1":        `node n has no card "-1"; it has 0 (GPU-1a2b-x), 1 (GPU-1a2c-x), 2 (GPU-3)`,
	} {
		found, err := findCards(n, []string{word})
		got := strings.Join(found, " ")
		if err != nil {
			got = err.Error()
		}
		if got != want {
			t.Errorf("%s: %s, want %s", word, got, want)
		}
	}
	one := v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: "n"}, Status: v1alpha1.GPUNodeStatus{Cards: n.Status.Cards[:1]}}
	if found, err := findCards(one, []string{"GPU-"}); err == nil {
		t.Errorf("a beginning that all cards have is taken for %q", found)
	}
	if all, err := findCards(n, nil); err != nil || len(all) != 4 {
		t.Errorf("no words: %v, %v", all, err)
	}
}
