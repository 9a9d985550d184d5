package place

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/scheduler-extender/fit"
	"github.com/carve-gpu/carve/scheduler-extender/ledger"
)

const (
	// maxMessage bounds one reason in bytes. kube-scheduler joins all of them
	// into one Event of at most 1,024 bytes.
	maxMessage = 360
	// maxHolders is how many holders of a card a reason names.
	maxHolders = 3
)

// miss is why one node doesn't take the pod.
type miss struct {
	name    string
	node    *ledger.Node
	view    *fit.Node
	refusal *fit.Refusal
}

// explain fills in why no node takes the pod: node by node for a few, summed up
// by reason with the nearest miss for many.
func (c *call) explain(out *Filtered) {
	misses := make([]miss, 0, c.nodes.Len())
	c.shape.mu.Lock()
	for i := range c.nodes.Len() {
		n := c.nodes.Node(i)
		m := miss{name: string(c.names[i]), node: n}
		switch {
		case n == nil || !n.Snapshot().Known:
			m.refusal = &fit.Refusal{Reason: fit.ReasonUnknownNode, Card: -1}
		case !n.Snapshot().Managed && n.Snapshot().Cards:
			m.refusal = &fit.Refusal{Reason: fit.ReasonUnmanaged, Card: -1, Never: true}
		case !n.Snapshot().Managed:
			m.refusal = &fit.Refusal{Reason: fit.ReasonNoCards, Card: -1, Never: true}
		default:
			snap := n.Snapshot()
			a := c.shape.at(n, snap)
			if a.refusal == nil {
				// It gained room since the scan; the caller looks again.
				m.refusal = &fit.Refusal{Reason: fit.ReasonUnknownNode, Card: -1}
				break
			}
			m.view, m.refusal = &snap.View, a.refusal
		}
		misses = append(misses, m)
	}
	c.shape.mu.Unlock()
	if len(misses) == 0 {
		return
	}
	nearest := misses[0]
	for _, m := range misses[1:] {
		if m.view != nil && (nearest.view == nil || m.refusal.Nearer(nearest.refusal)) {
			nearest = m
		}
	}
	out.Reason = nearest.refusal.Reason
	if len(misses) <= maxListed {
		for _, m := range misses {
			out.add(m.name, c.message(m), m.refusal.Never)
		}
		return
	}
	out.add(summaryNode, c.summary(misses, nearest), nearest.refusal.Never)
}

func (f *Filtered) add(name, message string, never bool) {
	to := &f.Failed
	if never {
		to = &f.Never
	}
	if *to == nil {
		*to = map[string]string{}
	}
	(*to)[name] = message
}

func (c *call) message(m miss) string {
	if m.view == nil {
		return m.refusal.Message(&fit.Node{Name: m.name}, c.ask, "")
	}
	held := ""
	if m.refusal.Card >= 0 && !m.refusal.Never {
		held = Names(c.ledger.Holders(m.node, m.view.Cards[m.refusal.Card].UUID), m.refusal)
	}
	return clip(m.refusal.Message(m.view, c.ask, held))
}

// Names names who is on a card, by what was refused there (nil: nothing was; nobody
// where it isn't a matter of who is there):
// "default/a (8000 MiB), default/b (whole)", or "default/c (60 %)" for compute. What is
// counted and held by nothing is said to be.
func Names(hs []ledger.Holder, refused *fit.Refusal) string {
	if refused != nil && !refused.OfTenants() {
		return ""
	}
	compute := refused != nil && refused.Reason == fit.ReasonCores
	if compute {
		hs = slices.DeleteFunc(slices.Clone(hs), func(h ledger.Holder) bool { return h.Cores == 0 && !h.Whole })
		slices.SortStableFunc(hs, func(a, b ledger.Holder) int { return cmp.Compare(b.Cores, a.Cores) })
	}
	var b strings.Builder
	for i, h := range hs {
		if i == maxHolders {
			fmt.Fprintf(&b, " and %d more", len(hs)-i)
			break
		}
		if i > 0 {
			b.WriteString(", ")
		}
		what := fmt.Sprintf("%d MiB", h.MemMiB)
		switch {
		case h.Whole:
			what = "whole"
		case compute:
			what = fmt.Sprintf("%d %%", h.Cores)
		}
		if h.Mode == api.ModeTimeslice {
			what += " counted"
		}
		switch h.State {
		case ledger.Offered:
			what += ", starting"
		case ledger.Releasing:
			what += ", leaving"
		}
		fmt.Fprintf(&b, "%s (%s)", h.Pod, what)
	}
	return b.String()
}

// summary tells the classes of reasons, the commonest first, and the nearest
// miss.
func (c *call) summary(misses []miss, nearest miss) string {
	counts := map[fit.Reason]int{}
	for _, m := range misses {
		counts[m.refusal.Reason]++
	}
	reasons := make([]fit.Reason, 0, len(counts))
	for r := range counts {
		reasons = append(reasons, r)
	}
	slices.SortFunc(reasons, func(a, b fit.Reason) int {
		return cmp.Or(cmp.Compare(counts[b], counts[a]), cmp.Compare(a, b))
	})
	parts := make([]string, len(reasons))
	for i, r := range reasons {
		parts[i] = fmt.Sprintf("%d %s", counts[r], r)
	}
	return clip(fmt.Sprintf("no card for the pod on %d nodes (%s); nearest miss %s", len(misses), strings.Join(parts, ", "), c.message(nearest)))
}

// clip bounds a message, at a rune's border.
func clip(s string) string {
	if len(s) <= maxMessage {
		return s
	}
	return strings.ToValidUTF8(s[:maxMessage-3], "") + "…"
}
