package agent

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/gpunodes"
	"github.com/carve-gpu/carve/api/v1alpha1"
	"github.com/carve-gpu/carve/vgpu/gpu"
)

// inNamespace says that the process has a mount namespace of its own.
const inNamespace = "CARVE_TEST_MOUNT_NAMESPACE"

// TestMain runs the tests in a mount namespace of their own: slices are
// mounts.
func TestMain(m *testing.M) {
	if os.Getenv(asTenant) != "" {
		beTenant()
		return
	}
	if os.Getenv(inNamespace) == "" {
		cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
		cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
		cmd.Env = append(os.Environ(), inNamespace+"=1")
		cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
		err := cmd.Run()
		var exit *exec.ExitError
		if err != nil && !errors.As(err, &exit) {
			fmt.Fprintln(os.Stderr, "these tests mount, and need root for it:", err)
			os.Exit(1)
		}
		os.Exit(cmd.ProcessState.ExitCode())
	}
	if dir := os.Getenv(crashDir); dir != "" {
		crashingAgent(dir)
		return
	}
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) { destroySoft(); os.Exit(code) }))
}

const (
	nodeName = "n1"
	cardA    = "GPU-00000000-0000-0000-0000-00000000000a"
	cardB    = "GPU-00000000-0000-0000-0000-00000000000b"
)

// twoCards is a driver with two cards of 80 GiB. The software GPU is the test
// of the real door; here it is the slices that matter.
type twoCards struct {
	mu        sync.Mutex
	fault     map[string]string
	err       error
	processes []gpu.Process
	samples   int
	sick      string // a card that can't be sampled
	modes     map[string]gpu.ComputeMode
}

func (c *twoCards) ComputeMode(uuid string) (gpu.ComputeMode, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if mode := c.modes[uuid]; mode != "" {
		return mode, nil
	}
	return gpu.ComputeDefault, nil
}

func (c *twoCards) SetComputeMode(uuid string, mode gpu.ComputeMode) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.modes == nil {
		c.modes = map[string]gpu.ComputeMode{}
	}
	c.modes[uuid] = mode
	return nil
}

func (c *twoCards) Inventory() (gpu.Inventory, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.err != nil {
		return gpu.Inventory{}, c.err
	}
	inv := gpu.Inventory{DriverVersion: "550.90.07"}
	for i, uuid := range []string{cardA, cardB} {
		inv.Cards = append(inv.Cards, gpu.Card{
			UUID: uuid, Index: i, Minor: i, Model: "NVIDIA A100-SXM4-80GB", NUMANode: -1,
			MemoryBytes: 81920 << 20, ReservedBytes: 512 << 20, Fault: c.fault[uuid], ComputeMode: c.modes[uuid],
		})
	}
	return inv, nil
}

func (c *twoCards) Sample(uuid string) (gpu.Sample, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if uuid == c.sick {
		return gpu.Sample{}, errors.New("Unknown Error")
	}
	c.samples++
	return gpu.Sample{At: time.Now(), UsedBytes: 1 << 30, ReservedBytes: 512 << 20, Processes: c.processes}, nil
}

func (c *twoCards) Utilization(_ string, since uint64) (gpu.Utilization, error) {
	return gpu.Utilization{At: since}, nil
}

func (c *twoCards) Occupancy(uuid string) (gpu.Sample, error) { return c.Sample(uuid) }

// apiServer is the part of an API server that the agent uses, over HTTP: pods
// with watch, GPUNodes with status and watch, events.
type apiServer struct {
	*httptest.Server

	mu       sync.Mutex
	version  int
	pods     map[string]*corev1.Pod // by UID
	node     *v1alpha1.GPUNode
	kubeNode *corev1.Node
	patches  int // of kubeNode
	changes  []change
	changed  chan struct{}
	writes   int
	events   []string
	away     bool
	mute     bool // of pods nothing is shown but to who asks for one
	stopping chan struct{}
}

type change struct {
	version int
	kind    string // pods, nodes or gpunodes
	event   metav1.WatchEvent
}

func newAPIServer(t testing.TB) *apiServer {
	s := &apiServer{pods: map[string]*corev1.Pod{}, kubeNode: kubeNode("0", nil), changed: make(chan struct{}), stopping: make(chan struct{})}
	s.Server = httptest.NewServer(s)
	t.Cleanup(func() {
		close(s.stopping)
		s.CloseClientConnections()
		s.Close()
	})
	return s
}

func (s *apiServer) clients(t testing.TB) (kubernetes.Interface, *gpunodes.Client) {
	t.Helper()
	c := &rest.Config{Host: s.URL, ContentConfig: rest.ContentConfig{ContentType: "application/json"}, QPS: -1}
	pods, err := kubernetes.NewForConfig(c)
	if err != nil {
		t.Fatal(err)
	}
	reports, err := gpunodes.New(c)
	if err != nil {
		t.Fatal(err)
	}
	return pods, reports
}

// note records a change for the watches. s.mu is held.
func (s *apiServer) note(kind, event string, o any) {
	raw, _ := json.Marshal(o)
	e := metav1.WatchEvent{Type: event}
	e.Object.Raw = raw
	s.changes = append(s.changes, change{s.version, kind, e})
	close(s.changed)
	s.changed = make(chan struct{})
}

func (s *apiServer) setPod(p *corev1.Pod) {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, had := s.pods[string(p.UID)]
	s.version++
	p.ResourceVersion = strconv.Itoa(s.version)
	p.TypeMeta = metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"}
	s.pods[string(p.UID)] = p
	if had {
		s.note("pods", "MODIFIED", p)
	} else {
		s.note("pods", "ADDED", p)
	}
}

func (s *apiServer) deletePod(uid string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := s.pods[uid].DeepCopy()
	delete(s.pods, uid)
	s.version++
	p.ResourceVersion = strconv.Itoa(s.version)
	s.note("pods", "DELETED", p)
}

func kubeNode(version string, capacity corev1.ResourceList) *corev1.Node {
	return &corev1.Node{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Node"},
		ObjectMeta: metav1.ObjectMeta{Name: nodeName, UID: "kube-node-uid", ResourceVersion: version},
		Status:     corev1.NodeStatus{Capacity: capacity}}
}

// setCapacity is what a kubelet does when it registers.
func (s *apiServer) setCapacity(c corev1.ResourceList) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.version++
	s.kubeNode = kubeNode(strconv.Itoa(s.version), c)
	s.note("nodes", "MODIFIED", s.kubeNode)
}

func (s *apiServer) capacity() corev1.ResourceList {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.kubeNode.Status.Capacity.DeepCopy()
}

func (s *apiServer) setAway(away bool) {
	s.mu.Lock()
	s.away = away
	s.mu.Unlock()
	if away {
		s.CloseClientConnections()
	}
}

// setMute lets the API server answer, but show no watch of pods; those that are under
// way break off.
func (s *apiServer) setMute(mute bool) {
	s.mu.Lock()
	s.mute = mute
	s.mu.Unlock()
	if mute {
		s.CloseClientConnections()
	}
}

// report is the node's status as last written, and how often it was.
func (s *apiServer) report() (v1alpha1.GPUNodeStatus, int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.node == nil {
		return v1alpha1.GPUNodeStatus{}, s.writes
	}
	return *s.node.Status.DeepCopy(), s.writes
}

func (s *apiServer) said() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return strings.Join(s.events, "\n")
}

func (s *apiServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	away := s.away || s.mute && r.URL.Path == "/api/v1/pods"
	s.mu.Unlock()
	if away {
		http.Error(w, "away", http.StatusServiceUnavailable)
		return
	}
	answer := func(o any) {
		w.Header().Set("Content-Type", "application/json")
		json.NewEncoder(w).Encode(o)
	}
	failed := func(code int, reason metav1.StatusReason) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(code)
		json.NewEncoder(w).Encode(metav1.Status{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Status"}, Status: "Failure", Reason: reason, Code: int32(code)})
	}
	q := r.URL.Query()
	switch path := r.URL.Path; {
	case q.Get("sendInitialEvents") != "":
		// An API server without streaming lists; clients list then.
		failed(422, metav1.StatusReasonInvalid)
	case path == "/api/v1/namespaces" && q.Get("watch") != "":
		s.watch(w, r, "namespaces")
	case path == "/api/v1/namespaces":
		s.mu.Lock()
		list := corev1.NamespaceList{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "NamespaceList"}, ListMeta: metav1.ListMeta{ResourceVersion: strconv.Itoa(s.version)}}
		s.mu.Unlock()
		answer(list)
	case path == "/api/v1/pods" && q.Get("watch") != "":
		s.watch(w, r, "pods")
	case path == "/api/v1/pods":
		s.mu.Lock()
		list := corev1.PodList{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "PodList"}, ListMeta: metav1.ListMeta{ResourceVersion: strconv.Itoa(s.version)}}
		for _, p := range s.pods {
			list.Items = append(list.Items, *p)
		}
		s.mu.Unlock()
		answer(list)
	case strings.HasPrefix(path, "/api/v1/namespaces/default/pods/"):
		s.mu.Lock()
		var found *corev1.Pod
		for _, p := range s.pods {
			if p.Name == filepath.Base(path) {
				found = p
			}
		}
		s.mu.Unlock()
		if found == nil {
			failed(404, metav1.StatusReasonNotFound)
			return
		}
		answer(found)
	case path == "/api/v1/nodes" && q.Get("watch") != "":
		s.watch(w, r, "nodes")
	case path == "/api/v1/nodes":
		s.mu.Lock()
		defer s.mu.Unlock()
		answer(corev1.NodeList{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "NodeList"}, ListMeta: metav1.ListMeta{ResourceVersion: strconv.Itoa(s.version)}, Items: []corev1.Node{*s.kubeNode}})
	case path == "/api/v1/nodes/"+nodeName+"/status" && r.Method == http.MethodPatch:
		patch := &corev1.Node{}
		json.NewDecoder(r.Body).Decode(patch)
		s.mu.Lock()
		s.patches++
		s.mu.Unlock()
		now := s.capacity()
		if now == nil {
			now = corev1.ResourceList{}
		}
		for name, q := range patch.Status.Capacity {
			now[name] = q
		}
		s.setCapacity(now)
		answer(kubeNode("", now))
	case strings.HasSuffix(path, "/events"):
		var e corev1.Event
		json.NewDecoder(r.Body).Decode(&e)
		s.mu.Lock()
		s.events = append(s.events, e.InvolvedObject.Name+" "+e.Reason+": "+e.Message)
		s.mu.Unlock()
		answer(e)
	case path == "/apis/carve.dev/v1alpha1/gpunodes" && q.Get("watch") != "":
		s.watch(w, r, "gpunodes")
	case path == "/apis/carve.dev/v1alpha1/gpunodes" && r.Method == http.MethodPost:
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.node != nil {
			failed(409, metav1.StatusReasonAlreadyExists)
			return
		}
		n := &v1alpha1.GPUNode{}
		json.NewDecoder(r.Body).Decode(n)
		s.writes++
		s.version++
		n.UID, n.ResourceVersion, n.Status = "node-uid", strconv.Itoa(s.version), v1alpha1.GPUNodeStatus{}
		n.TypeMeta = metav1.TypeMeta{APIVersion: "carve.dev/v1alpha1", Kind: "GPUNode"}
		s.node = n
		s.note("gpunodes", "ADDED", n)
		answer(n)
	case path == "/apis/carve.dev/v1alpha1/gpunodes":
		s.mu.Lock()
		defer s.mu.Unlock()
		list := v1alpha1.GPUNodeList{TypeMeta: metav1.TypeMeta{APIVersion: "carve.dev/v1alpha1", Kind: "GPUNodeList"}, ListMeta: metav1.ListMeta{ResourceVersion: strconv.Itoa(s.version)}}
		if s.node != nil {
			list.Items = append(list.Items, *s.node)
		}
		answer(list)
	case strings.HasPrefix(path, "/apis/carve.dev/v1alpha1/gpunodes/"+nodeName):
		s.mu.Lock()
		defer s.mu.Unlock()
		switch {
		case s.node == nil:
			failed(404, metav1.StatusReasonNotFound)
		case r.Method == http.MethodGet:
			answer(s.node)
		default:
			n := &v1alpha1.GPUNode{}
			json.NewDecoder(r.Body).Decode(n)
			if n.ResourceVersion != s.node.ResourceVersion {
				failed(409, metav1.StatusReasonConflict)
				return
			}
			s.putStatus(n.Status)
			answer(s.node)
		}
	default:
		failed(404, metav1.StatusReasonNotFound)
	}
}

// putStatus writes the status. s.mu is held.
func (s *apiServer) putStatus(status v1alpha1.GPUNodeStatus) {
	s.writes++
	s.version++
	n := s.node.DeepCopy()
	n.Status, n.ResourceVersion = status, strconv.Itoa(s.version)
	s.node = n
	s.note("gpunodes", "MODIFIED", n)
}

func (s *apiServer) watch(w http.ResponseWriter, r *http.Request, kind string) {
	from, _ := strconv.Atoi(r.URL.Query().Get("resourceVersion"))
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(200)
	w.(http.Flusher).Flush()
	sent := 0
	for {
		s.mu.Lock()
		pending, changed := s.changes[sent:], s.changed
		sent = len(s.changes)
		s.mu.Unlock()
		for _, c := range pending {
			if c.kind == kind && c.version > from {
				json.NewEncoder(w).Encode(c.event)
			}
		}
		w.(http.Flusher).Flush()
		select {
		case <-r.Context().Done():
			return
		case <-s.stopping:
			return
		case <-changed:
		}
	}
}

// testConfig makes a config with directories and a driver root of its own.
func testConfig(t testing.TB, dir string, s *apiServer, cards Hardware) Config {
	t.Helper()
	pods, reports := s.clients(t)
	return Config{
		Node: nodeName, RunDir: filepath.Join(dir, "run"), StateDir: filepath.Join(dir, "state"), LibDir: filepath.Join(dir, "lib"),
		Root:           gpu.Root{Path: filepath.Join(dir, "driver")},
		OpenHardware:   func() (Hardware, error) { return cards, nil },
		Pods:           pods,
		Reports:        reports,
		StopUnadjusted: true,
		fewerAfter:     time.Millisecond,
		Version:        "test",
		Log:            slog.New(slog.DiscardHandler),
	}
}

// makeRoot makes what the agent looks for on a node: device nodes, driver
// files and carve's own.
func makeRoot(t testing.TB, dir string) {
	t.Helper()
	write := func(path string) {
		path = filepath.Join(dir, path)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(path), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range installedNames {
		write("lib/" + name)
	}
	for _, name := range []string{"libcuda.so.1", "libnvidia-ml.so.1"} {
		write("driver/usr/lib/x86_64-linux-gnu/" + name)
	}
	if err := os.MkdirAll(filepath.Join(dir, "driver/dev"), 0o755); err != nil {
		t.Fatal(err)
	}
	for i, name := range []string{"nvidiactl", "nvidia0", "nvidia1"} {
		if err := unix.Mknod(filepath.Join(dir, "driver/dev", name), unix.S_IFCHR|0o666, int(unix.Mkdev(195, uint32(i)))); err != nil {
			t.Fatal(err)
		}
	}
}

// shareOf makes the grant of one container.
func shareOf(card string, memMiB int64, cores int) []api.CardGrant {
	return []api.CardGrant{{Card: card, MemMiB: memMiB, Cores: cores, Mode: api.ModeVGPU}}
}

func grantOf(uid string, generation int, containers map[string][]api.CardGrant) api.Grant {
	return api.Grant{Version: api.GrantVersion, UID: uid, Node: nodeName, Generation: generation, Containers: containers}
}

// podWith makes a pod with app containers as the grant has them.
func podWith(t testing.TB, uid string, g api.Grant) *corev1.Pod {
	t.Helper()
	text, err := g.Encode()
	if err != nil {
		t.Fatal(err)
	}
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "pod-" + uid, Namespace: "default", UID: types.UID(uid), Annotations: map[string]string{api.AnnotationGrant: text}},
		Spec:       corev1.PodSpec{NodeName: nodeName},
	}
	for name := range g.Containers {
		p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Name: name})
	}
	return p
}

// eventually waits until a condition holds.
func eventually(t testing.TB, what string, holds func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		if holds() {
			return
		}
	}
	t.Fatalf("it didn't happen: %s", what)
}
