package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/gpunodes"
	"github.com/carve-gpu/carve/scheduler-extender/cluster"
	"github.com/carve-gpu/carve/scheduler-extender/place"
	"github.com/carve-gpu/carve/scheduler-extender/score"
	"github.com/carve-gpu/carve/scheduler-extender/simulate"
)

func newSimulateCommand() *cobra.Command {
	var k kubeFlags
	var file, policy, format string
	var all bool
	cmd := &cobra.Command{
		Use:   "simulate -f FILE",
		Short: "Say where pods would go that nobody has created yet",
		Long: `Say where pods would go that nobody has created yet, or what is in their way.

FILE has Pods, Deployments, ReplicaSets, StatefulSets, ReplicationControllers or
Jobs, in one document or several; - is standard input. Their pods are placed one
after the other, on what the cluster has free now, by the code that the extender
runs. Of kube-scheduler's rules node affinity, taints, cordons, processors, memory
and the number of pods are looked at, and no others. What the extender has learnt
of the pods that came isn't known here: prices are made of those that run.

It reads and changes nothing. Ends with 1 if a pod has no place.`,
		Example: `  carve simulate -f deployment.yaml
  carve simulate -f jobs.yaml --policy spread -o json | jq .refused
  helm template ./chart | carve simulate -f -`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := checkOutputFormat(cmd, format); err != nil {
				return err
			}
			if file == "" {
				return usagef(cmd, "-f FILE is needed; - is standard input")
			}
			config := place.Config{}
			ok := true
			if config.Policy, ok = score.ByName(policy); policy == autoPolicy {
				config.Policy, ok = score.ByName(score.PriceName)
				config.PricesFrom = pricesFrom
			}
			if !ok {
				return usagef(cmd, "--policy %q: allowed are auto, price, binpack, spread", policy)
			}
			namespace, err := k.namespace()
			if err != nil {
				return err
			}
			text, err := readFile(cmd.InOrStdin(), file)
			if err != nil {
				return err
			}
			pods, skipped, err := simulate.Read(bytes.NewReader(text), namespace)
			if err != nil {
				return fmt.Errorf("read %s: %w", file, err)
			}
			for _, s := range skipped {
				fmt.Fprintf(cmd.ErrOrStderr(), "%s is left out: pods aren't made of it\n", s)
			}
			if len(pods) == 0 {
				return fmt.Errorf("read %s: no pods are made of it", file)
			}
			kube, nodes, err := k.clients()
			if err != nil {
				return err
			}
			in, err := listAll(cmd.Context(), kube, nodes)
			if err != nil {
				return err
			}
			r, err := simulate.Run(in, pods, config, time.Now())
			if err != nil {
				return err
			}
			if err := writeOutput(cmd.OutOrStdout(), cmd, format, r, func(w io.Writer) error { return printSimulated(w, r, all) }); err != nil {
				return err
			}
			if r.Refused > 0 {
				return errNoPlace(r)
			}
			return nil
		},
	}
	cmd.Flags().StringVarP(&file, "filename", "f", "", "file with what would be created; - is standard input")
	cmd.Flags().StringVar(&policy, "policy", autoPolicy, "policy of pods that name none: auto, price, binpack, spread; the extender's own is what carve extender --policy says")
	cmd.Flags().BoolVar(&all, "all", false, fmt.Sprintf("list all pods, not only the first %d", manyPods))
	_ = cmd.RegisterFlagCompletionFunc("policy", cobra.FixedCompletions([]cobra.Completion{autoPolicy, score.PriceName, "binpack", "spread"}, cobra.ShellCompDirectiveNoFileComp))
	addOutputFlag(cmd, &format)
	addKubeFlags(cmd, &k, true)
	return cmd
}

// manyPods is how many the table has, unless told otherwise.
const manyPods = 50

func errNoPlace(r simulate.Report) error {
	if r.Refused == 1 && len(r.Placements) == 1 {
		return errors.New("the pod has no place")
	}
	return fmt.Errorf("%d of %d pods have no place", r.Refused, len(r.Placements))
}

// readFile reads a file, or standard input.
func readFile(in io.Reader, name string) ([]byte, error) {
	if name == "-" {
		text, err := io.ReadAll(in)
		if err != nil {
			return nil, fmt.Errorf("read standard input: %w", err)
		}
		return text, nil
	}
	text, err := os.ReadFile(name)
	if err != nil {
		return nil, fmt.Errorf("read the pods: %w", err)
	}
	return text, nil
}

// listAll reads what a simulation is made of. Unlike an explanation it needs all of it.
func listAll(ctx context.Context, kube kubernetes.Interface, nodes *gpunodes.Client) (cluster.Lists, error) {
	var in cluster.Lists
	n, err := kube.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return in, fmt.Errorf("list nodes: %w", err)
	}
	p, err := kube.CoreV1().Pods(metav1.NamespaceAll).List(ctx, metav1.ListOptions{})
	if err != nil {
		return in, fmt.Errorf("list pods: %w", err)
	}
	q, err := kube.CoreV1().ResourceQuotas(metav1.NamespaceAll).List(ctx, metav1.ListOptions{})
	if err != nil {
		return in, fmt.Errorf("list resource quotas: %w", err)
	}
	r, err := nodes.List(ctx, metav1.ListOptions{})
	if err != nil {
		return in, fmt.Errorf("list GPUNodes: %w", err)
	}
	in.Nodes, in.Pods, in.Quotas, in.Reports = n.Items, p.Items, q.Items, r.Items
	return in, nil
}

// printSimulated prints a simulation for people.
func printSimulated(w io.Writer, r simulate.Report, all bool) error {
	t := tabwriter.NewWriter(w, 0, 4, 2, ' ', 0)
	fmt.Fprintln(t, "NAMESPACE\tPOD\tNODE\tCARDS")
	for i, p := range r.Placements {
		if i == manyPods && !all {
			fmt.Fprintf(t, "…\t%d more\t\tsee them with --all\n", len(r.Placements)-i)
			break
		}
		switch {
		case p.Node != "":
			var cards []string
			for _, c := range p.Cards {
				amounts := fmt.Sprintf("%d MiB", c.MemMiB)
				if c.Cores > 0 {
					amounts += fmt.Sprintf(", %d %%", c.Cores)
				}
				if c.Mode == string(api.ModeExclusive) {
					amounts = "whole"
				}
				cards = append(cards, fmt.Sprintf("%s: card %d (%s)", c.Container, c.Index, amounts))
			}
			fmt.Fprintf(t, "%s\t%s\t%s\t%s\n", p.Namespace, p.Pod, p.Node, strings.Join(cards, "; "))
		case p.Free:
			fmt.Fprintf(t, "%s\t%s\t-\tit asks for no card\n", p.Namespace, p.Pod)
		case p.Never:
			fmt.Fprintf(t, "%s\t%s\tnever\t%s\n", p.Namespace, p.Pod, p.Why)
		default:
			fmt.Fprintf(t, "%s\t%s\tnone\t%s\n", p.Namespace, p.Pod, p.Why)
		}
	}
	if err := t.Flush(); err != nil {
		return err
	}
	percent := 0.0
	if r.Has > 0 {
		percent = 100 * float64(r.Given) / float64(r.Has)
	}
	_, err := fmt.Fprintf(w, "\n%d placed, %d not; of the cards' memory %.1f %% would be given (%d of %d MiB)\n", r.Placed, r.Refused, percent, r.Given, r.Has)
	return err
}
