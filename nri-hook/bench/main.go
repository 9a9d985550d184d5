// Command bench measures what carve adds to the start of a container whose
// slice is prepared: the device plugin's Allocate and PreStart, the hook's
// CreateContainer, and carve-hook. The agent is the real one, on the software
// GPU; the kubelet's and the runtime's sides are played over real sockets, the
// latter by NRI's own code. It needs root, and mounts in a mount namespace of
// its own.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"sort"
	"strings"
	"syscall"
	"time"

	"github.com/containerd/nri/pkg/adaptation"
	nri "github.com/containerd/nri/pkg/api"
	nrilog "github.com/containerd/nri/pkg/log"
	"golang.org/x/sys/unix"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"

	"github.com/go-logr/logr"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/gpunodes"
	"github.com/carve-gpu/carve/deviceplugin"
	nrihook "github.com/carve-gpu/carve/nri-hook"
	"github.com/carve-gpu/carve/vgpu/agent"
	"github.com/carve-gpu/carve/vgpu/gpu"
	"github.com/carve-gpu/carve/vgpu/gpu/nvml"
)

// benchDir, in the environment, names the directory to work in, and says that
// the process has a mount namespace of its own.
const benchDir = "CARVE_BENCH_DIR"

func main() {
	containers := flag.Int("containers", 300, "how many container starts are measured")
	repository := flag.String("repository", ".", "the repository, built")
	flag.Parse()
	dir := os.Getenv(benchDir)
	if dir == "" {
		os.Exit(again())
	}
	if err := run(dir, *repository, *containers); err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		os.Exit(1)
	}
}

// again runs this program in a mount namespace of its own, and removes its
// directory when the mounts are gone with it.
func again() int {
	dir, err := os.MkdirTemp("", "carve-bench-")
	if err != nil {
		fmt.Fprintln(os.Stderr, "error:", err)
		return 1
	}
	defer os.RemoveAll(dir)
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Env = append(os.Environ(), benchDir+"="+dir)
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	err = cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		fmt.Fprintln(os.Stderr, "error: this bench mounts, and needs root for it:", err)
		return 1
	}
	return cmd.ProcessState.ExitCode()
}

func run(dir, repository string, containers int) error {
	quiet := slog.New(slog.DiscardHandler)
	klog.SetLogger(logr.Discard())
	nrilog.Set(silent{})
	root := filepath.Join(dir, "driver")
	softgpu := filepath.Join(repository, "vgpu/soft/build/softgpu")
	if out, err := exec.Command(softgpu, "init", root, "--card", "h200x4").CombinedOutput(); err != nil {
		return fmt.Errorf("make a software GPU: %w\n%s", err, out)
	}
	defer exec.Command(softgpu, "destroy", root).Run()
	lib := filepath.Join(dir, "lib")
	if err := gather(lib, repository); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	n, err := startNode(ctx, dir, root, lib, quiet)
	if err != nil {
		return err
	}
	defer n.stop()
	k, err := startKubelet(filepath.Join(dir, "kubelet"))
	if err != nil {
		return err
	}
	defer k.stop()
	plugin := deviceplugin.New(deviceplugin.Config{KubeletDir: k.dir, Slices: n.agent, Log: quiet})
	select {
	case slots := <-n.slots:
		plugin.SetSlots(slots)
	case <-time.After(20 * time.Second):
		return errors.New("the agent found no card")
	}
	go plugin.Run(ctx)
	r, err := startRuntime(filepath.Join(dir, "nri.sock"))
	if err != nil {
		return err
	}
	defer r.Stop()
	go nrihook.NewLink(nrihook.Config{Socket: filepath.Join(dir, "nri.sock"), State: n, Log: quiet}).Run(ctx)
	client, err := k.plugin(ctx)
	if err != nil {
		return err
	}
	if err := n.awaitLink(ctx); err != nil {
		return err
	}
	// A plugin joins between two containers.
	r.BlockPluginSync().Unblock()

	image, err := newImage(filepath.Join(dir, "image"), n.agent.Driver())
	if err != nil {
		return err
	}
	var total, allocate, prestart, create, ociHook []time.Duration
	for i := range containers {
		uid := fmt.Sprintf("uid-%04d", i)
		if err := n.prepare(ctx, uid); err != nil {
			return err
		}
		k.hold("pod-"+uid, "app", fmt.Sprintf("slot-%04d", i))
		times := [4]time.Duration{}
		for step, do := range []func() error{
			func() error { return k.allocate(ctx, client, i) },
			func() error { return k.preStart(ctx, client, i) },
			func() error { return r.create(ctx, uid) },
			image.hook,
		} {
			start := time.Now()
			if err := do(); err != nil {
				return fmt.Errorf("container %d: %w", i, err)
			}
			times[step] = time.Since(start)
		}
		if i < containers/10 {
			continue // connections and caches are warm on a node that runs
		}
		allocate, prestart = append(allocate, times[0]), append(prestart, times[1])
		create, ociHook = append(create, times[2]), append(ociHook, times[3])
		total = append(total, times[0]+times[1]+times[2]+times[3])
	}
	fmt.Printf("start_added_p50_ms %.2f ms\nstart_added_p99_ms %.2f ms\n", at(total, 50), at(total, 99))
	for _, part := range []struct {
		name  string
		times []time.Duration
	}{{"Allocate", allocate}, {"PreStart", prestart}, {"hook", create}, {"carve-hook", ociHook}} {
		fmt.Fprintf(os.Stderr, "  %-10s p50 %.2f ms, p99 %.2f ms\n", part.name, at(part.times, 50), at(part.times, 99))
	}
	return nil
}

// at is a percentile in milliseconds.
func at(times []time.Duration, percent int) float64 {
	sorted := append([]time.Duration{}, times...)
	sort.Slice(sorted, func(a, b int) bool { return sorted[a] < sorted[b] })
	return float64(sorted[min(len(sorted)*percent/100, len(sorted)-1)].Microseconds()) / 1000
}

// gather lays the front libraries and carve-hook out as an image of carve has
// them.
func gather(to, repository string) error {
	if err := os.MkdirAll(to, 0o755); err != nil {
		return err
	}
	for _, name := range []string{"vgpu/lib/build/libcarve-cuda.so", "vgpu/lib/build/libcarve-nvml.so", "bin/carve-hook"} {
		b, err := os.ReadFile(filepath.Join(repository, name))
		if err != nil {
			return fmt.Errorf("%w (run make build)", err)
		}
		if err := os.WriteFile(filepath.Join(to, filepath.Base(name)), b, 0o755); err != nil {
			return err
		}
	}
	return nil
}

// benchNode is the agent with the hook's view of it.
type benchNode struct {
	agent *agent.Agent
	slots chan int
	up    chan bool
	stop  func()
}

// startNode starts an agent whose API server is away: it takes its pods from
// the runtime, and what is measured never asks the API server.
func startNode(ctx context.Context, dir, root, lib string, log *slog.Logger) (*benchNode, error) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		http.Error(w, "away", http.StatusServiceUnavailable)
	}))
	config := &rest.Config{Host: server.URL, QPS: -1}
	pods, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	reports, err := gpunodes.New(config)
	if err != nil {
		return nil, err
	}
	driver := gpu.Root{Path: root}
	slots := make(chan int, 1)
	a, err := agent.New(ctx, agent.Config{
		Node: "bench", RunDir: filepath.Join(dir, "run"), StateDir: filepath.Join(dir, "state"), LibDir: lib,
		Root: driver, Software: true,
		OpenHardware: func() (agent.Hardware, error) { return nvml.Open(driver, log) },
		Pods:         pods, Reports: reports, Version: "bench", Log: log,
		SlotsChanged: func(n int) {
			select {
			case slots <- n:
			default: // the first is enough
			}
		},
	})
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() { defer close(done); a.Run(ctx) }()
	return &benchNode{agent: a, slots: slots, up: make(chan bool, 8), stop: func() { cancel(); <-done; server.Close() }}, nil
}

func (n *benchNode) awaitLink(ctx context.Context) error {
	select {
	case <-n.up:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(20 * time.Second):
		return errors.New("the hook wasn't linked")
	}
}

// prepare has the slice of one container made, which isn't measured: it
// happens while the image is pulled.
func (n *benchNode) prepare(ctx context.Context, uid string) error {
	cards := n.agent.View().Cards
	if len(cards) == 0 {
		time.Sleep(200 * time.Millisecond)
		if cards = n.agent.View().Cards; len(cards) == 0 {
			return errors.New("no cards")
		}
	}
	text, err := api.Grant{
		Version: api.GrantVersion, UID: uid, Node: "bench", Generation: 1,
		Containers: map[string][]api.CardGrant{"app": {{Card: cards[len(uid)%len(cards)].UUID, MemMiB: 256, Mode: api.ModeVGPU}}},
	}.Encode()
	if err != nil {
		return err
	}
	n.agent.SandboxStarted(uid, "default", "pod-"+uid, map[string]string{api.AnnotationGrant: text, "kubernetes.io/config.source": "api"})
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	return n.agent.AwaitPrepared(ctx, "default", "pod-"+uid, "app")
}

func container(c nrihook.Container) agent.RuntimeContainer {
	return agent.RuntimeContainer{ID: c.ID, PodUID: c.PodUID, Name: c.Name, Asked: c.AskedForCards(), Adjusted: c.Mark() != ""}
}

// The hook's view of the agent.

func (n *benchNode) Slice(c nrihook.Container) (*nrihook.Slice, error) {
	p, err := n.agent.Slice(container(c))
	if p == nil {
		return nil, err
	}
	return &nrihook.Slice{PodUID: p.PodUID, Container: p.Container, Generation: p.Generation, Cards: p.Cards, LimitsPath: p.LimitsPath, UsagePath: p.UsagePath}, nil
}

func (n *benchNode) Driver() nrihook.Driver {
	d := n.agent.Driver()
	return nrihook.Driver{Files: d.Files, Control: d.Control, FrontCUDA: d.FrontCUDA, FrontNVML: d.FrontNVML, Hook: d.Hook, SoftwareState: d.SoftwareState}
}

func (n *benchNode) Adjusted(c nrihook.Container, _ nrihook.Slice) { n.agent.Adjusted(container(c)) }
func (n *benchNode) Ungranted(nrihook.Container)                   {}
func (n *benchNode) Started(nrihook.Container)                     {}

func (n *benchNode) Starting(nrihook.Container) error                         { return nil }
func (n *benchNode) LinkFault(string)                                         {}
func (n *benchNode) Updated(nrihook.Container)                                {}
func (n *benchNode) Exited(c nrihook.Container)                               { n.agent.Exited(c.ID) }
func (n *benchNode) SandboxStarted(string, string, string, map[string]string) {}
func (n *benchNode) Synchronize([]nrihook.Container)                          { n.agent.Synchronize(nil) }
func (n *benchNode) LinkChanged(up bool)                                      { n.agent.LinkChanged(up); n.up <- up }

// benchRuntime is the runtime's side of NRI.
type benchRuntime struct{ *adaptation.Adaptation }

func startRuntime(socket string) (*benchRuntime, error) {
	a, err := adaptation.New("bench", "2.4.2",
		func(ctx context.Context, cb adaptation.SyncCB) error { _, err := cb(ctx, nil, nil); return err },
		func(context.Context, []*nri.ContainerUpdate) ([]*nri.ContainerUpdate, error) { return nil, nil },
		adaptation.WithPluginPath(socket+".plugins"), adaptation.WithPluginConfigPath(socket+".conf.d"), adaptation.WithSocketPath(socket))
	if err != nil {
		return nil, err
	}
	return &benchRuntime{a}, a.Start()
}

func (r *benchRuntime) create(ctx context.Context, uid string) error {
	defer r.BlockPluginSync().Unblock()
	response, err := r.CreateContainer(ctx, &nri.CreateContainerRequest{
		Pod:       &nri.PodSandbox{Id: "s-" + uid, Uid: uid, Namespace: "default", Name: "pod-" + uid},
		Container: &nri.Container{Id: "c-" + uid, PodSandboxId: "s-" + uid, Name: "app", Env: []string{"PATH=/bin"}},
	})
	if err != nil {
		return err
	}
	if len(response.GetAdjust().GetLinux().GetDevices()) == 0 {
		return errors.New("the hook added no device")
	}
	return nil
}

// image is a container's root as the runtime leaves it for carve-hook.
type image struct {
	binary string
	args   []string
	state  string
}

func newImage(dir string, d agent.Driver) (*image, error) {
	root := filepath.Join(dir, "rootfs")
	libDir := filepath.Join(root, d.Files.LibDir)
	for _, p := range []string{libDir, filepath.Join(root, "etc"), filepath.Join(root, "usr/local/cuda/compat")} {
		if err := os.MkdirAll(p, 0o755); err != nil {
			return nil, err
		}
	}
	for p, content := range map[string]string{
		filepath.Join(libDir, "libc.so.6"):                        "libc",
		filepath.Join(root, "usr/local/cuda/compat/libcuda.so.1"): "compat",
		filepath.Join(root, "etc/ld.so.conf"):                     "/usr/local/lib\n",
		filepath.Join(dir, "config.json"):                         `{"root":{"path":"rootfs"},"process":{"env":["PATH=/bin"]}}`,
	} {
		if err := os.WriteFile(p, []byte(content), 0o644); err != nil {
			return nil, err
		}
	}
	if err := unix.Mount(root, root, "", unix.MS_BIND, ""); err != nil {
		return nil, err
	}
	e, err := nrihook.Adjust(nrihook.Container{}, &nrihook.Slice{LimitsPath: "/l", UsagePath: "/u"}, nrihook.Driver{
		Files: d.Files, FrontCUDA: d.FrontCUDA, FrontNVML: d.FrontNVML, Hook: d.Hook,
	})
	if err != nil {
		return nil, err
	}
	for _, m := range e.Mounts {
		if m.Type == "tmpfs" {
			at := filepath.Join(root, m.Destination)
			if err := errors.Join(os.MkdirAll(at, 0o755), unix.Mount(m.Source, at, "tmpfs", 0, "size=64k")); err != nil {
				return nil, err
			}
			continue
		}
		if !strings.HasPrefix(m.Destination, d.Files.LibDir+"/") {
			continue
		}
		at := filepath.Join(root, m.Destination)
		if err := os.WriteFile(at, nil, 0o644); err != nil {
			return nil, err
		}
		if err := errors.Join(unix.Mount(m.Source, at, "", unix.MS_BIND, ""), unix.Mount("", at, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, "")); err != nil {
			return nil, fmt.Errorf("mount %s on %s: %w", m.Source, at, err)
		}
	}
	h := e.CreateContainer[0]
	return &image{binary: h.Path, args: h.Args[1:], state: fmt.Sprintf(`{"bundle":%q}`, dir)}, nil
}

// hook runs carve-hook as the runtime does.
func (i *image) hook() error {
	cmd := exec.Command(i.binary, i.args...)
	cmd.Stdin = strings.NewReader(i.state)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("carve-hook: %w: %s", err, out)
	}
	return nil
}

// silent keeps NRI's own log off.
type silent struct{}

func (silent) Debugf(context.Context, string, ...any) {}
func (silent) Infof(context.Context, string, ...any)  {}
func (silent) Warnf(context.Context, string, ...any)  {}
func (silent) Errorf(context.Context, string, ...any) {}
