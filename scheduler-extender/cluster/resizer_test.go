package cluster

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/v1alpha1"
	"github.com/carve-gpu/carve/scheduler-extender/ledger"
)

// resizeRig is an API server's view of one pod with preconditions on its
// patches, and an extender that can be restarted.
type resizeRig struct {
	t      *testing.T
	kube   *fake.Clientset
	quotas []*corev1.ResourceQuota
	l      *ledger.Ledger
	r      *Resizer
	cancel context.CancelFunc
	done   chan struct{}

	mu      sync.Mutex
	pod     *corev1.Pod
	version int
	writes  int
	// fault, if set, decides on the n-th patch: whether it happens, and what the
	// reply is.
	fault    func(n int) (happens bool, reply error)
	patches  int
	report   *v1alpha1.GPUNode
	answered []string
}

func newResizeRig(t *testing.T, quotas ...*corev1.ResourceQuota) *resizeRig {
	g := &resizeRig{t: t, kube: fake.NewClientset(), quotas: quotas}
	grant := api.Grant{Version: 1, UID: "uid-a", Node: "n1", Generation: 1, Containers: map[string][]api.CardGrant{"app": {{Card: "GPU-a", MemMiB: 8000, Mode: api.ModeVGPU}}}}
	text, err := grant.Encode()
	if err != nil {
		t.Fatal(err)
	}
	g.pod = gpuPod("a")
	g.pod.Annotations = map[string]string{api.AnnotationGrant: text}
	g.bump()
	g.kube.PrependReactor("get", "pods", func(clienttesting.Action) (bool, runtime.Object, error) {
		g.mu.Lock()
		defer g.mu.Unlock()
		return true, g.pod.DeepCopy(), nil
	})
	g.kube.PrependReactor("patch", "pods", func(a clienttesting.Action) (bool, runtime.Object, error) {
		return g.patch(a.(clienttesting.PatchAction).GetPatch())
	})
	g.setReport(8000, 1, 0)
	g.start()
	t.Cleanup(g.stop)
	return g
}

func (g *resizeRig) bump() {
	g.version++
	g.pod.ResourceVersion = strconv.Itoa(g.version)
}

func (g *resizeRig) patch(body []byte) (bool, runtime.Object, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.patches++
	happens, reply := true, error(nil)
	if g.fault != nil {
		happens, reply = g.fault(g.patches)
	}
	if !happens {
		return true, nil, reply
	}
	var p struct {
		Metadata struct {
			UID             string             `json:"uid"`
			ResourceVersion string             `json:"resourceVersion"`
			Annotations     map[string]*string `json:"annotations"`
		} `json:"metadata"`
	}
	if err := json.Unmarshal(body, &p); err != nil {
		return true, nil, err
	}
	if p.Metadata.UID != string(g.pod.UID) || p.Metadata.ResourceVersion != g.pod.ResourceVersion {
		return true, nil, apierrors.NewConflict(schema.GroupResource{Resource: "pods"}, "a", fmt.Errorf("precondition"))
	}
	g.pod = g.pod.DeepCopy()
	for k, v := range p.Metadata.Annotations {
		if v == nil {
			delete(g.pod.Annotations, k)
		} else {
			g.pod.Annotations[k] = *v
		}
	}
	g.writes++
	g.bump()
	return true, g.pod, reply
}

// start makes an extender that knows what the API shows.
func (g *resizeRig) start() {
	g.l = ledger.New(ledger.Config{})
	g.l.SetNode("n1", ledger.NodeInfo{Managed: true})
	g.r = NewResizer(ResizerConfig{Kube: g.kube, Ledger: g.l, Ready: func() bool { return true }, Log: slog.New(slog.DiscardHandler),
		Pod: func(ledger.Ref) *corev1.Pod { g.mu.Lock(); defer g.mu.Unlock(); return g.pod },
		Answered: func(_ ledger.Ref, o, _ string) {
			g.mu.Lock()
			defer g.mu.Unlock()
			g.answered = append(g.answered, o)
		}})
	ctx, cancel := context.WithCancel(context.Background())
	g.cancel, g.done = cancel, make(chan struct{})
	go func() { defer close(g.done); g.r.Run(ctx) }()
	s := Source{Config: Config{Ledger: g.l}}
	for _, q := range g.quotas {
		o, err := trimQuota(q)
		if err != nil {
			g.t.Fatal(err)
		}
		s.setQuota(o)
	}
	g.show()
	g.l.SetReport(g.report, time.Now())
	g.r.ReportChanged(g.report)
}

func (g *resizeRig) stop() {
	g.cancel()
	<-g.done
}

// show delivers the pod's event.
func (g *resizeRig) show() {
	g.mu.Lock()
	p := g.pod
	g.mu.Unlock()
	s := Source{Config: Config{Ledger: g.l, Resizer: g.r, Forget: func(string) {}, Log: slog.New(slog.DiscardHandler), Now: time.Now}}
	s.setPod(p)
}

func (g *resizeRig) setReport(mib int64, generation, refused int32) {
	since := metav1.Now()
	g.report = &v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: "n1"}, Status: v1alpha1.GPUNodeStatus{HookConnectedSince: &since, Cards: []v1alpha1.Card{{
		UUID: "GPU-a", MemoryMiB: 81920, Health: v1alpha1.Health{State: v1alpha1.Healthy},
		Slices: []v1alpha1.Slice{
			{PodUID: "uid-a", Container: "app", Namespace: "default", Pod: "a", MemMiB: mib, Mode: "vgpu", Generation: generation, RefusedGeneration: refused, Refusal: strings.Repeat("in use ", int(min(refused, 1)))},
			{PodUID: "uid-b", Container: "app", Namespace: "default", Pod: "b", MemMiB: 50000, Mode: "vgpu", Generation: 1},
		},
	}}}}
	if g.l != nil {
		g.l.SetReport(g.report, time.Now())
		g.r.ReportChanged(g.report)
	}
}

// request writes the annotation as a user does.
func (g *resizeRig) request(text string) {
	g.mu.Lock()
	g.pod = g.pod.DeepCopy()
	g.pod.Annotations[api.AnnotationResize] = text
	g.bump()
	g.mu.Unlock()
	g.show()
}

func (g *resizeRig) state() (api.Grant, api.ResizeResult, string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	grant, err := api.DecodeGrant(g.pod.Annotations[api.AnnotationGrant])
	if err != nil {
		g.t.Fatal(err)
	}
	result, _ := api.DecodeResizeResult(g.pod.Annotations[api.AnnotationResizeResult])
	return grant, result, g.pod.Annotations[api.AnnotationResize]
}

func (g *resizeRig) until(what string, holds func(api.Grant, api.ResizeResult, string) bool) {
	g.t.Helper()
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
		grant, result, request := g.state()
		if holds(grant, result, request) {
			return
		}
		if time.Now().After(end) {
			g.t.Fatalf("it didn't happen: %s: grant %+v, result %+v, request %q", what, grant, result, request)
		}
	}
}

const toTwelve = `{"v":1,"id":"r1","containers":{"app":{"memMiB":12000,"cores":50}}}`

// twelve waits for the one right answer to toTwelve.
func (g *resizeRig) twelve() {
	g.t.Helper()
	g.until("the resize is granted", func(grant api.Grant, result api.ResizeResult, request string) bool {
		c := grant.Containers["app"][0]
		return grant.Generation == 2 && c.MemMiB == 12000 && c.Cores == 50 && request == "" &&
			result == api.ResizeResult{Version: 1, ID: "r1", Outcome: api.ResizeGranted, Generation: 2}
	})
}

func (g *resizeRig) wantWrites(n int) {
	g.t.Helper()
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.writes != n {
		g.t.Fatalf("%d writes, want %d", g.writes, n)
	}
}

func (g *resizeRig) wantUsed(mib int64) {
	g.t.Helper()
	if u := g.l.Node("n1").Snapshot().View.Cards[0].Used.MemMiB; u != mib+50000 {
		g.t.Fatalf("%d MiB are booked, want %d", u, mib+50000)
	}
}

func TestAResizeIsAnsweredInOneWrite(t *testing.T) {
	g := newResizeRig(t)
	g.request(toTwelve)
	g.twelve()
	g.show()
	g.wantWrites(1)
	g.wantUsed(12000)
	// A second one waits until the first is in force.
	g.request(`{"v":1,"id":"r2","containers":{"app":{"memMiB":4000}}}`)
	time.Sleep(50 * time.Millisecond)
	g.wantWrites(1)
	g.setReport(12000, 2, 0)
	g.until("the second is granted", func(grant api.Grant, result api.ResizeResult, _ string) bool {
		return grant.Generation == 3 && grant.Containers["app"][0] == api.CardGrant{Card: "GPU-a", MemMiB: 4000, Cores: 50, Mode: api.ModeVGPU} && result.ID == "r2"
	})
	g.show()
	g.wantUsed(12000)
	g.setReport(4000, 3, 0)
	g.wantUsed(4000)
	// The same id asks for nothing: it was answered.
	g.request(`{"v":1,"id":"r2","containers":{"app":{"memMiB":40000}}}`)
	g.until("the request is dropped", func(grant api.Grant, result api.ResizeResult, request string) bool {
		return request == "" && grant.Generation == 3 && result.Generation == 3 && result.Outcome == api.ResizeGranted
	})
	g.wantUsed(4000)
}

func TestResizesThatAreRefusedSayWhy(t *testing.T) {
	quota := &corev1.ResourceQuota{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "q"},
		Spec: corev1.ResourceQuotaSpec{Hard: corev1.ResourceList{"requests.nvidia.com/gpumem": resource.MustParse("10k"), "requests.nvidia.com/gpucores": resource.MustParse("30")}}}
	scoped := quota.DeepCopy()
	scoped.Name, scoped.Spec.Scopes, scoped.Spec.Hard = "s", []corev1.ResourceQuotaScope{corev1.ResourceQuotaScopeBestEffort}, corev1.ResourceList{"requests.nvidia.com/gpumem": resource.MustParse("1")}
	g := newResizeRig(t, quota, scoped)
	for i, c := range []struct{ request, want string }{
		{`{"v":1,"id":"%s","containers":{"app":{"memMiB":40000}}}`, "n1: card 0 (GPU-a, ): asked 40000 MiB, free 31920 of 81920 MiB; held by default/b (50000 MiB, leaving)"},
		{`{"v":1,"id":"%s","containers":{"app":{"memMiB":10001}}}`, "ResourceQuota default/q allows requests.nvidia.com/gpumem of 10000; the namespace's shares hold 8000 and the resize takes 2001 more"},
		{`{"v":1,"id":"%s","containers":{"app":{"cores":31}}}`, "requests.nvidia.com/gpucores of 30"},
		{`{"v":1,"id":"%s","containers":{"side":{"cores":1}}}`, "container side has no share"},
		{`{"v":1,"id":"%s","containers":{"app":{"memMiB":0}}}`, `containers.app.memMiB: "0" is not allowed`},
		{`{"v":1,"id":"%s","containers":{"app":{"gpu":0}}}`, `unknown field "gpu"`},
	} {
		id := fmt.Sprint("r", i)
		g.request(fmt.Sprintf(c.request, id))
		g.until(c.want, func(grant api.Grant, result api.ResizeResult, request string) bool {
			return request == "" && grant.Generation == 1 && result.ID == id && result.Outcome == api.ResizeRefused && result.Generation == 1 && strings.Contains(result.Message, c.want)
		})
		g.show()
		g.wantUsed(8000)
	}
	g.request("{")
	g.until("what can't be read is refused", func(_ api.Grant, result api.ResizeResult, request string) bool {
		return request == "" && result.ID == "" && strings.Contains(result.Message, "decode resize")
	})
}

// Replies get lost, writes fail, others write at the same time, and the
// extender dies: one answer comes out of each.
func TestOneAnswerWhateverHappens(t *testing.T) {
	timeout := apierrors.NewTimeoutError("lost", 0)
	t.Run("the reply is lost", func(t *testing.T) {
		g := newResizeRig(t)
		g.fault = func(n int) (bool, error) { return true, timeout }
		g.request(toTwelve)
		g.twelve()
		g.show()
		g.wantWrites(1)
		g.wantUsed(12000)
	})
	t.Run("the API server is away for a while", func(t *testing.T) {
		g := newResizeRig(t)
		g.fault = func(n int) (bool, error) {
			if n <= 2*resizeTries {
				return false, timeout
			}
			return true, nil
		}
		g.request(toTwelve)
		g.twelve()
		g.wantWrites(1)
	})
	t.Run("somebody else writes at the same time", func(t *testing.T) {
		g := newResizeRig(t)
		g.fault = func(n int) (bool, error) {
			if n < 3 {
				g.pod = g.pod.DeepCopy()
				g.bump()
			}
			return true, nil
		}
		g.request(toTwelve)
		g.twelve()
		g.wantWrites(1)
	})
	t.Run("the user asks for something else meanwhile", func(t *testing.T) {
		g := newResizeRig(t)
		g.fault = func(n int) (bool, error) {
			if n == 1 {
				g.pod = g.pod.DeepCopy()
				g.pod.Annotations[api.AnnotationResize] = strings.Replace(toTwelve, "r1", "r9", 1)
				g.bump()
			}
			return true, nil
		}
		g.request(toTwelve)
		g.until("the later request is answered", func(grant api.Grant, result api.ResizeResult, request string) bool {
			return request == "" && result.ID == "r9" && grant.Generation == 2
		})
		g.show()
		g.wantWrites(1)
		g.wantUsed(12000)
	})
	t.Run("the write is forbidden", func(t *testing.T) {
		g := newResizeRig(t)
		g.fault = func(n int) (bool, error) {
			return n > 1, apierrors.NewForbidden(schema.GroupResource{Resource: "pods"}, "a", fmt.Errorf("for now"))
		}
		g.request(toTwelve)
		g.twelve()
		g.wantWrites(1)
	})
	t.Run("the extender dies before it writes", func(t *testing.T) {
		g := newResizeRig(t)
		g.fault = func(n int) (bool, error) { return false, timeout }
		g.request(toTwelve)
		g.until("it tries", func(api.Grant, api.ResizeResult, string) bool { g.mu.Lock(); defer g.mu.Unlock(); return g.patches > 0 })
		g.stop()
		g.fault = nil
		g.start()
		g.twelve()
		g.show()
		g.wantWrites(1)
		g.wantUsed(12000)
	})
	t.Run("the extender dies before the reply", func(t *testing.T) {
		g := newResizeRig(t)
		g.fault = func(n int) (bool, error) { g.cancel(); return true, timeout }
		g.request(toTwelve)
		<-g.done
		g.fault = nil
		g.start()
		g.twelve()
		g.wantWrites(1)
		g.wantUsed(12000)
	})
}

func TestWhatTheNodeRefusesIsTakenBack(t *testing.T) {
	for _, restart := range []bool{false, true} {
		g := newResizeRig(t)
		g.request(`{"v":1,"id":"r1","containers":{"app":{"memMiB":2000}}}`)
		g.until("it is granted", func(grant api.Grant, _ api.ResizeResult, _ string) bool { return grant.Generation == 2 })
		g.show()
		g.wantUsed(8000)
		// The next request comes before the refusal does.
		g.request(`{"v":1,"id":"r2","containers":{"app":{"memMiB":7000}}}`)
		if restart {
			g.stop()
		}
		g.setReport(8000, 1, 2)
		if restart {
			g.start()
		}
		g.until("it is taken back", func(grant api.Grant, result api.ResizeResult, request string) bool {
			return grant.Generation == 3 && grant.Containers["app"][0].MemMiB == 8000 && request != "" &&
				result.ID == "r1" && result.Outcome == api.ResizeRefused && result.Generation == 3 && strings.Contains(result.Message, "in use")
		})
		g.show()
		g.wantUsed(8000)
		g.setReport(8000, 3, 0)
		g.until("the next one is answered", func(grant api.Grant, result api.ResizeResult, request string) bool {
			return grant.Generation == 4 && grant.Containers["app"][0].MemMiB == 7000 && request == "" && result.ID == "r2"
		})
		g.wantWrites(3)
	}
}

// A pod that asks for no card keeps its identity in the informer, and its
// request, so that it is told.
func TestAPodWithoutAShareIsToldSo(t *testing.T) {
	g := newResizeRig(t)
	g.stop()
	g.mu.Lock()
	p := gpuPod("a")
	p.Spec.Containers[0].Resources = corev1.ResourceRequirements{}
	p.Annotations = map[string]string{api.AnnotationResize: toTwelve, "other": "x"}
	o, _ := trimPod(p)
	g.pod = o.(*corev1.Pod)
	g.bump()
	g.mu.Unlock()
	g.start()
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
		g.mu.Lock()
		r, _ := api.DecodeResizeResult(g.pod.Annotations[api.AnnotationResizeResult])
		left := g.pod.Annotations[api.AnnotationResize]
		g.mu.Unlock()
		if left == "" && r.Outcome == api.ResizeRefused && strings.Contains(r.Message, "holds no share") {
			return
		}
		if time.Now().After(end) {
			t.Fatalf("result %+v, request %q", r, left)
		}
	}
}
