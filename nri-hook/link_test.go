package nrihook

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/nri/pkg/adaptation"
	nri "github.com/containerd/nri/pkg/api"
	nrilog "github.com/containerd/nri/pkg/log"
	"github.com/containerd/nri/pkg/runtime-tools/generate"
	"github.com/opencontainers/runtime-spec/specs-go"
	"go.uber.org/goleak"

	"github.com/carve-gpu/carve/api"
)

func TestMain(m *testing.M) {
	nrilog.Set(logger{slog.New(slog.DiscardHandler)})
	goleak.VerifyTestMain(m)
}

// runtime is the runtime's side of NRI, as containerd has it.
type runtime struct {
	*adaptation.Adaptation
	mu         sync.Mutex
	pods       []*nri.PodSandbox
	containers []*nri.Container
}

func startRuntime(t *testing.T, socket string, pods []*nri.PodSandbox, containers []*nri.Container) *runtime {
	t.Helper()
	dir := t.TempDir()
	r := &runtime{pods: pods, containers: containers}
	a, err := adaptation.New("test", "2.4.2",
		func(ctx context.Context, cb adaptation.SyncCB) error {
			r.mu.Lock()
			defer r.mu.Unlock()
			_, err := cb(ctx, r.pods, r.containers)
			return err
		},
		func(context.Context, []*nri.ContainerUpdate) ([]*nri.ContainerUpdate, error) { return nil, nil },
		adaptation.WithPluginPath(filepath.Join(dir, "plugins")),
		adaptation.WithPluginConfigPath(filepath.Join(dir, "conf.d")),
		adaptation.WithSocketPath(socket))
	if err != nil {
		t.Fatal(err)
	}
	if err := a.Start(); err != nil {
		t.Fatal(err)
	}
	r.Adaptation = a
	t.Cleanup(a.Stop)
	return r
}

// wire stands between the hook and a runtime, whose death it can play: NRI's
// own code keeps a plugin's connection when it stops.
type wire struct {
	runtime string // the socket that the runtime listens on
	front   net.Listener
	mu      sync.Mutex
	ends    []net.Conn
	copying sync.WaitGroup
}

func startWire(t *testing.T, socket string) *wire {
	t.Helper()
	os.Remove(socket)
	w := &wire{runtime: socket + ".runtime"}
	os.Remove(w.runtime)
	var err error
	if w.front, err = net.Listen("unix", socket); err != nil {
		t.Fatal(err)
	}
	w.copying.Go(func() {
		for {
			a, err := w.front.Accept()
			if err != nil {
				return
			}
			b, err := net.Dial("unix", w.runtime)
			if err != nil {
				a.Close()
				continue
			}
			w.mu.Lock()
			w.ends = append(w.ends, a, b)
			w.mu.Unlock()
			w.copying.Go(func() { io.Copy(a, b); a.Close() })
			w.copying.Go(func() { io.Copy(b, a); b.Close() })
		}
	})
	t.Cleanup(w.cut)
	return w
}

func (w *wire) cut() {
	w.front.Close()
	w.mu.Lock()
	for _, c := range w.ends {
		c.Close()
	}
	w.mu.Unlock()
	w.copying.Wait()
}

// settled waits until a plugin whose link is up gets requests.
func (r *runtime) settled() { r.BlockPluginSync().Unblock() }

// nodeState is the agent's side.
type nodeState struct {
	slices chan struct{} // if not nil, Slice waits for it

	mu      sync.Mutex
	log     []string
	refusal error
	slice   *Slice
	up      chan bool
	synced  [][]Container
	answers []Result
}

func newNodeState() *nodeState { return &nodeState{up: make(chan bool, 16)} }

func (n *nodeState) say(s string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.log = append(n.log, s)
}
func (n *nodeState) said() string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return strings.Join(n.log, "; ")
}

func (n *nodeState) Slice(c Container) (*Slice, error) {
	if n.slices != nil {
		<-n.slices
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.refusal != nil {
		return nil, n.refusal
	}
	return n.slice, nil
}
func (n *nodeState) Driver() Driver                { return testDriver() }
func (n *nodeState) Adjusted(c Container, s Slice) { n.say("adjusted " + c.ID + " " + s.Mark()) }
func (n *nodeState) Ungranted(c Container)         { n.say("ungranted " + c.ID) }
func (n *nodeState) Exited(c Container)            { n.say("exited " + c.ID) }
func (n *nodeState) Started(c Container)           {}
func (n *nodeState) Updated(c Container)           { n.say("updated " + c.ID) }

func (n *nodeState) Starting(c Container) error {
	if c.ID == "unadjusted" {
		return errors.New("created without the hook")
	}
	return nil
}
func (n *nodeState) SandboxStarted(uid, _, pod string, _ map[string]string) {
	n.say("sandbox " + uid + " " + pod)
}
func (n *nodeState) Synchronize(c []Container) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.synced = append(n.synced, c)
}
func (n *nodeState) LinkChanged(up bool) { n.up <- up }
func (n *nodeState) LinkFault(s string)  { n.say("fault " + s) }

func (n *nodeState) waitLink(t *testing.T, want bool) {
	t.Helper()
	select {
	case got := <-n.up:
		if got != want {
			t.Fatalf("link up %v, want %v", got, want)
		}
	case <-time.After(20 * time.Second):
		t.Fatalf("the link didn't become up=%v", want)
	}
}

func startLink(t *testing.T, socket string, n *nodeState) {
	t.Helper()
	l := NewLink(Config{Socket: socket, State: n, Log: slog.New(slog.DiscardHandler), Answered: func(r Result, took time.Duration) {
		if took <= 0 {
			t.Errorf("a request was answered in %s", took)
		}
		n.mu.Lock()
		defer n.mu.Unlock()
		n.answers = append(n.answers, r)
	}})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- l.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
}

func socketPath(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "nri")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return filepath.Join(dir, "nri.sock")
}

func nriPod() *nri.PodSandbox {
	return &nri.PodSandbox{Id: "s1", Name: "p", Uid: "uid-1", Namespace: "default"}
}

func nriContainer(id string) *nri.Container {
	return &nri.Container{
		Id: id, PodSandboxId: "s1", Name: "app", State: nri.ContainerState_CONTAINER_RUNNING,
		Env:         []string{"PATH=/bin", "NVIDIA_VISIBLE_DEVICES=all"},
		Annotations: map[string]string{api.AnnotationSlots: "slot-0000"},
		Linux:       &nri.LinuxContainer{Resources: &nri.LinuxResources{Devices: []*nri.LinuxDeviceCgroup{{Allow: false, Access: "rwm"}}}},
	}
}

// specEditor makes the changes that NRI's own code asks for. A change that it
// doesn't know panics on the nil interface.
type specEditor struct {
	generate.UnderlyingGenerator
	spec *specs.Spec
}

func (e *specEditor) Spec() *specs.Spec { return e.spec }
func (e *specEditor) ClearProcessEnv()  { e.spec.Process.Env = nil }
func (e *specEditor) AddProcessEnv(k, v string) {
	e.spec.Process.Env = append(e.spec.Process.Env, k+"="+v)
}
func (e *specEditor) AddDevice(d specs.LinuxDevice) {
	e.spec.Linux.Devices = append(e.spec.Linux.Devices, d)
}
func (e *specEditor) RemoveDevice(p string) {
	e.spec.Linux.Devices = slices.DeleteFunc(e.spec.Linux.Devices, func(d specs.LinuxDevice) bool { return d.Path == p })
}
func (e *specEditor) AddLinuxResourcesDevice(allow bool, kind string, major, minor *int64, access string) {
	r := e.spec.Linux.Resources
	r.Devices = append(r.Devices, specs.LinuxDeviceCgroup{Allow: allow, Type: kind, Major: major, Minor: minor, Access: access})
}
func (e *specEditor) Mounts() []specs.Mount  { return e.spec.Mounts }
func (e *specEditor) ClearMounts()           { e.spec.Mounts = nil }
func (e *specEditor) AddMount(m specs.Mount) { e.spec.Mounts = append(e.spec.Mounts, m) }
func (e *specEditor) RemoveMount(dest string) {
	e.spec.Mounts = slices.DeleteFunc(e.spec.Mounts, func(m specs.Mount) bool { return m.Destination == dest })
}
func (e *specEditor) RemoveAnnotation(k string) { delete(e.spec.Annotations, k) }
func (e *specEditor) AddAnnotation(k, v string) {
	if e.spec.Annotations == nil {
		e.spec.Annotations = map[string]string{}
	}
	e.spec.Annotations[k] = v
}

// create asks as containerd does: no plugin joins while a container is made.
func create(r *runtime, c *nri.Container) (*nri.CreateContainerResponse, error) {
	defer r.BlockPluginSync().Unblock()
	return r.CreateContainer(context.Background(), &nri.CreateContainerRequest{Pod: nriPod(), Container: c})
}

func TestTheFinalSpecificationHoldsTheSliceAndNothingOfTheImagesWish(t *testing.T) {
	socket := socketPath(t)
	r := startRuntime(t, socket, nil, nil)
	n := newNodeState()
	n.slice = testShare()
	startLink(t, socket, n)
	n.waitLink(t, true)
	response, err := create(r, nriContainer("c1"))
	if err != nil {
		t.Fatal(err)
	}
	// The way from the adjustment to the specification is the runtime's own.
	spec := &specs.Spec{
		Process: &specs.Process{Env: []string{"PATH=/bin", "NVIDIA_VISIBLE_DEVICES=all"}},
		Mounts: []specs.Mount{
			{Destination: "/usr/lib/x86_64-linux-gnu/libcuda.so.1", Source: "/tenant/libcuda.so.1", Type: "bind"},
			{Destination: "/usr/lib", Source: "/tenant/lib", Type: "bind"},
		},
		Linux: &specs.Linux{Resources: &specs.LinuxResources{}},
	}
	if err := generate.SpecGenerator(&specEditor{spec: spec}).Adjust(response.Adjust); err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(spec.Process.Env, " "); got != "PATH=/bin NVIDIA_VISIBLE_DEVICES=void" {
		t.Errorf("environment %q", got)
	}
	var devices []string
	for _, d := range spec.Linux.Devices {
		devices = append(devices, d.Path)
	}
	if got := strings.Join(devices, " "); got != "/dev/nvidiactl /dev/nvidia-uvm /dev/nvidia3" {
		t.Errorf("devices %q", got)
	}
	allowed := 0
	for _, d := range spec.Linux.Resources.Devices {
		if d.Allow && d.Major != nil && (*d.Major == 195 || *d.Major == 510) {
			allowed++
		}
	}
	if allowed != 3 {
		t.Errorf("%d device rules, want 3: %v", allowed, spec.Linux.Resources.Devices)
	}
	at := map[string]int{}
	for i, m := range spec.Mounts {
		if _, twice := at[m.Destination]; twice {
			t.Errorf("%s is mounted twice", m.Destination)
		}
		at[m.Destination] = i
	}
	i, ok := at["/usr/lib/x86_64-linux-gnu/libcuda.so.1"]
	if !ok || spec.Mounts[i].Source != testDriver().FrontCUDA {
		t.Errorf("libcuda.so.1 is %+v", spec.Mounts[i])
	}
	if at["/usr/lib"] > i {
		t.Error("the pod's own mount of /usr/lib hides the library")
	}
	if len(spec.Hooks.CreateContainer) != 1 || spec.Hooks.CreateContainer[0].Path != testDriver().Hook {
		t.Errorf("hooks %+v", spec.Hooks)
	}
	if spec.Annotations[api.AnnotationSlice] != "uid-1/app@2" {
		t.Errorf("annotations %v", spec.Annotations)
	}
	if got := n.said(); !strings.Contains(got, "adjusted c1 uid-1/app@2") {
		t.Errorf("the agent heard %q", got)
	}
}

func TestARefusalFailsThatContainerWithItsSentence(t *testing.T) {
	socket := socketPath(t)
	r := startRuntime(t, socket, nil, nil)
	n := newNodeState()
	startLink(t, socket, n)
	n.waitLink(t, true)
	n.mu.Lock()
	n.refusal = errors.New("the slice of container app isn't prepared yet")
	n.mu.Unlock()
	if _, err := create(r, nriContainer("c1")); err == nil || !strings.Contains(err.Error(), "isn't prepared yet") {
		t.Fatalf("got %v", err)
	}
	n.mu.Lock()
	n.refusal = nil
	n.mu.Unlock()
	if _, err := create(r, nriContainer("c2")); err != nil {
		t.Errorf("the next container fails too: %v", err)
	}
	if got := n.said(); !strings.Contains(got, "ungranted c2") {
		t.Errorf("the agent heard %q: an image that asks for all cards isn't noted", got)
	}
	n.mu.Lock()
	n.slice = testShare()
	n.mu.Unlock()
	if _, err := create(r, nriContainer("c3")); err != nil {
		t.Error(err)
	}
	n.mu.Lock()
	if !slices.Equal(n.answers, []Result{ResultRefused, ResultPlain, ResultAdjusted}) {
		t.Errorf("the answers were counted as %q", n.answers)
	}
	n.mu.Unlock()
	if err := r.StartContainer(context.Background(), &nri.StartContainerRequest{Pod: nriPod(), Container: nriContainer("unadjusted")}); err == nil {
		t.Error("a container that was created without the hook starts")
	}
	if err := r.StartContainer(context.Background(), &nri.StartContainerRequest{Pod: nriPod(), Container: nriContainer("c2")}); err != nil {
		t.Error(err)
	}
}

func TestExitsReachTheAgentByContainerID(t *testing.T) {
	socket := socketPath(t)
	r := startRuntime(t, socket, nil, nil)
	n := newNodeState()
	startLink(t, socket, n)
	n.waitLink(t, true)
	r.settled()
	if err := r.RunPodSandbox(context.Background(), &nri.RunPodSandboxRequest{Pod: nriPod()}); err != nil {
		t.Fatal(err)
	}
	if _, err := r.StopContainer(context.Background(), &nri.StopContainerRequest{Pod: nriPod(), Container: nriContainer("c1")}); err != nil {
		t.Fatal(err)
	}
	if err := r.RemoveContainer(context.Background(), &nri.RemoveContainerRequest{Pod: nriPod(), Container: nriContainer("c0")}); err != nil {
		t.Fatal(err)
	}
	if got, want := n.said(), "sandbox uid-1 p; exited c1; exited c0"; got != want {
		t.Errorf("the agent heard %q, want %q", got, want)
	}
}

func TestSynchronizeListsWhatRunsWithItsMark(t *testing.T) {
	socket := socketPath(t)
	marked, privileged, stopped := nriContainer("marked"), nriContainer("privileged"), nriContainer("stopped")
	marked.Annotations[api.AnnotationSlice] = "uid-1/app@1"
	marked.Pid = 42
	privileged.Linux.Resources.Devices = []*nri.LinuxDeviceCgroup{{Allow: true, Access: "rwm"}}
	stopped.State = nri.ContainerState_CONTAINER_STOPPED
	orphan := nriContainer("orphan")
	orphan.PodSandboxId = "gone"
	startRuntime(t, socket, []*nri.PodSandbox{nriPod()}, []*nri.Container{marked, privileged, stopped, orphan})
	n := newNodeState()
	startLink(t, socket, n)
	n.waitLink(t, true)
	n.mu.Lock()
	defer n.mu.Unlock()
	if len(n.synced) != 1 || len(n.synced[0]) != 2 {
		t.Fatalf("synchronized with %+v", n.synced)
	}
	m, p := n.synced[0][0], n.synced[0][1]
	if m.ID != "marked" || m.Mark() != "uid-1/app@1" || m.HostPID != 42 || m.AllDevices || !m.AskedForCards() || m.PodUID != "uid-1" {
		t.Errorf("%+v", m)
	}
	if p.ID != "privileged" || p.Mark() != "" || !p.AllDevices {
		t.Errorf("%+v", p)
	}
}

// The runtime keeps sandboxes of pods that are gone for a minute or so. Their
// annotations must not stand for a pod.
func TestStoppedSandboxesAreNotTakenForPods(t *testing.T) {
	sandbox := func(uid string, pid uint32) *nri.PodSandbox {
		return &nri.PodSandbox{Id: uid, Name: "p", Uid: uid, Namespace: "default", Pid: pid}
	}
	for name, c := range map[string]struct {
		listed []*nri.PodSandbox
		want   string
	}{
		"the runtime tells processes": {[]*nri.PodSandbox{sandbox("gone", 0), sandbox("lives", 42)}, "sandbox lives p"},
		"it tells none":               {[]*nri.PodSandbox{sandbox("one", 0), sandbox("other", 0)}, "sandbox one p; sandbox other p"},
	} {
		t.Run(name, func(t *testing.T) {
			socket := socketPath(t)
			startRuntime(t, socket, c.listed, nil)
			n := newNodeState()
			startLink(t, socket, n)
			n.waitLink(t, true)
			if got := n.said(); got != c.want {
				t.Errorf("the agent heard %q, want %q", got, c.want)
			}
		})
	}
}

func TestLinksAgainAfterTheRuntimeRestarts(t *testing.T) {
	socket := socketPath(t)
	n := newNodeState()
	startLink(t, socket, n) // before any runtime
	for range 3 {
		wire := startWire(t, socket)
		r := startRuntime(t, wire.runtime, []*nri.PodSandbox{nriPod()}, []*nri.Container{nriContainer("c1")})
		n.waitLink(t, true)
		if _, err := create(r, nriContainer("c2")); err != nil {
			t.Fatal(err)
		}
		r.Stop()
		wire.cut()
		n.waitLink(t, false)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	if len(n.synced) != 3 {
		t.Errorf("synchronized %d times, want 3", len(n.synced))
	}
}

// node-29: a hook that hangs. The runtime drops it, and the container that was
// asked for isn't created without its card.
func TestAHookThatHangsCostsTheContainerItsStart(t *testing.T) {
	socket := socketPath(t)
	r := startRuntime(t, socket, nil, nil)
	n := newNodeState()
	n.slice = testShare()
	n.slices = make(chan struct{})
	startLink(t, socket, n)
	n.waitLink(t, true)
	response, err := create(r, nriContainer("c1"))
	if err == nil && len(response.GetAdjust().GetLinux().GetDevices()) > 0 {
		t.Error("the container has devices")
	}
	if err == nil {
		t.Error("the container is created though its hook didn't answer")
	}
	close(n.slices)
	n.waitLink(t, false)
	n.waitLink(t, true)
	if _, err := create(r, nriContainer("c1")); err != nil {
		t.Errorf("after the hook came back: %v", err)
	}
}
