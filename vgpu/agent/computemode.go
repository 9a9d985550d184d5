package agent

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"

	"github.com/carve-gpu/carve/vgpu/gpu"
)

// A card whose compute mode isn't DEFAULT takes one process, or none. Modes that the keeper
// of MPS daemons sets stand in its state before they are set, and until they are set back.
// Any other is somebody else's: it is told what that means, and left alone.

// heldByMPS are the cards whose compute mode is carve's, or may be; nil where that can't be
// told of any.
func (a *Agent) heldByMPS() map[string]bool {
	dir := a.mpsDir()
	uuids, err := dir.Cards()
	if err != nil {
		return nil
	}
	held := map[string]bool{}
	for _, uuid := range uuids {
		wanted, unread := dir.IsWanted(uuid)
		s, err := dir.State(uuid)
		held[uuid] = wanted || unread != nil || err != nil || !s.Idle()
	}
	return held
}

// judgeModes leaves of the cards' compute modes those that somebody else has set, says of
// these what they mean, and takes cards that nobody can use out of use. before are the
// cards that MPS held before the modes were read.
func (a *Agent) judgeModes(cards []gpu.Card, before map[string]bool) {
	after := a.heldByMPS()
	foreign := map[string]gpu.ComputeMode{}
	for i := range cards {
		c := &cards[i]
		mode := c.ComputeMode
		c.ComputeMode = ""
		if before == nil || after == nil || before[c.UUID] || after[c.UUID] || c.Fault != "" || meaning(mode) == "" {
			continue
		}
		c.ComputeMode, foreign[c.UUID] = mode, mode
		sentence := meaning(mode) + fmt.Sprintf(", until `nvidia-smi -i %d -c DEFAULT`", c.Index)
		if mode == gpu.ComputeProhibited {
			c.Fault = sentence
		}
		a.mu.Lock()
		said := a.foreignModes[c.UUID] == mode
		a.mu.Unlock()
		if said {
			continue
		}
		a.Log.Warn("a card's compute mode isn't DEFAULT, and carve hasn't set it", "card", c.UUID, "index", c.Index, "mode", mode)
		a.nodeEvent(corev1.EventTypeWarning, reasonComputeMode, fmt.Sprintf("card %d (%s): %s", c.Index, c.UUID, sentence))
	}
	a.mu.Lock()
	a.foreignModes = foreign
	a.mu.Unlock()
}

// meaning says what it means for a card that somebody else has set its compute mode; ""
// where it means nothing.
func meaning(mode gpu.ComputeMode) string {
	switch mode {
	case gpu.ComputeProhibited:
		return "its compute mode is PROHIBITED, which carve hasn't set: no program can use it"
	case gpu.ComputeExclusiveProcess:
		return "its compute mode is EXCLUSIVE_PROCESS, which carve hasn't set: one process at a time can use it, and all others get CUDA_ERROR_DEVICE_UNAVAILABLE"
	}
	return ""
}
