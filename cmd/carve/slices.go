package main

import (
	"context"
	"fmt"
	"io"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/carve-gpu/carve/api"
	nodev1 "github.com/carve-gpu/carve/api/node/v1"
	"github.com/carve-gpu/carve/api/v1alpha1"
)

// localTimeout bounds a call to the node's agent.
const localTimeout = 10 * time.Second

// sliceView is one slice as the slices command prints it. Usage is known to
// the node only, so it is there with --local.
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
	var local localFlags
	cmd := &cobra.Command{
		Use:   "slices",
		Short: "Show every container's share of a card",
		Long: `Show every container's share of a card: of the whole cluster as the nodes
report it, or with --local of the node that this runs on, with what is in use.
--local asks the agent by its socket and needs no API server.`,
		Example: `  carve slices
  carve slices --node n1 -o json
  carve slices --local`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := checkOutputFormat(cmd, format); err != nil {
				return err
			}
			var list []sliceView
			var err error
			if local.set(cmd) {
				list, err = localSlices(cmd.Context(), &local)
			} else {
				list, err = clusterSlices(cmd.Context(), &k, node)
			}
			if err != nil {
				return err
			}
			return writeOutput(cmd.OutOrStdout(), cmd, format, list, func(w io.Writer) error { return printSlices(w, list) })
		},
	}
	addNodeFlag(cmd, &k, &node)
	addKubeFlags(cmd, &k, false)
	local.add(cmd)
	addOutputFlag(cmd, &format)
	return cmd
}

func clusterSlices(ctx context.Context, k *kubeFlags, node string) ([]sliceView, error) {
	_, client, err := k.clients()
	if err != nil {
		return nil, err
	}
	options := metav1.ListOptions{}
	if node != "" {
		options.FieldSelector = "metadata.name=" + node
	}
	list, err := client.List(ctx, options)
	if err != nil {
		return nil, fmt.Errorf("list GPUNodes: %w", hinted(err))
	}
	if node != "" && len(list.Items) == 0 {
		return nil, errNoCards(node)
	}
	out := []sliceView{}
	for _, c := range viewCards(list.Items) {
		for _, s := range c.Slices {
			out = append(out, sliceView{Node: c.Node, Card: c.UUID, Slice: s})
		}
	}
	return out, nil
}

func localSlices(ctx context.Context, local *localFlags) ([]sliceView, error) {
	ctx, cancel := context.WithTimeout(ctx, localTimeout)
	defer cancel()
	client, err := local.client(ctx)
	if err != nil {
		return nil, err
	}
	defer client.Close()
	answer, err := client.Slices(ctx)
	if err != nil {
		return nil, err
	}
	out := []sliceView{}
	for _, s := range answer.GetSlices() {
		v := sliceView{Node: answer.GetNode(), Card: s.GetCard(), Slice: reported(s)}
		used, peak, refusals, processes := int64(s.GetUsedBytes()>>20), int64(s.GetPeakBytes()>>20), s.GetRefusals(), s.GetProcesses()
		if s.GetMode() == string(api.ModeVGPU) || s.GetMode() == string(api.ModeMPS) { // others say nothing of themselves
			v.UsedMiB, v.PeakMiB, v.Refusals, v.Processes = &used, &peak, &refusals, &processes
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
	slices, err := client.Slices(ctx)
	if err != nil {
		return nil, err
	}
	held := map[string][]v1alpha1.Slice{}
	for _, s := range slices.GetSlices() {
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

func printSlices(w io.Writer, list []sliceView) error {
	if len(list) == 0 {
		_, err := fmt.Fprintln(w, "no slices")
		return err
	}
	t := tabwriter.NewWriter(w, 0, 4, 2, ' ', 0)
	fmt.Fprintln(t, "NODE\tNAMESPACE\tPOD\tCONTAINER\tCARD\tMEMORY MiB\tUSED MiB\tRESIDUAL MiB\tCORES\tMODE\tSTATE")
	for _, s := range list {
		memory, cores, used, residual := fmt.Sprint(s.MemMiB), "-", "-", "-"
		if s.Mode == string(api.ModeExclusive) {
			memory, cores = "whole card", "100%"
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
