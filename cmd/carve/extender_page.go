package main

import (
	"cmp"
	"slices"
	"strings"
	"time"

	"k8s.io/client-go/tools/cache"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/v1alpha1"
	"github.com/carve-gpu/carve/monitor/page"
	"github.com/carve-gpu/carve/scheduler-extender/fit"
	"github.com/carve-gpu/carve/scheduler-extender/ledger"
)

// clusterPage shows the ledger to the live page, with what the nodes report of
// their cards beside it.
type clusterPage struct {
	ledger  *ledger.Ledger
	reports cache.Store
}

func (p clusterPage) State() page.State {
	s := page.State{Scope: page.ScopeCluster, At: time.Now().UTC()}
	for _, n := range p.ledger.Nodes() {
		snap := n.Snapshot()
		var report *v1alpha1.GPUNode
		if o, ok, err := p.reports.GetByKey(n.Name); err == nil && ok {
			report = o.(*v1alpha1.GPUNode)
		}
		if snap.Managed || report != nil {
			s.Nodes = append(s.Nodes, p.node(n, snap, report))
		}
	}
	slices.SortFunc(s.Nodes, func(a, b page.Node) int { return cmp.Compare(a.Name, b.Name) })
	return s
}

func (p clusterPage) node(n *ledger.Node, snap *ledger.Snapshot, report *v1alpha1.GPUNode) page.Node {
	out := page.Node{Name: n.Name, Blocked: string(snap.View.Blocked), Cards: []page.Card{}}
	if !snap.Managed && snap.Known {
		out.Blocked = string(fit.ReasonUnmanaged)
	}
	if out.Blocked != "" {
		r := fit.Refusal{Reason: fit.Reason(out.Blocked), Card: -1, Detail: snap.View.Why}
		out.BlockedFor = r.Message(nil, nil, "")
	}
	health := map[string]v1alpha1.Health{}
	cordoned, reasons := []string(nil), map[string]v1alpha1.CordonReason(nil)
	if report != nil {
		st := &report.Status
		out.Version, out.Driver, out.Software = st.AgentVersion, st.DriverVersion, st.SoftwareGPU
		out.HookUp, out.Unadjusted = st.HookConnectedSince != nil, int(st.UnadjustedContainers)
		for _, c := range st.Cards {
			health[c.UUID] = c.Health
		}
		cordoned, reasons = report.Spec.CordonedCards, report.Spec.CordonReasons
	}
	for i := range snap.View.Cards {
		c := &snap.View.Cards[i]
		card := page.Card{
			Index: c.Index, UUID: c.UUID, Model: c.Model,
			Health: cmp.Or(health[c.UUID].State, v1alpha1.Healthy), Reason: health[c.UUID].Reason,
			Cordoned: slices.Contains(cordoned, c.UUID), CordonedFor: string(reasons[c.UUID]),
			MemoryBytes: uint64(c.MemMiB) << 20, GrantedBytes: uint64(c.Used.MemMiB) << 20, GrantedPercent: c.Used.Cores,
			Holders: []page.Holder{},
		}
		for _, h := range p.ledger.Holders(n, c.UUID) {
			namespace, pod, _ := strings.Cut(h.Pod, "/")
			holder := page.Holder{Namespace: namespace, Pod: pod, State: h.State.String(), Whole: h.Whole, LimitBytes: uint64(h.MemMiB) << 20, Percent: h.Cores,
				Mode: string(h.Mode), Counted: h.Mode == api.ModeTimeslice}
			if h.Whole {
				holder.LimitBytes, holder.Percent, holder.Mode = card.MemoryBytes, 100, string(api.ModeExclusive)
			}
			card.Holders = append(card.Holders, holder)
		}
		sortHolders(card.Holders)
		out.Cards = append(out.Cards, card)
	}
	slices.SortStableFunc(out.Cards, func(a, b page.Card) int { return cmp.Compare(a.Index, b.Index) })
	return out
}
