package main

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/carve-gpu/carve/vgpu/gpu"
	"github.com/carve-gpu/carve/vgpu/gpu/nvml"
	"github.com/carve-gpu/carve/vgpu/mps"
)

// mpsDir is where agent and keeper meet below a run directory.
func mpsDir(runDir string) mps.Dir { return mps.Dir(filepath.Join(runDir, "mps")) }

// mpsOptions are the flags of `carve mps`. Those that `carve node` has, too, mean the
// same, so one ConfigMap serves both.
type mpsOptions struct {
	hostRoot, driverRoot, devRoot, runDir string
	softwareGPU                           bool
	logLevel, logFormat                   string
}

func newMPSCommand() *cobra.Command {
	var o mpsOptions
	cmd := &cobra.Command{
		Use:   "mps",
		Short: "Keep NVIDIA's MPS daemons of this node's cards",
		Long: `Keep NVIDIA's MPS daemons of this node's cards.

One process per GPU node, run by a DaemonSet of its own: privileged, in the node's
PID namespace, with --run-dir mounted from the node with propagation in both
directions. For each card that the node's agent wants one for it starts
nvidia-cuda-mps-control in the driver's root, after it has held the card to one
process (compute mode EXCLUSIVE_PROCESS), asks it every few seconds whether it
serves, ends one that doesn't, and starts another. When a card's last tenant in
mode mps has gone, the daemon is ended and the compute mode is DEFAULT again.

It can be ended and started at any time: daemons that live are taken over.

Every flag can be set in the environment as CARVE_NODE_<FLAG>, as for carve node;
the command line wins.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := flagsFromEnvironment(cmd.Flags(), nodeEnvPrefix, os.LookupEnv); err != nil {
				return usagef(cmd, "%w", err)
			}
			log, err := newLogger(o.logFormat, o.logLevel)
			if err != nil {
				return usagef(cmd, "%w", err)
			}
			return runMPS(cmd.Context(), o, log)
		},
	}
	f := cmd.Flags()
	f.StringVar(&o.hostRoot, "host-root", "", "where this process sees the node's root file system; empty if it sees it as its own")
	f.StringVar(&o.driverRoot, "driver-root", "/", "root directory of the NVIDIA driver, as the node sees it")
	f.StringVar(&o.devRoot, "dev-root", "", "directory with dev/nvidia…, as the node sees it (default: the driver root)")
	f.StringVar(&o.runDir, "run-dir", "/run/carve", "where the agent and this process meet; the node must see it under the same path")
	f.BoolVar(&o.softwareGPU, "software-gpu", false, "the driver root is the software GPU's: a test instrument, no card is used")
	f.StringVar(&o.logLevel, "log-level", "info", "debug, info, warn or error")
	f.StringVar(&o.logFormat, "log-format", "text", "text or json")
	return cmd
}

func runMPS(ctx context.Context, o mpsOptions, log *slog.Logger) error {
	root := gpu.Root{Path: o.driverRoot, DevPath: o.devRoot, HostRoot: o.hostRoot}
	if err := checkRoot(root, o.softwareGPU); err != nil {
		return err
	}
	return mps.New(mps.Config{
		Dir: mpsDir(o.runDir), Root: root, Log: log,
		OpenModes: func() (mps.ComputeModes, error) { return nvml.Open(root, log) },
	}).Run(ctx)
}
