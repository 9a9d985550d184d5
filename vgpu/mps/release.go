package mps

import (
	"context"
	"errors"
	"fmt"
)

// ErrKept is of a node on which a keeper runs: what there is to do is its work.
var ErrKept = errors.New("a keeper runs on this node")

// Release gives a card back to everybody that a keeper left which isn't there any more:
// what is left of its daemon is ended, its compute mode is DEFAULT again, and state.json
// says so. A card whose daemon is wanted, or that is free of MPS, is left as it is. A
// keeper that begins meanwhile waits for this card, and for no other. It may be called
// again after it failed, or died; for several cards at once, and once at a time for each.
func Release(ctx context.Context, config Config, uuid string) error {
	k := New(config)
	lock, err := k.Dir.lockCard(uuid)
	switch {
	case errors.Is(err, errBusy):
		return ErrKept
	case err != nil:
		return fmt.Errorf("give card %s back: %w", uuid, err)
	}
	defer lock.Close()
	// After that: a keeper that isn't there now finds the card locked.
	if k.Dir.KeeperRuns() {
		return ErrKept
	}
	c := k.card(uuid)
	wanted, err := k.Dir.IsWanted(uuid)
	if err == nil && !wanted {
		err = c.adopt()
	}
	if err == nil && !wanted && !(c.state.Idle() && c.state.Error == "") {
		err = c.quit(ctx)
	}
	if err != nil {
		return fmt.Errorf("give card %s back: %w", uuid, err)
	}
	return nil
}
