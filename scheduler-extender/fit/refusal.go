package fit

import (
	"fmt"
	"strings"
)

// Reason is one of a closed set of causes for which a pod isn't placed. They
// appear unchanged in messages, metrics and explanations.
type Reason string

// Reasons that a card, a node or a request gives.
const (
	ReasonMemory      Reason = "memory"        // too little free memory on a card
	ReasonCores       Reason = "cores"         // too little free compute on a card
	ReasonSlots       Reason = "slots"         // too many containers on a card
	ReasonShared      Reason = "shared"        // a whole card is asked, others are on it
	ReasonHeldWhole   Reason = "held-whole"    // one pod holds the card exclusively
	ReasonTooFewCards Reason = "too-few-cards" // the node has fewer cards than asked
	ReasonTogether    Reason = "together"      // each container fits, all of them don't
	ReasonModel       Reason = "model"         // the pod excludes the card's model
	ReasonUUID        Reason = "uuid"          // the pod excludes the card
	ReasonUnhealthy   Reason = "unhealthy"     // the card is degraded, quarantined or lost
	ReasonCordoned    Reason = "cordoned"      // the operator took the card out
	ReasonMIGMode     Reason = "mig-mode"      // the card is cut into instances
	ReasonHookDown    Reason = "hook-down"     // the node's hook has no link to the runtime
	ReasonAgentDown   Reason = "agent-down"    // no agent of carve serves the node
	ReasonNoReport    Reason = "no-report"     // a managed node whose agent never reported
	ReasonForeignPods Reason = "foreign-pods"  // pods run on cards of the node that carve didn't give them
	ReasonNoCards     Reason = "no-cards"      // the node isn't managed and offers no card
	ReasonUnmanaged   Reason = "unmanaged"     // a share is asked, and carve doesn't manage the node
	ReasonUnknownNode Reason = "unknown-node"  // no such Node object was seen
	ReasonIsolation   Reason = "isolation"     // a mode that isn't served, or not on the card
	ReasonMode        Reason = "mode"          // the card's pods are in another mode
	ReasonMPSDown     Reason = "mps-down"      // the card's MPS daemon doesn't serve
	ReasonInvalid     Reason = "invalid"       // the request can't be meant
	ReasonSearchLimit Reason = "search-limit"  // too many ways to place the containers
	ReasonHost        Reason = "host"          // too little of the node's processors, memory or places for pods
	ReasonQuota       Reason = "quota"         // a ResourceQuota of the namespace allows no more
)

// Refusal says why an ask isn't placed, by the card that came nearest.
type Refusal struct {
	Reason    Reason
	Container int // position in Ask.Containers of the container that failed
	Card      int // position in Node.Cards of the nearest miss, or -1
	// Asked, Free and Total are in the unit of the reason: MiB for memory,
	// percent for cores, containers for slots, cards for too-few-cards.
	Asked, Free, Total int64
	// Fitting of Wanted cards would have fitted.
	Fitting, Wanted int
	// Detail replaces the sentence for reasons that concern the request or
	// the whole node.
	Detail string
	// Never is true where nothing that leaves the node could help.
	Never bool

	distance int64
}

// Distances order misses: what is short of a little room is nearest.
const (
	distanceScale  = 1000
	distanceShared = 1 * distanceScale
	// A slot comes free whenever anybody leaves, however small.
	distanceSlots    = distanceScale / 4
	distanceWhole    = 3 * distanceScale
	distanceTogether = distanceScale / 2
	distanceBlocked  = 5 * distanceScale
	distanceNode     = 6 * distanceScale
	// What a card doesn't serve it may serve some day, other than what it is.
	distanceUnserved = 7*distanceScale - 1
	distanceSelector = 7 * distanceScale
	distanceNever    = 10 * distanceScale
)

// Nearer reports whether r is a nearer miss than o; nil is farthest.
func (r *Refusal) Nearer(o *Refusal) bool {
	return o == nil || r.distance < o.distance
}

// miss says why the container, alone of its pod, doesn't fit on the card.
func miss(card *Card, at int, c *Container, a *Ask) *Refusal {
	r := &Refusal{Card: at}
	set := func(reason Reason, asked, free, total, distance int64) *Refusal {
		r.Reason, r.Asked, r.Free, r.Total, r.distance = reason, asked, free, total, distance
		return r
	}
	amount, free := c.On(card), card.Free()
	if sel := a.admits(card); sel != "" {
		r.Never = true
		return set(sel, 0, 0, 0, distanceSelector)
	}
	// More than the card has at all.
	if ask := max(amount.MemMiB, c.MemMiB); ask > card.MemMiB {
		r.Never = true
		return set(ReasonMemory, ask, free.MemMiB, card.MemMiB, distanceNever)
	}
	switch {
	case card.Blocked != "":
		return set(card.Blocked, 0, 0, 0, distanceBlocked)
	case c.bars(card) != 0:
		return c.refuse(r, c.bars(card), card)
	case card.Replicated() && free.Slots < 1 && !card.Whole:
		// Shares that name their amounts count as well, whatever their size.
		what := "a replica"
		if !c.plain() {
			what = "a share"
		}
		r.Detail = fmt.Sprintf("asked %s; the card, in %d replicas, takes %d containers and has %d", what, card.Slots, card.Slots, card.Used.Slots)
		return set(ReasonSlots, 1, 0, int64(card.Slots), distanceSlots)
	case card.Whole:
		return set(ReasonHeldWhole, amount.MemMiB, 0, card.MemMiB, distanceWhole)
	case c.whole(card) && card.Touched:
		used := min(card.Used.MemMiB, card.MemMiB)
		return set(ReasonShared, card.MemMiB, card.MemMiB-used, card.MemMiB, distanceShared+used*distanceScale/max(1, card.MemMiB))
	case amount.MemMiB > free.MemMiB:
		return set(ReasonMemory, amount.MemMiB, free.MemMiB, card.MemMiB, (amount.MemMiB-free.MemMiB)*distanceScale/amount.MemMiB)
	case amount.Cores > free.Cores:
		return set(ReasonCores, int64(amount.Cores), int64(free.Cores), allCores, int64((amount.Cores-free.Cores)*distanceScale/amount.Cores))
	}
	if slots := c.slots(card); slots < card.Slots {
		r.Detail = fmt.Sprintf("asked to be a client of the card's MPS server, which takes %d; the %d containers there are one each at least", slots, card.Used.Slots)
		return set(ReasonSlots, 1, int64(max(0, slots-card.Used.Slots)), int64(slots), distanceSlots)
	}
	return set(ReasonSlots, 1, int64(free.Slots), int64(card.Slots), distanceSlots)
}

// explain finds the reason after Fit found no placement.
func explain(n *Node, a *Ask, limit bool) *Refusal {
	if limit {
		return &Refusal{Reason: ReasonSearchLimit, Card: -1, distance: distanceTogether}
	}
	for _, ci := range a.order {
		c := &a.Containers[ci]
		if c.Cards > len(n.Cards) {
			return &Refusal{Reason: ReasonTooFewCards, Container: ci, Card: -1, Asked: int64(c.Cards), Total: int64(len(n.Cards)), Never: true, distance: distanceNever}
		}
		var nearest *Refusal
		fitting, possible, replicas := 0, 0, 0
		for i := range n.Cards {
			card := &n.Cards[i]
			if card.Blocked == "" && a.admits(card) == "" && fits(card, c, c.On(card)) {
				fitting, possible = fitting+1, possible+1
				if card.Replicated() {
					replicas++
				}
				continue
			}
			m := miss(card, i, c, a)
			if !m.Never {
				possible++
			}
			if m.Nearer(nearest) {
				nearest = m
			}
		}
		if fitting < c.Cards {
			nearest.Container, nearest.Fitting, nearest.Wanted = ci, fitting, c.Cards
			nearest.Never = possible < c.Cards
			return nearest
		}
		if whole := fitting - replicas; c.Whole && c.Isolation == "" && max(whole, replicas) < c.Cards {
			return &Refusal{Reason: ReasonTogether, Container: ci, Card: -1, Asked: int64(c.Cards), distance: distanceTogether,
				Detail: fmt.Sprintf("asked %d cards, %d could be whole and %d replicas: a container's cards are all of one kind", c.Cards, whole, replicas)}
		}
	}
	var asked, free int64
	at := 0
	for i := range n.Cards {
		if f := n.Cards[i].Free().MemMiB; f > free {
			free, at = f, i
		}
	}
	for i := range a.Containers {
		asked += a.Containers[i].On(&n.Cards[at]).MemMiB * int64(a.Containers[i].Cards)
	}
	return &Refusal{Reason: ReasonTogether, Card: -1, Asked: asked, Free: free, distance: distanceTogether}
}

// Message is the refusal as one short sentence that begins with the node's
// name. held names the holders of the nearest card, or is empty.
func (r *Refusal) Message(n *Node, a *Ask, held string) string {
	var b strings.Builder
	if n != nil && n.Name != "" {
		b.WriteString(n.Name + ": ")
	}
	if r.Detail != "" && r.Card < 0 {
		b.WriteString(r.Detail)
		return b.String()
	}
	if a != nil && len(a.Containers) > 1 && r.Card >= 0 {
		fmt.Fprintf(&b, "container %s: ", a.Containers[r.Container].Name)
	}
	if r.Wanted > 1 {
		fmt.Fprintf(&b, "%d of %d cards fit; nearest miss ", r.Fitting, r.Wanted)
	}
	if r.Card >= 0 && n != nil && r.Card < len(n.Cards) {
		card := &n.Cards[r.Card]
		fmt.Fprintf(&b, "card %d (%s, %s): ", card.Index, shortUUID(card.UUID), strings.TrimPrefix(card.Model, "NVIDIA "))
	}
	if r.Detail != "" {
		b.WriteString(r.Detail)
	} else {
		b.WriteString(r.sentence(a))
	}
	if held != "" {
		b.WriteString("; held by " + held)
	}
	return b.String()
}

func (r *Refusal) sentence(a *Ask) string {
	switch r.Reason {
	case ReasonMemory:
		if r.Never {
			return fmt.Sprintf("asked %d MiB, the card has %d MiB", r.Asked, r.Total)
		}
		return fmt.Sprintf("asked %d MiB, free %d of %d MiB", r.Asked, r.Free, r.Total)
	case ReasonCores:
		return fmt.Sprintf("asked %d %% of compute, free %d %%", r.Asked, r.Free)
	case ReasonSlots:
		return fmt.Sprintf("asked a slot, free %d of %d", r.Free, r.Total)
	case ReasonShared:
		return "asked the whole card, which is shared"
	case ReasonHeldWhole:
		return "the card is held whole"
	case ReasonTooFewCards:
		return fmt.Sprintf("asked %d different cards, the node has %d", r.Asked, r.Total)
	case ReasonTogether:
		return fmt.Sprintf("each container fits alone, together they don't: asked %d MiB in all, most free on one card %d MiB", r.Asked, r.Free)
	case ReasonModel:
		return "the pod's card-models don't admit this model"
	case ReasonUUID:
		return "the pod's card-uuids don't admit this card"
	case ReasonUnhealthy:
		return "the card is not healthy"
	case ReasonCordoned:
		return "the card is cordoned"
	case ReasonMIGMode:
		return "the card is in MIG mode"
	case ReasonHookDown:
		return "the node's hook has no link to the container runtime"
	case ReasonAgentDown:
		return "carve's agent on the node is down"
	case ReasonNoReport:
		return "the node's agent has not reported its cards"
	case ReasonForeignPods:
		return "pods run there on cards that carve didn't give them"
	case ReasonNoCards:
		return "the node offers no cards"
	case ReasonUnmanaged:
		return "shares are handed out on nodes labelled carve.dev/managed=true only"
	case ReasonUnknownNode:
		return "the node is not known yet"
	case ReasonSearchLimit:
		return "too many ways to place the pod's containers"
	}
	return string(r.Reason)
}

// shortUUID keeps what tells cards apart: "GPU-1a2b3c4d…".
func shortUUID(u string) string {
	if len(u) > 12 {
		return u[:12] + "…"
	}
	return u
}
