package cluster

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/scheduler-extender/ledger"
	"github.com/carve-gpu/carve/scheduler-extender/place"
)

const (
	// wakeEvery spaces the rounds of waking and gathers what is freed at the
	// same time; wakeAtOnce bounds the writes of one round.
	wakeEvery  = 100 * time.Millisecond
	wakeAtOnce = 20
)

// Waker touches waiting pods when room for them appeared, on a card or in their
// namespace's quota. kube-scheduler watches neither GPUNodes nor our ledger, and
// would look again after five minutes; a change to the pod's own object makes it
// look at that pod at once.
type Waker struct {
	Kube   kubernetes.Interface
	Ledger *ledger.Ledger
	Placer *place.Placer
	Ready  func() bool
	// Tainted says of nodes that kube-scheduler keeps pods off them for the
	// time being; nil if none are. Pods are woken for them afterwards.
	Tainted func(node string) bool
	// Planner wakes pods that are held back; may be nil.
	Planner Planner
	Log     *slog.Logger
	Now     func() time.Time
}

// Adopt wakes pods that were refused before this process answered, of which it doesn't know what
// they wait for: each comes to the extender once more, a few at a time.
func (w *Waker) Adopt(ctx context.Context, pods []ledger.Ref) {
	for i, p := range pods {
		if i > 0 && i%wakeAtOnce == 0 {
			select {
			case <-ctx.Done():
				return
			case <-time.After(wakeEvery):
			}
		}
		w.touch(ctx, p)
	}
}

// Run wakes pods until the context ends.
func (w *Waker) Run(ctx context.Context) {
	// Nodes and namespaces that a pod may still be woken for.
	pending, spaces := map[string]bool{}, map[string]bool{}
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-w.Ledger.Freed():
		case <-timer.C:
		}
		for _, n := range w.Ledger.TakeFreed() {
			pending[n.Name] = true
		}
		for _, n := range w.Ledger.TakeRelaxed() {
			spaces[n] = true
		}
		if !w.Ready() {
			continue // pods that wait will be filtered again by then
		}
		nodes := make([]*ledger.Node, 0, len(pending))
		held := false
		for name := range pending {
			switch n := w.Ledger.Node(name); {
			case n == nil || n.Snapshot().View.Blocked != "":
				delete(pending, name) // it is told anew when it serves
			case w.Tainted != nil && w.Tainted(name):
				held = true
			default:
				nodes = append(nodes, n)
			}
		}
		pods, again := w.Placer.Wake(nodes, wakeAtOnce, w.Now())
		more, later := w.Placer.WakeSpaces(spaces, wakeAtOnce, w.Now())
		for _, p := range append(pods, more...) {
			if w.Planner == nil || !w.Planner.Wake(p.UID) {
				w.touch(ctx, p)
			}
		}
		if later.IsZero() {
			clear(spaces)
		}
		if again.IsZero() {
			for _, n := range nodes {
				delete(pending, n.Name)
			}
		}
		switch {
		case held:
			timer.Reset(wakeEvery)
		case !again.IsZero() || !later.IsZero():
			if again.IsZero() || !later.IsZero() && later.Before(again) {
				again = later
			}
			timer.Reset(max(wakeEvery, again.Sub(w.Now())))
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(wakeEvery):
		}
	}
}

// touch patches the pod's annotation. The UID in the patch is a precondition:
// the API server refuses to change it, as a conflict or as invalid.
func (w *Waker) touch(ctx context.Context, p ledger.Ref) {
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{
		"uid":         p.UID,
		"annotations": map[string]string{api.AnnotationWake: w.Now().UTC().Format(time.RFC3339Nano)},
	}})
	if err == nil {
		_, err = w.Kube.CoreV1().Pods(p.Namespace).Patch(ctx, p.Name, types.MergePatchType, patch, metav1.PatchOptions{})
	}
	log := w.Log.With("pod", p.Namespace+"/"+p.Name, "uid", p.UID)
	switch {
	case err == nil:
		log.Info("woke a waiting pod")
	case apierrors.IsNotFound(err) || apierrors.IsConflict(err) || apierrors.IsInvalid(err):
		w.Placer.Forget(p.UID)
	case ctx.Err() == nil:
		log.Warn("could not wake a pod", "error", fmt.Errorf("patch pod %s/%s: %w", p.Namespace, p.Name, err))
	}
}
