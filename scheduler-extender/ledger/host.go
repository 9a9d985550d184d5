package ledger

import "github.com/carve-gpu/carve/scheduler-extender/fit"

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
