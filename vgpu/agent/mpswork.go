package agent

import (
	"context"
	"errors"
	"time"

	"github.com/carve-gpu/carve/vgpu/mps"
)

// What takes a card's driver, or waits for its processes to end, is done beside the look
// at all cards, by a goroutine for each: a card that hangs holds up no other.

// cardWork is what is done on one card.
type cardWork int

const (
	// releasing gives it back, stopping ends programs that keep it from its next server.
	releasing cardWork = iota + 1
	stopping
)

// releaseEvery is how long a card that can't be given back is left alone.
const releaseEvery = 10 * time.Second

// onCard has work done on a card unless something is under way there. do reports whether
// the cards are to be looked at again at once.
func (a *Agent) onCard(uuid string, work cardWork, do func() (again bool)) {
	a.mu.Lock()
	busy := a.cardWork[uuid] != 0
	if !busy {
		a.cardWork[uuid] = work
	}
	a.mu.Unlock()
	if busy {
		return
	}
	a.cardWorkers.Go(func() {
		again := false
		defer func() {
			if p := recover(); p != nil {
				a.Log.Error("work on a card in mode mps panicked", "card", uuid, "panic", p, "stack", stack())
			}
			a.mu.Lock()
			delete(a.cardWork, uuid)
			a.mu.Unlock()
			if again {
				a.stirMPS()
			}
		}()
		again = do()
	})
}

// releaseCards gives back the cards that a keeper left which isn't there any more, those
// that nobody wants in mode mps: they would be held to one process for ever.
func (a *Agent) releaseCards(now mpsState, want map[string]bool) {
	a.mu.Lock()
	door, uuids := a.hardware.door, a.hardware.cards()
	var left []string
	for uuid, c := range now.cards {
		_, here := uuids[uuid]
		free := c.fault == "" && c.state.Idle() && c.state.Error == ""
		if !want[uuid] && !c.wanted && !free && here && !time.Now().Before(a.releaseNext[uuid]) {
			left = append(left, uuid)
		}
	}
	a.mu.Unlock()
	if door == nil {
		return
	}
	for _, uuid := range left {
		a.onCard(uuid, releasing, func() bool { return a.releaseCard(uuid, door) })
	}
}

// releaseCard gives one card back and reports whether it did.
func (a *Agent) releaseCard(uuid string, door Hardware) bool {
	err := mps.Release(context.Background(), mps.Config{
		Dir: a.mpsDir(), Root: a.Root, Log: a.Log, OpenModes: func() (mps.ComputeModes, error) { return door, nil },
	}, uuid)
	switch {
	case err == nil:
		a.Log.Info("gave a card back that a keeper of MPS had left", "card", uuid)
		return true
	case !errors.Is(err, mps.ErrKept):
		a.Log.Error("a card that a keeper of MPS left can't be given back; trying again", "error", err)
		a.mu.Lock()
		a.releaseNext[uuid] = time.Now().Add(releaseEvery)
		a.mu.Unlock()
	}
	return false
}
