package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/duration"
	"k8s.io/client-go/kubernetes"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/gpunodes"
	"github.com/carve-gpu/carve/scheduler-extender/explain"
)

// fewNodes is how many nodes the table of explain has, unless told otherwise.
const fewNodes = 6

func newExplainCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "explain",
		Short: "Say why a pod is pending, or what its node made of its grant",
		Args:  cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return cmd.Help()
			}
			name, ok := podName(args[0])
			if !ok {
				name = "NAME"
			}
			return usagef(cmd, "unknown argument %q (did you mean %s pod %s?)", args[0], cmd.CommandPath(), name)
		},
	}
	cmd.AddCommand(newExplainPodCommand())
	return cmd
}

func newExplainPodCommand() *cobra.Command {
	var k kubeFlags
	var format string
	var all bool
	cmd := &cobra.Command{
		Use:   "pod NAME",
		Short: "Say why a pod is pending, or what its node made of its grant",
		Long: `Say why a pod is pending, or what its node made of its grant.

Of a pending pod: what it asks for as carve reads it, what its scheduler says,
and node by node, card by card what is in the way, who holds it and how much is
missing. That is computed here, by the code that the extender runs, from what
you may read of the cluster; who may not list pods, nodes or GPUNodes gets what
is left, and a line on what is missing. Of a running pod: its grant, and what
its node made of it.

It reads and changes nothing.`,
		Example: `  carve explain pod infer-a
  carve explain pod train-0 -n team-a -o json | jq .verdict`,
		Aliases: []string{"pods", "po"},
		Args:    cobra.ExactArgs(1),
		ValidArgsFunction: func(cmd *cobra.Command, args []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
			if len(args) > 0 {
				return nil, noFiles
			}
			return k.completePods(cmd)
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := checkOutputFormat(cmd, format); err != nil {
				return err
			}
			name, ok := podName(args[0])
			if !ok {
				return usagef(cmd, "%q: allowed are NAME and pod/NAME", args[0])
			}
			namespace, err := k.namespace()
			if err != nil {
				return err
			}
			kube, nodes, err := k.clients()
			if err != nil {
				return err
			}
			in, err := gather(cmd.Context(), kube, nodes, namespace, name, time.Now())
			if err != nil {
				return err
			}
			r := explain.Explain(in)
			return writeOutput(cmd.OutOrStdout(), cmd, format, r, func(w io.Writer) error { return printExplained(w, r, in.Now, all) })
		},
	}
	cmd.Flags().BoolVar(&all, "all-nodes", false, fmt.Sprintf("list all nodes, not only the %d nearest", fewNodes))
	addOutputFlag(cmd, &format)
	addKubeFlags(cmd, &k, true)
	return cmd
}

// gather reads what an explanation is made of. What the user may not read is
// left out and marked.
func gather(ctx context.Context, kube kubernetes.Interface, nodes *gpunodes.Client, namespace, name string, now time.Time) (explain.Inputs, error) {
	in := explain.Inputs{Now: now}
	pod, err := kube.CoreV1().Pods(namespace).Get(ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return in, fmt.Errorf("there is no pod %s in namespace %s; one that was refused at admission never appears: kubectl describe its ReplicaSet or Job says why", name, namespace)
	}
	if err != nil {
		return in, fmt.Errorf("read pod %s/%s: %w", namespace, name, err)
	}
	in.Pod = pod
	hidden := func(what string, err error) (bool, error) {
		if err == nil || apierrors.IsForbidden(err) || apierrors.IsNotFound(err) {
			return err != nil, nil
		}
		return true, fmt.Errorf("list %s: %w", what, err)
	}
	events, err := kube.CoreV1().Events(namespace).List(ctx, metav1.ListOptions{FieldSelector: "involvedObject.uid=" + string(pod.UID)})
	if err == nil {
		in.Events = events.Items
	}
	_, eventsErr := hidden("events", err)
	quotas, err := kube.CoreV1().ResourceQuotas(namespace).List(ctx, metav1.ListOptions{})
	if err == nil {
		in.Quotas = quotas.Items
	}
	var quotasErr, podsErr, nodesErr, reportsErr error
	in.QuotasHidden, quotasErr = hidden("resource quotas", err)
	pods, err := kube.CoreV1().Pods(metav1.NamespaceAll).List(ctx, metav1.ListOptions{})
	if err == nil {
		in.Pods = pods.Items
	}
	in.PodsHidden, podsErr = hidden("pods", err)
	list, err := kube.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err == nil {
		in.Nodes = list.Items
	}
	in.NodesHidden, nodesErr = hidden("nodes", err)
	reports, err := nodes.List(ctx, metav1.ListOptions{})
	if err == nil {
		in.Reports = reports.Items
	}
	in.ReportsHidden, reportsErr = hidden("GPUNodes", err)
	return in, errors.Join(eventsErr, quotasErr, podsErr, nodesErr, reportsErr)
}

// printExplained prints an explanation for people.
func printExplained(w io.Writer, r explain.Report, now time.Time, all bool) error {
	ago := func(t time.Time) string { return duration.HumanDuration(now.Sub(t)) }
	var b strings.Builder
	t := tabwriter.NewWriter(&b, 0, 4, 2, ' ', 0)
	state := r.Phase
	if r.Leaving {
		state += ", being deleted"
	}
	if r.Node != "" {
		state += ", on " + r.Node
	}
	fmt.Fprintf(t, "Pod:\t%s/%s (%s)\n", r.Namespace, r.Pod, state)
	fmt.Fprintf(t, "Verdict:\t%s\n", r.Verdict)
	for i, a := range r.Asks {
		head := ""
		if i == 0 {
			head = "Asks:"
		}
		kind := ""
		if a.Kind != "app" {
			kind = " (" + a.Kind + ")"
		}
		fmt.Fprintf(t, "%s\t%s%s: %s\n", head, a.Container, kind, a.Text)
	}
	if r.Wishes != nil {
		fmt.Fprintf(t, "Wishes:\t%s\n", strings.Join(r.Wishes, "; "))
	}
	if r.Fault != nil {
		fmt.Fprintf(t, "Fault:\t%s\n\tis\t%s\n\tallowed\t%s\n", r.Fault.Field, r.Fault.Value, r.Fault.Allowed)
	}
	if s := r.Scheduler; s != nil {
		said := "nothing yet"
		switch {
		case s.Message != "" && strings.Contains(r.Summary, s.Message):
			said = fmt.Sprintf("%s (%s ago), see below", s.Reason, ago(*s.Since))
		case s.Message != "":
			said = fmt.Sprintf("%s (%s ago): %s", s.Reason, ago(*s.Since), s.Message)
		}
		fmt.Fprintf(t, "Scheduler:\t%s: %s\n", s.Name, said)
	}
	if r.Generation > 0 {
		fmt.Fprintf(t, "Grant:\tgeneration %d\n", r.Generation)
	}
	if r.Limits != "" {
		fmt.Fprintf(t, "Limits:\t%s\n", r.Limits)
	}
	if z := r.Resize; z != nil {
		switch {
		case z.Pending:
			fmt.Fprintf(t, "Resize:\tto %s waits for the extender's answer\n", amounts(z.Asked))
		case z.Message != "":
			fmt.Fprintf(t, "Resize:\tthe last one was %s: %s\n", z.Outcome, z.Message)
		default:
			fmt.Fprintf(t, "Resize:\tthe last one was %s, as generation %d\n", z.Outcome, z.Generation)
		}
	}
	if err := t.Flush(); err != nil {
		return err
	}
	fmt.Fprintf(&b, "\n%s\n", r.Summary)
	if r.NodeBlocked != "" && r.Verdict != explain.NotPrepared {
		fmt.Fprintf(&b, "Its node takes nothing new: %s\n", r.NodeBlocked)
	}
	printExplainedSlices(&b, r.Slices, r.ReportsHidden)
	printNodes(&b, r.Nodes, all)
	if len(r.Events) > 0 {
		b.WriteString("\nEvents about cards:\n")
		for _, e := range r.Events {
			times := ""
			if e.Count > 1 {
				times = fmt.Sprintf(" (%d times)", e.Count)
			}
			fmt.Fprintf(&b, "  %s ago%s  %s  %s: %s\n", ago(e.Time), times, e.Reason, e.From, e.Message)
		}
	}
	for i, m := range r.Missing {
		if i == 0 {
			b.WriteString("\n")
		}
		fmt.Fprintf(&b, "Not shown: %s\n", m)
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func printExplainedSlices(b *strings.Builder, all []explain.Slice, hidden bool) {
	if len(all) == 0 {
		return
	}
	b.WriteString("\n")
	t := tabwriter.NewWriter(b, 2, 4, 2, ' ', 0)
	fmt.Fprintln(t, "  CONTAINER\tCARD\tGRANTED\tCORES\tNODE REPORTS\tDRIFT")
	for _, s := range all {
		card, memory, cores, state, drift := s.Card, fmt.Sprintf("%d MiB", s.MemMiB), "-", "nothing yet", "-"
		if s.Index != nil {
			card = fmt.Sprintf("%d (%s)", *s.Index, s.Card)
		}
		if s.Mode == "exclusive" {
			memory, cores = "whole card", "100%"
		} else if s.Cores > 0 {
			cores = strings.TrimSpace(fmt.Sprintf("%d%% %s", s.Cores, s.Compute))
		}
		if s.Mode == "mps" || s.Mode == "timeslice" {
			memory += ", mode " + s.Mode
			if s.Mode == "timeslice" {
				memory += ": counted, not enforced"
			}
		}
		if s.LowPriority {
			cores += ", low priority"
		}
		if s.Managed != "" {
			memory += ", managed memory: " + s.Managed
		}
		if s.Oversell != "" {
			memory += ", oversold to the " + s.Oversell
		}
		switch {
		case s.Ended:
			state = "ended"
		case s.State == "" && hidden:
			state = "not shown (you may not read GPUNodes)"
		case s.State != "":
			state = fmt.Sprintf("%s, generation %d", s.State, s.Generation)
			if s.Fault != "" {
				state += ", cut off"
			}
		}
		if s.ResidualMiB > 0 {
			state += fmt.Sprintf(", %d MiB taken past the library", s.ResidualMiB)
		}
		if s.Drift != "" {
			drift = s.Drift
		}
		fmt.Fprintf(t, "  %s\t%s\t%s\t%s\t%s\t%s\n", s.Container, card, memory, cores, state, drift)
	}
	t.Flush() // into a strings.Builder, which takes everything
}

func printNodes(b *strings.Builder, all []explain.Node, every bool) {
	shown := all
	if !every && len(all) > fewNodes {
		shown = all[:fewNodes]
	}
	for _, n := range shown {
		switch {
		case n.Fits && n.Kubernetes != "":
			fmt.Fprintf(b, "\n%s: a card is free, but %s\n", n.Name, n.Kubernetes)
		case n.Fits:
			fmt.Fprintf(b, "\n%s: fits\n", n.Name)
		default:
			fmt.Fprintf(b, "\n%s: refused (%s)\n", n.Name, n.Reason)
			if n.OfNode {
				fmt.Fprintf(b, "  %s\n", strings.TrimPrefix(n.Message, n.Name+": "))
			}
			if n.Kubernetes != "" {
				fmt.Fprintf(b, "  besides, %s\n", n.Kubernetes)
			}
		}
		for _, c := range n.Cards {
			verdict := "fits"
			switch {
			case !c.Fits:
				verdict = c.Message
			case !n.Fits && n.OfNode:
				verdict = "has room"
			}
			what := strings.TrimPrefix(c.Model, "NVIDIA ")
			switch {
			case c.Sharing != "":
				what += ", " + c.Sharing
			case c.Mode != "" && c.Mode != string(api.ModeVGPU):
				what += ", mode " + c.Mode
			}
			fmt.Fprintf(b, "  card %d (%s, %s): %s", c.Index, c.UUID, what, verdict)
			if c.Missing > 0 {
				fmt.Fprintf(b, "; %s missing", missing(c))
			}
			if c.Held != "" {
				fmt.Fprintf(b, "; held by %s", c.Held)
			}
			b.WriteString("\n")
		}
	}
	if rest := all[len(shown):]; len(rest) > 0 {
		counts := map[string]int{}
		for _, n := range rest {
			reason := n.Reason
			if n.Fits {
				reason = "free"
			}
			counts[reason]++
		}
		var parts []string
		for _, reason := range slices.Sorted(maps.Keys(counts)) {
			parts = append(parts, fmt.Sprintf("%d %s", counts[reason], reason))
		}
		fmt.Fprintf(b, "\nand %d more nodes (%s); --all-nodes lists them\n", len(rest), strings.Join(parts, ", "))
	}
}

func missing(c explain.Card) string {
	switch c.Reason {
	case "memory":
		return fmt.Sprintf("%d MiB are", c.Missing)
	case "cores":
		return fmt.Sprintf("%d%% are", c.Missing)
	}
	return fmt.Sprintf("%d are", c.Missing)
}

// amounts says what a resize asks for.
func amounts(asked map[string]api.ResizeAmounts) string {
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(asked)) {
		what := []string{name + ":"}
		if m := asked[name].MemMiB; m != nil {
			what = append(what, fmt.Sprintf("%d MiB", *m))
		}
		if c := asked[name].Cores; c != nil {
			what = append(what, fmt.Sprintf("%d %% of compute", *c))
		}
		parts = append(parts, strings.Join(what, " "))
	}
	if len(parts) == 0 {
		return "what can't be read"
	}
	return strings.Join(parts, ", ")
}
