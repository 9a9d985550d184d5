package deviceplugin

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fsnotify/fsnotify"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	kubelet "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/carve-gpu/carve/api"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fakeKubelet speaks the kubelet's side of both protocols over real sockets.
type fakeKubelet struct {
	kubelet.UnimplementedRegistrationServer
	podresources.UnimplementedPodResourcesListerServer

	dir        string
	registered chan *kubelet.RegisterRequest
	servers    []*grpc.Server
	serving    sync.WaitGroup

	mu      sync.Mutex
	pods    []*podresources.PodResources
	refuses int // registrations to refuse first
	limited int // pod-resources calls to turn away first
}

// newKubeletDir is short: a socket's path has room for 107 bytes.
func newKubeletDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "kubelet")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	for _, d := range []string{"device-plugins", "pod-resources"} {
		if err := os.Mkdir(filepath.Join(dir, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// start empties the plugin directory, as a starting kubelet does, and listens.
func (k *fakeKubelet) start(t *testing.T) {
	t.Helper()
	plugins := filepath.Join(k.dir, "device-plugins")
	old, err := os.ReadDir(plugins)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range old {
		os.Remove(filepath.Join(plugins, e.Name()))
	}
	serve := func(path string, register func(*grpc.Server)) {
		os.Remove(path)
		l, err := net.Listen("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		s := grpc.NewServer()
		register(s)
		k.servers = append(k.servers, s)
		k.serving.Go(func() { s.Serve(l) })
	}
	serve(filepath.Join(plugins, "kubelet.sock"), func(s *grpc.Server) { kubelet.RegisterRegistrationServer(s, k) })
	serve(filepath.Join(k.dir, "pod-resources", "kubelet.sock"), func(s *grpc.Server) { podresources.RegisterPodResourcesListerServer(s, k) })
}

func (k *fakeKubelet) stop() {
	for _, s := range k.servers {
		s.Stop()
	}
	k.servers = nil
	k.serving.Wait()
}

func (k *fakeKubelet) Register(_ context.Context, r *kubelet.RegisterRequest) (*kubelet.Empty, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.refuses > 0 {
		k.refuses--
		return nil, errors.New("not yet")
	}
	k.registered <- r
	return &kubelet.Empty{}, nil
}

func (k *fakeKubelet) List(context.Context, *podresources.ListPodResourcesRequest) (*podresources.ListPodResourcesResponse, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.limited > 0 {
		k.limited--
		return nil, status.Error(codes.ResourceExhausted, "rejected by rate limit")
	}
	return &podresources.ListPodResourcesResponse{PodResources: k.pods}, nil
}

func (k *fakeKubelet) hold(namespace, pod, container string, ids ...string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.pods = append(k.pods, &podresources.PodResources{Namespace: namespace, Name: pod, Containers: []*podresources.ContainerResources{
		{Name: "no-card"},
		{Name: container, Devices: []*podresources.ContainerDevices{{ResourceName: api.ResourceGPU, DeviceIds: ids}}},
	}})
}

// waitRegistered returns the registration and a client of the plugin.
func (k *fakeKubelet) waitRegistered(t *testing.T) (*kubelet.RegisterRequest, kubelet.DevicePluginClient) {
	t.Helper()
	select {
	case r := <-k.registered:
		conn, err := grpc.NewClient("unix://"+filepath.Join(k.dir, "device-plugins", r.Endpoint), grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		return r, kubelet.NewDevicePluginClient(conn)
	case <-time.After(20 * time.Second):
		t.Fatal("the plugin didn't register")
		return nil, nil
	}
}

// preparedSlices answers as the agent would.
type preparedSlices struct {
	mu    sync.Mutex
	err   error
	asked []string
}

func (s *preparedSlices) AwaitPrepared(_ context.Context, namespace, pod, container string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asked = append(s.asked, namespace+"/"+pod+"/"+container)
	return s.err
}

func startPlugin(t *testing.T, dir string, s Slices) *Plugin {
	t.Helper()
	p := New(Config{KubeletDir: dir, Slices: s, Log: slog.New(slog.DiscardHandler)})
	p.SetSlots(3)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- p.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	return p
}

func newFakeKubelet(t *testing.T) *fakeKubelet {
	k := &fakeKubelet{dir: newKubeletDir(t), registered: make(chan *kubelet.RegisterRequest, 8)}
	t.Cleanup(k.stop)
	return k
}

func TestRegistersSlotsThatAreHealthyAndNameNoCard(t *testing.T) {
	k := newFakeKubelet(t)
	k.refuses = 2
	k.start(t)
	p := startPlugin(t, k.dir, &preparedSlices{})
	r, client := k.waitRegistered(t)
	if r.ResourceName != "nvidia.com/gpu" || r.Version != "v1beta1" || !r.Options.PreStartRequired {
		t.Fatalf("registered %v", r)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	stream, err := client.ListAndWatch(ctx, &kubelet.Empty{})
	if err != nil {
		t.Fatal(err)
	}
	first, err := stream.Recv()
	if err != nil {
		t.Fatal(err)
	}
	var ids []string
	for _, d := range first.Devices {
		ids = append(ids, d.ID)
		if d.Health != kubelet.Healthy || d.Topology != nil {
			t.Errorf("device %v: want it healthy and without topology", d)
		}
	}
	if got := strings.Join(ids, " "); got != "slot-0000 slot-0001 slot-0002" {
		t.Errorf("slots %q", got)
	}
	if !p.Connected() {
		t.Error("not connected while the kubelet listens")
	}
	p.SetSlots(5)
	second, err := stream.Recv()
	if err != nil || len(second.Devices) != 5 {
		t.Errorf("after SetSlots(5): %v, %v", second, err)
	}
}

func TestAllocateHandsOutAMarkAndNoDevice(t *testing.T) {
	k := newFakeKubelet(t)
	k.start(t)
	// Not even an agent that isn't ready makes Allocate fail.
	startPlugin(t, k.dir, &preparedSlices{err: errors.New("down")})
	_, client := k.waitRegistered(t)
	got, err := client.Allocate(t.Context(), &kubelet.AllocateRequest{ContainerRequests: []*kubelet.ContainerAllocateRequest{
		{DevicesIds: []string{"slot-0001", "slot-0000"}}, {DevicesIds: []string{"slot-0002"}},
	}})
	if err != nil {
		t.Fatal(err)
	}
	if len(got.ContainerResponses) != 2 {
		t.Fatalf("%d answers for 2 containers", len(got.ContainerResponses))
	}
	for i, want := range []string{"slot-0001,slot-0000", "slot-0002"} {
		c := got.ContainerResponses[i]
		if len(c.Devices) != 0 || len(c.Mounts) != 0 || len(c.CdiDevices) != 0 {
			t.Errorf("container %d gets %v: a container that the hook doesn't see would have a card", i, c)
		}
		if c.Annotations[api.AnnotationSlots] != want || c.Envs["NVIDIA_VISIBLE_DEVICES"] != "void" || len(c.Envs) != 1 {
			t.Errorf("container %d gets %v", i, c)
		}
	}
}

func TestPreStartWaitsForTheContainersOwnSlice(t *testing.T) {
	k := newFakeKubelet(t)
	k.limited = 2
	k.start(t)
	s := &preparedSlices{}
	startPlugin(t, k.dir, s)
	_, client := k.waitRegistered(t)
	k.hold("default", "a", "app", "slot-0000", "slot-0001")
	k.hold("default", "b", "main", "slot-0002")

	pre := func(ids ...string) error {
		_, err := client.PreStartContainer(t.Context(), &kubelet.PreStartContainerRequest{DevicesIds: ids})
		return err
	}
	if err := pre("slot-0001", "slot-0000"); err != nil {
		t.Error(err)
	}
	s.mu.Lock()
	s.err = errors.New("the hook's link to the container runtime is down")
	s.mu.Unlock()
	if err := pre("slot-0002"); err == nil || !strings.Contains(err.Error(), "link to the container runtime is down") {
		t.Errorf("refused with %v", err)
	}
	if err := pre(); err == nil {
		t.Error("a call without slots passed")
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if got := strings.Join(s.asked, " "); got != "default/a/app default/b/main" {
		t.Errorf("asked for %s", got)
	}
}

func TestPreStartWaitsForAPodThatPodResourcesDoesNotKnowYet(t *testing.T) {
	k := newFakeKubelet(t)
	k.start(t)
	s := &preparedSlices{}
	startPlugin(t, k.dir, s)
	_, client := k.waitRegistered(t)
	done := make(chan error, 1)
	go func() {
		_, err := client.PreStartContainer(t.Context(), &kubelet.PreStartContainerRequest{DevicesIds: []string{"slot-0007"}})
		done <- err
	}()
	select {
	case err := <-done:
		t.Fatalf("answered before the pod was known: %v", err)
	case <-time.After(100 * time.Millisecond):
	}
	k.hold("default", "late", "app", "slot-0007")
	if err := <-done; err != nil {
		t.Fatal(err)
	}
}

// node-2: the kubelet restarts, empties its plugin directory and comes up some
// time later, and again at once.
func TestRegistersAgainAfterKubeletRestarts(t *testing.T) {
	k := newFakeKubelet(t)
	p := startPlugin(t, k.dir, &preparedSlices{}) // before any kubelet
	p.SetSlots(2)
	for round := range 3 {
		k.start(t)
		ctx, cancel := context.WithCancel(t.Context())
		for try := 0; ; try++ {
			// A plugin that listens just before the kubelet empties the folder
			// registers a socket that is gone; it notices, and registers again.
			_, client := k.waitRegistered(t)
			stream, err := client.ListAndWatch(ctx, &kubelet.Empty{})
			var got *kubelet.ListAndWatchResponse
			if err == nil {
				got, err = stream.Recv()
			}
			if status.Code(err) == codes.Unavailable && try == 0 {
				continue
			}
			if err != nil || len(got.Devices) != 2 {
				t.Fatalf("round %d: %v, %v", round, got, err)
			}
			break
		}
		if round == 1 {
			// The kubelet of this round goes without closing its stream first.
			defer cancel()
		} else {
			cancel()
		}
		k.stop()
	}
}

func TestRegistersAgainWhenItsSocketIsRemoved(t *testing.T) {
	k := newFakeKubelet(t)
	k.start(t)
	startPlugin(t, k.dir, &preparedSlices{})
	r, client := k.waitRegistered(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	stream, err := client.ListAndWatch(ctx, &kubelet.Empty{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(k.dir, "device-plugins", r.Endpoint)); err != nil {
		t.Fatal(err)
	}
	k.waitRegistered(t)
}

func TestRegistersAgainWithAKubeletThatTookThePlaceOfAnother(t *testing.T) {
	k := newFakeKubelet(t)
	k.start(t)
	startPlugin(t, k.dir, &preparedSlices{})
	_, client := k.waitRegistered(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	stream, err := client.ListAndWatch(ctx, &kubelet.Empty{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); err != nil {
		t.Fatal(err)
	}
	// The old one's stream hangs on, and nothing was cleared away.
	socket := filepath.Join(k.dir, "device-plugins", kubeletSocket)
	if err := os.Remove(socket); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer()
	kubelet.RegisterRegistrationServer(s, k)
	k.servers = append(k.servers, s)
	k.serving.Go(func() { s.Serve(l) })
	k.waitRegistered(t)
}

func TestTheKubeletsSocketCutsAWaitShort(t *testing.T) {
	events := make(chan fsnotify.Event, 3)
	events <- fsnotify.Event{Name: "/plugins/carve-gpu-1-1.sock", Op: fsnotify.Create}
	events <- fsnotify.Event{Name: "/plugins/" + kubeletSocket, Op: fsnotify.Remove}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if rest(ctx, time.Hour, nil) {
		t.Error("cut short by nothing")
	}
	if rest(t.Context(), time.Millisecond, nil) {
		t.Error("a wait that passed is told as one that was cut short")
	}
	events <- fsnotify.Event{Name: "/plugins/" + kubeletSocket, Op: fsnotify.Create}
	if !rest(t.Context(), time.Hour, events) || len(events) != 0 {
		t.Errorf("not cut short; %d events left", len(events))
	}
}

// A node whose cards aren't known yet must not say that it has none: the kubelet
// would turn away every pod that it admits again.
func TestDoesNotRegisterBeforeItKnowsTheSlots(t *testing.T) {
	k := newFakeKubelet(t)
	k.start(t)
	p := New(Config{KubeletDir: k.dir, Slices: &preparedSlices{}, Log: slog.New(slog.DiscardHandler)})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- p.Run(ctx) }()
	defer func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	}()
	select {
	case r := <-k.registered:
		t.Fatalf("registered %v without slots", r)
	case <-time.After(200 * time.Millisecond):
	}
	p.SetSlots(2)
	k.waitRegistered(t)
}

// node-1: fewer slots are wished for than pods hold.
func TestSlotsThatPodsHoldStay(t *testing.T) {
	for name, c := range map[string]struct {
		slots int
		held  []string
		want  string
	}{
		"none held":             {2, nil, "slot-0000 slot-0001"},
		"one held beyond":       {2, []string{"slot-0007"}, "slot-0000 slot-0007"},
		"more held than wished": {1, []string{"slot-0003", "slot-0005"}, "slot-0003 slot-0005"},
		"held within":           {3, []string{"slot-0001"}, "slot-0000 slot-0001 slot-0002"},
	} {
		var ids []string
		for _, d := range devices(c.slots, c.held) {
			ids = append(ids, d.ID)
		}
		if got := strings.Join(ids, " "); got != c.want {
			t.Errorf("%s: %s, want %s", name, got, c.want)
		}
	}
	k := newFakeKubelet(t)
	k.start(t)
	p := startPlugin(t, k.dir, &preparedSlices{})
	_, client := k.waitRegistered(t)
	k.hold("default", "a", "app", "slot-0002")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	stream, err := client.ListAndWatch(ctx, &kubelet.Empty{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); err != nil {
		t.Fatal(err)
	}
	p.SetSlots(1)
	now, err := stream.Recv()
	if err != nil || len(now.Devices) != 1 || now.Devices[0].ID != "slot-0002" {
		t.Errorf("after SetSlots(1): %v, %v", now, err)
	}
}

// Two agents of one node, as while a DaemonSet rolls: the second's socket is
// another one, and the first's is cleared away.
func TestEachSessionHasASocketOfItsOwn(t *testing.T) {
	k := newFakeKubelet(t)
	k.start(t)
	left := filepath.Join(k.dir, "device-plugins", "carve-gpu-1-1.sock")
	if err := os.WriteFile(left, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	startPlugin(t, k.dir, &preparedSlices{})
	first, client := k.waitRegistered(t)
	ctx, cancel := context.WithCancel(t.Context())
	stream, err := client.ListAndWatch(ctx, &kubelet.Empty{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := stream.Recv(); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		if _, err := os.Stat(left); err != nil {
			break
		}
		if time.Now().After(end) {
			t.Fatal("what another agent left behind is still there")
		}
	}
	cancel()
	second, _ := k.waitRegistered(t)
	if first.Endpoint == second.Endpoint || strings.ContainsRune(second.Endpoint, '/') {
		t.Errorf("sockets %s, %s", first.Endpoint, second.Endpoint)
	}
}

// While agents change, the node has slots throughout: the kubelet turns pods
// away for good where it has none.
func TestLingersUntilTheNextAgentHasRegistered(t *testing.T) {
	k := newFakeKubelet(t)
	k.start(t)
	first := New(Config{KubeletDir: k.dir, Slices: &preparedSlices{}, Log: slog.New(slog.DiscardHandler), Linger: func() bool { return true }})
	first.SetSlots(3)
	ctx, end := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- first.Run(ctx) }()
	listen := func() {
		t.Helper()
		_, client := k.waitRegistered(t)
		stream, err := client.ListAndWatch(t.Context(), &kubelet.Empty{})
		if err != nil {
			t.Fatal(err)
		}
		if got, err := stream.Recv(); err != nil || len(got.Devices) != 3 {
			t.Fatalf("%v, %v", got, err)
		}
	}
	listen()
	for end := time.Now().Add(20 * time.Second); !first.Connected() && time.Now().Before(end); {
		time.Sleep(time.Millisecond)
	}
	end()
	select {
	case err := <-done:
		t.Fatalf("it left before the next one came: %v", err)
	case <-time.After(200 * time.Millisecond):
	}
	if !first.Connected() {
		t.Error("the kubelet has lost its slots")
	}
	startPlugin(t, k.dir, &preparedSlices{})
	listen()
	select {
	case err := <-done:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("it stays though the next one has registered")
	}
}

// Pods that were bound a moment before the agent ends are still admitted.
func TestSaysFarewell(t *testing.T) {
	k := newFakeKubelet(t)
	k.start(t)
	p := New(Config{KubeletDir: k.dir, Slices: &preparedSlices{}, Log: slog.New(slog.DiscardHandler), Linger: func() bool { return false }, Farewell: time.Hour})
	p.SetSlots(3)
	ctx, end := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- p.Run(ctx) }()
	_, client := k.waitRegistered(t)
	listening, leave := context.WithCancel(t.Context())
	stream, err := client.ListAndWatch(listening, &kubelet.Empty{})
	if err != nil {
		t.Fatal(err)
	}
	if got, err := stream.Recv(); err != nil || len(got.Devices) != 3 {
		t.Fatalf("%v, %v", got, err)
	}
	end()
	time.Sleep(50 * time.Millisecond)
	if _, err := client.Allocate(t.Context(), &kubelet.AllocateRequest{ContainerRequests: []*kubelet.ContainerAllocateRequest{{DevicesIds: []string{"0"}}}}); err != nil {
		t.Errorf("it admits nobody any more: %v", err)
	}
	select {
	case <-done:
		t.Error("it left at once")
	default:
	}
	leave() // nobody is left to bid farewell to
	select {
	case err := <-done:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("it stays though the kubelet has left")
	}
}
