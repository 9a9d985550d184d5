package extender_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/cache"
	cachetesting "k8s.io/client-go/tools/cache/testing"
	wirev1 "k8s.io/kube-scheduler/extender/v1"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/v1alpha1"
	extender "github.com/carve-gpu/carve/scheduler-extender"
	"github.com/carve-gpu/carve/scheduler-extender/cluster"
	"github.com/carve-gpu/carve/scheduler-extender/fit"
	"github.com/carve-gpu/carve/scheduler-extender/ledger"
	"github.com/carve-gpu/carve/scheduler-extender/pki"
	"github.com/carve-gpu/carve/scheduler-extender/place"
	"github.com/carve-gpu/carve/scheduler-extender/score"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// rig is the whole extender, as `carve extender` wires it, against client-go's
// fake API server, and a caller with the scheduler's certificate.
type rig struct {
	t       *testing.T
	kube    *fake.Clientset
	reports *cachetesting.FakeControllerSource
	ledger  *ledger.Ledger
	placer  *place.Placer
	source  *cluster.Source
	url     string
	plain   string
	bundle  pki.Bundle
	client  *http.Client
	stop    func()
	ready   atomic.Bool

	mu   sync.Mutex
	bind func(b *corev1.Binding) (handled bool, err error) // a fault, if set
}

func newRig(t *testing.T, objects ...runtime.Object) *rig {
	t.Helper()
	r := &rig{t: t, kube: fake.NewClientset(objects...), reports: cachetesting.NewFakeControllerSource()}
	t.Cleanup(r.reports.Shutdown)
	r.kube.PrependReactor("create", "pods", r.binding)
	bundle, err := pki.NewBundle("kube-scheduler", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	r.bundle = bundle
	r.client = r.clientAs(bundle)
	r.start()
	return r
}

// start runs an extender; the test ends it. Called again it is a restart.
func (r *rig) start() {
	t := r.t
	t.Helper()
	if r.stop != nil {
		r.stop()
	}
	ctx, cancel := context.WithCancel(context.Background())
	log := slog.New(slog.DiscardHandler)
	if testing.Verbose() {
		log = slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelDebug}))
	}
	r.ledger = ledger.New(ledger.Config{})
	r.placer = place.New(r.ledger, place.Config{Policy: score.Binpack})
	source, err := cluster.NewSource(cluster.Config{
		Kube: r.kube, Reports: cache.NewSharedIndexInformer(r.reports, &v1alpha1.GPUNode{}, 0, cache.Indexers{}),
		Ledger: r.ledger, Forget: func(uid string) { r.placer.Forget(uid) }, Log: log, Now: time.Now,
	})
	if err != nil {
		t.Fatal(err)
	}
	r.source = source
	waker := cluster.Waker{Kube: r.kube, Ledger: r.ledger, Placer: r.placer, Ready: source.Ready, Tainted: source.Tainted, Log: log, Now: time.Now}
	certs, err := pki.NewServer(r.bundle, []string{"127.0.0.1"}, time.Now)
	if err != nil {
		t.Fatal(err)
	}
	server := extender.New(extender.Config{
		Ledger: r.ledger, Placer: r.placer, Binder: cluster.Binder{Kube: r.kube, Pods: source}, Pods: source, Agents: source, Ready: func() bool { return r.ready.Load() && source.Ready() },
		Client: "kube-scheduler", Registry: prometheus.NewRegistry(), Log: log, Now: time.Now,
	})
	r.ready.Store(true)
	verbs, plain := listen(t), listen(t)
	r.url, r.plain = "https://"+verbs.Addr().String(), "http://"+plain.Addr().String()
	var parts sync.WaitGroup
	parts.Go(func() {
		if err := source.Run(ctx); err != nil && ctx.Err() == nil {
			t.Errorf("source: %v", err)
		}
	})
	parts.Go(func() { waker.Run(ctx) })
	parts.Go(func() {
		if err := server.Serve(ctx, verbs, certs.TLS(), plain); err != nil {
			t.Errorf("serve: %v", err)
		}
	})
	r.stop = sync.OnceFunc(func() {
		r.client.CloseIdleConnections()
		http.DefaultClient.CloseIdleConnections()
		cancel()
		parts.Wait()
	})
	t.Cleanup(r.stop)
	r.until("the extender is ready", source.Ready)
}

func listen(t *testing.T) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return l
}

func (r *rig) clientAs(b pki.Bundle) *http.Client {
	r.t.Helper()
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(r.bundle.CACert)
	c := &tls.Config{RootCAs: pool}
	if len(b.ClientCert) > 0 {
		cert, err := tls.X509KeyPair(b.ClientCert, b.ClientKey)
		if err != nil {
			r.t.Fatal(err)
		}
		c.Certificates = []tls.Certificate{cert}
	}
	tr := &http.Transport{TLSClientConfig: c, ForceAttemptHTTP2: true}
	r.t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr, Timeout: 20 * time.Second}
}

// until waits for something that other goroutines bring about.
func (r *rig) until(what string, ok func() bool) {
	r.t.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			r.t.Fatalf("never seen: %s", what)
		}
	}
}

// binding does what the API server does with a Binding.
func (r *rig) binding(action clienttesting.Action) (bool, runtime.Object, error) {
	if action.GetSubresource() != "binding" {
		return false, nil, nil
	}
	b := action.(clienttesting.CreateAction).GetObject().(*corev1.Binding)
	r.mu.Lock()
	fault := r.bind
	r.mu.Unlock()
	if fault != nil {
		if handled, err := fault(b); handled {
			return true, nil, err
		}
	}
	return true, nil, r.commit(b)
}

func (r *rig) commit(b *corev1.Binding) error {
	gr := schema.GroupResource{Resource: "pods"}
	gvr := schema.GroupVersionResource{Version: "v1", Resource: "pods"}
	o, err := r.kube.Tracker().Get(gvr, b.Namespace, b.Name)
	if err != nil {
		return err
	}
	p := o.(*corev1.Pod).DeepCopy()
	switch {
	case p.UID != b.UID:
		return apierrors.NewConflict(gr, b.Name, fmt.Errorf("precondition failed: UID is %s", p.UID))
	case p.Spec.NodeName != "":
		return apierrors.NewConflict(gr, b.Name, fmt.Errorf("pod is already assigned to node %q", p.Spec.NodeName))
	}
	p.Spec.NodeName = b.Target.Name
	for k, v := range b.Annotations {
		metav1.SetMetaDataAnnotation(&p.ObjectMeta, k, v)
	}
	return r.kube.Tracker().Update(gvr, p, b.Namespace)
}

// onBind sets a fault for the binds that follow.
func (r *rig) onBind(f func(b *corev1.Binding) (bool, error)) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.bind = f
}

func (r *rig) node(name string, managed bool) {
	r.t.Helper()
	n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
	if managed {
		n.Labels = map[string]string{api.LabelManaged: "true"}
	}
	if _, err := r.kube.CoreV1().Nodes().Create(r.t.Context(), n, metav1.CreateOptions{}); err != nil {
		r.t.Fatal(err)
	}
	r.until("node "+name, func() bool { n := r.ledger.Node(name); return n != nil && n.Snapshot().Known })
}

// gpuNode reports one card of 80 GiB with the given slices.
func gpuNode(name string, slices ...v1alpha1.Slice) *v1alpha1.GPUNode {
	now := metav1.Now()
	return &v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: name}, Status: v1alpha1.GPUNodeStatus{HookConnectedSince: &now, Cards: []v1alpha1.Card{{
		UUID: "GPU-" + name, Model: "NVIDIA A100-80", MemoryMiB: 81920, Health: v1alpha1.Health{State: v1alpha1.Healthy}, Slices: slices}}}}
}

// agentPod is the agent's pod of a node, ready or not.
func agentPod(node string, ready bool) *corev1.Pod {
	status := corev1.ConditionFalse
	if ready {
		status = corev1.ConditionTrue
	}
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: api.Namespace, Name: "carve-node-" + node, UID: types.UID("uid-agent-" + node),
			Labels: map[string]string{api.LabelName: api.AgentName}},
		Spec:   corev1.PodSpec{NodeName: node, Containers: []corev1.Container{{Name: "node"}}},
		Status: corev1.PodStatus{Phase: corev1.PodRunning, Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: status}}},
	}
}

// agent makes or changes the agent's pod of a node, past the client whose
// writes tests look at.
func (r *rig) agent(p *corev1.Pod) {
	r.t.Helper()
	gvr := corev1.SchemeGroupVersion.WithResource("pods")
	err := r.kube.Tracker().Update(gvr, p, p.Namespace)
	if apierrors.IsNotFound(err) {
		err = r.kube.Tracker().Create(gvr, p, p.Namespace)
	}
	if err != nil {
		r.t.Fatal(err)
	}
}

// blocked waits until the ledger has a node blocked for the given reason, ""
// for none.
func (r *rig) blocked(node string, want fit.Reason) {
	r.t.Helper()
	r.until(fmt.Sprintf("node %s blocked by %q", node, want), func() bool { return r.ledger.Node(node).Snapshot().View.Blocked == want })
}

// managed adds a node with one card and a live agent.
func (r *rig) managed(name string) {
	r.t.Helper()
	r.reports.Add(gpuNode(name))
	r.agent(agentPod(name, true))
	r.node(name, true)
	r.until("the report of "+name, func() bool { return len(r.ledger.Node(name).Snapshot().View.Cards) == 1 })
	r.blocked(name, "")
}

// newPod is a pod that asks for MiB of one card.
func newPod(name, mib string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID("uid-" + name)},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "app", Resources: corev1.ResourceRequirements{
			Limits: corev1.ResourceList{api.ResourceGPU: resource.MustParse("1"), api.ResourceMemory: resource.MustParse(mib)}}}}},
	}
}

func (r *rig) create(p *corev1.Pod) *corev1.Pod {
	r.t.Helper()
	p, err := r.kube.CoreV1().Pods(p.Namespace).Create(r.t.Context(), p, metav1.CreateOptions{})
	if err != nil {
		r.t.Fatal(err)
	}
	return p
}

func (r *rig) pod(name string) *corev1.Pod {
	r.t.Helper()
	p, err := r.kube.CoreV1().Pods("default").Get(r.t.Context(), name, metav1.GetOptions{})
	if err != nil {
		r.t.Fatal(err)
	}
	return p
}

// post sends a body as kube-scheduler does, and decodes the reply into out.
func (r *rig) post(verb string, body, out any) {
	r.t.Helper()
	raw, ok := body.([]byte)
	if !ok {
		var err error
		if raw, err = json.Marshal(body); err != nil {
			r.t.Fatal(err)
		}
	}
	resp, err := r.client.Post(r.url+"/"+verb, "application/json", bytes.NewReader(raw))
	if err != nil {
		r.t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		b, _ := io.ReadAll(resp.Body)
		r.t.Fatalf("%s: %s: %s", verb, resp.Status, b)
	}
	if err := json.NewDecoder(resp.Body).Decode(out); err != nil {
		r.t.Fatal(err)
	}
}

func (r *rig) filter(p *corev1.Pod, nodes ...string) wirev1.ExtenderFilterResult {
	r.t.Helper()
	var out wirev1.ExtenderFilterResult
	r.post("filter", &wirev1.ExtenderArgs{Pod: p, NodeNames: &nodes}, &out)
	return out
}

func (r *rig) bindTo(p *corev1.Pod, node string) string {
	r.t.Helper()
	var out wirev1.ExtenderBindingResult
	r.post("bind", &wirev1.ExtenderBindingArgs{PodName: p.Name, PodNamespace: p.Namespace, PodUID: p.UID, Node: node}, &out)
	return out.Error
}

// run takes a new pod all the way.
func (r *rig) run(p *corev1.Pod, nodes ...string) *corev1.Pod {
	r.t.Helper()
	p = r.create(p)
	f := r.filter(p, nodes...)
	if f.Error != "" || f.NodeNames == nil || len(*f.NodeNames) == 0 {
		r.t.Fatalf("filter %s: %+v", p.Name, f)
	}
	if e := r.bindTo(p, (*f.NodeNames)[0]); e != "" {
		r.t.Fatalf("bind %s: %s", p.Name, e)
	}
	return r.pod(p.Name)
}

func (r *rig) used(node string) int64 {
	return r.ledger.Node(node).Snapshot().View.Cards[0].Used.MemMiB
}
