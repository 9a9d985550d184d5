package agent

import (
	"maps"
	"slices"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/v1alpha1"
	"github.com/carve-gpu/carve/vgpu/gpu"
)

// SetSharing takes in what NVIDIA's configuration says of cards, by UUID. What runs on a
// card is left alone: one in another mode takes the new one once it is empty.
func (a *Agent) SetSharing(sharing map[string]v1alpha1.Sharing) {
	a.mu.Lock()
	same := maps.Equal(a.sharing, sharing)
	a.sharing = sharing
	a.mu.Unlock()
	if same {
		return
	}
	a.slotsChanged()
	a.lookAgain()
	a.report()
}

// Inventory is the cards as last read from the driver; known is false until it has
// listed them once.
func (a *Agent) Inventory() (cards []gpu.Card, known bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return slices.Clone(a.hardware.inventory.Cards), a.hardware.known
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
	return []string{string(api.ModeTimeslice)}
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
