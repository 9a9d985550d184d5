package ledger

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/carve-gpu/carve/api"
)

// BeginBind claims the pod's offer for a write and returns the grant to write.
// The caller must call EndBind. bound is true, and there is nothing to write,
// where the pod is bound to that node already. If the scheduler chose another
// of the allowed nodes, the offer moves there if the pod still fits. An offer that would
// be made otherwise now, since what its node's cards are given as has changed, is made
// anew on its node.
func (l *Ledger) BeginBind(r Ref, node string, now time.Time) (g api.Grant, bound bool, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := l.entries[r.UID]
	switch {
	case e == nil || e.ref != r || e.state == Releasing:
		return g, false, ErrNoOffer
	case e.state == Bound && e.node.Name == node:
		return e.grant, true, nil
	case e.state == Bound:
		return g, false, fmt.Errorf("%w: it is bound to %s", ErrOtherNode, e.node.Name)
	case e.binding:
		return g, false, ErrInFlight
	case !now.Before(e.until):
		return g, false, ErrNoOffer
	}
	at := slices.IndexFunc(e.allowed, func(n *Node) bool { return n.Name == node })
	if e.node.Name != node && at < 0 {
		return g, false, ErrOtherNode
	}
	if err := l.refuseBlocked(e, node); err != nil {
		return g, false, err
	}
	if over := l.overQuota(e, e.holds); over != nil {
		l.giveUp(e)
		return g, false, over
	}
	to := e.node
	if to.Name != node {
		to = e.allowed[at]
	}
	if to != e.node || !e.stands() {
		if to == e.node && e.open {
			return g, false, ErrChanged
		}
		l.remove(e)
		l.publish(e.node)
		moved := *e
		if err := l.place(&moved, to, 0, nil); err != nil {
			if to == e.node && errors.Is(err, ErrNoRoom) {
				err = ErrChanged
			}
			return g, false, err
		}
		e = &moved
		l.ends(e, e.until)
	}
	e.binding = true
	return e.grant, false, nil
}

// Outcome of a bind's write.
type Outcome uint8

// Outcomes of a bind's write.
const (
	// Written: the pod is bound with the grant.
	Written Outcome = iota
	// Refused: the write had no effect and won't have one.
	Refused
	// Unknown: it may have had an effect. The room stays booked for another
	// OfferTTL, within which the API's events or another try decide.
	Unknown
)

// EndBind takes in how the write of BeginBind went.
func (l *Ledger) EndBind(uid string, o Outcome, now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := l.entries[uid]
	if e == nil || !e.binding {
		return // the API's events were faster
	}
	e.binding = false
	switch {
	case o == Written:
		e.state, e.ask, e.allowed = Bound, nil, nil
		l.ends(e, now.Add(l.config.ConfirmTTL))
		if e.gone {
			l.part(e, true, now)
		}
	case e.gone && o == Unknown:
		e.state = Bound
		l.part(e, true, now)
	case o == Refused:
		l.remove(e)
		l.publish(e.node)
	default:
		e.open = true
		l.ends(e, now.Add(l.config.OfferTTL))
	}
}

// stands reports whether the offer would be made the same way now. It looks again where
// its node has reported since: cards change their modes, are cordoned, fall ill. The
// lock is held.
func (e *entry) stands() bool {
	n := e.node
	if n.report == e.seen {
		return true
	}
	view, _ := n.view(e)
	if n.report == nil || !e.ask.Stands(&view, e.grant) {
		return false
	}
	e.seen = n.report
	return true
}
