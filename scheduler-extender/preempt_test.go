package extender

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	wirev1 "k8s.io/kube-scheduler/extender/v1"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/scheduler-extender/ledger"
)

// preempts asks as kube-scheduler does, and returns the nodes that are left.
func preempts(t *testing.T, s *Server, p *corev1.Pod, victims map[string][]string) []string {
	t.Helper()
	a := &wirev1.ExtenderPreemptionArgs{Pod: p, NodeNameToMetaVictims: map[string]*wirev1.MetaVictims{}}
	for node, uids := range victims {
		v := &wirev1.MetaVictims{NumPDBViolations: 1}
		for _, uid := range uids {
			v.Pods = append(v.Pods, &wirev1.MetaPod{UID: uid})
		}
		a.NodeNameToMetaVictims[node] = v
	}
	body, err := json.Marshal(a)
	if err != nil {
		t.Fatal(err)
	}
	var r wirev1.ExtenderPreemptionResult
	call(t, s.verb("preempt", s.preempt), body, &r)
	for node, v := range r.NodeNameToMetaVictims {
		if len(v.Pods) != len(victims[node]) || v.NumPDBViolations != 1 {
			t.Errorf("%s: victims %+v, were %v", node, v, victims[node])
		}
	}
	return slices.Sorted(maps.Keys(r.NodeNameToMetaVictims))
}

// onCard binds a pod to a node's card.
func onCard(t *testing.T, s *Server, node, name string, mib int64) {
	t.Helper()
	g, err := api.DecodeGrant(fmt.Sprintf(`{"v":1,"uid":%q,"node":%q,"gen":1,"containers":{"app":[{"card":"GPU-%s","memMiB":%d,"mode":"vgpu"}]}}`, name, node, node, mib))
	if err != nil {
		t.Fatal(err)
	}
	s.Ledger.SetPod(ledger.Pod{Ref: ledger.Ref{UID: name, Namespace: "default", Name: name}, Node: node, Grant: &g, Containers: []ledger.Container{{Name: "app"}}}, s.Now())
}

func wants(limits corev1.ResourceList) *corev1.Pod {
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "urgent", UID: "uid-urgent"},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "app", Resources: corev1.ResourceRequirements{Limits: limits}}}}}
}

// No pod is evicted where cards would be in the way still.
func TestPreemptionThatFreesNothingIsVetoed(t *testing.T) {
	share := func(mib string) *corev1.Pod {
		return wants(corev1.ResourceList{api.ResourceMemory: resource.MustParse(mib)})
	}
	for name, c := range map[string]struct {
		pod     *corev1.Pod
		victims map[string][]string
		left    []string
	}{
		"a victim without a card":              {share("60000"), map[string][]string{"n1": {"hog"}}, nil},
		"one whose share is too small":         {share("60000"), map[string][]string{"n1": {"hog", "small"}}, nil},
		"one whose share does it":              {share("60000"), map[string][]string{"n1": {"large"}}, []string{"n1"}},
		"all of them":                          {share("80000"), map[string][]string{"n1": {"large", "small"}}, []string{"n1"}},
		"a node with room anyway":              {share("60000"), map[string][]string{"n1": {"hog"}, "n2": {"hog"}}, []string{"n2"}},
		"the whole card, with one left":        {wants(corev1.ResourceList{api.ResourceGPU: resource.MustParse("1")}), map[string][]string{"n1": {"large"}}, nil},
		"the whole card":                       {wants(corev1.ResourceList{api.ResourceGPU: resource.MustParse("1")}), map[string][]string{"n1": {"large", "small"}}, []string{"n1"}},
		"a share, where carve isn't":           {share("8000"), map[string][]string{"foreign": {"hog"}, "nobody": {"hog"}}, nil},
		"whole cards, where carve isn't":       {wants(corev1.ResourceList{api.ResourceGPU: resource.MustParse("1")}), map[string][]string{"foreign": {"hog"}}, []string{"foreign"}},
		"a pod that asks for nothing of ours":  {wants(nil), map[string][]string{"n1": {"hog"}, "nobody": {"x"}}, []string{"n1", "nobody"}},
		"a pod that can't be served":           {wants(corev1.ResourceList{api.ResourceCores: resource.MustParse("101")}), map[string][]string{"n1": {"large", "small"}}, nil},
		"a request larger than any card there": {share("90000"), map[string][]string{"n1": {"large", "small"}}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			s, _ := bare()
			s.Ledger.SetNode("foreign", ledger.NodeInfo{Cards: true})
			onCard(t, s, "n1", "large", 50000)
			onCard(t, s, "n1", "small", 10000)
			before := s.Ledger.Totals()
			if left := preempts(t, s, c.pod, c.victims); !slices.Equal(left, c.left) {
				t.Errorf("left are %v, want %v", left, c.left)
			}
			if after := s.Ledger.Totals(); after != before {
				t.Errorf("the ledger has changed: %+v, was %+v", after, before)
			}
		})
	}
}

// An answer that isn't one has to be seen as such: an empty one would say that no node is left,
// and one with all nodes that any victim will do.
func TestPreemptionFaults(t *testing.T) {
	s, _ := bare()
	for name, body := range map[string]string{
		"no JSON": `{`, "no pod": `{"NodeNameToMetaVictims":{}}`, "whole pods": `{"Pod":{"metadata":{"uid":"u"}},"NodeNameToVictims":{}}`,
	} {
		w := httptest.NewRecorder()
		s.verb("preempt", s.preempt)(w, httptest.NewRequest(http.MethodPost, "/", bytes.NewReader([]byte(body))))
		if w.Code != http.StatusServiceUnavailable {
			t.Errorf("%s: status %d, %s", name, w.Code, w.Body)
		}
	}
	s.Ready = func() bool { return false }
	w := httptest.NewRecorder()
	s.verb("preempt", s.preempt)(w, httptest.NewRequest(http.MethodPost, "/", bytes.NewReader([]byte(`{"Pod":{"metadata":{"uid":"u"}},"NodeNameToMetaVictims":{}}`))))
	if w.Code != http.StatusServiceUnavailable {
		t.Errorf("not ready: status %d, %s", w.Code, w.Body)
	}
}

// FuzzPreempt: whatever the bytes, no node comes back that wasn't asked about.
func FuzzPreempt(f *testing.F) {
	seeds(f)
	f.Add([]byte(`{"Pod":{"metadata":{"uid":"u"},"spec":{"containers":[{"name":"a","resources":{"limits":{"nvidia.com/gpumem":"8000"}}}]}},"NodeNameToMetaVictims":{"n1":{"Pods":[{"UID":"x"},null]},"n2":null}}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		s, _ := bare()
		w := httptest.NewRecorder()
		s.verb("preempt", s.preempt)(w, httptest.NewRequest(http.MethodPost, "/", bytes.NewReader(body)))
		var asked wirev1.ExtenderPreemptionArgs
		var r wirev1.ExtenderPreemptionResult
		if w.Code != http.StatusOK {
			return
		}
		if json.Unmarshal(body, &asked) != nil || json.Unmarshal(w.Body.Bytes(), &r) != nil {
			t.Fatalf("reply %q", w.Body)
		}
		for node := range r.NodeNameToMetaVictims {
			if _, ok := asked.NodeNameToMetaVictims[node]; !ok {
				t.Fatalf("%q wasn't asked about", node)
			}
		}
	})
}
