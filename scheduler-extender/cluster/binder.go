package cluster

import (
	"context"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/scheduler-extender/ledger"
)

// lookTimeout bounds the look at a pod after a write whose outcome is open.
const lookTimeout = 2 * time.Second

// Binder writes Bindings.
type Binder struct {
	Kube kubernetes.Interface
	// Pods knows the pods' own annotations; it may be nil.
	Pods *Source
}

// Bind writes the Binding. The API server merges its annotations into the pod
// in the same transaction that sets the node, checks the UID, and refuses pods
// that are bound, gated or being deleted (pkg/registry/core/pod/storage, v1.37).
// After an error that leaves it open whether the write happened, the pod is
// looked at.
func (b Binder) Bind(ctx context.Context, pod ledger.Ref, node, grant string) (ledger.Outcome, error) {
	binding := &corev1.Binding{
		ObjectMeta: metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name, UID: types.UID(pod.UID)},
		Target:     corev1.ObjectReference{Kind: "Node", Name: node},
	}
	if grant != "" {
		binding.Annotations = map[string]string{api.AnnotationGrant: grant}
		own := ""
		if b.Pods != nil {
			own = b.Pods.requiredPlugins(pod)
		}
		if required, ok := requireHook(own); ok {
			binding.Annotations[api.AnnotationRequiredPlugins] = required
		}
	}
	err := b.Kube.CoreV1().Pods(pod.Namespace).Bind(ctx, binding, metav1.CreateOptions{})
	if err == nil {
		return ledger.Written, nil
	}
	// A conflict may be with an earlier write of ours whose reply was lost.
	// Other refusals (not found, forbidden, invalid) had no effect; anything
	// else may have had one.
	conflict := apierrors.IsConflict(err) || apierrors.IsAlreadyExists(err)
	if status := apierrors.APIStatus(nil); errors.As(err, &status) {
		code := status.Status().Code
		if code >= 400 && code < 500 && !conflict && !apierrors.IsTimeout(err) && !apierrors.IsTooManyRequests(err) {
			return ledger.Refused, fmt.Errorf("write the binding: %w", err)
		}
	}
	look, cancel := context.WithTimeout(context.WithoutCancel(ctx), lookTimeout)
	defer cancel()
	now, lookErr := b.Kube.CoreV1().Pods(pod.Namespace).Get(look, pod.Name, metav1.GetOptions{})
	switch {
	case apierrors.IsNotFound(lookErr):
		return ledger.Refused, fmt.Errorf("write the binding: the pod is gone: %w", err)
	case lookErr != nil:
		return ledger.Unknown, fmt.Errorf("write the binding: %w; look at the pod: %w", err, lookErr)
	case string(now.UID) != pod.UID:
		return ledger.Refused, fmt.Errorf("write the binding: the pod was replaced by one with UID %s: %w", now.UID, err)
	case now.Spec.NodeName == node && (grant == "" || now.Annotations[api.AnnotationGrant] == grant):
		return ledger.Written, nil
	case now.Spec.NodeName != "":
		return ledger.Refused, fmt.Errorf("write the binding: the pod is bound to %s with another grant: %w", now.Spec.NodeName, err)
	case conflict:
		return ledger.Refused, fmt.Errorf("write the binding: %w", err)
	}
	return ledger.Unknown, fmt.Errorf("write the binding: %w", err)
}
