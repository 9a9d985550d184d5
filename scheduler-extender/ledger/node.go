package ledger

import (
	"cmp"
	"slices"
	"sync/atomic"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/v1alpha1"
	"github.com/carve-gpu/carve/scheduler-extender/fit"
)

// NodeInfo is what the ledger needs of a Node object.
type NodeInfo struct {
	// Managed is true for nodes labelled carve.dev/managed=true.
	Managed bool
	// Cards is true where the node itself advertises nvidia.com/gpu. It
	// matters for nodes that aren't managed.
	Cards bool
	// OutOfService is true where the node was declared so
	// (node.kubernetes.io/out-of-service): nothing runs on it any more, and
	// what was leaving it has left.
	OutOfService bool
	// Host is what pods may have of the node beside cards (status.allocatable); zero where
	// the node doesn't say.
	Host fit.Host
}

// Snapshot is one node at one moment. It is never changed.
type Snapshot struct {
	// Version is unique over the life of the ledger: two snapshots with the
	// same version are the same.
	Version uint64
	// Known is true once the Node object was seen.
	Known bool
	NodeInfo
	View fit.Node
	// DebtMiB is what the node owes: granted but not there any more.
	DebtMiB int64
	// Served is the version in which the node last began to take pods again
	// after it had been blocked.
	Served uint64
}

// cards of a node that carve manages; a nil snapshot has none.
func (s *Snapshot) cards() int {
	if s.managed() == 0 {
		return 0
	}
	return len(s.View.Cards)
}

// managed is 1 for a node that carve manages.
func (s *Snapshot) managed() int {
	if s == nil || !s.Known || !s.Managed {
		return 0
	}
	return 1
}

// Node is a handle that stays valid for the life of the ledger.
type Node struct {
	// ID is small and unique among the nodes; it is meant as an index.
	ID   int
	Name string
	snap atomic.Pointer[Snapshot]
	lot  uint64

	// Below is guarded by the ledger's lock.
	info    NodeInfo
	known   bool
	agent   Agent
	served  uint64
	report  *report
	entries map[string]*entry   // by pod UID
	foreign map[string]string   // pods on cards that carve didn't give, namespace/name by UID
	hosted  map[string]fit.Host // what pods of all kinds ask beside cards, by UID
	host    fit.Host            // sum of hosted
}

// Snapshot is the node as of now. It takes no lock.
func (n *Node) Snapshot() *Snapshot { return n.snap.Load() }

// report is a GPUNode, indexed.
type report struct {
	hook   bool
	cards  []cardReport
	byUUID map[string]int
	slices map[string][]slice // by pod UID
	// released are pods of which the node let go before any report showed them.
	released map[string]bool
}

type cardReport struct {
	uuid, model string
	index       int
	memMiB      int64
	slots       int
	blocked     fit.Reason
	modes       *fit.Modes
}

// slice is a share that a report shows in place.
type slice struct {
	card           int
	container      string
	amount         fit.Amount
	whole          bool
	mode           api.Mode // empty where whole
	namespace, pod string
	// generation is the grant's that is in force; refused that of a newer one
	// that the node can't put in force, or 0.
	generation, refused int
	refusal             string
}

func newReport(n *v1alpha1.GPUNode) *report {
	r := &report{
		hook:   n.Status.HookConnectedSince != nil,
		byUUID: make(map[string]int, len(n.Status.Cards)),
		slices: map[string][]slice{},
	}
	slots := api.SlotsPerCard
	if n.Status.SlotsPerCard > 0 {
		slots = int(n.Status.SlotsPerCard)
	}
	if n.Spec.SlotsPerCard != nil {
		slots = int(*n.Spec.SlotsPerCard)
	}
	if len(n.Status.Released) > 0 {
		r.released = make(map[string]bool, len(n.Status.Released))
		for _, uid := range n.Status.Released {
			r.released[uid] = true
		}
	}
	cordoned := map[string]bool{}
	for _, u := range n.Spec.CordonedCards {
		cordoned[u] = true
	}
	for _, c := range n.Status.Cards {
		if _, twice := r.byUUID[c.UUID]; twice || c.UUID == "" {
			continue
		}
		cr := cardReport{uuid: c.UUID, model: c.Model, index: int(c.Index), memMiB: min(max(0, c.MemoryMiB), api.MaxMemoryMiB), slots: slots}
		switch {
		case c.Health.State != v1alpha1.Healthy:
			cr.blocked = fit.ReasonUnhealthy
		case cordoned[c.UUID]:
			cr.blocked = fit.ReasonCordoned
		case c.MIGMode == "enabled":
			cr.blocked = fit.ReasonMIGMode
		}
		if cr.modes = Modes(c.Modes, int(c.MPSClients), c.Sharing, c.MPS); cr.modes != nil && cr.modes.Only != "" {
			cr.slots = cr.modes.Replicas
		}
		at := len(r.cards)
		r.cards = append(r.cards, cr)
		r.byUUID[c.UUID] = at
		for _, s := range c.Slices {
			sl := slice{card: at, container: s.Container, namespace: s.Namespace, pod: s.Pod,
				generation: int(s.Generation), refused: int(s.RefusedGeneration), refusal: s.Refusal,
				// Whatever the report says, sums of such amounts must not overflow.
				amount: fit.Amount{MemMiB: min(max(0, s.MemMiB), api.MaxMemoryMiB), Cores: min(max(0, int(s.Cores)), 100), Slots: 1}}
			// Only shares leave room for others: an instance or a mode that
			// isn't known blocks the card.
			if sl.mode = api.Mode(s.Mode); !sl.mode.Share() {
				sl.whole, sl.mode = true, ""
				sl.amount = fit.Amount{MemMiB: cr.memMiB, Cores: 100, Slots: 1}
			}
			r.slices[s.PodUID] = append(r.slices[s.PodUID], sl)
		}
	}
	return r
}

// Modes reads from a report in which modes a card can be given; nil says in none beside
// vgpu and exclusive. clients is how many an MPS server takes, 0 where the agent doesn't say.
func Modes(served []string, clients int, sharing *v1alpha1.Sharing, mps *v1alpha1.MPS) *fit.Modes {
	m := fit.Modes{MPS: slices.Contains(served, string(api.ModeMPS)), Timeslice: slices.Contains(served, string(api.ModeTimeslice))}
	if m.MPS {
		m.Clients = clients
		if clients <= 0 {
			m.Clients = api.MaxMPSClients
		}
	}
	if mps != nil && !mps.Ready {
		m.MPSDown = cmp.Or(mps.Reason, "its MPS daemon isn't ready")
	}
	if s := sharing; s != nil && s.Replicas > 0 && (s.Mode == string(api.ModeMPS) || s.Mode == string(api.ModeTimeslice)) {
		m.Only, m.Replicas, m.OneOnly = api.Mode(s.Mode), int(s.Replicas), s.FailRequestsGreaterThanOne
	}
	if m == (fit.Modes{}) {
		return nil
	}
	return &m
}

// view recomputes the node from its report and entries, save one. It is a pure function
// of them, so nothing can leak from one change into the next.
func (n *Node) view(except *entry) (fit.Node, int64) {
	return n.viewWithout(except, nil)
}

// viewWithout is view without some pods more, by UID, whose shares are taken to be gone; what
// they ask of the node beside cards stays counted.
func (n *Node) viewWithout(except *entry, gone map[string]bool) (fit.Node, int64) {
	v := fit.Node{Name: n.Name}
	v.Blocked, v.Why = n.blocked()
	if n.report == nil || !n.known {
		return v, 0
	}
	v.Host, v.HostKnown = n.hostFree(except)
	v.Cards = make([]fit.Card, len(n.report.cards))
	for i, c := range n.report.cards {
		v.Cards[i] = fit.Card{UUID: c.uuid, Model: c.model, Index: c.index, MemMiB: c.memMiB, Slots: c.slots, Blocked: c.blocked, Modes: c.modes}
	}
	for uid, e := range n.entries {
		if e == except || gone[uid] {
			continue
		}
		e.use(n.report, func(card int, a fit.Amount, whole bool, mode api.Mode) { take(&v.Cards[card], a, whole, mode) })
	}
	for uid, left := range n.report.slices {
		if n.entries[uid] != nil || gone[uid] || n.info.OutOfService {
			continue
		}
		for _, s := range left {
			take(&v.Cards[s.card], s.amount, s.whole, s.mode)
		}
	}
	var debt int64
	for i := range v.Cards {
		debt += max(0, v.Cards[i].Used.MemMiB-v.Cards[i].MemMiB)
	}
	return v, debt
}

func take(c *fit.Card, a fit.Amount, whole bool, mode api.Mode) {
	c.Used = c.Used.Plus(a)
	c.Touched = true
	c.Whole = c.Whole || whole
	c.Mode = fit.JoinModes(c.Mode, mode)
}

// grew reports whether something that didn't fit before might fit now.
func grew(old, now *Snapshot) bool {
	if old == nil {
		return now.Known
	}
	if !old.Known && now.Known || old.NodeInfo != now.NodeInfo {
		return true
	}
	if old.View.Blocked != "" && old.View.Blocked != now.View.Blocked {
		return true
	}
	if h, was := now.View.Host, old.View.Host; h.CPUMilli > was.CPUMilli || h.MemMiB > was.MemMiB || h.Pods > was.Pods {
		return true
	}
	was := make(map[string]*fit.Card, len(old.View.Cards))
	for i := range old.View.Cards {
		was[old.View.Cards[i].UUID] = &old.View.Cards[i]
	}
	for i := range now.View.Cards {
		is := &now.View.Cards[i]
		o := was[is.UUID]
		if o == nil {
			return true
		}
		f, g := is.Free(), o.Free()
		if f.MemMiB > g.MemMiB || f.Cores > g.Cores || f.Slots > g.Slots ||
			o.Touched && !is.Touched || o.Whole && !is.Whole || o.Blocked != "" && is.Blocked == "" ||
			o.Mode != "" && o.Mode != is.Mode || !fit.SameModes(o, is) {
			return true
		}
	}
	return false
}
