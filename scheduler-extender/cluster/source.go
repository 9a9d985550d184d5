package cluster

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	coreinformers "k8s.io/client-go/informers/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/v1alpha1"
	"github.com/carve-gpu/carve/scheduler-extender/ledger"
)

// sweepEvery is how often offers and graces that are due are ended.
const sweepEvery = time.Second

// Config is what a Source is made of.
type Config struct {
	Kube kubernetes.Interface
	// Namespace is where the agent's pods run; api.Namespace if empty.
	Namespace string
	// Reports informs of GPUNodes. It isn't started.
	Reports cache.SharedIndexInformer
	Ledger  *ledger.Ledger
	// Forget is told of each pod that doesn't wait for a place any more.
	Forget func(uid string)
	// Resizer is told of pods and reports, after the ledger; may be nil.
	Resizer *Resizer
	// Planner is told of pods and nodes, after the ledger; may be nil.
	Planner Planner
	Log     *slog.Logger
	Now     func() time.Time
}

// Planner is what a Source tells of pods that are held back, and of nodes; both are trimmed.
type Planner interface {
	PodChanged(p *corev1.Pod)
	PodGone(uid string)
	NodeChanged(n *corev1.Node)
	NodeGone(name string)
	// Wake is told that there may be room for a waiting pod, and reports whether the pod is
	// its own.
	Wake(uid string) bool
}

// Source feeds a ledger from the API server.
type Source struct {
	Config
	pods, nodes, agents, quotas cache.SharedIndexInformer
	ready                       atomic.Bool

	probes    *http.Client
	suspected chan struct{} // there is a new suspect
	agentMu   sync.Mutex
	// addresses are where the agents that the API shows ready are asked, by
	// node; suspects are those of them that were found down.
	addresses map[string]string
	suspects  map[string]bool
}

// NewSource makes a source; Run starts it.
func NewSource(c Config) (*Source, error) {
	s := &Source{Config: c,
		pods:   coreinformers.NewPodInformer(c.Kube, metav1.NamespaceAll, 0, cache.Indexers{}),
		nodes:  coreinformers.NewNodeInformer(c.Kube, 0, cache.Indexers{}),
		quotas: coreinformers.NewResourceQuotaInformer(c.Kube, metav1.NamespaceAll, 0, cache.Indexers{}),
		agents: newAgentInformer(c.Kube, cmp.Or(c.Namespace, api.Namespace)),
		probes: newProbeClient(), suspected: make(chan struct{}, 1),
		addresses: map[string]string{}, suspects: map[string]bool{},
	}
	for _, set := range []error{s.pods.SetTransform(trimPod), s.nodes.SetTransform(trimNode), s.agents.SetTransform(trimAgent), s.quotas.SetTransform(trimQuota), c.Reports.SetTransform(trimReport)} {
		if set != nil {
			return nil, fmt.Errorf("set up informers: %w", set)
		}
	}
	return s, nil
}

// Ready reports whether everything that the API showed at start is in the
// ledger.
func (s *Source) Ready() bool { return s.ready.Load() }

// Run feeds the ledger until the context ends, and returns when all that it
// started has ended.
func (s *Source) Run(ctx context.Context) error {
	synced := make([]cache.InformerSynced, 0, 5)
	for _, h := range []struct {
		informer cache.SharedIndexInformer
		set      func(any)
		drop     func(any)
	}{
		{s.pods, s.setPod, s.dropPod},
		{s.nodes, s.setNode, s.dropNode},
		{s.agents, s.setAgent, s.setAgent},
		{s.quotas, s.setQuota, s.dropQuota},
		{s.Reports, s.setReport, s.dropReport},
	} {
		reg, err := h.informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
			AddFunc:    h.set,
			UpdateFunc: func(_, now any) { h.set(now) },
			DeleteFunc: func(o any) {
				if last, ok := o.(cache.DeletedFinalStateUnknown); ok {
					o = last.Obj
				}
				h.drop(o)
			},
		})
		if err != nil {
			return fmt.Errorf("watch the cluster: %w", err)
		}
		synced = append(synced, reg.HasSynced)
	}
	informers := []cache.SharedIndexInformer{s.pods, s.nodes, s.agents, s.quotas, s.Reports}
	done := make(chan struct{}, len(informers)+1)
	go func() {
		s.askSuspects(ctx)
		done <- struct{}{}
	}()
	for _, i := range informers {
		go func() {
			i.RunWithContext(ctx)
			done <- struct{}{}
		}()
	}
	defer func() {
		for range len(informers) + 1 {
			<-done
		}
	}()
	start := s.Now()
	if !cache.WaitForCacheSync(ctx.Done(), synced...) {
		return ctx.Err()
	}
	t := s.Ledger.Totals()
	s.Log.Info("ledger complete", "nodes", t.Nodes, "cards", t.Cards, "pods", t.Bound, "took", s.Now().Sub(start).Round(time.Millisecond))
	s.ready.Store(true)
	defer s.ready.Store(false)
	tick := time.NewTicker(sweepEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
			s.sweep()
		}
	}
}

// sweep ends what is due, and looks up pods that were bound long ago and that
// no event ever showed: they were gone before a watch could tell of them.
func (s *Source) sweep() {
	ended, unconfirmed := s.Ledger.Sweep(s.Now())
	if ended > 0 {
		s.Log.Info("offers ended unused", "count", ended)
	}
	for _, r := range unconfirmed {
		if p := s.pod(r); p != nil {
			s.setPod(p)
			continue
		}
		s.Log.Info("bound pod is gone", "pod", r.Namespace+"/"+r.Name, "uid", r.UID)
		s.Ledger.DropPod(r.UID, s.Now())
	}
}

// Pod finds a known pod with this very UID, else nil. It is read-only and
// trimmed to what this package reads.
func (s *Source) Pod(r ledger.Ref) *corev1.Pod { return s.pod(r) }

// Shows reports whether the watch of pods has come to a version of a pod, which is what a
// write of it answered. All that was written to pods before that is in the ledger then.
func (s *Source) Shows(namespace, name, version string) bool {
	o, ok, err := s.pods.GetStore().GetByKey(namespace + "/" + name)
	return err == nil && ok && !older(o.(*corev1.Pod).ResourceVersion, version)
}

// older compares resource versions, which are decimal numbers of any length (Kubernetes 1.35
// made that official; they always were).
func older(a, b string) bool {
	if len(a) != len(b) {
		return len(a) < len(b)
	}
	return a < b
}

// Pending are the pods that ask for cards, have no node, and are kube-scheduler's.
func (s *Source) Pending() []ledger.Ref {
	var out []ledger.Ref
	for _, o := range s.pods.GetStore().List() {
		if p := o.(*corev1.Pod); p.Spec.NodeName == "" && !ended(p) && ours(p) && len(p.Spec.SchedulingGates) == 0 {
			out = append(out, ledger.Ref{UID: string(p.UID), Namespace: p.Namespace, Name: p.Name})
		}
	}
	return out
}

// pod finds a known pod with this very UID, else nil.
func (s *Source) pod(r ledger.Ref) *corev1.Pod {
	o, ok, err := s.pods.GetStore().GetByKey(r.Namespace + "/" + r.Name)
	if err != nil || !ok {
		return nil
	}
	if p := o.(*corev1.Pod); string(p.UID) == r.UID {
		return p
	}
	return nil
}

// Asks returns what a pod asks for, as far as its containers say; false while
// the pod isn't known, or its request can't be read.
func (s *Source) Asks(r ledger.Ref) (api.Request, bool) {
	p := s.pod(r)
	if p == nil {
		return api.Request{}, false
	}
	request, err := api.ParseRequest(specs(p), nil)
	return request, err == nil
}

func (s *Source) setPod(o any) {
	p := o.(*corev1.Pod)
	if s.Resizer != nil {
		defer s.Resizer.PodChanged(p)
	}
	if s.Planner != nil {
		defer s.Planner.PodChanged(p)
	}
	switch {
	case p.Spec.NodeName == "":
	case ended(p):
		s.Ledger.DropHost(string(p.UID), p.Spec.NodeName)
	default:
		s.Ledger.SetHost(string(p.UID), p.Spec.NodeName, keptHost(p))
	}
	if !ours(p) {
		return
	}
	lp := ledger.Pod{
		Ref:     ledger.Ref{UID: string(p.UID), Namespace: p.Namespace, Name: p.Name},
		Node:    p.Spec.NodeName,
		Owner:   ownerOf(p),
		Ended:   ended(p),
		Started: started(p),
		OnCards: p.Annotations[api.AnnotationGrant] == "" && OnCards(p),
	}
	if lp.Ended || lp.Node != "" {
		s.Forget(lp.UID)
	}
	if lp.Node != "" {
		g, err := grantOf(p)
		if err != nil {
			// The node refuses such a grant as well.
			s.Log.Warn("ignored a grant", "pod", p.Namespace+"/"+p.Name, "uid", p.UID, "node", p.Spec.NodeName, "error", err)
		}
		if lp.Grant = g; g != nil {
			lp.Containers = containers(p, g)
		}
	}
	s.Ledger.SetPod(lp, s.Now())
}

func (s *Source) dropPod(o any) {
	p := o.(*corev1.Pod)
	s.Ledger.DropHost(string(p.UID), p.Spec.NodeName)
	if s.Planner != nil {
		defer s.Planner.PodGone(string(p.UID))
	}
	if !ours(p) {
		return
	}
	s.Forget(string(p.UID))
	s.Ledger.DropPod(string(p.UID), s.Now())
}

// grantOf is the pod's grant, nil without error if it has none.
func grantOf(p *corev1.Pod) (*api.Grant, error) {
	v := p.Annotations[api.AnnotationGrant]
	if v == "" {
		return nil, nil
	}
	g, err := api.DecodeGrant(v)
	switch {
	case err != nil:
		return nil, err
	case g.UID != string(p.UID):
		return nil, fmt.Errorf("it is for pod UID %q", g.UID)
	case g.Node != p.Spec.NodeName:
		return nil, fmt.Errorf("it is for node %q", g.Node)
	}
	return &g, nil
}

func (s *Source) setNode(o any) {
	n := o.(*corev1.Node)
	info := ledger.NodeInfo{Managed: n.Labels[api.LabelManaged] == "true", Host: allocatable(n)}
	for name, q := range n.Status.Allocatable {
		info.Cards = info.Cards || strings.HasPrefix(string(name), "nvidia.com/") && !q.IsZero()
	}
	for _, t := range n.Spec.Taints {
		info.OutOfService = info.OutOfService || t.Key == corev1.TaintNodeOutOfService
	}
	s.Ledger.SetNode(n.Name, info)
	if s.Planner != nil {
		s.Planner.NodeChanged(n)
	}
}

func (s *Source) dropNode(o any) {
	name := o.(*corev1.Node).Name
	if s.Planner != nil {
		s.Planner.NodeGone(name)
	}
	s.Ledger.DropNode(name, s.Now())
}

func (s *Source) setReport(o any) {
	s.Ledger.SetReport(o.(*v1alpha1.GPUNode), s.Now())
	if s.Resizer != nil {
		s.Resizer.ReportChanged(o.(*v1alpha1.GPUNode))
	}
}

func (s *Source) setQuota(o any) {
	q := o.(*corev1.ResourceQuota)
	if b := bound(q); b.MemMiB >= 0 || b.Cores >= 0 {
		s.Ledger.SetQuota(q.Namespace, b)
		return
	}
	s.dropQuota(o)
}

func (s *Source) dropQuota(o any) {
	q := o.(*corev1.ResourceQuota)
	s.Ledger.DropQuota(q.Namespace, q.Name)
}

// bound is what a (trimmed) quota says of cards.
func bound(q *corev1.ResourceQuota) ledger.Quota {
	b := ledger.Quota{Name: q.Name, MemMiB: -1, Cores: -1}
	if m, ok := q.Spec.Hard["requests."+api.ResourceMemory]; ok {
		b.MemMiB = m.Value()
		if m.Format == resource.BinarySI {
			b.MemMiB /= api.MiB
		}
	}
	if c, ok := q.Spec.Hard["requests."+api.ResourceCores]; ok {
		b.Cores = c.Value()
	}
	return b
}

func (s *Source) dropReport(o any) { s.Ledger.DropReport(o.(*v1alpha1.GPUNode).Name, s.Now()) }

// ours reports whether the (trimmed) pod matters to the ledger.
func ours(p *corev1.Pod) bool { return len(p.Spec.Containers) > 0 }

// ownerOf is the UID of the controller whose replica a pod is, or empty.
func ownerOf(p *corev1.Pod) string {
	if c := metav1.GetControllerOfNoCopy(p); c != nil {
		return string(c.UID)
	}
	return ""
}

func ended(p *corev1.Pod) bool {
	return p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed
}

// started reports whether a container of the pod ever ran.
func started(p *corev1.Pod) bool {
	for _, list := range [][]corev1.ContainerStatus{p.Status.InitContainerStatuses, p.Status.ContainerStatuses} {
		for _, c := range list {
			if c.State.Waiting == nil && (c.State.Running != nil || c.State.Terminated != nil) || c.RestartCount > 0 {
				return true
			}
		}
	}
	return false
}

// specs lists the pod's containers in its order.
func specs(p *corev1.Pod) []api.ContainerSpec {
	var out []api.ContainerSpec
	add := func(c *corev1.Container, kind api.ContainerKind) {
		s := api.ContainerSpec{Name: c.Name, Kind: kind, Privileged: c.SecurityContext != nil && c.SecurityContext.Privileged != nil && *c.SecurityContext.Privileged,
			Resources: map[string]string{}}
		for name, q := range c.Resources.Limits {
			s.Resources[string(name)] = q.String()
		}
		out = append(out, s)
	}
	for i := range p.Spec.InitContainers {
		add(&p.Spec.InitContainers[i], kindOf(&p.Spec.InitContainers[i]))
	}
	for i := range p.Spec.Containers {
		add(&p.Spec.Containers[i], api.App)
	}
	return out
}

func kindOf(c *corev1.Container) api.ContainerKind {
	if c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways {
		return api.Sidecar
	}
	return api.Init
}

// containers lists those that have a grant, in the pod's order.
func containers(p *corev1.Pod, g *api.Grant) []ledger.Container {
	all := specs(p)
	// Without annotations, which say nothing of amounts. A request that can't be
	// read leaves all of them at zero.
	request, _ := api.ParseRequest(all, nil)
	asks := request.Containers
	var out []ledger.Container
	for _, s := range all {
		c := ledger.Container{Name: s.Name, Kind: s.Kind}
		if len(asks) > 0 && asks[0].Name == s.Name {
			if cards := g.Containers[s.Name]; len(cards) > 0 && cards[0].Mode.Share() {
				c.MemMiB, c.MemPercent, c.Cores = asks[0].MemMiB, asks[0].MemPercent, asks[0].Cores
			}
			asks = asks[1:]
		}
		if _, ok := g.Containers[s.Name]; ok {
			out = append(out, c)
		}
	}
	return out
}

// OnCards reports whether a container of the pod runs that asks for cards in one
// of the forms in which device plugins hand them out.
func OnCards(p *corev1.Pod) bool {
	running := func(name string, list []corev1.ContainerStatus) bool {
		return slices.ContainsFunc(list, func(c corev1.ContainerStatus) bool { return c.Name == name && c.State.Running != nil })
	}
	on := func(list []corev1.Container, status []corev1.ContainerStatus) bool {
		return slices.ContainsFunc(list, func(c corev1.Container) bool {
			for name, q := range c.Resources.Limits {
				card := name == api.ResourceGPU || name == api.ResourceGPU+".shared" || strings.HasPrefix(string(name), "nvidia.com/mig-")
				if card && !q.IsZero() && running(c.Name, status) {
					return true
				}
			}
			return false
		})
	}
	return !ended(p) && (on(p.Spec.Containers, p.Status.ContainerStatuses) || on(p.Spec.InitContainers, p.Status.InitContainerStatuses))
}
