package agent

import (
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/v1alpha1"
	"github.com/carve-gpu/carve/vgpu/gpu"
)

// SetSharing takes in what NVIDIA's configuration says of the cards with these UUIDs. What
// runs on a card is left alone: one in another mode takes the new one once it is empty.
func (a *Agent) SetSharing(cards []string, sharing map[string]v1alpha1.Sharing) {
	a.mu.Lock()
	same := a.sharedFor != nil && maps.Equal(a.sharing, sharing) && slices.Equal(a.sharedFor, cards)
	a.noteFewer(sharing)
	a.sharing, a.sharedFor = sharing, append([]string{}, cards...)
	a.mu.Unlock()
	if same {
		return
	}
	a.slotsChanged()
	a.stirMPS()
	a.lookAgain()
	a.report()
}

// sharingKnown reports whether it is known what NVIDIA's configuration says of the cards.
// Until then there is nothing to report: a card that is to be shared would be given whole.
func (a *Agent) sharingKnown() bool {
	if a.CardsChanged == nil {
		return true // nobody follows one
	}
	a.mu.Lock()
	known := a.sharedFor != nil && slices.Equal(a.sharedFor, uuids(a.hardware.inventory.Cards))
	a.mu.Unlock()
	if !known {
		a.CardsChanged()
	}
	return known
}

// Cards are those that were last read from the driver, or by an earlier process.
func (a *Agent) Cards() []gpu.Card {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Clone(a.hardware.inventory.Cards)
}

func uuids(cards []gpu.Card) []string {
	out := make([]string, len(cards))
	for i, c := range cards {
		out[i] = c.UUID
	}
	return out
}

// sharingOf is what NVIDIA's configuration says of a card, nil for nothing. a.mu is
// held.
func (a *Agent) sharingOf(uuid string) *v1alpha1.Sharing {
	if s, ok := a.sharing[uuid]; ok {
		return &s
	}
	return nil
}

// modesOf lists the modes in which a card can be given beside vgpu and exclusive. a.mu
// is held.
func (a *Agent) modesOf(c gpu.Card) []string {
	if c.MIGMode == "enabled" {
		return nil
	}
	out := []string{string(api.ModeTimeslice)}
	if a.mps.unserved == "" {
		out = append(out, string(api.ModeMPS))
	}
	return out
}

// clientsOf is how many clients an MPS server takes on a card, 0 where it isn't given in
// that mode.
func (a *Agent) clientsOf(c gpu.Card) int32 {
	if !slices.Contains(a.modesOf(c), string(api.ModeMPS)) {
		return 0
	}
	return int32(api.MPSClients(c.ComputeMajor))
}

// slotsOf is how many containers may share a card. a.mu is held.
func (a *Agent) slotsOf(uuid string, otherwise int) int {
	if s, ok := a.sharing[uuid]; ok {
		return int(s.Replicas)
	}
	return otherwise
}

// joinModes is the mode of a card's slices with one more of them; empty joins as nothing
// and two that differ as mixed, which no slice is.
func joinModes(mode, more api.Mode) api.Mode {
	switch {
	case mode == "" || mode == more:
		return more
	case more == "":
		return mode
	}
	return "mixed"
}

// SharingSaid tells the node's readers about NVIDIA's configuration.
func (a *Agent) SharingSaid(fault bool, sentence string) {
	kind, reason := corev1.EventTypeNormal, reasonSharing
	if fault {
		kind, reason = corev1.EventTypeWarning, reasonSharingRefused
	}
	a.nodeEvent(kind, reason, sentence)
}
