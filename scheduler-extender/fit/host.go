package fit

import "fmt"

// Host is what a node has, or a pod asks, beside cards. Each amount that is 0 in an Ask
// isn't looked at.
type Host struct {
	CPUMilli int64 // thousandths of a processor
	MemMiB   int64
	Pods     int
}

// Plus adds two amounts that are held at the same time.
func (h Host) Plus(o Host) Host {
	return Host{h.CPUMilli + o.CPUMilli, h.MemMiB + o.MemMiB, h.Pods + o.Pods}
}

// Minus takes an amount away; parts may become negative.
func (h Host) Minus(o Host) Host {
	return Host{h.CPUMilli - o.CPUMilli, h.MemMiB - o.MemMiB, h.Pods - o.Pods}
}

// WithHost is the ask with what its pod wants of the node beside cards. The ask itself
// stays as it was.
func (a *Ask) WithHost(h Host) *Ask {
	out := *a
	out.Host = h
	if h != (Host{}) {
		out.key = fmt.Sprintf("%s;host %d/%d/%d", a.key, h.CPUMilli, h.MemMiB, h.Pods)
	}
	return &out
}

// covers reports whether the ask's amounts are there; such as are 0 aren't looked at.
func (h Host) covers(a Host) bool {
	return (a.CPUMilli <= 0 || a.CPUMilli <= h.CPUMilli) && (a.MemMiB <= 0 || a.MemMiB <= h.MemMiB) && (a.Pods <= 0 || a.Pods <= h.Pods)
}

// Settle is the ask for nodes on which kube-scheduler found what the pod wants beside cards.
// That scheduler assumes pods before the API shows them, so of the two it knows better: what
// is known here prices nodes, and refuses none.
func (a *Ask) Settle() *Ask {
	out := *a
	if out.Settled = true; a.Host != (Host{}) {
		out.key = a.key + ";settled"
	}
	return &out
}

// hosts reports whether the node has what the ask wants beside cards, as far as that is
// known and isn't settled.
func (n *Node) hosts(a *Ask) bool { return !n.HostKnown || a.Settled || n.Host.covers(a.Host) }

// short says what of the host is missing for the ask, or nothing.
func (n *Node) short(a *Ask) *Refusal {
	if n.hosts(a) {
		return nil
	}
	r := &Refusal{Reason: ReasonHost, Card: -1, distance: distanceNode}
	of := ""
	switch h := a.Host; {
	case h.CPUMilli > 0 && h.CPUMilli > n.Host.CPUMilli:
		r.Asked, r.Free, of = h.CPUMilli, n.Host.CPUMilli, "m of cpu"
	case h.MemMiB > 0 && h.MemMiB > n.Host.MemMiB:
		r.Asked, r.Free, of = h.MemMiB, n.Host.MemMiB, " MiB of the node's memory"
	default:
		r.Asked, r.Free, of = int64(h.Pods), int64(n.Host.Pods), " of its places for pods"
	}
	r.Free = max(0, r.Free)
	r.Detail = fmt.Sprintf("asked %d%s, free %d", r.Asked, of, r.Free)
	return r
}
