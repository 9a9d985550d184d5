// Command bench measures what a scheduling decision costs the extender: CPU
// time of its process for filter, prioritize and bind of one pod, by cluster
// size, and for how long a filter call that names every node is answered, by
// kube-scheduler's clock. It prints one line for each figure and nothing else on
// stdout.
//
// The process that is measured serves the verbs as `carve extender` does: mTLS,
// HTTP/2, client-go for the Binding. A second process, which isn't measured,
// plays kube-scheduler (one pod at a time, every node named) and the API
// server. What a bind brings about in the ledger, the pod's event and its
// node's report, is applied in the measured process, decoded already.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

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

const (
	cardsPerNode = 8
	podsPerNode  = 8
	warmPods     = 200
	pods         = 1000
)

func main() {
	var err error
	if len(os.Args) == 3 && os.Args[1] == "load" {
		err = load(os.Args[2])
	} else {
		sizes := flag.String("nodes", "100,1000,5000,10000", "numbers of nodes, each of eight cards and eight pods")
		policy := flag.String("policy", score.Binpack.Name, "price, binpack or spread")
		flag.Parse()
		err = run(strings.Split(*sizes, ","), *policy)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1)
	}
}

func run(sizes []string, name string) error {
	policy, ok := score.ByName(name)
	if !ok {
		return fmt.Errorf("-policy %q: allowed are price, binpack, spread", name)
	}
	for _, size := range sizes {
		nodes, err := strconv.Atoi(size)
		if err != nil || nodes < 1 {
			return fmt.Errorf("-nodes %q: a number of nodes is needed", size)
		}
		fmt.Fprintf(os.Stderr, "%d nodes, policy %s\n", nodes, name)
		f, err := measure(nodes, policy)
		if err != nil {
			return err
		}
		fmt.Printf("cpu_ms_per_pod_%d %.3f ms\n", nodes, f.cpuMS)
		fmt.Printf("p99_ms_unplanned_%d %.2f ms\n", nodes, f.p99MS)
		fmt.Printf("p99_ms_planned_%d %.2f ms\n", nodes, f.plannedMS)
		fmt.Printf("plan_p99_ms_%d %.2f ms\n", nodes, f.planMS)
		fmt.Printf("heap_mib_%d %.0f MiB\n", nodes, f.heapMiB)
		fmt.Printf("api_writes_per_pod_offered_%d %.2f count\n", nodes, f.callsPerPod)
		fmt.Printf("overcommits_%d %d count\n", nodes, f.overcommits)
	}
	p99, err := webhookLatency()
	if err == nil {
		fmt.Printf("webhook_p99_ms %.2f ms\n", float64(p99.Microseconds())/1000)
	}
	return err
}

// figures of one size of cluster: CPU time a pod, how long 99 of 100 filter calls take at most,
// with all nodes and of planned pods, how long it takes to choose among all nodes for a plan,
// and what is on the heap.
type figures struct {
	cpuMS, p99MS, plannedMS, planMS, heapMiB float64
	callsPerPod                              float64 // of the API server, by the extender
	// overcommits are the pods that were bound beyond what there was room for, by callers
	// that asked at the same time.
	overcommits int
}

func nodeName(i int) string {
	return fmt.Sprintf("ip-10-%d-%d-%d.eu-central-1.compute.internal", i>>12, i>>6&63, i&63)
}

// site is the cluster as the API would show it.
type site struct {
	*ledger.Ledger
	cluster.Binder
	reports map[string]*v1alpha1.GPUNode
}

// Bind writes the Binding and takes in what follows from it.
func (s *site) Bind(ctx context.Context, pod ledger.Ref, node, grant string) (ledger.Outcome, error) {
	outcome, err := s.Binder.Bind(ctx, pod, node, grant)
	if err != nil {
		return outcome, err
	}
	g, err := api.DecodeGrant(grant)
	if err != nil {
		return outcome, err
	}
	s.run(pod, g)
	return outcome, nil
}

// What nodes have, and pods ask, beside cards.
var nodeHost, podHost = fit.Host{CPUMilli: 192_000, MemMiB: 2 << 20, Pods: 110}, fit.Host{CPUMilli: 4000, MemMiB: 16 << 10, Pods: 1}

// run shows a pod bound, and its share in place.
func (s *site) run(pod ledger.Ref, g api.Grant) {
	var cs []ledger.Container
	r := s.reports[g.Node]
	for name, cards := range g.Containers {
		cs = append(cs, ledger.Container{Name: name})
		for _, c := range cards {
			for i := range r.Status.Cards {
				if card := &r.Status.Cards[i]; card.UUID == c.Card {
					card.Slices = append(card.Slices, v1alpha1.Slice{PodUID: pod.UID, Container: name, Namespace: pod.Namespace, Pod: pod.Name,
						MemMiB: c.MemMiB, Cores: int32(c.Cores), Mode: string(c.Mode), Generation: 1, State: v1alpha1.Active})
				}
			}
		}
	}
	now := time.Now()
	s.SetHost(pod.UID, g.Node, podHost)
	s.SetPod(ledger.Pod{Ref: pod, Node: g.Node, Grant: &g, Containers: cs, Started: true}, now)
	s.SetReport(r, now)
}

func (s *site) Asks(ledger.Ref) (api.Request, bool) { return api.Request{}, false }

// newSite has nodes with eight cards of 80 GiB and eight pods each.
func newSite(nodes int) *site {
	s := &site{Ledger: ledger.New(ledger.Config{}), reports: map[string]*v1alpha1.GPUNode{}}
	since := metav1.Now()
	for i := range nodes {
		name := nodeName(i)
		g := &v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: name}, Status: v1alpha1.GPUNodeStatus{HookConnectedSince: &since}}
		for c := range cardsPerNode {
			g.Status.Cards = append(g.Status.Cards, v1alpha1.Card{UUID: fmt.Sprintf("GPU-%08x-0000-4000-8000-%012x", i, c), Index: int32(c),
				Model: "NVIDIA A100-SXM4-80GB", MemoryMiB: 81920, PhysicalMiB: 81920, Health: v1alpha1.Health{State: v1alpha1.Healthy}})
		}
		s.reports[name] = g
		s.SetNode(name, ledger.NodeInfo{Managed: true, Host: nodeHost})
		s.SetAgent(name, ledger.Agent{Ready: true})
		s.SetReport(g, since.Time)
		for p := range podsPerNode {
			uid := fmt.Sprintf("%08x-aaaa-4000-8000-%012x", i, p)
			s.run(ledger.Ref{UID: uid, Namespace: "default", Name: "old-" + uid}, api.Grant{Version: 1, UID: uid, Node: name, Generation: 1,
				Containers: map[string][]api.CardGrant{"app": {{Card: g.Status.Cards[p%cardsPerNode].UUID, MemMiB: 16000, Cores: 20, Mode: api.ModeVGPU}}}})
		}
	}
	return s
}

// order is what the load process is told, as one line of JSON.
type order struct {
	URL, Credentials string
	Nodes            int
}

func measure(nodes int, policy score.Policy) (figures, error) {
	dir, err := os.MkdirTemp("", "carve-bench-")
	if err != nil {
		return figures{}, err
	}
	defer os.RemoveAll(dir)
	bundle, err := pki.NewBundle("kube-scheduler", time.Now())
	if err != nil {
		return figures{}, err
	}
	if err := bundle.WriteClient(dir); err != nil {
		return figures{}, err
	}
	certs, err := pki.NewServer(bundle, []string{"127.0.0.1"}, time.Now)
	if err != nil {
		return figures{}, err
	}
	s := newSite(nodes)
	verbs, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return figures{}, err
	}
	plain, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return figures{}, err
	}
	text, err := json.Marshal(order{"https://" + verbs.Addr().String(), dir, nodes})
	if err != nil {
		return figures{}, err
	}
	load, err := startLoad(string(text))
	if err != nil {
		return figures{}, err
	}
	defer load.stop()
	apiServer, err := load.line() // where the API server listens
	if err != nil {
		return figures{}, err
	}
	kube, err := kubernetes.NewForConfig(&rest.Config{Host: apiServer, QPS: -1,
		ContentConfig: rest.ContentConfig{ContentType: "application/vnd.kubernetes.protobuf", AcceptContentTypes: "application/vnd.kubernetes.protobuf,application/json"}})
	if err != nil {
		return figures{}, err
	}
	s.Binder = cluster.Binder{Kube: kube}
	placer := place.New(s.Ledger, place.Config{Policy: policy})
	server := extender.New(extender.Config{
		Ledger: s.Ledger, Placer: placer, Binder: s, Pods: s,
		Ready: func() bool { return true }, Client: "kube-scheduler", Registry: prometheus.NewRegistry(),
		Log: slog.New(slog.NewTextHandler(io.Discard, nil)), Now: time.Now,
	})
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error, 1)
	go func() { served <- server.Serve(ctx, verbs, certs.TLS(), plain) }()
	defer func() { cancel(); <-served }()

	if _, _, err := load.schedule(task{Pods: warmPods}); err != nil {
		return figures{}, err
	}
	before := s.Totals()
	start := cpu()
	p99, calls, err := load.schedule(task{Pods: pods})
	if err != nil {
		return figures{}, err
	}
	used := cpu() - start
	if after := s.Totals(); after.Bound != before.Bound+pods || after.DebtMiB != 0 {
		return figures{}, fmt.Errorf("%d of %d pods were bound, debt %d MiB", after.Bound-before.Bound, pods, after.DebtMiB)
	}
	runtime.GC()
	var heap runtime.MemStats
	runtime.ReadMemStats(&heap)
	do, plan, err := s.plan(placer, nodes)
	if err != nil {
		return figures{}, err
	}
	planned, _, err := load.schedule(do)
	if err != nil {
		return figures{}, err
	}
	over, err := s.race(load, nodes)
	if err != nil {
		return figures{}, err
	}
	return figures{float64(used.Microseconds()) / 1000 / pods, p99, planned, plan, float64(heap.HeapAlloc) / (1 << 20), float64(calls) / pods, over}, nil
}

// raced is for how many nodes callers compete.
const raced = 50

// race has callers compete for the last room of some nodes' cards, and counts by how much more
// was given than there was.
func (s *site) race(load *loadProcess, nodes int) (over int, err error) {
	var names []string
	room := 0
	for i := range min(raced, nodes) {
		n := s.Node(nodeName(i))
		names = append(names, n.Name)
		for _, c := range n.Snapshot().View.Cards {
			if c.Free().MemMiB >= raceMiB {
				room++
			}
		}
	}
	if err := json.NewEncoder(load.in).Encode(task{Race: names}); err != nil {
		return 0, err
	}
	reply, err := load.line()
	if err != nil {
		return 0, err
	}
	bound := 0
	if _, err := fmt.Sscanf(reply, "bound %d", &bound); err != nil {
		return 0, errors.New(reply)
	}
	if over = max(0, bound-room); over == 0 && bound < room {
		return 0, fmt.Errorf("%d pods of %d MiB were bound where there was room for %d", bound, raceMiB, room)
	}
	if debt := s.Totals().DebtMiB; debt > 0 {
		over = max(over, 1)
	}
	return over, nil
}

// plan decides on the pods that come next, over all nodes, as the planner does, and for how
// many milliseconds 99 of 100 decisions went on at most.
func (s *site) plan(placer *place.Placer, nodes int) (do task, p99 float64, err error) {
	names := make([][]byte, nodes)
	for i := range names {
		names[i] = []byte(nodeName(i))
	}
	var took []time.Duration
	for i := range pods {
		p, err := cluster.PodOf(pod(warmPods + pods + i + 1))
		if err != nil {
			return do, 0, err
		}
		start := time.Now()
		out := placer.Plan(p, names, place.Plan{Spares: 7, For: time.Hour}, start)
		took = append(took, time.Since(start))
		if out.Err != nil || len(out.Nodes) == 0 {
			return do, 0, fmt.Errorf("plan of pod %s: %w, %v", p.Name, out.Err, out.Failed)
		}
		do.Planned = append(do.Planned, out.Nodes)
	}
	slices.Sort(took)
	return do, float64(took[len(took)*99/100].Microseconds()) / 1000, nil
}

// cpu is what this process has used, kernel included.
func cpu() time.Duration {
	var r syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &r); err != nil {
		return 0
	}
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}

// loadProcess is the other process.
type loadProcess struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
}

func startLoad(order string) (*loadProcess, error) {
	self, err := filepath.Abs(os.Args[0])
	if err != nil {
		return nil, err
	}
	p := &loadProcess{cmd: exec.Command(self, "load", order)}
	p.cmd.Stderr = os.Stderr
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	p.out = bufio.NewReader(out)
	return p, p.cmd.Start()
}

func (p *loadProcess) line() (string, error) {
	s, err := p.out.ReadString('\n')
	if errors.Is(err, io.EOF) {
		return "", errors.New("the load process ended")
	}
	return strings.TrimSpace(s), err
}

// schedule has pods scheduled and waits for it. It returns for how many milliseconds 99 of 100
// filter calls went on at most, and how many calls the API server had.
func (p *loadProcess) schedule(do task) (p99 float64, calls int, err error) {
	if err := json.NewEncoder(p.in).Encode(do); err != nil {
		return 0, 0, err
	}
	s, err := p.line()
	if err == nil {
		if _, bad := fmt.Sscanf(s, "done %g %d", &p99, &calls); bad != nil {
			err = errors.New(s)
		}
	}
	return p99, calls, err
}

func (p *loadProcess) stop() {
	p.in.Close()
	if err := p.cmd.Wait(); err != nil {
		fmt.Fprintln(os.Stderr, "load process:", err)
	}
}
