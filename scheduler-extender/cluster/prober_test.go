package cluster

import (
	"context"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/scheduler-extender/fit"
)

// probedPod is a ready agent whose kubelet asks it at the given address.
func probedPod(node, address string) *corev1.Pod {
	p := agentPod(node, true)
	host, port, _ := net.SplitHostPort(address)
	n, _ := strconv.Atoi(port)
	p.Spec.HostNetwork = true
	p.Spec.Containers = []corev1.Container{{Name: "node", Ports: []corev1.ContainerPort{{Name: "metrics", ContainerPort: int32(n)}},
		ReadinessProbe: &corev1.Probe{ProbeHandler: corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Path: "/readyz", Port: intstr.FromString("metrics")}}}}}
	p.Status.HostIP = host
	return p
}

func TestWhereTheAgentIsAsked(t *testing.T) {
	for name, c := range map[string]struct {
		change func(p *corev1.Pod)
		want   string
	}{
		"a named port":                    {func(*corev1.Pod) {}, "http://10.0.0.1:9410/readyz"},
		"a number":                        {func(p *corev1.Pod) { p.Spec.Containers[0].ReadinessProbe.HTTPGet.Port = intstr.FromInt32(9999) }, "http://10.0.0.1:9999/readyz"},
		"a name that no port has":         {func(p *corev1.Pod) { p.Spec.Containers[0].ReadinessProbe.HTTPGet.Port = intstr.FromString("x") }, ""},
		"an address of version 6":         {func(p *corev1.Pod) { p.Status.HostIP = "fd00::1" }, "http://[fd00::1]:9410/readyz"},
		"a pod with a network of its own": {func(p *corev1.Pod) { p.Spec.HostNetwork = false }, ""},
		"a pod that isn't placed yet":     {func(p *corev1.Pod) { p.Status.HostIP = "" }, ""},
		"a pod without a probe":           {func(p *corev1.Pod) { p.Spec.Containers[0].ReadinessProbe = nil }, ""},
	} {
		p := probedPod("n1", "10.0.0.1:9410")
		c.change(p)
		if got := probeAddress(p); got != c.want {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}

// The API shows the agent ready all the while; what it says itself decides, and
// a node that was found down serves again as soon as it answers.
func TestAnAgentIsAskedInPerson(t *testing.T) {
	var status atomic.Int32
	status.Store(http.StatusOK)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(int(status.Load())) }))
	defer server.Close()
	address := strings.TrimPrefix(server.URL, "http://")
	r := newTaintRig(t, managedNode("n1"), probedPod("n1", address))
	blocked := func() fit.Reason { return r.ledger.Node("n1").Snapshot().View.Blocked }
	ask := func() { r.source.Look(t.Context(), "n1") }
	r.until("the node serves", func() bool { return blocked() == "" })
	if ask(); blocked() != "" {
		t.Fatal("an agent that answers was taken for dead")
	}
	// The kubelet is gone, or the hook: the agent says so.
	status.Store(http.StatusServiceUnavailable)
	if ask(); blocked() != fit.ReasonAgentDown || !strings.Contains(r.ledger.Node("n1").Snapshot().View.Why, "its process does not answer") {
		t.Fatalf("blocked by %q, %q", blocked(), r.ledger.Node("n1").Snapshot().View.Why)
	}
	status.Store(http.StatusOK)
	r.until("it answers again", func() bool { return blocked() == "" })
	// The process is gone; nobody listens.
	server.CloseClientConnections()
	server.Close()
	if ask(); blocked() != fit.ReasonAgentDown {
		t.Fatalf("blocked by %q", blocked())
	}
	// A status that changes nothing about its being ready doesn't clear it.
	p := probedPod("n1", address)
	p.Status.Reason = "x"
	r.update(p)
	if ask(); blocked() != fit.ReasonAgentDown {
		t.Fatalf("blocked by %q", blocked())
	}
	// Its successor listens at the same place.
	l, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatalf("listen where the agent did: %v", err)
	}
	next := &httptest.Server{Listener: l, Config: &http.Server{Handler: http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})}}
	next.Start()
	defer next.Close()
	r.until("its successor answers", func() bool { return blocked() == "" })
}

func (r *taintRig) update(p *corev1.Pod) {
	r.t.Helper()
	if err := r.kube.Tracker().Update(corev1.SchemeGroupVersion.WithResource("pods"), p, api.Namespace); err != nil {
		r.t.Fatal(err)
	}
}

// When the API shows the agent down as well, the API shows when it is back.
func TestTheAPIDecidesWhereItKnows(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := l.Addr().String()
	l.Close() // nobody listens there
	r := newTaintRig(t, managedNode("n1"), probedPod("n1", address))
	blocked := func() fit.Reason { return r.ledger.Node("n1").Snapshot().View.Blocked }
	r.until("the node serves", func() bool { return blocked() == "" })
	if r.source.Look(t.Context(), "n1"); blocked() != fit.ReasonAgentDown {
		t.Fatalf("blocked by %q", blocked())
	}
	r.update(agentPod("n1", false))
	r.until("the API's word", func() bool { return !strings.Contains(r.ledger.Node("n1").Snapshot().View.Why, "does not answer") })
	r.update(agentPod("n1", true)) // one that nobody can ask
	r.until("the node serves", func() bool { return blocked() == "" })
}

// No answer is no sign: the network may be closed to the extender. So is an
// answer that says something else.
func TestSilenceIsNoSign(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0") // accepts, and says nothing
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	strange := httptest.NewServer(http.NotFoundHandler())
	defer strange.Close()
	for name, address := range map[string]string{"a silent port": l.Addr().String(), "another program's port": strings.TrimPrefix(strange.URL, "http://")} {
		r := newTaintRig(t, managedNode("n1"), probedPod("n1", address))
		r.until("the node serves", func() bool { return r.ledger.Node("n1").Snapshot().View.Blocked == "" })
		r.source.Look(context.Background(), "n1")
		if b := r.ledger.Node("n1").Snapshot().View.Blocked; b != "" {
			t.Errorf("%s: blocked by %q", name, b)
		}
	}
}
