package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"sort"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/v1alpha1"
)

// cardView is one card as the cards command prints it.
type cardView struct {
	Node        string `json:"node"`
	Index       int32  `json:"index"`
	UUID        string `json:"uuid"`
	Model       string `json:"model"`
	SoftwareGPU bool   `json:"softwareGPU,omitempty"`
	MemoryMiB   int64  `json:"memoryMiB"`
	GrantedMiB  int64  `json:"grantedMiB"`
	FreeMiB     int64  `json:"freeMiB"`
	Cores       int32  `json:"cores"`
	Health      string `json:"health"`
	Reason      string `json:"reason,omitempty"`
	Cordoned    bool   `json:"cordoned,omitempty"`
	CordonedFor string `json:"cordonedFor,omitempty"`
	HookDown    bool   `json:"hookDown,omitempty"`
	AgentDown   bool   `json:"agentDown,omitempty"`
	Unmanaged   bool   `json:"unmanaged,omitempty"`
	// Modes are those in which the card can be given beside vgpu and exclusive, Mode is
	// that of its slices. Sharing is what NVIDIA's configuration says of it.
	Modes   []string          `json:"modes,omitempty"`
	Mode    string            `json:"mode,omitempty"`
	Sharing *v1alpha1.Sharing `json:"sharing,omitempty"`
	MPS     *v1alpha1.MPS     `json:"mps,omitempty"`
	// Enforcement is the node's, Layers are the card's.
	Enforcement       string           `json:"enforcement,omitempty"`
	EnforcementReason string           `json:"enforcementReason,omitempty"`
	Layers            []string         `json:"layers,omitempty"`
	Slices            []v1alpha1.Slice `json:"slices"`
}

func newCardsCommand() *cobra.Command {
	var k kubeFlags
	var format, node string
	var local localFlags
	cmd := &cobra.Command{
		Use:   "cards",
		Short: "Show every card and who holds which part of it",
		Long: `Show every card of the cluster as its node reports it: memory granted and
free, compute granted, health, and the slices that are in place. With --local it
asks the agent of the node that this runs on, and needs no API server.

A report stays as it is when its agent is gone. So the Nodes are looked at too,
for the taint carve.dev/hook-down, which the extender sets about ten seconds
after: such cards are shown as "agent down", their slices as they were last
reported. Whoever may not list Nodes gets the table without that, and a note.

MODE is how the card is shared: vgpu, mps, timeslice or exclusive, which is that of
its slices; or what the node's file of NVIDIA's device plugin sets for it.

-o wide adds what holds memory limits on each card: dmem (the kernel) or guard
stop every program; library alone is advisory, and below the table stands what
that means and why it is so.`,
		Example: `  carve cards
  carve cards --node n1
  carve cards -o wide
  carve cards -o json | jq '.[] | select(.freeMiB > 16000) | .uuid'`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			wide := format == "wide"
			if wide {
				format = "table"
			}
			if err := checkOutputFormat(cmd, format); err != nil {
				return err
			}
			if local.set(cmd) {
				cards, err := localCards(cmd.Context(), &local)
				if err != nil {
					return err
				}
				return writeOutput(cmd.OutOrStdout(), cmd, format, cards, func(w io.Writer) error { return printCards(w, cards, wide) })
			}
			kube, client, err := k.clients()
			if err != nil {
				return err
			}
			options := metav1.ListOptions{}
			if node != "" {
				options.FieldSelector = "metadata.name=" + node
			}
			list, err := client.List(cmd.Context(), options)
			if err != nil {
				return fmt.Errorf("list GPUNodes: %w", hinted(err))
			}
			if node != "" && len(list.Items) == 0 {
				return errNoCards(node)
			}
			cards := viewCards(list.Items)
			switch managed, err := managedNodes(cmd.Context(), kube, options); {
			case err != nil:
				fmt.Fprintf(cmd.ErrOrStderr(), "note: whether the nodes' agents are up isn't shown: %v\n", err)
			default:
				markNodes(cards, managed)
			}
			return writeOutput(cmd.OutOrStdout(), cmd, format, cards, func(w io.Writer) error { return printCards(w, cards, wide) })
		},
	}
	addNodeFlag(cmd, &k, &node)
	addKubeFlags(cmd, &k, false)
	local.add(cmd)
	addOutputFlag(cmd, &format)
	cmd.Flag("output").Usage += ", or wide: the table with what holds the limits, and what was taken past them"
	return cmd
}

// managedNodes lists the nodes that carve manages and whether each is tainted
// because its agent or hook is away.
func managedNodes(ctx context.Context, kube kubernetes.Interface, options metav1.ListOptions) (map[string]bool, error) {
	options.LabelSelector = api.LabelManaged + "=true"
	list, err := kube.CoreV1().Nodes().List(ctx, options)
	if err != nil {
		return nil, fmt.Errorf("list Nodes: %w", err)
	}
	out := make(map[string]bool, len(list.Items))
	for _, n := range list.Items {
		out[n.Name] = slices.ContainsFunc(n.Spec.Taints, func(t corev1.Taint) bool { return t.Key == api.TaintHookDown })
	}
	return out, nil
}

// markNodes adds to the cards what the Nodes tell. A report that says by itself
// that the hook is down has an agent that wrote it.
func markNodes(cards []cardView, managed map[string]bool) {
	for i := range cards {
		tainted, known := managed[cards[i].Node]
		cards[i].Unmanaged = !known
		cards[i].AgentDown = tainted && !cards[i].HookDown
	}
}

// viewCards flattens the reports, by node name and card index.
func viewCards(nodes []v1alpha1.GPUNode) []cardView {
	out := []cardView{}
	for _, n := range nodes {
		cordoned := map[string]bool{}
		for _, u := range n.Spec.CordonedCards {
			cordoned[u] = true
		}
		for _, c := range n.Status.Cards {
			v := cardView{
				Node: n.Name, Index: c.Index, UUID: c.UUID, Model: c.Model, SoftwareGPU: n.Status.SoftwareGPU,
				MemoryMiB: c.MemoryMiB, Health: c.Health.State, Reason: c.Health.Reason, Cordoned: cordoned[c.UUID], CordonedFor: string(n.Spec.CordonReasons[c.UUID]),
				HookDown: n.Status.HookConnectedSince == nil, Enforcement: n.Status.Enforcement, EnforcementReason: n.Status.EnforcementReason, Layers: c.Layers, Slices: c.Slices,
				Modes: c.Modes, Sharing: c.Sharing, MPS: c.MPS,
			}
			if v.Slices == nil {
				v.Slices = []v1alpha1.Slice{}
			}
			sort.Slice(v.Slices, func(i, j int) bool {
				a, b := v.Slices[i], v.Slices[j]
				return a.Namespace+"/"+a.Pod+"/"+a.Container < b.Namespace+"/"+b.Pod+"/"+b.Container
			})
			v.Mode = modeOf(c.Slices)
			for _, s := range c.Slices {
				if s.Mode == "exclusive" {
					v.GrantedMiB, v.Cores = c.MemoryMiB, 100
					continue
				}
				v.GrantedMiB += s.MemMiB
				v.Cores += s.Cores
			}
			v.FreeMiB = max(0, v.MemoryMiB-v.GrantedMiB)
			out = append(out, v)
		}
	}
	sort.SliceStable(out, func(i, j int) bool {
		if out[i].Node != out[j].Node {
			return out[i].Node < out[j].Node
		}
		return out[i].Index < out[j].Index
	})
	return out
}

// modeOf is the mode of a card's slices: of a sound card they have one.
func modeOf(all []v1alpha1.Slice) string {
	var modes []string
	for _, s := range all {
		if !slices.Contains(modes, s.Mode) {
			modes = append(modes, s.Mode)
		}
	}
	slices.Sort(modes)
	return strings.Join(modes, "+")
}

// shared says in a few words how a card is given: in replicas, or as its slices are.
func (c cardView) shared() string {
	sharing := c.Sharing
	switch {
	case sharing == nil:
		return cmp.Or(c.Mode, "-")
	case c.Mode != "" && c.Mode != sharing.Mode:
		return fmt.Sprintf("%s, then %s in %d replicas", c.Mode, sharing.Mode, sharing.Replicas)
	}
	// Each slice takes the place of a replica. One of another size is of a pod that
	// names its amounts, or from before the configuration.
	shares := 0
	for _, s := range c.Slices {
		if s.MemMiB != max(1, c.MemoryMiB/int64(max(1, sharing.Replicas))) {
			shares++
		}
	}
	if shares == 0 {
		return fmt.Sprintf("%s, %d of %d replicas", sharing.Mode, len(c.Slices), sharing.Replicas)
	}
	return fmt.Sprintf("%s, %s and %s of %d", sharing.Mode, plural(len(c.Slices)-shares, "replica"), plural(shares, "share"), sharing.Replicas)
}

// printCards prints a line for each card and, below it, a line for each slice. wide
// adds what holds the limits.
func printCards(w io.Writer, cards []cardView, wide bool) error {
	if len(cards) == 0 {
		_, err := fmt.Fprintln(w, "no node reports cards: label a GPU node with carve.dev/managed=true")
		return err
	}
	t := tabwriter.NewWriter(w, 0, 4, 2, ' ', 0)
	more := func(column string) string {
		if !wide {
			return ""
		}
		return column + "\t"
	}
	fmt.Fprintln(t, "NODE\tCARD\tMODEL / HOLDER\tMEMORY MiB\tFREE MiB\t"+more("RESIDUAL MiB\tLIMITS BY")+"CORES\tMODE\tSTATE")
	for _, c := range cards {
		model := c.Model
		if c.SoftwareGPU {
			model += " (software GPU)"
		}
		layers := "-"
		if c.Layers != nil {
			layers = strings.Join(c.Layers, ", ")
		}
		fmt.Fprintf(t, "%s\t%d\t%s\t%d\t%d\t%s%d%%\t%s\t%s\n", c.Node, c.Index, model, c.MemoryMiB, c.FreeMiB, more("\t"+layers), c.Cores, c.shared(), state(c))
		for i, s := range c.Slices {
			branch := "├─"
			if i == len(c.Slices)-1 {
				branch = "└─"
			}
			memory, cores := amountOf(s), "-"
			if s.Mode == "exclusive" {
				cores = "100%"
			} else if s.Cores > 0 {
				cores = fmt.Sprintf("%d%%", s.Cores)
			}
			residual := "-"
			if s.ResidualMiB > 0 {
				residual = fmt.Sprint(s.ResidualMiB)
			}
			fmt.Fprintf(t, "\t\t%s %s/%s %s\t%s\t\t%s%s\t%s\t%s\n", branch, s.Namespace, s.Pod, s.Container, memory, more(residual+"\t"), cores, s.Mode, s.State)
		}
	}
	if err := t.Flush(); err != nil || !wide {
		return err
	}
	return printAdvisory(w, cards)
}

// printAdvisory says what it means that nodes are advisory, and why each is.
func printAdvisory(w io.Writer, cards []cardView) error {
	var why []string
	for _, c := range cards {
		line := c.Node + ": " + c.EnforcementReason
		if c.Enforcement == v1alpha1.EnforcementAdvisory && !slices.Contains(why, line) {
			why = append(why, line)
		}
	}
	if why == nil {
		return nil
	}
	_, err := fmt.Fprintf(w, "\nLimits by the library alone are advisory: %s.\nNo stronger layer is in force on\n  %s\n", api.AdvisoryMeans, strings.Join(why, "\n  "))
	return err
}

// state joins what keeps a card from being used.
func state(c cardView) string {
	parts := []string{c.Health}
	if c.Reason != "" {
		parts[0] += " (" + c.Reason + ")"
	}
	if c.Cordoned {
		cordoned := "cordoned"
		if c.CordonedFor != "" {
			cordoned += " (" + c.CordonedFor + ")"
		}
		parts = append(parts, cordoned)
	}
	if c.MPS != nil && !c.MPS.Ready {
		parts = append(parts, "MPS down ("+c.MPS.Reason+")")
	}
	if c.HookDown {
		parts = append(parts, "hook down")
	}
	if c.AgentDown {
		parts = append(parts, "agent down")
	}
	if c.Unmanaged {
		parts = append(parts, "not managed")
	}
	return strings.Join(parts, ", ")
}
