package suite

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"
)

// cardMemory is what a container sees of a card, in bytes.
type cardMemory struct {
	UUID string
	// Total and Free are cuMemGetInfo's, DeviceTotal is cuDeviceTotalMem's,
	// NVMLTotal and NVMLUsed are NVML's.
	Total, Free, DeviceTotal, NVMLTotal, NVMLUsed uint64
}

// memory asks what the container sees. The process that asks has a context, so
// that its cost is in the figures.
func memory(t *testing.T, pod, container string) []cardMemory {
	t.Helper()
	lines, _ := probe(t, pod, container, "info")
	number := func(m map[string]any, key string) uint64 {
		f, ok := m[key].(float64)
		if !ok {
			t.Fatalf("gpuprobe info in %s/%s: no %s in %v", pod, container, key, m)
		}
		return uint64(f)
	}
	var cards []cardMemory
	for _, m := range lines {
		if m["step"] != "card" {
			continue
		}
		if m["ok"] != true {
			t.Fatalf("gpuprobe info in %s/%s: %v", pod, container, m)
		}
		uuid, _ := m["uuid"].(string)
		cards = append(cards, cardMemory{
			UUID: uuid, Total: number(m, "cudaTotalBytes"), Free: number(m, "cudaFreeBytes"), DeviceTotal: number(m, "deviceTotalBytes"),
			NVMLTotal: number(m, "nvmlTotalBytes"), NVMLUsed: number(m, "nvmlUsedBytes"),
		})
	}
	if cards == nil {
		t.Logf("gpuprobe info in %s/%s: %v", pod, container, lines)
	}
	return cards
}

// allocate allocates and frees so many bytes in a process of its own, and
// returns CUDA's result.
func allocate(t *testing.T, pod, container string, bytes uint64) int {
	t.Helper()
	lines, r := probe(t, pod, container, "alloc", fmt.Sprintf("%dB", bytes))
	for _, m := range lines {
		if m["ok"] == false {
			code, ok := m["error"].(float64)
			if !ok {
				t.Fatalf("gpuprobe alloc in %s/%s: %v", pod, container, m)
			}
			return int(code)
		}
	}
	if r.code != 0 {
		t.Fatalf("gpuprobe alloc in %s/%s: exit %d: %s%s", pod, container, r.code, r.stdout, r.stderr)
	}
	return 0
}

// session is a process in a container that holds a context and what it was
// told to allocate, and takes orders.
type session struct {
	t     *testing.T
	where string
	cmd   *exec.Cmd
	stdin io.WriteCloser
	lines chan map[string]any
}

// start begins a session; end must follow.
func start(t *testing.T, pod, container string) *session {
	t.Helper()
	return startProgram(t, pod, container, "/usr/bin/gpuprobe", "serve")
}

// startPast begins a session whose program opens the driver's own file instead of
// the front library.
func startPast(t *testing.T, pod, container string) *session {
	t.Helper()
	return startProgram(t, pod, container, "env", "LD_LIBRARY_PATH=/usr/lib/carve/driver", "/usr/bin/gpuprobe", "serve")
}

func startProgram(t *testing.T, pod, container string, program ...string) *session {
	t.Helper()
	cmd := cluster.Lab.Command(t.Context(), "kubectl",
		append([]string{"--kubeconfig=/etc/kubernetes/admin.conf", "exec", "-i", pod, "-c", container, "--"}, program...)...)
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cluster.Lab.Start(cmd); err != nil {
		t.Fatal(err)
	}
	s := &session{t, pod + "/" + container, cmd, stdin, make(chan map[string]any, 1000)}
	go func() {
		defer close(s.lines)
		in := bufio.NewScanner(stdout)
		for in.Scan() {
			var m map[string]any
			if json.Unmarshal(in.Bytes(), &m) == nil {
				s.lines <- m
			}
		}
	}()
	return s
}

// say gives an order and returns the line that answers it. Lines that the
// process prints by itself each second have another step.
func (s *session) say(order, step string) map[string]any {
	s.t.Helper()
	if _, err := io.WriteString(s.stdin, order+"\n"); err != nil {
		s.t.Fatalf("%s: %s: %v", s.where, order, err)
	}
	limit := time.After(30 * time.Second)
	for {
		select {
		case m, open := <-s.lines:
			if !open {
				s.t.Fatalf("%s: %s: the process ended", s.where, order)
			}
			if m["step"] == step {
				return m
			}
		case <-limit:
			s.t.Fatalf("%s: %s: no answer", s.where, order)
		}
	}
}

// alloc allocates and returns CUDA's result.
func (s *session) alloc(bytes uint64) int {
	s.t.Helper()
	m := s.say(fmt.Sprintf("alloc %dB", bytes), "alloc")
	if m["ok"] == true {
		return 0
	}
	code, ok := m["error"].(float64)
	if !ok {
		s.t.Fatalf("%s: alloc: %v", s.where, m)
	}
	return int(code)
}

// free gives the first allocation back and returns the bytes that are then
// free.
func (s *session) free() uint64 {
	s.t.Helper()
	return s.bytes(s.say("free 0", "free"))
}

// info returns the free bytes as cuMemGetInfo has them.
func (s *session) info() uint64 {
	s.t.Helper()
	return s.bytes(s.say("info", "memory"))
}

func (s *session) bytes(m map[string]any) uint64 {
	s.t.Helper()
	f, ok := m["freeBytes"].(float64)
	if !ok {
		s.t.Fatalf("%s: no freeBytes in %v", s.where, m)
	}
	return uint64(f)
}

// end lets the process quit.
func (s *session) end() {
	if _, err := io.WriteString(s.stdin, "quit\n"); err != nil {
		s.t.Errorf("%s: quit: %v", s.where, err)
	}
	_ = s.stdin.Close()
	if err := s.cmd.Wait(); err != nil {
		s.t.Logf("%s: the session: %v", s.where, err)
	}
}

// allocateAndHold starts a session that holds memory.
func allocateAndHold(t *testing.T, pod, container string, bytes uint64) *session {
	t.Helper()
	s := start(t, pod, container)
	if code := s.alloc(bytes); code != 0 {
		t.Errorf("hold %d bytes in %s: CUDA error %d", bytes, s.where, code)
	}
	return s
}

// wantFront checks that every way of loading a driver library opens the front.
func wantFront(t *testing.T, pod, container string) {
	t.Helper()
	inode := func(path string) uint64 {
		r := shell(t, pod, container, "stat", "-L", "-c", "%i", path)
		n, err := strconv.ParseUint(strings.TrimSpace(r.stdout), 10, 64)
		if err != nil {
			t.Fatalf("stat %s in %s/%s: %v: %s", path, pod, container, err, r.stderr)
		}
		return n
	}
	const libraries = "/usr/lib/x86_64-linux-gnu/"
	fronts := map[string]uint64{}
	for name, file := range map[string]string{"libcuda": "libcuda.so.1", "libnvidia-ml": "libnvidia-ml.so.1"} {
		fronts[name] = inode(libraries + file)
		if fronts[name] == inode("/usr/lib/carve/driver/"+file) {
			t.Fatalf("%s in %s/%s is the driver's own file", file, pod, container)
		}
	}
	lines, r := probe(t, pod, container, "paths")
	seen := map[string]int{}
	for _, m := range lines {
		if m["step"] != "path" {
			continue
		}
		library, _ := m["library"].(string)
		n, ok := m["inode"].(float64)
		if m["ok"] != true || !ok || uint64(n) != fronts[library] {
			t.Errorf("%s/%s: loading %s by %v opens %v, want the front: %v", pod, container, library, m["way"], m["file"], m)
		}
		seen[library]++
	}
	if seen["libcuda"] < 6 || seen["libnvidia-ml"] < 4 {
		t.Errorf("gpuprobe paths tried %v ways only; stderr: %s", seen, r.stderr)
	}
}

// metrics scrapes the agent.
func metrics(t *testing.T) string {
	t.Helper()
	client := cluster.Lab.HTTPClient()
	client.Timeout = 10 * time.Second
	defer client.CloseIdleConnections()
	r, err := client.Get("http://" + cluster.Lab.Config().Node.IP() + ":9410/metrics")
	if err != nil {
		t.Fatalf("scrape the agent: %v", err)
	}
	defer r.Body.Close()
	b, err := io.ReadAll(r.Body)
	if err != nil || r.StatusCode != http.StatusOK {
		t.Fatalf("scrape the agent: %s, %v", r.Status, err)
	}
	return string(b)
}

// sample is the value of the first series of that name whose labels contain
// the given text, or -1.
func sample(text, name, labels string) float64 {
	for _, line := range strings.Split(text, "\n") {
		if !strings.HasPrefix(line, name+"{") || !strings.Contains(line, labels) {
			continue
		}
		if i := strings.LastIndexByte(line, ' '); i > 0 {
			if v, err := strconv.ParseFloat(line[i+1:], 64); err == nil {
				return v
			}
		}
	}
	return -1
}

func format(bytes float64) string { return strconv.FormatFloat(bytes/mib, 'f', 1, 64) + " MiB" }

// agentRestarts counts how often the agent's container was started again.
func agentRestarts(t *testing.T) int32 {
	t.Helper()
	pods, err := cluster.AgentPods(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if len(pods) != 1 || len(pods[0].Status.ContainerStatuses) != 1 {
		t.Fatalf("%d agent pods", len(pods))
	}
	return pods[0].Status.ContainerStatuses[0].RestartCount
}
