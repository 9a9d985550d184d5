package agent

import (
	"context"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// askLimit bounds the question whether a pod that only the runtime knows of
// exists; while the API server gives no answer, it is asked again every askPace.
const (
	askLimit = 2 * time.Second
	askPace  = 2 * time.Second
)

// work reconciles pods until the queue is shut down.
func (a *Agent) work(ctx context.Context) {
	for {
		uid, down := a.queue.Get()
		if down {
			return
		}
		a.workOn(ctx, uid)
	}
}

func (a *Agent) workOn(ctx context.Context, uid string) {
	defer a.queue.Done(uid)
	if err := a.reconcile(ctx, uid); err != nil {
		a.Log.Warn("a pod's slices aren't as they should be; trying again", "uid", uid, "error", err)
		a.stuck(uid, err)
		a.queue.AddRateLimited(uid)
		return
	}
	a.unstuck(uid)
	a.queue.Forget(uid)
}

// situation is all that matters for one pod, read at one moment.
type situation struct {
	pod      pod
	known    bool // to the watch
	watched  bool // the watch has shown all pods
	listed   bool // the runtime has listed all containers
	holding  *holding
	record   record
	prepared bool
	renew    bool // its limits files are out of date
	amiss    bool // something is wrong with its files
	refused  int  // generation of a resize that can't be put in force
	sandbox  sandbox
	running  bool // containers of the pod haven't exited
}

func (a *Agent) situation(uid string) situation {
	a.mu.Lock()
	defer a.mu.Unlock()
	s := situation{watched: a.watched, listed: a.listed, sandbox: a.sandboxes[uid]}
	s.pod, s.known = a.pods[uid]
	if s.holding = a.held[uid]; s.holding != nil {
		s.record, s.prepared, s.refused = s.holding.record, s.holding.prepared, s.holding.refusedGeneration
		s.renew = s.holding.renew
		s.amiss = s.holding.amiss && s.prepared && s.record.State == stateHeld && s.holding.next == nil
	}
	for _, u := range a.containers {
		s.running = s.running || u.uid == uid
	}
	return s
}

// reconcile brings one pod's slices to where its grant, its state and its
// containers say. It looks at how things are, not at what happened, so it may
// be called at any time and any number of times.
func (a *Agent) reconcile(ctx context.Context, uid string) error {
	s := a.situation(uid)
	defer a.stopUnadjusted(uid)
	if s.amiss {
		if err := a.mend(s.holding); err != nil {
			return err
		}
	}
	switch {
	case s.holding != nil && s.record.State == stateReleasing:
		return a.release(s.record)
	case s.known && !s.pod.asked.IsZero() && time.Since(s.pod.asked) >= askPace:
		a.askAgain(ctx, s.pod)
		return nil // it comes by again
	case s.known && !s.pod.over:
		return a.follow(s.pod.found(), s)
	case s.holding != nil && !s.known && !s.watched:
		return a.again(s) // what the journal says holds until the watch knows better
	case s.holding != nil && (s.running || !s.listed):
		// The pod is over or gone. Its slices go when its containers are, and
		// only the runtime's own list says that they are.
		return nil
	case !s.known && s.sandbox.asks():
		return a.followSandbox(ctx, uid, s)
	case s.holding != nil:
		return a.release(s.record)
	}
	a.forget(uid)
	return nil
}

// follow puts the grant on a pod into force.
func (a *Agent) follow(c found, s situation) error {
	switch {
	case c.text == "" && s.holding == nil && s.known && a.Place != nil:
		return a.placeHere(s.pod)
	case c.text == "":
		// A grant is never taken back from a living pod: what was granted stays.
		return a.again(s)
	case c.fault != nil:
		a.refuse(c.uid, c.fault.Error())
		return a.again(s)
	case s.refused > s.record.Grant.Generation && s.refused >= c.grant.Generation:
		// It was tried, and the extender is told. Trying again and again would
		// lower the limits of a running program each time.
		return a.again(s)
	case s.holding != nil && reflect.DeepEqual(s.record.Grant, c.grant):
		a.honour(c.uid)
		if c.order != nil && !slices.Equal(s.record.Order, c.order) {
			// It was taken from the runtime's word, which doesn't tell init
			// containers from others.
			return a.reorder(c)
		}
		return a.again(s)
	}
	return a.take(c)
}

// again prepares what is in force but not in place, after a fault.
func (a *Agent) again(s situation) error {
	switch {
	case s.holding == nil:
		return nil
	case !s.prepared:
		return a.putInPlace(s.record)
	case s.renew:
		return a.renew(s.holding, s.record)
	}
	return nil
}

// reorder corrects what a record says of the kinds of containers.
func (a *Agent) reorder(c found) error {
	a.mu.Lock()
	h := a.held[c.uid]
	h.Order = c.order
	r := h.record
	a.mu.Unlock()
	if err := a.journal.write(r); err != nil {
		return err
	}
	return a.putInPlace(r)
}

// take checks a new grant, books it, and puts it in place.
func (a *Agent) take(c found) error {
	a.mu.Lock()
	inForce := a.held[c.uid]
	n := node{name: a.Node, cards: a.hardware.cards(), replicas: a.replicas(), held: map[string]record{}}
	for uid, h := range a.held {
		n.held[uid] = h.booked()
	}
	if inForce != nil {
		n.held[c.uid] = inForce.record
	}
	if err := a.guarded(func() error { return n.admit(c.candidate) }); err != nil {
		a.mu.Unlock()
		switch {
		case !a.hardwareReady():
			// Without cards nothing can be judged. This isn't the grant's fault.
			return fmt.Errorf("the cards aren't known yet: %w", err)
		case inForce != nil && c.grant.Generation > inForce.Grant.Generation:
			a.refuseResize(inForce, c.grant.Generation, err.Error())
		default:
			a.refuse(c.uid, err.Error())
		}
		return nil
	}
	r := record{Version: recordVersion, State: stateHeld, Namespace: c.namespace, Pod: c.name, Grant: c.grant, Order: c.order}
	if r.Order == nil {
		for _, name := range slices.Sorted(maps.Keys(c.grant.Containers)) {
			r.Order = append(r.Order, podContainer{Name: name})
		}
	}
	if inForce == nil {
		return a.bookAndUnlock(r)
	}
	return a.resizeAndUnlock(r, inForce)
}

// guarded does something under a.mu, which is held before and after it, except where it
// panics: a part that panics is started again, and none could go on if a.mu stayed held.
func (a *Agent) guarded(do func() error) (err error) {
	whole := false
	defer func() {
		if !whole {
			a.mu.Unlock()
		}
	}()
	err, whole = do(), true
	return err
}

// putInPlace makes the files of a record and tells everyone.
func (a *Agent) putInPlace(r record) error {
	if err := a.prepareFiles(r); err != nil {
		return err
	}
	a.mu.Lock()
	if h := a.held[r.Grant.UID]; h != nil {
		if !h.prepared {
			h.preparedAt = time.Now()
		}
		h.prepared = true
	}
	a.wake()
	a.mu.Unlock()
	a.Log.Info("slices prepared", "pod", r.Namespace+"/"+r.Pod, "uid", r.Grant.UID, "generation", r.Grant.Generation, "containers", len(r.Grant.Containers))
	a.report()
	return nil
}

// prepareFiles makes the files of all shares of a record.
func (a *Agent) prepareFiles(r record) error {
	for _, name := range slices.Sorted(maps.Keys(r.Grant.Containers)) {
		cards := r.Grant.Containers[name]
		if !fronted(cards[0].Mode) {
			continue // the driver as it is needs no files
		}
		a.stepped("files-prepare")
		if err := a.files.prepare(r.Grant.UID, name, cards, a.factsOf); err != nil {
			return err
		}
		a.stepped("files-prepared")
	}
	return nil
}

// release clears a pod's slices and forgets it. It takes up where an earlier
// try ended.
func (a *Agent) release(r record) error {
	uid := r.Grant.UID
	if r.State != stateReleasing {
		r.State = stateReleasing
		a.stepped("journal-release")
		if err := a.journal.write(r); err != nil {
			return err
		}
		a.stepped("journal-releasing")
		a.mu.Lock()
		if h := a.held[uid]; h != nil {
			h.State, h.prepared = stateReleasing, false
		}
		a.mu.Unlock()
	}
	a.stepped("files-clear")
	if err := a.files.clear(uid); err != nil {
		return err
	}
	a.stepped("files-cleared")
	if err := a.journal.remove(uid); err != nil {
		return err
	}
	a.stepped("journal-removed")
	a.mu.Lock()
	a.letGo(uid)
	a.mu.Unlock()
	a.stirMPS()
	a.forget(uid)
	a.Log.Info("slices released", "pod", r.Namespace+"/"+r.Pod, "uid", uid)
	a.lookAgain()
	a.report()
	return nil
}

// forget drops what is remembered of a pod that has no slices.
func (a *Agent) forget(uid string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.refused, uid)
	if _, ok := a.pods[uid]; ok {
		delete(a.sandboxes, uid)
	}
}

// refuse notes why a grant isn't honoured and says so on the pod, once.
func (a *Agent) refuse(uid, reason string) {
	a.mu.Lock()
	said := a.refused[uid] == reason
	a.refused[uid] = reason
	p := a.pods[uid]
	a.wake()
	a.mu.Unlock()
	if said {
		return
	}
	a.Log.Warn("grant refused", "pod", p.namespace+"/"+p.name, "uid", uid, "reason", reason)
	a.event(p, corev1.EventTypeWarning, reasonGrantRefused, reason)
}

// honour forgets an earlier refusal.
func (a *Agent) honour(uid string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.refused, uid)
}

// askAgain looks whether a pod is still there that the watch hasn't shown.
func (a *Agent) askAgain(ctx context.Context, p pod) {
	ctx, cancel := context.WithTimeout(ctx, askLimit)
	defer cancel()
	now, err := a.Pods.CoreV1().Pods(p.namespace).Get(ctx, p.name, metav1.GetOptions{})
	switch {
	case err == nil && now.UID == types.UID(p.uid):
		a.keepAsked(now)
	case err == nil || apierrors.IsNotFound(err):
		a.mu.Lock()
		if !a.pods[p.uid].asked.IsZero() {
			delete(a.pods, p.uid)
			delete(a.sandboxes, p.uid)
		}
		a.mu.Unlock()
		a.queue.Add(p.uid)
	default:
		// Nobody can say: it stays as it was.
		p.asked = time.Now()
		a.keepPod(p)
		a.queue.AddAfter(p.uid, askPace)
	}
}

// keepAsked takes in a pod that the API server answered with.
func (a *Agent) keepAsked(p *corev1.Pod) {
	if p.Spec.NodeName != a.Node {
		return
	}
	q := readPod(p)
	q.asked = time.Now()
	a.keepPod(q)
	a.queue.AddAfter(q.uid, askPace)
}

// followSandbox serves a pod that only the runtime knows of. Either the watch
// is a moment behind the kubelet's, or the pod is gone, or the API server is
// away; only then may the annotations of the sandbox stand for the pod's, and
// only until it answers: no event comes for a pod that was gone before.
func (a *Agent) followSandbox(ctx context.Context, uid string, s situation) error {
	ctx, cancel := context.WithTimeout(ctx, askLimit)
	defer cancel()
	p, err := a.Pods.CoreV1().Pods(s.sandbox.namespace).Get(ctx, s.sandbox.name, metav1.GetOptions{})
	switch {
	case err == nil && p.UID == types.UID(uid):
		a.keepAsked(p)
		return nil
	case err == nil || apierrors.IsNotFound(err):
		// It is gone already: its containers are, or are about to be.
		a.mu.Lock()
		delete(a.sandboxes, uid)
		a.mu.Unlock()
		if s.holding != nil {
			return a.release(s.record)
		}
		return nil
	case apierrors.IsForbidden(err) || apierrors.IsUnauthorized(err):
		return fmt.Errorf("look up pod %s/%s: %w", s.sandbox.namespace, s.sandbox.name, err)
	}
	a.queue.AddAfter(uid, askPace)
	if s.holding != nil {
		return a.again(s)
	}
	a.Log.Warn("the API server is away; serving a pod by what the runtime says of it", "pod", s.sandbox.namespace+"/"+s.sandbox.name, "error", err)
	return a.follow(s.sandbox.found(uid), s)
}
