package main

import (
	"context"
	"fmt"
	"io"
	"slices"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/carve-gpu/carve/api"
	nodev1 "github.com/carve-gpu/carve/api/node/v1"
	"github.com/carve-gpu/carve/api/v1alpha1"
	"github.com/carve-gpu/carve/monitor/page"
)

// localTimeout bounds a call to the node's agent.
const localTimeout = 10 * time.Second

// sliceView is one slice as the slices command prints it. What it uses is known to
// its node's agent only, and absent where that can't be asked, or can't tell.
type sliceView struct {
	Node string `json:"node"`
	Card string `json:"card"`
	v1alpha1.Slice
	UsedMiB   *int64  `json:"usedMiB,omitempty"` // as its processes say
	PeakMiB   *int64  `json:"peakMiB,omitempty"`
	Refusals  *uint64 `json:"refusals,omitempty"`
	Processes *int32  `json:"processes,omitempty"`
}

func newSlicesCommand() *cobra.Command {
	var k kubeFlags
	var format, node string
	var everywhere bool
	var local localFlags
	cmd := &cobra.Command{
		Use:   "slices",
		Short: "Show every container's share of a card",
		Long: `Show every container's share of a card: of the whole cluster as the nodes
report it, with what is in use as their agents say, or with --local of the node that
this runs on. --local asks the agent by its socket and needs no API server.

It shows all namespaces unless -n names one. USED is what a container's processes
say that they hold; of a whole card what is in use on it, and in mode timeslice what
the driver says. It is - where the agent can't be asked, or nobody knows. Amounts in
mode timeslice are counted, not enforced.`,
		Example: `  carve slices
  carve slices -n team-a
  carve slices --node n1 -o json
  carve slices --local`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := checkOutputFormat(cmd, format); err != nil {
				return err
			}
			named := cmd.Flags().Changed("namespace")
			if everywhere && named {
				return usagef(cmd, "-n and -A exclude each other")
			}
			var list []sliceView
			var notes []string
			var err error
			if local.set(cmd) {
				list, err = localSlices(cmd.Context(), &local)
			} else {
				list, notes, err = clusterSlices(cmd.Context(), &k, node)
			}
			if err != nil {
				return err
			}
			if named {
				list = slices.DeleteFunc(list, func(s sliceView) bool { return s.Namespace != k.overrides.Context.Namespace })
			}
			if format == "table" {
				var modes []string
				for _, s := range list {
					modes = append(modes, s.Mode)
				}
				notes = append(notes, remarks(modes...)...)
			}
			tell(cmd.ErrOrStderr(), notes)
			return writeOutput(cmd.OutOrStdout(), cmd, format, list, func(w io.Writer) error { return printSlices(w, list) })
		},
	}
	cmd.Flags().BoolVarP(&everywhere, "all-namespaces", "A", false, "slices of all namespaces, which is what it shows unless -n is given")
	addNodeFlag(cmd, &k, &node)
	addKubeFlags(cmd, &k, true)
	local.add(cmd)
	addOutputFlag(cmd, &format)
	return cmd
}

// clusterSlices lists the slices of all nodes, or of one, and notes on what couldn't be
// learnt.
func clusterSlices(ctx context.Context, k *kubeFlags, node string) ([]sliceView, []string, error) {
	kube, client, err := k.clients()
	if err != nil {
		return nil, nil, err
	}
	return newLive(kube, client).slices(ctx, node)
}

func (l *live) slices(ctx context.Context, node string) ([]sliceView, []string, error) {
	options := metav1.ListOptions{}
	if node != "" {
		options.FieldSelector = "metadata.name=" + node
	}
	list, err := l.nodes.List(ctx, options)
	if err != nil {
		return nil, nil, fmt.Errorf("list GPUNodes: %w", hinted(err))
	}
	if node != "" && len(list.Items) == 0 {
		return nil, nil, errNoCards(node)
	}
	type key struct{ node, card, namespace, pod, container string }
	holders := map[key]page.Holder{}
	u, err := l.read(ctx, node)
	if err != nil {
		u.notes = append(u.notes, "what is in use is not shown: "+err.Error())
	}
	for _, n := range u.nodes {
		for _, c := range n.Cards {
			for _, h := range c.Holders {
				holders[key{n.Name, c.UUID, h.Namespace, h.Pod, h.Container}] = h
			}
		}
	}
	out := []sliceView{}
	for _, c := range viewCards(list.Items) {
		for _, s := range c.Slices {
			v := sliceView{Node: c.Node, Card: c.UUID, Slice: s}
			h := holders[key{c.Node, c.UUID, s.Namespace, s.Pod, s.Container}]
			v.UsedMiB, v.PeakMiB, v.Refusals = inMiB(h.UsedBytes), inMiB(h.PeakBytes), h.Refusals
			if h.Processes != nil {
				n := int32(*h.Processes)
				v.Processes = &n
			}
			out = append(out, v)
		}
	}
	return out, u.notes, nil
}

// inMiB is a number of bytes in MiB, rounded up, where it is known.
func inMiB(b *uint64) *int64 {
	if b == nil {
		return nil
	}
	n := int64((*b + api.MiB - 1) >> 20)
	return &n
}

func localSlices(ctx context.Context, local *localFlags) ([]sliceView, error) {
	ctx, cancel := context.WithTimeout(ctx, localTimeout)
	defer cancel()
	client, err := local.client(ctx)
	if err != nil {
		return nil, err
	}
	defer client.Close()
	cards, err := client.Cards(ctx)
	if err != nil {
		return nil, err
	}
	sampled := map[string]uint64{} // what is in use on cards that answer
	for _, c := range cards.GetCards() {
		if c.GetFault() == "" && !c.GetLost() {
			sampled[c.GetUuid()] = c.GetUsedBytes()
		}
	}
	answer, err := client.Slices(ctx)
	if err != nil {
		return nil, err
	}
	out := []sliceView{}
	for _, s := range answer.GetSlices() {
		v := sliceView{Node: answer.GetNode(), Card: s.GetCard(), Slice: reported(s)}
		used, peak, refusals, processes := s.GetUsedBytes(), s.GetPeakBytes(), s.GetRefusals(), s.GetProcesses()
		onCard, answers := sampled[s.GetCard()]
		switch s.GetMode() {
		case string(api.ModeVGPU), string(api.ModeMPS):
			v.UsedMiB, v.PeakMiB, v.Refusals, v.Processes = inMiB(&used), inMiB(&peak), &refusals, &processes
		case string(api.ModeTimeslice): // the driver says it
			if answers {
				v.UsedMiB, v.Processes = inMiB(&used), &processes
			}
		case string(api.ModeExclusive):
			if answers {
				v.UsedMiB = inMiB(&onCard)
			}
		}
		out = append(out, v)
	}
	return out, nil
}

// localCards asks the node's agent for its cards, as the cards command shows
// them.
func localCards(ctx context.Context, local *localFlags) ([]cardView, error) {
	ctx, cancel := context.WithTimeout(ctx, localTimeout)
	defer cancel()
	client, err := local.client(ctx)
	if err != nil {
		return nil, err
	}
	defer client.Close()
	answer, err := client.Cards(ctx)
	if err != nil {
		return nil, err
	}
	all, err := client.Slices(ctx)
	if err != nil {
		return nil, err
	}
	held := map[string][]v1alpha1.Slice{}
	for _, s := range all.GetSlices() {
		held[s.GetCard()] = append(held[s.GetCard()], reported(s))
	}
	out := []cardView{}
	for _, c := range answer.GetCards() {
		v := cardView{
			Node: answer.GetNode(), Index: c.GetIndex(), UUID: c.GetUuid(), Model: c.GetModel(), SoftwareGPU: c.GetSoftwareGpu(),
			MemoryMiB: int64(c.GetMemoryBytes() >> 20), GrantedMiB: int64(c.GetGrantedBytes() >> 20), Cores: c.GetGrantedCores(),
			Health: v1alpha1.Healthy, HookDown: !answer.GetHookLinked(), Slices: held[c.GetUuid()],
			Enforcement: answer.GetEnforcement(), EnforcementReason: answer.GetEnforcementReason(), Layers: c.GetLayers(),
		}
		if c.GetSharingMode() != "" {
			v.Sharing = &v1alpha1.Sharing{Mode: c.GetSharingMode(), Replicas: c.GetReplicas()}
		}
		if c.GetMpsFault() != "" {
			v.MPS = &v1alpha1.MPS{Reason: c.GetMpsFault()}
		}
		switch {
		case c.GetLost():
			v.Health, v.Reason = v1alpha1.Lost, c.GetFault()
		case c.GetFault() != "":
			v.Health, v.Reason = v1alpha1.Quarantined, c.GetFault()
		}
		if v.Slices == nil {
			v.Slices = []v1alpha1.Slice{}
		}
		v.FreeMiB, v.Mode = max(0, v.MemoryMiB-v.GrantedMiB), modeOf(v.Slices)
		out = append(out, v)
	}
	return out, nil
}

// reported is a slice of the local API in the report's terms.
func reported(s *nodev1.Slice) v1alpha1.Slice {
	state := v1alpha1.Prepared
	if s.GetActive() {
		state = v1alpha1.Active
	}
	return v1alpha1.Slice{
		PodUID: s.GetPodUid(), Namespace: s.GetNamespace(), Pod: s.GetPod(), Container: s.GetContainer(),
		MemMiB: int64(s.GetLimitBytes() >> 20), Cores: s.GetCores(), Mode: s.GetMode(), State: state, Generation: s.GetGeneration(),
		ResidualMiB: int64((s.GetResidualBytes() + api.MiB - 1) >> 20), Fault: s.GetFault(),
	}
}

// amountOf is the memory of a slice, with what that means.
func amountOf(s v1alpha1.Slice) string {
	switch s.Mode {
	case string(api.ModeExclusive):
		return "whole card"
	case string(api.ModeTimeslice):
		return fmt.Sprintf("%d counted", s.MemMiB)
	}
	return fmt.Sprint(s.MemMiB)
}

func printSlices(w io.Writer, list []sliceView) error {
	if len(list) == 0 {
		_, err := fmt.Fprintln(w, "no slices")
		return err
	}
	t := tabwriter.NewWriter(w, 0, 4, 2, ' ', 0)
	fmt.Fprintln(t, "NODE\tNAMESPACE\tPOD\tCONTAINER\tCARD\tMEMORY MiB\tUSED MiB\tRESIDUAL MiB\tCORES\tMODE\tSTATE")
	for _, s := range list {
		memory, cores, used, residual := amountOf(s.Slice), "-", "-", "-"
		if s.Mode == string(api.ModeExclusive) {
			cores = "100%"
		} else if s.Cores > 0 {
			cores = fmt.Sprintf("%d%%", s.Cores)
		}
		if s.UsedMiB != nil {
			used = fmt.Sprint(*s.UsedMiB)
		}
		if s.ResidualMiB > 0 {
			residual = fmt.Sprint(s.ResidualMiB)
		}
		state := s.State
		if s.Fault != "" {
			state += ", cut off"
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", s.Node, s.Namespace, s.Pod, s.Container, s.Card, memory, used, residual, cores, s.Mode, state)
	}
	if err := t.Flush(); err != nil {
		return err
	}
	said := map[string]bool{}
	for _, s := range list {
		line := fmt.Sprintf("%s/%s on %s: %s", s.Namespace, s.Pod, s.Node, s.Fault)
		if s.Fault == "" || said[line] {
			continue
		}
		said[line] = true
		if _, err := fmt.Fprintln(w, line); err != nil {
			return err
		}
	}
	return nil
}
