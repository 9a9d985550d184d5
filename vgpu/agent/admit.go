package agent

import (
	"fmt"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/vgpu/gpu"
)

// amount is what a pod holds of one card.
type amount struct {
	memMiB int64
	cores  int
	slots  int
	whole  bool
}

func (a amount) plus(b amount) amount {
	return amount{a.memMiB + b.memMiB, a.cores + b.cores, a.slots + b.slots, a.whole || b.whole}
}

func (a amount) max(b amount) amount {
	return amount{max(a.memMiB, b.memMiB), max(a.cores, b.cores), max(a.slots, b.slots), a.whole || b.whole}
}

// peaks is the most that a pod holds of each card over its life: init
// containers run one after another beside the sidecars that started before
// them, app containers run together beside all sidecars.
func peaks(g api.Grant, order []podContainer) map[string]amount {
	sidecars, apps, out := map[string]amount{}, map[string]amount{}, map[string]amount{}
	for _, c := range order {
		for _, cg := range g.Containers[c.Name] {
			a := amount{cg.MemMiB, cg.Cores, 1, cg.Mode == api.ModeExclusive}
			switch c.Kind {
			case api.Init:
				out[cg.Card] = out[cg.Card].max(sidecars[cg.Card].plus(a))
			case api.Sidecar:
				sidecars[cg.Card] = sidecars[cg.Card].plus(a)
				out[cg.Card] = out[cg.Card].max(sidecars[cg.Card])
			default:
				apps[cg.Card] = apps[cg.Card].plus(a)
			}
		}
	}
	for card, a := range apps {
		out[card] = out[card].max(sidecars[card].plus(a))
	}
	return out
}

// candidate is a grant that was seen and isn't in force yet.
type candidate struct {
	grant api.Grant
	// uid is the pod that it was found on; order its containers, nil where only
	// the sandbox is known.
	uid   string
	order []podContainer
}

// node is what a grant is checked against.
type node struct {
	name  string
	cards map[string]gpu.Card
	// held are the slices in place, by pod UID.
	held map[string]record
}

// admit says whether a grant may take effect here, in a sentence if not. The
// extender has checked all of this; the node believes nobody, since the
// annotation may be stale, of another pod, or forged.
func (n node) admit(c candidate) error {
	g := c.grant
	switch {
	case g.UID != c.uid:
		return fmt.Errorf("the grant is for pod %.80s, this pod is %s: it was copied or forged", g.UID, c.uid)
	case g.Node != n.name:
		return fmt.Errorf("the grant is for node %.80s, this is %s", g.Node, n.name)
	}
	if err := safeNames(g); err != nil {
		return fmt.Errorf("the grant can't be meant: %w", err)
	}
	for name := range g.Containers {
		if c.order != nil && !contains(c.order, name) {
			return fmt.Errorf("the grant names container %s, which the pod doesn't have", name)
		}
	}
	before, renewed := n.held[c.uid]
	if renewed {
		if err := succeeds(before.Grant, g); err != nil {
			return err
		}
	}
	return n.room(c, renewed)
}

// succeeds says whether a grant may follow another one of the same pod.
func succeeds(old, new api.Grant) error {
	if new.Generation < old.Generation {
		return fmt.Errorf("the grant has generation %d, in force is %d: it is stale", new.Generation, old.Generation)
	}
	if new.Generation == old.Generation {
		return fmt.Errorf("the grant differs from the one in force and has the same generation %d: it is forged, or written twice", new.Generation)
	}
	for name, cards := range old.Containers {
		after := new.Containers[name]
		if len(after) != len(cards) {
			return fmt.Errorf("the grant of generation %d has %d cards for container %s, in force are %d: a resize changes amounts only", new.Generation, len(after), name, len(cards))
		}
		for i := range cards {
			if after[i].Card != cards[i].Card || after[i].Mode != cards[i].Mode {
				return fmt.Errorf("the grant of generation %d moves container %s to another card or mode: a resize changes amounts only", new.Generation, name)
			}
		}
	}
	return nil
}

// room checks the grant against the cards and what others hold of them.
func (n node) room(c candidate, renewed bool) error {
	for name, cards := range c.grant.Containers {
		shares := 0
		for _, cg := range cards {
			card, ok := n.cards[cg.Card]
			switch {
			case !ok:
				return fmt.Errorf("the grant names card %s, which this node doesn't have", cg.Card)
			case card.Fault != "" && !renewed:
				return fmt.Errorf("card %s can't be used: %s", cg.Card, card.Fault)
			case cg.Mode == api.ModeVGPU:
				shares++
			case cg.Mode != api.ModeExclusive:
				return fmt.Errorf("container %s was granted card %s in mode %s, which this agent doesn't serve", name, cg.Card, cg.Mode)
			}
		}
		if shares != 0 && shares != len(cards) {
			return fmt.Errorf("container %s was granted whole cards and shares at once: its driver libraries can be of one kind only", name)
		}
	}
	order := c.order
	if order == nil {
		// Nothing is known of the containers' order, so let all run at once.
		for name := range c.grant.Containers {
			order = append(order, podContainer{Name: name})
		}
	}
	others := map[string]amount{}
	for uid, r := range n.held {
		if uid == c.uid {
			continue
		}
		for card, a := range peaks(r.Grant, r.Order) {
			others[card] = others[card].plus(a)
		}
	}
	// What doesn't grow has its room, also on a card that has become smaller.
	var now map[string]amount
	if renewed {
		now = peaks(n.held[c.uid].Grant, order)
	}
	for uuid, want := range peaks(c.grant, order) {
		card, taken := n.cards[uuid], others[uuid]
		switch {
		case renewed && want.memMiB <= now[uuid].memMiB && want.cores <= now[uuid].cores:
		case taken.whole:
			return fmt.Errorf("card %s is held whole by another pod of this node", uuid)
		case want.whole && taken != (amount{}):
			return fmt.Errorf("card %s can't be handed out whole: other pods of this node hold %d MiB of it", uuid, taken.memMiB)
		case taken.memMiB+want.memMiB > card.MemoryMiB():
			return fmt.Errorf("card %s has %d MiB, %d are in use by other pods of this node and the grant takes %d", uuid, card.MemoryMiB(), taken.memMiB, want.memMiB)
		case taken.cores+want.cores > 100:
			return fmt.Errorf("card %s has %d percent of its compute in use by other pods of this node and the grant takes %d", uuid, taken.cores, want.cores)
		}
	}
	return nil
}

func contains(order []podContainer, name string) bool {
	for _, c := range order {
		if c.Name == name {
			return true
		}
	}
	return false
}
