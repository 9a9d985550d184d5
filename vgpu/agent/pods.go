package agent

import (
	"context"
	"runtime/debug"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	typedv1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/tools/cache"
	events "k8s.io/client-go/tools/record"

	"github.com/carve-gpu/carve/api"
)

// pod is what the agent keeps of a pod.
type pod struct {
	uid, namespace, name string
	grant                string
	order                []podContainer
	// asks are the containers that request cards.
	asks map[string]bool
	// request is what a pod without a grant asks for; requestFault says why that
	// can't be meant.
	request      api.Request
	requestFault error
	// never says that the pod doesn't restart containers.
	never bool
	// over is true once no container of the pod will run again.
	over bool
	// until is when what runs of a pod that is being deleted is killed at the
	// latest; zero where it isn't, or nothing runs any more.
	until time.Time
	// told is when it was told to go.
	told time.Time
	// done are the init containers that ended well.
	done map[string]bool
	// ended are the IDs of containers that the kubelet saw end.
	ended []string
	// standsFor is the UID by which the runtime knows a static pod, on what says
	// that it stands in the API for one. Anybody can say so of any pod, so it
	// serves to refuse and never to choose whose slices are meant.
	standsFor string
	// asked is when the API server was asked for it, zero for one that the watch has
	// shown. The watch may never see such a pod, so nothing would say that it has gone:
	// it is asked for again.
	asked time.Time
}

func (p pod) found() found {
	return found{candidate: candidate{uid: p.uid, order: p.order}, namespace: p.namespace, name: p.name}.decode(p.grant)
}

// found is a grant with where it was found.
type found struct {
	candidate
	namespace, name string
	text            string
	fault           error
}

func (f found) decode(text string) found {
	if f.text = text; text != "" {
		f.grant, f.fault = api.DecodeGrant(text)
	}
	return f
}

// sandbox is what the runtime says of a pod: annotations frozen when it was
// made.
type sandbox struct {
	namespace, name string
	grant           string
	// static is a pod from a file on the node, whose annotations no API server
	// has checked.
	static bool
}

// asks reports whether a grant could come from the sandbox.
func (s sandbox) asks() bool { return s.grant != "" && !s.static }

func (s sandbox) found(uid string) found {
	return found{candidate: candidate{uid: uid}, namespace: s.namespace, name: s.name}.decode(s.grant)
}

// configSource is the annotation by which the kubelet says where a pod comes
// from: "api", "file" or "http".
const configSource = "kubernetes.io/config.source"

// mirrorOf is on a pod that stands in the API for a static one. Its value is
// the UID by which the kubelet and the runtime know that pod.
const mirrorOf = "kubernetes.io/config.mirror"

// readPod keeps the parts that matter.
func readPod(p *corev1.Pod) pod {
	out := pod{
		uid: string(p.UID), namespace: p.Namespace, name: p.Name,
		grant: p.Annotations[api.AnnotationGrant], standsFor: p.Annotations[mirrorOf],
		asks: map[string]bool{}, done: map[string]bool{}, never: p.Spec.RestartPolicy == corev1.RestartPolicyNever,
		over: p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed,
	}
	var specs []api.ContainerSpec
	add := func(c *corev1.Container, kind api.ContainerKind) {
		out.order = append(out.order, podContainer{c.Name, kind})
		spec := api.ContainerSpec{Name: c.Name, Kind: kind, Resources: map[string]string{}}
		spec.Privileged = c.SecurityContext != nil && c.SecurityContext.Privileged != nil && *c.SecurityContext.Privileged
		for name, q := range c.Resources.Limits {
			spec.Resources[string(name)] = q.String()
		}
		// A request that can't be read asks for something, whatever it is.
		r, err := api.ParseRequest([]api.ContainerSpec{spec}, nil)
		if err != nil || !r.Empty() {
			out.asks[c.Name] = true
		}
		specs = append(specs, spec)
	}
	for i := range p.Spec.InitContainers {
		c := &p.Spec.InitContainers[i]
		kind := api.Init
		if c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways {
			kind = api.Sidecar
		}
		add(c, kind)
	}
	for i := range p.Spec.Containers {
		add(&p.Spec.Containers[i], api.App)
	}
	if out.grant == "" && len(out.asks) > 0 {
		out.request, out.requestFault = api.ParseRequest(specs, p.Annotations)
	}
	for _, s := range p.Status.InitContainerStatuses {
		if t := s.State.Terminated; t != nil && t.ExitCode == 0 {
			out.done[s.Name] = true
		}
	}
	for _, list := range [][]corev1.ContainerStatus{p.Status.InitContainerStatuses, p.Status.ContainerStatuses} {
		for _, s := range list {
			if p.DeletionTimestamp != nil && s.State.Running != nil {
				out.until, out.told = p.DeletionTimestamp.Time, p.DeletionTimestamp.Time
				if grace := p.DeletionGracePeriodSeconds; grace != nil {
					out.told = out.until.Add(-time.Duration(*grace) * time.Second)
				}
			}
			for _, t := range []*corev1.ContainerStateTerminated{s.State.Terminated, s.LastTerminationState.Terminated} {
				if t == nil {
					continue
				}
				// "containerd://ID", "cri-o://ID"
				if _, id, ok := strings.Cut(t.ContainerID, "://"); ok && id != "" {
					out.ended = append(out.ended, id)
				}
			}
		}
	}
	return out
}

// slim drops what the agent never reads, so that a node with many pods costs
// little memory.
func slim(o any) (any, error) {
	p, ok := o.(*corev1.Pod)
	if !ok {
		return o, nil
	}
	annotations := map[string]string{}
	for key, v := range p.Annotations {
		domain, _, _ := strings.Cut(key, "/")
		switch domain {
		case "carve.dev", "nvidia.com", "hami.io":
			annotations[key] = v
		default:
			if key == mirrorOf {
				annotations[key] = v
			}
		}
	}
	containers := func(in []corev1.Container) []corev1.Container {
		var out []corev1.Container
		for _, c := range in {
			out = append(out, corev1.Container{Name: c.Name, RestartPolicy: c.RestartPolicy,
				Resources: corev1.ResourceRequirements{Limits: c.Resources.Limits}})
		}
		return out
	}
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Name: p.Name, Namespace: p.Namespace, UID: p.UID, ResourceVersion: p.ResourceVersion,
			Annotations: annotations, DeletionTimestamp: p.DeletionTimestamp, DeletionGracePeriodSeconds: p.DeletionGracePeriodSeconds,
		},
		Spec: corev1.PodSpec{
			NodeName:       p.Spec.NodeName,
			RestartPolicy:  p.Spec.RestartPolicy,
			InitContainers: containers(p.Spec.InitContainers),
			Containers:     containers(p.Spec.Containers),
		},
		Status: corev1.PodStatus{Phase: p.Status.Phase, InitContainerStatuses: p.Status.InitContainerStatuses, ContainerStatuses: p.Status.ContainerStatuses},
	}, nil
}

// watchPods follows this node's pods until ctx ends.
func (a *Agent) watchPods(ctx context.Context) {
	factory := informers.NewSharedInformerFactoryWithOptions(a.Pods, 0,
		informers.WithTransform(slim),
		informers.WithTweakListOptions(func(o *metav1.ListOptions) {
			o.FieldSelector = fields.OneTermEqualSelector("spec.nodeName", a.Node).String()
		}))
	pods := factory.Core().V1().Pods().Informer()
	registration, err := pods.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(o any) { a.podChanged(o) },
		UpdateFunc: func(_, o any) { a.podChanged(o) },
		DeleteFunc: a.podDeleted,
	})
	if err != nil {
		a.Log.Error("pods can't be watched", "error", err)
		return
	}
	factory.Start(ctx.Done())
	defer factory.Shutdown()
	if !cache.WaitForCacheSync(ctx.Done(), registration.HasSynced) {
		return
	}
	a.mu.Lock()
	a.watched = true
	a.wake()
	a.mu.Unlock()
	a.Log.Info("pods of this node are known")
	a.queueAll()
	<-ctx.Done()
}

func (a *Agent) podChanged(o any) {
	p, ok := o.(*corev1.Pod)
	if !ok || p.Spec.NodeName != a.Node {
		return
	}
	a.keepPod(readPod(p))
}

// keepPod takes in what a pod is now.
func (a *Agent) keepPod(q pod) {
	a.mu.Lock()
	if was, known := a.pods[q.uid]; known && !q.asked.IsZero() && was.asked.IsZero() {
		// The watch shows it: what it says is newer, or is about to be.
		a.mu.Unlock()
		return
	}
	a.pods[q.uid] = q
	a.dropStillborn(q)
	a.wake()
	a.mu.Unlock()
	a.queue.Add(q.uid)
	a.report()
}

func (a *Agent) podDeleted(o any) {
	if tombstone, ok := o.(cache.DeletedFinalStateUnknown); ok {
		o = tombstone.Obj
	}
	p, ok := o.(*corev1.Pod)
	if !ok {
		return
	}
	uid := string(p.UID)
	a.mu.Lock()
	delete(a.pods, uid)
	delete(a.sandboxes, uid)
	a.mu.Unlock()
	a.queue.Add(uid)
}

// queueAll marks everything that is known for a look: every pod, every slice,
// every directory.
func (a *Agent) queueAll() {
	a.mu.Lock()
	for uid := range a.pods {
		a.queue.Add(uid)
	}
	for uid := range a.held {
		a.queue.Add(uid)
	}
	for _, u := range a.containers {
		a.queue.Add(u.uid)
	}
	ready := a.watched && a.listed
	a.mu.Unlock()
	if ready {
		a.clearStray()
	}
}

// clearStray removes directories that no record owns. A record is written
// first, so they come from a journal that was lost or damaged.
func (a *Agent) clearStray() {
	uids, err := a.files.pods()
	if err != nil {
		a.Log.Warn("slices can't be listed", "error", err)
		return
	}
	for _, uid := range uids {
		a.mu.Lock()
		_, held := a.held[uid]
		_, live := a.pods[uid]
		for _, u := range a.containers {
			live = live || u.uid == uid
		}
		a.mu.Unlock()
		if held || live {
			continue
		}
		a.Log.Warn("clearing a slice that no record owns", "uid", uid)
		if err := a.files.clear(uid); err != nil {
			a.Log.Warn("a slice can't be cleared", "error", err)
		}
	}
}

// Reasons of the events that the agent writes on pods.
const (
	reasonGrantRefused = "GrantRefused"
	reasonUnadjusted   = "StartedWithoutCard"
	reasonUngranted    = "CardsWithheld"
	reasonAccessMended = "DeviceAccessRepaired"
	reasonAccessLost   = "DeviceAccessLost"

	// On the node.
	reasonHookDown       = "HookDown"
	reasonHookUp         = "HookUp"
	reasonUnwritable     = "SlicesUnwritable"
	reasonWritable       = "SlicesWritable"
	reasonSharing        = "SharingConfigured"
	reasonSharingRefused = "SharingConfigRefused"
	reasonComputeMode    = "ComputeModeSet"
	reasonResizeRefused  = "ResizeRefused"
	reasonOverLimit      = "MemoryOverLimit"
)

var eventScheme = scheme.Scheme

func eventSink(c kubernetes.Interface) events.EventSink {
	return &typedv1.EventSinkImpl{Interface: c.CoreV1().Events("")}
}

// event says something on a pod. The recorder joins repeated events.
func (a *Agent) event(p pod, kind, reason, message string) {
	if p.uid == "" {
		return
	}
	a.mu.Lock()
	recorder := a.events
	a.mu.Unlock()
	recorder.Event(podReference(p), kind, reason, message)
}

// nodeEvent says something on this node.
func (a *Agent) nodeEvent(kind, reason, message string) {
	a.mu.Lock()
	recorder := a.events
	a.mu.Unlock()
	// The kubelet's own events name the node by this, too.
	recorder.Event(&corev1.ObjectReference{Kind: "Node", Name: a.Node, UID: types.UID(a.Node)}, kind, reason, message)
}

func podReference(p pod) runtime.Object {
	return &corev1.ObjectReference{
		APIVersion: "v1", Kind: "Pod", Namespace: p.namespace, Name: p.name, UID: types.UID(p.uid),
	}
}

func stack() string { return string(debug.Stack()) }
