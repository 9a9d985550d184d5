package ledger

import (
	"maps"
	"slices"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/scheduler-extender/fit"
)

// What nodes have beside cards is counted as kube-scheduler counts it: what they may give
// away, less what the pods that the API shows on them ask for, whether these have cards or
// not. To that come pods of ours that were offered or bound and that the API doesn't show
// yet. Whatever else kube-scheduler has in mind for a node isn't known here, so a pod that it
// asks about isn't refused for it (fit.Ask.Settle); a pod that is planned is.

// SetHost takes in what a pod, with cards or without, asks of the node that it is bound to. A
// pod is bound once, so it is never on another.
func (l *Ledger) SetHost(uid, node string, h fit.Host) {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := l.node(node)
	if was, known := n.hosted[uid]; !known || was != h {
		n.host = n.host.Plus(h).Minus(was)
		n.hosted[uid] = h
		l.hostChanged(n)
	}
}

// DropHost takes in that a pod has ended on its node, or is gone.
func (l *Ledger) DropHost(uid, node string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := l.Node(node)
	if n == nil {
		return
	}
	if was, known := n.hosted[uid]; known {
		n.host = n.host.Minus(was)
		delete(n.hosted, uid)
		l.hostChanged(n)
	}
}

// hostChanged publishes a node on which that matters. The lock is held.
func (l *Ledger) hostChanged(n *Node) {
	if n.report != nil || !n.known {
		l.publish(n)
	}
}

// hostFree is what the node has left beside cards without one entry, and whether that is
// known. Parts are negative where more was given than there is.
func (n *Node) hostFree(except *entry) (fit.Host, bool) {
	if n.info.Host == (fit.Host{}) {
		return fit.Host{}, false
	}
	free := n.info.Host.Minus(n.host)
	for uid, e := range n.entries {
		switch _, shown := n.hosted[uid]; {
		case e == except && shown:
			free = free.Plus(n.hosted[uid])
		case e != except && !shown && e.state != Releasing:
			free = free.Minus(e.host)
		}
	}
	return free, true
}

// Request is what a pod asks.
type Request struct {
	api.Request
	Host fit.Host
}

// Requests are what the pods ask that are bound, as far as their specs say it, in an order of
// their own.
func (l *Ledger) Requests() []Request {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := make([]Request, 0, len(l.entries))
	for _, uid := range slices.Sorted(maps.Keys(l.entries)) {
		e := l.entries[uid]
		if e.state != Bound {
			continue
		}
		r := Request{Host: e.node.hosted[uid]}
		for _, c := range e.containers {
			cards := e.grant.Containers[c.Name]
			if len(cards) == 0 {
				continue
			}
			ask := api.ContainerRequest{Name: c.Name, Kind: c.Kind, Cards: len(cards), Whole: !cards[0].Mode.Share(),
				MemMiB: c.MemMiB, MemPercent: c.MemPercent, Cores: c.Cores}
			if m := cards[0].Mode; m == api.ModeMPS || m == api.ModeTimeslice {
				r.Isolation = m
			}
			r.Containers = append(r.Containers, ask)
		}
		if len(r.Containers) > 0 {
			out = append(out, r)
		}
	}
	return out
}
