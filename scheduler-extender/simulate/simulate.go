package simulate

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/scheduler-extender/cluster"
	"github.com/carve-gpu/carve/scheduler-extender/ledger"
	"github.com/carve-gpu/carve/scheduler-extender/place"
)

// Placement is where one pod would go.
type Placement struct {
	Namespace string `json:"namespace"`
	Pod       string `json:"pod"`
	// Node is empty where no node has room; Why then says what the nearest one lacks, and
	// Never that no node there is could ever have it.
	Node  string  `json:"node,omitempty"`
	Cards []Share `json:"cards,omitempty"`
	Why   string  `json:"why,omitempty"`
	Never bool    `json:"never,omitempty"`
	// Free says that the pod asks for no card: carve has no part in where it goes.
	Free bool `json:"free,omitempty"`
}

// Share is what a container would have of a card.
type Share struct {
	Container string `json:"container"`
	Card      string `json:"card"` // UUID
	Index     int    `json:"index"`
	MemMiB    int64  `json:"memMiB,omitempty"`
	Cores     int    `json:"cores,omitempty"`
	Mode      string `json:"mode"`
}

// Report is what came of a simulation.
type Report struct {
	Placements []Placement `json:"placements"`
	Placed     int         `json:"placed"`
	Refused    int         `json:"refused"`
	// Given and Has are of the cards' memory in MiB, with the pods that were placed.
	Given int64 `json:"givenMiB"`
	Has   int64 `json:"hasMiB"`
}

// ever is how long a simulated decision stands.
const ever = 24 * 365 * time.Hour

// Run places pods one after the other, as if they came in that order and stayed.
func Run(in cluster.Lists, pods []*corev1.Pod, config place.Config, now time.Time) (Report, error) {
	books := cluster.Snapshot(in, now)
	placer := place.New(books, config)
	r := Report{Placements: make([]Placement, 0, len(pods))}
	names := make([][]byte, len(in.Nodes))
	for i := range in.Nodes {
		names[i] = []byte(in.Nodes[i].Name)
	}
	for _, p := range pods {
		one, err := run(books, placer, in.Nodes, names, p, now)
		if err != nil {
			return r, fmt.Errorf("pod %s/%s: %w", p.Namespace, p.Name, err)
		}
		switch {
		case one.Node != "":
			r.Placed++
		case !one.Free:
			r.Refused++
		}
		r.Placements = append(r.Placements, one)
	}
	t := books.Totals()
	r.Given, r.Has = t.UsedMiB, t.MemMiB
	return r, nil
}

func run(books *ledger.Ledger, placer *place.Placer, nodes []corev1.Node, names [][]byte, p *corev1.Pod, now time.Time) (Placement, error) {
	out := Placement{Namespace: p.Namespace, Pod: p.Name}
	asked, err := cluster.PodOf(p)
	if err != nil {
		out.Why, out.Never = err.Error(), true
		return out, nil
	}
	if asked.Request.Empty() {
		out.Free = true
		return out, nil
	}
	choice := cluster.ChoiceOf(p)
	var suit [][]byte
	for i := range nodes {
		ok, err := choice.Takes(&nodes[i])
		if err != nil {
			return out, err
		}
		if ok {
			suit = append(suit, names[i])
		}
	}
	if len(suit) == 0 {
		out.Why = "no node has the labels that it wants, or each has a taint that it doesn't tolerate, or is cordoned"
		return out, nil
	}
	f := placer.Plan(asked, suit, place.Plan{For: ever, Suits: func(string) bool { return false }}, now)
	placer.Forget(asked.UID) // nothing will ever free room here
	switch {
	case f.Err != nil:
		return out, f.Err
	case len(f.Nodes) == 0:
		out.Never = len(f.Failed) == 0
		out.Why = why(f)
		return out, nil
	}
	grant, _, err := books.BeginBind(asked.Ref, f.Nodes[0], now)
	if err != nil {
		return out, err
	}
	books.EndBind(asked.UID, ledger.Written, now)
	out.Node = f.Nodes[0]
	cards := books.Node(out.Node).Snapshot().View.Cards
	for _, c := range asked.Request.Containers {
		for _, g := range grant.Containers[c.Name] {
			s := Share{Container: c.Name, Card: g.Card, MemMiB: g.MemMiB, Cores: g.Cores, Mode: string(g.Mode), Index: -1}
			for i := range cards {
				if cards[i].UUID == g.Card {
					if s.Index = cards[i].Index; g.Mode == api.ModeExclusive {
						s.MemMiB, s.Cores = cards[i].MemMiB, 100
					}
				}
			}
			out.Cards = append(out.Cards, s)
		}
	}
	return out, nil
}

// why joins the reasons of a refusal, which are one or a few.
func why(f place.Filtered) string {
	var texts []string
	for _, reasons := range []map[string]string{f.Failed, f.Never} {
		for _, node := range slices.Sorted(maps.Keys(reasons)) {
			texts = append(texts, reasons[node])
		}
	}
	return strings.Join(texts, "; ")
}
