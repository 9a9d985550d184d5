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
	// replicas are those of the cards that NVIDIA's configuration divides, by UUID.
	replicas map[string]int
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
	for name := range new.Containers {
		if old.Containers[name] == nil {
			return fmt.Errorf("the grant of generation %d has cards for container %s, which has none in force: a resize changes amounts only", new.Generation, name)
		}
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
		for _, cg := range cards {
			card, ok := n.cards[cg.Card]
			switch {
			case !ok:
				return fmt.Errorf("the grant names card %s, which this node doesn't have", cg.Card)
			case card.Fault != "" && !renewed:
				return fmt.Errorf("card %s can't be used: %s", cg.Card, card.Fault)
			case cg.Mode != api.ModeExclusive && !cg.Mode.Share():
				return fmt.Errorf("container %s was granted card %s in mode %s, which this agent doesn't serve", name, cg.Card, cg.Mode)
			case cg.Mode != cards[0].Mode:
				return fmt.Errorf("container %s was granted cards in modes %s and %s at once: its driver libraries can be of one kind only", name, cards[0].Mode, cg.Mode)
			case card.MIGMode == "enabled" && (cg.Mode == api.ModeMPS || cg.Mode == api.ModeTimeslice):
				return fmt.Errorf("container %s was granted card %s in mode %s, and the card is in MIG mode", name, cg.Card, cg.Mode)
			}
		}
	}
	if err := n.oneMode(c, renewed); err != nil {
		return err
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
	clients := map[string]bool{} // the cards that are to be shared under MPS
	for _, cards := range c.grant.Containers {
		for _, cg := range cards {
			clients[cg.Card] = clients[cg.Card] || cg.Mode == api.ModeMPS
		}
	}
	for uuid, want := range peaks(c.grant, order) {
		card, taken := n.cards[uuid], others[uuid]
		replicas, divided := n.replicas[uuid]
		slots := taken.slots + want.slots
		switch most := api.MPSClients(card.ComputeMajor); {
		case renewed && want.memMiB <= now[uuid].memMiB && want.cores <= now[uuid].cores:
		case taken.whole:
			return fmt.Errorf("card %s is held whole by another pod of this node", uuid)
		case want.whole && taken != (amount{}):
			return fmt.Errorf("card %s can't be handed out whole: other pods of this node hold %d MiB of it", uuid, taken.memMiB)
		case taken.memMiB+want.memMiB > card.MemoryMiB():
			return fmt.Errorf("card %s has %d MiB, %d are in use by other pods of this node and the grant takes %d", uuid, card.MemoryMiB(), taken.memMiB, want.memMiB)
		case taken.cores+want.cores > 100:
			return fmt.Errorf("card %s has %d percent of its compute in use by other pods of this node and the grant takes %d", uuid, taken.cores, want.cores)
		case renewed && want.slots <= now[uuid].slots || want.whole:
		case divided && slots > replicas:
			return fmt.Errorf("card %s has %d replicas, %d are in use by other pods of this node and the grant takes %d", uuid, replicas, taken.slots, want.slots)
		case clients[uuid] && slots > most:
			return fmt.Errorf("an MPS server takes %d clients on card %s, %d are other pods' of this node and the grant takes %d", most, uuid, taken.slots, want.slots)
		}
	}
	return nil
}

// oneMode checks that each card is shared in one mode: an MPS server keeps everybody
// else off its card, and whoever has a slice of a card's time is held to nothing. It
// also refuses to change what nobody could put in force.
func (n node) oneMode(c candidate, renewed bool) error {
	mode := map[string]api.Mode{}
	for uid, r := range n.held {
		if uid == c.uid {
			continue
		}
		for _, cards := range r.Grant.Containers {
			for _, cg := range cards {
				if cg.Mode.Share() {
					mode[cg.Card] = cg.Mode
				}
			}
		}
	}
	for name, cards := range c.grant.Containers {
		has := n.held[c.uid].Grant.Containers[name]
		for i, cg := range cards {
			if !cg.Mode.Share() {
				continue
			}
			if other := mode[cg.Card]; other != "" && other != cg.Mode {
				return fmt.Errorf("container %s was granted card %s in mode %s, and the card is shared in mode %s: one mode at a time", name, cg.Card, cg.Mode, other)
			}
			mode[cg.Card] = cg.Mode
			if renewed && cg.Mode != api.ModeVGPU && (i >= len(has) || cg != has[i]) {
				return fmt.Errorf("container %s holds card %s in mode %s, whose amounts can't change while it runs: what a client of MPS gets is fixed at its start, and nothing holds a slice of time", name, cg.Card, cg.Mode)
			}
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
