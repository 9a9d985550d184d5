package agent

import (
	"errors"
	"maps"
	"slices"
	"strings"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/v1alpha1"
	"github.com/carve-gpu/carve/vgpu/gpu"
)

// Layer is something beside the library that holds containers to their memory, and
// that a program can't go past. The library is in every share; where no layer is in
// force, its limits are advice to a hostile program.
//
// The methods may be called concurrently. They may take milliseconds, and none of
// them waits for a container.
type Layer interface {
	// Name is the layer's in reports: "dmem".
	Name() string
	// Look says of each card, by UUID, why it can't be held here, nil for one that
	// can. It is asked at the start and with each look at the cards; its sentences
	// stay the same while nothing changes.
	Look(cards []gpu.Card) map[string]error
	// Hold puts limits in force for a container, in bytes by card; it is called
	// again and again and writes what isn't so. Its errors are gpu.ErrEnded for a
	// container that has ended, and gpu.ErrInUse where more is in use than the limit.
	Hold(pid int, id string, limits map[string]uint64) error
	// Used is what a container holds of each card, as this layer counts it. Cards
	// that it doesn't know are left out.
	Used(pid int, id string) (map[string]uint64, error)
}

// maxWhy bounds a sentence of a layer's in the report.
const maxWhy = 256

// layerState is what is known of one layer.
type layerState struct {
	Layer
	// cards says why a card can't be held; it has all cards that were looked at.
	cards map[string]string
}

// holds reports whether a layer can hold a card at all.
func (l layerState) holds(card string) bool {
	why, known := l.cards[card]
	return known && why == ""
}

// lookAtLayers asks all layers which cards they can hold.
func (a *Agent) lookAtLayers(cards []gpu.Card) {
	changed := false
	for i, layer := range a.Layers {
		now := map[string]string{}
		for uuid, err := range layer.Look(cards) {
			now[uuid] = ""
			if err != nil {
				now[uuid] = err.Error()
			}
		}
		a.mu.Lock()
		if len(a.layers) != len(a.Layers) {
			a.layers = make([]layerState, len(a.Layers))
		}
		was := a.layers[i].cards
		a.layers[i] = layerState{layer, now}
		a.mu.Unlock()
		if !maps.Equal(was, now) {
			changed = true
			for _, uuid := range slices.Sorted(maps.Keys(now)) {
				if now[uuid] != "" && was[uuid] != now[uuid] {
					a.Log.Info("a layer doesn't hold a card", "layer", layer.Name(), "card", uuid, "why", now[uuid])
				}
			}
		}
	}
	if changed {
		a.stir()
		a.report()
	}
}

// inForce are the limits of a container by card. While they are being changed it is
// the smaller of both, until the new ones are in the journal.
func (h *holding) inForce(container string) map[string]uint64 {
	g := h.Grant
	switch {
	case h.granted != nil:
		g = h.granted.Grant
	case h.next != nil:
		g = merged(h.Grant, h.next.Grant, func(old, new int64) int64 { return min(old, new) })
	}
	out := map[string]uint64{}
	for _, c := range g.Containers[container] {
		if c.Mode == api.ModeVGPU {
			out[c.Card] = uint64(c.MemMiB) << 20
		}
	}
	return out
}

// holdContainer puts the limits of a running container in force in all layers.
func (a *Agent) holdContainer(id string) error {
	// One at a time, so that an older limit never comes after a newer one.
	a.holdMu.Lock()
	defer a.holdMu.Unlock()
	a.mu.Lock()
	u, ok := a.containers[id]
	h := a.held[u.uid]
	if !ok || h == nil || !u.adjusted || u.hostPID == 0 && !u.started {
		a.mu.Unlock()
		return nil
	}
	limits := h.inForce(u.container)
	layers := slices.Clone(a.layers)
	a.mu.Unlock()
	var faults []error
	for _, l := range layers {
		mine := maps.Clone(limits)
		maps.DeleteFunc(mine, func(card string, _ uint64) bool { return !l.holds(card) })
		if len(mine) == 0 {
			a.noteHeld(id, l.Name(), nil, nil)
			continue
		}
		err := l.Hold(u.hostPID, id, mine)
		if errors.Is(err, gpu.ErrEnded) {
			continue
		}
		a.noteHeld(id, l.Name(), mine, err)
		faults = append(faults, err)
	}
	return errors.Join(faults...)
}

// noteHeld remembers on which cards a layer holds a container.
func (a *Agent) noteHeld(id, layer string, cards map[string]uint64, err error) {
	why := ""
	if err != nil {
		why = err.Error()
		if len(why) > maxWhy {
			why = strings.ToValidUTF8(why[:maxWhy], "") + "…"
		}
	}
	a.mu.Lock()
	u, ok := a.containers[id]
	was, known := u.layers[layer]
	now := held{fault: why}
	if err == nil {
		now.cards = slices.Sorted(maps.Keys(cards))
	}
	changed := ok && (!known || was.fault != now.fault || !slices.Equal(was.cards, now.cards))
	if changed {
		// A new map, as others may have the old one.
		u.layers = maps.Clone(u.layers)
		if u.layers == nil {
			u.layers = map[string]held{}
		}
		u.layers[layer] = now
		a.containers[id] = u
	}
	a.mu.Unlock()
	if changed && why != "" {
		a.Log.Warn("a layer doesn't hold a container; its library does", "layer", layer, "id", id, "error", why)
	}
	if changed {
		a.report()
	}
}

// held is what a layer does for one container.
type held struct {
	cards []string
	fault string
}

// holdAll puts the limits of all running containers in force, where they aren't.
func (a *Agent) holdAll(uids ...string) error {
	if len(a.Layers) == 0 {
		return nil
	}
	a.mu.Lock()
	var ids []string
	for id, u := range a.containers {
		if u.adjusted && (len(uids) == 0 || slices.Contains(uids, u.uid)) {
			ids = append(ids, id)
		}
	}
	a.mu.Unlock()
	slices.Sort(ids)
	var faults []error
	for _, id := range ids {
		faults = append(faults, a.holdContainer(id))
	}
	return errors.Join(faults...)
}

// layersOf are the layers in force on a card, strongest first, and why none beside
// the library is. A layer that doesn't hold each container that runs with a share
// of the card isn't in force. a.mu is held.
func (a *Agent) layersOf(card string) (names []string, why string) {
	var reasons []string
	for _, l := range a.layers {
		if reason, known := l.cards[card]; !known || reason != "" {
			if reason == "" {
				reason = "it hasn't been looked at yet"
			}
			reasons = append(reasons, l.Name()+": "+reason)
			continue
		}
		fault := ""
		if a.sharedBy(card, api.ModeMPS) {
			fault = "in mode mps the memory is the MPS server's, and nobody else knows whose part it is"
		}
		for _, u := range a.containers {
			h := a.held[u.uid]
			if !u.adjusted || h == nil {
				continue
			}
			if _, shares := h.inForce(u.container)[card]; !shares {
				continue
			}
			switch by := u.layers[l.Name()]; {
			case slices.Contains(by.cards, card):
			// One that nobody has tried to hold yet is about to be.
			case by.fault != "" && (fault == "" || by.fault < fault):
				fault = by.fault
			}
		}
		if fault != "" {
			reasons = append(reasons, l.Name()+": "+fault)
			continue
		}
		names = append(names, l.Name())
	}
	if names != nil {
		return append(names, v1alpha1.LayerLibrary), ""
	}
	if reasons == nil {
		reasons = []string{"no other layer is set up"}
	}
	return []string{v1alpha1.LayerLibrary}, strings.Join(reasons, "; ")
}

// sharedBy reports whether a card has slices in a mode. a.mu is held.
func (a *Agent) sharedBy(card string, mode api.Mode) bool {
	for _, h := range a.held {
		for _, cards := range h.Grant.Containers {
			if slices.ContainsFunc(cards, func(c api.CardGrant) bool { return c.Card == card && c.Mode == mode }) {
				return true
			}
		}
	}
	return false
}

// usedByLayer is what containers hold of a card as the first layer that counts them
// says; false where none does. Where a layer counts, the driver's figures of
// processes aren't used: they are of the same memory.
func (a *Agent) usedByLayer(s share, card string) (uint64, bool) {
	a.mu.Lock()
	layers := slices.Clone(a.layers)
	pids := map[string]int{}
	for _, id := range s.ids {
		pids[id] = a.containers[id].hostPID
	}
	a.mu.Unlock()
	for _, l := range layers {
		if !l.holds(card) {
			continue
		}
		var sum uint64
		all := true
		for id, pid := range pids {
			used, err := l.Used(pid, id)
			bytes, counted := used[card]
			if err != nil || !counted {
				all = false
				break
			}
			sum += bytes
		}
		if all && len(pids) > 0 {
			return sum, true
		}
	}
	return 0, false
}

// enforcement is the strongest layer that is in force on all cards, and otherwise
// why there is none.
func enforcement(cards []v1alpha1.Card, reasons []string) (name, why string) {
	if len(cards) == 0 {
		return v1alpha1.EnforcementAdvisory, ""
	}
	for _, layer := range cards[0].Layers {
		if layer == v1alpha1.LayerLibrary {
			break
		}
		if !slices.ContainsFunc(cards, func(c v1alpha1.Card) bool { return !slices.Contains(c.Layers, layer) }) {
			return layer, ""
		}
	}
	why = strings.Join(reasons, "; ")
	if len(why) > maxReasons {
		why = strings.ToValidUTF8(why[:maxReasons], "") + "…"
	}
	return v1alpha1.EnforcementAdvisory, why
}

// maxReasons bounds them all.
const maxReasons = 1000
