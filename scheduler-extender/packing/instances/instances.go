// Package instances is the packing experiment on cards that are cut into MIG instances on
// demand, by the geometry of an A100 with 80 GB: pods of one instance each arrive until 130 % of
// the compute slices were asked for, and nobody leaves.
package instances

import (
	"fmt"
	"math"
	"math/bits"
	"math/rand"

	"github.com/carve-gpu/carve/scheduler-extender/price"
)

const (
	cards = 100
	ratio = 1.3
	// every is after how many arrivals prices are made anew: a hundred cards are full after some 200.
	every = 10
)

// Mix is how often each profile is asked for: 1g, 1g with twice the memory, 2g, 3g, 4g, 7g.
type Mix struct {
	Name  string
	Parts []float64
}

// Mixes are those that are run.
var Mixes = []Mix{
	{"uniform", []float64{1, 0, 1, 1, 1, 1}},
	{"small", []float64{6, 0, 3, 1, .3, .2}},
	{"large", []float64{1, 0, 1, 2, 2, 4}},
	{"1g7g", []float64{5, 0, 0, 0, 0, 1}},
	{"1g2g3g", []float64{1, 0, 1, 1, 0, 0}},
}

// Policies are those that are compared.
func Policies() []string { return []string{"firstfit", "bestfit", "carve"} }

// Bound is the part of the compute slices that can be allocated while nobody is turned away, in
// percent.
func Bound(m Mix) float64 {
	compute := 0.0
	for i, part := range m.Parts {
		compute += part * float64(price.A100.Profiles[i].Compute)
	}
	return 100 * compute / (price.Lay(price.A100, m.Parts).Cards() * float64(price.A100.Compute))
}

// Run is the part of the compute slices that a policy allocates, in percent.
func Run(m Mix, policy string, seed int64) (float64, error) {
	g := &price.A100
	r := rand.New(rand.NewSource(seed))
	total := 0.0
	for _, p := range m.Parts {
		total += p
	}
	seen := make([]float64, len(g.Profiles))
	for i := range seen {
		seen[i] = 0.01 // until somebody has asked, all are as likely
	}
	layout := price.Lay(*g, seen)
	state := make([]price.Mask, cards)
	arrived, held := 0, 0
	for n := 0; float64(arrived) < ratio*float64(cards*g.Compute); n++ {
		profile, draw := 0, r.Float64()*total
		for draw >= m.Parts[profile] && profile < len(m.Parts)-1 {
			draw -= m.Parts[profile]
			profile++
		}
		arrived += g.Profiles[profile].Compute
		best, at, start := int64(math.MaxInt64), -1, 0
		for i, is := range state {
			s, cost, ok := layout.Best(is, profile)
			switch policy {
			case "carve":
			case "bestfit":
				cost = int64(g.Memory - bits.OnesCount16(is.Taken))
			case "firstfit":
				cost = 0
			default:
				return 0, fmt.Errorf("there is no policy %q; %v are known", policy, Policies())
			}
			if policy != "carve" && ok {
				s = first(g, is, profile)
			}
			if ok && cost < best {
				best, at, start = cost, i, s
			}
		}
		if at >= 0 {
			state[at], _ = g.Put(state[at], profile, start)
			held += g.Profiles[profile].Compute
		}
		if seen[profile]++; (n+1)%every == 0 {
			layout = price.Lay(*g, seen)
		}
	}
	check := 0
	for _, is := range state {
		if check += is.Compute; is.Compute > g.Compute || is.Taken >= 1<<g.Memory {
			return 0, fmt.Errorf("a card holds %+v", is)
		}
	}
	if check != held {
		return 0, fmt.Errorf("%d compute slices are held, %d were counted", check, held)
	}
	return 100 * float64(held) / float64(cards*g.Compute), nil
}

// first is the first start at which there is room.
func first(g *price.Geometry, m price.Mask, profile int) int {
	for _, s := range g.Profiles[profile].Starts {
		if _, ok := g.Put(m, profile, s); ok {
			return s
		}
	}
	return 0
}
