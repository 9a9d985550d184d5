package suite

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/gpunodes"
	"github.com/carve-gpu/carve/api/v1alpha1"
	"github.com/carve-gpu/carve/deploy/e2e/sim"
)

// burstLabel marks the pods of one burst.
const burstLabel = "burst"

// simulate adds nodes beside the real one until the test's end.
func simulate(t *testing.T, nodes ...sim.Node) *sim.Fleet {
	t.Helper()
	config, err := cluster.Lab.RESTConfig()
	if err != nil {
		t.Fatal(err)
	}
	config.QPS = -1
	kube, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	reports, err := gpunodes.New(config)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	fleet, err := sim.Start(ctx, sim.Config{Kube: kube, Reports: reports, StartDelay: 200 * time.Millisecond}, nodes)
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := fleet.Stop(ctx); err != nil {
			t.Error(err)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	return fleet
}

// burst is a number of pods that are created at once.
type burst struct {
	t     *testing.T
	name  string
	begin time.Time
	binds map[string]float64 // the extender's bind results before
}

// begin starts a burst; its pods are gone at the test's end.
func beginBurst(t *testing.T, name string) *burst {
	t.Helper()
	b := &burst{t: t, name: name, binds: extenderCounters(t), begin: time.Now()}
	t.Cleanup(b.clear)
	return b
}

// clear removes the burst's pods and waits until nothing of them is left.
func (b *burst) clear() {
	ctx := context.Background()
	background := metav1.DeletePropagationBackground
	list := metav1.ListOptions{LabelSelector: burstLabel + "=" + b.name}
	if err := cluster.Client.BatchV1().Jobs(ns).DeleteCollection(ctx, metav1.DeleteOptions{PropagationPolicy: &background}, list); err != nil {
		b.t.Errorf("delete the jobs of %s: %v", b.name, err)
	}
	uids := map[string]bool{}
	for _, p := range b.pods(ctx) {
		uids[string(p.UID)] = true
		if p.Spec.NodeName != "" {
			continue
		}
		// Those that wait go first: one that is placed in the room that another
		// leaves, and is gone at its bind, would be a bind error of the next burst.
		if err := cluster.Client.CoreV1().Pods(ns).Delete(ctx, p.Name, metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
			b.t.Errorf("delete pod %s: %v", p.Name, err)
		}
	}
	if err := cluster.Client.CoreV1().Pods(ns).DeleteCollection(ctx, metav1.DeleteOptions{}, list); err != nil {
		b.t.Errorf("delete the pods of %s: %v", b.name, err)
	}
	eventually(b.t, "the pods of burst "+b.name+" and their slices to be gone", func(ctx context.Context) string {
		if left := b.pods(ctx); len(left) > 0 {
			return fmt.Sprintf("%d pods are left, %s among them", len(left), left[0].Name)
		}
		reports, err := cluster.Nodes.List(ctx, metav1.ListOptions{})
		if err != nil {
			return err.Error()
		}
		for _, n := range reports.Items {
			for _, c := range n.Status.Cards {
				for _, s := range c.Slices {
					if uids[s.PodUID] {
						return "card " + c.UUID + " still reports a slice of " + s.Pod
					}
				}
			}
		}
		return ""
	})
}

func (b *burst) pods(ctx context.Context) []corev1.Pod {
	l, err := cluster.Client.CoreV1().Pods(ns).List(ctx, metav1.ListOptions{LabelSelector: burstLabel + "=" + b.name})
	if err != nil {
		b.t.Errorf("list the pods of %s: %v", b.name, err)
		return nil
	}
	return l.Items
}

// mark makes a pod one of the burst's.
func (b *burst) mark(p *corev1.Pod) *corev1.Pod {
	if p.Labels == nil {
		p.Labels = map[string]string{}
	}
	p.Labels[burstLabel] = b.name
	return p
}

// create makes pods, all at the same time.
func (b *burst) create(pods ...*corev1.Pod) {
	b.t.Helper()
	var all sync.WaitGroup
	b.begin = time.Now()
	for _, p := range pods {
		all.Go(func() {
			if _, err := cluster.Client.CoreV1().Pods(ns).Create(b.t.Context(), b.mark(p), metav1.CreateOptions{}); err != nil {
				b.t.Errorf("create pod %s: %v", p.Name, err)
			}
		})
	}
	all.Wait()
}

// job makes n pods by way of a Job.
func (b *burst) job(n int32, p *corev1.Pod) {
	b.t.Helper()
	b.begin = time.Now()
	j := &batchv1.Job{
		ObjectMeta: metav1.ObjectMeta{Name: b.name, Labels: map[string]string{burstLabel: b.name}},
		Spec: batchv1.JobSpec{Parallelism: &n, Completions: &n,
			Template: corev1.PodTemplateSpec{ObjectMeta: b.mark(p).ObjectMeta, Spec: p.Spec}},
	}
	j.Spec.Template.Name = ""
	if _, err := cluster.Client.BatchV1().Jobs(ns).Create(b.t.Context(), j, metav1.CreateOptions{}); err != nil {
		b.t.Fatalf("create job %s: %v", b.name, err)
	}
}

// settled waits until so many pods run and so many are known not to fit, checks
// that nothing went wrong on the way, and prints how long it took.
func (b *burst) settled(fleet *sim.Fleet, running, pending int) []corev1.Pod {
	b.t.Helper()
	var pods []corev1.Pod
	var bound time.Duration
	eventually(b.t, fmt.Sprintf("%d pods of %s to run and %d to be refused", running, b.name, pending), func(ctx context.Context) string {
		pods = b.pods(ctx)
		r, p, n := 0, 0, 0
		for i := range pods {
			switch {
			case pods[i].Status.Phase == corev1.PodRunning:
				r++
			case pods[i].Spec.NodeName == "" && unscheduled(&pods[i]) != "":
				p++
			}
			if pods[i].Spec.NodeName != "" {
				n++
			}
		}
		if n >= running && bound == 0 {
			bound = time.Since(b.begin)
		}
		if r != running || p != pending {
			return fmt.Sprintf("%d run, %d are bound, %d wait, of %d", r, n, p, len(pods))
		}
		return ""
	})
	b.t.Logf("%s: %d pods bound after %s, all running after %s", b.name, running, bound.Round(time.Millisecond), time.Since(b.begin).Round(time.Millisecond))
	if refused := fleet.Refused(); len(refused) > 0 {
		b.t.Errorf("nodes refused grants: %s", strings.Join(refused, "; "))
	}
	b.noBindErrors()
	noDoubleBooking(b.t)
	return pods
}

// smooth is settled for pods that all fit: none may have been turned away on
// the way. A lock, a stale view or a bind that failed would show here.
func (b *burst) smooth(fleet *sim.Fleet, running int) []corev1.Pod {
	b.t.Helper()
	pods := b.settled(fleet, running, 0)
	b.noEvents("FailedScheduling")
	return pods
}

// noBindErrors compares the extender's counters with those before the burst.
func (b *burst) noBindErrors() {
	b.t.Helper()
	now := extenderCounters(b.t)
	for result, n := range now {
		if d := n - b.binds[result]; d > 0 && result != "granted" && result != "plain" && result != "again" {
			b.t.Errorf("%s: %v binds ended as %q", b.name, d, result)
		}
	}
}

func (b *burst) noEvents(reason string) {
	b.t.Helper()
	l, err := cluster.Client.CoreV1().Events(ns).List(b.t.Context(), metav1.ListOptions{FieldSelector: "reason=" + reason})
	if err != nil {
		b.t.Fatalf("list events: %v", err)
	}
	mine := map[string]bool{}
	for _, p := range b.pods(b.t.Context()) {
		mine[string(p.UID)] = true
	}
	for _, e := range l.Items {
		if mine[string(e.InvolvedObject.UID)] {
			b.t.Errorf("%s: event %s on pod %s: %s", b.name, reason, e.InvolvedObject.Name, e.Message)
		}
	}
}

// extenderCounters are the extender's counts of binds by result.
func extenderCounters(t *testing.T) map[string]float64 {
	t.Helper()
	out := map[string]float64{}
	for line := range strings.Lines(extenderMetrics(t)) {
		rest, ok := strings.CutPrefix(line, `carve_extender_binds_total{result="`)
		if !ok {
			continue
		}
		result, value, _ := strings.Cut(strings.TrimSpace(rest), `"} `)
		n, err := strconv.ParseFloat(value, 64)
		if err != nil {
			t.Fatalf("extender's metrics: %q", line)
		}
		out[result] = n
	}
	return out
}

// extenderMetrics scrapes the extender that answers.
func extenderMetrics(t *testing.T) string {
	t.Helper()
	pods, err := cluster.Client.CoreV1().Pods(api.Namespace).List(t.Context(), metav1.ListOptions{LabelSelector: api.LabelName + "=carve-extender," + api.LabelLeading + "=true"})
	if err != nil || len(pods.Items) == 0 {
		t.Fatalf("find the extender: %d pods, %v", len(pods.Items), err)
	}
	client := cluster.Lab.HTTPClient()
	client.Timeout = 10 * time.Second
	defer client.CloseIdleConnections()
	r, err := client.Get("http://" + pods.Items[0].Status.PodIP + ":8080/metrics")
	if err != nil {
		t.Fatalf("scrape the extender: %v", err)
	}
	defer r.Body.Close()
	b, err := io.ReadAll(r.Body)
	if err != nil || r.StatusCode != http.StatusOK {
		t.Fatalf("scrape the extender: %s, %v", r.Status, err)
	}
	return string(b)
}

// noDoubleBooking adds the grants of all pods up by card and compares the sums
// with what the cards have.
func noDoubleBooking(t *testing.T) {
	t.Helper()
	pods, err := cluster.Client.CoreV1().Pods(metav1.NamespaceAll).List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	reports, err := cluster.Nodes.List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	cards := map[string]v1alpha1.Card{}
	for _, n := range reports.Items {
		for _, c := range n.Status.Cards {
			cards[c.UUID] = c
		}
	}
	type held struct {
		memMiB       int64
		cores, whole int
		pods         map[string]bool
	}
	sums := map[string]*held{}
	for i := range pods.Items {
		p := &pods.Items[i]
		if p.Annotations[api.AnnotationGrant] == "" || p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed {
			continue
		}
		inits := map[string]bool{}
		for _, c := range p.Spec.InitContainers {
			inits[c.Name] = c.RestartPolicy == nil
		}
		for name, list := range grant(t, p).Containers {
			for _, c := range list {
				h := sums[c.Card]
				if h == nil {
					h = &held{pods: map[string]bool{}}
					sums[c.Card] = h
				}
				h.pods[p.Name] = true
				if c.Mode == api.ModeExclusive {
					h.whole++
				} else if !inits[name] { // they run before the others
					h.memMiB += c.MemMiB
					h.cores += c.Cores
				}
			}
		}
	}
	for uuid, h := range sums {
		c, known := cards[uuid]
		switch {
		case !known:
			t.Errorf("card %s is granted and nobody reports it", uuid)
		case h.memMiB > c.MemoryMiB || h.cores > 100 || h.whole > 1 || h.whole == 1 && len(h.pods) > 1:
			t.Errorf("card %s of %d MiB is granted to %d pods: %d MiB, %d percent, %d times whole", uuid, c.MemoryMiB, len(h.pods), h.memMiB, h.cores, h.whole)
		}
	}
}

// many makes pods of one container with the same share.
func many(n int, name string, s share) []*corev1.Pod {
	var out []*corev1.Pod
	for i := range n {
		out = append(out, pod(fmt.Sprintf("%s-%d", name, i), container("app", s)))
	}
	return out
}

// on keeps pods on one node.
func on(node string, pods ...*corev1.Pod) []*corev1.Pod {
	for _, p := range pods {
		p.Spec.NodeSelector = map[string]string{corev1.LabelHostname: node}
	}
	return pods
}

// TestBurstOfPods sends many pods at once to one real and to simulated nodes.
func TestBurstOfPods(t *testing.T) {
	a100 := sim.Models["a100-80"]
	var nodes []sim.Node
	for i := range 6 {
		nodes = append(nodes, sim.Node{Name: fmt.Sprintf("burst-%d", i), Cards: sim.Same(8, a100)})
	}
	nodes = append(nodes,
		sim.Node{Name: "burst-one", Cards: sim.Same(1, a100)},
		sim.Node{Name: "burst-24", Cards: []sim.Model{{Name: "NVIDIA A30", PhysicalMiB: 24576}}})
	fleet := simulate(t, nodes...)

	// share-3: forty-odd pods of one Job, which other schedulers bind one after
	// another under a lock of the node, within half an hour.
	t.Run("a Job of 48 shares", func(t *testing.T) {
		b := beginBurst(t, "job-48")
		b.job(48, pod("", container("app", share{"gpu": "1", "gpumem": "20000", "gpucores": "20"})))
		b.smooth(fleet, 48)
	})
	// gang-38: whole cards, as many as there are but two.
	t.Run("48 plain pods of a whole card each", func(t *testing.T) {
		b := beginBurst(t, "plain-48")
		b.create(many(48, "plain", share{"gpu": "1"})...)
		b.smooth(fleet, 48)
	})
	t.Run("more whole cards than a node has", func(t *testing.T) {
		b := beginBurst(t, "whole-10")
		b.create(on("burst-0", many(10, "whole", share{"gpu": "1"})...)...)
		b.settled(fleet, 8, 2)
	})
	// share-1: a second pod for the same node within a second.
	t.Run("three quarters of one card", func(t *testing.T) {
		b := beginBurst(t, "quarters")
		b.create(on("burst-one", many(3, "quarter", share{"gpu": "1", "gpumem": "20000"})...)...)
		b.smooth(fleet, 3)
	})
	// gang-1: sixteen halves of eight cards, sent at once.
	t.Run("sixteen halves of eight cards", func(t *testing.T) {
		b := beginBurst(t, "halves")
		b.create(on("burst-1", many(16, "half", share{"gpu": "1", "gpumem-percentage": "50", "gpucores": "50"})...)...)
		perCard := map[string]int{}
		for _, p := range b.smooth(fleet, 16) {
			perCard[grant(t, &p).Containers["app"][0].Card]++
		}
		for card, n := range perCard {
			if n != 2 {
				t.Errorf("card %s holds %d halves", card, n)
			}
		}
		if len(perCard) != 8 {
			t.Errorf("the halves are on %d cards", len(perCard))
		}
	})
	// gang-16: three slices of 12 GiB for a card of 24.
	t.Run("three halves of one card", func(t *testing.T) {
		b := beginBurst(t, "twelve")
		b.create(on("burst-24", many(3, "twelve", share{"gpu": "1", "gpumem": "12Gi"})...)...)
		pods := b.settled(fleet, 2, 1)
		for _, p := range pods {
			if p.Spec.NodeName != "" {
				if err := cluster.Client.CoreV1().Pods(ns).Delete(t.Context(), p.Name, metav1.DeleteOptions{}); err != nil {
					t.Fatal(err)
				}
				break
			}
		}
		b.settled(fleet, 2, 0)
	})
	// One node whose cards are full, a hundred pods that wait for them, and a
	// hundred more when those have gone: none may be left behind.
	t.Run("a hundred pods drain through eight cards", func(t *testing.T) {
		b := beginBurst(t, "drain")
		pods := on("burst-2", many(100, "drain", share{"gpu": "1", "gpumem": "40000"})...)
		for _, p := range pods {
			p.Annotations = map[string]string{sim.RunsFor: "1s"}
		}
		b.create(pods...)
		eventually(t, "all pods to have ended", func(ctx context.Context) string {
			ended, bound := 0, 0
			for _, p := range b.pods(ctx) {
				if p.Status.Phase == corev1.PodSucceeded {
					ended++
				}
				if p.Spec.NodeName != "" {
					bound++
				}
			}
			if ended < len(pods) {
				return fmt.Sprintf("%d ended, %d were bound, of %d", ended, bound, len(pods))
			}
			return ""
		})
		t.Logf("drain: 100 pods of a second each, 16 at a time, took %s (the least possible is 7 s)", time.Since(b.begin).Round(time.Millisecond))
		b.noBindErrors()
	})
	t.Run("a late report and an agent that is gone", func(t *testing.T) {
		b := beginBurst(t, "faults")
		if err := fleet.Late("burst-one", 3*time.Second); err != nil {
			t.Fatal(err)
		}
		b.create(on("burst-one", many(1, "first", share{"gpu": "1", "gpumem": "60000"})...)...)
		b.settled(fleet, 1, 0)
		if err := cluster.Client.CoreV1().Pods(ns).Delete(t.Context(), "first-0", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		// The share is free when the node says so, and not before.
		b.create(on("burst-one", many(1, "second", share{"gpu": "1", "gpumem": "60000"})...)...)
		b.settled(fleet, 1, 0)
		if err := fleet.Late("burst-one", 0); err != nil {
			t.Fatal(err)
		}
		if err := fleet.AgentGone(t.Context(), "burst-one", true); err != nil {
			t.Fatal(err)
		}
		b.create(on("burst-one", many(1, "third", share{"gpu": "1", "gpumem": "10000"})...)...)
		eventually(t, "the agent's pod to be unready", func(ctx context.Context) string {
			pods, err := cluster.AgentPods(ctx)
			if err != nil {
				return err.Error()
			}
			for _, p := range pods {
				for _, c := range p.Status.Conditions {
					if p.Spec.NodeName == "burst-one" && c.Type == corev1.PodReady && c.Status == corev1.ConditionFalse {
						return ""
					}
				}
			}
			return "it is ready"
		})
		if p := get(t.Context(), t, "third-0"); p.Status.Phase == corev1.PodRunning {
			t.Error("a pod runs on a node whose agent is gone")
		}
		if err := fleet.AgentGone(t.Context(), "burst-one", false); err != nil {
			t.Fatal(err)
		}
		running(t, "third-0")
	})
}

// verbs calls the extender as kube-scheduler does.
type verbs struct {
	url    string
	client *http.Client
}

// scheduler is a caller with the scheduler's own certificate.
func scheduler(t *testing.T) *verbs {
	t.Helper()
	read := func(name string) []byte {
		b, err := os.ReadFile(cluster.Lab.Path("/etc/kubernetes/carve/" + name))
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	certificate, err := tls.X509KeyPair(read("client.crt"), read("client.key"))
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(read("ca.crt")) {
		t.Fatal("no CA certificate")
	}
	s, err := cluster.Client.CoreV1().Services(api.Namespace).Get(t.Context(), "carve-extender", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	transport := &http.Transport{DialContext: cluster.Lab.DialContext, MaxIdleConnsPerHost: 32,
		TLSClientConfig: &tls.Config{RootCAs: roots, Certificates: []tls.Certificate{certificate}}}
	t.Cleanup(transport.CloseIdleConnections)
	return &verbs{"https://" + s.Spec.ClusterIP + ":443", &http.Client{Transport: transport, Timeout: 30 * time.Second}}
}

// call posts to a verb and reads the answer into out.
func (v *verbs) call(verb string, in, out any) error {
	body, err := json.Marshal(in)
	if err != nil {
		return err
	}
	r, err := v.client.Post(v.url+"/"+verb, "application/json", bytes.NewReader(body))
	if err != nil {
		return err
	}
	defer r.Body.Close()
	if r.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", verb, r.Status)
	}
	return json.NewDecoder(r.Body).Decode(out)
}

// TestSixteenRequestsForOnePlace is share-7: parallel filter calls for a card
// with room for one pod, of which other ledgers let five through.
func TestSixteenRequestsForOnePlace(t *testing.T) {
	fleet := simulate(t, sim.Node{Name: "race-one", Cards: sim.Same(1, sim.Models["a100-80"])})
	b := beginBurst(t, "race")
	pods := on("race-one", many(16, "race", share{"gpu": "1", "gpumem": "50000"})...)
	for _, p := range pods {
		p.Spec.SchedulerName = "nobody" // this test is their scheduler
	}
	b.create(pods...)
	listed := b.pods(t.Context())
	if len(listed) != 16 {
		t.Fatalf("%d pods were made", len(listed))
	}
	v := scheduler(t)
	// Rounds of filter and bind in parallel, as many threads as pods, without
	// waiting for each other: filters of one meet binds of another.
	var mu sync.Mutex
	accepted, bound := map[string]int{}, map[string]int{}
	var all sync.WaitGroup
	for i := range listed {
		all.Go(func() {
			p := &listed[i]
			for range 3 {
				var f struct {
					NodeNames   *[]string
					FailedNodes map[string]string
					Error       string
				}
				if err := v.call("filter", map[string]any{"Pod": p, "NodeNames": []string{"race-one"}}, &f); err != nil {
					t.Errorf("filter %s: %v", p.Name, err)
					return
				}
				var r struct{ Error string }
				if err := v.call("bind", map[string]any{"PodName": p.Name, "PodNamespace": p.Namespace, "PodUID": p.UID, "Node": "race-one"}, &r); err != nil {
					t.Errorf("bind %s: %v", p.Name, err)
					return
				}
				mu.Lock()
				if f.NodeNames != nil && len(*f.NodeNames) > 0 {
					accepted[p.Name]++
				}
				if r.Error == "" {
					bound[p.Name]++
				}
				mu.Unlock()
			}
		})
	}
	all.Wait()
	if len(accepted) != 1 || len(bound) != 1 {
		t.Errorf("accepted by filter: %v, bound: %v; want one and the same", accepted, bound)
	}
	placed := 0
	for _, p := range b.pods(t.Context()) {
		if p.Spec.NodeName == "" {
			continue
		}
		placed++
		if bound[p.Name] == 0 {
			t.Errorf("%s is on a node, and its bind was refused", p.Name)
		}
	}
	if placed != 1 {
		t.Errorf("%d pods are bound", placed)
	}
	noDoubleBooking(t)
	if refused := fleet.Refused(); len(refused) > 0 {
		t.Errorf("the node refused grants: %s", strings.Join(refused, "; "))
	}
}
