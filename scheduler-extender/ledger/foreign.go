package ledger

import (
	"fmt"
	"slices"

	"github.com/carve-gpu/carve/scheduler-extender/fit"
)

// Pods may run on a node's cards by the grace of another device plugin: they came
// before carve managed the node. Which cards they have nobody tells, so the node
// takes nothing new until they are gone.
//
// A tenant can't shut a node with such a pod. Where carve's plugin serves, a
// container that names cards starts with a slice only, so one that runs without
// was started by another plugin; and the kubelet alone says what runs.

// setForeign takes in whether a pod is on cards that carve didn't give it. The
// lock is held.
func (l *Ledger) setForeign(p Pod) {
	if p.Ended || p.Node == "" || p.Grant != nil || !p.OnCards {
		l.dropForeign(p.UID)
		return
	}
	if n := l.foreign[p.UID]; n != nil {
		return // bound pods don't move
	}
	n := l.node(p.Node)
	l.foreign[p.UID] = n
	n.foreign[p.UID] = p.Namespace + "/" + p.Name
	l.publish(n)
}

// dropForeign takes in that a pod is gone, or on no such cards any more. The lock
// is held.
func (l *Ledger) dropForeign(uid string) {
	n := l.foreign[uid]
	if n == nil {
		return
	}
	delete(l.foreign, uid)
	delete(n.foreign, uid)
	l.publish(n)
}

// taken says that pods are on cards of the node that carve didn't give. Those that
// its report shows were given theirs by the node itself
// (--pods-past-extender local). The lock is held.
func (n *Node) taken() (fit.Reason, string) {
	if len(n.foreign) == 0 || !n.info.Managed {
		return "", ""
	}
	var names []string
	for uid, name := range n.foreign {
		if n.report == nil || len(n.report.slices[uid]) == 0 {
			names = append(names, name)
		}
	}
	if names == nil {
		return "", ""
	}
	slices.Sort(names)
	who := names[0]
	if len(names) > 1 {
		who += fmt.Sprintf(" and %d more", len(names)-1)
	}
	return fit.ReasonForeignPods, fmt.Sprintf("%s runs there on cards that carve didn't give it, and which ones isn't known; new pods wait until it has ended (carve doctor lists all of these)", who)
}
