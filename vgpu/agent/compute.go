package agent

import (
	"context"
	"time"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/vgpu/compute"
	"github.com/carve-gpu/carve/vgpu/compute/loop"
	"github.com/carve-gpu/carve/vgpu/region"
)

// ComputeMode is how the node divides the compute of its cards.
type ComputeMode string

// The modes.
const (
	// ComputeShares is credit in card time, settled against what the driver says:
	// within a point or two of each share.
	ComputeShares ComputeMode = "shares"
	// ComputeTurns has processes take turns on a card. Elastic shares get their
	// guarantee more strictly, launches wait longer.
	ComputeTurns ComputeMode = "turns"
	// ComputeOff limits nobody.
	ComputeOff ComputeMode = "off"
)

// ComputeModes are all of them, the default first.
var ComputeModes = []ComputeMode{ComputeShares, ComputeTurns, ComputeOff}

// computeOffEvery is how soon containers of an earlier agent are let off.
const computeOffEvery = 5 * time.Second

// divideCompute divides the cards' time until ctx ends.
func (a *Agent) divideCompute(ctx context.Context) {
	if a.Compute == ComputeOff {
		a.leaveCompute(ctx)
		return
	}
	mode := compute.Credit
	if a.Compute == ComputeTurns {
		mode = compute.Turns
	}
	l := loop.New(loop.Config{
		Clock: loop.Monotonic{}, Mode: mode, Log: a.Log,
		Shares: a.computeShares,
		Driver: func() loop.Driver {
			a.mu.Lock()
			defer a.mu.Unlock()
			if a.hardware.door == nil {
				return nil
			}
			return a.hardware.door
		},
		Process: a.shareOf,
	})
	a.compute.Store(l)
	l.Run(ctx)
}

// leaveCompute takes the limits off that an agent before this one put in force.
func (a *Agent) leaveCompute(ctx context.Context) {
	done := map[loop.Key]bool{}
	for ctx.Err() == nil {
		for _, s := range a.computeShares() {
			if done[s.Key] {
				continue
			}
			f, err := region.OpenCompute(s.Limits, len(s.Cards))
			if err == nil {
				err = f.Divide(false)
				f.Close()
			}
			if err != nil {
				a.Log.Warn("the limit on a container's compute can't be taken off", "uid", s.UID, "container", s.Container, "error", err)
				continue
			}
			done[s.Key] = true
		}
		select {
		case <-ctx.Done():
		case <-time.After(computeOffEvery):
		}
	}
}

// computeShares lists the containers that may run with shares of cards.
func (a *Agent) computeShares() []loop.Share {
	a.mu.Lock()
	defer a.mu.Unlock()
	running := map[shareKey]bool{}
	for _, u := range a.containers {
		running[shareKey{u.uid, u.container}] = true
	}
	var out []loop.Share
	for uid, h := range a.held {
		if !h.prepared {
			continue
		}
		g := h.Grant
		if h.granted != nil {
			g = h.granted.Grant
		}
		for name, cards := range g.Containers {
			if len(cards) == 0 || cards[0].Mode != api.ModeVGPU || a.listed && !running[shareKey{uid, name}] {
				continue
			}
			s := loop.Share{Key: loop.Key{UID: uid, Container: name}, Limits: a.files.limits(uid, name), Usage: a.files.usage(uid, name)}
			for _, c := range cards {
				s.Cards = append(s.Cards, loop.CardShare{UUID: c.Card, SharePPM: uint32(c.Cores) * 10_000, Elastic: !c.Fixed, Low: c.Low})
			}
			out = append(out, s)
		}
	}
	return out
}

// shareOf is the process of a pid that the driver lists, and the share that it
// belongs to by its cgroup.
func (a *Agent) shareOf(pid int) (region.Process, loop.Key, bool) {
	groups, err := a.groupsOf(pid)
	if err != nil {
		return region.Process{}, loop.Key{}, false
	}
	for _, s := range a.shares() {
		if !s.names(groups) {
			continue
		}
		p, err := region.ReadProcess(procRoot, pid)
		return p, loop.Key{UID: s.uid, Container: s.container}, err == nil
	}
	return region.Process{}, loop.Key{}, false
}
