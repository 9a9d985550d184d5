package nvidiaconfig

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/v1alpha1"
)

// Card is what is needed of one card of the node.
type Card struct {
	Index       int
	UUID, Model string
	// Major is the major number of its compute capability, 0 where it isn't known.
	Major int
	// MemoryMiB is what can be handed out of it, 0 where it isn't known.
	MemoryMiB int64
	// MIG is true where it is cut into instances.
	MIG bool
}

// Apply says which of the node's cards are given in replicas, by UUID. Warnings name
// what the file says of cards that the node doesn't have, or that can't be given so. The
// error says why the file can't be meant for these cards.
func (c Config) Apply(cards []Card) (sharing map[string]v1alpha1.Sharing, warnings []string, err error) {
	cards = slices.SortedFunc(slices.Values(cards), func(a, b Card) int { return cmp.Compare(a.Index, b.Index) })
	sharing = map[string]v1alpha1.Sharing{}
	said := map[string]string{} // by UUID, where in the file
	var faults []error
	for _, e := range c.entries {
		chosen, missing := e.choose(cards)
		for _, m := range missing {
			warnings = append(warnings, e.at+": "+m)
		}
		for _, card := range chosen {
			name := fmt.Sprintf("card %d (%s)", card.Index, card.UUID)
			switch {
			case said[card.UUID] != "":
				faults = append(faults, fmt.Errorf("%s: %s has replicas by %s already; name each card once", e.at, name, said[card.UUID]))
				continue
			case card.MIG:
				warnings = append(warnings, fmt.Sprintf("%s: %s is in MIG mode, so it has no replicas", e.at, name))
				continue
			case e.mode == api.ModeMPS && e.replicas > api.MPSClients(card.Major):
				faults = append(faults, fmt.Errorf("%s.replicas: %d, and an MPS server on %s, a %s, takes %d clients at most", e.at, e.replicas, name, card.Model, api.MPSClients(card.Major)))
				continue
			}
			if each := card.MemoryMiB / int64(e.replicas); e.mode == api.ModeMPS && card.MemoryMiB > 0 && each < contextMiB {
				warnings = append(warnings, fmt.Sprintf("%s: a replica of %s, a %s, has %d MiB, which may not hold the context of one process: programs that get one may fail at their start", e.at, name, card.Model, each))
			}
			said[card.UUID] = e.at
			sharing[card.UUID] = v1alpha1.Sharing{Mode: string(e.mode), Replicas: int32(e.replicas), FailRequestsGreaterThanOne: e.one}
		}
	}
	if len(faults) > 0 {
		return nil, warnings, errors.Join(faults...)
	}
	return sharing, warnings, nil
}

// choose finds the cards that an entry means, and says what it doesn't find.
func (e entry) choose(cards []Card) (chosen []Card, missing []string) {
	switch {
	case e.all:
		return cards, nil
	case e.count > 0:
		if e.count > len(cards) {
			missing = append(missing, fmt.Sprintf("the first %d cards are meant, and the node has %d", e.count, len(cards)))
		}
		return cards[:min(e.count, len(cards))], missing
	}
	for _, s := range e.list {
		at := slices.IndexFunc(cards, func(c Card) bool { return c.UUID == s || strconv.Itoa(c.Index) == s })
		switch {
		case at < 0:
			missing = append(missing, fmt.Sprintf("the node has no card %s", s))
		case slices.ContainsFunc(chosen, func(c Card) bool { return c.UUID == cards[at].UUID }):
			missing = append(missing, fmt.Sprintf("%s is a card that the list names before", s))
		default:
			chosen = append(chosen, cards[at])
		}
	}
	return chosen, missing
}
