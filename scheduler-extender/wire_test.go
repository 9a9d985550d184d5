package extender

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	wirev1 "k8s.io/kube-scheduler/extender/v1"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/v1alpha1"
	"github.com/carve-gpu/carve/scheduler-extender/fit"
	"github.com/carve-gpu/carve/scheduler-extender/ledger"
	"github.com/carve-gpu/carve/scheduler-extender/place"
	"github.com/carve-gpu/carve/scheduler-extender/score"
)

// schedulers writes a body as kube-scheduler does.
func schedulers(t testing.TB, p *corev1.Pod, names ...string) []byte {
	t.Helper()
	b, err := json.Marshal(&wirev1.ExtenderArgs{Pod: p, NodeNames: &names})
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestDecodeArgsReadsWhatTheSchedulerWrites(t *testing.T) {
	always := corev1.ContainerRestartPolicyAlways
	priority, yes := int32(7), true
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "a", UID: "uid-a", CreationTimestamp: metav1.Unix(1_700_000_000, 0),
			OwnerReferences: []metav1.OwnerReference{{Kind: "Other", UID: "uid-o"}, {Kind: "ReplicaSet", UID: "uid-rs", Controller: &yes}},
			Annotations:     map[string]string{api.AnnotationCardPolicy: "spread", "other": `"]}\"`}},
		Spec: corev1.PodSpec{Priority: &priority,
			InitContainers: []corev1.Container{{Name: "setup", Command: []string{`{"`}},
				{Name: "side", RestartPolicy: &always, Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{api.ResourceMemory: resource.MustParse("1Gi")}}}},
			Containers: []corev1.Container{{Name: "app", SecurityContext: &corev1.SecurityContext{Privileged: &yes}, Resources: corev1.ResourceRequirements{
				Limits: corev1.ResourceList{
					api.ResourceGPU: resource.MustParse("2"), api.ResourceMemory: resource.MustParse("8000"), corev1.ResourceCPU: resource.MustParse("500m")},
				Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("500m"), corev1.ResourceMemory: resource.MustParse("1000001")}}}},
		},
	}
	a, err := decodeArgs(schedulers(t, p, "n1", "node-2.example", `q"uote`))
	if err != nil || a.invalid != nil {
		t.Fatal(err, a.invalid)
	}
	want := place.Pod{
		Ref: ledger.Ref{UID: "uid-a", Namespace: "default", Name: "a"}, Priority: 7, Created: a.pod.Created,
		Host: fit.Host{CPUMilli: 500, MemMiB: 1, Pods: 1}, Owner: "uid-rs", Serves: true,
		Request: api.Request{Policy: "spread", Containers: []api.ContainerRequest{
			{Name: "side", Kind: api.Sidecar, Cards: 1, MemMiB: 1024}, {Name: "app", Cards: 2, MemMiB: 8000, Privileged: true}}},
	}
	if !reflect.DeepEqual(a.pod, want) || a.pod.Created.Unix() != 1_700_000_000 {
		t.Fatalf("pod %+v\nwant %+v", a.pod, want)
	}
	if got := fmt.Sprintf("%s", a.names); got != `[n1 node-2.example q"uote]` {
		t.Fatalf("names %s", got)
	}
}

func TestSoftPreferencesAreSeen(t *testing.T) {
	term := []corev1.PreferredSchedulingTerm{{Weight: 1}}
	pods := []corev1.WeightedPodAffinityTerm{{Weight: 1}}
	for name, c := range map[string]struct {
		spec corev1.PodSpec
		want bool
	}{
		"none":                 {corev1.PodSpec{}, false},
		"required affinity":    {corev1.PodSpec{Affinity: &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{}}}}, false},
		"preferred nodes":      {corev1.PodSpec{Affinity: &corev1.Affinity{NodeAffinity: &corev1.NodeAffinity{PreferredDuringSchedulingIgnoredDuringExecution: term}}}, true},
		"preferred neighbours": {corev1.PodSpec{Affinity: &corev1.Affinity{PodAffinity: &corev1.PodAffinity{PreferredDuringSchedulingIgnoredDuringExecution: pods}}}, true},
		"unwanted neighbours":  {corev1.PodSpec{Affinity: &corev1.Affinity{PodAntiAffinity: &corev1.PodAntiAffinity{PreferredDuringSchedulingIgnoredDuringExecution: pods}}}, true},
		"hard spread":          {corev1.PodSpec{TopologySpreadConstraints: []corev1.TopologySpreadConstraint{{WhenUnsatisfiable: corev1.DoNotSchedule}}}, false},
		"soft spread":          {corev1.PodSpec{TopologySpreadConstraints: []corev1.TopologySpreadConstraint{{WhenUnsatisfiable: corev1.ScheduleAnyway}}}, true},
	} {
		a, err := decodeArgs(schedulers(t, &corev1.Pod{Spec: c.spec}, "n1"))
		if err != nil || a.pod.Soft != c.want {
			t.Errorf("%s: soft %t, %v", name, a.pod.Soft, err)
		}
	}
}

// seeds are bodies that the fuzzers start from.
func seeds(f *testing.F) {
	gpu := corev1.ResourceList{api.ResourceGPU: resource.MustParse("1"), api.ResourceMemory: resource.MustParse("8Gi")}
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "a", UID: "uid-a"},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "app", Resources: corev1.ResourceRequirements{Limits: gpu}}}}}
	f.Add(schedulers(f, p, "n1", "n2"))
	f.Add(schedulers(f, &corev1.Pod{}, "n1"))
	for _, s := range []string{``, `null`, `{}`, `{"Pod":{},"NodeNames":[]}`, `{"Pod":{},"NodeNames":["a\u0062"]}`, `{"Pod":null,"NodeNames":null,"Nodes":{}}`,
		` { "Pod" : { "a" : "}" } , "NodeNames" : [ "x" , "y" ] } `, `{"Pod":{},"NodeNames":["n1",]}`, `{"Pod":{},"NodeNames":["n1"]}{`, `{"Pod":1e5,"NodeNames":"x"}`,
		`{"PodName":"a","PodNamespace":"default","PodUID":"uid-a","Node":"n1"}`,
		`{"Pod":{"metadata":{"uid":"u"},"spec":{"containers":[{"name":"a","resources":{"limits":{"nvidia.com/gpu":-1}}}]}},"NodeNames":["n1"]}`} {
		f.Add([]byte(s))
	}
}

// FuzzDecodeArgs compares with encoding/json: what that reads we read alike.
func FuzzDecodeArgs(f *testing.F) {
	seeds(f)
	f.Fuzz(func(t *testing.T, body []byte) {
		a, err := decodeArgs(body)
		var want struct {
			Pod       json.RawMessage
			Nodes     json.RawMessage
			NodeNames *[]string
		}
		if json.Unmarshal(body, &want) != nil {
			return // ours may be more lenient outside Pod and NodeNames
		}
		// encoding/json takes keys of any case and repairs bad UTF-8.
		lower := bytes.ToLower(body)
		if bytes.Count(lower, []byte(`"nodenames"`)) != bytes.Count(body, []byte(`"NodeNames"`)) || bytes.Count(body, []byte(`NodeNames`)) > 1 ||
			bytes.Count(lower, []byte(`"pod"`)) != bytes.Count(body, []byte(`"Pod"`)) || bytes.Count(body, []byte(`"Pod"`)) > 1 || !utf8.Valid(body) || bytes.Contains(body, []byte(`\`)) ||
			strings.EqualFold(string(body), "null") {
			return
		}
		// Letters that fold to ASCII ones (ſ, K) make keys equal too.
		if !isASCII(body) {
			return
		}
		complete := want.NodeNames != nil && len(want.Pod) > 0 && !isNull(want.Pod)
		if err != nil {
			var v podView
			if complete && !slices.Contains(*want.NodeNames, "") && json.Unmarshal(want.Pod, &v) == nil && !bytes.Contains(body, []byte("null")) {
				t.Fatalf("refused: %v", err)
			}
			return
		}
		if !complete {
			t.Fatal("accepted an incomplete request")
		}
		if len(a.names) != len(*want.NodeNames) {
			t.Fatalf("names %q, want %q", a.names, *want.NodeNames)
		}
		for i, n := range a.names {
			if string(n) != (*want.NodeNames)[i] {
				t.Fatalf("names %q, want %q", a.names, *want.NodeNames)
			}
		}
	})
}

func isASCII(b []byte) bool {
	for _, c := range b {
		if c >= utf8.RuneSelf {
			return false
		}
	}
	return true
}

// nobody is a Binder and a Pods without a cluster: pods are those in asks.
type nobody struct {
	bound map[string]string
	asks  map[string]api.Request
}

func (n nobody) Bind(_ context.Context, p ledger.Ref, node, _ string) (ledger.Outcome, error) {
	n.bound[p.UID] = node
	return ledger.Written, nil
}

func (n nobody) Asks(p ledger.Ref) (api.Request, bool) {
	r, ok := n.asks[p.UID]
	return r, ok
}

// bare is a server over two managed nodes, without TLS.
func bare() (*Server, nobody) {
	now := time.Unix(1_700_000_000, 0)
	l := ledger.New(ledger.Config{})
	for _, n := range []string{"n1", "n2"} {
		since := metav1.NewTime(now)
		l.SetNode(n, ledger.NodeInfo{Managed: true})
		l.SetAgent(n, ledger.Agent{Ready: true})
		l.SetReport(&v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: n}, Status: v1alpha1.GPUNodeStatus{HookConnectedSince: &since,
			Cards: []v1alpha1.Card{{UUID: "GPU-" + n, MemoryMiB: 81920, Health: v1alpha1.Health{State: v1alpha1.Healthy}}}}}, now)
	}
	b := nobody{map[string]string{}, map[string]api.Request{}}
	return New(Config{Ledger: l, Placer: place.New(l, place.Config{Policy: score.Binpack}), Binder: b, Pods: b, Ready: func() bool { return true },
		Registry: prometheus.NewRegistry(), Log: slog.New(slog.DiscardHandler), Now: func() time.Time { return now }}), b
}

func call(t *testing.T, h http.HandlerFunc, body []byte, out any) {
	t.Helper()
	w := httptest.NewRecorder()
	h(w, httptest.NewRequest(http.MethodPost, "/", bytes.NewReader(body)))
	if w.Code != http.StatusOK {
		t.Fatalf("status %d: %s", w.Code, w.Body)
	}
	if err := json.Unmarshal(w.Body.Bytes(), out); err != nil {
		t.Fatalf("reply %q: %v", w.Body, err)
	}
}

// FuzzFilter sends any bytes through the whole server: filter, prioritize and a
// bind of what was offered.
func FuzzFilter(f *testing.F) {
	seeds(f)
	f.Fuzz(func(t *testing.T, body []byte) {
		s, _ := bare()
		var r wirev1.ExtenderFilterResult
		call(t, s.verb("filter", s.filter), body, &r)
		a, err := decodeArgs(body)
		if refused := err != nil || a.pod.UID == "" && !a.pod.Request.Empty(); refused != (r.NodeNames == nil) || refused != (r.Error != "") {
			t.Fatalf("error %v, reply %+v", err, r)
		}
		var list wirev1.HostPriorityList
		call(t, s.verb("prioritize", s.prioritize), body, &list)
		if r.Error != "" {
			return
		}
		for _, n := range *r.NodeNames {
			// Names that JSON can't carry come back repaired.
			if utf8.Valid(body) && !slices.ContainsFunc(a.names, func(b []byte) bool { return string(b) == n }) {
				t.Fatalf("%q was not asked for", n)
			}
		}
		for _, h := range list {
			if h.Score < 0 || h.Score > 10 {
				t.Fatalf("score %d", h.Score)
			}
		}
		if len(list) != len(a.names) {
			t.Fatalf("%d scores for %d names", len(list), len(a.names))
		}
		for _, n := range []string{"n1", "n2"} {
			for _, c := range s.Ledger.Node(n).Snapshot().View.Cards {
				if c.Used.MemMiB > c.MemMiB {
					t.Fatalf("%s is overbooked: %+v", n, c)
				}
			}
		}
	})
}

// panics is a Binder that can't be trusted to return.
type panics struct{ nobody }

func (panics) Bind(context.Context, ledger.Ref, string, string) (ledger.Outcome, error) {
	panic("in the middle of a write")
}

// net/http recovers a handler's panic; the share must be neither lost nor free.
func TestAPanicInAWriteLeavesTheShareBooked(t *testing.T) {
	s, b := bare()
	s.Binder = panics{b}
	p := place.Pod{Ref: ledger.Ref{UID: "uid-a", Namespace: "default", Name: "a"},
		Request: api.Request{Containers: []api.ContainerRequest{{Name: "app", Cards: 1, MemMiB: 8000}}}}
	s.Placer.Filter(p, [][]byte{[]byte("n1")}, s.Now())
	func() {
		defer func() {
			if recover() == nil {
				t.Fatal("no panic")
			}
		}()
		s.bind(t.Context(), []byte(`{"PodName":"a","PodNamespace":"default","PodUID":"uid-a","Node":"n1"}`), nil)
	}()
	h, ok := s.Ledger.Held("uid-a")
	if !ok || h.Binding || h.State != ledger.Offered {
		t.Fatalf("held %t %+v", ok, h)
	}
}

// The scheduler preferred a node that carve doesn't manage.
func TestAPlainBindingTakesTheOfferBack(t *testing.T) {
	s, b := bare()
	s.Ledger.SetNode("other", ledger.NodeInfo{Cards: true})
	p := place.Pod{Ref: ledger.Ref{UID: "uid-a", Namespace: "default", Name: "a"},
		Request: api.Request{Containers: []api.ContainerRequest{{Name: "app", Cards: 1, Whole: true}}}}
	b.asks["uid-a"] = p.Request
	if out := s.Placer.Filter(p, [][]byte{[]byte("n1"), []byte("other")}, s.Now()); !slices.Equal(out.Nodes, []string{"n1", "other"}) {
		t.Fatalf("%+v", out)
	}
	var r wirev1.ExtenderBindingResult
	call(t, s.verb("bind", s.bind), []byte(`{"PodName":"a","PodNamespace":"default","PodUID":"uid-a","Node":"other"}`), &r)
	if r.Error != "" || b.bound["uid-a"] != "other" {
		t.Fatalf("%+v, bound %v", r, b.bound)
	}
	if _, ok := s.Ledger.Held("uid-a"); ok {
		t.Fatal("the offer stayed")
	}
}

// FuzzBind: whatever the bytes, nothing is bound that wasn't offered, and the
// offer that there is stays unless it is bound.
func FuzzBind(f *testing.F) {
	seeds(f)
	f.Add([]byte(`{"PodName":"a","PodNamespace":"default","PodUID":"uid-a","Node":"n2"}`))
	f.Add([]byte(`{"PodName":"x","PodNamespace":"default","PodUID":"uid-a","Node":"n1"}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		s, b := bare()
		p := place.Pod{Ref: ledger.Ref{UID: "uid-a", Namespace: "default", Name: "a"},
			Request: api.Request{Containers: []api.ContainerRequest{{Name: "app", Cards: 1, MemMiB: 8000}}}}
		if out := s.Placer.Filter(p, [][]byte{[]byte("n1")}, s.Now()); len(out.Nodes) != 1 {
			t.Fatalf("%+v", out)
		}
		var r wirev1.ExtenderBindingResult
		call(t, s.verb("bind", s.bind), body, &r)
		if (r.Error == "") != (len(b.bound) == 1) || len(b.bound) == 1 && b.bound["uid-a"] != "n1" {
			t.Fatalf("error %q, bound %v", r.Error, b.bound)
		}
		if got := s.Ledger.Node("n1").Snapshot().View.Cards[0].Used.MemMiB; got != 8000 {
			t.Fatalf("%d MiB in use", got)
		}
	})
}

// Filter reads requests with the parser that admission's rules are compared with:
// what slipped past those is refused here.
func TestFilterRefusesWhatTheParserRefuses(t *testing.T) {
	limits := func(kv ...string) corev1.ResourceList {
		out := corev1.ResourceList{}
		for i := 0; i < len(kv); i += 2 {
			out[corev1.ResourceName(kv[i])] = resource.MustParse(kv[i+1])
		}
		return out
	}
	for name, c := range map[string]struct {
		limits, requests corev1.ResourceList
		annotations      map[string]string
		want             string
	}{
		"101 percent":           {limits(api.ResourceCores, "101"), nil, nil, api.ResourceCores},
		"memory in both ways":   {limits(api.ResourceMemory, "1", api.ResourceMemoryPercent, "1"), nil, nil, "not both"},
		"requests below limits": {limits(api.ResourceMemory, "2"), limits(api.ResourceMemory, "1"), nil, "in requests"},
		"a mistyped annotation": {limits(api.ResourceMemory, "1"), nil, map[string]string{"carve.dev/card-modles": "A100"}, "carve.dev/card-modles"},
		"a bare exclusion":      {limits(api.ResourceMemory, "1"), nil, map[string]string{api.AnnotationCardModels: "!"}, api.AnnotationCardModels},
		"nonsense for a UUID":   {limits(api.ResourceMemory, "1"), nil, map[string]string{api.AnnotationCardUUIDs: "0"}, api.AnnotationCardUUIDs},
	} {
		p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "a", Annotations: c.annotations}, Spec: corev1.PodSpec{Containers: []corev1.Container{
			{Name: "app", Resources: corev1.ResourceRequirements{Limits: c.limits, Requests: c.requests}}}}}
		body, err := json.Marshal(&wirev1.ExtenderArgs{Pod: p, NodeNames: &[]string{"n1"}})
		if err != nil {
			t.Fatal(err)
		}
		a, err := decodeArgs(body)
		if err != nil || a.invalid == nil || !strings.Contains(a.invalid.Error(), c.want) {
			t.Errorf("%s: %v, %v", name, a.invalid, err)
		}
	}
}
