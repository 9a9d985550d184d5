package agent

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/v1alpha1"
	"github.com/carve-gpu/carve/vgpu/gpu"
	"github.com/carve-gpu/carve/vgpu/mps"
)

// Cards in mode mps have a daemon that another process of the node keeps (package mps).
// The agent says which are wanted and reads what is: no container of such a card
// starts before its daemon is ready, and none of another mode before MPS has let go of
// the card. What happens to a daemon is told to the pods that it served.

// mpsEvery is how often the keeper's files are looked at.
const mpsEvery = 500 * time.Millisecond

// Reasons of events on pods.
const (
	reasonMPSDown      = "MPSDown"
	reasonMPSClosed    = "MPSClosed"
	reasonMPSRestarted = "MPSRestarted"
	reasonMPSServes    = "MPSServes"
)

// mpsState is what is known of MPS on this node.
type mpsState struct {
	// unserved says in a sentence why this node keeps no daemons, "" if it does.
	unserved string
	// kept says that a keeper runs.
	kept  bool
	cards map[string]mpsCard
	// epochs are those that clients were served in last, by card. They are remembered
	// over a restart, in which a daemon may be started again.
	epochs map[string]uint64
}

// mpsCard is what is known of one card's daemon.
type mpsCard struct {
	wanted bool
	// turning says that the keeper is being told another wish than wanted: until it was
	// told, and what it made of the card was read after that, the card is nobody's.
	turning bool
	state   mps.State
	// fault says why the state can't be read.
	fault string
	// down is since when it doesn't serve, lost since when with a keeper at work, both
	// zero while it does.
	down, lost time.Time
}

// fronted reports whether containers with cards of a mode have the front libraries and
// their files: those that are held to an amount of memory.
func fronted(m api.Mode) bool { return m == api.ModeVGPU || m == api.ModeMPS }

// mpsPercent is what a grant leaves of a card's multiprocessors.
func mpsPercent(c api.CardGrant) int {
	if c.Cores == 0 {
		return 100
	}
	return c.Cores
}

func (a *Agent) mpsDir() mps.Dir { return mps.Dir(filepath.Join(a.RunDir, "mps")) }

// lastEpochs is where they are kept for the next start.
func (a *Agent) lastEpochs() string { return filepath.Join(a.StateDir, "mps.json") }

// recallMPS takes over what an earlier process knew, and reads what is.
func (a *Agent) recallMPS() {
	epochs := map[string]uint64{}
	if b, err := os.ReadFile(a.lastEpochs()); err == nil {
		if err := json.Unmarshal(b, &epochs); err != nil {
			a.Log.Warn("which MPS daemons served last is forgotten", "error", err)
		}
	}
	now := a.readMPS()
	now.epochs = epochs
	a.mu.Lock()
	defer a.mu.Unlock()
	a.mps, a.epochsKept = now, epochs
	a.recallOwed()
}

// watchMPS follows the cards' daemons until ctx ends.
func (a *Agent) watchMPS(ctx context.Context) {
	defer a.cardWorkers.Wait() // whoever comes after this agent must find nobody at work
	tick := time.NewTicker(mpsEvery)
	defer tick.Stop()
	for {
		a.lookAtMPS()
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-a.mpsStirred:
		}
	}
}

// stirMPS asks for a look: a card may be wanted in another mode.
func (a *Agent) stirMPS() {
	select {
	case a.mpsStirred <- struct{}{}:
	default:
	}
}

// mpsWanted are the cards whose daemon is wanted. a.mu is held.
func (a *Agent) mpsWanted() map[string]bool {
	want, other := map[string]bool{}, map[string]bool{}
	for _, h := range a.held {
		for _, cards := range h.Grant.Containers {
			for _, c := range cards {
				want[c.Card] = want[c.Card] || c.Mode == api.ModeMPS
				other[c.Card] = other[c.Card] || c.Mode != api.ModeMPS
			}
		}
	}
	for _, c := range a.hardware.inventory.Cards {
		// A card that is to be given in this mode, once nobody has it in another one.
		if a.mpsConfigured(c) && !other[c.UUID] {
			want[c.UUID] = true
		}
	}
	return want
}

// mpsConfigured reports whether a card's configuration says that it is given in mode
// mps. a.mu is held.
func (a *Agent) mpsConfigured(c gpu.Card) bool {
	return a.sharing[c.UUID].Mode == string(api.ModeMPS) && c.MIGMode != "enabled"
}

// readMPS reads what the keeper says of all cards.
func (a *Agent) readMPS() mpsState {
	dir := a.mpsDir()
	s := mpsState{cards: map[string]mpsCard{}}
	if s.kept = dir.KeeperRuns(); !s.kept {
		s.unserved = "no `carve mps` runs on this node, which keeps the daemons of MPS (kubectl apply -k deploy/manifests/mps)"
	} else if err := a.Root.MPSPrograms(); err != nil {
		s.unserved = err.Error()
	}
	uuids, err := dir.Cards()
	if err != nil {
		a.Log.Error("what is known of MPS can't be read", "error", err)
	}
	for _, uuid := range uuids {
		var c mpsCard
		var err, unread error
		c.wanted, unread = dir.IsWanted(uuid)
		if c.state, err = dir.State(uuid); err == nil {
			err = unread
		}
		if d := c.state.Daemon; c.state.Serves() && (d == nil || !d.Lives()) {
			// The keeper says so in a moment; if it has ended, too, nobody else does.
			c.state.Ready, c.state.GoOn, c.state.Error = false, false, "its MPS daemon has ended"
		}
		if err != nil {
			c.fault = err.Error()
		}
		s.cards[uuid] = c
	}
	return s
}

// affected is a container that a daemon served.
type affected struct {
	pod       pod
	container string
}

// lookAtMPS brings the wishes up to date, reads what is, and tells whom it concerns.
func (a *Agent) lookAtMPS() {
	a.mpsMu.Lock()
	defer a.mpsMu.Unlock()
	dir := a.mpsDir()
	a.mu.Lock()
	want := a.mpsWanted()
	before, sure := a.mps, a.stands
	for uuid := range before.cards {
		if !want[uuid] {
			want[uuid] = false // one of which nobody says anything any more
		}
	}
	for uuid, work := range a.cardWork {
		if work == releasing {
			want[uuid] = false // until that is done
		}
	}
	// A container that is booked from here on isn't in want, and must not take the card
	// as it was before: in mode mps its daemon would be ended under it, in another one
	// the card would be taken from it.
	turned := before.turn(want, sure)
	a.mps.cards = turned
	a.mu.Unlock()
	for uuid, wanted := range want {
		if turned[uuid].turning {
			a.stepped("mps-wish")
		}
		is := before.cards[uuid]
		var err error
		switch {
		case wanted && (!is.wanted || is.fault != ""):
			err = dir.Want(uuid)
		case !wanted && !sure:
			// What the configuration says may not be known yet.
		case !wanted && (is.wanted || is.fault != ""):
			err = dir.Unwant(uuid)
		}
		if err != nil {
			a.Log.Error("the keeper of MPS can't be told", "card", uuid, "error", err)
		}
	}
	now := a.readMPS()
	if !now.kept && sure {
		a.releaseCards(now, want)
	}
	now.epochs = maps.Clone(before.epochs)
	type told struct {
		to                    affected
		kind, reason, message string
	}
	var tell []told
	said, more := map[string][]owed{}, false
	a.mu.Lock()
	for uuid, c := range now.cards {
		was := before.cards[uuid]
		name := a.cardName(uuid)
		c.down = downSince(was, c, now.unserved, time.Now())
		c.lost = lostSince(was, c, now.unserved, time.Now())
		if was.state.Ready && c.state.GoOn && c.wanted {
			for _, w := range a.clients(uuid, 0) {
				a.owe(uuid, owedTo(w, false))
				more = true
				tell = append(tell, told{w, corev1.EventTypeWarning, reasonMPSClosed, fmt.Sprintf(
					"card %s: %s. Programs of container %s that have the card go on; the card takes no others until it is held again",
					name, c.state.Error, w.container)})
			}
		}
		if was.state.Serves() && !c.state.Serves() && c.wanted {
			again := "The daemon is started again"
			if !now.kept {
				again = "It is started again once there is a keeper: " + now.unserved
			}
			for _, w := range a.clients(uuid, 0) {
				a.owe(uuid, owedTo(w, false))
				more = true
				tell = append(tell, told{w, corev1.EventTypeWarning, reasonMPSDown, fmt.Sprintf(
					"card %s: %s. Programs of container %s get errors from CUDA there. %s; until then nothing runs on the card, with limits or without",
					name, orElse(c.state.Error, "its MPS daemon serves no more"), w.container, again)})
			}
		}
		// Not before it is known who is there: the others would never hear.
		if c.state.Ready && a.listed && a.watched {
			var restarted []affected
			if now.epochs[uuid] != c.state.Epoch {
				restarted = a.clients(uuid, c.state.Epoch)
				now.epochs[uuid] = c.state.Epoch
			}
			for _, w := range restarted {
				tell = append(tell, told{w, corev1.EventTypeWarning, reasonMPSRestarted, fmt.Sprintf(
					"card %s: its MPS daemon was started again and serves. What programs of container %s had there before is gone: they get errors from CUDA until they start anew",
					name, w.container)})
			}
			said[uuid] = slices.Clone(a.owed[uuid])
			for _, o := range said[uuid] {
				_, there := a.pods[o.UID]
				if kind, reason, message := o.word(name, restarted); there && message != "" {
					tell = append(tell, told{o.affected(), kind, reason, message})
				}
			}
		}
		now.cards[uuid] = c
	}
	remember := !maps.Equal(now.epochs, before.epochs)
	changed := now.unserved != before.unserved || !maps.EqualFunc(now.cards, before.cards, mpsCard.same)
	a.mps = now
	if changed || !maps.EqualFunc(turned, before.cards, func(c, d mpsCard) bool { return c.turning == d.turning }) {
		a.wake() // also who waited for a card that was turning
	}
	a.mu.Unlock()
	if remember {
		a.remember(a.lastEpochs(), now.epochs)
		a.mu.Lock()
		a.epochsKept = now.epochs
		a.wake()
		a.mu.Unlock()
	}
	if more { // before they hear what makes them wait for it
		a.keepOwed()
	}
	for _, t := range tell {
		a.Log.Warn("a pod is told of its MPS daemon", "pod", t.to.pod.namespace+"/"+t.to.pod.name, "reason", t.reason, "message", t.message)
		a.event(t.to.pod, t.kind, t.reason, t.message)
	}
	if a.settleOwed(said) {
		a.keepOwed()
	}
	if changed {
		a.report()
	}
	for uuid, c := range now.cards {
		if c.lost.IsZero() || time.Since(c.lost) < a.lostGrace() {
			continue
		}
		a.onCard(uuid, stopping, func() bool {
			stopped := a.stopLost(uuid, c.state)
			if len(stopped) == 0 {
				return false
			}
			a.mu.Lock()
			for _, w := range stopped {
				a.owe(uuid, owedTo(w, true))
			}
			a.mu.Unlock()
			a.keepOwed()
			return true
		})
	}
}

// turn marks the cards whose keeper is about to be told another wish.
func (s mpsState) turn(want map[string]bool, sure bool) map[string]mpsCard {
	out := make(map[string]mpsCard, len(s.cards))
	maps.Copy(out, s.cards)
	for uuid, wanted := range want {
		c := out[uuid]
		if c.turning = wanted != c.wanted && (wanted || sure); c.turning {
			out[uuid] = c
		}
	}
	return out
}

func (c mpsCard) same(d mpsCard) bool {
	x, y := c.state, d.state
	return c.wanted == d.wanted && c.fault == d.fault && x.Epoch == y.Epoch && x.Ready == y.Ready && x.GoOn == y.GoOn && x.Error == y.Error && x.Since.Equal(y.Since) && x.Idle() == y.Idle()
}

// clients are the containers that a card's daemon served in another epoch than the
// given one, 0 for all. Those are noted as served in it. a.mu is held.
func (a *Agent) clients(uuid string, epoch uint64) []affected {
	var out []affected
	for id, u := range a.containers {
		h := a.held[u.uid]
		if h == nil || !u.adjusted {
			continue
		}
		for _, c := range h.Grant.Containers[u.container] {
			if c.Mode != api.ModeMPS || c.Card != uuid || epoch != 0 && u.epoch == epoch {
				continue
			}
			if epoch != 0 {
				u.epoch = epoch
				a.containers[id] = u
			}
			out = append(out, affected{a.named(u.uid), u.container})
		}
	}
	slices.SortFunc(out, func(x, y affected) int {
		if x.pod.namespace+"/"+x.pod.name+" "+x.container < y.pod.namespace+"/"+y.pod.name+" "+y.container {
			return -1
		}
		return 1
	})
	return out
}

// epochOf is that in which a container with such cards is served if it starts now.
// a.mu is held.
func (a *Agent) epochOf(cards []api.CardGrant) uint64 {
	for _, c := range cards {
		if c.Mode == api.ModeMPS {
			return a.mps.cards[c.Card].state.Epoch
		}
	}
	return 0
}

// cardName is a card by index and UUID, for people. a.mu is held.
func (a *Agent) cardName(uuid string) string {
	for _, c := range a.hardware.inventory.Cards {
		if c.UUID == uuid {
			return fmt.Sprintf("%d (%s)", c.Index, uuid)
		}
	}
	return uuid
}

// unready says in a sentence what keeps cards from being used in the modes in which
// they were granted, "" if nothing does. a.mu is held.
func (a *Agent) unready(cards []api.CardGrant) string {
	for _, c := range cards {
		m := a.mps.cards[c.Card]
		name := a.cardName(c.Card)
		switch {
		case c.Mode == api.ModeMPS && m.state.Ready && m.wanted && !m.turning && m.fault == "" && a.mps.unserved == "" &&
			// The next process of the agent takes who runs for one whom that daemon served.
			a.epochsKept[c.Card] == m.state.Epoch:
		case c.Mode == api.ModeMPS && a.mps.unserved != "":
			return fmt.Sprintf("card %s has no MPS daemon: %s", name, a.mps.unserved)
		case c.Mode == api.ModeMPS && m.fault != "":
			return fmt.Sprintf("what became of the MPS daemon of card %s can't be read: %s", name, m.fault)
		case c.Mode == api.ModeMPS && m.state.Ready && m.wanted && !m.turning:
			return fmt.Sprintf("the MPS daemon of card %s serves, and who was there before it isn't known yet", name)
		case c.Mode == api.ModeMPS && m.state.Error != "":
			return fmt.Sprintf("the MPS daemon of card %s isn't ready: %s", name, m.state.Error)
		case c.Mode == api.ModeMPS:
			return fmt.Sprintf("the MPS daemon of card %s is being started", name)
		case m.fault == "" && m.state.Idle() && !m.wanted && !m.turning:
		default:
			// One process could use it, and perhaps none.
			return fmt.Sprintf("card %s was given in mode mps before, and MPS hasn't let go of it yet: %s", name,
				orElse(m.fault, orElse(m.state.Error, orElse(a.mps.unserved, "its daemon is being ended"))))
		}
	}
	return ""
}

// mpsOf is a card's MPS daemon for the report, nil where none is wanted. a.mu is held.
func (a *Agent) mpsOf(uuid string) *v1alpha1.MPS {
	c, ok := a.mps.cards[uuid]
	if !ok || !c.wanted && c.state.Idle() && c.state.Error == "" {
		return nil
	}
	out := &v1alpha1.MPS{Reason: c.reason(a.mps.unserved)}
	if len(out.Reason) > maxRefusal {
		out.Reason = out.Reason[:maxRefusal]
	}
	// While it is being started for the first time it takes slices: they wait.
	out.Ready = out.Reason == ""
	switch {
	case !c.down.IsZero():
		out.Since = seconds(c.down)
	case !c.state.Since.IsZero():
		out.Since = seconds(c.state.Since)
	}
	return out
}

// reason says why a card's daemon doesn't serve, "" if it does or is about to. Where no
// keeper works, that is why, whatever the last one left.
func (c mpsCard) reason(unserved string) string {
	return orElse(c.fault, orElse(unserved, c.state.Error))
}

// downSince is since when a card's daemon hasn't served, whatever the reason became
// meanwhile. Of what was so before this process began only the keeper can tell.
func downSince(was, is mpsCard, unserved string, now time.Time) time.Time {
	switch {
	case is.reason(unserved) == "":
		return time.Time{}
	case !was.down.IsZero():
		return was.down
	case was.state.Since.IsZero() && !is.state.Ready && !is.state.Since.IsZero():
		return is.state.Since
	}
	return now
}

// mpsFault says in a sentence what is wrong with the daemon of a container that runs.
// a.mu is held.
func (a *Agent) mpsFault(cards []api.CardGrant) string {
	for _, c := range cards {
		if c.Mode == api.ModeMPS && !a.mps.cards[c.Card].state.Serves() {
			return a.unready(cards)
		}
	}
	return ""
}

func orElse(text, otherwise string) string {
	if text != "" {
		return text
	}
	return otherwise
}
