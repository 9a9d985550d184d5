package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/v1alpha1"
	"github.com/carve-gpu/carve/monitor/page"
)

type topOptions struct {
	kubeFlags
	node, sortBy, format string
	everywhere, watch    bool
	wide                 bool
	interval             time.Duration
}

// topKinds are what top shows, by all the names that kubectl's users try.
var topKinds = map[string]string{"cards": "cards", "card": "cards", "pods": "pods", "pod": "pods", "po": "pods"}

func newTopCommand() *cobra.Command {
	var o topOptions
	cmd := &cobra.Command{
		Use:   "top [cards|pods]",
		Short: "Show what is in use against what is granted",
		Long: `Show what is in use against what is granted: of cards (the default), or of the
containers that hold parts of them.

It asks the agents of all nodes through the API server. Of a node that doesn't
answer, or that you may not ask, it shows what was granted, and says so. Memory
is in MiB. FREE is what isn't granted; USED of a card is what is in use by
whoever, of a container what its processes say that they hold. RESIDUAL is what
the driver says that they hold beyond it, taken past carve's library; it counts
against LIMIT. BUSY is the part of the card's time that a container just had, as
the driver says, CORES what it was granted of it.

In mode timeslice nothing holds a container to its amounts: they are counted, not
enforced, and USED and PROCS are the driver's figures. In mode mps BUSY isn't known
of a container: to the driver, all that it does is the MPS server's.

PEAK is the largest use that was seen: of a single process exactly, of all
processes of a container together as they are looked at, once a second.

"top pods" shows the pods of one namespace, or with -A of all. -o wide adds
MANAGED, the part of USED that is managed memory, and UNCHARGED, managed memory
that counts against no limit by the pod's annotations carve.dev/managed-memory
and carve.dev/oversell; it is on the card or on the host.`,
		Example: `  carve top
  carve top cards --node n1 --watch
  carve top pods -n team-a --sort-by used
  carve top pods -A -o json | jq '.[] | select(.refusals > 0)'`,
		Args:      cobra.MaximumNArgs(1),
		ValidArgs: []cobra.Completion{"cards", "pods"},
		RunE: func(cmd *cobra.Command, args []string) error {
			what, ok := "cards", true
			if len(args) > 0 {
				what, ok = topKinds[args[0]]
			}
			if !ok {
				return usagef(cmd, "%q: allowed are cards and pods", args[0])
			}
			return o.run(cmd, what)
		},
	}
	f := cmd.Flags()
	f.StringVar(&o.sortBy, "sort-by", "", "largest first by: "+strings.Join(slices.Sorted(maps.Keys(cardOrders)), ", ")+" (cards), "+strings.Join(slices.Sorted(maps.Keys(podOrders)), ", ")+" (pods)")
	f.BoolVarP(&o.everywhere, "all-namespaces", "A", false, "pods of all namespaces")
	f.BoolVarP(&o.watch, "watch", "w", false, "show it again and again, until interrupted")
	f.DurationVar(&o.interval, "interval", 2*time.Second, "how often --watch shows it")
	addNodeFlag(cmd, &o.kubeFlags, &o.node)
	addOutputFlag(cmd, &o.format)
	cmd.Flag("output").Usage += ", or, for pods, wide: the table with managed memory"
	addKubeFlags(cmd, &o.kubeFlags, true)
	// The error is impossible: the flag was added above.
	_ = cmd.RegisterFlagCompletionFunc("sort-by", func(_ *cobra.Command, args []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
		if len(args) > 0 && args[0] == "pods" {
			return completions(slices.Sorted(maps.Keys(podOrders))), noFiles
		}
		return completions(slices.Sorted(maps.Keys(cardOrders))), noFiles
	})
	return cmd
}

func (o *topOptions) run(cmd *cobra.Command, what string) error {
	if o.wide = what == "pods" && o.format == "wide"; o.wide {
		o.format = "table"
	}
	if err := checkOutputFormat(cmd, o.format); err != nil {
		return err
	}
	orders := slices.Sorted(maps.Keys(cardOrders))
	if what == "pods" {
		orders = slices.Sorted(maps.Keys(podOrders))
	}
	switch {
	case o.sortBy != "" && !slices.Contains(orders, o.sortBy):
		return usagef(cmd, "--sort-by %q: allowed for %s are %s", o.sortBy, what, strings.Join(orders, ", "))
	case o.watch && o.format != "table":
		return usagef(cmd, "--watch shows a table; leave -o %s out", o.format)
	case o.interval < 100*time.Millisecond:
		return usagef(cmd, "--interval %s: allowed is 100ms or more", o.interval)
	case what == "cards" && (o.everywhere || cmd.Flags().Changed("namespace")):
		return usagef(cmd, "-n and -A are for top pods: cards belong to no namespace")
	case o.everywhere && cmd.Flags().Changed("namespace"):
		return usagef(cmd, "-n and -A exclude each other")
	}
	namespace := ""
	if what == "pods" && !o.everywhere {
		var err error
		if namespace, err = o.namespace(); err != nil {
			return err
		}
	}
	kube, nodes, err := o.clients()
	if err != nil {
		return err
	}
	l := newLive(kube, nodes)
	show := func(ctx context.Context, out, talk io.Writer) error {
		if what == "cards" {
			return l.topCards(ctx, cmd, o, out, talk)
		}
		return l.topPods(ctx, cmd, o, namespace, out, talk)
	}
	if !o.watch {
		return show(cmd.Context(), cmd.OutOrStdout(), cmd.ErrOrStderr())
	}
	return watch(cmd.Context(), cmd.OutOrStdout(), o.interval, show)
}

// watch shows the same again and again. On a terminal each view takes the place
// of the one before. A view that fails is told and tried again.
func watch(ctx context.Context, out io.Writer, interval time.Duration, show func(context.Context, io.Writer, io.Writer) error) error {
	f, ok := out.(*os.File)
	terminal := false
	if ok {
		info, err := f.Stat()
		terminal = err == nil && info.Mode()&os.ModeCharDevice != 0
	}
	if terminal {
		if _, err := io.WriteString(out, "\x1b[2J"); err != nil {
			return err
		}
	}
	tick := time.NewTicker(interval)
	defer tick.Stop()
	for {
		// One write for a view, so that nothing flickers.
		var view, notes strings.Builder
		err := show(ctx, &view, &notes)
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			fmt.Fprintf(&notes, "error: %v; trying again\n", err)
		}
		text := time.Now().Format("15:04:05") + "\n" + view.String() + notes.String()
		if terminal {
			// Home, each line cleared to its end, the rest below cleared.
			text = "\x1b[H" + strings.ReplaceAll(text, "\n", "\x1b[K\n") + "\x1b[J"
		} else {
			text += "\n"
		}
		if _, err := io.WriteString(out, text); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

func tell(talk io.Writer, notes []string) {
	for _, n := range notes {
		fmt.Fprintln(talk, "note:", n)
	}
}

// topCard is one card as top prints it.
type topCard struct {
	Node      string `json:"node"`
	HookDown  bool   `json:"hookDown,omitempty"`
	AgentDown bool   `json:"agentDown,omitempty"`
	Unmanaged bool   `json:"unmanaged,omitempty"`
	page.Card
}

// cardOrders are the keys of --sort-by for cards; what nobody told is last.
var cardOrders = map[string]func(topCard) float64{
	"used":        func(c topCard) float64 { return orLast(c.UsedBytes) },
	"granted":     func(c topCard) float64 { return float64(c.GrantedBytes) },
	"free":        func(c topCard) float64 { return float64(c.MemoryBytes) - float64(c.GrantedBytes) },
	"utilization": func(c topCard) float64 { return orLast(c.UtilizationRatio) },
	"power":       func(c topCard) float64 { return orLast(c.PowerWatts) },
	"temperature": func(c topCard) float64 { return orLast(c.TemperatureCelsius) },
	"tenants":     func(c topCard) float64 { return float64(len(tenants(c.Holders))) },
}

func orLast[T uint64 | float64 | int](v *T) float64 {
	if v == nil {
		return -1
	}
	return float64(*v)
}

func (l *live) topCards(ctx context.Context, cmd *cobra.Command, o *topOptions, out, talk io.Writer) error {
	u, err := l.read(ctx, o.node)
	if err != nil {
		return err
	}
	options := metav1.ListOptions{}
	if o.node != "" {
		options.FieldSelector = "metadata.name=" + o.node
	}
	managed, err := managedNodes(ctx, l.kube, options)
	if err != nil {
		u.notes = append(u.notes, "whether the nodes' agents are up isn't shown: "+err.Error())
	}
	cards := []topCard{}
	for _, n := range u.nodes {
		for _, c := range n.Cards {
			t := topCard{Node: n.Name, HookDown: !n.HookUp, Card: c}
			if err == nil {
				tainted, known := managed[n.Name]
				t.Unmanaged = !known
				// An agent that has just answered is there, whatever the taint says yet.
				t.AgentDown = tainted && n.HookUp && !u.answered[n.Name]
			}
			cards = append(cards, t)
		}
	}
	if key := cardOrders[o.sortBy]; key != nil {
		slices.SortStableFunc(cards, func(a, b topCard) int { return cmp.Compare(key(b), key(a)) })
	}
	var modes []string
	for _, c := range cards {
		modes = append(modes, modesOf(c.Holders))
	}
	tell(talk, u.notes)
	if o.format == "table" {
		tell(talk, remarks(modes...))
	}
	return writeOutput(out, cmd, o.format, cards, func(w io.Writer) error { return printTopCards(w, cards) })
}

func printTopCards(w io.Writer, cards []topCard) error {
	if len(cards) == 0 {
		_, err := fmt.Fprintln(w, "no node reports cards: label a GPU node with carve.dev/managed=true")
		return err
	}
	t := tabwriter.NewWriter(w, 0, 4, 2, ' ', 0)
	fmt.Fprintln(t, "NODE\tCARD\tMODEL\tUSED\tGRANTED\tFREE\tTOTAL\tCORES\tBUSY\tPOWER\tTEMP\tPROCS\tMODE\tSTATE\tTENANTS")
	for _, c := range cards {
		state := state(cardView{Health: c.Health, Cordoned: c.Cordoned, HookDown: c.HookDown, AgentDown: c.AgentDown, Unmanaged: c.Unmanaged})
		fmt.Fprintf(t, "%s\t%d\t%s\t%s\t%d\t%d\t%d\t%d%%\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", c.Node, c.Index, strings.TrimPrefix(c.Model, "NVIDIA "),
			mebibytes(c.UsedBytes), c.GrantedBytes>>20, (c.MemoryBytes-min(c.GrantedBytes, c.MemoryBytes))>>20, c.MemoryBytes>>20, c.GrantedPercent,
			rounded(c.UtilizationRatio, 100, "%"), rounded(c.PowerWatts, 1, " W"), rounded(c.TemperatureCelsius, 1, " °C"), count(c.Processes), modesOf(c.Holders), state, listTenants(c.Holders))
	}
	return t.Flush()
}

// mebibytes is a number of bytes in MiB, rounded up: what is in use takes room.
func mebibytes(b *uint64) string {
	if b == nil {
		return "-"
	}
	return fmt.Sprint((*b + api.MiB - 1) >> 20)
}

func rounded(v *float64, scale float64, unit string) string {
	if v == nil {
		return "-"
	}
	return fmt.Sprintf("%.0f%s", *v*scale, unit)
}

func count[T int | uint64](v *T) string {
	if v == nil {
		return "-"
	}
	return fmt.Sprint(*v)
}

// modesOf is the mode of a card's holders: they have one, unless something is wrong.
func modesOf(hs []page.Holder) string {
	var modes []string
	for _, h := range hs {
		if h.Mode != "" && !slices.Contains(modes, h.Mode) {
			modes = append(modes, h.Mode)
		}
	}
	slices.Sort(modes)
	return cmp.Or(strings.Join(modes, "+"), "-")
}

// remarks say what a table's figures mean for containers in modes in which not all of them
// are held.
func remarks(modes ...string) []string {
	if !slices.Contains(modes, string(api.ModeTimeslice)) {
		return nil
	}
	return []string{"amounts in mode timeslice are counted, not enforced: nothing holds a program to them"}
}

// remarksOnBusy say of whom a table can't say how busy they are.
func remarksOnBusy(pods []topPod) []string {
	if !slices.ContainsFunc(pods, func(p topPod) bool { return p.Mode == string(api.ModeMPS) && p.ComputeRatio == nil }) {
		return nil
	}
	return []string{"BUSY isn't known of containers in mode mps: to the driver, all that they do is the MPS server's; carve top cards has the card's"}
}

// tenants are the pods on a card.
func tenants(hs []page.Holder) []string {
	var out []string
	for _, h := range hs {
		if name := h.Namespace + "/" + h.Pod; !slices.Contains(out, name) {
			out = append(out, name)
		}
	}
	return out
}

func listTenants(hs []page.Holder) string {
	const few = 3
	names := tenants(hs)
	switch {
	case len(names) == 0:
		return "-"
	case len(names) > few:
		return fmt.Sprintf("%s and %d more", strings.Join(names[:few], ", "), len(names)-few)
	}
	return strings.Join(names, ", ")
}

// topPod is one container's part of one card as top prints it.
type topPod struct {
	Node  string `json:"node"`
	Card  string `json:"card"`
	Index *int   `json:"index,omitempty"`
	page.Holder
}

// podOrders are the keys of --sort-by for pods; what nobody told is last.
var podOrders = map[string]func(topPod) float64{
	"used":      func(p topPod) float64 { return orLast(p.UsedBytes) },
	"residual":  func(p topPod) float64 { return orLast(p.ResidualBytes) },
	"peak":      func(p topPod) float64 { return orLast(p.PeakBytes) },
	"limit":     func(p topPod) float64 { return float64(p.LimitBytes) },
	"refusals":  func(p topPod) float64 { return orLast(p.Refusals) },
	"managed":   func(p topPod) float64 { return orLast(p.ManagedBytes) },
	"uncharged": func(p topPod) float64 { return orLast(p.UnchargedBytes) },
	"busy":      func(p topPod) float64 { return orLast(p.ComputeRatio) },
	"cores":     func(p topPod) float64 { return float64(p.Percent) },
	"processes": func(p topPod) float64 { return orLast(p.Processes) },
}

func (l *live) topPods(ctx context.Context, cmd *cobra.Command, o *topOptions, namespace string, out, talk io.Writer) error {
	u, err := l.read(ctx, o.node)
	pods := []topPod{}
	if err != nil {
		// A tenant sees its own pods, and in them what they were granted.
		var own error
		if pods, own = l.grantedPods(ctx, namespace, o.node); own != nil {
			return fmt.Errorf("%w; list pods: %w", err, own)
		}
		u.notes = append(u.notes, "what is in use is not shown, only what was granted: "+err.Error())
	}
	for _, n := range u.nodes {
		for _, c := range n.Cards {
			for _, h := range c.Holders {
				if namespace == "" || h.Namespace == namespace {
					pods = append(pods, topPod{n.Name, c.UUID, &c.Index, h})
				}
			}
		}
	}
	slices.SortStableFunc(pods, func(a, b topPod) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Pod, b.Pod), cmp.Compare(a.Container, b.Container), cmp.Compare(a.Card, b.Card))
	})
	if key := podOrders[o.sortBy]; key != nil {
		slices.SortStableFunc(pods, func(a, b topPod) int { return cmp.Compare(key(b), key(a)) })
	}
	var modes []string
	for _, p := range pods {
		modes = append(modes, p.Mode)
	}
	tell(talk, u.notes)
	if o.format == "table" {
		tell(talk, append(remarks(modes...), remarksOnBusy(pods)...))
	}
	return writeOutput(out, cmd, o.format, pods, func(w io.Writer) error { return printTopPods(w, pods, namespace, o.wide) })
}

// grantedPods lists what the pods of a namespace were granted, by their
// annotations.
func (l *live) grantedPods(ctx context.Context, namespace, node string) ([]topPod, error) {
	options := metav1.ListOptions{}
	if node != "" {
		options.FieldSelector = "spec.nodeName=" + node
	}
	list, err := l.kube.CoreV1().Pods(namespace).List(ctx, options)
	if err != nil {
		return nil, err
	}
	out := []topPod{}
	for _, p := range list.Items {
		g, err := api.DecodeGrant(p.Annotations[api.AnnotationGrant])
		if err != nil || g.UID != string(p.UID) || p.Status.Phase == "Succeeded" || p.Status.Phase == "Failed" {
			continue
		}
		for name, cards := range g.Containers {
			for _, c := range cards {
				h := page.Holder{Namespace: p.Namespace, Pod: p.Name, Container: name, State: "bound", LimitBytes: uint64(c.MemMiB) << 20, Percent: c.Cores, Mode: string(c.Mode)}
				h.Counted = c.Mode == api.ModeTimeslice
				if c.Mode == api.ModeExclusive {
					h.Whole, h.Percent = true, 100
				}
				for _, s := range p.Status.ContainerStatuses {
					if s.Name == name && s.State.Running != nil {
						h.State = v1alpha1.Active
					}
				}
				out = append(out, topPod{Node: p.Spec.NodeName, Card: c.Card, Holder: h})
			}
		}
	}
	return out, nil
}

func printTopPods(w io.Writer, pods []topPod, namespace string, wide bool) error {
	if len(pods) == 0 {
		where := "in namespace " + namespace
		if namespace == "" {
			where = "in any namespace"
		}
		_, err := fmt.Fprintf(w, "no pod %s holds a card\n", where)
		return err
	}
	t := tabwriter.NewWriter(w, 0, 4, 2, ' ', 0)
	more := ""
	if wide {
		more = "\tMANAGED\tUNCHARGED"
	}
	fmt.Fprintln(t, "NAMESPACE\tPOD\tCONTAINER\tNODE\tCARD\tUSED"+more+"\tRESIDUAL\tPEAK\tLIMIT\tREFUSALS\tCORES\tBUSY\tPROCS\tMODE\tSTATE")
	for _, p := range pods {
		card := p.Card
		if p.Index != nil {
			card = fmt.Sprint(*p.Index)
		}
		limit, cores := fmt.Sprint(p.LimitBytes>>20), "-"
		if p.Whole {
			limit = "whole card"
		}
		if p.Counted {
			limit += " counted"
		}
		if p.Percent > 0 {
			cores = fmt.Sprintf("%d%%", p.Percent)
			if p.Counted {
				cores += " counted"
			}
		}
		busy := "-"
		if p.ComputeRatio != nil {
			busy = fmt.Sprintf("%.0f%%", 100**p.ComputeRatio)
		}
		if wide {
			more = "\t" + mebibytes(p.ManagedBytes) + "\t" + mebibytes(p.UnchargedBytes)
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n", cmp.Or(p.Namespace, "-"), cmp.Or(p.Pod, "-"), cmp.Or(p.Container, "-"), p.Node, card,
			mebibytes(p.UsedBytes), more, mebibytes(p.ResidualBytes), mebibytes(p.PeakBytes), limit, count(p.Refusals), cores, busy, count(p.Processes), cmp.Or(p.Mode, "-"), p.State)
	}
	return t.Flush()
}
