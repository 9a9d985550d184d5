package score

import "github.com/carve-gpu/carve/scheduler-extender/fit"

// Fleet sums up what nodes there are, whoever is on them: what prices need of a cluster.
type Fleet []FleetNode

// FleetNode is a kind of node, and how many there are. Its cards are alike.
type FleetNode struct {
	Model     string
	Cards     int
	CardMiB   int64
	Host      fit.Host // of an empty node
	HostKnown bool
	Nodes     int
}

// FleetOf counts nodes that nothing is on.
func FleetOf(nodes []*fit.Node) Fleet {
	var out Fleet
	at := map[FleetNode]int{}
	for _, n := range nodes {
		if len(n.Cards) == 0 {
			continue
		}
		k := FleetNode{Model: n.Cards[0].Model, Cards: len(n.Cards), CardMiB: n.Cards[0].MemMiB, Host: n.Host, HostKnown: n.HostKnown}
		i, ok := at[k]
		if !ok {
			i = len(out)
			at[k] = i
			out = append(out, k)
		}
		out[i].Nodes++
	}
	return out
}

func (f Fleet) cards() int {
	n := 0
	for i := range f {
		n += f[i].Cards * f[i].Nodes
	}
	return n
}
