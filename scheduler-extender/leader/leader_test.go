package leader_test

import (
	"context"
	"fmt"
	"log/slog"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/cache"
	cachetesting "k8s.io/client-go/tools/cache/testing"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/v1alpha1"
	"github.com/carve-gpu/carve/scheduler-extender/cluster"
	"github.com/carve-gpu/carve/scheduler-extender/leader"
	"github.com/carve-gpu/carve/scheduler-extender/ledger"
)

// election is a fake API server whose writes of pods have versions, and whose watch of pods
// can be held up.
type election struct {
	t    *testing.T
	kube *fake.Clientset

	mu      sync.Mutex
	version int
	held    chan struct{} // closed: events pass
}

func newElection(t *testing.T, pods ...string) *election {
	e := &election{t: t, held: make(chan struct{})}
	close(e.held)
	var objects []runtime.Object
	for _, name := range pods {
		objects = append(objects, &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: api.Namespace, Name: name, UID: types.UID("uid-" + name), ResourceVersion: "1",
			Labels: map[string]string{api.LabelName: "carve-extender"}}})
	}
	e.kube = fake.NewClientset(objects...)
	// Each write of a pod gets the next version, as etcd gives it.
	next := func(a clienttesting.Action) (bool, runtime.Object, error) {
		e.mu.Lock()
		e.version++
		version := strconv.Itoa(e.version + 1)
		e.mu.Unlock()
		handled, o, err := clienttesting.ObjectReaction(e.kube.Tracker())(a)
		if p, ok := o.(*corev1.Pod); ok && err == nil {
			p = p.DeepCopy()
			p.ResourceVersion = version
			return handled, p, e.kube.Tracker().Update(corev1.SchemeGroupVersion.WithResource("pods"), p, p.Namespace)
		}
		return handled, o, err
	}
	e.kube.PrependReactor("patch", "pods", next)
	e.kube.PrependReactor("update", "pods", next)
	e.kube.PrependWatchReactor("pods", func(a clienttesting.Action) (bool, watch.Interface, error) {
		in, err := e.kube.Tracker().Watch(corev1.SchemeGroupVersion.WithResource("pods"), a.GetNamespace())
		if err != nil {
			return true, nil, err
		}
		out := watch.NewProxyWatcher(make(chan watch.Event))
		events := make(chan watch.Event)
		go func() {
			defer in.Stop()
			for {
				select {
				case <-out.StopChan():
					return
				case event, ok := <-in.ResultChan():
					if !ok {
						return
					}
					e.mu.Lock()
					held := e.held
					e.mu.Unlock()
					select {
					case <-held:
					case <-out.StopChan():
						return
					}
					select {
					case events <- event:
					case <-out.StopChan():
						return
					}
				}
			}
		}()
		return true, &proxied{out, events}, nil
	})
	return e
}

type proxied struct {
	*watch.ProxyWatcher
	events chan watch.Event
}

func (p *proxied) ResultChan() <-chan watch.Event { return p.events }

// candidate is one extender's lead with all that follows from it.
type candidate struct {
	*leader.Leader
	books   *ledger.Ledger
	metrics *prometheus.Registry
	taken   atomic.Int64 // times that it took over
	stop    func()
	err     error
}

// stand has a pod's process stand for election.
func (e *election) stand(pod string, ask func(*candidate)) *candidate {
	e.t.Helper()
	log := slog.New(slog.DiscardHandler)
	if testing.Verbose() {
		log = slog.New(slog.NewTextHandler(e.t.Output(), nil)).With("process", pod)
	}
	reports := cachetesting.NewFakeControllerSource()
	e.t.Cleanup(reports.Shutdown)
	c := &candidate{books: ledger.New(ledger.Config{}), metrics: prometheus.NewRegistry()}
	source, err := cluster.NewSource(cluster.Config{Kube: e.kube, Reports: cache.NewSharedIndexInformer(reports, &v1alpha1.GPUNode{}, 0, cache.Indexers{}),
		Ledger: c.books, Forget: func(string) {}, Log: log, Now: time.Now})
	if err != nil {
		e.t.Fatal(err)
	}
	c.Leader = leader.New(leader.Config{Kube: e.kube, Elect: true, Namespace: api.Namespace, Lease: "carve-extender", Pod: pod, Source: source,
		TakeOver: func() {
			if ask != nil {
				ask(c)
			}
			c.taken.Add(1)
		}, Registry: c.metrics, Log: log})
	run, end := context.WithCancel(context.Background())
	lead, endLead := context.WithCancel(context.Background())
	var parts sync.WaitGroup
	parts.Go(func() { _ = source.Run(run) })
	parts.Go(func() { c.err = c.Run(lead) })
	c.stop = sync.OnceFunc(func() { endLead(); end(); parts.Wait() })
	e.t.Cleanup(c.stop)
	return c
}

func (e *election) until(what string, ok func() bool) {
	e.t.Helper()
	for end := time.Now().Add(40 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			e.t.Fatalf("never seen: %s", what)
		}
	}
}

func (e *election) labelled(pod string) bool {
	p, err := e.kube.CoreV1().Pods(api.Namespace).Get(context.Background(), pod, metav1.GetOptions{})
	if err != nil {
		e.t.Fatal(err)
	}
	return p.Labels[api.LabelLeading] == "true"
}

func TestOneLeadsAndTheOtherStandsBy(t *testing.T) {
	e := newElection(t, "a", "b")
	a := e.stand("a", nil)
	e.until("a leads", a.Leading)
	b := e.stand("b", nil)
	e.until("b stands by", b.Ready)
	if b.Leading() || !e.labelled("a") || e.labelled("b") {
		t.Fatalf("b leads: %t, labels %t %t", b.Leading(), e.labelled("a"), e.labelled("b"))
	}
	a.stop() // it gives the lease back
	e.until("b leads", b.Leading)
	if a.Leading() || a.err != nil || !e.labelled("b") || e.labelled("a") || b.taken.Load() != 1 {
		t.Errorf("a leads: %t, %v; labels %t %t; b took over %d times", a.Leading(), a.err, e.labelled("a"), e.labelled("b"), b.taken.Load())
	}
}

// A single process isn't ready before it leads: its Service would have nobody to send callers to.
func TestNobodyIsReadyWhileNobodyLeads(t *testing.T) {
	e := newElection(t, "a")
	refuse := atomic.Bool{}
	refuse.Store(true)
	e.kube.PrependReactor("create", "leases", func(clienttesting.Action) (bool, runtime.Object, error) {
		return refuse.Load(), nil, fmt.Errorf("down")
	})
	a := e.stand("a", nil)
	e.until("the ledger is whole", a.Source.Ready)
	time.Sleep(100 * time.Millisecond)
	if a.Ready() || a.Leading() {
		t.Fatal("ready without the lease")
	}
	refuse.Store(false)
	e.until("a leads", a.Leading)
}

// What the one before has bound is in the ledger before the next one answers, however late its
// watch tells of it.
func TestNoBindIsMissedAtATakeover(t *testing.T) {
	e := newElection(t, "a", "b")
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "p", UID: "uid-p", ResourceVersion: "1"},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "app"}}}}
	pod.Spec.Containers[0].Resources.Limits = corev1.ResourceList{api.ResourceMemory: resource.MustParse("8000")}
	if _, err := e.kube.CoreV1().Pods("default").Create(t.Context(), pod, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	a := e.stand("a", nil)
	e.until("a leads", a.Leading)
	var known atomic.Bool
	b := e.stand("b", func(c *candidate) { _, ok := c.books.Held("uid-p"); known.Store(ok) })
	e.until("b stands by", b.Ready)

	release := make(chan struct{})
	e.mu.Lock()
	e.held = release // from here on no watch tells of anything
	e.mu.Unlock()
	bound := pod.DeepCopy()
	bound.Spec.NodeName = "n1"
	bound.Annotations = map[string]string{api.AnnotationGrant: `{"v":1,"uid":"uid-p","node":"n1","gen":1,"containers":{"app":[{"card":"GPU-a","memMiB":8000,"mode":"vgpu"}]}}`}
	if _, err := e.kube.CoreV1().Pods("default").Update(t.Context(), bound, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	a.stop()
	e.until("b has the lease", func() bool { return e.labelled("b") })
	time.Sleep(200 * time.Millisecond)
	if b.Leading() || b.taken.Load() != 0 {
		t.Fatal("b answers though its watch hasn't come to its own write")
	}
	close(release)
	e.until("b leads", b.Leading)
	if !known.Load() {
		t.Error("b took over without the bind that a had written")
	}
}

// A process that can't renew its lease may not answer. When it can again, it stands for election
// again.
func TestWhoLosesTheLeaseDoesNotAnswer(t *testing.T) {
	e := newElection(t, "a")
	var down atomic.Bool
	e.kube.PrependReactor("*", "leases", func(clienttesting.Action) (bool, runtime.Object, error) { return down.Load(), nil, fmt.Errorf("down") })
	a := e.stand("a", nil)
	e.until("a leads", a.Leading)
	down.Store(true)
	e.until("a doesn't answer any more", func() bool { return !a.Leading() })
	e.until("a has given up", func() bool {
		m, err := a.metrics.Gather()
		return err == nil && len(m) == 1 && m[0].Metric[0].Gauge.GetValue() == 0
	})
	down.Store(false)
	e.until("a leads again", a.Leading)
	if a.taken.Load() != 2 {
		t.Errorf("it took over %d times", a.taken.Load())
	}
	a.stop()
	if a.err != nil {
		t.Error(a.err)
	}
}

// A takeover that goes on for longer than the lease ends in no lead.
func TestALeaseThatIsLostDuringATakeover(t *testing.T) {
	e := newElection(t, "a")
	begun, goOn := make(chan struct{}), make(chan struct{})
	a := e.stand("a", func(*candidate) { close(begun); <-goOn })
	<-begun
	leases := e.kube.CoordinationV1().Leases(api.Namespace)
	// A version that is out of date, which the fake API server doesn't know of.
	var taken atomic.Bool
	e.kube.PrependReactor("update", "leases", func(clienttesting.Action) (bool, runtime.Object, error) {
		return taken.Load(), nil, fmt.Errorf("it has changed")
	})
	l, err := leases.Get(t.Context(), "carve-extender", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	other, now := "b", metav1.NowMicro()
	l.Spec.HolderIdentity, l.Spec.RenewTime = &other, &now
	if _, err := leases.Update(t.Context(), l, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	taken.Store(true)
	time.Sleep(9 * time.Second) // it has given up by then, and b's lease stands
	close(goOn)
	e.until("the takeover has ended", func() bool { return a.taken.Load() == 1 })
	time.Sleep(100 * time.Millisecond)
	if a.Leading() {
		t.Error("it answers though another has the lease")
	}
}

// A process that was killed leaves its pod's label. The next one of that pod takes it off before
// it stands for election.
func TestALeftLabelIsTakenOff(t *testing.T) {
	e := newElection(t, "a", "b")
	a := e.stand("a", nil)
	e.until("a leads", a.Leading)
	if _, err := e.kube.CoreV1().Pods(api.Namespace).Patch(t.Context(), "b", types.MergePatchType, []byte(`{"metadata":{"labels":{"carve.dev/leading":"true"}}}`), metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	b := e.stand("b", nil)
	e.until("b stands by", b.Ready)
	if e.labelled("b") {
		t.Error("b says that it leads")
	}
}
