package place

import (
	"cmp"
	"slices"
	"time"

	"github.com/carve-gpu/carve/scheduler-extender/fit"
	"github.com/carve-gpu/carve/scheduler-extender/ledger"
)

const (
	// sampled is the least number of nodes that kube-scheduler looks for
	// before it stops (minFeasibleNodesToFind, v1.37). A shorter list than
	// this was all that suits the pod; a longer one may be a sample.
	sampled = 100
	// maxFits bounds the work of one round of waking.
	maxFits = 2000
	// A pod that was woken in vain is woken less and less often.
	wakePause, maxWakePause = time.Second, time.Minute
	// maxRepeats is how often a pod is woken for the same room.
	maxRepeats = 5
)

// waiter is a refused pod that waits for room.
type waiter struct {
	ref      ledger.Ref
	ask      *fit.Ask
	shape    *shape
	prefer   fit.Prefer
	priority int32
	created  time.Time
	suits    func(node string) bool // nil: any may
	// over is set where room is there, and the namespace's quota is in the way.
	over *ledger.QuotaRefusal

	wakes     int
	notBefore time.Time
	// served is up to which revival of a node the wakes were counted.
	served uint64
}

// wait notes a refused pod, and reports whether it waits already.
func (p *Placer) wait(c call) bool {
	w := &waiter{ref: c.pod.Ref, ask: c.waits, shape: c.shape, prefer: c.prefer, priority: c.pod.Priority, created: c.pod.Created, over: c.over}
	switch {
	case c.plan != nil:
		w.suits = c.plan.Suits
	case len(c.names) < sampled:
		only := make(map[string]bool, len(c.names))
		for _, n := range c.names {
			only[string(n)] = true
		}
		w.suits = func(node string) bool { return only[node] }
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	old := p.waiting[w.ref.UID]
	if old != nil {
		w.wakes, w.notBefore, w.served = old.wakes, old.notBefore, old.served
	}
	p.waiting[w.ref.UID] = w
	return old != nil
}

// Forget notes that a pod isn't waiting any more, and reports whether it was.
func (p *Placer) Forget(uid string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	was := p.waiting[uid] != nil
	delete(p.waiting, uid)
	return was
}

// Waiting counts the pods that were refused and wait for room.
func (p *Placer) Waiting() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.waiting)
}

// Wake chooses the waiting pods that fit on the nodes that gained room, highest
// priority first, then oldest, and no more of them than fit together. At most
// limit are chosen. again is when it is worth asking again for the same nodes,
// because a pod that would fit was woken a moment ago or the limit was reached;
// zero if never.
func (p *Placer) Wake(freed []*ledger.Node, limit int, now time.Time) (wake []ledger.Ref, again time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.waiting) == 0 || len(freed) == 0 {
		return nil, again
	}
	later := func(t time.Time) {
		if again.IsZero() || t.Before(again) {
			again = t
		}
	}
	queue := p.queue(func(w *waiter) bool { return w.over == nil })
	views := make([]*fit.Node, 0, len(freed))
	served := make([]uint64, 0, len(freed))
	for _, n := range freed {
		if s := n.Snapshot(); s.Managed {
			views, served = append(views, &s.View), append(served, s.Served)
		}
	}
	// Views only shrink in this round, so where a shape failed it fails again:
	// many pods of few kinds cost little, however many of them don't fit.
	type try struct {
		shape *shape
		view  int
	}
	failed := map[try]bool{}
	fits := 0
	for _, w := range queue {
		if len(wake) == limit {
			// The next round knows that these were woken a moment ago.
			later(now)
			break
		}
		if fits >= maxFits {
			later(now.Add(wakePause))
			break
		}
		at, place := -1, fit.Placement(nil)
		for i, v := range views {
			if failed[try{w.shape, i}] || w.suits != nil && !w.suits(v.Name) {
				continue
			}
			fits++
			pl, refusal := fit.Fit(v, w.ask, w.prefer)
			if refusal == nil {
				at, place = i, pl
				break
			}
			failed[try{w.shape, i}] = true
		}
		if at >= 0 && served[at] > w.served {
			// A node that takes pods again is news, however often the pod was
			// woken for others.
			w.served, w.wakes, w.notBefore = served[at], 0, time.Time{}
		}
		switch {
		case at < 0:
			continue
		case now.Before(w.notBefore):
			// Something else keeps a pod pending that was woken so often.
			if w.wakes < maxRepeats {
				later(w.notBefore)
			}
			// Until it was woken in vain the room is as good as taken.
			if w.wakes == 1 {
				views[at] = fit.Apply(views[at], w.ask, place)
			}
			continue
		}
		views[at] = fit.Apply(views[at], w.ask, place)
		wake = append(wake, w.woken(now))
	}
	return wake, again
}

// queue returns the waiters that qualify, highest priority first, then oldest. The
// lock is held.
func (p *Placer) queue(ok func(w *waiter) bool) []*waiter {
	queue := make([]*waiter, 0, len(p.waiting))
	for _, w := range p.waiting {
		if ok(w) {
			queue = append(queue, w)
		}
	}
	slices.SortFunc(queue, func(a, b *waiter) int {
		return cmp.Or(cmp.Compare(b.priority, a.priority), a.created.Compare(b.created), cmp.Compare(a.ref.UID, b.ref.UID))
	})
	return queue
}

// woken notes that a waiter is woken. The lock is held.
func (w *waiter) woken(now time.Time) ledger.Ref {
	w.notBefore = now.Add(min(wakePause<<min(w.wakes, 10), maxWakePause))
	w.wakes++
	return w.ref
}

// WakeSpaces is Wake for pods that had room and were refused by their namespace's
// quota: it chooses, among those of namespaces whose quota may allow more now, as
// many as it allows together.
func (p *Placer) WakeSpaces(namespaces map[string]bool, limit int, now time.Time) (wake []ledger.Ref, again time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.waiting) == 0 || len(namespaces) == 0 {
		return nil, again
	}
	later := func(t time.Time) {
		if again.IsZero() || t.Before(again) {
			again = t
		}
	}
	taken := map[string]fit.Amount{}
	for _, w := range p.queue(func(w *waiter) bool { return w.over != nil && namespaces[w.ref.Namespace] }) {
		if len(wake) == limit {
			later(now)
			break
		}
		then := taken[w.ref.Namespace].Plus(w.over.Amount)
		switch {
		case p.ledger.OverQuota(w.ref, then) != nil:
			continue
		case now.Before(w.notBefore):
			if w.wakes < maxRepeats {
				later(w.notBefore)
			}
			if w.wakes == 1 {
				taken[w.ref.Namespace] = then
			}
			continue
		}
		taken[w.ref.Namespace] = then
		wake = append(wake, w.woken(now))
	}
	return wake, again
}
