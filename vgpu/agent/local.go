package agent

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/v1alpha1"
)

// A pod can come past the extender: with nodeName set, or by a scheduler that
// doesn't know it. Such a pod carries no grant, and so gets no card, unless the
// operator lets the node choose itself (Config.Place).

// Room is one card as the node's own ledger has it, by index.
type Room struct {
	UUID, Model     string
	Index           int
	MemMiB          int64
	Slots           int
	UsedMiB         int64
	UsedCores       int
	UsedSlots       int
	Touched, Whole  bool // someone is on it; one pod holds it whole
	Unfit, Cordoned bool // not to be handed out: of itself, by the operator
	MIG             bool
	// Mode is that of the shares on it, Modes are those in which it can be given
	// beside vgpu and exclusive, Sharing what NVIDIA's configuration says of it.
	Mode  api.Mode
	Modes []string
	// MPSClients is how many clients an MPS server takes there, 0 where it isn't given so.
	MPSClients int
	Sharing    *v1alpha1.Sharing
}

// LocalPod is a pod that the node is to place on its own cards.
type LocalPod struct {
	UID, Node string
	Request   api.Request
	Cards     []Room
}

// placeHere chooses cards for a pod without a grant, books them, and puts the
// slices in place.
func (a *Agent) placeHere(p pod) error {
	if p.requestFault != nil {
		a.refuse(p.uid, p.requestFault.Error())
		return nil
	}
	if p.request.Empty() {
		return nil
	}
	a.mu.Lock()
	if !a.watched || !a.hardware.known {
		a.mu.Unlock()
		return errors.New("a pod came past the extender, and this node doesn't know yet what its cards hold")
	}
	n := a.ledger()
	var grant api.Grant
	err := a.guarded(func() (err error) {
		grant, err = a.Place(LocalPod{UID: p.uid, Node: a.Node, Request: p.request, Cards: a.rooms(n)})
		if err == nil {
			err = n.admit(candidate{grant: grant, uid: p.uid, order: p.order})
		}
		return err
	})
	if err != nil {
		a.mu.Unlock()
		a.refuse(p.uid, fmt.Sprintf("the pod came past carve's scheduler extender, and on this node it can't be placed: %v", err))
		return nil
	}
	r := record{Version: recordVersion, State: stateHeld, Namespace: p.namespace, Pod: p.name, Grant: grant, Order: p.order, Local: true}
	a.Log.Info("a pod came past the extender and was given cards by this node", "pod", p.namespace+"/"+p.name, "uid", p.uid)
	return a.bookAndUnlock(r)
}

// ledger is what this node's cards hold: the slices in place, and the grants
// that the watch has shown and that are about to be put in place. a.mu is held.
func (a *Agent) ledger() node {
	n := node{name: a.Node, cards: a.hardware.cards(), replicas: a.replicas(), held: map[string]record{}}
	for uid, p := range a.pods {
		if p.grant == "" || p.over || a.refused[uid] != "" {
			continue
		}
		if g, err := api.DecodeGrant(p.grant); err == nil && g.UID == uid && g.Node == a.Node {
			n.held[uid] = record{Grant: g, Order: p.order}
		}
	}
	for uid, h := range a.held {
		n.held[uid] = h.booked()
	}
	return n
}

// rooms lists the cards with what is held of them. a.mu is held.
func (a *Agent) rooms(n node) []Room {
	used, mode := map[string]amount{}, map[string]api.Mode{}
	for _, r := range n.held {
		for _, cards := range r.Grant.Containers {
			for _, c := range cards {
				if c.Mode.Share() {
					mode[c.Card] = joinModes(mode[c.Card], c.Mode)
				}
			}
		}
		for card, am := range peaks(r.Grant, r.Order) {
			used[card] = used[card].plus(am)
		}
	}
	slots := api.SlotsPerCard
	if a.SlotsPerCard > 0 {
		slots = a.SlotsPerCard
	}
	if a.wishedSlots > 0 {
		slots = int(a.wishedSlots)
	}
	var out []Room
	for _, c := range a.hardware.inventory.Cards {
		u := used[c.UUID]
		out = append(out, Room{
			UUID: c.UUID, Model: c.Model, Index: c.Index, MemMiB: c.MemoryMiB(), Slots: a.slotsOf(c.UUID, slots),
			UsedMiB: u.memMiB, UsedCores: u.cores, UsedSlots: u.slots,
			Touched: u != (amount{}), Whole: u.whole,
			Unfit: c.Fault != "" || c.Lost, Cordoned: slices.Contains(a.cordoned, c.UUID), MIG: c.MIGMode == "enabled",
			Mode: mode[c.UUID], Modes: a.modesOf(c), MPSClients: int(a.clientsOf(c)), Sharing: a.sharingOf(c.UUID),
		})
	}
	return out
}

// bookAndUnlock books the first record of a pod, which was checked, writes it to
// the journal, and puts it in place. a.mu is held and is released here: what is
// booked before it is written is seen by a grant that is checked meanwhile.
func (a *Agent) bookAndUnlock(r record) error {
	uid := r.Grant.UID
	a.held[uid] = &holding{record: r, used: map[string]bool{}}
	delete(a.refused, uid)
	a.mu.Unlock()
	a.stirMPS()

	a.stepped("journal-hold")
	if err := a.journal.write(r); err != nil {
		a.mu.Lock()
		delete(a.held, uid)
		a.mu.Unlock()
		return err
	}
	a.stepped("journal-held")
	return a.putInPlace(r)
}

// lookAgain queues the pods that this node refused to place: room appeared.
func (a *Agent) lookAgain() {
	if a.Place == nil {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	for uid := range maps.Keys(a.refused) {
		if p, ok := a.pods[uid]; ok && p.grant == "" {
			a.queue.Add(uid)
		}
	}
}
