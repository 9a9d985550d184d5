package agent

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sort"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/tools/cache"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/v1alpha1"
)

const (
	// gatherAtLeast and gatherAtMost are how long a change waits for others
	// before it is reported; the spread keeps the nodes of a cluster apart.
	gatherAtLeast = 20 * time.Millisecond
	gatherAtMost  = 60 * time.Millisecond
	// reportsApart bounds the rate of writes of a busy node.
	reportsApart = 200 * time.Millisecond
	// startsSoon is how long a prepared slice waits for its container before it is
	// reported for its own sake: most containers start within it, and one write
	// then tells both. Until then the extender counts the grant.
	startsSoon = time.Second

	retryReportAtLeast = 500 * time.Millisecond
	retryReportAtMost  = 30 * time.Second
)

func seconds(t time.Time) *metav1.Time {
	out := metav1.NewTime(t.UTC().Truncate(time.Second))
	return &out
}

// status is what the report says now. It holds no time but those of changes,
// so that two calls without a change in between are equal.
func (a *Agent) status() v1alpha1.GPUNodeStatus {
	slots := a.slotsPerCard()
	a.mu.Lock()
	defer a.mu.Unlock()
	s := v1alpha1.GPUNodeStatus{
		AgentVersion:  a.Version,
		DriverVersion: a.hardware.inventory.DriverVersion,
		SoftwareGPU:   a.Software,
		SlotsPerCard:  slots,
	}
	if !a.linkedSince.IsZero() {
		s.HookConnectedSince = seconds(a.linkedSince)
	}
	active := map[[2]string]bool{}
	for _, u := range a.containers {
		if a.unadjusted(u) {
			s.UnadjustedContainers++
		} else if u.adjusted {
			active[[2]string{u.uid, u.container}] = true
		}
	}
	onCard := map[string][]v1alpha1.Slice{}
	for uid, h := range a.held {
		if !h.prepared && h.State == stateHeld {
			continue
		}
		for name, cards := range h.Grant.Containers {
			used := active[[2]string{uid, name}]
			if !used && a.pods[uid].done[name] {
				continue // an init container that has ended
			}
			state, fault := v1alpha1.Prepared, a.lostOf(uid, name)
			if used {
				state = v1alpha1.Active
				fault = orElse(fault, a.mpsFault(cards))
			}
			for i, c := range cards {
				onCard[c.Card] = append(onCard[c.Card], v1alpha1.Slice{
					PodUID: uid, Container: name, Namespace: h.Namespace, Pod: h.Pod,
					MemMiB: c.MemMiB, Cores: int32(c.Cores), Mode: string(c.Mode),
					Generation: int32(h.Grant.Generation), State: state,
					RefusedGeneration: int32(h.refusedGeneration), Refusal: h.refusal, Fault: fault,
					ResidualMiB: h.toldResidual(name, i),
					Managed:     string(c.Managed), Oversell: string(c.Oversell),
				})
			}
		}
	}
	var reasons []string
	for _, c := range a.hardware.inventory.Cards {
		card := v1alpha1.Card{
			UUID: c.UUID, Index: int32(c.Index), Model: c.Model, PCIBusID: c.PCIBusID,
			MemoryMiB: c.MemoryMiB(), PhysicalMiB: int64(c.MemoryBytes >> 20), MIGMode: c.MIGMode,
			Health: a.hardware.health(c), Slices: onCard[c.UUID], Modes: a.modesOf(c), MPSClients: a.clientsOf(c), Sharing: a.sharingOf(c.UUID),
		}
		card.MPS = a.mpsOf(c.UUID)
		if c.NUMANode >= 0 {
			n := int32(c.NUMANode)
			card.NUMANode = &n
		}
		var why string
		card.Layers, why = a.layersOf(c.UUID)
		if why != "" && !slices.Contains(reasons, why) {
			reasons = append(reasons, why)
		}
		for _, l := range c.Links {
			card.Links = append(card.Links, v1alpha1.Link{UUID: l.UUID, Class: l.Class, Lanes: int32(l.Lanes)})
		}
		sort.Slice(card.Slices, func(i, j int) bool {
			x, y := card.Slices[i], card.Slices[j]
			return x.PodUID < y.PodUID || x.PodUID == y.PodUID && x.Container < y.Container
		})
		s.Cards = append(s.Cards, card)
		s.Summary.Cards++
		s.Summary.MemoryMiB += card.MemoryMiB
		s.Summary.Slices += int32(len(card.Slices))
	}
	s.Enforcement, s.EnforcementReason = enforcement(s.Cards, reasons)
	s.Released = slices.Clone(a.unshown)
	for _, h := range a.held {
		if !h.prepared && h.State == stateHeld {
			continue
		}
		for card, am := range peaks(h.Grant, h.Order) {
			if am.whole {
				am.memMiB = a.hardware.cards()[card].MemoryMiB()
			}
			s.Summary.GrantedMiB += am.memMiB
		}
	}
	return s
}

// slotsPerCard is the setting in force: the operator's, or the agent's own.
func (a *Agent) slotsPerCard() int32 {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.wishedSlots > 0 {
		return a.wishedSlots
	}
	if a.SlotsPerCard > 0 {
		return int32(a.SlotsPerCard)
	}
	return api.SlotsPerCard
}

// writeReports keeps the node's GPUNode equal to what is, and writes nothing
// while it is.
func (a *Agent) writeReports(ctx context.Context) {
	watch := a.Reports.Informer(0, func(o *metav1.ListOptions) {
		o.FieldSelector = fields.OneTermEqualSelector("metadata.name", a.Node).String()
	})
	if _, err := watch.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(o any) { a.wished(o) },
		UpdateFunc: func(_, o any) { a.wished(o) },
		// Someone deleted the object: it is made again.
		DeleteFunc: func(any) { a.report() },
	}); err != nil {
		a.Log.Error("the report can't be watched", "error", err)
		return
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	done := make(chan struct{})
	go func() { defer close(done); watch.RunWithContext(ctx) }()
	defer func() { cancel(); <-done }()
	if !cache.WaitForCacheSync(ctx.Done(), watch.HasSynced) {
		return
	}
	a.report()
	retry := time.Duration(0)
	said := ""
	var due <-chan time.Time
	for {
		select {
		case <-ctx.Done():
			return
		case <-a.dirty:
		case <-due:
		}
		if !pause(ctx, gatherAtLeast+rand.N(gatherAtMost-gatherAtLeast)) {
			return
		}
		select { // what came meanwhile is in this report
		case <-a.dirty:
		default:
		}
		wrote, again, err := a.writeReport(ctx, watch.GetStore())
		if due = nil; again > 0 {
			due = time.After(again)
		}
		switch {
		case err != nil && ctx.Err() != nil:
			return
		case err != nil:
			if text := err.Error(); text != said {
				said = text
				a.Log.Warn("the report can't be written; trying again", "error", err)
			}
			retry = min(max(2*retry, retryReportAtLeast), retryReportAtMost)
			if !pause(ctx, retry/2+rand.N(retry)) {
				return
			}
			a.report()
		default:
			retry, said = 0, ""
			if wrote && !pause(ctx, reportsApart) {
				return
			}
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

// wished takes the operator's settings, and compares what is there with what
// should be: an older agent, or a person, may have written it.
func (a *Agent) wished(o any) {
	n, ok := o.(*v1alpha1.GPUNode)
	if !ok {
		return
	}
	var slots int32
	if n.Spec.SlotsPerCard != nil {
		slots = *n.Spec.SlotsPerCard
	}
	a.mu.Lock()
	changed := slots != a.wishedSlots
	a.wishedSlots, a.cordoned = slots, n.Spec.CordonedCards
	a.mu.Unlock()
	if changed {
		a.remember(a.lastSlots(), slots)
		a.slotsChanged()
	}
	a.lookAgain()
	a.report()
}

// writeReport writes the status if it differs from what the API server has,
// and reports whether it wrote. Where all that differs may wait, again says for
// how long.
func (a *Agent) writeReport(ctx context.Context, store cache.Store) (wrote bool, again time.Duration, err error) {
	a.mu.Lock()
	asked := a.hardware.asked
	a.mu.Unlock()
	if !asked {
		// Before the driver has been asked there is nothing to say, and saying
		// it would make the extender forget cards that are in use.
		return false, 0, nil
	}
	if !a.sharingKnown() {
		return false, 0, nil
	}
	want := a.status()
	a.tellSlots()
	var have *v1alpha1.GPUNode
	o, exists, err := store.GetByKey(a.Node)
	if err != nil {
		return false, 0, fmt.Errorf("write report: %w", err)
	}
	if exists {
		have = o.(*v1alpha1.GPUNode)
	} else {
		have = &v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: a.Node}}
		if have, err = a.Reports.Create(ctx, have); apierrors.IsAlreadyExists(err) {
			have, err = a.Reports.Get(ctx, a.Node)
		}
		if err != nil {
			return false, 0, fmt.Errorf("create report: %w", err)
		}
	}
	if a.written != nil && a.written.UID == have.UID && newer(a.written.ResourceVersion, have.ResourceVersion) {
		have = a.written // the watch is a moment behind our own write
	}
	same := want
	if len(want.Released) == 0 {
		same.Released = have.Status.Released // it goes with the next change
	}
	if equality.Semantic.DeepEqual(have.Status, same) {
		a.reportStands()
		return false, 0, nil
	}
	if fresh, wait := a.fresh(time.Now()); len(fresh) > 0 && equality.Semantic.DeepEqual(without(have.Status, fresh), without(same, fresh)) {
		return false, wait, nil
	}
	next := have.DeepCopy()
	next.Status = want
	a.stepped("report-write")
	defer a.stepped("report-written")
	got, err := a.Reports.UpdateStatus(ctx, next)
	if apierrors.IsConflict(err) {
		// Its spec changed meanwhile.
		if have, err = a.Reports.Get(ctx, a.Node); err == nil {
			have.Status = want
			got, err = a.Reports.UpdateStatus(ctx, have)
		}
	}
	if err != nil {
		a.written = nil
		return false, 0, fmt.Errorf("write report: %w", err)
	}
	a.written = got
	a.reportStands()
	a.shown(want)
	return true, 0, nil
}

// shown notes of whom a report that was written tells.
func (a *Agent) shown(s v1alpha1.GPUNodeStatus) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, c := range s.Cards {
		for _, x := range c.Slices {
			if h := a.held[x.PodUID]; h != nil {
				h.shown = true
			}
		}
	}
	a.unshown = slices.DeleteFunc(a.unshown, func(uid string) bool { return slices.Contains(s.Released, uid) })
}

// letGo notes that a pod holds nothing any more. If no report has shown that it did,
// the next one says so: the extender counts the pod until then. a.mu is held.
func (a *Agent) letGo(uid string) {
	h := a.held[uid]
	delete(a.held, uid)
	if h == nil || h.shown || slices.Contains(a.unshown, uid) {
		return
	}
	a.unshown = append(a.unshown, uid)
	if more := len(a.unshown) - v1alpha1.MaxReleased; more > 0 {
		a.unshown = slices.Delete(a.unshown, 0, more) // their time runs out in the extender
	}
}

// fresh are the pods whose slices were prepared a moment ago, and the time until
// the first of them is of age.
func (a *Agent) fresh(now time.Time) (uids map[string]bool, wait time.Duration) {
	a.mu.Lock()
	defer a.mu.Unlock()
	uids, wait = map[string]bool{}, startsSoon
	for uid, h := range a.held {
		if left := startsSoon - now.Sub(h.preparedAt); h.prepared && left > 0 {
			uids[uid] = true
			wait = min(wait, left)
		}
	}
	return uids, wait
}

// without is a status without the slices of some pods that no container runs
// with, and without the sums.
func without(s v1alpha1.GPUNodeStatus, pods map[string]bool) v1alpha1.GPUNodeStatus {
	s.Summary = v1alpha1.Summary{}
	cards := make([]v1alpha1.Card, len(s.Cards))
	for i, c := range s.Cards {
		var kept []v1alpha1.Slice
		for _, x := range c.Slices {
			if x.State != v1alpha1.Prepared || !pods[x.PodUID] {
				kept = append(kept, x)
			}
		}
		c.Slices = kept
		cards[i] = c
	}
	s.Cards = cards
	return s
}

// reportStands notes that the API shows this agent's report. Until then it shows what
// an earlier one left: a link of its hook, slices that may be gone.
func (a *Agent) reportStands() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.stands = true
}

// newer compares resource versions, which are decimal numbers of any length
// (Kubernetes 1.35 made that official).
func newer(a, b string) bool {
	if len(a) != len(b) {
		return len(a) > len(b)
	}
	return a > b
}
