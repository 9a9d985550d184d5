package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/carve-gpu/carve/deploy/e2e/install"
	"github.com/carve-gpu/carve/deploy/e2e/lab"
)

// cli is what the flags of all commands say.
type cli struct {
	progress *lab.Progress
	name     string
	dir      string
	module   string
}

func newCommand(progress *lab.Progress) *cobra.Command {
	c := &cli{progress: progress}
	root := &cobra.Command{
		Use:   "lab",
		Short: "A real Kubernetes node in namespaces of its own",
		Long: `lab starts a real Kubernetes cluster of one node on this machine: etcd, API
server, controller manager, scheduler, kube-proxy, containerd with NRI, kubelet.
It runs in namespaces of its own and leaves nothing behind.

  lab preflight --install   what is missing on this machine, installed if possible
  lab up                    build the programs (once) and start
  lab kubectl get nodes
  lab exec -- sh            a shell in the lab
  lab down

It needs root on Linux.`,
		SilenceUsage: true, SilenceErrors: true,
		// So that flags before `kubectl` are ours and those after it are not.
		TraverseChildren: true,
	}
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	flags := root.PersistentFlags()
	flags.StringVar(&c.name, "name", "carve", "name of the lab; labs with different names run side by side")
	flags.StringVar(&c.dir, "dir", "", "folder of the lab (default: carve/lab/NAME in the user's cache folder)")
	flags.StringVar(&c.module, "module", "", "folder of deploy/e2e (default: found from the working directory)")
	root.AddCommand(
		c.preflight(), c.build(), c.up(), c.down(), c.status(), c.exec(), c.kubectl(), c.logs(), c.image(), c.scheduler(), c.forward(),
		c.component("start", "Start a stopped component and wait until it is ready", (*lab.Lab).StartComponent),
		c.component("stop", "Stop a component (SIGTERM) and wait for its end", (*lab.Lab).Stop),
		c.component("restart", "Stop and start a component", (*lab.Lab).Restart),
		c.component("kill", "Kill a component (SIGKILL) and wait for its end", (*lab.Lab).Kill),
	)
	return root
}

// args is cobra's check of the arguments, as a usage error.
func args(check cobra.PositionalArgs) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if err := check(cmd, args); err != nil {
			return usageError{fmt.Errorf("%s: %w", cmd.CommandPath(), err)}
		}
		return nil
	}
}

func (c *cli) moduleDir() (string, error) {
	if c.module != "" {
		return c.module, nil
	}
	return lab.FindModule(".")
}

func (c *cli) labDir() (string, error) {
	if c.dir != "" {
		return c.dir, nil
	}
	return lab.DefaultDir(c.name)
}

func (c *cli) open() (*lab.Lab, error) {
	dir, err := c.labDir()
	if err != nil {
		return nil, err
	}
	return lab.Open(dir, c.progress)
}

func (c *cli) build() *cobra.Command {
	return &cobra.Command{
		Use: "build", Short: "Build the lab's programs, or find them built, and print their folder",
		Args: args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			module, err := c.moduleDir()
			if err != nil {
				return err
			}
			dir, err := lab.Build(cmd.Context(), module, c.progress)
			if err == nil {
				fmt.Println(dir)
			}
			return err
		},
	}
}

func (c *cli) preflight() *cobra.Command {
	var install bool
	cmd := &cobra.Command{
		Use: "preflight", Short: "Say what this machine lacks for a lab",
		Args: args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error { return c.checkMachine(cmd.Context(), install) },
	}
	cmd.Flags().BoolVar(&install, "install", false, "install missing Debian packages with apt-get")
	return cmd
}

func (c *cli) checkMachine(ctx context.Context, install bool) error {
	module, err := c.moduleDir()
	if err != nil {
		return err
	}
	dir, err := c.labDir()
	if err != nil {
		return err
	}
	return lab.Preflight(ctx, lab.PreflightConfig{Module: module, Dir: dir, Install: install}, c.progress)
}

func (c *cli) up() *cobra.Command {
	var binds []string
	var scheduler, node string
	cmd := &cobra.Command{
		Use: "up", Short: "Check the machine, build the programs if needed, and start the lab",
		Args: args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			config := lab.Config{Name: c.name, Dir: c.dir, SchedulerConfig: scheduler, Node: lab.Node{Name: node}}
			for _, s := range binds {
				b, err := lab.ParseBind(s)
				if err != nil {
					return usageError{err}
				}
				config.Binds = append(config.Binds, b)
			}
			if err := c.checkMachine(cmd.Context(), false); err != nil {
				return err
			}
			module, err := c.moduleDir()
			if err != nil {
				return err
			}
			if config.Programs, err = lab.Build(cmd.Context(), module, c.progress); err != nil {
				return err
			}
			_, err = lab.Up(cmd.Context(), config, c.progress)
			return err
		},
	}
	cmd.Flags().StringArrayVar(&binds, "bind", nil, "SOURCE:TARGET: show a path of the machine at TARGET in the lab (repeatable)")
	cmd.Flags().StringVar(&scheduler, "scheduler-config", "", "KubeSchedulerConfiguration file to start kube-scheduler with")
	cmd.Flags().StringVar(&node, "node", "", "name of the node (default node1)")
	return cmd
}

func (c *cli) down() *cobra.Command {
	return &cobra.Command{
		Use: "down", Short: "End the lab and remove all of it; also one that was started only in part",
		Args: args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			dir, err := c.labDir()
			if err != nil {
				return err
			}
			// With the software cards that tests and demo put beside it.
			return install.Down(cmd.Context(), dir, c.progress)
		},
	}
}

func (c *cli) status() *cobra.Command {
	return &cobra.Command{
		Use: "status", Short: "Say which parts of the lab run; exit status 1 unless all do",
		Args: args(cobra.NoArgs),
		RunE: func(*cobra.Command, []string) error {
			l, err := c.open()
			if err != nil {
				return err
			}
			s, err := l.Status()
			if err != nil {
				return err
			}
			return printStatus(os.Stdout, s)
		},
	}
}

func printStatus(w io.Writer, s lab.Status) error {
	var down []string
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintf(table, "lab\t%s in %s\nholder\t%d\nAPI\t%s (in the lab)\n\nCOMPONENT\tPID\tSTATE\tLOG\n", s.Name, s.Dir, s.Holder, s.API)
	for _, p := range s.Components {
		state := "running"
		if !p.Running {
			state = "ended"
			down = append(down, p.Name)
		}
		fmt.Fprintf(table, "%s\t%d\t%s\t%s\n", p.Name, p.PID, state, p.Log)
	}
	if err := table.Flush(); err != nil {
		return err
	}
	switch {
	case !s.Running:
		return fmt.Errorf("lab %s: %w (`lab down` removes what is left)", s.Name, lab.ErrNotRunning)
	case !s.Ready:
		return fmt.Errorf("lab %s: not ready: `lab up` is under way, or was interrupted", s.Name)
	case len(down) > 0:
		return fmt.Errorf("lab %s: not running: %s", s.Name, strings.Join(down, " "))
	}
	return nil
}

func (c *cli) exec() *cobra.Command {
	return &cobra.Command{
		Use: "exec [--] PROGRAM [ARG...]", Short: "Run a program in the lab",
		Args: args(cobra.MinimumNArgs(1)),
		RunE: func(cmd *cobra.Command, argv []string) error { return c.runInLab(cmd.Context(), argv) },
	}
}

func (c *cli) kubectl() *cobra.Command {
	return &cobra.Command{
		Use: "kubectl [--] ARG...", Short: "Run kubectl as the cluster's administrator",
		// Its flags are kubectl's; those of lab stand before `kubectl`.
		DisableFlagParsing: true,
		RunE: func(cmd *cobra.Command, argv []string) error {
			if len(argv) > 0 && argv[0] == "--" {
				argv = argv[1:]
			}
			return c.runInLab(cmd.Context(), append([]string{"kubectl"}, argv...))
		},
	}
}

func (c *cli) runInLab(ctx context.Context, argv []string) error {
	l, err := c.open()
	if err != nil {
		return err
	}
	// The program gets the terminal's Ctrl-C itself.
	cmd := l.Command(context.WithoutCancel(ctx), argv[0], argv[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Env = append(cmd.Env, "TERM="+os.Getenv("TERM"))
	if cmd.Dir, err = os.Getwd(); err != nil {
		return err
	}
	return l.Run(cmd)
}

func (c *cli) logs() *cobra.Command {
	var follow bool
	cmd := &cobra.Command{
		Use: "logs COMPONENT", Short: "Print the log of a component: " + strings.Join(lab.Components(), ", "),
		Args: args(cobra.ExactArgs(1)), ValidArgs: lab.Components(),
		RunE: func(cmd *cobra.Command, names []string) error {
			l, err := c.open()
			if err != nil {
				return err
			}
			if !slices.Contains(lab.Components(), names[0]) {
				return usageError{fmt.Errorf("component %q: want one of %s", names[0], strings.Join(lab.Components(), " "))}
			}
			f, err := os.Open(l.LogFile(names[0]))
			if err != nil {
				return err
			}
			defer f.Close()
			for {
				if _, err := io.Copy(os.Stdout, f); err != nil || !follow {
					return err
				}
				select {
				case <-cmd.Context().Done():
					return nil
				case <-time.After(200 * time.Millisecond):
				}
			}
		},
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "go on as the log grows")
	return cmd
}

func (c *cli) component(verb, short string, do func(*lab.Lab, context.Context, string) error) *cobra.Command {
	return &cobra.Command{
		Use: verb + " COMPONENT", Short: short, Long: short + ". Components: " + strings.Join(lab.Components(), ", ") + ".",
		Args: args(cobra.ExactArgs(1)), ValidArgs: lab.Components(),
		RunE: func(cmd *cobra.Command, names []string) error {
			l, err := c.open()
			if err != nil {
				return err
			}
			return do(l, cmd.Context(), names[0])
		},
	}
}

func (c *cli) scheduler() *cobra.Command {
	return &cobra.Command{
		Use: "scheduler [FILE]", Short: "Restart kube-scheduler with a KubeSchedulerConfiguration; without FILE with the default one",
		Args: args(cobra.MaximumNArgs(1)),
		RunE: func(cmd *cobra.Command, files []string) error {
			l, err := c.open()
			if err != nil {
				return err
			}
			var configuration []byte
			if len(files) == 1 {
				if configuration, err = os.ReadFile(files[0]); err != nil {
					return err
				}
			}
			return l.UseScheduler(cmd.Context(), configuration)
		},
	}
}

func (c *cli) forward() *cobra.Command {
	var listen string
	cmd := &cobra.Command{
		Use: "forward IP:PORT", Short: "Carry connections from this machine's loopback to an address in the lab",
		Args: args(cobra.ExactArgs(1)),
		RunE: func(cmd *cobra.Command, targets []string) error {
			l, err := c.open()
			if err != nil {
				return err
			}
			host, _, err := net.SplitHostPort(listen)
			if err != nil {
				return usageError{err}
			}
			if ip := net.ParseIP(host); ip == nil || !ip.IsLoopback() {
				return usageError{errors.New("--listen: want a loopback address: what runs in the lab is not meant for the network")}
			}
			return l.Forward(cmd.Context(), listen, targets[0], func(a net.Addr) {
				fmt.Println(a)
				c.progress.Note("forwarding %s to %s in the lab; Ctrl-C ends it", a, targets[0])
			})
		},
	}
	cmd.Flags().StringVar(&listen, "listen", "127.0.0.1:0", "address on this machine; port 0: a free one, printed")
	return cmd
}
