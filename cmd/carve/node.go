package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/client-go/kubernetes"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/gpunodes"
	"github.com/carve-gpu/carve/deviceplugin"
	"github.com/carve-gpu/carve/deviceplugin/nvidiaconfig"
	"github.com/carve-gpu/carve/monitor"
	"github.com/carve-gpu/carve/monitor/page"
	nrihook "github.com/carve-gpu/carve/nri-hook"
	"github.com/carve-gpu/carve/vgpu/agent"
	"github.com/carve-gpu/carve/vgpu/dmem"
	"github.com/carve-gpu/carve/vgpu/gpu"
	"github.com/carve-gpu/carve/vgpu/gpu/nvml"
)

// nodeOptions are the flags of `carve node`.
type nodeOptions struct {
	node, kubeconfig              string
	hostRoot, driverRoot, devRoot string
	runDir, stateDir, libDir      string
	nriSocket, kubeletDir         string
	metricsAddr                   string
	slotsPerCard                  int
	softwareGPU, keepUnadjusted   bool
	pastExtender, pageNames       string
	compute, nvidiaConfig         string
	startedFile                   string
	logLevel, logFormat           string
	socket                        socketOptions
}

// nodeEnvPrefix precedes a flag's name in the environment: CARVE_NODE_RUN_DIR
// for --run-dir. It is how a ConfigMap reaches the DaemonSet.
const nodeEnvPrefix = "CARVE_NODE_"

func newNodeCommand() *cobra.Command {
	var o nodeOptions
	cmd := &cobra.Command{
		Use:   "node",
		Short: "Make slices real on this node",
		Long: `Make slices real on this node.

One process per GPU node, run by a DaemonSet: privileged, in the node's PID
namespace, with --run-dir mounted from the node with propagation in both
directions. It reads the cards, registers slots with the kubelet, hooks into
the container runtime by NRI, prepares what was granted to pods, and reports it
in the node's GPUNode object.

Every flag can be set in the environment as CARVE_NODE_<FLAG>, for example
CARVE_NODE_DRIVER_ROOT; the command line wins.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := flagsFromEnvironment(cmd.Flags(), nodeEnvPrefix, os.LookupEnv); err != nil {
				return usagef(cmd, "%w", err)
			}
			if o.node == "" {
				o.node = os.Getenv("NODE_NAME")
			}
			if o.node == "" {
				return usagef(cmd, "--node-name is missing (or set NODE_NAME)")
			}
			if o.slotsPerCard < 1 || o.slotsPerCard > 256 {
				return usagef(cmd, "--slots-per-card %d: allowed are 1 to 256", o.slotsPerCard)
			}
			if _, err := pastExtender(o.pastExtender); err != nil {
				return usagef(cmd, "%w", err)
			}
			if !slices.Contains(agent.ComputeModes, agent.ComputeMode(o.compute)) {
				return usagef(cmd, "--compute %q: allowed are %s, %s, %s", o.compute, agent.ComputeShares, agent.ComputeTurns, agent.ComputeOff)
			}
			if err := checkPageNames(cmd, o.pageNames); err != nil {
				return err
			}
			log, err := newLogger(o.logFormat, o.logLevel)
			if err != nil {
				return usagef(cmd, "%w", err)
			}
			return runNode(cmd.Context(), o, log)
		},
	}
	f := cmd.Flags()
	f.StringVar(&o.node, "node-name", "", "name of this node (default $NODE_NAME)")
	f.StringVar(&o.kubeconfig, "kubeconfig", "", "how to reach the API server; the pod's service account by default")
	f.StringVar(&o.hostRoot, "host-root", "", "where this process sees the node's root file system; empty if it sees it as its own")
	f.StringVar(&o.driverRoot, "driver-root", "/", "root directory of the NVIDIA driver, as the node sees it")
	f.StringVar(&o.devRoot, "dev-root", "", "directory with dev/nvidia…, as the node sees it (default: the driver root)")
	f.StringVar(&o.runDir, "run-dir", "/run/carve", "files of slices; the node must see it under the same path")
	f.StringVar(&o.stateDir, "state-dir", "/var/lib/carve", "journal and libraries; the node must see it under the same path")
	f.StringVar(&o.libDir, "lib-dir", "/usr/lib/carve/node", "where libcarve-cuda.so, libcarve-nvml.so and carve-hook were installed")
	f.StringVar(&o.nriSocket, "nri-socket", "/var/run/nri/nri.sock", "the container runtime's NRI socket")
	f.StringVar(&o.kubeletDir, "kubelet-dir", "/var/lib/kubelet", "the kubelet's directory")
	f.StringVar(&o.metricsAddr, "metrics-addr", ":9410", "address of metrics, health and the live page, HTTP; empty for none")
	addPageNamesFlag(cmd, &o.pageNames, page.NamesAll)
	f.IntVar(&o.slotsPerCard, "slots-per-card", api.SlotsPerCard, "how many containers may share a card, where the node's GPUNode doesn't say")
	f.StringVar(&o.compute, "compute", string(agent.ComputeShares), "how the cards' compute is divided: shares; turns, which keeps guarantees of elastic shares more strictly and lets launches wait longer; off, nobody is limited")
	f.StringVar(&o.nvidiaConfig, "nvidia-config", "", "configuration file of NVIDIA's device plugin, or a directory with several, of which the node's label "+api.LabelNVIDIAConfig+" names one (else default, config.yaml, or the only one): its sharing is served, and followed while it changes")
	f.BoolVar(&o.softwareGPU, "software-gpu", false, "the driver root is the software GPU's: a test instrument, no card is used")
	f.BoolVar(&o.keepUnadjusted, "keep-unadjusted", false, "only report containers that started while the hook was away and so have no card, or that lost their context with an MPS server and keep the card from the next one, instead of stopping them so that they start again")
	f.StringVar(&o.pastExtender, "pods-past-extender", pastRefuse, "pods that carve's extender didn't place (a nodeName of their own, another scheduler): refuse, they get no card; or local, this node chooses the cards")
	f.StringVar(&o.startedFile, "started-file", "", "file to make once this process serves, or stands by for an older one of this node that may now end; for a startup probe")
	f.StringVar(&o.logLevel, "log-level", "info", "debug, info, warn or error")
	f.StringVar(&o.logFormat, "log-format", "text", "text or json")
	o.socket.add(f)
	return cmd
}

// flagsFromEnvironment sets the flags that the command line left alone.
func flagsFromEnvironment(flags *pflag.FlagSet, prefix string, lookup func(string) (string, bool)) error {
	var problems []error
	flags.VisitAll(func(f *pflag.Flag) {
		if f.Changed {
			return
		}
		name := prefix + strings.ToUpper(strings.ReplaceAll(f.Name, "-", "_"))
		v, ok := lookup(name)
		if !ok {
			return
		}
		if err := flags.Set(f.Name, v); err != nil {
			problems = append(problems, fmt.Errorf("%s: %w", name, err))
		}
	})
	return errors.Join(problems...)
}

// checkRoot makes sure that the software GPU is used when told so, and never
// else.
func checkRoot(root gpu.Root, software bool) error {
	is, err := root.Software()
	switch {
	case err != nil:
		return err
	case software && !is:
		return fmt.Errorf("--software-gpu: driver root %s isn't one of the software GPU", root.Path)
	case !software && is:
		return fmt.Errorf("driver root %s is the software GPU's, a test instrument: give --software-gpu to use it", root.Path)
	}
	return nil
}

func runNode(ctx context.Context, o nodeOptions, log *slog.Logger) error {
	root := gpu.Root{Path: o.driverRoot, DevPath: o.devRoot, HostRoot: o.hostRoot}
	if err := checkRoot(root, o.softwareGPU); err != nil {
		return err
	}
	if o.softwareGPU {
		log.Warn("cards of this node are software, a test instrument", "driver-root", o.driverRoot)
	}
	config, err := clusterConfig(o.kubeconfig, "")
	if err != nil {
		return err
	}
	// Not throttled on our side: a node that starts a hundred pods looks some of
	// them up, and one that waits for its turn here would be taken for an API
	// server that is away. The report is paced by the agent itself.
	config.QPS = -1
	pods, err := kubernetes.NewForConfig(config)
	if err != nil {
		return fmt.Errorf("reach the API server: %w", err)
	}
	reports, err := gpunodes.New(config)
	if err != nil {
		return err
	}
	place, err := pastExtender(o.pastExtender)
	if err != nil {
		return err
	}
	n := &node{name: o.node, version: version, apiTime: apiTime(config)}
	roll := newRoll(ctx, o, log)
	defer roll.end()
	n.sharing = followSharing(o, func() *agent.Agent { return n.agent }, log)
	configured := agent.Config{
		Node: o.node, RunDir: o.runDir, StateDir: o.stateDir, LibDir: o.libDir,
		Root: root, Software: o.softwareGPU,
		OpenHardware:   func() (agent.Hardware, error) { return nvml.Open(root, log) },
		Pods:           pods,
		Reports:        reports,
		SlotsPerCard:   o.slotsPerCard,
		StopUnadjusted: !o.keepUnadjusted,
		Layers:         []agent.Layer{dmem.New("/proc", filepath.Join("/", o.hostRoot, "sys/fs/cgroup"))},
		Compute:        agent.ComputeMode(o.compute),
		Place:          place,
		Version:        buildVersion(),
		Log:            log,
		SlotsChanged:   n.slotsChanged,
		Waiting:        roll.standBy,
	}
	if n.sharing != nil {
		configured.CardsChanged, configured.NodeLabels = n.sharing.Look, nodeLabels(n.sharing)
	}
	n.agent, err = agent.New(ctx, configured)
	if err != nil {
		return err
	}
	roll.takeOver(hookState{n.agent, nil})
	n.setPlugin(deviceplugin.New(deviceplugin.Config{KubeletDir: o.kubeletDir, Slices: n.agent, Log: log,
		Linger:   func() bool { return roll.linger(n.agent.Followed, pods) },
		Farewell: farewell}))
	hook := monitor.NewHook()
	link := nrihook.NewLink(nrihook.Config{Socket: o.nriSocket, State: hookState{n.agent, roll.linked}, Waits: n.agent.LinkWaits, Log: log,
		Answered: func(r nrihook.Result, took time.Duration) { hook.Answered(string(r), took) }})

	// The parts live or die apart: one that ends is started again, and none of
	// them takes the others along.
	var parts sync.WaitGroup
	roll.keep(ctx, &parts, part{"device plugin", n.plugin.Run}, part{"agent", n.agent.Run}, part{"hook", link.Run})
	for _, part := range []part{
		{"monitor", func(ctx context.Context) error {
			metrics := monitor.Handler(monitor.Config{Node: o.node, Source: n, Ready: n.ready, Hook: hook})
			return serveHTTP(ctx, o.metricsAddr, withPage(metrics, page.Config{
				Source: nodePage{o.node, n.View}, Names: page.Names(o.pageNames), Done: ctx.Done(),
			}))
		}},
		{"local API", func(ctx context.Context) error { return serveSocket(ctx, o, n, log) }},
	} {
		parts.Go(func() { keepRunning(ctx, part.name, part.run, log) })
	}
	if n.sharing != nil {
		parts.Go(func() { keepRunning(ctx, "NVIDIA's configuration", n.sharing.Run, log) })
	}
	parts.Wait()
	log.Info("stopped")
	return nil
}

// keepRunning runs a part again after a pause whenever it ends before ctx does.
func keepRunning(ctx context.Context, name string, run func(context.Context) error, log *slog.Logger) {
	const pause = 2 * time.Second
	for ctx.Err() == nil {
		if err := run(ctx); err != nil && ctx.Err() == nil {
			log.Error("a part failed and is started again", "part", name, "error", err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
	}
}

// serveHTTP serves until ctx ends.
func serveHTTP(ctx context.Context, address string, h http.Handler) error {
	if address == "" {
		<-ctx.Done()
		return nil
	}
	l, err := net.Listen("tcp", address)
	if err != nil {
		return fmt.Errorf("serve metrics and health: %w", err)
	}
	s := &http.Server{Handler: h, ReadHeaderTimeout: 5 * time.Second, IdleTimeout: time.Minute}
	stopped := context.AfterFunc(ctx, func() { s.Close() })
	defer stopped()
	if err := s.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve metrics and health: %w", err)
	}
	return nil
}

// node joins the rooms of this process.
type node struct {
	name    string
	version string
	// apiTime asks the API server for its time.
	apiTime func() (time.Time, error)
	agent   *agent.Agent
	// sharing follows NVIDIA's configuration, nil where there is none to follow.
	sharing *nvidiaconfig.Follower
	plugin  *deviceplugin.Plugin
	slots   int
	mu      sync.Mutex
}

// slotsChanged may be called before the plugin is there.
func (n *node) slotsChanged(slots int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.slots = slots
	if n.plugin != nil {
		n.plugin.SetSlots(slots)
	}
}

// ready says what keeps the node from serving pods. While the kubelet doesn't
// know the plugin it turns pods with slots away for good, so none should come.
func (n *node) ready() error {
	err := n.agent.Ready()
	if !n.plugin.Connected() {
		err = errors.Join(err, errors.New("the kubelet doesn't listen to the device plugin"))
	}
	return err
}

func (n *node) setPlugin(p *deviceplugin.Plugin) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.plugin = p
	p.SetSlots(n.slots)
}

// View reads the node for the monitor.
func (n *node) View() monitor.View {
	v := n.agent.View()
	out := monitor.View{
		Node: n.name, Version: n.version, DriverVersion: v.DriverVersion, Software: v.Software,
		LinkedSince: v.LinkedSince, KubeletConnected: n.plugin.Connected(),
		Unadjusted: v.Unadjusted, Refused: v.Refused, Records: v.Records, AccessRepairs: v.AccessRepairs,
		Enforcement: v.Enforcement, EnforcementReason: v.EnforcementReason,
		LimitsRestored: v.LimitsRestored, CutOff: v.CutOff,
	}
	for _, c := range v.Cards {
		mode, replicas, mpsFault := "", 0, ""
		if c.Sharing != nil {
			mode, replicas = c.Sharing.Mode, int(c.Sharing.Replicas)
		}
		if c.MPS != nil && !c.MPS.Ready {
			mpsFault = c.MPS.Reason
		}
		out.Cards = append(out.Cards, monitor.Card{
			SharingMode: mode, Replicas: replicas, MPS: c.MPS != nil, MPSFault: mpsFault,
			Card: c.Card, Sample: c.Sample, Fault: c.Fault,
			GrantedBytes: uint64(c.GrantedMiB) << 20, GrantedCores: c.GrantedCores, ContextBytes: c.ContextBytes, Layers: c.Layers,
		})
	}
	for _, s := range v.Slices {
		var seconds, ratio *float64
		if s.Compute != nil {
			time := s.Compute.Time.Seconds()
			seconds, ratio = &time, &s.Compute.Ratio
		}
		out.Slices = append(out.Slices, monitor.Slice{
			PodUID: s.PodUID, Namespace: s.Namespace, Pod: s.Pod, Container: s.Container, Card: s.Card, Mode: s.Mode, Active: s.Active, Generation: s.Generation, Fault: s.Fault, Unread: s.Unread,
			LimitBytes: s.LimitBytes, UsedBytes: s.Usage.UsedBytes, ManagedBytes: s.Usage.ManagedBytes, UnchargedBytes: s.Usage.UnchargedBytes, ResidualBytes: s.ResidualBytes, PeakBytes: s.PeakBytes,
			Refusals: s.Refusals, Cores: s.Cores, ComputeSeconds: seconds, ComputeRatio: ratio, Processes: s.Processes,
		})
	}
	return out
}

// hookState shows the agent to the hook.
type hookState struct {
	agent *agent.Agent
	// linked, if not nil, is called when the link is up.
	linked func()
}

func runtimeContainer(c nrihook.Container) agent.RuntimeContainer {
	return agent.RuntimeContainer{
		ID: c.ID, PodUID: c.PodUID, Name: c.Name,
		Asked: c.AskedForCards(), Adjusted: c.Mark() != "", HostPID: c.HostPID, Devices: c.Devices,
	}
}

func (s hookState) Slice(c nrihook.Container) (*nrihook.Slice, error) {
	p, err := s.agent.Slice(runtimeContainer(c))
	if p == nil {
		return nil, err
	}
	var mps *nrihook.MPS
	if p.MPS != nil {
		m := nrihook.MPS(*p.MPS)
		mps = &m
	}
	return &nrihook.Slice{
		MPS:    mps,
		PodUID: p.PodUID, Container: p.Container, Generation: p.Generation,
		Cards: p.Cards, LimitsPath: p.LimitsPath, UsagePath: p.UsagePath,
		MayBePrivileged: c.AllDevices && s.agent.MayBePrivileged(c.Namespace),
	}, nil
}

func (s hookState) Driver() nrihook.Driver {
	d := s.agent.Driver()
	return nrihook.Driver{
		Files: d.Files, Control: d.Control,
		FrontCUDA: d.FrontCUDA, FrontNVML: d.FrontNVML, Hook: d.Hook,
		SoftwareState: d.SoftwareState,
	}
}

func (s hookState) Adjusted(c nrihook.Container, _ nrihook.Slice) {
	s.agent.Adjusted(runtimeContainer(c))
}
func (s hookState) Ungranted(c nrihook.Container) { s.agent.Ungranted(c.PodUID, c.Name) }
func (s hookState) Started(c nrihook.Container)   { s.agent.Started(c.ID, c.HostPID) }
func (s hookState) Updated(c nrihook.Container)   { s.agent.Updated(c.ID) }

func (s hookState) Starting(c nrihook.Container) error {
	return s.agent.Starting(c.ID, c.HostPID)
}
func (s hookState) Exited(c nrihook.Container) { s.agent.Exited(c.ID) }
func (s hookState) SandboxStarted(uid, namespace, name string, annotations map[string]string) {
	s.agent.SandboxStarted(uid, namespace, name, annotations)
}
func (s hookState) Synchronize(list []nrihook.Container) {
	out := make([]agent.RuntimeContainer, len(list))
	for i, c := range list {
		out[i] = runtimeContainer(c)
	}
	s.agent.Synchronize(out)
}
func (s hookState) LinkChanged(up bool) {
	s.agent.LinkChanged(up)
	if up && s.linked != nil {
		s.linked()
	}
}
func (s hookState) LinkFault(sentence string) { s.agent.LinkFault(sentence) }
