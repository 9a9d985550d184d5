package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/client-go/rest"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/monitor/doctor"
	"github.com/carve-gpu/carve/monitor/sock"
	"github.com/carve-gpu/carve/vgpu/gpu"
)

// doctorTimeout bounds all that doctor asks others.
const doctorTimeout = time.Minute

// errUnwell ends doctor with 1; the findings have said why.
var errUnwell = errors.New("something is wrong: see the findings marked fail")

// nodeDoctorOptions are what `carve doctor --node` looks at without an agent.
type nodeDoctorOptions struct {
	hostRoot, driverRoot, devRoot string
	runDir, stateDir, kubeletDir  string
	nriSocket, runtimeConfig      string
}

func newDoctorCommand() *cobra.Command {
	var k kubeFlags
	var cluster clusterDoctorOptions
	var o nodeDoctorOptions
	var socket, format string
	var node, all bool
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Say what keeps carve from working, and how to mend it",
		Long: `Say what keeps carve from working in this cluster, or with --node on the node
that this runs on, and how to mend it. Each finding says what is so, why it
matters and what to do. Exits with 1 if any of them is a failure.

The cluster is read with your own rights, and nothing is changed. --node asks
the agent through its socket; where there is none it looks by itself, as far as
it can.`,
		Example: `  carve doctor
  carve doctor --scheduler-config /etc/kubernetes/scheduler-carve.yaml
  carve doctor --node
  carve doctor -o json | jq '.[] | select(.level != "ok")'`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := checkOutputFormat(cmd, format); err != nil {
				return err
			}
			ctx, cancel := context.WithTimeout(cmd.Context(), doctorTimeout)
			defer cancel()
			var findings []api.Finding
			var err error
			if node {
				findings, err = nodeFindings(ctx, cmd, socket, o)
			} else {
				findings, err = clusterFindings(ctx, &k, cluster)
			}
			if err != nil {
				return err
			}
			if err := writeOutput(cmd.OutOrStdout(), cmd, format, findings, func(w io.Writer) error { return printFindings(w, findings, all) }); err != nil {
				return err
			}
			if api.Worst(findings) == api.LevelFail {
				return errUnwell
			}
			return nil
		},
	}
	f := cmd.Flags()
	f.BoolVar(&node, "node", false, "look at the node that this runs on, and not at the cluster")
	f.BoolVarP(&all, "all", "a", false, "print what is well in full, too")
	f.StringVar(&socket, "socket", defaultSocket, "with --node: the agent's socket")
	f.StringVar(&o.hostRoot, "host-root", "", "with --node and no agent: where the node's root file system is seen")
	f.StringVar(&o.driverRoot, "driver-root", "/", "with --node and no agent: root directory of the NVIDIA driver")
	f.StringVar(&o.devRoot, "dev-root", "", "with --node and no agent: directory with dev/nvidia… (default: the driver root)")
	f.StringVar(&o.runDir, "run-dir", "/run/carve", "with --node and no agent: the agent's --run-dir")
	f.StringVar(&o.stateDir, "state-dir", "/var/lib/carve", "with --node and no agent: the agent's --state-dir")
	f.StringVar(&o.kubeletDir, "kubelet-dir", "/var/lib/kubelet", "with --node and no agent: the kubelet's directory")
	f.StringVar(&o.nriSocket, "nri-socket", "/var/run/nri/nri.sock", "with --node and no agent: the container runtime's NRI socket")
	f.StringVar(&o.runtimeConfig, "runtime-config", "", "with --node and no agent: the container runtime's configuration (default: that of the running one, or where distributions put it)")
	cluster.add(f)
	addKubeFlags(cmd, &k, false)
	addOutputFlag(cmd, &format)
	return cmd
}

// nodeFindings asks the agent, or looks alone where there is none.
func nodeFindings(ctx context.Context, cmd *cobra.Command, socket string, o nodeDoctorOptions) ([]api.Finding, error) {
	client, err := sock.Dial(ctx, socket)
	if err == nil {
		defer client.Close()
		return client.Doctor(ctx)
	}
	if !errors.Is(err, sock.ErrNoAgent) {
		return nil, err
	}
	fmt.Fprintln(cmd.ErrOrStderr(), "no agent answers on "+socket+": looking without it")
	name, hostErr := os.Hostname()
	if hostErr != nil {
		name = "this one"
	}
	return doctor.Check(doctor.Gather(doctor.Config{
		Node: name, HostRoot: o.hostRoot, Proc: "/proc", RuntimeConfig: o.runtimeConfig, NRISocket: o.nriSocket,
		RunDir: o.runDir, StateDir: o.stateDir, KubeletDir: o.kubeletDir,
		Root:       gpu.Root{Path: o.driverRoot, DevPath: o.devRoot, HostRoot: o.hostRoot},
		AgentFault: strings.TrimPrefix(errors.Unwrap(err).Error(), sock.ErrNoAgent.Error()+": "),
	})), nil
}

// Doctor looks at the node for the local API, with what only the agent knows.
func (s localSource) Doctor(context.Context) []api.Finding {
	o := s.options
	return doctor.Check(doctor.Gather(doctor.Config{
		Node: s.name, HostRoot: o.hostRoot, Proc: "/proc", RuntimeConfig: o.socket.runtimeConfig, NRISocket: o.nriSocket,
		RunDir: o.runDir, StateDir: o.stateDir, KubeletDir: o.kubeletDir,
		Root:    gpu.Root{Path: o.driverRoot, DevPath: o.devRoot, HostRoot: o.hostRoot},
		Agent:   s.condition(),
		Library: s.agent.CheckInstalled,
		APITime: s.apiTime,
	}))
}

// condition is what the agent says of itself.
func (s localSource) condition() *doctor.Agent {
	v := s.agent.View()
	out := &doctor.Agent{
		Version: buildVersion(), Software: v.Software, PlainFront: s.agent.TwinFault(), LinkedSince: v.LinkedSince, KubeletConnected: s.plugin.Connected(),
		Unadjusted: v.Unadjusted, Refused: v.Refused, Records: v.Records, SlotsPerCard: v.SlotsPerCard,
		Enforcement: v.Enforcement, EnforcementReason: v.EnforcementReason,
	}
	if s.sharing != nil {
		is := s.sharing.Status()
		out.Sharing = &doctor.Sharing{Path: s.options.nvidiaConfig, Source: is.Source, Fault: is.Fault, Warnings: is.Warnings}
	}
	if err := s.agent.Ready(); err != nil {
		out.NotReady = strings.ReplaceAll(err.Error(), "\n", "; ")
	}
	held := map[string]map[string]bool{}
	for _, sl := range v.Slices {
		if held[sl.Card] == nil {
			held[sl.Card] = map[string]bool{}
		}
		held[sl.Card][sl.PodUID+"/"+sl.Container] = true
	}
	for _, c := range v.Cards {
		var mps *doctor.MPS
		if c.MPS != nil {
			mps = &doctor.MPS{Fault: c.MPS.Reason}
			if c.MPS.Since != nil {
				mps.Since = c.MPS.Since.Time
			}
		}
		out.Cards = append(out.Cards, doctor.Card{
			MPS:  mps,
			UUID: c.UUID, Index: c.Index, MIGMode: c.MIGMode, Persistence: c.Persistence, ComputeMode: string(c.ComputeMode), Fault: c.Fault, ComputeFault: c.ComputeFault,
			MemoryMiB: c.MemoryMiB(), GrantedMiB: c.GrantedMiB, GrantedCores: c.GrantedCores, Slices: len(held[c.UUID]),
		})
	}
	return out
}

// apiTime asks an API server for its time: it stands in the header of every
// answer, even of a refusal.
func apiTime(config *rest.Config) func() (time.Time, error) {
	return func() (time.Time, error) {
		client, err := rest.HTTPClientFor(config)
		if err != nil {
			return time.Time{}, err
		}
		client.Timeout = 5 * time.Second
		address, _, err := rest.DefaultServerUrlFor(config)
		if err != nil {
			return time.Time{}, err
		}
		answer, err := client.Get(address.JoinPath("/version").String())
		if err != nil {
			return time.Time{}, fmt.Errorf("ask the API server for its time: %w", err)
		}
		answer.Body.Close()
		at, err := http.ParseTime(answer.Header.Get("Date"))
		if err != nil {
			return time.Time{}, fmt.Errorf("ask the API server for its time: %w", err)
		}
		return at, nil
	}
}

// printFindings prints what is wrong in full, worst first, and what is well in
// a line each, or not at all.
func printFindings(w io.Writer, findings []api.Finding, all bool) error {
	count := map[api.Level]int{}
	var b strings.Builder
	for _, level := range []api.Level{api.LevelFail, api.LevelWarn, api.LevelOK} {
		for _, f := range findings {
			if f.Level != level {
				continue
			}
			count[level]++
			if level == api.LevelOK && !all {
				continue
			}
			fmt.Fprintf(&b, "%-4s  %-16s  %s\n", f.Level, f.Check, f.Where)
			fmt.Fprintf(&b, "      %s\n", f.What)
			if f.Why != "" {
				fmt.Fprintf(&b, "      why: %s\n", f.Why)
			}
			if f.Do != "" {
				fmt.Fprintf(&b, "      do:  %s\n", strings.ReplaceAll(f.Do, "\n", "\n           "))
			}
		}
	}
	hint := ""
	if !all && count[api.LevelOK] > 0 {
		hint = " (--all prints them)"
	}
	fmt.Fprintf(&b, "%d fail, %d warn, %d ok%s\n", count[api.LevelFail], count[api.LevelWarn], count[api.LevelOK], hint)
	_, err := io.WriteString(w, b.String())
	return err
}
