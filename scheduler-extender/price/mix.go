package price

import (
	"cmp"
	"math"
	"slices"
	"strings"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/scheduler-extender/fit"
)

// HalfLife is after how many arrivals a pod counts half.
const HalfLife = 4000

// Mix remembers what pods asked of late. It isn't safe for concurrent use.
type Mix struct {
	shapes map[string]*Shape
	weight float64 // of the next arrival
	growth float64
	total  float64
}

// Shape is a kind of pod, and which part of all pods it is.
type Shape struct {
	Ask  *fit.Ask
	Part float64
}

// NewMix makes an empty one; halfLife 0 is HalfLife, negative forgets nothing.
func NewMix(halfLife float64) *Mix {
	growth := 1.0
	if halfLife >= 0 {
		growth = 1 + math.Ln2/cmp.Or(halfLife, HalfLife)
	}
	return &Mix{shapes: map[string]*Shape{}, weight: 1, growth: growth}
}

// Add counts an arrival.
func (m *Mix) Add(a *fit.Ask) {
	s := m.shapes[a.Key()]
	if s == nil {
		s = &Shape{Ask: a}
		m.shapes[a.Key()] = s
	}
	s.Part += m.weight
	m.total += m.weight
	if m.weight *= m.growth; m.weight > 1e12 {
		m.shrink()
	}
}

// shrink keeps numbers small, and forgets what hasn't come for long.
func (m *Mix) shrink() {
	m.total = 0
	// In an order of their own: sums of the same numbers in another order differ.
	for _, key := range m.keys() {
		s := m.shapes[key]
		if s.Part /= m.weight; s.Part < 1e-3 {
			delete(m.shapes, key)
			continue
		}
		m.total += s.Part
	}
	m.weight = 1
}

func (m *Mix) keys() []string {
	keys := make([]string, 0, len(m.shapes))
	for k := range m.shapes {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}

// Shapes are those that came, the most frequent first.
func (m *Mix) Shapes() []Shape {
	out := make([]Shape, 0, len(m.shapes))
	for _, s := range m.shapes {
		out = append(out, Shape{s.Ask, s.Part / m.total})
	}
	slices.SortFunc(out, func(a, b Shape) int {
		return cmp.Or(cmp.Compare(b.Part, a.Part), strings.Compare(a.Ask.Key(), b.Ask.Key()))
	})
	return out
}

// Drift is how far two mixes are apart, from 0, the same, to 1, nothing in common.
func Drift(a, b []Shape) float64 {
	parts := make(map[string]float64, len(a))
	for _, s := range a {
		parts[s.Ask.Key()] = s.Part
	}
	common := 0.0
	for _, s := range b {
		common += min(s.Part, parts[s.Ask.Key()])
	}
	return max(0, 1-common)
}

// Common is what is asked for where nobody has asked yet: cards, halves, quarters and eighths,
// and once in a while a machine of eight cards.
func Common() []Shape {
	var out []Shape
	add := func(c api.ContainerRequest, part float64) {
		c.Name = "main"
		a, refusal := fit.NewAsk(api.Request{Containers: []api.ContainerRequest{c}})
		if refusal != nil {
			panic("price: " + refusal.Sentence()) // can't be: the requests are below
		}
		out = append(out, Shape{a, part})
	}
	add(api.ContainerRequest{Cards: 1, Whole: true}, 0.5)
	add(api.ContainerRequest{Cards: 1, MemPercent: 50, Cores: 50}, 0.2)
	add(api.ContainerRequest{Cards: 1, MemPercent: 25, Cores: 25}, 0.19)
	add(api.ContainerRequest{Cards: 1, MemPercent: 12, Cores: 12}, 0.1)
	add(api.ContainerRequest{Cards: 8, Whole: true}, 0.01)
	return out
}
