package main

import (
	"context"
	"log/slog"
	"os"
	"sync"
	"time"

	nrihook "github.com/carve-gpu/carve/nri-hook"
)

const (
	// standbyLimit is how long an older agent is kept from ending because the
	// runtime doesn't take the standby in. An agent without a link is of no use
	// anyway.
	standbyLimit = 10 * time.Second
	// standbyOverlap is how long the standby stays beside the link: the runtime
	// asks a plugin a moment after that was told that it is taken in.
	standbyOverlap = 2 * time.Second
)

// part is a part of the process that is started again whenever it ends.
type part struct {
	name string
	run  func(context.Context) error
}

// keepInTurn keeps parts running until ctx ends, and then ends one after the
// other. An agent that waits for this one takes over with the second: the
// kubelet has then seen this one's plugin leave, so that it doesn't take the
// next one's for it, and the hook serves until the next one can.
func keepInTurn(ctx context.Context, all *sync.WaitGroup, log *slog.Logger, parts ...part) {
	for _, p := range parts {
		next, end := context.WithCancel(context.WithoutCancel(ctx))
		mine := ctx
		all.Go(func() {
			defer end()
			keepRunning(mine, p.name, p.run, log)
		})
		ctx = next
	}
}

// roll hands the hook over from an older agent of this node to this one, as
// while a DaemonSet rolls: this one stands by at the runtime before the older
// one is told to end, so that no container starts past both.
type roll struct {
	ctx     context.Context
	cancel  context.CancelFunc
	options nodeOptions
	log     *slog.Logger
	parts   sync.WaitGroup
	standby *nrihook.Standby // nil unless an older agent was there
	once    sync.Once
}

func newRoll(ctx context.Context, o nodeOptions, log *slog.Logger) *roll {
	r := &roll{options: o, log: log}
	r.ctx, r.cancel = context.WithCancel(ctx)
	return r
}

// standBy is called when an older agent is found.
func (r *roll) standBy() {
	r.standby = nrihook.NewStandby(nrihook.Config{Socket: r.options.nriSocket, Log: r.log})
	r.parts.Go(func() { r.standby.Run(r.ctx) })
	r.parts.Go(func() {
		limit := time.NewTimer(standbyLimit)
		defer limit.Stop()
		select {
		case <-r.ctx.Done():
			return
		case <-r.standby.Linked():
			r.log.Info("standing by at the container runtime")
		case <-limit.C:
			r.log.Warn("can't stand by at the container runtime; containers that start while the agents change may have to be stopped", "after", standbyLimit)
		}
		r.markStarted()
	})
}

// takeOver is called when this agent owns the node's state.
func (r *roll) takeOver(state nrihook.State) {
	if r.standby != nil {
		r.standby.TakeOver(state)
	}
	r.markStarted()
}

// linked is called when the hook's own link is up.
func (r *roll) linked() {
	r.once.Do(func() { time.AfterFunc(standbyOverlap, r.cancel) })
}

func (r *roll) end() {
	r.cancel()
	r.parts.Wait()
}

// markStarted makes the file that the startup probe looks for.
func (r *roll) markStarted() {
	if r.options.startedFile == "" {
		return
	}
	if err := os.WriteFile(r.options.startedFile, nil, 0o644); err != nil {
		r.log.Error("the startup probe's file can't be made", "error", err)
	}
}
