package fit

import (
	"fmt"

	"github.com/carve-gpu/carve/api"
)

// Mixed is the mode of a card whose pods are of several, which only a report that
// differs from the grants can show. It takes nothing new.
const Mixed api.Mode = "mixed"

// Modes are those in which a card can be given beside vgpu and exclusive. One value
// serves many snapshots, so it is never changed.
type Modes struct {
	MPS, Timeslice bool
	// Clients is how many clients the card's MPS server takes; a container is one at
	// least. 0 is no bound.
	Clients int
	// MPSDown says in a sentence why the card's MPS daemon serves nobody new, or hasn't
	// let go of a card that is to be given otherwise: meanwhile it takes nothing new.
	MPSDown string
	// Only is the mode that NVIDIA's device plugin configuration sets for the card,
	// mps or timeslice, and Replicas in how many parts; empty where it doesn't.
	Only     api.Mode
	Replicas int
	// OneOnly keeps the card from containers that ask for several.
	OneOnly bool
}

// Replicated reports whether the card is given in replicas: it never serves whole.
func (c *Card) Replicated() bool { return c.Modes != nil && c.Modes.Only != "" }

// JoinModes is the mode of a card's pods with one more of them, whose own is empty where
// it shares nothing.
func JoinModes(mode, more api.Mode) api.Mode {
	switch {
	case mode == "", mode == more:
		return more
	case more == "":
		return mode
	}
	return Mixed
}

// SameModes reports whether two cards can be given in the same modes.
func SameModes(a, b *Card) bool {
	return a.Modes == b.Modes || a.Modes != nil && b.Modes != nil && *a.Modes == *b.Modes
}

// Modality is the mode that the container has on the card, whoever else is there, or
// empty where it can't be on it in any. It follows from the two alone: what the pod
// says wins, a configuration turns what says nothing into its own mode, and nothing
// else is given on a card that it names. What is privileged becomes no replica under
// MPS by that: no policy has looked at it, and its node would refuse it for ever.
func (c *Container) Modality(card *Card) api.Mode {
	if card.Replicated() {
		only := card.Modes.Only
		switch {
		case c.Isolation == only:
			return only
		case c.Isolation == "" && only == api.ModeMPS && c.plain() && c.Privileged:
		case c.Isolation == "" && (only == api.ModeMPS || c.plain()):
			return only
		}
		return ""
	}
	if c.usual || c.MemMiB > 0 || c.MemPercent > 0 {
		return c.Mode
	}
	return "" // a part of the card, and nothing says how large
}

// plain is true for what asks for cards and says no more.
func (c *Container) plain() bool { return c.MemMiB == 0 && c.MemPercent == 0 && c.Cores == 0 }

// whole reports whether the container has the card for itself.
func (c *Container) whole(card *Card) bool { return c.Whole && !card.Replicated() }

// slots is how many containers may be on the card in the container's mode there.
func (c *Container) slots(card *Card) int {
	if m := card.Modes; m != nil && m.Clients > 0 && m.Clients < card.Slots && c.Modality(card) == api.ModeMPS {
		return m.Clients
	}
	return card.Slots
}

// replica is what the container takes of a card that is given in replicas.
func (c *Container) replica(card *Card) Amount {
	m := card.Modes
	a := Amount{c.MemMiB, c.Cores, 1}
	switch {
	case c.MemMiB > 0:
	case c.MemPercent > 0:
		a.MemMiB = max(1, card.MemMiB*int64(c.MemPercent)/100)
	default:
		a.MemMiB = max(1, card.MemMiB/int64(m.Replicas))
	}
	if c.plain() {
		a.Cores = allCores / m.Replicas
	}
	return a
}

// bar is what a card's mode has against a container; zero is nothing.
type bar uint8

const (
	barConfigured bar = iota + 1 // NVIDIA's configuration sets another mode
	barAmount                    // a part of the card, and nothing says how large
	barSeveral                   // several cards, and the mode or the file allows one
	barUnserved                  // the node doesn't serve the mode
	barDown                      // the card's MPS daemon doesn't serve
	barMode                      // its pods are in another mode
)

// bars says what the card's mode has against the container. It is asked of each card of
// each node, so what is nearly always so is decided in place.
func (c *Container) bars(card *Card) bar {
	if m := card.Modes; c.usual && (m == nil || m.Only == "" && m.MPSDown == "") && (card.Mode == "" || card.Mode == api.ModeVGPU) {
		return 0 // who asks for all of it looks whether anything is there
	}
	return c.barsUnusual(card)
}

func (c *Container) barsUnusual(card *Card) bar {
	m := card.Modes
	mode := c.Modality(card)
	switch {
	case mode == "" && card.Replicated():
		return barConfigured
	case mode == "":
		return barAmount
	case c.Cards > 1 && (mode == api.ModeMPS || card.Replicated() && m.OneOnly):
		return barSeveral
	case mode == api.ModeMPS && (m == nil || !m.MPS), mode == api.ModeTimeslice && (m == nil || !m.Timeslice):
		return barUnserved
	case mode == api.ModeMPS && m.MPSDown != "":
		return barDown
	case card.Mode != "" && card.Mode != mode && !c.whole(card):
		return barMode
	case m != nil && m.MPSDown != "" && !card.Touched:
		return barDown
	}
	return 0
}

// refuse turns a bar into a refusal.
func (c *Container) refuse(r *Refusal, b bar, card *Card) *Refusal {
	asked := string(c.Modality(card))
	m := card.Modes
	switch b {
	case barConfigured:
		asks := "a share without isolation"
		if c.Isolation != "" {
			asks = "isolation " + string(c.Isolation)
		}
		r.Reason, r.distance = ReasonIsolation, distanceUnserved
		r.Detail = fmt.Sprintf("asked %s, NVIDIA's configuration gives the card in %d replicas of mode %s", asks, m.Replicas, m.Only)
		switch {
		case m.Only == api.ModeTimeslice && c.Isolation == "":
			r.Detail += ", where nothing holds a share"
		case m.Only == api.ModeMPS && c.Isolation == "":
			r.Detail = "a privileged container sees the node's cards whole, so nothing holds it to a replica of mode mps: it is served on cards in other modes"
		}
	case barAmount:
		r.Reason, r.distance = ReasonIsolation, distanceUnserved
		r.Detail = fmt.Sprintf("isolation %s needs %s or %s, except on cards that NVIDIA's configuration gives in replicas", c.Isolation, api.ResourceMemory, api.ResourceMemoryPercent)
	case barSeveral:
		r.Reason, r.distance = ReasonIsolation, distanceUnserved
		r.Detail = fmt.Sprintf("asked %d cards; in mode mps a container has one card, since its processes reach one daemon", c.Cards)
		if asked != string(api.ModeMPS) {
			r.Detail = fmt.Sprintf("asked %d cards; NVIDIA's configuration has failRequestsGreaterThanOne", c.Cards)
		}
	case barUnserved:
		r.Reason, r.distance = ReasonIsolation, distanceUnserved
		r.Detail = "the node doesn't serve mode " + asked
		if asked == string(api.ModeMPS) {
			r.Detail += " on the card: it needs the MPS keeper (DaemonSet carve-mps), a driver that brings MPS and MIG off"
		}
	case barDown:
		r.Reason, r.distance = ReasonMPSDown, distanceBlocked
		r.Detail = "the card takes nothing new in mode mps: " + m.MPSDown
		if asked != string(api.ModeMPS) {
			r.Detail = "MPS has the card still: " + m.MPSDown
		}
	default:
		r.Reason, r.distance = ReasonMode, distanceWhole
		if c.whole(card) {
			asked = string(api.ModeExclusive)
		}
		r.Detail = fmt.Sprintf("asked mode %s, the card is in mode %s until its pods are gone", asked, card.Mode)
		if card.Mode == Mixed {
			r.Detail = "its pods are in several modes, which is a fault; it takes nothing new until they are gone"
		}
	}
	return r
}
