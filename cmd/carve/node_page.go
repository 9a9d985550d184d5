package main

import (
	"cmp"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/v1alpha1"
	"github.com/carve-gpu/carve/monitor"
	"github.com/carve-gpu/carve/monitor/page"
)

// addPageNamesFlag adds --page-names.
func addPageNamesFlag(cmd *cobra.Command, names *string, value page.Names) {
	cmd.Flags().StringVar(names, "page-names", string(value), "who reads names of pods on the live page: all, local (who comes over the loopback, as kubectl port-forward does), namespace (nobody; namespaces are shown), none")
	// The error is impossible: the flag was added above.
	_ = cmd.RegisterFlagCompletionFunc("page-names", cobra.FixedCompletions(completions(page.AllNames), cobra.ShellCompDirectiveNoFileComp))
}

func checkPageNames(cmd *cobra.Command, names string) error {
	if !slices.Contains(page.AllNames, names) {
		return usagef(cmd, "--page-names %q: allowed are %s", names, strings.Join(page.AllNames, ", "))
	}
	return nil
}

// withPage puts the live page beside what is served already.
func withPage(rest http.Handler, c page.Config) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("/", rest)
	page.Register(mux, c)
	return mux
}

// nodePage shows the node to the live page.
type nodePage struct {
	name string
	view func() monitor.View
}

func (p nodePage) State() page.State {
	v := p.view()
	n := page.Node{
		Name: p.name, Version: v.Version, Driver: v.DriverVersion, Software: v.Software, HookUp: !v.LinkedSince.IsZero(),
		Unadjusted: v.Unadjusted, Refused: v.Refused, Cards: []page.Card{},
	}
	for _, c := range v.Cards {
		n.Cards = append(n.Cards, pageCard(c, v.Slices))
	}
	slices.SortStableFunc(n.Cards, func(a, b page.Card) int { return cmp.Compare(a.Index, b.Index) })
	return page.State{Scope: page.ScopeNode, At: time.Now().UTC(), Nodes: []page.Node{n}}
}

func pageCard(c monitor.Card, all []monitor.Slice) page.Card {
	out := page.Card{
		Index: c.Index, UUID: c.UUID, Model: c.Model, Health: v1alpha1.Healthy, Reason: c.Fault,
		MemoryBytes: uint64(c.MemoryMiB()) << 20, GrantedBytes: c.GrantedBytes, GrantedPercent: c.GrantedCores, Holders: []page.Holder{},
	}
	switch {
	case c.Lost:
		out.Health = v1alpha1.Lost
	case c.Fault != "":
		out.Health = v1alpha1.Quarantined
	default:
		used, processes := c.Sample.UsedBytes, len(c.Sample.Processes)
		out.UsedBytes, out.Processes = &used, &processes
		out.UtilizationRatio, out.PowerWatts, out.TemperatureCelsius = c.Sample.UtilizationRatio, c.Sample.PowerWatts, c.Sample.TemperatureCelsius
	}
	for _, s := range all {
		if s.Card != c.UUID {
			continue
		}
		h := page.Holder{Namespace: s.Namespace, Pod: s.Pod, Container: s.Container, State: v1alpha1.Prepared, LimitBytes: s.LimitBytes, Percent: s.Cores, Mode: s.Mode}
		if s.Active {
			h.State = v1alpha1.Active
		}
		switch {
		case s.Mode == string(api.ModeTimeslice):
			h.Counted, h.ComputeRatio = true, s.ComputeRatio
			if c.Fault == "" {
				h.UsedBytes, h.Processes = &s.UsedBytes, &s.Processes
			}
		case s.LimitBytes == 0:
			// A whole card has no limit, and what is used is the card's.
			h.Whole, h.LimitBytes, h.Percent, h.UsedBytes, h.Processes = true, out.MemoryBytes, 100, out.UsedBytes, out.Processes
		case s.Unread:
			h.ComputeRatio = s.ComputeRatio
		default:
			h.ComputeRatio = s.ComputeRatio
			h.ManagedBytes, h.UnchargedBytes = unlessZero(s.ManagedBytes), unlessZero(s.UnchargedBytes)
			h.UsedBytes, h.ResidualBytes, h.PeakBytes, h.Refusals, h.Processes = &s.UsedBytes, &s.ResidualBytes, &s.PeakBytes, &s.Refusals, &s.Processes
		}
		out.Holders = append(out.Holders, h)
	}
	sortHolders(out.Holders)
	return out
}

// unlessZero is nil for none.
func unlessZero(bytes uint64) *uint64 {
	if bytes == 0 {
		return nil
	}
	return &bytes
}

// sortHolders keeps holders in one order from view to view.
func sortHolders(hs []page.Holder) {
	slices.SortStableFunc(hs, func(a, b page.Holder) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Pod, b.Pod), cmp.Compare(a.Container, b.Container))
	})
}
