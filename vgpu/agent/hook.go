package agent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/vgpu/gpu"
)

// linkGrace is how long the hook's link may be down before the agent isn't
// ready: a restart of the runtime takes less.
const linkGrace = 10 * time.Second

// tellLimit is how long an agent that starts waits for the API server to show
// the pod before it acts on one of its containers.
const tellLimit = 5 * time.Second

// Prepared is a slice that is ready for its container.
type Prepared struct {
	PodUID, Container string
	Generation        int
	Cards             []gpu.DeviceNode
	// LimitsPath and UsagePath are empty for whole cards and slices of their time.
	LimitsPath, UsagePath string
	// MPS is set in mode mps.
	MPS *PreparedMPS
}

// PreparedMPS is what makes a container's processes clients of its card's MPS daemon.
type PreparedMPS struct {
	// PipePath and ShmPath are the daemon's folders on the node.
	PipePath, ShmPath string
	// Percent is of the card's multiprocessors, 1 to 100.
	Percent int
	MemMiB  int64
}

// RuntimeContainer is what the runtime says of a container.
type RuntimeContainer struct {
	ID, PodUID, Name string
	// Asked says that the device plugin marked it, Adjusted that the hook did.
	Asked, Adjusted bool
	// HostPID is its first process, 0 if there is none.
	HostPID int
	// Devices are the devices of its specification, where the runtime says.
	Devices []gpu.DeviceNode
}

// Slice returns what is ready for a container that is being created: nil if it
// isn't to have any card. The error says in a sentence why it must not start.
func (a *Agent) Slice(c RuntimeContainer) (*Prepared, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if h := a.held[c.PodUID]; h != nil {
		if cards := h.Grant.Containers[c.Name]; cards != nil {
			return a.ready(h, c.Name, cards)
		}
	}
	p, known := a.pods[c.PodUID]
	switch {
	case a.refused[c.PodUID] != "" && (c.Asked || p.asks[c.Name]):
		return nil, fmt.Errorf("container %s gets no card: %s", c.Name, a.refused[c.PodUID])
	case known && p.grant != "" && (c.Asked || p.asks[c.Name]):
		return nil, fmt.Errorf("the slice of container %s isn't prepared yet%s", c.Name, a.because(c.PodUID))
	case known && (c.Asked || p.asks[c.Name]):
		return nil, fmt.Errorf("container %s asks for cards, but the pod carries no grant: it came past carve's scheduler extender (a nodeName of its own, or another scheduler)", c.Name)
	case !known && a.staticAsks(c):
		return nil, fmt.Errorf("container %s asks for cards, but its static pod carries no grant: carve's scheduler extender can't place one", c.Name)
	case !known && c.Asked:
		return nil, fmt.Errorf("container %s asks for cards, and the agent doesn't know its pod yet", c.Name)
	case !known && a.sandboxes[c.PodUID].grants(c.Name):
		return nil, fmt.Errorf("the slice of container %s isn't prepared yet%s", c.Name, a.because(c.PodUID))
	}
	return nil, nil
}

// staticAsks reports whether a pod that the watch doesn't know is a static one
// that asks for cards in this container. a.mu is held.
func (a *Agent) staticAsks(c RuntimeContainer) bool {
	for _, p := range a.pods {
		if p.standsFor == c.PodUID && p.asks[c.Name] {
			return true
		}
	}
	return false
}

// ready turns a holding into what the hook needs. a.mu is held.
func (a *Agent) ready(h *holding, container string, cards []api.CardGrant) (*Prepared, error) {
	if !h.prepared {
		return nil, fmt.Errorf("the slice of container %s isn't prepared yet%s", container, a.because(h.Grant.UID))
	}
	if a.hardware.driver == nil {
		return nil, errors.New("the driver's files aren't known yet")
	}
	p := &Prepared{PodUID: h.Grant.UID, Container: container, Generation: h.Grant.Generation}
	for _, c := range cards {
		n, ok := a.hardware.nodes[c.Card]
		if !ok {
			return nil, fmt.Errorf("the device node of card %s isn't known yet", c.Card)
		}
		p.Cards = append(p.Cards, n)
	}
	if why := a.unready(cards); why != "" {
		return nil, fmt.Errorf("container %s: %s", container, why)
	}
	if fronted(cards[0].Mode) {
		p.LimitsPath = a.files.limits(h.Grant.UID, container)
		p.UsagePath = a.files.usage(h.Grant.UID, container)
	}
	if c := cards[0]; c.Mode == api.ModeMPS {
		dir := a.mpsDir()
		p.MPS = &PreparedMPS{PipePath: dir.Pipe(c.Card), ShmPath: dir.Shm(c.Card), Percent: mpsPercent(c), MemMiB: c.MemMiB}
	}
	return p, nil
}

// grants reports whether the sandbox's grant, whatever it is worth, names a
// container.
func (s sandbox) grants(container string) bool {
	if s.grant == "" {
		return false
	}
	g, err := api.DecodeGrant(s.grant)
	return err != nil || g.Containers[container] != nil
}

// Adjusted notes that a container with a slice is being created.
func (a *Agent) Adjusted(c RuntimeContainer) {
	a.mu.Lock()
	defer a.mu.Unlock()
	u := use{uid: c.PodUID, container: c.Name, adjusted: true}
	if h := a.held[c.PodUID]; h != nil {
		h.used[c.Name] = true
		u.epoch = a.epochOf(h.Grant.Containers[c.Name])
		if a.hardware.driver != nil {
			u.devices = append(u.devices, a.hardware.driver.Control...)
		}
		for _, cg := range h.Grant.Containers[c.Name] {
			if n, ok := a.hardware.nodes[cg.Card]; ok {
				u.devices = append(u.devices, n)
			}
		}
	}
	a.containers[c.ID] = u
	a.stir()
	a.report()
}

// Started notes that a container's first process runs; hostPID is 0 where the
// runtime doesn't say which that is.
func (a *Agent) Started(id string, hostPID int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if u, ok := a.containers[id]; ok {
		u.started = true
		if hostPID != 0 {
			u.hostPID = hostPID
		}
		a.containers[id] = u
		a.stir() // layers hold it, should the runtime not have told its pid before
	}
}

// dropStillborn forgets containers that were created and never started, when
// the kubelet says that they ended: the runtime doesn't tell of their end (seen
// with containerd 2.4, whose NRI has no event for a start that failed). Of a
// container that did start, only the runtime's word counts. a.mu is held.
func (a *Agent) dropStillborn(p pod) {
	for _, id := range p.ended {
		if u, ok := a.containers[id]; ok && u.uid == p.uid && !u.started {
			delete(a.containers, id)
		}
	}
}

// Exited notes that a container has no process any more. It is keyed by the
// container's ID: a late word on an earlier one of the same name changes
// nothing.
func (a *Agent) Exited(id string) {
	a.mu.Lock()
	u, ok := a.containers[id]
	delete(a.containers, id)
	a.mu.Unlock()
	if ok {
		a.queue.Add(u.uid)
		a.stir()
		a.report()
	}
}

// Starting is asked before a created container starts; hostPID is its process, which
// waits, or 0 where the runtime doesn't say. A container that should have a card and
// was created without the hook must not start. One with a share is held from here on
// by all layers that can; where one can't, that is reported, and the library holds.
func (a *Agent) Starting(id string, hostPID int) error {
	a.mu.Lock()
	u, ok := a.containers[id]
	if ok && a.unadjusted(u) {
		a.mu.Unlock()
		return fmt.Errorf("container %s was created while carve's hook was away and has no card; it must be created again", u.container)
	}
	if ok && hostPID != 0 {
		u.hostPID = hostPID
		a.containers[id] = u
	}
	a.mu.Unlock()
	if ok && hostPID != 0 && len(a.Layers) > 0 {
		_ = a.holdContainer(id) // it has been noted
	}
	return nil
}

// SandboxStarted notes what the runtime says of a pod.
func (a *Agent) SandboxStarted(uid, namespace, name string, annotations map[string]string) {
	s := sandbox{
		namespace: namespace, name: name,
		grant:  annotations[api.AnnotationGrant],
		static: annotations[configSource] != "api",
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if _, known := a.pods[uid]; known || s.grant == "" {
		return
	}
	a.sandboxes[uid] = s
	a.queue.Add(uid)
}

// Synchronize takes over the runtime's list of containers that haven't exited.
func (a *Agent) Synchronize(list []RuntimeContainer) {
	a.mu.Lock()
	before := a.containers
	a.containers = make(map[string]use, len(list))
	for _, c := range list {
		a.containers[c.ID] = use{
			uid: c.PodUID, container: c.Name, hostPID: c.HostPID, started: c.HostPID != 0,
			adjusted: c.Adjusted, asked: c.Asked, stopped: before[c.ID].stopped, lostTold: before[c.ID].lostTold, devices: c.Devices,
		}
		if h := a.held[c.PodUID]; h != nil && c.Adjusted {
			h.used[c.Name] = true
			u := a.containers[c.ID]
			for _, cg := range h.Grant.Containers[c.Name] {
				u.epoch = a.mps.epochs[cg.Card] // whoever ran was served in the last
			}
			if was, known := before[c.ID]; known {
				u.epoch = was.epoch
			}
			a.containers[c.ID] = u
		}
	}
	a.listed = true
	a.mu.Unlock()
	a.stir()
	a.queueAll()
	a.report()
}

// LinkChanged notes whether the hook's link to the runtime is up.
func (a *Agent) LinkChanged(up bool) {
	a.mu.Lock()
	if up {
		a.doubtAccess() // the runtime may have been reloaded
		a.linkedSince, a.downSince, a.linkFault, a.linked = time.Now(), time.Time{}, "", true
	} else {
		a.linkedSince, a.downSince = time.Time{}, time.Now()
	}
	a.wake()
	a.mu.Unlock()
	a.report()
}

// LinkFault notes why the hook's link to the runtime can't be made.
func (a *Agent) LinkFault(sentence string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.linkFault = sentence
}

// stopsLong is how much longer a container may take to stop that a new link of
// the hook would have to wait for.
const stopsLong = time.Minute

// LinkWaits says in a sentence why the hook's link must not be made now, "" if it
// may. A plugin that registers with containerd waits for each container that is
// being stopped, for its whole grace period, and everything else that the node's
// containers need waits behind it (seen with containerd 2.4 and an hour's grace).
// Without the link only containers with cards wait. Pods that are told to go while
// it waits don't count, or it could wait for ever on a busy node.
func (a *Agent) LinkWaits() string {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.watched && time.Since(a.started) < tellLimit {
		return "the node's pods aren't known yet"
	}
	for _, p := range a.pods {
		if time.Until(p.until) > stopsLong && p.told.Before(a.downSince) {
			return fmt.Sprintf("pod %s/%s is being stopped and may take until %s; the container runtime takes no plugin before, and would hold up all of the node's containers for one that asks (delete the pod with --grace-period=0 if it must not take so long)",
				p.namespace, p.name, p.until.UTC().Format(time.RFC3339))
		}
	}
	return ""
}

// linkDown says in a sentence that the link is down and why, "" while it is up.
// a.mu is held.
func (a *Agent) linkDown() string {
	if a.downSince.IsZero() {
		return ""
	}
	s := "carve's hook has no link to the container runtime"
	if a.linkFault != "" {
		s += ": " + a.linkFault
	}
	return s
}

// tellLink says on the node that the link is down, once for each cause, and
// that it is back.
func (a *Agent) tellLink(ctx context.Context) {
	for pause(ctx, time.Second) {
		a.mu.Lock()
		now, said := a.linkDown(), a.downSaid
		if now != "" && time.Since(a.downSince) < linkGrace {
			now = said
		}
		a.downSaid = now
		a.mu.Unlock()
		switch {
		case now == said:
		case now == "":
			a.nodeEvent(corev1.EventTypeNormal, reasonHookUp, "carve's hook is linked to the container runtime")
		default:
			a.nodeEvent(corev1.EventTypeWarning, reasonHookDown, now+"; no card is handed out here until it is")
		}
	}
}

// Ungranted says on a pod that cards were kept from a container whose image
// asks for all of them.
func (a *Agent) Ungranted(uid, container string) {
	a.mu.Lock()
	p := a.pods[uid]
	a.mu.Unlock()
	a.event(p, corev1.EventTypeWarning, reasonUngranted,
		fmt.Sprintf("container %s sets NVIDIA_VISIBLE_DEVICES but asks for no card in its resources: it gets none", container))
}

// AwaitPrepared returns nil once a container's slice is in place and the hook
// is linked. The error, when ctx ends or as soon as waiting is in vain, says
// what is missing.
func (a *Agent) AwaitPrepared(ctx context.Context, namespace, name, container string) error {
	for {
		missing, final, changed := a.missing(namespace, name, container)
		if missing == "" {
			return nil
		}
		if final {
			return errors.New(missing)
		}
		select {
		case <-ctx.Done():
			return errors.New(missing)
		case <-changed:
		}
	}
}

// missing says what keeps a container from starting, and whether waiting is in
// vain.
func (a *Agent) missing(namespace, name, container string) (why string, final bool, changed <-chan struct{}) {
	a.mu.Lock()
	defer a.mu.Unlock()
	changed = a.changed
	if a.linkedSince.IsZero() {
		return a.linkDown() + "; no card is handed out until it has", false, changed
	}
	var p pod
	for _, q := range a.pods {
		if q.namespace == namespace && q.name == name && !q.over {
			p = q
		}
	}
	uid := p.uid
	if uid == "" {
		// With the API server away, a pod is known by its slice only.
		for _, h := range a.held {
			if h.Namespace == namespace && h.Pod == name && h.State == stateHeld {
				uid = h.Grant.UID
			}
		}
	}
	h := a.held[uid]
	switch {
	case h != nil && h.Grant.Containers[container] != nil:
		if h.prepared {
			return a.unready(h.Grant.Containers[container]), false, changed
		}
	case uid == "":
		return "carve's agent doesn't see the pod yet", false, changed
	case a.refused[uid] != "":
		return a.refused[uid], true, changed
	case p.grant == "":
		// Where the node chooses itself, it is about to.
		return "the pod asks for cards but carries no grant: it came past carve's scheduler extender (a nodeName of its own, or another scheduler)", a.Place == nil, changed
	}
	return "the pod's slice isn't prepared yet" + a.because(uid), false, changed
}

// Ready says what keeps the node from serving cards, nil if nothing does.
func (a *Agent) Ready() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	var problems []error
	if !a.downSince.IsZero() && time.Since(a.downSince) > linkGrace {
		problems = append(problems, fmt.Errorf("since %s %s", a.downSince.UTC().Format(time.RFC3339), a.linkDown()))
	}
	if !a.linked {
		problems = append(problems, errors.New("the hook has no link to the container runtime yet"))
	}
	if a.storeFault != "" {
		problems = append(problems, fmt.Errorf("slices can't be kept: %s", a.storeFault))
	}
	if !a.watched {
		problems = append(problems, errors.New("the node's pods aren't known yet"))
	}
	if !a.hardware.known {
		problems = append(problems, fmt.Errorf("the cards aren't known: %s", a.hardware.fault))
	} else if !a.stands {
		problems = append(problems, errors.New("the node's report isn't written yet"))
	}
	return errors.Join(problems...)
}

// unadjusted reports whether a container should have a card and was started
// without the hook. a.mu is held.
func (a *Agent) unadjusted(u use) bool {
	if u.adjusted {
		return false
	}
	h := a.held[u.uid]
	return u.asked || h != nil && h.Grant.Containers[u.container] != nil
}

// stopUnadjusted deals with the containers of a pod that were started while
// the hook was away. They have no card, so they are of no use to their owner;
// ended, the kubelet starts them again.
func (a *Agent) stopUnadjusted(uid string) {
	type victim struct {
		id string
		use
	}
	var victims []victim
	a.mu.Lock()
	p := a.named(uid)
	if _, known := a.pods[uid]; !known && !a.watched && time.Since(a.started) < tellLimit {
		// The reason belongs on the pod, which the watch shows in a moment. It
		// isn't waited for long: the API server may be away.
		for _, u := range a.containers {
			if u.uid == uid && !u.stopped && a.unadjusted(u) {
				a.queue.AddAfter(uid, tellLimit)
				break
			}
		}
		a.mu.Unlock()
		return
	}
	for id, u := range a.containers {
		if u.uid == uid && !u.stopped && a.unadjusted(u) {
			victims = append(victims, victim{id, u})
			u.stopped = true
			a.containers[id] = u
		}
	}
	a.mu.Unlock()
	for _, v := range victims {
		message := fmt.Sprintf("container %s was started while carve's hook was away and has no card", v.container)
		switch {
		case a.StopUnadjusted && p.never:
			message += "; it is stopped, and as its pod doesn't restart containers (restartPolicy Never), the pod fails"
		case a.StopUnadjusted:
			message += "; it is stopped, so that it starts again"
		}
		a.Log.Warn("container started without the hook", "pod", p.namespace+"/"+p.name, "container", v.container, "id", v.id, "stop", a.StopUnadjusted)
		a.event(p, corev1.EventTypeWarning, reasonUnadjusted, message)
		if !a.StopUnadjusted || v.hostPID == 0 {
			continue
		}
		if err := killContainer(v.hostPID, v.id); err != nil {
			a.Log.Error("a container that started without the hook can't be stopped", "id", v.id, "error", err)
		}
	}
}

// named is a pod by as much as is known of it. After a start the runtime's list
// may come before the watch has shown a pod, which then is known by its record,
// or by its sandbox. a.mu is held.
func (a *Agent) named(uid string) pod {
	if p, ok := a.pods[uid]; ok {
		return p
	}
	if h := a.held[uid]; h != nil {
		return pod{uid: uid, namespace: h.Namespace, name: h.Pod}
	}
	if s, ok := a.sandboxes[uid]; ok {
		return pod{uid: uid, namespace: s.namespace, name: s.name}
	}
	return pod{}
}

// killContainer ends the first process of a container, and with it all others.
// The pid comes from the runtime's list and may be another's by now, so the
// process is held by a descriptor and must be in the container's cgroup.
func killContainer(pid int, id string) error {
	fd, err := unix.PidfdOpen(pid, 0)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("stop container %s: open process %d: %w", id, pid, err)
	}
	defer unix.Close(fd)
	groups, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		return fmt.Errorf("stop container %s: %w", id, err)
	}
	if id == "" || !strings.Contains(string(groups), id) {
		return fmt.Errorf("stop container %s: process %d is not in its cgroup", id, pid)
	}
	if err := unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("stop container %s: %w", id, err)
	}
	return nil
}
