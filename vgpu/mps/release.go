package mps

import (
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// ErrKept is of a node on which a keeper runs: what there is to do is its work.
var ErrKept = errors.New("a keeper runs on this node")

// Release gives a card back to everybody that a keeper left which isn't there any more:
// what is left of its daemon is ended, its compute mode is DEFAULT again, and state.json
// says so. A card whose daemon is wanted, or that is free of MPS, is left as it is. No
// keeper starts meanwhile. It may be called again after it failed, or died.
func Release(ctx context.Context, config Config, uuid string) error {
	k := New(config)
	lock, err := os.OpenFile(k.Dir.lockFile(), os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return fmt.Errorf("give card %s back: %w", uuid, err)
	}
	defer lock.Close()
	switch err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); {
	case errors.Is(err, unix.EWOULDBLOCK):
		return ErrKept
	case err != nil:
		return fmt.Errorf("give card %s back: lock %s: %w", uuid, lock.Name(), err)
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
