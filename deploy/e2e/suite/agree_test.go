package suite

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/deploy/e2e/audit"
	"github.com/carve-gpu/carve/deploy/e2e/install"
	"github.com/carve-gpu/carve/vgpu/region"
)

// agree waits until nothing moves any more and then compares all that says who
// has what: grants, report, files, journal, what runs, the driver, the
// extender's sums. What differs fails the test. See package audit.
func agree(t *testing.T) audit.Findings {
	t.Helper()
	f := settle(t.Context())
	for _, line := range f.Lines {
		t.Error(line)
	}
	return f
}

// settle looks until all agree, or patience ends; then it says what doesn't.
// The parts of one look are of different moments, so on a node on which
// something still happens a look finds more than there is, and is repeated.
func settle(ctx context.Context) audit.Findings {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	var last audit.Findings
	for {
		s, err := gather(ctx)
		if err == nil {
			if last = audit.Compare(s); last.OK() {
				return last
			}
		} else if ctx.Err() == nil {
			last = audit.Findings{Lines: []string{"differs: not everybody can be asked: " + err.Error()}}
		}
		select {
		case <-ctx.Done():
			return last
		case <-time.After(250 * time.Millisecond):
		}
	}
}

// gather asks everybody.
func gather(ctx context.Context) (audit.Snapshot, error) {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	var s audit.Snapshot
	node := cluster.Lab.Config().Node.Name
	pods, err := cluster.Client.CoreV1().Pods("").List(ctx, metav1.ListOptions{FieldSelector: "spec.nodeName=" + node})
	if err != nil {
		return s, err
	}
	for i := range pods.Items {
		s.Pods = append(s.Pods, seenPod(&pods.Items[i]))
	}
	report, err := cluster.Nodes.Get(ctx, node)
	if err != nil {
		return s, err
	}
	s.Cards, s.Hook, s.Unadjusted = report.Status.Cards, report.Status.HookConnectedSince != nil, int(report.Status.UnadjustedContainers)
	byNode := map[string]string{} // the name of a card's device node
	for _, c := range s.Cards {
		byNode[fmt.Sprintf("nvidia%d", c.Index)] = c.UUID
	}
	if s.Journal, err = seenJournal(); err != nil {
		return s, err
	}
	if s.Files, err = seenFiles(); err != nil {
		return s, err
	}
	if s.Containers, err = seenContainers(ctx, byNode); err != nil {
		return s, err
	}
	if s.Driver, err = seenDriver(ctx, s.Containers); err != nil {
		return s, err
	}
	if s.Ledger, err = seenLedger(ctx); err != nil {
		return s, err
	}
	s.AgentMiB, err = seenByAgent(ctx)
	return s, err
}

func seenPod(p *corev1.Pod) audit.Pod {
	out := audit.Pod{
		UID: string(p.UID), Name: p.Namespace + "/" + p.Name, Done: map[string]bool{},
		Over: p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed,
	}
	if text := p.Annotations[api.AnnotationGrant]; text != "" {
		if g, err := api.DecodeGrant(text); err != nil {
			out.GrantFault = err.Error()
		} else {
			out.Grant = &g
		}
	}
	for _, c := range p.Spec.InitContainers {
		kind := api.Init
		if c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways {
			kind = api.Sidecar
		}
		out.Containers = append(out.Containers, audit.PodContainer{Name: c.Name, Kind: kind})
	}
	for _, c := range p.Spec.Containers {
		out.Containers = append(out.Containers, audit.PodContainer{Name: c.Name, Kind: api.App})
	}
	for _, s := range p.Status.InitContainerStatuses {
		if e := s.State.Terminated; e != nil && e.ExitCode == 0 {
			out.Done[s.Name] = true
		}
	}
	return out
}

// onNode is a path of the node as this process reaches it.
func onNode(path ...string) string { return cluster.Lab.Path(filepath.Join(path...)) }

// list reads a folder that may be missing.
func list(dir string) ([]os.DirEntry, error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return entries, err
}

func seenJournal() ([]audit.Record, error) {
	dir := onNode("/var/lib/carve/journal")
	entries, err := list(dir)
	if err != nil {
		return nil, err
	}
	var out []audit.Record
	for _, e := range entries {
		r := audit.Record{UID: strings.TrimSuffix(e.Name(), ".json")}
		b, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		var record struct {
			State string
			Grant api.Grant
		}
		if err == nil {
			err = json.Unmarshal(b, &record)
		}
		if err != nil {
			r.Fault = err.Error()
		}
		r.State, r.Grant = record.State, record.Grant
		out = append(out, r)
	}
	return out, nil
}

const slicesDir = "/run/carve/slices"

func seenFiles() ([]audit.Files, error) {
	pods, err := list(onNode(slicesDir))
	if err != nil {
		return nil, err
	}
	var out []audit.Files
	for _, p := range pods {
		containers, err := list(onNode(slicesDir, p.Name()))
		if err != nil {
			return nil, err
		}
		if len(containers) == 0 {
			out = append(out, audit.Files{UID: p.Name(), Fault: "an empty folder"})
		}
		for _, c := range containers {
			out = append(out, seenSlice(p.Name(), c.Name()))
		}
	}
	return out, nil
}

func seenSlice(uid, container string) audit.Files {
	dir := onNode(slicesDir, uid, container)
	f := audit.Files{UID: uid, Container: container}
	var order []string
	var err error
	if f.Limits, f.Inode, order, err = seenLimits(filepath.Join(dir, "limits")); err != nil {
		f.Fault = err.Error()
		return f
	}
	u, err := region.ReadUsage(filepath.Join(dir, "usage.d", "usage"), len(order))
	if err != nil {
		f.Fault = err.Error()
		return f
	}
	f.ChargedBytes = map[string]uint64{}
	for i, card := range order {
		f.ChargedBytes[card] = u.Total(i).UsedBytes
	}
	return f
}

// seenLimits reads a limits file, and gives its cards in its own order.
func seenLimits(path string) (audit.Limits, uint64, []string, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, 0, nil, err
	}
	l, err := region.ReadLimits(path)
	if err != nil {
		return nil, 0, nil, err
	}
	limits, order := audit.Limits{}, []string(nil)
	for _, c := range l.Cards {
		uuid := c.UUID.String()
		order = append(order, uuid)
		// Of compute either is zero: carve divides none among the clients of MPS.
		limits[uuid] = audit.Share{MemMiB: int64(c.LimitBytes >> 20), Cores: int(c.ComputePPM/10_000) + int(c.MPSPercent)}
	}
	return limits, info.Sys().(*syscall.Stat_t).Ino, order, nil
}

// runtimeAPI is the connection to the node's container runtime. It survives the
// runtime's restarts.
var runtimeAPI = sync.OnceValues(func() (cri.RuntimeServiceClient, error) {
	conn, err := grpc.NewClient("unix://"+onNode("/run/containerd/containerd.sock"),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(grpc.ConnectParams{MinConnectTimeout: time.Second}))
	if err != nil {
		return nil, err
	}
	return cri.NewRuntimeServiceClient(conn), nil
})

// unfinished lists the runtime's containers that haven't exited.
func unfinished(ctx context.Context) ([]*cri.Container, error) {
	runtime, err := runtimeAPI()
	if err != nil {
		return nil, err
	}
	r, err := runtime.ListContainers(ctx, &cri.ListContainersRequest{})
	if err != nil {
		return nil, fmt.Errorf("list the runtime's containers: %w", err)
	}
	return slices.DeleteFunc(r.Containers, func(c *cri.Container) bool {
		return c.State != cri.ContainerState_CONTAINER_RUNNING && c.State != cri.ContainerState_CONTAINER_CREATED
	}), nil
}

// pids keeps the first processes of containers: they never change.
var pids sync.Map

// firstProcess is a container's first process, by its number on the node.
func firstProcess(ctx context.Context, id string) (int, error) {
	if pid, ok := pids.Load(id); ok {
		return pid.(int), nil
	}
	runtime, err := runtimeAPI()
	if err != nil {
		return 0, err
	}
	r, err := runtime.ContainerStatus(ctx, &cri.ContainerStatusRequest{ContainerId: id, Verbose: true})
	if err != nil {
		return 0, fmt.Errorf("ask the runtime for container %s: %w", id, err)
	}
	var info struct{ Pid int }
	if err := json.Unmarshal([]byte(r.Info["info"]), &info); err != nil || info.Pid == 0 {
		return 0, fmt.Errorf("the runtime tells no process of container %s: %v %.200s", id, err, r.Info["info"])
	}
	pids.Store(id, info.Pid)
	return info.Pid, nil
}

// Labels that the kubelet puts on containers.
const (
	labelPodUID    = "io.kubernetes.pod.uid"
	labelPod       = "io.kubernetes.pod.name"
	labelContainer = "io.kubernetes.container.name"
)

func seenContainers(ctx context.Context, byNode map[string]string) ([]audit.Container, error) {
	all, err := unfinished(ctx)
	if err != nil {
		return nil, err
	}
	var out []audit.Container
	for _, c := range all {
		k := audit.Container{
			ID: c.Id, UID: c.Labels[labelPodUID], Pod: c.Labels[labelPod], Name: c.Labels[labelContainer],
			Running: c.State == cri.ContainerState_CONTAINER_RUNNING,
		}
		if k.Running {
			if err := lookInto(ctx, &k, byNode); err != nil {
				k.Fault = err.Error()
			}
		}
		out = append(out, k)
	}
	return out, nil
}

// cardNode is the name of a card's device node, as opposed to the driver's own.
var cardNode = regexp.MustCompile(`^nvidia[0-9]+$`)

// lookInto reads what a running container sees, through its own root.
func lookInto(ctx context.Context, k *audit.Container, byNode map[string]string) error {
	pid, err := firstProcess(ctx, k.ID)
	if err != nil {
		return err
	}
	root := onNode("/proc", strconv.Itoa(pid), "root")
	devices, err := list(filepath.Join(root, "dev"))
	if err != nil {
		return err
	}
	for _, d := range devices {
		if !strings.HasPrefix(d.Name(), "nvidia") {
			continue
		}
		switch uuid := byNode[d.Name()]; {
		case uuid != "":
			if err := sameDevice(filepath.Join(root, "dev", d.Name()), filepath.Join(install.SoftRoot(cluster.Lab.Config().Dir), "dev", d.Name())); err != nil {
				return err
			}
			k.Cards = append(k.Cards, uuid)
		case cardNode.MatchString(d.Name()):
			return fmt.Errorf("it has the device node %s, which is no card's", d.Name())
		}
	}
	limits, inode, _, err := seenLimits(filepath.Join(root, "usr/lib/carve/limits"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	k.Limits, k.Inode = limits, inode
	return err
}

// sameDevice checks that two device nodes are of one device.
func sameDevice(a, b string) error {
	var x, y syscall.Stat_t
	if err := errors.Join(syscall.Stat(a, &x), syscall.Stat(b, &y)); err != nil {
		return err
	}
	if x.Rdev != y.Rdev {
		return fmt.Errorf("%s is device %x, %s is %x", a, x.Rdev, b, y.Rdev)
	}
	return nil
}

// softgpu runs the software GPU's tool on the lab's cards.
func softgpu(ctx context.Context, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, filepath.Join(cluster.Repo, "vgpu/soft/build/softgpu"), args...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("softgpu %s: %w: %s", strings.Join(args, " "), err, stderr.String())
	}
	return out, nil
}

func seenDriver(ctx context.Context, containers []audit.Container) ([]audit.DriverCard, error) {
	out, err := softgpu(ctx, "show", install.SoftRoot(cluster.Lab.Config().Dir), "-o", "json")
	if err != nil {
		return nil, err
	}
	var shown struct {
		Cards []struct {
			UUID      string
			UsedBytes uint64
			Processes []struct {
				PID                       int
				Ended                     bool
				ContextBytes, MemoryBytes uint64
			}
		}
	}
	if err := json.Unmarshal(out, &shown); err != nil {
		return nil, fmt.Errorf("read what softgpu shows: %w", err)
	}
	var cards []audit.DriverCard
	for _, c := range shown.Cards {
		card := audit.DriverCard{UUID: c.UUID, UsedBytes: c.UsedBytes}
		for _, p := range c.Processes {
			q := audit.Process{PID: p.PID, Ended: p.Ended, Bytes: p.ContextBytes + p.MemoryBytes}
			groups, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", p.PID))
			for _, k := range containers {
				if bytes.Contains(groups, []byte(k.ID)) {
					q.Container = k.ID
				}
			}
			card.Processes = append(card.Processes, q)
		}
		cards = append(cards, card)
	}
	return cards, nil
}

// scrape reads the metrics of an address in the lab.
func scrape(ctx context.Context, url string) (string, error) {
	client := cluster.Lab.HTTPClient()
	client.Timeout = 5 * time.Second
	defer client.CloseIdleConnections()
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return "", err
	}
	r, err := client.Do(request)
	if err != nil {
		return "", err
	}
	defer r.Body.Close()
	b, err := io.ReadAll(r.Body)
	if err == nil && r.StatusCode != http.StatusOK {
		err = errors.New(r.Status)
	}
	if err != nil {
		return "", fmt.Errorf("scrape %s: %w", url, err)
	}
	return string(b), nil
}

// extenderPod is the extender's pod that serves.
func extenderPod(ctx context.Context) (*corev1.Pod, error) {
	pods, err := cluster.Client.CoreV1().Pods(api.Namespace).List(ctx, metav1.ListOptions{LabelSelector: "app.kubernetes.io/name=carve-extender"})
	if err != nil {
		return nil, err
	}
	for i := range pods.Items {
		if p := &pods.Items[i]; p.DeletionTimestamp == nil && p.Status.PodIP != "" {
			return p, nil
		}
	}
	return nil, fmt.Errorf("none of %d pods of the extender has an address", len(pods.Items))
}

func seenLedger(ctx context.Context) (audit.Ledger, error) {
	var l audit.Ledger
	p, err := extenderPod(ctx)
	if err != nil {
		return l, err
	}
	text, err := scrape(ctx, "http://"+p.Status.PodIP+":8080/metrics")
	if err != nil {
		return l, err
	}
	for _, v := range []struct {
		to           *int64
		name, labels string
	}{
		{&l.UsedMiB, "carve_ledger_memory_mib", `kind="used"`},
		{&l.DebtMiB, "carve_ledger_memory_mib", `kind="debt"`},
		{&l.Offers, "carve_ledger_entries", `state="offered"`},
		{&l.Bound, "carve_ledger_entries", `state="bound"`},
		{&l.Releasing, "carve_ledger_entries", `state="releasing"`},
	} {
		f := sample(text, v.name, v.labels)
		if f < 0 {
			return l, fmt.Errorf("the extender has no series %s{%s}", v.name, v.labels)
		}
		*v.to = int64(f)
	}
	return l, nil
}

var cardUUID = regexp.MustCompile(`card_uuid="([^"]+)"`)

// seenByAgent is what the agent's metrics say is granted of each card.
func seenByAgent(ctx context.Context) (map[string]int64, error) {
	text, err := scrape(ctx, "http://"+cluster.Lab.Config().Node.IP()+":9410/metrics")
	if err != nil {
		return nil, err
	}
	out := map[string]int64{}
	for _, line := range strings.Split(text, "\n") {
		if !strings.HasPrefix(line, "carve_card_memory_granted_bytes{") {
			continue
		}
		uuid := cardUUID.FindStringSubmatch(line)
		v, err := strconv.ParseFloat(line[strings.LastIndexByte(line, ' ')+1:], 64)
		if uuid == nil || err != nil {
			return nil, fmt.Errorf("can't read %q", line)
		}
		out[uuid[1]] = int64(v) >> 20
	}
	return out, nil
}

// TestAllAgree holds agree itself: it is content with a busy node, and says so
// when the node isn't as it should be.
func TestAllAgree(t *testing.T) {
	first := container("warm", share{"gpumem": "9000"})
	first.Command = []string{"/usr/bin/gpuprobe", "info"}
	a := pod("a", container("app", share{"gpu": "1", "gpumem": "8000", "gpucores": "30"}))
	a.Spec.InitContainers = []corev1.Container{first}
	create(t, a)
	create(t, pod("b", container("app", share{"gpumem": "16000"}), container("plain", nil)))
	done := pod("done", container("app", share{"gpumem": "3000"}))
	done.Spec.Containers[0].Command = []string{"/usr/bin/gpuprobe", "alloc", "1GiB"}
	create(t, done)
	create(t, pod("whole", container("app", share{"gpu": "1"})))
	for _, name := range []string{"a", "b", "whole"} {
		running(t, name)
	}
	eventually(t, "pod done to succeed", func(ctx context.Context) string {
		if p := get(ctx, t, "done"); p.Status.Phase != corev1.PodSucceeded {
			return "its phase is " + string(p.Status.Phase)
		}
		return ""
	})
	held := allocateAndHold(t, "a", "app", 2000*mib)
	agree(t)

	// Of what the node has now, each part must be in the comparison.
	s, err := gather(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if f := audit.Compare(s); !f.OK() {
		t.Fatalf("found %v", f.Lines)
	}
	held.end()
	maps := 0
	for _, k := range s.Containers {
		if k.Limits != nil {
			maps++
		}
	}
	processes := 0
	for _, c := range s.Driver {
		processes += len(c.Processes)
	}
	if len(s.Journal) != 3 || len(s.Files) != 3 || maps != 2 || processes != 1 || s.Ledger.Bound != 3 || s.Ledger.UsedMiB < 9000+16000 {
		t.Errorf("seen: %d journal records, %d folders, %d containers that map limits, %d processes, ledger %+v", len(s.Journal), len(s.Files), maps, processes, s.Ledger)
	}
	t.Run("a fault on the node is found", func(t *testing.T) {
		// A folder that nobody owns.
		stray := onNode(slicesDir, "11111111-2222-3333-4444-555555555555")
		if err := os.Mkdir(stray, 0o755); err != nil {
			t.Fatal(err)
		}
		defer os.Remove(stray)
		s, err := gather(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if f := audit.Compare(s); f.LeakedSlices == 0 {
			t.Errorf("a stray folder isn't found: %+v", f)
		}
	})
}
