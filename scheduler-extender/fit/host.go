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

// short says what of the host is missing for the ask, or nothing.
func (n *Node) short(a *Ask) *Refusal {
	if !n.HostKnown || n.Host.covers(a.Host) {
		return nil
	}
	var what string
	var asked, free int64
	switch h := a.Host; {
	case h.CPUMilli > 0 && h.CPUMilli > n.Host.CPUMilli:
		what, asked, free = "thousandths of a processor", h.CPUMilli, n.Host.CPUMilli
	case h.MemMiB > 0 && h.MemMiB > n.Host.MemMiB:
		what, asked, free = "MiB of the node's memory", h.MemMiB, n.Host.MemMiB
	default:
		what, asked, free = "places for pods", int64(h.Pods), int64(n.Host.Pods)
	}
	free = max(0, free)
	return &Refusal{Reason: ReasonHost, Card: -1, Asked: asked, Free: free, distance: distanceNode,
		Detail: fmt.Sprintf("asked %d %s, free %d", asked, what, free)}
}
