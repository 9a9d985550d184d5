package extender_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	clienttesting "k8s.io/client-go/testing"
	wirev1 "k8s.io/kube-scheduler/extender/v1"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/v1alpha1"
	"github.com/carve-gpu/carve/scheduler-extender/ledger"
	"github.com/carve-gpu/carve/scheduler-extender/pki"
)

// HAMi's manifest works unchanged, and one write commits everything.
func TestAPodGetsItsGrantInTheBinding(t *testing.T) {
	r := newRig(t)
	r.managed("n1")
	p := newPod("a", "8k") // as the API server stores 8000
	p.Spec.Containers[0].Resources.Limits[api.ResourceCores] = resource.MustParse("30")
	p = r.run(p, "n1")
	g, err := api.DecodeGrant(p.Annotations[api.AnnotationGrant])
	if err != nil {
		t.Fatal(err)
	}
	want := api.Grant{Version: 1, UID: "uid-a", Node: "n1", Generation: 1, Containers: map[string][]api.CardGrant{
		"app": {{Card: "GPU-n1", MemMiB: 8000, Cores: 30, Mode: api.ModeVGPU}}}}
	if p.Spec.NodeName != "n1" || !reflect.DeepEqual(g, want) {
		t.Fatalf("node %s, grant %+v", p.Spec.NodeName, g)
	}
	if got := p.Annotations[api.AnnotationRequiredPlugins]; got != `["carve"]` {
		t.Errorf("required plugins %q: without them a container could start while the hook is away", got)
	}
	var writes []string
	for _, a := range r.kube.Actions() {
		if v := a.GetVerb(); v != "get" && v != "list" && v != "watch" {
			writes = append(writes, v+" "+a.GetResource().Resource+"/"+a.GetSubresource())
		}
	}
	// The node and the pod are the test's own.
	if fmt.Sprint(writes) != "[create nodes/ create pods/ create pods/binding]" {
		t.Fatalf("writes %v", writes)
	}
}

// Point 3 and share-11: a GPU-less init container, two with a share, a sidecar.
func TestGrantsAreByContainerName(t *testing.T) {
	r := newRig(t)
	r.managed("n1")
	limits := func(mib string) corev1.ResourceRequirements {
		return corev1.ResourceRequirements{Limits: corev1.ResourceList{api.ResourceMemory: resource.MustParse(mib)}}
	}
	always := corev1.ContainerRestartPolicyAlways
	p := newPod("a", "8Gi")
	p.Spec.InitContainers = []corev1.Container{{Name: "setup"}, {Name: "side", RestartPolicy: &always, Resources: limits("4000")}}
	p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Name: "second", Resources: limits("16000")})
	p = r.run(p, "n1")
	g, err := api.DecodeGrant(p.Annotations[api.AnnotationGrant])
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]int64{}
	for name, cards := range g.Containers {
		got[name] = cards[0].MemMiB
	}
	if !reflect.DeepEqual(got, map[string]int64{"side": 4000, "app": 8192, "second": 16000}) {
		t.Fatalf("grant %v", got)
	}
	if r.used("n1") != 28192 {
		t.Fatalf("%d MiB in use", r.used("n1"))
	}
}

// gang-20 and every other request that nobody sends.
func TestMalformedRequestsGetAnError(t *testing.T) {
	r := newRig(t)
	r.managed("n1")
	deep := bytes.Repeat([]byte("["), 1<<20)
	for name, c := range map[string]struct{ body, want string }{
		"nothing":                       {``, "not well-formed"},
		"not JSON":                      {`hello`, "not well-formed"},
		"null":                          {`null`, "not well-formed"},
		"no pod":                        {`{"NodeNames":["n1"]}`, "no Pod"},
		"neither Nodes nor NodeNames":   {`{"Pod":{"metadata":{"name":"a"}}}`, "neither Nodes nor NodeNames"},
		"null for both":                 {`{"Pod":{},"Nodes":null,"NodeNames":null}`, "neither Nodes nor NodeNames"},
		"Nodes only":                    {`{"Pod":{},"Nodes":{"items":[]}}`, "nodeCacheCapable: true"},
		"names that are numbers":        {`{"Pod":{},"NodeNames":[1]}`, "NodeNames"},
		"a pod that is a list":          {`{"Pod":[],"NodeNames":["n1"]}`, "Pod"},
		"an end too early":              {`{"Pod":{"spec":{},"NodeNames":["n1"]`, "not well-formed"},
		"something behind":              {`{"Pod":{},"NodeNames":[]}x`, "not well-formed"},
		"a million brackets":            {`{"Pod":` + string(deep), "not well-formed"},
		"a pod of a million brackets":   {`{"Pod":` + string(deep) + strings.Repeat("]", len(deep)) + `,"NodeNames":[]}`, "Pod"},
		"more than a request can have":  {`{"x":"` + strings.Repeat("x", 9<<20) + `"}`, "more than"},
		"a pod without a UID that asks": {`{"Pod":{"spec":{"containers":[{"name":"a","resources":{"limits":{"nvidia.com/gpu":"1"}}}]}},"NodeNames":["n1"]}`, "no UID"},
	} {
		t.Run(name, func(t *testing.T) {
			var f wirev1.ExtenderFilterResult
			r.post("filter", []byte(c.body), &f)
			if !strings.Contains(f.Error, c.want) {
				t.Fatalf("error %q, want %q", f.Error, c.want)
			}
			var list wirev1.HostPriorityList
			r.post("prioritize", []byte(c.body), &list)
			var b wirev1.ExtenderBindingResult
			r.post("bind", []byte(c.body), &b)
			if b.Error == "" {
				t.Fatal("bind has no error")
			}
		})
	}
}

func TestARequestThatCanNotBeMeantIsToldToThePod(t *testing.T) {
	r := newRig(t)
	r.managed("n1")
	p := newPod("a", "8000")
	p.Spec.Containers[0].Resources.Limits[api.ResourceCores] = resource.MustParse("101")
	f := r.filter(r.create(p), "n1")
	m := f.FailedAndUnresolvableNodes["carve"]
	if len(*f.NodeNames) != 0 || !strings.Contains(m, "nvidia.com/gpucores") || !strings.Contains(m, `"101"`) || !strings.Contains(m, "0 to 100") {
		t.Fatalf("%+v", f)
	}
}

// share-13: who isn't the scheduler gets nowhere.
func TestOnlyTheSchedulerIsServed(t *testing.T) {
	r := newRig(t)
	r.managed("n1")
	p := r.create(newPod("victim", "8000"))
	if f := r.filter(p, "n1"); f.Error != "" {
		t.Fatal(f.Error)
	}
	// Of the same CA, but under another name.
	stranger, err := pki.NewBundle("kube-scheduler", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	body := fmt.Appendf(nil, `{"PodName":"victim","PodNamespace":"default","PodUID":"uid-victim","Node":"n1"}`)
	for name, b := range map[string]pki.Bundle{"no certificate": {}, "a certificate of another CA": stranger} {
		for _, verb := range []string{"filter", "prioritize", "bind"} {
			resp, err := r.clientAs(b).Post(r.url+"/"+verb, "application/json", bytes.NewReader(body))
			if err == nil {
				resp.Body.Close()
				t.Errorf("%s: %s was answered %s", name, verb, resp.Status)
			}
		}
	}
	resp, err := http.Post(r.plain+"/bind", "application/json", bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusNotFound {
		t.Errorf("the plain port answered /bind with %s", resp.Status)
	}
	if r.used("n1") != 8000 || r.pod("victim").Spec.NodeName != "" {
		t.Fatal("the victim's offer was touched")
	}
	if e := r.bindTo(p, "n1"); e != "" {
		t.Fatal(e)
	}
}

func TestAnotherNameOfTheSameCAIsRefused(t *testing.T) {
	r := newRig(t)
	// The server was told to expect another name than this certificate's.
	other, err := pki.NewBundle("somebody", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	r.bundle = other
	r.start()
	resp, err := r.clientAs(other).Post(r.url+"/bind", "application/json", strings.NewReader(`{}`))
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusForbidden {
		t.Fatalf("answered %s", resp.Status)
	}
}

// share-13: a bind with the right certificate and a made-up story.
func TestBogusBindsAreRefusedAndDropNothing(t *testing.T) {
	r := newRig(t)
	r.managed("n1")
	r.managed("n2")
	victim := r.create(newPod("victim", "8000"))
	if f := r.filter(victim, "n1"); f.Error != "" {
		t.Fatal(f.Error)
	}
	never := r.create(newPod("never-filtered", "8000"))
	change := func(f func(p *corev1.Pod)) *corev1.Pod { p := victim.DeepCopy(); f(p); return p }
	for name, c := range map[string]struct {
		pod  *corev1.Pod
		node string
		want string
	}{
		"no offer":            {never, "n1", ledger.ErrNoOffer.Error()},
		"another UID":         {change(func(p *corev1.Pod) { p.UID = "uid-x" }), "n1", ledger.ErrNoOffer.Error()},
		"another name":        {change(func(p *corev1.Pod) { p.Name = "x" }), "n1", ledger.ErrNoOffer.Error()},
		"another namespace":   {change(func(p *corev1.Pod) { p.Namespace = "x" }), "n1", ledger.ErrNoOffer.Error()},
		"another node":        {victim, "n2", ledger.ErrOtherNode.Error()},
		"a node nobody knows": {victim, "n3", "not known"},
		"no UID":              {change(func(p *corev1.Pod) { p.UID = "" }), "n1", "all needed"},
	} {
		if e := r.bindTo(c.pod, c.node); !strings.Contains(e, c.want) {
			t.Errorf("%s: error %q, want %q", name, e, c.want)
		}
	}
	for _, a := range r.kube.Actions() {
		if a.GetSubresource() == "binding" {
			t.Error("a binding was written")
		}
	}
	if r.used("n1") != 8000 {
		t.Fatal("the victim's offer was dropped")
	}
	if e := r.bindTo(victim, "n1"); e != "" {
		t.Fatal(e)
	}
}

// share-5 and gang-22: every way in which the write can go wrong.
func TestBindFaults(t *testing.T) {
	gr := schema.GroupResource{Resource: "pods"}
	for name, c := range map[string]struct {
		fault func(r *rig, b *corev1.Binding) error
		error string // of the first try; empty: it succeeds
		used  int64  // after it
		again string // error of the second try, filter included
	}{
		"409, the room is free at once": {func(*rig, *corev1.Binding) error {
			return apierrors.NewConflict(gr, "a", errors.New("no"))
		}, "no", 0, ""},
		"403": {func(*rig, *corev1.Binding) error {
			return apierrors.NewForbidden(gr, "a", errors.New("no"))
		}, "no", 0, ""},
		"500 before the write, the room is kept for the next try": {func(*rig, *corev1.Binding) error {
			return apierrors.NewInternalError(errors.New("no"))
		}, "no", 8000, ""},
		"500 after the write is success": {func(r *rig, b *corev1.Binding) error {
			if err := r.commit(b); err != nil {
				return err
			}
			return apierrors.NewInternalError(errors.New("no"))
		}, "", 8000, ""},
		"the connection broke after the write": {func(r *rig, b *corev1.Binding) error {
			if err := r.commit(b); err != nil {
				return err
			}
			return io.ErrUnexpectedEOF
		}, "", 8000, ""},
		"the time ran out before the write": {func(*rig, *corev1.Binding) error { return context.DeadlineExceeded }, "deadline", 8000, ""},
		"somebody else bound it there with another grant": {func(r *rig, b *corev1.Binding) error {
			other := b.DeepCopy()
			other.Annotations = map[string]string{api.AnnotationGrant: "forged"}
			if err := r.commit(other); err != nil {
				return err
			}
			return r.commit(b)
		}, "another grant", 0, "another grant"},
		"somebody else bound it": {func(r *rig, b *corev1.Binding) error {
			other := b.DeepCopy()
			other.Annotations, other.Target.Name = nil, "elsewhere"
			if err := r.commit(other); err != nil {
				return err
			}
			return r.commit(b)
		}, "elsewhere", 0, "elsewhere"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			r.managed("n1")
			p := r.create(newPod("a", "8000"))
			r.filter(p, "n1")
			r.onBind(func(b *corev1.Binding) (bool, error) { return true, c.fault(r, b) })
			e := r.bindTo(p, "n1")
			if (e == "") != (c.error == "") || !strings.Contains(e, c.error) {
				t.Fatalf("error %q, want %q", e, c.error)
			}
			if r.used("n1") != c.used {
				t.Fatalf("%d MiB in use, want %d", r.used("n1"), c.used)
			}
			r.onBind(nil)
			r.filter(p, "n1")
			e = r.bindTo(p, "n1")
			if (e == "") != (c.again == "") || !strings.Contains(e, c.again) {
				t.Fatalf("second error %q, want %q", e, c.again)
			}
			if c.again == "" && (r.pod("a").Spec.NodeName != "n1" || r.used("n1") != 8000) {
				t.Fatalf("node %q, %d MiB in use", r.pod("a").Spec.NodeName, r.used("n1"))
			}
		})
	}
}

// gang-22: bind done, reply lost, the scheduler tries again.
func TestASecondBindSucceedsWithoutAWrite(t *testing.T) {
	r := newRig(t)
	r.managed("n1")
	p := r.run(newPod("a", "8000"), "n1")
	r.onBind(func(*corev1.Binding) (bool, error) { t.Error("written twice"); return false, nil })
	if e := r.bindTo(p, "n1"); e != "" {
		t.Fatal(e)
	}
}

func TestNodesThatAreNotManagedGetAPlainBinding(t *testing.T) {
	r := newRig(t)
	r.node("other", false)
	whole := newPod("a", "0")
	whole.Spec.Containers[0].Resources.Limits = corev1.ResourceList{api.ResourceGPU: resource.MustParse("1")}
	p := r.create(whole)
	r.until("the pod is known and bound", func() bool { return r.bindTo(p, "other") == "" })
	// A share would not be held there.
	share := r.create(newPod("share", "8000"))
	r.until("the share is known and refused", func() bool { return strings.Contains(r.bindTo(share, "other"), "doesn't manage") })
	if p := r.pod("share"); p.Spec.NodeName != "" {
		t.Fatalf("%+v", p)
	}
	if p = r.pod("a"); p.Spec.NodeName != "other" || p.Annotations[api.AnnotationGrant] != "" {
		t.Fatalf("%+v", p)
	}
	// A pod that asks for nothing goes anywhere.
	r.managed("n1")
	none := newPod("none", "0")
	none.Spec.Containers[0].Resources.Limits[api.ResourceGPU] = resource.MustParse("0")
	none = r.create(none)
	if f := r.filter(none, "n1", "other"); len(*f.NodeNames) != 2 {
		t.Fatalf("%+v", f)
	}
	r.until("the pod", func() bool { return r.bindTo(none, "n1") == "" })
	if p = r.pod("none"); p.Spec.NodeName != "n1" || p.Annotations[api.AnnotationGrant] != "" {
		t.Fatalf("%+v", p)
	}
}

// Over HTTP: filters and binds at once.
func TestOneOfSixteenIsBound(t *testing.T) {
	r := newRig(t)
	r.managed("n1")
	r.run(newPod("holder", "60000"), "n1")
	var mu sync.Mutex
	bound, refused := 0, 0
	var all sync.WaitGroup
	for i := range 16 {
		p := r.create(newPod(fmt.Sprint("p", i), "20000"))
		all.Go(func() {
			f := r.filter(p, "n1")
			if len(*f.NodeNames) == 0 {
				mu.Lock()
				defer mu.Unlock()
				refused++
				if m := f.FailedNodes["n1"]; !strings.Contains(m, "held by") || !strings.Contains(m, "default/holder (60000 MiB)") {
					t.Errorf("message %q", m)
				}
				return
			}
			e := r.bindTo(p, "n1")
			mu.Lock()
			defer mu.Unlock()
			if e == "" {
				bound++
			}
		})
	}
	all.Wait()
	if bound != 1 || refused != 15 || r.used("n1") != 80000 {
		t.Fatalf("%d bound, %d refused, %d MiB in use", bound, refused, r.used("n1"))
	}
}

// share-1, share-3: a burst is bound without a single error.
func TestABurstIsBound(t *testing.T) {
	r := newRig(t)
	names := []string{"n1", "n2", "n3", "n4", "n5", "n6"}
	for _, n := range names {
		r.managed(n)
	}
	var all sync.WaitGroup
	for i := range 48 {
		p := r.create(newPod(fmt.Sprint("p", i), "10240"))
		f := r.filter(p, names...) // kube-scheduler filters one by one
		if len(*f.NodeNames) != 1 {
			t.Fatalf("%+v", f)
		}
		all.Go(func() {
			if e := r.bindTo(p, (*f.NodeNames)[0]); e != "" {
				t.Error(e)
			}
		})
	}
	all.Wait()
	for _, n := range names {
		if r.used(n) != 81920 {
			t.Errorf("%s has %d MiB in use", n, r.used(n))
		}
	}
}

// share-9: the waiting pod is touched when the report
// drops the holder, not before, and within a second.
func TestAWaitingPodIsWokenWhenTheHolderLeft(t *testing.T) {
	r := newRig(t)
	r.managed("n1")
	r.run(newPod("holder", "60000"), "n1")
	r.reports.Modify(gpuNode("n1", v1alpha1.Slice{PodUID: "uid-holder", Container: "app", Namespace: "default", Pod: "holder", MemMiB: 60000, Mode: "vgpu", Generation: 1, State: v1alpha1.Active}))
	waiting := r.create(newPod("waiting", "40000"))
	if f := r.filter(waiting, "n1"); !strings.Contains(f.FailedNodes["n1"], "asked 40000 MiB, free 21920 of 81920 MiB; held by default/holder (60000 MiB)") {
		t.Fatalf("%+v", f)
	}
	if err := r.kube.CoreV1().Pods("default").Delete(t.Context(), "holder", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	r.until("the holder leaves", func() bool { h, _ := r.ledger.Held("uid-holder"); return h.State == ledger.Releasing })
	if f := r.filter(waiting, "n1"); !strings.Contains(f.FailedNodes["n1"], "default/holder (60000 MiB, leaving)") {
		t.Fatalf("%+v", f)
	}
	if r.pod("waiting").Annotations[api.AnnotationWake] != "" {
		t.Fatal("woken while the node still has the share")
	}
	r.reports.Modify(gpuNode("n1"))
	freed := time.Now()
	r.until("the wake", func() bool { return r.pod("waiting").Annotations[api.AnnotationWake] != "" })
	t.Logf("woken after %v", time.Since(freed))
	patches := 0
	for _, a := range r.kube.Actions() {
		if p, ok := a.(clienttesting.PatchAction); ok {
			patches++
			if b := string(p.GetPatch()); p.GetName() != "waiting" || !strings.Contains(b, `"uid":"uid-waiting"`) {
				t.Fatalf("patch of %s: %s", p.GetName(), b)
			}
		}
	}
	if patches != 1 {
		t.Fatalf("%d patches", patches)
	}
	if f := r.filter(waiting, "n1"); len(*f.NodeNames) != 1 {
		t.Fatalf("%+v", f)
	}
}

func TestAPodThatIsBoundByOthersWaitsNoMore(t *testing.T) {
	r := newRig(t)
	r.managed("n1")
	r.run(newPod("holder", "81920"), "n1")
	for _, name := range []string{"bound", "deleted"} {
		r.filter(r.create(newPod(name, "8000")), "n1")
	}
	if r.placer.Waiting() != 2 {
		t.Fatalf("%d wait", r.placer.Waiting())
	}
	if err := r.commit(&corev1.Binding{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "bound", UID: "uid-bound"}, Target: corev1.ObjectReference{Name: "elsewhere"}}); err != nil {
		t.Fatal(err)
	}
	r.until("the bound one", func() bool { return r.placer.Waiting() == 1 })
	if err := r.kube.CoreV1().Pods("default").Delete(t.Context(), "deleted", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	r.until("the deleted one", func() bool { return r.placer.Waiting() == 0 })
}

// I5: a restart loses offers and nothing else.
func TestARestartKnowsWhatIsBound(t *testing.T) {
	r := newRig(t)
	r.managed("n1")
	r.run(newPod("a", "60000"), "n1")
	offered := r.create(newPod("offered", "20000"))
	r.filter(offered, "n1")
	done := newPod("done", "10000")
	done.Spec.NodeName, done.Status.Phase = "n1", corev1.PodSucceeded
	r.create(done)
	forged := newPod("forged", "10000")
	forged.Annotations = map[string]string{api.AnnotationGrant: r.pod("a").Annotations[api.AnnotationGrant]}
	forged.Spec.NodeName = "n1"
	r.create(forged)
	r.start()
	r.until("the ledger", func() bool { return r.used("n1") == 60000 })
	if e := r.bindTo(offered, "n1"); !strings.Contains(e, ledger.ErrNoOffer.Error()) {
		t.Fatalf("error %q", e)
	}
	if f := r.filter(offered, "n1"); len(*f.NodeNames) != 1 {
		t.Fatalf("%+v", f)
	}
	if e := r.bindTo(offered, "n1"); e != "" {
		t.Fatal(e)
	}
	// The pod that was bound before is bound still.
	if e := r.bindTo(r.pod("a"), "n1"); e != "" {
		t.Fatal(e)
	}
}

// A pod that is deleted and made again under its name.
func TestTheUIDDecides(t *testing.T) {
	r := newRig(t)
	r.managed("n1")
	first := r.create(newPod("a", "8000"))
	r.filter(first, "n1")
	if err := r.kube.CoreV1().Pods("default").Delete(t.Context(), "a", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	second := newPod("a", "8000")
	second.UID = types.UID("uid-second")
	r.create(second)
	r.until("the offer ends with its pod", func() bool { return r.used("n1") == 0 })
	if e := r.bindTo(first, "n1"); e == "" {
		t.Fatal("the old UID was bound")
	}
	r.filter(second, "n1")
	if e := r.bindTo(second, "n1"); e != "" {
		t.Fatal(e)
	}
}

// Over HTTP/1.1 a burst of binds would open a connection each.
func TestVerbsSpeakHTTP2(t *testing.T) {
	r := newRig(t)
	resp, err := r.client.Post(r.url+"/filter", "application/json", strings.NewReader(`{}`))
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.Proto != "HTTP/2.0" {
		t.Fatalf("protocol %s", resp.Proto)
	}
}

// Until the ledger shows the cluster nothing is offered and nothing bound.
func TestNotReady(t *testing.T) {
	r := newRig(t)
	r.managed("n1")
	p := r.create(newPod("a", "8000"))
	r.filter(p, "n1")
	r.ready.Store(false)
	if f := r.filter(p, "n1"); !strings.Contains(f.Error, "not complete") {
		t.Fatalf("%+v", f)
	}
	if e := r.bindTo(p, "n1"); !strings.Contains(e, "not complete") {
		t.Fatalf("error %q", e)
	}
	resp, err := http.Get(r.plain + "/readyz")
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	if resp.StatusCode != http.StatusServiceUnavailable {
		t.Fatalf("readyz is %s", resp.Status)
	}
}

func TestPlainPort(t *testing.T) {
	r := newRig(t)
	r.managed("n1")
	r.run(newPod("a", "8000"), "n1")
	r.filter(r.create(newPod("b", "81000")), "n1")
	for path, want := range map[string]string{
		"/healthz": "ok", "/readyz": "ok",
		"/metrics": `carve_ledger_memory_mib{kind="free"} 73920`,
	} {
		resp, err := http.Get(r.plain + path)
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil || resp.StatusCode != http.StatusOK || !strings.Contains(string(b), want) {
			t.Errorf("%s: %s, %v: %.2000s", path, resp.Status, err, b)
		}
		if path != "/metrics" {
			continue
		}
		for _, m := range []string{`carve_extender_refusals_total{reason="memory"} 1`, `carve_extender_binds_total{result="granted"} 1`, `carve_ledger_entries{state="bound"} 1`, `carve_extender_verb_seconds_count{verb="filter"} 2`} {
			if !strings.Contains(string(b), m) {
				t.Errorf("no %s", m)
			}
		}
	}
}
