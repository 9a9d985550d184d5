package nrihook

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"slices"
	"sync"
	"time"

	nri "github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/stub"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/vgpu/gpu"
)

const (
	// pluginName and pluginIndex are how the runtime knows the hook. Plugins
	// run in the order of their index; this one comes after those that look at
	// what a pod asked for (00 to 40) and before those that check the result.
	pluginName  = api.HookPlugin
	pluginIndex = "45"

	// greetingLimit is how long the runtime may take from the connection to
	// its list of containers.
	greetingLimit   = 15 * time.Second
	shortestBackoff = 100 * time.Millisecond
	longestBackoff  = 2 * time.Second
)

// State is the node's side of the hook. The runtime waits for each call, so
// all of them must answer from memory.
type State interface {
	// Slice returns what is ready for a container, nil if it holds no grant.
	// The error says in a sentence why it must not start.
	Slice(c Container) (*Slice, error)
	// Driver is what the node has for every container with a slice.
	Driver() Driver
	// Adjusted says that a container of the given slice will be created.
	Adjusted(c Container, s Slice)
	// Ungranted says that a container without a grant was kept from the cards
	// that its environment asks for.
	Ungranted(c Container)
	// Starting is asked before a created container starts; the error says why it
	// must not.
	Starting(c Container) error
	// Started says that a container's first process runs.
	Started(c Container)
	// Updated says that the runtime changed a running container's resources.
	Updated(c Container)
	// Exited says that a container has no process any more. It may come more
	// than once, late, or never.
	Exited(c Container)
	// SandboxStarted says that a pod is about to start containers.
	SandboxStarted(podUID, namespace, pod string, annotations map[string]string)
	// Synchronize gives all containers that the runtime has and that haven't
	// exited, after the link was made.
	Synchronize(containers []Container)
	// LinkChanged says whether the link to the runtime is up.
	LinkChanged(up bool)
	// LinkFault says, while it is down, in a sentence why it can't be made.
	LinkFault(sentence string)
}

// Config is what a Link is made of.
type Config struct {
	// Socket is the runtime's NRI socket, "/var/run/nri/nri.sock" as a rule.
	Socket string
	State  State
	Log    *slog.Logger
	// Answered is told of each CreateContainer how long its answer took, from
	// the message's arrival, and what became of it. It may be nil.
	Answered func(result Result, took time.Duration)
	// Waits says in a sentence why the link must not be made now, "" if it may. It
	// may be nil, and is asked before each try.
	Waits func() string
}

// Result is what became of a CreateContainer request.
type Result string

// Results of a CreateContainer request.
const (
	ResultAdjusted Result = "adjusted" // it got a slice
	ResultPlain    Result = "plain"    // it is to have no card
	ResultRefused  Result = "refused"  // it must not start
)

// Link keeps the hook connected with the container runtime.
type Link struct {
	socket, index string
	state         State
	log           *slog.Logger
	answered      func(Result, time.Duration)
	waits         func() string
	greetingLimit time.Duration
}

// NewLink makes a link; Run connects it.
func NewLink(c Config) *Link {
	if c.Answered == nil {
		c.Answered = func(Result, time.Duration) {}
	}
	if c.Waits == nil {
		c.Waits = func() string { return "" }
	}
	return &Link{c.Socket, pluginIndex, c.State, c.Log, c.Answered, c.Waits, greetingLimit}
}

// Run connects, and connects again whenever the runtime goes away, until ctx
// ends.
func (l *Link) Run(ctx context.Context) error {
	wait := shortestBackoff
	said := ""
	for ctx.Err() == nil {
		linked, err := false, error(nil)
		if why := l.waits(); why != "" {
			wait, err = shortestBackoff, errors.New(why)
		} else {
			linked, err = l.session(ctx)
		}
		if linked {
			wait, said = shortestBackoff, ""
		}
		if err != nil && ctx.Err() == nil && err.Error() != said {
			said = err.Error()
			l.log.Warn("no link to the container runtime", "error", err)
			l.state.LinkFault(said)
		}
		select {
		case <-ctx.Done():
		case <-time.After(wait):
		}
		wait = min(2*wait, longestBackoff)
	}
	return nil
}

// session is one connection, from dialling to its end. It reports whether the
// link was up.
func (l *Link) session(ctx context.Context) (bool, error) {
	conn, err := net.Dial("unix", l.socket)
	if err != nil {
		return false, linkFault(l.socket, err)
	}
	s := &session{Link: l, synchronized: make(chan struct{}), closed: make(chan struct{})}
	// FailRequest: where the runtime knows it (NRI 0.12.5), a container whose
	// request we miss isn't created and is tried again, instead of being
	// created without a card.
	st, err := stub.New(s,
		stub.WithPluginName(pluginName), stub.WithPluginIdx(l.index),
		stub.WithConnection(conn), stub.WithLogger(logger{l.log}),
		stub.WithFailurePolicy(&nri.FailurePolicy{FailRequest: true}),
		stub.WithOnClose(s.close))
	if err != nil {
		conn.Close()
		return false, fmt.Errorf("make NRI plugin: %w", err)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- st.Run(ctx) }()
	greeting := time.NewTimer(l.greetingLimit)
	defer greeting.Stop()
	select {
	case err = <-ended:
		conn.Close()
		return false, registrationFault(l.socket, l.greetingLimit, orClosed(err))
	case <-greeting.C:
		// The stub waits for ever for a runtime that registers it and then
		// doesn't go on; it is left behind, without its connection.
		conn.Close()
		return false, registrationFault(l.socket, l.greetingLimit, context.DeadlineExceeded)
	case <-s.synchronized:
	}
	greeting.Stop()
	l.state.LinkChanged(true)
	l.log.Info("linked to the container runtime", "nri", st.RuntimeNRIVersion())
	defer l.state.LinkChanged(false)
	select {
	case err = <-ended:
	case <-s.closed:
		cancel()
		err = <-ended
	}
	conn.Close()
	return true, fmt.Errorf("the link ended: %w", orClosed(err))
}

func orClosed(err error) error {
	if err == nil || errors.Is(err, context.Canceled) {
		return errClosed
	}
	return err
}

// session holds the NRI handlers of one connection.
type session struct {
	*Link
	synchronized chan struct{}
	closed       chan struct{}
	once, gone   sync.Once
}

func (s *session) close() { s.gone.Do(func() { close(s.closed) }) }

// Synchronize takes the runtime's containers over.
func (s *session) Synchronize(_ context.Context, pods []*nri.PodSandbox, containers []*nri.Container) ([]*nri.ContainerUpdate, error) {
	byID := make(map[string]*nri.PodSandbox, len(pods))
	// The list has sandboxes that were stopped, until they are removed. They
	// have no process, where the runtime gives sandboxes one.
	processes := slices.ContainsFunc(pods, func(p *nri.PodSandbox) bool { return p.Pid != 0 })
	for _, p := range pods {
		byID[p.Id] = p
		if p.Pid != 0 || !processes {
			s.state.SandboxStarted(p.Uid, p.Namespace, p.Name, p.Annotations)
		}
	}
	var all []Container
	for _, c := range containers {
		if c.State == nri.ContainerState_CONTAINER_STOPPED {
			continue
		}
		if p := byID[c.PodSandboxId]; p != nil {
			all = append(all, from(p, c))
		}
	}
	s.state.Synchronize(all)
	s.once.Do(func() { close(s.synchronized) })
	return nil, nil
}

// RunPodSandbox tells the agent early of a pod.
func (s *session) RunPodSandbox(_ context.Context, p *nri.PodSandbox) error {
	s.state.SandboxStarted(p.Uid, p.Namespace, p.Name, p.Annotations)
	return nil
}

// CreateContainer adjusts a container; an error fails that container only.
func (s *session) CreateContainer(_ context.Context, p *nri.PodSandbox, c *nri.Container) (*nri.ContainerAdjustment, []*nri.ContainerUpdate, error) {
	start := time.Now()
	result := ResultRefused
	defer func() { s.answered(result, time.Since(start)) }()
	container := from(p, c)
	slice, err := s.state.Slice(container)
	if err != nil {
		s.log.Warn("container refused", "namespace", container.Namespace, "pod", container.Pod, "container", container.Name, "error", err)
		return nil, nil, err
	}
	var driver Driver
	if slice != nil {
		driver = s.state.Driver()
	}
	edits, err := Adjust(container, slice, driver)
	if err != nil {
		s.log.Warn("container refused", "namespace", container.Namespace, "pod", container.Pod, "container", container.Name, "error", err)
		return nil, nil, err
	}
	result = ResultPlain
	switch {
	case slice != nil:
		result = ResultAdjusted
		s.state.Adjusted(container, *slice)
		s.log.Info("container adjusted", "namespace", container.Namespace, "pod", container.Pod, "container", container.Name, "slice", slice.Mark(), "took", time.Since(start))
	case container.WantsAllCards():
		s.state.Ungranted(container)
	}
	return adjustment(edits), nil, nil
}

// StartContainer is the last moment to hold back a container that was created
// without the hook.
func (s *session) StartContainer(_ context.Context, p *nri.PodSandbox, c *nri.Container) error {
	return s.state.Starting(from(p, c))
}

// PostStartContainer comes when a container was started, and not when that
// failed.
func (s *session) PostStartContainer(_ context.Context, p *nri.PodSandbox, c *nri.Container) error {
	s.state.Started(from(p, c))
	return nil
}

// PostUpdateContainer comes when a container's resources were changed.
func (s *session) PostUpdateContainer(_ context.Context, p *nri.PodSandbox, c *nri.Container) error {
	s.state.Updated(from(p, c))
	return nil
}

// StopContainer comes when a container has exited.
func (s *session) StopContainer(_ context.Context, p *nri.PodSandbox, c *nri.Container) ([]*nri.ContainerUpdate, error) {
	s.state.Exited(from(p, c))
	return nil, nil
}

// RemoveContainer comes when a container is removed, if ever: the kubelet
// keeps a finished pod's last one.
func (s *session) RemoveContainer(_ context.Context, p *nri.PodSandbox, c *nri.Container) error {
	s.state.Exited(from(p, c))
	return nil
}

// from reads what the hook needs of NRI's messages.
func from(p *nri.PodSandbox, c *nri.Container) Container {
	out := Container{
		ID:     c.GetId(),
		PodUID: p.GetUid(), Namespace: p.GetNamespace(), Pod: p.GetName(), Name: c.GetName(),
		Annotations: c.GetAnnotations(), SandboxAnnotations: p.GetAnnotations(),
		Env:     c.GetEnv(),
		HostPID: int(c.GetPid()),
	}
	for _, d := range c.GetLinux().GetDevices() {
		if d.GetType() == "c" {
			out.Devices = append(out.Devices, gpu.DeviceNode{Path: d.GetPath(), Major: d.GetMajor(), Minor: d.GetMinor()})
		}
	}
	for _, r := range c.GetLinux().GetResources().GetDevices() {
		if r.Allow && (r.Type == "" || r.Type == "a") && r.Major == nil && r.Minor == nil {
			out.AllDevices = true
		}
	}
	return out
}

// adjustment writes edits as NRI's message.
func adjustment(e Edits) *nri.ContainerAdjustment {
	a := &nri.ContainerAdjustment{}
	for k, v := range e.Annotations {
		a.AddAnnotation(k, v)
	}
	for _, kv := range nri.FromOCIEnv(e.Env) {
		a.AddEnv(kv.Key, kv.Value)
	}
	for _, m := range nri.FromOCIMounts(e.Mounts) {
		a.AddMount(m)
	}
	for _, d := range nri.FromOCILinuxDevices(e.Devices) {
		a.AddDevice(d)
	}
	if len(e.CreateContainer) > 0 {
		a.AddHooks(&nri.Hooks{CreateContainer: nri.FromOCIHookSlice(e.CreateContainer)})
	}
	return a
}

func fileMode(m uint32) *os.FileMode {
	mode := os.FileMode(m)
	return &mode
}

// logger routes the stub's log; its chatter is for debugging.
type logger struct{ log *slog.Logger }

func (l logger) Debugf(context.Context, string, ...any) {}
func (l logger) Infof(_ context.Context, format string, a ...any) {
	l.log.Debug("nri: " + fmt.Sprintf(format, a...))
}
func (l logger) Warnf(_ context.Context, format string, a ...any) {
	l.log.Warn("nri: " + fmt.Sprintf(format, a...))
}
func (l logger) Errorf(_ context.Context, format string, a ...any) {
	l.log.Error("nri: " + fmt.Sprintf(format, a...))
}
