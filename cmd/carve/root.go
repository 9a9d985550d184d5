package main

import (
	"fmt"
	"log/slog"
	"os"
	"runtime/debug"
	"strings"

	"github.com/go-logr/logr"
	"github.com/spf13/cobra"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"
)

// version is set by the linker for a release.
var version = "dev"

// usageError marks an error of the command line, which exits with 2.
type usageError struct {
	error
	command string
}

func (e usageError) Unwrap() error { return e.error }

// usagef makes a usage error of a command.
func usagef(cmd *cobra.Command, format string, a ...any) error {
	return usageError{fmt.Errorf(format, a...), cmd.CommandPath()}
}

func newRootCommand() *cobra.Command {
	name := "carve"
	annotations := map[string]string{}
	if asPlugin(os.Args[0]) {
		annotations[cobra.CommandDisplayNameAnnotation] = "kubectl carve"
		name = "kubectl-carve"
	}
	root := &cobra.Command{
		Use:   name,
		Short: "One GPU, many tenants, exact shares",
		Long: `carve cuts GPUs into exact shares for Kubernetes.

A pod asks for nvidia.com/gpu, nvidia.com/gpumem (MiB) and nvidia.com/gpucores
(percent); carve picks the card, hands out exactly that share and holds the
pod to it.

The cluster runs two long-lived commands: "carve node" on each GPU node and
"carve extender" beside kube-scheduler. The others are for people.`,
		Annotations:       annotations,
		Version:           buildVersion(),
		SilenceUsage:      true,
		SilenceErrors:     true,
		DisableAutoGenTag: true,
	}
	root.SetFlagErrorFunc(func(c *cobra.Command, err error) error {
		return usageError{err, c.CommandPath()}
	})
	root.Args = cobra.ArbitraryArgs
	root.RunE = func(cmd *cobra.Command, args []string) error {
		if len(args) == 0 {
			return cmd.Help()
		}
		hint := ""
		if near := cmd.SuggestionsFor(args[0]); len(near) > 0 {
			hint = fmt.Sprintf(" (did you mean %s?)", strings.Join(near, " or "))
		}
		return usagef(cmd, "unknown command %q%s", args[0], hint)
	}
	root.AddGroup(&cobra.Group{ID: "people", Title: "Commands for people:"}, &cobra.Group{ID: "cluster", Title: "Commands that the cluster runs:"})
	add := func(group string, commands ...*cobra.Command) {
		for _, c := range commands {
			c.GroupID = group
			root.AddCommand(c)
		}
	}
	add("people",
		newCardsCommand(),
		newTopCommand(),
		newExplainCommand(),
		newSimulateCommand(),
		newSlicesCommand(),
		newCordonCommand(), newUncordonCommand(), newResizeCommand(),
		newDoctorCommand(),
	)
	add("cluster", newNodeCommand(), newExtenderCommand(), newMPSCommand())
	addCompletion(root)
	markUsageErrors(root)
	return root
}

// addCompletion adds cobra's command and has it refuse shells that it doesn't
// know, where cobra's own prints help and ends well.
func addCompletion(root *cobra.Command) {
	root.InitDefaultCompletionCmd()
	for _, c := range root.Commands() {
		if c.Name() != "completion" {
			continue
		}
		c.Args = cobra.ArbitraryArgs
		c.RunE = func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return cmd.Help()
			}
			return usagef(cmd, "unknown shell %q: allowed are bash, zsh, fish, powershell", args[0])
		}
	}
}

// markUsageErrors makes wrong arguments of all commands below usage errors, as
// wrong flags are.
func markUsageErrors(parent *cobra.Command) {
	for _, c := range parent.Commands() {
		if check := c.Args; check != nil {
			c.Args = func(cmd *cobra.Command, args []string) error {
				if err := check(cmd, args); err != nil {
					return usageError{err, cmd.CommandPath()}
				}
				return nil
			}
		}
		markUsageErrors(c)
	}
}

// buildVersion is the release, with the commit where the build knows it.
func buildVersion() string {
	v := version
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, s := range info.Settings {
			if s.Key == "vcs.revision" && len(s.Value) >= 12 {
				v += "+" + s.Value[:12]
			}
		}
	}
	return v
}

// newLogger makes the process's logger and routes klog, which the Kubernetes
// libraries write to, into it.
func newLogger(format, level string) (*slog.Logger, error) {
	var l slog.Level
	if err := l.UnmarshalText([]byte(level)); err != nil {
		return nil, fmt.Errorf("--log-level %q: allowed are debug, info, warn, error", level)
	}
	options := &slog.HandlerOptions{Level: l}
	var h slog.Handler
	switch format {
	case "text":
		h = slog.NewTextHandler(os.Stderr, options)
	case "json":
		h = slog.NewJSONHandler(os.Stderr, options)
	default:
		return nil, fmt.Errorf("--log-format %q: allowed are text, json", format)
	}
	klog.SetLogger(logr.FromSlogHandler(h))
	return slog.New(h), nil
}

// clusterConfig finds the API server: the given kubeconfig, else the usual
// places ($KUBECONFIG, ~/.kube/config), else the pod's service account.
func clusterConfig(kubeconfig, context string) (*rest.Config, error) {
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.ExplicitPath = kubeconfig
	c, err := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, &clientcmd.ConfigOverrides{CurrentContext: context}).ClientConfig()
	if err != nil {
		return nil, fmt.Errorf("find the cluster: %w (give --kubeconfig, or set KUBECONFIG)", err)
	}
	c.UserAgent = "carve/" + version
	return c, nil
}
