package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/util/workqueue"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/v1alpha1"
	"github.com/carve-gpu/carve/scheduler-extender/ledger"
	"github.com/carve-gpu/carve/scheduler-extender/place"
)

const (
	// resizeWorkers answer at a time; one whose API call hangs leaves the others.
	resizeWorkers = 4
	// resizeCall bounds one API call, resizeTries those of one round.
	resizeCall  = 5 * time.Second
	resizeTries = 5
	// resizeLook is how often a request that waits for its node is looked at
	// again, should the report that it waits for pass unseen.
	resizeLook = 2 * time.Second

	resizeRetryAtLeast, resizeRetryAtMost = 20 * time.Millisecond, 10 * time.Second
)

// Resizer answers requests for live resizes: one write for each, which carries
// the new grant, takes the request away and says how it went. It takes back what
// a node can't put in force. It keeps nothing that isn't in the API, so it may
// die at any moment: a request that is still there is answered by the next one.
type Resizer struct {
	ResizerConfig
	queue workqueue.TypedRateLimitingInterface[ledger.Ref]

	mu sync.Mutex
	// open are the writes whose outcome isn't known.
	open map[string]*answer
	// waiting are the pods whose request waits for their node's report.
	waiting map[ledger.Ref]bool
}

// ResizerConfig is what a Resizer is made of.
type ResizerConfig struct {
	Kube   kubernetes.Interface
	Ledger *ledger.Ledger
	Ready  func() bool
	// Pod finds a pod that the informers know, nil if there is none. Its
	// resourceVersion and annotations of ours are read.
	Pod func(ledger.Ref) *corev1.Pod
	// Answered is told of each answer that was written: granted, refused, or
	// taken-back, with the sentence that says why it isn't granted.
	Answered func(pod ledger.Ref, outcome, message string)
	Log      *slog.Logger
}

// NewResizer makes a resizer; Run starts it. It may be told of pods and reports
// before that.
func NewResizer(c ResizerConfig) *Resizer {
	return &Resizer{
		ResizerConfig: c,
		queue: workqueue.NewTypedRateLimitingQueue(
			workqueue.NewTypedItemExponentialFailureRateLimiter[ledger.Ref](resizeRetryAtLeast, resizeRetryAtMost)),
		open: map[string]*answer{}, waiting: map[ledger.Ref]bool{},
	}
}

// PodChanged looks at a (trimmed) pod that may carry a request.
func (r *Resizer) PodChanged(p *corev1.Pod) {
	if p.Annotations[api.AnnotationResize] != "" {
		r.queue.Add(ledger.Ref{UID: string(p.UID), Namespace: p.Namespace, Name: p.Name})
	}
}

// ReportChanged looks at what a node says of its slices: refusals, and what a
// request may have waited for.
func (r *Resizer) ReportChanged(n *v1alpha1.GPUNode) {
	for _, c := range n.Status.Cards {
		for _, s := range c.Slices {
			ref := ledger.Ref{UID: s.PodUID, Namespace: s.Namespace, Name: s.Pod}
			r.mu.Lock()
			waits := r.waiting[ref]
			r.mu.Unlock()
			if waits || s.RefusedGeneration > s.Generation {
				r.queue.Add(ref)
			}
		}
	}
}

// Run answers until the context ends.
func (r *Resizer) Run(ctx context.Context) {
	tick := time.NewTicker(resizeRetryAtLeast)
	for !r.Ready() {
		select {
		case <-ctx.Done():
			tick.Stop()
			r.queue.ShutDown()
			return
		case <-tick.C:
		}
	}
	tick.Stop()
	var workers sync.WaitGroup
	for range resizeWorkers {
		workers.Go(func() {
			for {
				ref, down := r.queue.Get()
				if down {
					return
				}
				r.work(ctx, ref)
			}
		})
	}
	<-ctx.Done()
	r.queue.ShutDown()
	workers.Wait()
}

func (r *Resizer) work(ctx context.Context, ref ledger.Ref) {
	defer r.queue.Done(ref)
	again, err := r.look(ctx, ref)
	switch {
	case ctx.Err() != nil:
	case err != nil:
		r.Log.Warn("a resize isn't answered yet; trying again", "pod", ref.Namespace+"/"+ref.Name, "uid", ref.UID, "error", err)
		r.queue.AddRateLimited(ref)
	default:
		r.queue.Forget(ref)
		if again > 0 {
			r.queue.AddAfter(ref, again)
		}
	}
}

// answer is one write under way.
type answer struct {
	ref     ledger.Ref
	version string // of the pod that it was decided on: a precondition
	// request and before are the annotations that it was decided on, result and
	// grant those that it writes. grant is empty where it stays.
	request, before string
	result, grant   string
	booked          bool
	outcome         string
	message         string
}

// look brings one pod's request to its answer. again is when to look again where
// the answer has to wait.
func (r *Resizer) look(ctx context.Context, ref ledger.Ref) (again time.Duration, err error) {
	r.mu.Lock()
	delete(r.waiting, ref)
	a := r.open[ref.UID]
	r.mu.Unlock()
	if a == nil {
		p := r.Pod(ref)
		if p == nil {
			return 0, nil
		}
		if a, again, err = r.decide(ref, p); a == nil {
			return again, err
		}
	}
	o, err := r.write(ctx, a)
	if a.booked {
		r.Ledger.EndResize(ref.UID, o)
	}
	r.mu.Lock()
	if o == ledger.Unknown {
		r.open[ref.UID] = a
	} else {
		delete(r.open, ref.UID)
	}
	r.mu.Unlock()
	if o == ledger.Written {
		r.Log.Info("resize answered", "pod", ref.Namespace+"/"+ref.Name, "uid", ref.UID, "outcome", a.outcome, "message", a.message)
		if a.outcome != "" {
			r.Answered(ref, a.outcome, a.message)
		}
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	return resizeLook, nil
}

// decide makes the answer to what the pod shows, nil if there is none to give
// now.
func (r *Resizer) decide(ref ledger.Ref, p *corev1.Pod) (*answer, time.Duration, error) {
	a := &answer{ref: ref, version: p.ResourceVersion, request: p.Annotations[api.AnnotationResize], before: p.Annotations[api.AnnotationGrant]}
	last, _ := api.DecodeResizeResult(p.Annotations[api.AnnotationResizeResult])
	held, _ := api.DecodeGrant(a.before)
	if g, why, ok := r.Ledger.BeginRollback(ref.UID); ok {
		a.booked, a.outcome, a.message = true, "taken-back", clipMessage("the node can't put it in force, so nothing changed: "+why)
		result := api.ResizeResult{Version: api.ResizeVersion, Outcome: api.ResizeRefused, Generation: g.Generation, Message: a.message}
		if last.Generation == held.Generation {
			result.ID = last.ID
		}
		return r.complete(a, g, held, result)
	}
	if a.request == "" {
		return nil, 0, nil
	}
	ask, fault := api.DecodeResize(a.request)
	if ask.ID != "" && ask.ID == last.ID {
		// Answered already. One id has one answer, so this asks for nothing.
		a.result = p.Annotations[api.AnnotationResizeResult]
		return a, 0, nil
	}
	a.outcome = api.ResizeRefused
	result := api.ResizeResult{Version: api.ResizeVersion, ID: ask.ID, Outcome: api.ResizeRefused, Generation: held.Generation}
	if fault != nil {
		a.message = clipMessage(fault.Error())
		result.Message = a.message
		return r.complete(a, held, held, result)
	}
	g, err := r.Ledger.BeginResize(ref, ask)
	var refusal *ledger.ResizeRefusal
	switch {
	case errors.As(err, &refusal):
		a.message = clipMessage(refusal.Message(refusal.View, nil, place.Names(refusal.Holders, refusal.Refusal)))
		result.Message = a.message
		return r.complete(a, held, held, result)
	case errors.Is(err, ledger.ErrUnsettled) || errors.Is(err, ledger.ErrInFlight):
		r.mu.Lock()
		r.waiting[ref] = true
		r.mu.Unlock()
		return nil, resizeLook, nil
	case err != nil:
		return nil, 0, fmt.Errorf("book a resize: %w", err)
	}
	a.booked = g.Generation != held.Generation
	a.outcome = api.ResizeGranted
	result.Outcome, result.Generation = api.ResizeGranted, g.Generation
	return r.complete(a, g, held, result)
}

// complete writes out what an answer carries.
func (r *Resizer) complete(a *answer, g, held api.Grant, result api.ResizeResult) (*answer, time.Duration, error) {
	var err error
	if a.booked {
		if g.Generation != held.Generation+1 {
			// The informer and the ledger are a moment apart.
			err = fmt.Errorf("decide on generation %d: the pod shows generation %d", g.Generation, held.Generation)
		} else {
			a.grant, err = g.Encode()
		}
	}
	if err == nil {
		a.result, err = result.Encode()
	}
	if err != nil {
		if a.booked {
			r.Ledger.EndResize(a.ref.UID, ledger.Refused)
		}
		return nil, 0, err
	}
	return a, 0, nil
}

// write puts an answer on the pod. The patch's UID and resourceVersion are
// preconditions, so an attempt whose reply was lost can be repeated: one of them
// at most has an effect, and whoever else changes the pod meanwhile is seen.
func (r *Resizer) write(ctx context.Context, a *answer) (ledger.Outcome, error) {
	var err error
	for range resizeTries {
		if err = r.patch(ctx, a); err == nil {
			return ledger.Written, nil
		}
		if apierrors.IsNotFound(err) {
			return ledger.Refused, nil // the pod is gone, and its request with it
		}
		call, cancel := context.WithTimeout(ctx, resizeCall)
		p, look := r.Kube.CoreV1().Pods(a.ref.Namespace).Get(call, a.ref.Name, metav1.GetOptions{})
		cancel()
		switch {
		case apierrors.IsNotFound(look):
			return ledger.Refused, nil
		case look != nil:
			return ledger.Unknown, errors.Join(err, fmt.Errorf("look at the pod: %w", look))
		case string(p.UID) != a.ref.UID:
			return ledger.Refused, nil
		case a.done(p):
			return ledger.Written, nil
		case p.Annotations[api.AnnotationResize] != a.request || p.Annotations[api.AnnotationGrant] != a.before:
			return ledger.Refused, nil // what is there now is looked at anew
		case p.ResourceVersion != a.version:
			a.version = p.ResourceVersion // an earlier attempt can't succeed any more
		case definite(err):
			return ledger.Refused, err
		}
	}
	return ledger.Unknown, err
}

// done reports whether the pod shows the answer.
func (a *answer) done(p *corev1.Pod) bool {
	return p.Annotations[api.AnnotationResizeResult] == a.result && p.Annotations[api.AnnotationResize] == a.left() &&
		(a.grant == "" || p.Annotations[api.AnnotationGrant] == a.grant)
}

// left is the request that stays on the pod: one that came after the resize that
// is being taken back, which has its own answer.
func (a *answer) left() string {
	if a.outcome == "taken-back" {
		return a.request
	}
	return ""
}

func (r *Resizer) patch(ctx context.Context, a *answer) error {
	annotations := map[string]any{api.AnnotationResizeResult: a.result}
	if a.left() == "" {
		annotations[api.AnnotationResize] = nil
	}
	if a.grant != "" {
		annotations[api.AnnotationGrant] = a.grant
	}
	body, err := json.Marshal(map[string]any{"metadata": map[string]any{
		"uid": a.ref.UID, "resourceVersion": a.version, "annotations": annotations,
	}})
	if err != nil {
		return fmt.Errorf("write the answer to a resize: %w", err)
	}
	call, cancel := context.WithTimeout(ctx, resizeCall)
	defer cancel()
	if _, err := r.Kube.CoreV1().Pods(a.ref.Namespace).Patch(call, a.ref.Name, types.MergePatchType, body, metav1.PatchOptions{}); err != nil {
		return fmt.Errorf("write the answer to a resize: %w", err)
	}
	return nil
}

// definite reports whether an error says that the write had no effect.
func definite(err error) bool {
	var status apierrors.APIStatus
	if !errors.As(err, &status) {
		return false
	}
	code := status.Status().Code
	return code >= 400 && code < 500 && !apierrors.IsTimeout(err) && !apierrors.IsTooManyRequests(err) && !apierrors.IsConflict(err)
}

// clipMessage bounds what goes into a result, at a rune's border.
func clipMessage(s string) string {
	if len(s) <= api.MaxResizeMessage {
		return s
	}
	return strings.ToValidUTF8(s[:api.MaxResizeMessage-3], "") + "…"
}
