package sim

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"

	"github.com/carve-gpu/carve/api"
)

func key(p *corev1.Pod) string { return p.Namespace + "/" + p.Name }

func (f *Fleet) podChanged(o any) {
	if p, ok := o.(*corev1.Pod); ok && f.nodes[p.Spec.NodeName] != nil {
		f.queue.Add(key(p))
	}
}

// podGone: a pod that is gone holds nothing, whatever was seen of it before.
func (f *Fleet) podGone(o any) {
	if last, ok := o.(cache.DeletedFinalStateUnknown); ok {
		o = last.Obj
	}
	if p, ok := o.(*corev1.Pod); ok {
		if n := f.nodes[p.Spec.NodeName]; n != nil {
			n.drop(p.UID)
		}
	}
}

// work handles one pod; false when the queue was shut down.
func (f *Fleet) work(ctx context.Context) bool {
	k, down := f.queue.Get()
	if down {
		return false
	}
	defer f.queue.Done(k)
	after, err := f.handle(ctx, k)
	switch {
	case ctx.Err() != nil:
	case err != nil:
		f.Log.Warn("a pod isn't as it should be; trying again", "pod", k, "error", err)
		f.queue.AddRateLimited(k)
	default:
		f.queue.Forget(k)
		if after > 0 {
			f.queue.AddAfter(k, after)
		}
	}
	return true
}

// handle brings one pod a step on. It looks at how things are, so it may be
// called at any time; after says when to look again.
func (f *Fleet) handle(ctx context.Context, k string) (after time.Duration, err error) {
	namespace, name, _ := strings.Cut(k, "/")
	p, err := f.pods.Pods(namespace).Get(name)
	if apierrors.IsNotFound(err) {
		return 0, nil // podGone has seen to it
	}
	if err != nil {
		return 0, err
	}
	n := f.nodes[p.Spec.NodeName]
	if n == nil {
		return 0, nil
	}
	n.mu.Lock()
	gone := n.gone
	n.mu.Unlock()
	switch {
	case p.DeletionTimestamp != nil:
		// Its containers end at once. Its slices go when the pod is gone.
		return 0, f.deletePod(ctx, p)
	case p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed:
		n.drop(p.UID)
		return 0, nil
	case isAgent(p):
		if isReady(p) == !gone && p.Status.Phase == corev1.PodRunning {
			return 0, nil
		}
		return 0, f.patchStatus(ctx, p, n.running(p, !gone))
	case asks(p) && (gone || p.Annotations[api.AnnotationGrant] == ""):
		// As PreStart would: the containers wait. A change of the pod, or the
		// agent's return, brings it here again.
		return 0, nil
	case asks(p):
		if err := n.take(p); err != nil {
			f.refuse(fmt.Sprintf("pod %s: %v", k, err))
			return 0, nil
		}
	}
	if p.Status.Phase == corev1.PodRunning {
		n.activate(p.UID)
		return f.finish(ctx, n, p)
	}
	if wait := n.starting(p.UID, f.StartDelay); wait > 0 {
		return wait, nil
	}
	n.activate(p.UID)
	return 0, f.patchStatus(ctx, p, n.running(p, true))
}

// starting is how long a pod's containers still take to start.
func (n *node) starting(uid types.UID, delay time.Duration) time.Duration {
	n.mu.Lock()
	defer n.mu.Unlock()
	at, ok := n.ran[string(uid)]
	if !ok {
		at = time.Now().Add(delay)
		n.ran[string(uid)] = at
	}
	return time.Until(at)
}

// finish ends a pod whose time is over.
func (f *Fleet) finish(ctx context.Context, n *node, p *corev1.Pod) (time.Duration, error) {
	text, ok := p.Annotations[RunsFor]
	if !ok {
		return 0, nil
	}
	d, err := time.ParseDuration(text)
	if err != nil || p.Status.StartTime == nil {
		return 0, nil
	}
	if left := time.Until(p.Status.StartTime.Add(d)); left > 0 {
		return left, nil
	}
	return 0, f.patchStatus(ctx, p, n.succeeded(p))
}

// asks reports whether a pod asks for cards.
func asks(p *corev1.Pod) bool {
	for _, list := range [][]corev1.Container{p.Spec.InitContainers, p.Spec.Containers} {
		for _, c := range list {
			for name := range c.Resources.Limits {
				switch {
				case name == api.ResourceGPU, name == api.ResourceMemory, name == api.ResourceMemoryPercent, name == api.ResourceCores,
					strings.HasPrefix(string(name), api.ResourceMIGPrefix):
					return true
				}
			}
		}
	}
	return false
}

func isReady(p *corev1.Pod) bool {
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodReady {
			return c.Status == corev1.ConditionTrue
		}
	}
	return false
}

// base is the part of the status that all states share.
func (n *node) base(p *corev1.Pod, phase corev1.PodPhase, ready bool) corev1.PodStatus {
	now := metav1.Now()
	started := p.Status.StartTime
	if started == nil {
		started = &now
	}
	status := corev1.ConditionFalse
	if ready {
		status = corev1.ConditionTrue
	}
	s := corev1.PodStatus{Phase: phase, StartTime: started, HostIP: n.address(), HostIPs: []corev1.HostIP{{IP: n.address()}}}
	for _, kind := range []corev1.PodConditionType{corev1.PodReady, corev1.ContainersReady} {
		s.Conditions = append(s.Conditions, corev1.PodCondition{Type: kind, Status: status, LastTransitionTime: now})
	}
	s.Conditions = append(s.Conditions, corev1.PodCondition{Type: corev1.PodInitialized, Status: corev1.ConditionTrue, LastTransitionTime: *started})
	return s
}

func statuses(p *corev1.Pod, list []corev1.Container, state corev1.ContainerState, ready bool) []corev1.ContainerStatus {
	var out []corev1.ContainerStatus
	for _, c := range list {
		yes := state.Running != nil
		out = append(out, corev1.ContainerStatus{Name: c.Name, Image: c.Image, ImageID: c.Image, Ready: ready, Started: &yes,
			ContainerID: "containerd://sim-" + string(p.UID) + "-" + c.Name, State: state})
	}
	return out
}

func (n *node) running(p *corev1.Pod, ready bool) corev1.PodStatus {
	s := n.base(p, corev1.PodRunning, ready)
	now := metav1.Now()
	run := corev1.ContainerState{Running: &corev1.ContainerStateRunning{StartedAt: now}}
	ended := corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{Reason: "Completed", StartedAt: now, FinishedAt: now}}
	for i := range p.Spec.InitContainers {
		c := p.Spec.InitContainers[i : i+1]
		if sidecar(&c[0]) {
			s.InitContainerStatuses = append(s.InitContainerStatuses, statuses(p, c, run, true)...)
		} else {
			s.InitContainerStatuses = append(s.InitContainerStatuses, statuses(p, c, ended, true)...)
		}
	}
	s.ContainerStatuses = statuses(p, p.Spec.Containers, run, ready)
	return s
}

func (n *node) succeeded(p *corev1.Pod) corev1.PodStatus {
	s := n.base(p, corev1.PodSucceeded, false)
	now := metav1.Now()
	ended := corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{Reason: "Completed", StartedAt: *s.StartTime, FinishedAt: now}}
	s.InitContainerStatuses = statuses(p, p.Spec.InitContainers, ended, false)
	s.ContainerStatuses = statuses(p, p.Spec.Containers, ended, false)
	return s
}

// patchStatus writes a status as a kubelet does; the UID is a precondition.
func (f *Fleet) patchStatus(ctx context.Context, p *corev1.Pod, s corev1.PodStatus) error {
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"uid": p.UID}, "status": s})
	if err == nil {
		_, err = f.Kube.CoreV1().Pods(p.Namespace).Patch(ctx, p.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status")
	}
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
		return fmt.Errorf("patch the status of pod %s: %w", key(p), err)
	}
	return nil
}

// deletePod takes a pod away for good.
func (f *Fleet) deletePod(ctx context.Context, p *corev1.Pod) error {
	zero := int64(0)
	err := f.Kube.CoreV1().Pods(p.Namespace).Delete(ctx, p.Name, metav1.DeleteOptions{GracePeriodSeconds: &zero, Preconditions: &metav1.Preconditions{UID: &p.UID}})
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
		return fmt.Errorf("delete pod %s: %w", key(p), err)
	}
	return nil
}
