package fit

import (
	"fmt"
	"sort"
	"strings"

	"github.com/carve-gpu/carve/api"
)

// maxContainers bounds the containers of one pod that use a card. The search
// keeps them in a bit set.
const maxContainers = 64

// Container is what one container asks for, with the mode that it is served in.
type Container struct {
	Name  string
	Kind  api.ContainerKind
	Cards int
	// Whole asks for cards that nobody else is on. MemMiB is then the least
	// memory that such a card must have.
	Whole      bool
	MemMiB     int64
	MemPercent int
	Cores      int
	// Isolation is what the pod says, the same for all its containers; Mode is what
	// that comes to on a card that no configuration of NVIDIA's names.
	Isolation, Mode api.Mode
	Privileged      bool

	usual bool // Mode is one that every card can be given in
}

// On is what the container takes of the card.
func (c *Container) On(card *Card) Amount {
	switch {
	case card.Replicated():
		return c.replica(card)
	case c.Whole:
		return Amount{card.MemMiB, allCores, 1}
	case c.MemMiB > 0:
		return Amount{c.MemMiB, c.Cores, 1}
	case c.MemPercent > 0:
		return Amount{max(1, card.MemMiB*int64(c.MemPercent)/100), c.Cores, 1}
	}
	return Amount{card.MemMiB, c.Cores, 1}
}

// Ask is a compiled request. It is read-only and safe for concurrent use.
type Ask struct {
	// Containers are those that use a card, in the order of the pod.
	Containers    []Container
	Models, UUIDs api.Selector
	Policy        string // binpack, spread, topology or empty
	// Host is what the pod asks of the node beside cards, where somebody said so. Settled
	// says that it need not be looked at: kube-scheduler found the node to have it.
	Host    Host
	Settled bool
	// Copied into grants.
	Fixed, Low bool
	Managed    api.ManagedMemory
	Oversell   api.Oversell

	order []int // containers in the order in which they are placed
	key   string
}

// Key is equal for asks that get the same answer from Fit on the same node.
// Names of containers are not part of it.
func (a *Ask) Key() string { return a.key }

// NewAsk compiles a request. A request that no node of this version can serve
// is refused.
func NewAsk(r api.Request) (*Ask, *Refusal) {
	switch r.Isolation {
	case "", api.ModeVGPU, api.ModeExclusive, api.ModeMPS, api.ModeTimeslice:
	default:
		return nil, &Refusal{Reason: ReasonIsolation, Card: -1, Never: true,
			Detail: fmt.Sprintf("isolation %q is not served; vgpu, mps, timeslice and exclusive are", r.Isolation)}
	}
	if len(r.Containers) > maxContainers {
		return nil, &Refusal{Reason: ReasonInvalid, Card: -1, Never: true,
			Detail: fmt.Sprintf("%d containers ask for cards, at most %d may", len(r.Containers), maxContainers)}
	}
	a := &Ask{Models: r.Models, UUIDs: r.UUIDs, Policy: r.Policy, Fixed: r.Fixed, Low: r.LowPriority, Managed: r.Managed, Oversell: r.Oversell}
	for _, c := range r.Containers {
		if c.MIG != nil {
			return nil, &Refusal{Reason: ReasonIsolation, Card: -1, Never: true,
				Detail: fmt.Sprintf("container %s: MIG instances are not served; shares and whole cards are", c.Name)}
		}
		out := Container{Name: c.Name, Kind: c.Kind, Cards: c.Cards, Whole: c.Whole,
			MemMiB: c.MemMiB, MemPercent: c.MemPercent, Cores: c.Cores, Isolation: r.Isolation, Mode: api.ModeVGPU, Privileged: c.Privileged}
		switch {
		case r.Isolation == api.ModeMPS || r.Isolation == api.ModeTimeslice:
			out.Whole, out.Mode = false, r.Isolation
		case r.Isolation == api.ModeExclusive:
			out.Whole = true
		case r.Isolation == api.ModeVGPU:
			// The pod insists on the library, so a whole card is a share
			// that happens to be all of its memory.
			out.Whole = false
		}
		if out.Whole {
			out.Mode, out.Cores, out.MemPercent = api.ModeExclusive, 0, 0
		}
		out.usual = out.Mode == api.ModeVGPU || out.Mode == api.ModeExclusive
		a.Containers = append(a.Containers, out)
	}
	a.order = placementOrder(a.Containers)
	a.key = key(a)
	return a, nil
}

// placementOrder puts the containers that run for the pod's whole life first,
// then the init containers, which can share the room of those; among equals
// the hardest to place comes first.
func placementOrder(cs []Container) []int {
	order := make([]int, len(cs))
	for i := range order {
		order[i] = i
	}
	sort.SliceStable(order, func(i, j int) bool {
		a, b := &cs[order[i]], &cs[order[j]]
		if (a.Kind == api.Init) != (b.Kind == api.Init) {
			return b.Kind == api.Init
		}
		if a.Whole != b.Whole {
			return a.Whole
		}
		if a.Cards != b.Cards {
			return a.Cards > b.Cards
		}
		// An absent amount is a whole card's memory: larger than any number.
		rank := func(c *Container) (int64, int) {
			switch {
			case c.MemMiB > 0:
				return c.MemMiB, 0
			case c.MemPercent > 0:
				return 0, c.MemPercent
			}
			return 1 << 62, 0
		}
		am, ap := rank(a)
		bm, bp := rank(b)
		if am != bm {
			return am > bm
		}
		return ap > bp
	})
	return order
}

func key(a *Ask) string {
	var b strings.Builder
	if len(a.Containers) > 0 {
		b.WriteString(string(a.Containers[0].Isolation) + ";")
	}
	for i := range a.Containers {
		c := &a.Containers[i]
		fmt.Fprintf(&b, "%d/%d/%t/%d/%d/%d/%t;", c.Kind, c.Cards, c.Whole, c.MemMiB, c.MemPercent, c.Cores, c.Privileged)
	}
	fmt.Fprintf(&b, "%s;%q;%q;%q;%q", a.Policy, a.Models.Only, a.Models.Not, a.UUIDs.Only, a.UUIDs.Not)
	return b.String()
}

// admits reports the selector that turns the card away, or nothing.
func (a *Ask) admits(c *Card) Reason {
	if (len(a.Models.Only) > 0 || len(a.Models.Not) > 0) && !a.Models.Admits(c.Model) {
		return ReasonModel
	}
	if (len(a.UUIDs.Only) > 0 || len(a.UUIDs.Not) > 0) && !a.UUIDs.Admits(c.UUID) {
		return ReasonUUID
	}
	return ""
}

// Grant turns a placement of this ask into the pod's grant of generation 1.
func (a *Ask) Grant(n *Node, p Placement, podUID string) api.Grant {
	g := api.Grant{Version: api.GrantVersion, UID: podUID, Node: n.Name, Generation: 1,
		Containers: make(map[string][]api.CardGrant, len(a.Containers))}
	for i := range a.Containers {
		c := &a.Containers[i]
		cards := make([]api.CardGrant, 0, len(p[i]))
		for _, ci := range p[i] {
			card := &n.Cards[ci]
			cg := api.CardGrant{Card: card.UUID, Mode: c.Modality(card)}
			if !c.whole(card) {
				amount := c.On(card)
				cg.MemMiB, cg.Cores = amount.MemMiB, amount.Cores
			}
			switch cg.Mode {
			case api.ModeVGPU:
				cg.Fixed, cg.Low, cg.Managed, cg.Oversell = a.Fixed, a.Low, a.Managed, a.Oversell
			case api.ModeMPS:
				// MPS has caps alone, and no say in who waits for whom.
				cg.Fixed, cg.Managed, cg.Oversell = cg.Cores > 0, a.Managed, a.Oversell
			}
			cards = append(cards, cg)
		}
		g.Containers[c.Name] = cards
	}
	return g
}
