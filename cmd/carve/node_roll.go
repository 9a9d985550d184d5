package main

import (
	"context"
	"log/slog"
	"os"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	utilversion "k8s.io/apimachinery/pkg/util/version"
	"k8s.io/client-go/kubernetes"

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
	// farewell is how long an agent that ends, with none to follow it, still serves
	// pods: the node isn't ready from the first moment, so that none are sent to it, and
	// those that were are on their way to the kubelet.
	farewell = 2 * time.Second
)

// part is a part of the process that is started again whenever it ends.
type part struct {
	name string
	run  func(context.Context) error
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
	// endAgent ends the agent, and then the hook.
	endAgent context.CancelFunc
	once     sync.Once
}

func newRoll(ctx context.Context, o nodeOptions, log *slog.Logger) *roll {
	r := &roll{options: o, log: log}
	r.ctx, r.cancel = context.WithCancel(ctx)
	return r
}

// keep keeps parts running until ctx ends, and then ends one after the other. An
// agent that waits for this one takes over when the agent ends. The kubelet has
// then seen this one's plugin leave, so that it doesn't take the next one's for
// it, unless the plugin lingers. The hook serves until the next one can.
func (r *roll) keep(ctx context.Context, all *sync.WaitGroup, plugin, agent, hook part) {
	agentCtx, endAgent := context.WithCancel(context.WithoutCancel(ctx))
	hookCtx, endHook := context.WithCancel(context.WithoutCancel(ctx))
	r.endAgent = endAgent
	all.Go(func() {
		defer endAgent()
		keepRunning(ctx, plugin.name, plugin.run, r.log)
	})
	all.Go(func() {
		defer endHook()
		keepRunning(agentCtx, agent.name, agent.run, r.log)
	})
	all.Go(func() { keepRunning(hookCtx, hook.name, hook.run, r.log) })
}

// kubeletKeepsBoth is the first version whose kubelet knows two plugins of one
// resource by their sockets (pkg/kubelet/cm/devicemanager, endpointStore). An
// older one would take the leaving of the first for that of the second.
var kubeletKeepsBoth = utilversion.MustParseSemantic("v1.37.0")

// linger lets the agent end while its plugin goes on counting slots, where a next
// agent waits and the kubelet bears two plugins.
func (r *roll) linger(followed func() bool, kube kubernetes.Interface) bool {
	if !followed() {
		return false
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	n, err := kube.CoreV1().Nodes().Get(ctx, r.options.node, metav1.GetOptions{})
	if err != nil {
		return false
	}
	v, err := utilversion.ParseSemantic(n.Status.NodeInfo.KubeletVersion)
	if err != nil || v.LessThan(kubeletKeepsBoth) {
		return false
	}
	r.endAgent()
	return true
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
