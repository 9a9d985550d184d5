package fit

import (
	"reflect"
	"slices"

	"github.com/carve-gpu/carve/api"
)

// Stands reports whether a grant that was made of this ask could be made on the same
// cards now, and would say the same of each. The node is as it is without the pod.
func (a *Ask) Stands(n *Node, g api.Grant) bool {
	s := search{node: n, ask: a, on: make([]uint64, len(n.Cards))}
	p := make(Placement, len(a.Containers))
	for ci := range a.Containers {
		c := &a.Containers[ci]
		for _, cg := range g.Containers[c.Name] {
			i := slices.IndexFunc(n.Cards, func(card Card) bool { return card.UUID == cg.Card })
			if i < 0 || n.Cards[i].Blocked != "" || a.admits(&n.Cards[i]) != "" || !c.suits(&n.Cards[i]) {
				return false
			}
			s.on[i] |= 1 << ci
			p[ci] = append(p[ci], i)
		}
	}
	for ci, cards := range p {
		for _, i := range cards {
			if card := &n.Cards[i]; !card.holds(s.held(i, s.on[i]), a.Containers[ci].slots(card)) {
				return false
			}
		}
	}
	return reflect.DeepEqual(a.Grant(n, p, g.UID).Containers, g.Containers)
}
