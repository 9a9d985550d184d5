package sim

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/v1alpha1"
)

const (
	// Label is on every simulated Node, so that a test can choose them or keep
	// off them.
	Label = "carve.dev/simulated"
	// RunsFor, a pod's annotation, says how long its containers run before they
	// end well ("2s"). Without it they run until the pod is deleted.
	RunsFor = "sim.carve.dev/runs-for"

	agentLabel = "app.kubernetes.io/name"
	agentName  = "carve-node"

	// workers handle pods, and as many write other objects at once.
	workers = 16
)

// Reports is the client of GPUNodes; gpunodes.Client is one.
type Reports interface {
	Get(ctx context.Context, name string) (*v1alpha1.GPUNode, error)
	Create(ctx context.Context, n *v1alpha1.GPUNode) (*v1alpha1.GPUNode, error)
	UpdateStatus(ctx context.Context, n *v1alpha1.GPUNode) (*v1alpha1.GPUNode, error)
	Delete(ctx context.Context, name string) error
	Informer(resync time.Duration, tweak func(*metav1.ListOptions)) cache.SharedIndexInformer
}

// Config is what a Fleet is made of. The clients must not be throttled on this
// side (rest.Config.QPS -1): a fleet writes for all its nodes.
type Config struct {
	Kube    kubernetes.Interface
	Reports Reports
	// Log may be nil.
	Log *slog.Logger
	// StartDelay is how long a container takes from its prepared slice until it
	// runs.
	StartDelay time.Duration
}

// Fleet is a number of simulated nodes.
type Fleet struct {
	Config
	nodes map[string]*node
	names []string
	pods  corelisters.PodLister
	queue workqueue.TypedRateLimitingInterface[string]
	// ownAgents says that no DaemonSet makes the agents' pods.
	ownAgents bool

	cancel context.CancelFunc
	parts  sync.WaitGroup

	mu      sync.Mutex
	refused []string
}

// Start adds the nodes to the cluster and returns when all of them are Ready
// with their agents. Stop must follow, also after an error.
func Start(ctx context.Context, c Config, specs []Node) (*Fleet, error) {
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	f := &Fleet{Config: c, nodes: map[string]*node{}, queue: workqueue.NewTypedRateLimitingQueue(
		workqueue.NewTypedItemExponentialFailureRateLimiter[string](50*time.Millisecond, 5*time.Second))}
	for i, s := range specs {
		if s.Name == "" || f.nodes[s.Name] != nil {
			return f, fmt.Errorf("start simulated nodes: name %q is empty or used twice", s.Name)
		}
		f.nodes[s.Name] = newNode(s, i)
		f.names = append(f.names, s.Name)
	}
	run, cancel := context.WithCancel(context.WithoutCancel(ctx))
	f.cancel = cancel
	if err := f.start(ctx, run); err != nil {
		return f, fmt.Errorf("start simulated nodes: %w", err)
	}
	return f, nil
}

func (f *Fleet) start(ctx, run context.Context) error {
	own, err := f.noDaemonSet(ctx)
	if err != nil {
		return err
	}
	f.ownAgents = own
	if err := f.watch(ctx, run); err != nil {
		return err
	}
	if err := f.each(ctx, f.add); err != nil {
		return err
	}
	for range workers {
		f.parts.Go(func() {
			for f.work(run) {
			}
		})
	}
	f.parts.Go(func() { f.renewLeases(run) })
	for _, n := range f.nodes {
		f.parts.Go(func() { f.writeReports(run, n) })
	}
	return f.awaitReady(ctx)
}

// noDaemonSet reports whether nobody makes agents' pods for managed nodes.
func (f *Fleet) noDaemonSet(ctx context.Context) (bool, error) {
	d, err := f.Kube.AppsV1().DaemonSets(api.Namespace).Get(ctx, agentName, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return true, nil
	}
	if err != nil {
		return false, fmt.Errorf("look for the agent's DaemonSet: %w", err)
	}
	v, ok := d.Spec.Template.Spec.NodeSelector[api.LabelManaged]
	return ok && v != "true", nil
}

// watch starts the informers and waits until they have seen everything.
func (f *Fleet) watch(ctx, run context.Context) error {
	factory := informers.NewSharedInformerFactoryWithOptions(f.Kube, 0, informers.WithTransform(slim))
	pods := factory.Core().V1().Pods()
	f.pods = pods.Lister()
	podsSeen, err := pods.Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    f.podChanged,
		UpdateFunc: func(_, o any) { f.podChanged(o) },
		DeleteFunc: f.podGone,
	})
	if err != nil {
		return fmt.Errorf("watch pods: %w", err)
	}
	reports := f.Reports.Informer(0, nil)
	reportsSeen, err := reports.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    f.reportChanged,
		UpdateFunc: func(_, o any) { f.reportChanged(o) },
	})
	if err != nil {
		return fmt.Errorf("watch reports: %w", err)
	}
	factory.Start(run.Done())
	f.parts.Go(func() { <-run.Done(); factory.Shutdown() })
	f.parts.Go(func() { reports.RunWithContext(run) })
	if !cache.WaitForCacheSync(ctx.Done(), podsSeen.HasSynced, reportsSeen.HasSynced) {
		return fmt.Errorf("watch the cluster: %w", ctx.Err())
	}
	return nil
}

// slim drops what is never read.
func slim(o any) (any, error) {
	if p, ok := o.(*corev1.Pod); ok {
		p.ManagedFields = nil
		p.Spec.Volumes = nil
	}
	return o, nil
}

// awaitReady waits until every node's agent is Ready and its report is there.
func (f *Fleet) awaitReady(ctx context.Context) error {
	for {
		missing := f.missing()
		if missing == "" {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait until all are ready: %s: %w", missing, ctx.Err())
		case <-time.After(50 * time.Millisecond):
		}
	}
}

func (f *Fleet) missing() string {
	all, err := f.pods.Pods(api.Namespace).List(labels.SelectorFromSet(labels.Set{agentLabel: agentName}))
	if err != nil {
		return err.Error()
	}
	ready := map[string]bool{}
	for _, p := range all {
		for _, c := range p.Status.Conditions {
			if c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue && p.DeletionTimestamp == nil {
				ready[p.Spec.NodeName] = true
			}
		}
	}
	for _, name := range f.names {
		n := f.nodes[name]
		n.mu.Lock()
		reported, gone := n.written != nil, n.gone
		n.mu.Unlock()
		switch {
		case !ready[name] && !gone:
			return "the agent of " + name + " isn't ready"
		case !reported:
			return name + " hasn't reported"
		}
	}
	return ""
}

// Stop ends the simulation and removes the nodes and all that was on them.
func (f *Fleet) Stop(ctx context.Context) error {
	if f.cancel == nil {
		return nil
	}
	f.cancel()
	f.queue.ShutDown()
	f.parts.Wait()
	faults := []error{f.each(ctx, f.removeNode)}
	all, err := f.Kube.CoreV1().Pods(metav1.NamespaceAll).List(ctx, metav1.ListOptions{})
	if err != nil {
		return errors.Join(append(faults, fmt.Errorf("list pods: %w", err))...)
	}
	for i := range all.Items {
		if p := &all.Items[i]; f.nodes[p.Spec.NodeName] != nil {
			faults = append(faults, f.deletePod(ctx, p))
		}
	}
	return errors.Join(faults...)
}

// each does something for every node, several at once.
func (f *Fleet) each(ctx context.Context, do func(context.Context, *node) error) error {
	next := make(chan *node)
	var mu sync.Mutex
	var faults []error
	var all sync.WaitGroup
	for range workers {
		all.Go(func() {
			for n := range next {
				if err := do(ctx, n); err != nil {
					mu.Lock()
					faults = append(faults, err)
					mu.Unlock()
				}
			}
		})
	}
	for _, name := range f.names {
		next <- f.nodes[name]
	}
	close(next)
	all.Wait()
	return errors.Join(faults...)
}

// Names are the nodes' names in the order in which they were given.
func (f *Fleet) Names() []string { return append([]string(nil), f.names...) }

// Refused are the grants that a node didn't accept, each as a sentence: for
// another pod or node, or beyond what the card has left. There are none unless
// somebody booked wrong.
func (f *Fleet) Refused() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return append([]string(nil), f.refused...)
}

func (f *Fleet) refuse(text string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.refused = append(f.refused, text)
}

// Writes counts the reports that the nodes have written.
func (f *Fleet) Writes() int {
	sum := 0
	for _, n := range f.nodes {
		n.mu.Lock()
		sum += n.writes
		n.mu.Unlock()
	}
	return sum
}
