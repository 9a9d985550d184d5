package agent

import (
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/vgpu/mps"
	"github.com/carve-gpu/carve/vgpu/region"
)

// A program that outlives its MPS server has lost its context for good, and its
// process still has the card, which takes one process: no server can start until that
// has ended. An idle one would never notice, and keep the card down for everybody.

// lostGrace is how long a card's daemon may be down, with a keeper at work on it,
// before the programs that still have the card are stopped. Most end by themselves: they
// get errors from CUDA.
const lostGrace = 10 * time.Second

func (a *Agent) lostGrace() time.Duration {
	if a.grace > 0 {
		return a.grace
	}
	return lostGrace
}

const reasonMPSStopped = "MPSContextLost"

// lostSince is since when, as far as this process knows, a card's daemon has been down
// although a keeper works on it; zero while that isn't so.
func lostSince(was, is mpsCard, unserved string, now time.Time) time.Time {
	switch {
	case is.state.Serves(), !is.wanted, is.state.Epoch == 0, unserved != "":
		return time.Time{}
	case was.lost.IsZero():
		return now
	}
	return was.lost
}

// staysDown reports whether a card's daemon is down as it was when seen was read, and no
// new one has a server: whoever has a context there has one that is lost. The keeper may
// have gone on while others were told and the driver was asked.
func (a *Agent) staysDown(uuid string, seen mps.State) bool {
	is, err := a.mpsDir().State(uuid)
	serves := is.Daemon != nil && is.Daemon.Lives() && slices.ContainsFunc(is.Servers, mps.Process.Lives)
	return err == nil && !is.Serves() && is.Epoch == seen.Epoch && is.Since.Equal(seen.Since) && !serves
}

// stopLost stops the containers whose programs keep a card from its next server, as long
// as things stand as seen says, and returns whom that concerns. One that can't be stopped
// is tried again at the next look.
func (a *Agent) stopLost(uuid string, seen mps.State) []affected {
	type client struct {
		id string
		use
		cards, at int // of how many cards, and which this is
	}
	var all []client
	a.mu.Lock()
	door, name := a.hardware.door, a.cardName(uuid)
	for id, u := range a.containers {
		h := a.held[u.uid]
		if h == nil || !u.adjusted || u.hostPID == 0 {
			continue
		}
		if until := a.named(u.uid).until; !until.IsZero() && time.Until(until) < stopsLong {
			continue // it goes by itself, and may have something to put away
		}
		cards := h.Grant.Containers[u.container]
		if at := slices.IndexFunc(cards, func(c api.CardGrant) bool { return c.Mode == api.ModeMPS && c.Card == uuid }); at >= 0 {
			all = append(all, client{id, u, len(cards), at})
		}
	}
	a.mu.Unlock()
	if len(all) == 0 {
		return nil
	}
	// No context can be made while the daemon is down, so whoever has one had it before.
	// Both the driver and the container's own library may name it: drivers needn't list
	// a client whose server is gone.
	has := map[string]bool{}
	if door != nil {
		if seen, err := door.Occupancy(uuid); err == nil {
			for _, p := range seen.Processes {
				at := slices.IndexFunc(all, func(c client) bool { return c.hostPID == p.PID })
				if at < 0 {
					if groups, err := a.groupsOf(p.PID); err == nil {
						at = slices.IndexFunc(all, func(c client) bool { return share{ids: []string{c.id}}.names(groups) })
					}
				}
				if at >= 0 {
					has[all[at].id] = true
				}
			}
		}
	}
	for _, c := range all {
		if u, err := region.ReadUsage(a.files.usage(c.uid, c.container), c.cards); err == nil && u.Total(c.at).ContextBytes > 0 {
			has[c.id] = true
		}
	}
	var out []affected
	for _, c := range all {
		if !has[c.id] || c.stopped {
			continue
		}
		if !a.staysDown(uuid, seen) {
			break // the next look goes by what is then
		}
		a.mu.Lock()
		_, runs := a.containers[c.id]
		p := a.named(c.uid)
		a.mu.Unlock()
		if !runs {
			continue
		}
		var err error
		if a.StopUnadjusted {
			err = killContainer(c.hostPID, c.id)
		}
		stopped := a.StopUnadjusted && err == nil
		a.mu.Lock()
		if u, runs := a.containers[c.id]; runs {
			u.stopped, u.lostTold = stopped, true
			a.containers[c.id] = u
		}
		a.mu.Unlock()
		if stopped && !p.never {
			out = append(out, affected{p, c.container})
		}
		if c.lostTold && !stopped {
			continue
		}
		message := fmt.Sprintf("container %s lost its context with the MPS server of card %s: nothing is left of what it had there, and while its program runs no new server can start", c.container, name)
		switch {
		case stopped && p.never:
			message += "; it is stopped, and as its pod doesn't restart containers (restartPolicy Never), the pod fails"
		case stopped:
			message += "; it is stopped, so that it starts again once the card is served"
		case err != nil:
			message += "; it can't be stopped, which is tried again: " + err.Error()
		default:
			message += "; delete the pod (this node's agent stops no containers: --keep-unadjusted)"
		}
		a.Log.Warn("a program keeps its card from the next MPS server", "pod", p.namespace+"/"+p.name, "container", c.container, "id", c.id, "card", uuid, "stop", a.StopUnadjusted, "error", err)
		a.event(p, corev1.EventTypeWarning, reasonMPSStopped, message)
	}
	return out
}
