package agent

import (
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/vgpu/gpu"
	"github.com/carve-gpu/carve/vgpu/mps"
)

// stuckCard is a driver that doesn't come back from one card once it is stuck.
type stuckCard struct {
	*twoCards
	card string

	mu        sync.Mutex
	goOn      chan struct{} // nil while it answers
	waits     int           // calls that didn't come back
	releasing bool          // calls of compute modes alone
}

func (c *stuckCard) stick(computeModes bool) (goOn func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	on := make(chan struct{})
	c.goOn, c.releasing = on, computeModes
	return sync.OnceFunc(func() {
		c.mu.Lock()
		c.goOn = nil
		c.mu.Unlock()
		close(on)
	})
}

func (c *stuckCard) await(uuid string, computeMode bool) {
	c.mu.Lock()
	on := c.goOn
	stuck := on != nil && uuid == c.card && computeMode == c.releasing
	if stuck {
		c.waits++
	}
	c.mu.Unlock()
	if stuck {
		<-on
	}
}

func (c *stuckCard) waiting() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.waits
}

func (c *stuckCard) ComputeMode(uuid string) (gpu.ComputeMode, error) {
	c.await(uuid, true)
	return c.twoCards.ComputeMode(uuid)
}

func (c *stuckCard) Occupancy(uuid string) (gpu.Sample, error) {
	c.await(uuid, false)
	return c.twoCards.Occupancy(uuid)
}

func startStuck(t *testing.T, change ...func(*Config)) (*testNode, *stuckCard) {
	t.Helper()
	door := &stuckCard{card: cardA}
	n := startNode(t, append(change, func(c *Config) {
		open := c.OpenHardware
		c.OpenHardware = func() (Hardware, error) {
			cards, err := open()
			if err != nil {
				return nil, err
			}
			door.twoCards = cards.(*twoCards)
			return door, nil
		}
	})...)
	return n, door
}

// A card from which the driver doesn't come back while it is given back holds up no other: neither
// one that is given back at the same time, nor one that a new keeper serves.
func TestACardThatHangsHoldsUpNoOther(t *testing.T) {
	n, door := startStuck(t)
	n.link()
	k := withKeeper(n)
	for _, card := range []string{cardA, cardB} {
		k.says(card, mps.State{Epoch: 1, Exclusive: true})
		if err := n.cards.SetComputeMode(card, gpu.ComputeExclusiveProcess); err != nil {
			t.Fatal(err)
		}
	}
	goOn := door.stick(true)
	t.Cleanup(goOn) // before the agent is stopped
	k.lock.Close()
	eventually(t, "the driver doesn't come back", func() bool { return door.waiting() > 0 })
	mode := func(card string) gpu.ComputeMode { m, _ := n.cards.ComputeMode(card); return m }
	eventually(t, "the other card is given back", func() bool {
		s, err := n.mpsDir().State(cardB)
		return err == nil && s.Idle() && mode(cardB) == gpu.ComputeDefault
	})
	if waits := door.waiting(); waits != 1 || mode(cardA) != gpu.ComputeExclusiveProcess {
		t.Errorf("%d calls wait, compute mode is %s", waits, mode(cardA))
	}
	// A keeper that comes now serves the other card.
	k.begin()
	n.api.setPod(podWith(t, "b", grantOf("b", 1, modeShare(cardB, 1000, 10, api.ModeMPS))))
	n.api.setPod(podWith(t, "a", grantOf("a", 1, modeShare(cardA, 1000, 10, api.ModeMPS))))
	k.wanted(cardB, true)
	k.says(cardB, serving(2))
	eventually(t, "a container may start there", func() bool { return n.prepared("b", "app") })
	if is, err := n.mpsDir().IsWanted(cardA); is || err != nil {
		t.Errorf("a card is wanted while it is being given back (%v)", err)
	}
	goOn()
	k.wanted(cardA, true)
	k.says(cardA, serving(2))
	eventually(t, "the card that hung serves", func() bool { return n.prepared("a", "app") })
}

// The same while it is asked who keeps a card from its next server.
func TestACardThatHangsWhileItIsDownHoldsUpNoOther(t *testing.T) {
	n, door := startStuck(t, func(c *Config) { c.grace = time.Millisecond })
	n.link()
	k := withKeeper(n)
	for uid, card := range map[string]string{"a": cardA, "b": cardB} {
		n.api.setPod(podWith(t, uid, grantOf(uid, 1, modeShare(card, 1000, 10, api.ModeMPS))))
		k.wanted(card, true)
		k.says(card, serving(1))
		eventually(t, uid+" is prepared", func() bool { return n.prepared(uid, "app") })
	}
	a, b := n.runBox("a", "app"), n.runBox("b", "app")
	n.cards.mu.Lock()
	n.cards.processes = []gpu.Process{{PID: a.cmd.Process.Pid}, {PID: b.cmd.Process.Pid}}
	n.cards.mu.Unlock()
	goOn := door.stick(false)
	t.Cleanup(goOn)
	k.says(cardA, down(1, "the MPS daemon (process 77) has ended: signal: killed"))
	eventually(t, "the driver doesn't come back", func() bool { return door.waiting() > 0 })
	k.says(cardB, down(1, "the MPS daemon (process 78) has ended: signal: killed"))
	eventually(t, "the other card's pod is told", func() bool { return strings.Contains(n.api.said(), "pod-b MPSDown: ") })
	eventually(t, "its program is stopped", b.dead)
	n.gone(b)
	k.says(cardB, serving(2))
	eventually(t, "it hears that it can start", func() bool {
		return strings.Contains(n.api.said(), "pod-b MPSRestarted: card 1 ("+cardB+"): its MPS daemon serves again")
	})
	if a.dead() {
		t.Error("one was stopped of which nobody knows whether it has the card")
	}
	goOn()
	eventually(t, "the program on the card that hung is stopped", a.dead)
	n.gone(a)
}
