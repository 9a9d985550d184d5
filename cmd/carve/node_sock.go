package main

import (
	"context"
	"log/slog"
	"path/filepath"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/carve-gpu/carve/monitor/sock"
)

const (
	// socketName is the local API's name in the agent's run directory.
	socketName = "carve.sock"
	// defaultSocket is where a node has it.
	defaultSocket = "/run/carve/" + socketName
	// socketGroup is the node's group whose members may open it.
	socketGroup = "carve"
)

// socketOptions are the flags of the agent's local API.
type socketOptions struct{ path, group, runtimeConfig string }

func (o *socketOptions) add(f *pflag.FlagSet) {
	f.StringVar(&o.path, "socket", "", "the local API's socket (default: "+socketName+" in --run-dir)")
	f.StringVar(&o.group, "socket-group", socketGroup, "group of the node whose members may open the socket besides root, if the node has it")
	f.StringVar(&o.runtimeConfig, "runtime-config", "", "the container runtime's configuration, for doctor to read (default: that of the running one, or where distributions put it)")
}

// in is the socket's path.
func (o socketOptions) in(runDir string) string {
	if o.path != "" {
		return o.path
	}
	return filepath.Join(runDir, socketName)
}

// serveSocket serves the local API until ctx ends.
func serveSocket(ctx context.Context, o nodeOptions, n *node, log *slog.Logger) error {
	l, err := sock.Listen(ctx, sock.Options{
		Path:      o.socket.in(o.runDir),
		GroupFile: filepath.Join("/", o.hostRoot, "/etc/group"), Group: o.socket.group,
	})
	if err != nil {
		return err
	}
	log.Info("local API", "socket", l.Addr().String())
	return sock.Serve(ctx, l, localSource{n, o}, log)
}

// localSource shows the agent to the local API.
type localSource struct {
	*node
	options nodeOptions
}

func (s localSource) Changed() <-chan struct{} { return s.agent.Changed() }

// localFlags choose the node's socket instead of the API server.
type localFlags struct {
	local bool
	path  string
}

func (l *localFlags) add(cmd *cobra.Command) {
	cmd.Flags().BoolVar(&l.local, "local", false, "ask the agent of the node that this runs on, and not the API server")
	cmd.Flags().StringVar(&l.path, "socket", defaultSocket, "the agent's socket; implies --local")
}

// set reports whether the socket was asked for.
func (l *localFlags) set(cmd *cobra.Command) bool { return l.local || cmd.Flags().Changed("socket") }

// client connects to the agent.
func (l *localFlags) client(ctx context.Context) (*sock.Client, error) { return sock.Dial(ctx, l.path) }
