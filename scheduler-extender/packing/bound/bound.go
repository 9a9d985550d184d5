// Package bound says how much of the arrivals can be placed at all, whoever places them and
// though he knew them all beforehand.
package bound

import (
	"math"
	"sort"
	"strings"

	"github.com/carve-gpu/carve/scheduler-extender/packing/openb"
	"github.com/carve-gpu/carve/scheduler-extender/price"
)

// Prefix is the largest beginning of the arrivals that the cards could hold, in percent of
// their capacity: whoever turns nothing away before that much has arrived is as good as can be.
//
// It is a relaxation: fractions of cards may be cut to fit (the linear program of package
// price), all cards of a model are one heap, and processors and memory are left out. What is
// allocated in the end can be a little more, since small pods that come later still find holes.
func Prefix(o openb.Order) float64 {
	var capacity int64
	models := map[string]float64{} // cards of each
	for _, n := range o.Nodes {
		capacity += int64(n.Cards) * openb.Card
		models[n.Model] += float64(n.Cards)
	}
	// Pods that insist on some models have those to themselves at best.
	specs := map[string]float64{"": float64(capacity) / openb.Card}
	for i := range o.Pods {
		spec := o.Pods[i].Models
		if _, known := specs[spec]; !known {
			for _, m := range strings.Split(spec, "|") {
				specs[spec] += models[m]
			}
		}
	}
	most := sort.Search(len(o.Pods), func(k int) bool {
		for spec, cards := range specs {
			if need(o.Pods[:k+1], spec) > cards*(1+1e-9) {
				return true
			}
		}
		return false
	})
	var arrived int64
	for i := range o.Pods[:most] {
		arrived += o.Pods[i].Total()
	}
	return 100 * float64(arrived) / float64(capacity)
}

// need is how many cards the pods with the spec take at the least; all pods where it is empty.
func need(pods []openb.Pod, spec string) float64 {
	sizes := map[int64]float64{}
	cards := 0.0
	for i := range pods {
		p := &pods[i]
		switch {
		case spec != "" && p.Models != spec:
		case p.Milli < openb.Card:
			sizes[p.Milli] += float64(p.Cards)
		default:
			cards += float64(p.Cards)
		}
	}
	var slots []price.Slot
	for milli := int64(1); milli < openb.Card; milli++ {
		if n := sizes[milli]; n > 0 {
			percent := int(math.Floor(float64(milli) * 100 / openb.Card))
			slots = append(slots, price.Slot{Cores: percent, Mem: percent, Demand: n})
		}
	}
	if len(slots) > 0 {
		cards += price.Cut(slots, 100, 1).Cards()
	}
	return cards
}
