package ledger

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/scheduler-extender/fit"
)

// ErrUnsettled says that a pod can't be resized yet: the API or the pod's node
// hasn't shown what was granted last. Until then it isn't known what a
// resize would start from, so the caller asks again later.
var ErrUnsettled = errors.New("the node has not reported the pod's last grant yet")

// ResizeRefusal is a resize that isn't booked, with everything that a message
// about it takes. As an error it has no holders in it.
type ResizeRefusal struct {
	*fit.Refusal
	// View is the node, nil where the refusal isn't about a card; Holders are
	// the other pods on that card.
	View    *fit.Node
	Holders []Holder
}

func (r *ResizeRefusal) Error() string { return r.Message(r.View, nil, "") }

func refused(reason fit.Reason, format string, a ...any) *ResizeRefusal {
	return &ResizeRefusal{Refusal: &fit.Refusal{Reason: reason, Card: -1, Detail: fmt.Sprintf(format, a...)}}
}

// BeginResize decides on a resize and books it, or changes nothing. It returns
// the grant to write, and the caller must call EndResize; a grant of the same
// generation as before asks for nothing new, and then there is nothing to
// write or to end. Errors are ErrUnsettled, ErrInFlight and *ResizeRefusal.
//
// From here until an event shows the new grant the larger of old and new
// counts. Afterwards what the node still reports does, so room that a pod gives
// up is free once the report shows that its node took it away.
func (l *Ledger) BeginResize(r Ref, ask api.Resize) (api.Grant, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := l.entries[r.UID]
	switch {
	case e == nil || e.ref != r || e.state != Bound:
		return api.Grant{}, refused(fit.ReasonInvalid, "the pod holds no share: it isn't placed by carve yet, or it has ended")
	case e.before != nil:
		return api.Grant{}, ErrInFlight
	case !e.confirmed:
		return api.Grant{}, ErrUnsettled
	case e.node.known && !e.node.info.Managed:
		return api.Grant{}, refused(fit.ReasonUnmanaged, "carve doesn't manage node %s any more", e.node.Name)
	}
	next := cloned(e.grant)
	changed := false
	for _, name := range ask.Names() {
		cards := next.Containers[name]
		if cards == nil {
			return api.Grant{}, refused(fit.ReasonInvalid, "container %.63s has no share; those with one are %s", name, strings.Join(slices.Sorted(maps.Keys(e.grant.Containers)), ", "))
		}
		for i := range cards {
			c := &cards[i]
			if c.Mode != api.ModeVGPU {
				return api.Grant{}, refused(fit.ReasonIsolation, "container %s has card %s in mode %s: %s", name, c.Card, c.Mode, c.Mode.FixedSize())
			}
			if m := ask.Containers[name].MemMiB; m != nil && *m != c.MemMiB {
				c.MemMiB, changed = *m, true
			}
			if p := ask.Containers[name].Cores; p != nil && *p != c.Cores {
				c.Cores, changed = *p, true
			}
		}
	}
	if err := e.settled(ask); err != nil {
		return api.Grant{}, err
	}
	if !changed {
		return e.grant, nil
	}
	if refusal := e.room(next, ask); refusal != nil {
		return api.Grant{}, refusal
	}
	if refusal := l.quota(e, next); refusal != nil {
		return api.Grant{}, refusal
	}
	l.resize(e, next)
	return next, nil
}

// BeginRollback books the way back from a grant that the pod's node can't put
// in force, to the amounts that are in force there, and returns the grant to
// write with the node's reason. ok is false where there is nothing to take
// back. The caller must call EndResize where it is true.
func (l *Ledger) BeginRollback(uid string) (g api.Grant, reason string, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := l.entries[uid]
	if e == nil || e.state != Bound || !e.confirmed || e.before != nil || e.node.report == nil {
		return g, "", false
	}
	next := cloned(e.grant)
	changed := false
	for _, s := range e.node.report.slices[uid] {
		if s.refused != e.grant.Generation || s.generation >= e.grant.Generation {
			continue
		}
		reason = s.refusal
		cards := next.Containers[s.container]
		for i := range cards {
			c := &cards[i]
			if c.Card != e.node.report.cards[s.card].uuid || c.Mode != api.ModeVGPU || s.amount.MemMiB == 0 {
				continue
			}
			changed = changed || c.MemMiB != s.amount.MemMiB || c.Cores != s.amount.Cores
			c.MemMiB, c.Cores = s.amount.MemMiB, s.amount.Cores
		}
	}
	if !changed {
		return g, "", false
	}
	l.resize(e, next)
	return next, reason, true
}

// resize books a grant that follows the entry's. The lock is held.
func (l *Ledger) resize(e *entry, next api.Grant) {
	before := e.grant
	e.before, e.grant, e.writing = &before, next, true
	l.count(e)
	l.publish(e.node)
}

// EndResize takes in how the write of BeginResize or BeginRollback went.
// Unknown leaves everything booked; the caller finds out and calls again.
func (l *Ledger) EndResize(uid string, o Outcome) {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := l.entries[uid]
	if e == nil || !e.writing || o == Unknown {
		return // the API's events were faster
	}
	e.writing = false
	if o == Refused {
		e.grant, e.before = *e.before, nil
		l.count(e)
		l.publish(e.node)
	}
	// A written one counts with its predecessor until an event shows it: events
	// from before the write may still come.
}

// knows takes in a grant that an event shows of a bound pod, where it is the
// one that the entry has, or one that a resize of ours follows. The lock is
// held.
func (l *Ledger) knows(e *entry, shown *api.Grant) bool {
	switch {
	case shown.Generation == e.grant.Generation:
		if e.before != nil {
			e.grant, e.before, e.writing = *shown, nil, false
			l.count(e)
			l.publish(e.node)
		}
		return true
	case shown.Generation < e.grant.Generation:
		return e.before != nil
	}
	return false
}

// settled reports whether the node has the pod's grant in force, so that it is
// known what a resize of these containers starts from.
func (e *entry) settled(ask api.Resize) error {
	r := e.node.report
	if r == nil || !e.node.known || len(r.slices[e.ref.UID]) == 0 {
		return ErrUnsettled
	}
	for _, s := range r.slices[e.ref.UID] {
		if s.generation != e.grant.Generation {
			return ErrUnsettled
		}
	}
	for _, name := range ask.Names() {
		for _, c := range e.grant.Containers[name] {
			if !slices.ContainsFunc(r.slices[e.ref.UID], func(s slice) bool { return s.container == name && r.cards[s.card].uuid == c.Card }) {
				if e.kind(name) == api.Init {
					return refused(fit.ReasonInvalid, "init container %s isn't in place on the node: one that has ended can't be resized", name)
				}
				return ErrUnsettled
			}
		}
	}
	return nil
}

func (e *entry) kind(container string) api.ContainerKind {
	for _, c := range e.containers {
		if c.Name == container {
			return c.Kind
		}
	}
	return api.App
}

// room checks a grant against what others leave of each card. What shrinks
// always has room, also on a card that owes.
func (e *entry) room(next api.Grant, ask api.Resize) *ResizeRefusal {
	v := e.node.Snapshot().View
	refuse := func(card int, r fit.Refusal) *ResizeRefusal {
		r.Card = card
		out := &ResizeRefusal{Refusal: &r, View: &v}
		if !r.Never {
			out.Holders = e.node.holders(v.Cards[card].UUID, e.ref.UID)
		}
		return out
	}
	for _, name := range ask.Names() {
		for _, c := range next.Containers[name] {
			if at, ok := e.node.report.byUUID[c.Card]; ok && c.MemMiB > v.Cards[at].MemMiB {
				return refuse(at, fit.Refusal{Reason: fit.ReasonMemory, Asked: c.MemMiB, Total: v.Cards[at].MemMiB, Never: true})
			}
		}
	}
	holds := func(g api.Grant) []fit.Amount {
		out := make([]fit.Amount, len(v.Cards))
		with := *e
		with.grant = g
		with.use(e.node.report, func(card int, a fit.Amount, _ bool, _ api.Mode) { out[card] = a })
		return out
	}
	now, then := holds(e.grant), holds(next)
	for i := range v.Cards {
		c := &v.Cards[i]
		others := fit.Amount{MemMiB: c.Used.MemMiB - now[i].MemMiB, Cores: c.Used.Cores - now[i].Cores}
		memory, cores := then[i].MemMiB > now[i].MemMiB, then[i].Cores > now[i].Cores
		switch {
		case (memory || cores) && c.Blocked != "":
			return refuse(i, fit.Refusal{Reason: c.Blocked})
		case memory && others.MemMiB+then[i].MemMiB > c.MemMiB:
			return refuse(i, fit.Refusal{Reason: fit.ReasonMemory, Asked: then[i].MemMiB, Free: max(0, c.MemMiB-others.MemMiB), Total: c.MemMiB})
		case cores && others.Cores+then[i].Cores > 100:
			return refuse(i, fit.Refusal{Reason: fit.ReasonCores, Asked: int64(then[i].Cores), Free: max(0, 100-int64(others.Cores)), Total: 100})
		}
	}
	return nil
}

// cloned copies a grant with its cards, as one of the next generation.
func cloned(g api.Grant) api.Grant {
	out := g
	out.Generation++
	out.Containers = make(map[string][]api.CardGrant, len(g.Containers))
	for name, cards := range g.Containers {
		out.Containers[name] = slices.Clone(cards)
	}
	return out
}
