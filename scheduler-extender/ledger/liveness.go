package ledger

import (
	"cmp"
	"fmt"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/scheduler-extender/fit"
)

// Agent is what is known of the agent of a node. The zero value is that of a
// node without any.
type Agent struct {
	// Ready is true while a pod of the agent is ready on the node and isn't
	// being deleted.
	Ready bool
	// Namespace and Pod name the pod that stands for it: a ready one if there
	// is one. Both are empty without any.
	Namespace, Pod string
	// Leaving is true while that pod is being deleted.
	Leaving bool
	// Why is what that pod's status says about not being ready; it may be empty.
	Why string
}

// SetAgent takes in how the agent of a node is. It says nothing of slices: what
// the node holds stays as its last report showed it.
func (l *Ledger) SetAgent(node string, a Agent) {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := l.Node(node)
	if n == nil {
		if a == (Agent{}) {
			return
		}
		n = l.node(node)
	}
	if n.agent == a {
		return
	}
	n.agent = a
	l.publish(n)
}

// blocked says why the node takes nothing new, with a sentence where the
// reason's own would say too little. The lock is held.
func (n *Node) blocked() (fit.Reason, string) {
	hookDown := n.report != nil && !n.report.hook
	switch {
	case !n.known:
		return fit.ReasonUnknownNode, ""
	case hookDown && (n.agent.Ready || n.agent.Pod != "" && !n.agent.Leaving):
		// The agent is there to say so, ready or not.
		return fit.ReasonHookDown, ""
	case !n.agent.Ready:
		return fit.ReasonAgentDown, n.agent.sentence()
	case n.report == nil:
		return fit.ReasonNoReport, ""
	}
	return n.taken()
}

// sentence says what is wrong, what that means, and where to look.
func (a Agent) sentence() string {
	what, look := "no pod of it is there", "daemonset "+api.AgentName
	if a.Pod != "" {
		what, look = "its pod is not ready", "pod "+a.Pod
	}
	switch {
	case a.Leaving:
		what = "its pod is being deleted"
	case a.Why != "":
		what += ": " + a.Why
	}
	return fmt.Sprintf("carve's agent on the node is down (%s); what runs there goes on, new pods wait until it is back; look at: kubectl -n %s describe %s",
		what, cmp.Or(a.Namespace, api.Namespace), look)
}

// silent reports whether nobody tells what is on a node that may well hold
// something. The lock is held.
func (n *Node) silent() bool {
	return n.known && n.info.Managed && !n.info.OutOfService && !n.agent.Ready
}

// refuseBlocked gives an offer back that is about to be bound to a node which
// takes nothing new any more. One whose earlier write may have had an effect
// stays booked until that is known. The lock is held.
func (l *Ledger) refuseBlocked(e *entry, node string) error {
	n := l.Node(node)
	if n == nil {
		return ErrOtherNode
	}
	view := &n.Snapshot().View
	if view.Blocked == "" {
		return nil
	}
	l.giveUp(e)
	r := fit.Refusal{Reason: view.Blocked, Card: -1, Detail: view.Why}
	return fmt.Errorf("%w: %s", ErrBlocked, r.Message(view, nil, ""))
}

// giveUp ends an offer that can't be bound, save one whose earlier write may have
// had an effect. The lock is held.
func (l *Ledger) giveUp(e *entry) {
	if !e.open {
		l.remove(e)
		l.publish(e.node)
	}
}

// abandon removes what was leaving a node that is out of service. The lock is
// held; the caller publishes.
func (l *Ledger) abandon(n *Node) {
	if !n.info.OutOfService {
		return
	}
	for _, e := range n.entries {
		if e.state == Releasing {
			l.remove(e)
		}
	}
}
