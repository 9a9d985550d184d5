package extender

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	wirev1 "k8s.io/kube-scheduler/extender/v1"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/scheduler-extender/ledger"
)

// bindTimeout bounds one bind: kube-scheduler gives up after five seconds by
// default, and the outcome should be known by then.
const bindTimeout = 4 * time.Second

// Binder writes bindings.
type Binder interface {
	// Bind writes one Binding with the pod's UID as precondition, and with
	// the grant as an annotation if grant isn't empty. The outcome says
	// whether the pod is bound there with exactly that grant; err is nil if
	// and only if it is Written.
	Bind(ctx context.Context, pod ledger.Ref, node, grant string) (ledger.Outcome, error)
}

// Pods tells of the pods that the extender knows from the API.
type Pods interface {
	// Asks returns what a pod asks for; false while the pod isn't known.
	Asks(pod ledger.Ref) (api.Request, bool)
}

// Agents tells of the nodes' agents.
type Agents interface {
	// Look makes sure that what the ledger knows of a node's agent is of this
	// moment, as far as can be found out within a fraction of a second.
	Look(ctx context.Context, node string)
}

func (s *Server) bind(ctx context.Context, body []byte, fault error) any {
	var a wirev1.ExtenderBindingArgs
	if fault == nil {
		if err := json.Unmarshal(body, &a); err != nil {
			fault = fmt.Errorf("read the request: %w", err)
		}
	}
	if fault == nil && (a.PodUID == "" || a.PodName == "" || a.PodNamespace == "" || a.Node == "") {
		fault = errors.New("read the request: pod name, namespace, UID and node are all needed")
	}
	if fault != nil {
		s.metrics.binds.WithLabelValues("fault").Inc()
		s.log(ctx).Warn("bind not tried", "pod", a.PodNamespace+"/"+a.PodName, "uid", a.PodUID, "node", a.Node, "error", fault)
		return &wirev1.ExtenderBindingResult{Error: fault.Error()}
	}
	pod := ledger.Ref{UID: string(a.PodUID), Namespace: a.PodNamespace, Name: a.PodName}
	// The scheduler hanging up must not tear a write in two.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), bindTimeout)
	defer cancel()
	result, err := s.bindPod(ctx, pod, a.Node)
	s.metrics.binds.WithLabelValues(result).Inc()
	if err != nil {
		s.log(ctx).Warn("bind failed", "pod", pod.Namespace+"/"+pod.Name, "uid", pod.UID, "node", a.Node, "error", err)
		return &wirev1.ExtenderBindingResult{Error: err.Error()}
	}
	s.log(ctx).Info("bound", "pod", pod.Namespace+"/"+pod.Name, "uid", pod.UID, "node", a.Node, "as", result)
	return &wirev1.ExtenderBindingResult{}
}

// bindPod binds and names the result for the metric.
func (s *Server) bindPod(ctx context.Context, pod ledger.Ref, node string) (string, error) {
	failed := func(err error) error {
		return fmt.Errorf("bind pod %s/%s to %s: %w", pod.Namespace, pod.Name, node, err)
	}
	n := s.Ledger.Node(node)
	if n == nil || !n.Snapshot().Known {
		return "refused", failed(errors.New("the node is not known"))
	}
	request, known := s.Pods.Asks(pod)
	managed := n.Snapshot().Managed
	switch {
	case managed:
	case !known:
		return "refused", failed(errors.New("the pod is not known yet"))
	case !request.WholeOnly():
		return "refused", failed(errors.New("the pod asks for a share, and carve doesn't manage this node"))
	}
	if !managed || known && request.Empty() {
		if _, err := s.Binder.Bind(ctx, pod, node, ""); err != nil {
			return "failed", failed(err)
		}
		s.Ledger.Withdraw(pod.UID)
		return "plain", nil
	}
	if s.Agents != nil {
		s.Agents.Look(ctx, node)
	}
	grant, bound, err := s.Ledger.BeginBind(pod, node, s.Now())
	switch {
	case errors.Is(err, ledger.ErrNoRoom), errors.Is(err, ledger.ErrChanged):
		return "conflict", failed(err)
	case errors.Is(err, ledger.ErrBlocked):
		return "blocked", failed(err)
	case errors.As(err, new(*ledger.QuotaRefusal)):
		return "quota", failed(err)
	case err != nil:
		return "refused", failed(err)
	case bound:
		return "again", nil
	}
	// From here on EndBind must be called, come what may.
	outcome := ledger.Refused
	defer func() { s.Ledger.EndBind(pod.UID, outcome, s.Now()) }()
	value, err := grant.Encode()
	if err != nil {
		return "failed", failed(err)
	}
	outcome = ledger.Unknown
	outcome, err = s.Binder.Bind(ctx, pod, node, value)
	if err != nil {
		return "failed", failed(err)
	}
	return "granted", nil
}
