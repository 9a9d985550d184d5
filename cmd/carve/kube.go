package main

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/carve-gpu/carve/api/gpunodes"
	"github.com/carve-gpu/carve/api/v1alpha1"
)

const (
	// requestTimeout bounds one request of a command for people, where
	// --request-timeout says nothing else.
	requestTimeout = 30 * time.Second
	// completionTimeout bounds what a shell waits for after a tab.
	completionTimeout = 3 * time.Second
)

// kubeFlags say which cluster a command talks to, as whom and in which
// namespace. They are kubectl's, under kubectl's names.
type kubeFlags struct {
	path      string
	overrides clientcmd.ConfigOverrides
}

// everyday are the connection flags that help shows, with what it says of them.
// kubectl's others work as well.
var everyday = map[string]string{
	"kubeconfig":      "kubeconfig file (default: $KUBECONFIG, ~/.kube/config, or the pod's service account)",
	"context":         "context of the kubeconfig",
	"cluster":         "cluster of the kubeconfig",
	"user":            "user of the kubeconfig",
	"namespace":       "namespace (default: that of the kubeconfig's context)",
	"as":              "user to act as",
	"as-group":        "group to act as; may be repeated",
	"request-timeout": "how long one request may take, such as 5s (default 30s)",
}

// addKubeFlags adds kubectl's connection flags to a command, and -n to one that
// reads objects of a namespace.
func addKubeFlags(cmd *cobra.Command, k *kubeFlags, namespaced bool) {
	names := clientcmd.RecommendedConfigOverrideFlags("")
	names.AuthOverrideFlags.Username, names.AuthOverrideFlags.Password = clientcmd.FlagInfo{}, clientcmd.FlagInfo{}
	if !namespaced {
		names.ContextOverrideFlags.Namespace = clientcmd.FlagInfo{}
	}
	f := pflag.NewFlagSet("cluster", pflag.ContinueOnError)
	f.StringVar(&k.path, "kubeconfig", "", "")
	clientcmd.BindOverrideFlags(&k.overrides, f, names)
	f.VisitAll(func(flag *pflag.Flag) {
		text, shown := everyday[flag.Name]
		flag.Hidden = !shown
		if shown {
			flag.Usage = text
		}
	})
	f.Lookup("request-timeout").DefValue = ""
	cmd.Flags().AddFlagSet(f)

	complete := func(flag string, with cobra.CompletionFunc) {
		if f.Lookup(flag) != nil {
			// The error is impossible: the flag is there.
			_ = cmd.RegisterFlagCompletionFunc(flag, with)
		}
	}
	complete("context", k.completeConfig(func(c clientcmdapi.Config) []string { return slices.Collect(maps.Keys(c.Contexts)) }))
	complete("cluster", k.completeConfig(func(c clientcmdapi.Config) []string { return slices.Collect(maps.Keys(c.Clusters)) }))
	complete("user", k.completeConfig(func(c clientcmdapi.Config) []string { return slices.Collect(maps.Keys(c.AuthInfos)) }))
	complete("namespace", k.completeNamespaces)
}

// addNodeFlag adds --node, for commands that can show one node only.
func addNodeFlag(cmd *cobra.Command, k *kubeFlags, node *string) {
	cmd.Flags().StringVar(node, "node", "", "show this node only")
	// The error is impossible: the flag was added above.
	_ = cmd.RegisterFlagCompletionFunc("node", k.completeNodes)
}

func (k *kubeFlags) loader() clientcmd.ClientConfig {
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.ExplicitPath = k.path
	return clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, &k.overrides)
}

// config finds the API server: the given kubeconfig, else the usual places
// ($KUBECONFIG, ~/.kube/config), else the pod's service account.
func (k *kubeFlags) config() (*rest.Config, error) {
	c, err := k.loader().ClientConfig()
	if err != nil {
		return nil, fmt.Errorf("find the cluster: %w (give --kubeconfig, or set KUBECONFIG)", err)
	}
	c.UserAgent = "carve/" + version
	if c.Timeout == 0 {
		c.Timeout = requestTimeout
	}
	return c, nil
}

// namespace is the one that -n or the context names, else "default".
func (k *kubeFlags) namespace() (string, error) {
	n, _, err := k.loader().Namespace()
	if err != nil {
		return "", fmt.Errorf("find the namespace: %w", err)
	}
	return n, nil
}

// clients are what commands for people talk through. Nothing is throttled on
// our side: commands bound their own parallel requests.
func (k *kubeFlags) clients() (kubernetes.Interface, *gpunodes.Client, error) {
	c, err := k.config()
	if err != nil {
		return nil, nil, err
	}
	return clientsOf(c)
}

func clientsOf(c *rest.Config) (kubernetes.Interface, *gpunodes.Client, error) {
	c = rest.CopyConfig(c)
	c.QPS = -1
	kube, err := kubernetes.NewForConfig(c)
	if err != nil {
		return nil, nil, fmt.Errorf("make the client: %w", err)
	}
	nodes, err := gpunodes.New(c)
	return kube, nodes, err
}

const noFiles = cobra.ShellCompDirectiveNoFileComp

// completeConfig completes names from the kubeconfig.
func (k *kubeFlags) completeConfig(names func(clientcmdapi.Config) []string) cobra.CompletionFunc {
	return func(*cobra.Command, []string, string) ([]cobra.Completion, cobra.ShellCompDirective) {
		c, err := k.loader().RawConfig()
		if err != nil {
			return nil, noFiles
		}
		return completions(slices.Sorted(slices.Values(names(c)))), noFiles
	}
}

// completing makes clients for a completion: a cluster that doesn't answer must
// not keep a shell waiting, and an error has no place to be shown.
func (k *kubeFlags) completing(cmd *cobra.Command) (context.Context, context.CancelFunc, kubernetes.Interface, *gpunodes.Client, bool) {
	ctx := cmd.Context()
	if ctx == nil {
		ctx = context.Background()
	}
	ctx, cancel := context.WithTimeout(ctx, completionTimeout)
	kube, nodes, err := k.clients()
	return ctx, cancel, kube, nodes, err == nil
}

func (k *kubeFlags) completeNamespaces(cmd *cobra.Command, _ []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
	ctx, cancel, kube, _, ok := k.completing(cmd)
	defer cancel()
	if !ok {
		return nil, noFiles
	}
	list, err := kube.CoreV1().Namespaces().List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, noFiles
	}
	var out []cobra.Completion
	for _, n := range list.Items {
		out = append(out, n.Name)
	}
	return out, noFiles
}

// completeNodes completes the names of nodes that report cards.
func (k *kubeFlags) completeNodes(cmd *cobra.Command, _ []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
	ctx, cancel, _, nodes, ok := k.completing(cmd)
	defer cancel()
	if !ok {
		return nil, noFiles
	}
	list, err := nodes.List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, noFiles
	}
	var out []cobra.Completion
	for _, n := range list.Items {
		out = append(out, cobra.CompletionWithDesc(n.Name, fmt.Sprintf("%d cards", len(n.Status.Cards))))
	}
	return out, noFiles
}

// completePods completes the names of the namespace's pods.
func (k *kubeFlags) completePods(cmd *cobra.Command) ([]cobra.Completion, cobra.ShellCompDirective) {
	return k.completePodsThat(cmd, "", func(*corev1.Pod) bool { return true })
}

// completePodsThat completes those of the namespace's pods that fit, with a
// prefix before the name.
func (k *kubeFlags) completePodsThat(cmd *cobra.Command, prefix string, fits func(*corev1.Pod) bool) ([]cobra.Completion, cobra.ShellCompDirective) {
	ctx, cancel, kube, _, ok := k.completing(cmd)
	defer cancel()
	namespace, err := k.namespace()
	if !ok || err != nil {
		return nil, noFiles
	}
	list, err := kube.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, noFiles
	}
	var out []cobra.Completion
	for i := range list.Items {
		if p := &list.Items[i]; fits(p) {
			out = append(out, prefix+p.Name)
		}
	}
	return out, noFiles
}

// completeCards completes a node, then its cards that want admits, by index.
func (k *kubeFlags) completeCards(want func(v1alpha1.GPUNode, v1alpha1.Card) bool) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, word string) ([]cobra.Completion, cobra.ShellCompDirective) {
		if len(args) == 0 {
			return k.completeNodes(cmd, args, word)
		}
		ctx, cancel, _, nodes, ok := k.completing(cmd)
		defer cancel()
		if !ok {
			return nil, noFiles
		}
		n, err := nodes.Get(ctx, args[0])
		if err != nil {
			return nil, noFiles
		}
		var out []cobra.Completion
		for _, c := range n.Status.Cards {
			index := fmt.Sprint(c.Index)
			if want(*n, c) && !slices.Contains(args[1:], index) && !slices.Contains(args[1:], c.UUID) {
				out = append(out, cobra.CompletionWithDesc(index, c.UUID+", "+c.Model))
			}
		}
		return out, noFiles
	}
}

// hinted adds to the error of reading GPUNodes what helps: nothing where the
// API server just didn't answer.
func hinted(err error) error {
	switch {
	case apierrors.IsNotFound(err):
		return fmt.Errorf("%w (is carve installed in this cluster?)", err)
	case apierrors.IsForbidden(err):
		return fmt.Errorf("%w (the ClusterRole carve-viewer may)", err)
	}
	return err
}

func errNoCards(node string) error {
	return fmt.Errorf("node %s reports no cards: is it labelled carve.dev/managed=true, and does its carve-node pod run?", node)
}

// noArgs refuses arguments of a command that shows nodes, and says how one is
// named.
func noArgs(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		return fmt.Errorf("unknown argument %q (did you mean %s --node %s?)", args[0], cmd.CommandPath(), args[0])
	}
	return nil
}
