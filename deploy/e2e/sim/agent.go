package sim

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"sort"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/v1alpha1"
)

// The agent's pacing (vgpu/agent/report.go).
const (
	gatherAtLeast = 20 * time.Millisecond
	gatherAtMost  = 60 * time.Millisecond
	reportsApart  = 200 * time.Millisecond
	startsSoon    = time.Second
	retryAfter    = 500 * time.Millisecond
)

// holding is a pod's slices on a node.
type holding struct {
	namespace, pod string
	grant          api.Grant
	peaks          map[string]amount
	// inits are the containers that have ended once the pod is active.
	inits      map[string]bool
	active     bool
	preparedAt time.Time
	shown      bool // a report told of it
}

// amount is what a pod holds of one card at most.
type amount struct {
	memMiB int64
	cores  int
	whole  bool
}

func (a amount) plus(b amount) amount {
	return amount{a.memMiB + b.memMiB, a.cores + b.cores, a.whole || b.whole}
}

func (a amount) max(b amount) amount {
	return amount{max(a.memMiB, b.memMiB), max(a.cores, b.cores), a.whole || b.whole}
}

// peaks adds a grant up by card: what runs together is summed, init containers
// count where they need more.
func peaks(g api.Grant, spec *corev1.PodSpec) map[string]amount {
	together, out := map[string]amount{}, map[string]amount{}
	each := func(name string, do func(card string, a amount)) {
		for _, c := range g.Containers[name] {
			do(c.Card, amount{c.MemMiB, c.Cores, c.Mode == api.ModeExclusive})
		}
	}
	for i := range spec.InitContainers {
		c := &spec.InitContainers[i]
		each(c.Name, func(card string, a amount) {
			out[card] = out[card].max(together[card].plus(a))
			if sidecar(c) {
				together[card] = together[card].plus(a)
			}
		})
	}
	for i := range spec.Containers {
		each(spec.Containers[i].Name, func(card string, a amount) { together[card] = together[card].plus(a) })
	}
	for card, a := range together {
		out[card] = out[card].max(a)
	}
	return out
}

// sidecar reports whether an init container goes on beside the others.
func sidecar(c *corev1.Container) bool {
	return c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways
}

// take puts a pod's grant into force, or says why it can't be.
func (n *node) take(p *corev1.Pod) error {
	g, err := api.DecodeGrant(p.Annotations[api.AnnotationGrant])
	if err != nil {
		return err
	}
	uid := string(p.UID)
	if g.UID != uid || g.Node != n.Name {
		return fmt.Errorf("the grant is for pod %s on node %s", g.UID, g.Node)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	before := n.held[uid]
	if before != nil && before.grant.Generation >= g.Generation {
		return nil
	}
	wants := peaks(g, &p.Spec)
	for card, a := range wants {
		if err := n.room(uid, card, a); err != nil {
			return err
		}
	}
	h := &holding{namespace: p.Namespace, pod: p.Name, grant: g, peaks: wants, inits: map[string]bool{}, preparedAt: time.Now()}
	for i := range p.Spec.InitContainers {
		if c := &p.Spec.InitContainers[i]; !sidecar(c) {
			h.inits[c.Name] = true
		}
	}
	if before != nil {
		h.active, h.preparedAt, h.shown = before.active, before.preparedAt, before.shown
	}
	n.held[uid] = h
	n.report()
	return nil
}

// room checks one card. n.mu is held.
func (n *node) room(uid, card string, want amount) error {
	for _, c := range n.cards {
		if c.UUID != card {
			continue
		}
		sum, pods := want, 1
		for other, h := range n.held {
			if a, ok := h.peaks[card]; ok && other != uid {
				sum, pods = sum.plus(a), pods+1
			}
		}
		switch {
		case sum.whole && pods > 1:
			return fmt.Errorf("card %s is granted whole and to %d pods", card, pods)
		case sum.memMiB > c.MemoryMiB:
			return fmt.Errorf("card %s has %d MiB, granted are %d to %d pods", card, c.MemoryMiB, sum.memMiB, pods)
		case sum.cores > 100:
			return fmt.Errorf("card %s has %d percent granted to %d pods", card, sum.cores, pods)
		}
		return nil
	}
	return fmt.Errorf("there is no card %s", card)
}

// drop takes a pod's slices off.
func (n *node) drop(uid types.UID) {
	n.mu.Lock()
	delete(n.ran, string(uid))
	h, had := n.held[string(uid)]
	delete(n.held, string(uid))
	if had && !h.shown {
		n.unshown = append(n.unshown, string(uid))
	}
	n.mu.Unlock()
	if had {
		n.report()
	}
}

// activate notes that a pod's containers run.
func (n *node) activate(uid types.UID) {
	n.mu.Lock()
	if h := n.held[string(uid)]; h != nil && !h.active {
		h.active = true
		n.report()
	}
	n.mu.Unlock()
}

// status is what the report says now. n.mu is held.
func (n *node) status() v1alpha1.GPUNodeStatus {
	s := v1alpha1.GPUNodeStatus{
		AgentVersion: "sim", DriverVersion: "550.90.07", SoftwareGPU: true, Enforcement: v1alpha1.EnforcementAdvisory,
		HookConnectedSince: n.since.DeepCopy(), SlotsPerCard: n.slots,
	}
	placed := map[string][]v1alpha1.Slice{}
	for uid, h := range n.held {
		state := v1alpha1.Prepared
		if h.active {
			state = v1alpha1.Active
		}
		for name, cards := range h.grant.Containers {
			if h.active && h.inits[name] {
				continue
			}
			for _, c := range cards {
				placed[c.Card] = append(placed[c.Card], v1alpha1.Slice{
					PodUID: uid, Container: name, Namespace: h.namespace, Pod: h.pod,
					MemMiB: c.MemMiB, Cores: int32(c.Cores), Mode: string(c.Mode),
					Generation: int32(h.grant.Generation), State: state,
				})
			}
		}
		for card, a := range h.peaks {
			if a.whole {
				for _, c := range n.cards {
					if c.UUID == card {
						a.memMiB = c.MemoryMiB
					}
				}
			}
			s.Summary.GrantedMiB += a.memMiB
		}
	}
	for _, c := range n.cards {
		c.Slices = placed[c.UUID]
		sort.Slice(c.Slices, func(i, j int) bool {
			x, y := c.Slices[i], c.Slices[j]
			return x.PodUID < y.PodUID || x.PodUID == y.PodUID && x.Container < y.Container
		})
		s.Cards = append(s.Cards, c)
		s.Summary.Cards++
		s.Summary.MemoryMiB += c.MemoryMiB
		s.Summary.Slices += int32(len(c.Slices))
	}
	s.Released = slices.Clone(n.unshown[max(0, len(n.unshown)-v1alpha1.MaxReleased):])
	return s
}

// writeReports keeps a node's GPUNode equal to what is, as the agent does.
func (f *Fleet) writeReports(ctx context.Context, n *node) {
	n.report()
	var due <-chan time.Time
	for {
		select {
		case <-ctx.Done():
			return
		case <-n.dirty:
		case <-due:
		}
		n.mu.Lock()
		late := n.late
		n.mu.Unlock()
		if !pause(ctx, late+gatherAtLeast+rand.N(gatherAtMost-gatherAtLeast)) {
			return
		}
		select {
		case <-n.dirty:
		default:
		}
		wrote, again, err := f.writeReport(ctx, n)
		if due = nil; again > 0 {
			due = time.After(again)
		}
		switch {
		case ctx.Err() != nil:
			return
		case err != nil:
			f.Log.Warn("a report wasn't written", "node", n.Name, "error", err)
			if !pause(ctx, retryAfter) {
				return
			}
			n.report()
		case wrote && !pause(ctx, reportsApart):
			return
		}
	}
}

func pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}

func (f *Fleet) writeReport(ctx context.Context, n *node) (wrote bool, again time.Duration, err error) {
	n.mu.Lock()
	have, want, gone := n.written, n.status(), n.gone
	wait := n.onlyFresh(have, want)
	n.mu.Unlock()
	if gone {
		return false, 0, nil
	}
	if have != nil {
		same := want
		if len(want.Released) == 0 {
			same.Released = have.Status.Released // it goes with the next change
		}
		if equality.Semantic.DeepEqual(have.Status, same) {
			return false, 0, nil
		}
	}
	if wait > 0 {
		return false, wait, nil
	}
	if have == nil {
		have, err = f.Reports.Create(ctx, &v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: n.Name}})
		if apierrors.IsAlreadyExists(err) {
			have, err = f.Reports.Get(ctx, n.Name)
		}
		if err != nil {
			return false, 0, fmt.Errorf("create report: %w", err)
		}
	}
	next := have.DeepCopy()
	next.Status = want
	got, err := f.Reports.UpdateStatus(ctx, next)
	if apierrors.IsConflict(err) { // its spec changed meanwhile
		if have, err = f.Reports.Get(ctx, n.Name); err == nil {
			have.Status = want
			got, err = f.Reports.UpdateStatus(ctx, have)
		}
	}
	if err != nil {
		return false, 0, fmt.Errorf("write report: %w", err)
	}
	n.mu.Lock()
	n.written, n.writes = got, n.writes+1
	n.unshown = slices.DeleteFunc(n.unshown, func(uid string) bool { return slices.Contains(want.Released, uid) })
	for _, c := range want.Cards {
		for _, x := range c.Slices {
			if h := n.held[x.PodUID]; h != nil {
				h.shown = true
			}
		}
	}
	n.mu.Unlock()
	return true, 0, nil
}

// onlyFresh says how long a report may wait: as long as the slices that it would
// add were prepared a moment ago and no container runs with them. n.mu is held.
func (n *node) onlyFresh(have *v1alpha1.GPUNode, want v1alpha1.GPUNodeStatus) time.Duration {
	if have == nil {
		return 0
	}
	if len(want.Released) == 0 {
		want.Released = have.Status.Released
	}
	wait := time.Duration(0)
	fresh := map[string]bool{}
	for uid, h := range n.held {
		if left := startsSoon - time.Since(h.preparedAt); left > 0 && !h.active {
			fresh[uid] = true
			if wait == 0 || left < wait {
				wait = left
			}
		}
	}
	without := func(s v1alpha1.GPUNodeStatus) v1alpha1.GPUNodeStatus {
		s = *s.DeepCopy()
		s.Summary = v1alpha1.Summary{}
		for i := range s.Cards {
			kept := slices.DeleteFunc(s.Cards[i].Slices, func(x v1alpha1.Slice) bool { return fresh[x.PodUID] && x.State == v1alpha1.Prepared })
			s.Cards[i].Slices = kept
		}
		return s
	}
	if wait > 0 && equality.Semantic.DeepEqual(without(have.Status), without(want)) {
		return wait
	}
	return 0
}

// reportChanged takes the operator's number of slots, and advertises it.
func (f *Fleet) reportChanged(o any) {
	g, ok := o.(*v1alpha1.GPUNode)
	if !ok || f.nodes[g.Name] == nil {
		return
	}
	n := f.nodes[g.Name]
	slots := n.SlotsPerCard
	if slots == 0 {
		slots = api.SlotsPerCard
	}
	if g.Spec.SlotsPerCard != nil {
		slots = *g.Spec.SlotsPerCard
	}
	n.mu.Lock()
	changed := n.slots != slots
	n.slots = slots
	capacity := n.capacity()
	n.mu.Unlock()
	if !changed {
		return
	}
	n.report()
	patch, err := json.Marshal(map[string]any{"status": map[string]any{"capacity": capacity, "allocatable": capacity}})
	if err == nil {
		_, err = f.Kube.CoreV1().Nodes().Patch(context.Background(), n.Name, types.MergePatchType, patch, metav1.PatchOptions{}, "status")
	}
	if err != nil {
		f.Log.Warn("a node's slots weren't advertised", "node", n.Name, "error", err)
	}
}
