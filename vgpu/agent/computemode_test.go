package agent

import (
	"strings"
	"testing"

	"github.com/carve-gpu/carve/api/v1alpha1"
	"github.com/carve-gpu/carve/vgpu/gpu"
	"github.com/carve-gpu/carve/vgpu/mps"
)

// A compute mode that carve hasn't set is said, and not changed. A card that nobody can use
// takes nothing.
func TestAComputeModeThatSomebodyElseHasSet(t *testing.T) {
	n := startNode(t)
	n.link()
	k := withKeeper(n)
	mode := func(card string, mode gpu.ComputeMode) {
		t.Helper()
		if err := n.cards.SetComputeMode(card, mode); err != nil {
			t.Fatal(err)
		}
		n.readCards()
	}
	eventually(t, "a report", func() bool { return k.card(cardA).Health.State == v1alpha1.Healthy })
	mode(cardA, gpu.ComputeProhibited)
	mode(cardB, gpu.ComputeExclusiveProcess)
	n.readCards()
	eventually(t, "the report says that it can't be used", func() bool {
		h := k.card(cardA).Health
		return h.State == v1alpha1.Quarantined && h.Reason == "its compute mode is PROHIBITED, which carve hasn't set: no program can use it, until `nvidia-smi -i 0 -c DEFAULT`"
	})
	if h := k.card(cardB).Health; h.State != v1alpha1.Healthy {
		t.Errorf("a card that one process can use is %+v", h)
	}
	eventually(t, "the node's readers are told", func() bool {
		said := n.api.said()
		return strings.Contains(said, nodeName+" ComputeModeSet: card 0 ("+cardA+"): its compute mode is PROHIBITED") &&
			strings.Contains(said, nodeName+" ComputeModeSet: card 1 ("+cardB+"): its compute mode is EXCLUSIVE_PROCESS, which carve hasn't set: one process at a time can use it")
	})
	for _, c := range n.View().Cards {
		if want := map[string]gpu.ComputeMode{cardA: gpu.ComputeProhibited, cardB: gpu.ComputeExclusiveProcess}[c.UUID]; c.ComputeMode != want {
			t.Errorf("card %d is shown in mode %q", c.Index, c.ComputeMode)
		}
	}
	// Without a keeper, too, it is left alone.
	k.lock.Close()
	n.lookAtMPS()
	n.lookAtMPS()
	if a, _ := n.cards.ComputeMode(cardA); a != gpu.ComputeProhibited {
		t.Errorf("the agent set it to %s", a)
	}
	k.begin()
	// Modes of the keeper's are no news.
	k.says(cardB, mps.State{Epoch: 1, Exclusive: true})
	n.readCards()
	k.says(cardA, mps.State{Epoch: 1, Exclusive: true})
	mode(cardA, gpu.ComputeProhibited)
	eventually(t, "it is the keeper's", func() bool { return k.card(cardA).Health.State == v1alpha1.Healthy })
	for _, c := range n.View().Cards {
		if c.ComputeMode != "" {
			t.Errorf("card %d is shown in mode %q", c.Index, c.ComputeMode)
		}
	}
	k.says(cardB, mps.State{Epoch: 1})
	mode(cardB, gpu.ComputeDefault)
	if said := n.api.said(); strings.Count(said, "ComputeModeSet") != 2 {
		t.Errorf("told:\n%s", said)
	}
}
