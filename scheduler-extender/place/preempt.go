package place

import (
	"github.com/carve-gpu/carve/scheduler-extender/fit"
)

// Preempt says of which nodes the pod would have a place once the victims, by UID, that
// kube-scheduler means to evict there are gone. kube-scheduler chooses victims by what its own
// plugins count; where cards are in the way as well they would be evicted for nothing. Nodes
// that carve doesn't manage are left as they are where the pod may be there at all. An error is
// of the pod's request.
func (p *Placer) Preempt(pod Pod, victims map[string][]string) (map[string]bool, *fit.Refusal) {
	keep := make(map[string]bool, len(victims))
	if pod.Request.Empty() {
		for name := range victims {
			keep[name] = true
		}
		return keep, nil
	}
	ask, refusal := fit.NewAsk(pod.Request)
	if refusal != nil {
		return nil, refusal
	}
	ask = ask.WithHost(pod.Host).Settle()
	prefer := p.shape(ask, ask).policy.Card
	for name, uids := range victims {
		n := p.ledger.Node(name)
		if n == nil {
			continue // it isn't known yet, so nothing says that evictions would help
		}
		if s := n.Snapshot(); !s.Managed {
			keep[name] = s.Known && s.Cards && pod.Request.WholeOnly()
			continue
		}
		gone := make(map[string]bool, len(uids))
		for _, uid := range uids {
			gone[uid] = true
		}
		view := p.ledger.Without(n, gone)
		_, refused := fit.Fit(&view, ask, prefer)
		keep[name] = refused == nil
	}
	return keep, nil
}
