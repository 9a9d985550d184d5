// Package leader decides which of several extenders answers kube-scheduler: the holder of a lease
// that has taken in every bind of those before it. The others stand by with ledgers that follow.
package leader

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"

	"github.com/carve-gpu/carve/api"
)

// A bind that begins while the lease is held, at the latest renewBy after it was renewed last,
// has ended by its own time-out of four seconds before leaseFor is over and another may lead.
const (
	leaseFor   = 12 * time.Second
	renewBy    = 7 * time.Second
	leaseRetry = 1500 * time.Millisecond
	// leadCall bounds one call of a takeover, leadRetry spaces its tries.
	leadCall  = 5 * time.Second
	leadRetry = 500 * time.Millisecond
)

// Source is what feeds the ledger.
type Source interface {
	// Ready reports whether all that the API showed at start is in the ledger.
	Ready() bool
	// Shows reports whether the watch of pods has come to that version of a pod.
	Shows(namespace, name, version string) bool
}

// Config is what a Leader is made of.
type Config struct {
	Kube kubernetes.Interface
	// Elect is false where no other extender can ever run: then nobody is asked.
	Elect bool
	// Namespace is where the lease and the pods are; Lease is the lease's name.
	Namespace, Lease string
	// Pod is the name of the pod that this process is in.
	Pod    string
	Source Source
	// TakeOver is called at the beginning of each lead, before its first answer.
	TakeOver func()
	Registry prometheus.Registerer
	Log      *slog.Logger
}

// Leader is who answers kube-scheduler. Whoever leads has taken in every bind of those that
// led before; whoever doesn't stands by with a ledger that follows.
type Leader struct {
	Config
	elector atomic.Pointer[leaderelection.LeaderElector]
	leads   atomic.Bool
	another atomic.Bool // holds the lease
	gauge   prometheus.Gauge
}

// New makes a leader and registers its metric; Run stands for election.
func New(c Config) *Leader {
	l := &Leader{Config: c,
		gauge: prometheus.NewGauge(prometheus.GaugeOpts{Name: "carve_extender_leading", Help: "1 while this process answers kube-scheduler, 0 while it stands by."})}
	c.Registry.MustRegister(l.gauge)
	return l
}

// Leading reports whether this process may answer. One that stood still for a while has lost
// its lease without knowing: what counts is when that was renewed.
func (l *Leader) Leading() bool {
	if !l.leads.Load() || !l.Source.Ready() {
		return false
	}
	e := l.elector.Load()
	return e == nil || e.IsLeader() && e.Check(renewBy-leaseFor) == nil
}

// Ready reports whether this process does what it is there for: it answers, or it stands by
// with a whole ledger while another does.
func (l *Leader) Ready() bool {
	return l.Leading() || l.another.Load() && l.Source.Ready()
}

// Run leads whenever it is this process' turn, until the context ends, which has to be later
// than the end of all that needs the lead: then the lease is given back. A lead that is lost,
// as it is while the API server is away, ends every answer at once; this process stands for
// election again.
func (l *Leader) Run(ctx context.Context) error {
	if !l.Elect {
		err := l.lead(ctx)
		<-ctx.Done()
		return err
	}
	// A process that was killed may have left its pod's label.
	if err := l.retried(ctx, "take the leader's label off", func(ctx context.Context) error {
		_, err := l.label(ctx, l.Pod, nil)
		return err
	}); err != nil {
		return nil // the context has ended
	}
	elector, err := leaderelection.NewLeaderElector(leaderelection.LeaderElectionConfig{
		Lock: &resourcelock.LeaseLock{LeaseMeta: metav1.ObjectMeta{Namespace: l.Namespace, Name: l.Lease}, Client: l.Kube.CoordinationV1(),
			// The pod's next process may go on with the lease of the one that died.
			LockConfig: resourcelock.ResourceLockConfig{Identity: l.Pod}},
		LeaseDuration: leaseFor, RenewDeadline: renewBy, RetryPeriod: leaseRetry, ReleaseOnCancel: true, Name: l.Lease,
		Callbacks: leaderelection.LeaderCallbacks{
			OnStartedLeading: func(ctx context.Context) {
				if err := l.lead(ctx); err != nil {
					l.Log.Error("could not take over", "error", err)
				}
			},
			OnStoppedLeading: func() {
				l.leads.Store(false)
				l.gauge.Set(0)
				if ctx.Err() == nil {
					l.Log.Warn("lost the lease: another extender may answer now; standing for election again", "lease", l.Namespace+"/"+l.Lease)
				}
			},
			OnNewLeader: func(identity string) {
				l.another.Store(identity != "" && identity != l.Pod)
				if identity != l.Pod {
					l.Log.Info("standing by", "leader", identity)
				}
			},
		},
	})
	if err != nil {
		return fmt.Errorf("stand for election: %w", err)
	}
	l.elector.Store(elector)
	for ctx.Err() == nil {
		elector.Run(ctx)
	}
	return nil
}

// lead takes over: when the ledger shows every bind that was written before, the extender
// answers.
func (l *Leader) lead(ctx context.Context) error {
	for !l.Source.Ready() {
		if !sleep(ctx, 20*time.Millisecond) {
			return nil
		}
	}
	start := time.Now()
	if l.Elect {
		// The watch tells of writes in their order: one that shows this write has shown
		// all binds before it. The label also sends callers here.
		version := ""
		if err := l.retried(ctx, "set the leader's label", func(ctx context.Context) (err error) {
			version, err = l.label(ctx, l.Pod, "true")
			return err
		}); err != nil {
			return nil
		}
		for !l.Source.Shows(l.Namespace, l.Pod, version) {
			if !sleep(ctx, 5*time.Millisecond) {
				return nil
			}
		}
		l.unlabelOthers(ctx)
	}
	l.TakeOver()
	if ctx.Err() != nil {
		return nil // the lease was lost meanwhile
	}
	l.leads.Store(true)
	l.gauge.Set(1)
	l.Log.Info("leading", "took", time.Since(start).Round(time.Millisecond))
	return nil
}

// label sets or takes off a pod's label, and returns the pod's version afterwards.
func (l *Leader) label(ctx context.Context, pod string, value any) (version string, err error) {
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{
		"labels":      map[string]any{api.LabelLeading: value},
		"annotations": map[string]any{api.AnnotationLeadingSince: cond(value != nil, any(time.Now().UTC().Format(time.RFC3339Nano)), nil)},
	}})
	if err != nil {
		return "", err
	}
	call, cancel := context.WithTimeout(ctx, leadCall)
	defer cancel()
	p, err := l.Kube.CoreV1().Pods(l.Namespace).Patch(call, pod, types.MergePatchType, patch, metav1.PatchOptions{})
	if err != nil {
		return "", fmt.Errorf("label pod %s/%s: %w", l.Namespace, pod, err)
	}
	return p.ResourceVersion, nil
}

func cond(b bool, yes, no any) any {
	if b {
		return yes
	}
	return no
}

// unlabelOthers takes the label off those that led before. Where that fails they refuse callers,
// who then come here when they try again.
func (l *Leader) unlabelOthers(ctx context.Context) {
	pods, err := l.Kube.CoreV1().Pods(l.Namespace).List(ctx, metav1.ListOptions{LabelSelector: api.LabelLeading + "=true," + api.LabelName + "=carve-extender"})
	if err != nil {
		l.Log.Warn("could not look for pods that led before", "error", err)
		return
	}
	for i := range pods.Items {
		if name := pods.Items[i].Name; name != l.Pod {
			if _, err := l.label(ctx, name, nil); err != nil {
				l.Log.Warn("could not take the leader's label off a pod that led before", "error", err)
			}
		}
	}
}

// retried tries until it works or the context ends, which is the only error.
func (l *Leader) retried(ctx context.Context, what string, try func(context.Context) error) error {
	said := ""
	for {
		err := try(ctx)
		if err == nil {
			return nil
		}
		if text := err.Error(); text != said && ctx.Err() == nil {
			said = text
			l.Log.Warn("could not "+what+"; trying again", "error", err)
		}
		if !sleep(ctx, leadRetry) {
			return cmp.Or(ctx.Err(), err)
		}
	}
}

// sleep waits, and reports whether the context goes on.
func sleep(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}
