package cluster

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/scheduler-extender/fit"
	"github.com/carve-gpu/carve/scheduler-extender/ledger"
)

const (
	// taintAfter is how long a node must have been blocked, as far as this
	// process saw, before it is tainted: an agent that is replaced is back
	// sooner, and a taint costs a write and stirs every scheduler.
	taintAfter = 10 * time.Second
	// taintEvery is how often the nodes are looked at.
	taintEvery = 500 * time.Millisecond
	// taintTries bounds the tries of one write against others' writes.
	taintTries = 5
	// taintsAtOnce bounds the writes that are under way together.
	taintsAtOnce = 8
	// After a write that failed a node is left alone for a while.
	taintPause, maxTaintPause = time.Second, 30 * time.Second
)

// Tainter keeps the taint carve.dev/hook-down on managed nodes whose agent or
// hook is away, and off all others. The extender refuses such nodes by itself;
// the taint tells everybody else, schedulers that never ask the extender and
// people who look at the node. No other taint is ever touched.
type Tainter struct {
	Kube   kubernetes.Interface
	Ledger *ledger.Ledger
	Nodes  *Source
	// Ready reports whether it is this process that has to see to the taints.
	Ready func() bool
	Log   *slog.Logger
	Now   func() time.Time

	since  map[string]time.Time // when a node was first seen blocked
	failed map[string]failure
}

type failure struct {
	pause time.Duration
	until time.Time
}

// Run keeps the taints until the context ends.
func (t *Tainter) Run(ctx context.Context) {
	tick := time.NewTicker(taintEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			t.round(ctx)
		}
	}
}

// round compares every node with what it should have, and writes the
// differences. After a start, or while the ledger isn't complete, nothing is
// known to be blocked: the wait begins anew.
func (t *Tainter) round(ctx context.Context) {
	if !t.Ready() {
		t.since = nil
		return
	}
	now := t.Now()
	since, failed := map[string]time.Time{}, map[string]failure{}
	var mu sync.Mutex
	var writes sync.WaitGroup
	slots := make(chan struct{}, taintsAtOnce)
	for _, o := range t.Nodes.nodes.GetStore().List() {
		n := o.(*corev1.Node)
		has := slices.ContainsFunc(n.Spec.Taints, isOurs)
		want := false
		if t.away(n.Name) {
			first, seen := t.since[n.Name]
			if !seen {
				first = now
			}
			since[n.Name] = first
			want = has || now.Sub(first) >= taintAfter
		}
		f, again := t.failed[n.Name]
		if want == has {
			continue
		}
		if again && now.Before(f.until) {
			mu.Lock()
			failed[n.Name] = f
			mu.Unlock()
			continue
		}
		slots <- struct{}{}
		writes.Go(func() {
			defer func() { <-slots }()
			wrote, err := t.write(ctx, n.Name, n.UID, want)
			switch {
			case ctx.Err() != nil:
			case err != nil:
				f.pause = min(max(2*f.pause, taintPause), maxTaintPause)
				f.until = now.Add(f.pause)
				mu.Lock()
				failed[n.Name] = f
				mu.Unlock()
				t.Log.Warn("could not change a node's taint", "node", n.Name, "taint", api.TaintHookDown, "want", want, "error", err)
			case wrote && want:
				t.Log.Warn("tainted a node that takes no cards' pods", "node", n.Name, "taint", api.TaintHookDown, "reason", t.reason(n.Name))
			case wrote:
				t.Log.Info("took the taint off a node", "node", n.Name, "taint", api.TaintHookDown)
			}
		})
	}
	writes.Wait()
	t.since, t.failed = since, failed
}

// away reports whether a managed node is blocked for want of its agent or hook.
func (t *Tainter) away(name string) bool {
	r := t.reason(name)
	return r == fit.ReasonAgentDown || r == fit.ReasonHookDown
}

func (t *Tainter) reason(name string) fit.Reason {
	n := t.Ledger.Node(name)
	if n == nil || !n.Snapshot().Managed {
		return ""
	}
	return n.Snapshot().View.Blocked
}

func isOurs(t corev1.Taint) bool {
	return t.Key == api.TaintHookDown && t.Effect == corev1.TaintEffectNoSchedule
}

// Tainted reports whether a node carries the taint, as far as is known.
func (s *Source) Tainted(name string) bool {
	o, ok, err := s.nodes.GetStore().GetByKey(name)
	return err == nil && ok && slices.ContainsFunc(o.(*corev1.Node).Spec.Taints, isOurs)
}

// write sets or removes the taint, and reports whether there was anything to
// write. The list of taints is one value to the API server, so it is read just
// before and written only if the node is still the same version; the other
// taints go back as they came.
func (t *Tainter) write(ctx context.Context, name string, uid types.UID, want bool) (bool, error) {
	for try := 1; ; try++ {
		n, err := t.Kube.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
		switch {
		case apierrors.IsNotFound(err):
			return false, nil
		case err != nil:
			return false, fmt.Errorf("read node %s: %w", name, err)
		case n.UID != uid || slices.ContainsFunc(n.Spec.Taints, isOurs) == want:
			return false, nil // the watch is a moment behind
		case want && n.Labels[api.LabelManaged] != "true":
			return false, nil
		}
		taints := slices.DeleteFunc(slices.Clone(n.Spec.Taints), isOurs)
		if want {
			taints = append(taints, corev1.Taint{Key: api.TaintHookDown, Effect: corev1.TaintEffectNoSchedule})
		}
		patch, err := json.Marshal(map[string]any{
			"metadata": map[string]any{"uid": n.UID, "resourceVersion": n.ResourceVersion},
			"spec":     map[string]any{"taints": taints},
		})
		if err == nil {
			_, err = t.Kube.CoreV1().Nodes().Patch(ctx, name, types.MergePatchType, patch, metav1.PatchOptions{})
		}
		switch {
		case err == nil:
			return true, nil
		case apierrors.IsNotFound(err):
			return false, nil
		case !apierrors.IsConflict(err) || try == taintTries:
			return false, fmt.Errorf("patch the taints of node %s: %w", name, err)
		}
	}
}
