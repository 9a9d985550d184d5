package planner

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/record"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/scheduler-extender/cluster"
	"github.com/carve-gpu/carve/scheduler-extender/ledger"
	"github.com/carve-gpu/carve/scheduler-extender/place"
)

const (
	// spares are nodes beside the chosen one to which a pinned pod may go.
	spares = 7
	// keptFor is how long room is kept for a planned pod: what kube-scheduler needs until it
	// comes to the pod, also behind a thousand others.
	keptFor = time.Minute
	// writers bounds the patches that are under way.
	writers = 16
	// callTimeout bounds one API call.
	callTimeout = 10 * time.Second
	// retryAfter is when a pod is planned anew whose patch failed.
	retryAfter = time.Second
	// lookEvery is how often pods are looked at that nothing tells of: those that wait too
	// long, gated or pinned.
	lookEvery = time.Second
	// stuckAfter is how long a pinned pod may be refused by kube-scheduler before its
	// controller has to make another. The next ones of that controller aren't pinned for
	// softFor.
	stuckAfter = time.Minute
	softFor    = time.Hour
	// tellEvery is how often a pod is told that it waits, where the reason changes.
	tellEvery = 30 * time.Second
)

// Config is what a Planner is made of.
type Config struct {
	Kube   kubernetes.Interface
	Ledger *ledger.Ledger
	Placer *place.Placer
	Ready  func() bool
	// ReleaseAfter is how long a pod waits for room before it is let go to kube-scheduler
	// without a plan, so that an autoscaler sees it; 0 is for ever.
	ReleaseAfter time.Duration
	Events       record.EventRecorder
	Registry     prometheus.Registerer
	Log          *slog.Logger
	Now          func() time.Time
}

// Planner plans gated pods. Its methods may be called concurrently.
type Planner struct {
	Config
	fleet  fleet
	writes chan struct{}
	wake   chan struct{}
	plans  *prometheus.CounterVec

	mu sync.Mutex
	// pods are those that are gated.
	pods map[string]*gated // by UID
	// planned are pods that have a plan and no node yet.
	planned map[string]*corev1.Pod
	// soft are controllers whose pods aren't pinned, until when.
	soft map[types.UID]time.Time
}

// gated is a pod that waits for its plan.
type gated struct {
	pod *corev1.Pod
	// due says that it is to be looked at; busy that a write of it is under way; written
	// that its gate is off, though no event has shown that yet.
	due, busy, written bool
	// loose says that it isn't to be pinned: the API server didn't take that.
	loose     bool
	notBefore time.Time
	refused   time.Time // since when; zero if never
	reason    string    // that was told
	told      time.Time
}

// New makes a planner and registers its metrics; Run starts it. It may be told of pods and
// nodes before that.
func New(c Config) *Planner {
	p := &Planner{Config: c, writes: make(chan struct{}, writers), wake: make(chan struct{}, 1),
		pods: map[string]*gated{}, planned: map[string]*corev1.Pod{}, soft: map[types.UID]time.Time{},
		plans: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "carve_extender_plans_total",
			Help: "Pods that were held back, by what came of it: pinned, nominated, released (to kube-scheduler without a plan), remade (deleted for its controller to make anew), failed (a write; it is tried again).",
		}, []string{"result"}),
	}
	c.Registry.MustRegister(p.plans, prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "carve_extender_gated_pods", Help: "Pods that are held back until a node has room for them.",
	}, func() float64 {
		p.mu.Lock()
		defer p.mu.Unlock()
		return float64(len(p.pods))
	}))
	return p
}

// PodChanged takes in a (trimmed) pod.
func (p *Planner) PodChanged(pod *corev1.Pod) {
	uid := string(pod.UID)
	p.mu.Lock()
	defer p.mu.Unlock()
	_, has := planOf(pod)
	switch {
	case cluster.ToPlan(pod):
		g := p.pods[uid]
		if g == nil {
			g = &gated{}
			p.pods[uid] = g
		} else if g.written || g.pod.ResourceVersion == pod.ResourceVersion {
			return // a gate that is off can't be put back
		}
		// Also where it changed while it waited: gated pods may still be given other nodes.
		g.pod, g.due = pod, true
		p.stir()
	case has && pod.Spec.NodeName == "":
		delete(p.pods, uid)
		p.planned[uid] = pod
	default:
		delete(p.pods, uid)
		delete(p.planned, uid)
	}
}

// PodGone takes in that a pod is gone.
func (p *Planner) PodGone(uid string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.pods, uid)
	delete(p.planned, uid)
}

// NodeChanged takes in a (trimmed) node. Of room on it the ledger tells; labels and taints
// are looked at here.
func (p *Planner) NodeChanged(n *corev1.Node) {
	if !p.fleet.set(n) {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, g := range p.pods {
		g.due = !g.written
	}
	p.stir()
}

// NodeGone takes in that a node is gone.
func (p *Planner) NodeGone(name string) { p.fleet.drop(name) }

// Wake has a pod looked at again, for which there may be room now. It reports whether the pod
// is one of those that are held back: others have to be woken in another way.
func (p *Planner) Wake(uid string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	g := p.pods[uid]
	if g == nil {
		return false
	}
	g.due = !g.written
	p.stir()
	return true
}

func (p *Planner) stir() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// Restore books again what was planned before this process began. It is called when all that
// the API shows is in the ledger, and before anything is placed.
func (p *Planner) Restore() {
	p.mu.Lock()
	var pods []*corev1.Pod
	for _, pod := range p.planned {
		pods = append(pods, pod)
	}
	p.mu.Unlock()
	slices.SortFunc(pods, func(a, b *corev1.Pod) int { return before(a, b) })
	booked := 0
	for _, pod := range pods {
		plan, _ := planOf(pod)
		asked, err := cluster.PodOf(pod)
		if err != nil {
			continue
		}
		names := make([][]byte, len(plan.Nodes))
		for i, n := range plan.Nodes {
			names[i] = []byte(n)
		}
		// At the planned node if it has room still, else at a spare.
		out := p.Placer.Plan(asked, names[:1], p.plan(pod, 0), p.Now())
		if len(out.Nodes) == 0 && out.Err == nil && len(names) > 1 {
			out = p.Placer.Plan(asked, names[1:], p.plan(pod, 0), p.Now())
		}
		if len(out.Nodes) > 0 {
			booked++
		}
	}
	if len(pods) > 0 {
		p.Log.Info("plans taken over", "pods", len(pods), "booked", booked)
	}
}

// before is the order in which pods are planned: that in which kube-scheduler takes them.
func before(a, b *corev1.Pod) int {
	priority := func(p *corev1.Pod) int32 {
		if p.Spec.Priority == nil {
			return 0
		}
		return *p.Spec.Priority
	}
	return cmp.Or(cmp.Compare(priority(b), priority(a)), a.CreationTimestamp.Compare(b.CreationTimestamp.Time), strings.Compare(string(a.UID), string(b.UID)))
}

// Run plans until the context ends, and returns when its writes have ended.
func (p *Planner) Run(ctx context.Context) {
	var under sync.WaitGroup
	defer under.Wait()
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-p.wake:
		case <-tick.C:
			if p.Ready() {
				p.look(ctx)
			}
		}
		if !p.Ready() {
			continue
		}
		for _, g := range p.take() {
			if ctx.Err() != nil {
				return
			}
			p.decide(ctx, g, &under)
		}
	}
}

// take returns the pods that are due, in order.
func (p *Planner) take() []*gated {
	now := p.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	var out []*gated
	for _, g := range p.pods {
		if g.due && !g.busy && !now.Before(g.notBefore) {
			g.due, g.busy = false, true
			out = append(out, g)
		}
	}
	slices.SortFunc(out, func(a, b *gated) int { return before(a.pod, b.pod) })
	return out
}

// done ends the work on a pod.
func (p *Planner) done(g *gated, again time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if g.busy = false; again > 0 {
		g.due, g.notBefore = true, p.Now().Add(again)
	}
	if g.due = g.due && !g.written; g.due {
		p.stir()
	}
}

// plan is how a pod's place is decided.
func (p *Planner) plan(pod *corev1.Pod, spares int) place.Plan {
	c := cluster.ChoiceOf(pod)
	return place.Plan{Spares: spares, For: keptFor, Suits: func(node string) bool {
		n := p.fleet.node(node)
		if n == nil {
			return false
		}
		ok, err := c.Takes(n)
		return ok && err == nil
	}}
}

// decide finds a place for a pod and has it written, or leaves it gated.
func (p *Planner) decide(ctx context.Context, g *gated, under *sync.WaitGroup) {
	p.mu.Lock()
	pod := g.pod
	p.mu.Unlock()
	write := func(patch func(context.Context, *corev1.Pod) (string, error)) {
		p.writes <- struct{}{}
		under.Go(func() {
			defer func() { <-p.writes }()
			call, cancel := context.WithTimeout(context.WithoutCancel(ctx), callTimeout)
			defer cancel()
			p.wrote(ctx, g, pod, patch, call)
		})
	}
	asked, err := cluster.PodOf(pod)
	if err != nil || asked.Request.Empty() {
		// The extender's filter says what is wrong, or that nothing of ours is asked for.
		write(p.release)
		return
	}
	choice := cluster.ChoiceOf(pod)
	var names [][]byte
	foreign := false
	for _, n := range p.fleet.all() {
		ok, err := choice.Takes(n.node)
		if err != nil {
			write(p.release)
			return
		}
		if !ok {
			continue
		}
		names = append(names, n.name)
		foreign = foreign || n.node.Labels[api.LabelManaged] != "true" && hasCards(n.node)
	}
	count := 0
	pin := !g.loose && p.pins(pod)
	if pin {
		count = spares
	}
	out := p.Placer.Plan(asked, names, p.plan(pod, count), p.Now())
	switch {
	case out.Err != nil:
		p.Log.Info("not planned now", "pod", pod.Namespace+"/"+pod.Name, "uid", pod.UID, "error", out.Err)
		p.done(g, retryAfter)
	case len(out.Nodes) > 0:
		write(func(ctx context.Context, pod *corev1.Pod) (string, error) { return p.put(ctx, pod, out.Nodes, pin) })
	case foreign && asked.Request.WholeOnly(), len(names) == 0, len(out.Failed) == 0:
		// It may be where carve doesn't manage the cards; or no node that there is could
		// ever have it, which an autoscaler may change.
		p.Placer.Forget(asked.UID)
		write(p.release)
	case p.waits(g, out):
		p.Placer.Forget(asked.UID)
		write(p.release)
	default:
		p.tell(g, pod, out)
		p.done(g, 0)
	}
}

// hasCards reports whether a node advertises cards.
func hasCards(n *corev1.Node) bool {
	q := n.Status.Allocatable[api.ResourceGPU]
	return !q.IsZero()
}

// waits notes that a pod was refused, and reports whether it has waited for long enough.
func (p *Planner) waits(g *gated, out place.Filtered) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := p.Now()
	if g.refused.IsZero() {
		g.refused = now
	}
	return p.ReleaseAfter > 0 && now.Sub(g.refused) >= p.ReleaseAfter
}

// tell says on the pod why it waits, where that is news.
func (p *Planner) tell(g *gated, pod *corev1.Pod, out place.Filtered) {
	text := ""
	for _, reasons := range []map[string]string{out.Failed, out.Never} {
		for _, node := range slices.Sorted(mapKeys(reasons)) {
			if text != "" {
				text += "; "
			}
			text += reasons[node]
		}
	}
	now := p.Now()
	p.mu.Lock()
	news := string(out.Reason) != g.reason && (g.told.IsZero() || now.Sub(g.told) >= tellEvery)
	if news {
		g.reason, g.told = string(out.Reason), now
	}
	p.mu.Unlock()
	if news {
		p.Events.Event(pod, corev1.EventTypeNormal, "WaitingForCards", clip("held back until a node has room: "+text))
	}
}

// clip bounds an event's text: the API takes 1,024 bytes.
func clip(s string) string {
	if len(s) <= 1000 {
		return s
	}
	return strings.ToValidUTF8(s[:997], "") + "…"
}

func mapKeys(m map[string]string) func(yield func(string) bool) {
	return func(yield func(string) bool) {
		for k := range m {
			if !yield(k) {
				return
			}
		}
	}
}

// pins reports whether a pod is to be pinned.
func (p *Planner) pins(pod *corev1.Pod) bool {
	if !pinnable(pod) {
		return false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	until, soft := p.soft[metav1.GetControllerOfNoCopy(pod).UID]
	return !soft || p.Now().After(until)
}

// wrote runs a write and takes in how it went.
func (p *Planner) wrote(ctx context.Context, g *gated, pod *corev1.Pod, patch func(context.Context, *corev1.Pod) (string, error), call context.Context) {
	result, err := patch(call, pod)
	log := p.Log.With("pod", pod.Namespace+"/"+pod.Name, "uid", pod.UID)
	switch {
	case err == nil:
		p.plans.WithLabelValues(result).Inc()
		log.Info("planned", "as", result)
		p.mu.Lock()
		g.written = true
		p.mu.Unlock()
		p.done(g, 0)
	case apierrors.IsNotFound(err), apierrors.IsConflict(err):
		// It is gone, or another: its event follows.
		p.Ledger.Withdraw(string(pod.UID))
		p.done(g, retryAfter)
	case apierrors.IsInvalid(err) || apierrors.IsForbidden(err):
		// Nothing was written. What was wrong was the affinity, if it has one.
		p.plans.WithLabelValues("failed").Inc()
		log.Warn("a plan was refused; trying without node affinity", "error", err)
		p.Ledger.Withdraw(string(pod.UID))
		p.mu.Lock()
		g.loose = true
		p.mu.Unlock()
		p.done(g, retryAfter)
	default:
		// Whether it was written isn't known. The room stays booked, and the same plan is
		// written once more if the pod is gated still.
		if ctx.Err() == nil {
			p.plans.WithLabelValues("failed").Inc()
			log.Warn("a plan wasn't written", "error", err)
		}
		p.done(g, retryAfter)
	}
}

// ungated is the patch that takes the gate off a pod, with its UID as precondition.
func ungated(pod *corev1.Pod) map[string]any {
	return map[string]any{
		"metadata": map[string]any{"uid": string(pod.UID)},
		"spec": map[string]any{"schedulingGates": []any{
			map[string]any{"name": api.GatePlan, "$patch": "delete"},
		}},
	}
}

// put writes where a pod goes.
func (p *Planner) put(ctx context.Context, pod *corev1.Pod, nodes []string, pin bool) (string, error) {
	plan := api.Plan{UID: string(pod.UID), Nodes: nodes, At: p.Now().UTC().Truncate(time.Second)}
	patch := ungated(pod)
	result := "nominated"
	var selector *corev1.NodeSelector
	if pin {
		n := 0
		if selector, n = pinned(pod, nodes); selector != nil {
			plan.Nodes, plan.Pinned, result = nodes[:n], true, "pinned"
			patch["spec"].(map[string]any)["affinity"] = map[string]any{"nodeAffinity": map[string]any{
				"requiredDuringSchedulingIgnoredDuringExecution": selector}}
		}
	}
	if selector == nil {
		plan.Nodes = nodes[:1]
		if err := p.nominate(ctx, pod, nodes[0]); err != nil {
			return "", err
		}
	}
	value, err := plan.Encode()
	if err != nil {
		return "", err
	}
	patch["metadata"].(map[string]any)["annotations"] = map[string]string{api.AnnotationPlan: value}
	return result, p.patch(ctx, pod, patch, "")
}

// nominate has kube-scheduler try a node first.
func (p *Planner) nominate(ctx context.Context, pod *corev1.Pod, node string) error {
	return p.patch(ctx, pod, map[string]any{
		"metadata": map[string]any{"uid": string(pod.UID)},
		"status":   map[string]any{"nominatedNodeName": node},
	}, "status")
}

// release lets a pod go to kube-scheduler as it is.
func (p *Planner) release(ctx context.Context, pod *corev1.Pod) (string, error) {
	return "released", p.patch(ctx, pod, ungated(pod), "")
}

func (p *Planner) patch(ctx context.Context, pod *corev1.Pod, patch map[string]any, part string) error {
	b, err := json.Marshal(patch)
	if err != nil {
		return err
	}
	var parts []string
	if part != "" {
		parts = []string{part}
	}
	if _, err := p.Kube.CoreV1().Pods(pod.Namespace).Patch(ctx, pod.Name, types.StrategicMergePatchType, b, metav1.PatchOptions{}, parts...); err != nil {
		return fmt.Errorf("patch pod %s/%s: %w", pod.Namespace, pod.Name, err)
	}
	return nil
}

// look sees after pods that nothing tells of: gated ones that have waited long enough, and
// pinned ones that can't get to their nodes.
func (p *Planner) look(ctx context.Context) {
	now := p.Now()
	var stuck []*corev1.Pod
	p.mu.Lock()
	for _, g := range p.pods {
		if p.ReleaseAfter > 0 && !g.refused.IsZero() && now.Sub(g.refused) >= p.ReleaseAfter || !g.notBefore.IsZero() && now.After(g.notBefore) && g.due {
			g.due = true
			p.stir()
		}
	}
	for _, pod := range p.planned {
		if plan, ok := planOf(pod); ok && plan.Pinned && refusedSince(pod, now) >= stuckAfter {
			stuck = append(stuck, pod)
		}
	}
	for uid, until := range p.soft {
		if now.After(until) {
			delete(p.soft, uid)
		}
	}
	p.mu.Unlock()
	for _, pod := range stuck {
		p.remake(ctx, pod)
	}
}

// refusedSince is for how long kube-scheduler has refused a pod. It isn't told where the
// scheduler hasn't looked at the pod: one that is away is no reason to do anything.
func refusedSince(pod *corev1.Pod, now time.Time) time.Duration {
	plan, _ := planOf(pod)
	for _, c := range pod.Status.Conditions {
		if c.Status == corev1.ConditionFalse && c.Reason == corev1.PodReasonUnschedulable {
			since := c.LastTransitionTime.Time
			if plan.At.After(since) {
				since = plan.At // the condition is older where the pod was gated
			}
			return now.Sub(since)
		}
	}
	return 0
}

// remake deletes a pod that its pinned nodes don't take, for its controller to make another.
func (p *Planner) remake(ctx context.Context, pod *corev1.Pod) {
	owner := metav1.GetControllerOfNoCopy(pod)
	if owner == nil {
		return // none of ours: only pods with a controller are pinned
	}
	p.mu.Lock()
	p.soft[owner.UID] = p.Now().Add(softFor)
	delete(p.planned, string(pod.UID))
	p.mu.Unlock()
	call, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	err := p.Kube.CoreV1().Pods(pod.Namespace).Delete(call, pod.Name, metav1.DeleteOptions{
		Preconditions: &metav1.Preconditions{UID: &pod.UID, ResourceVersion: &pod.ResourceVersion}})
	log := p.Log.With("pod", pod.Namespace+"/"+pod.Name, "uid", pod.UID, "controller", owner.Kind+"/"+owner.Name)
	switch {
	case err == nil:
		p.plans.WithLabelValues("remade").Inc()
		log.Info("deleted a pod that its planned nodes don't take, for its controller to make another")
		p.Events.Event(pod, corev1.EventTypeNormal, "PlanLapsed", "its planned nodes don't take it any more; "+owner.Kind+" "+owner.Name+" makes another, which may go anywhere")
	case apierrors.IsNotFound(err) || apierrors.IsConflict(err):
	default:
		log.Warn("could not delete a pod that its planned nodes don't take", "error", err)
	}
}
