package rival

import (
	"cmp"
	"math"
	"slices"
	"strings"

	"github.com/carve-gpu/carve/scheduler-extender/fit"
	"github.com/carve-gpu/carve/scheduler-extender/packing/openb"
)

// popular is the part of all pods whose shapes stand for them all.
const popular = 0.95

// task is a shape of pods and how often it comes.
type task struct {
	cpu, milli int64
	cards      int
	models     []string
	part       float64
}

// FGD takes the node and card on which the share of free cards that the typical pod can't use
// grows least ("fragmentation gradient descent", Weng et al., USENIX ATC'23).
type FGD struct {
	constant
	tasks []task

	models  map[string][]bool // by card model: which tasks may be there
	scratch []int64
}

// NewFGD makes one that knows the workload, as the published one does.
func NewFGD(pods []openb.Pod) *FGD {
	type shape struct {
		cpu, milli int64
		cards      int
		models     string
	}
	counts := map[shape]int{}
	for i := range pods {
		p := &pods[i]
		counts[shape{p.CPUMilli, p.Milli, p.Cards, p.Models}]++
	}
	shapes := make([]shape, 0, len(counts))
	for s := range counts {
		shapes = append(shapes, s)
	}
	slices.SortFunc(shapes, func(b, a shape) int {
		return cmp.Or(cmp.Compare(counts[a], counts[b]), cmp.Compare(a.cpu, b.cpu), cmp.Compare(a.milli, b.milli),
			cmp.Compare(a.cards, b.cards), strings.Compare(a.models, b.models))
	})
	f := &FGD{models: map[string][]bool{}}
	seen := 0
	for _, s := range shapes {
		if float64(seen) >= popular*float64(len(pods)) {
			break
		}
		seen += counts[s]
		t := task{cpu: s.cpu, milli: s.milli, cards: s.cards, part: float64(counts[s])}
		if s.models != "" {
			t.models = strings.Split(s.models, "|")
		}
		f.tasks = append(f.tasks, t)
	}
	for i := range f.tasks {
		f.tasks[i].part /= float64(seen)
	}
	return f
}

// allowed says which tasks may be on cards of the model.
func (f *FGD) allowed(model string) []bool {
	ok := f.models[model]
	if ok == nil {
		ok = make([]bool, len(f.tasks))
		for i := range f.tasks {
			ok[i] = len(f.tasks[i].models) == 0 || slices.Contains(f.tasks[i].models, model)
		}
		f.models[model] = ok
	}
	return ok
}

// fragment is the mean, over tasks, of what they can't use of the free cards.
func (f *FGD) fragment(cpu int64, cards []int64, allowed []bool) float64 {
	var free int64
	for _, c := range cards {
		free += c
	}
	if free == 0 {
		return 0
	}
	var sum float64
	for i := range f.tasks {
		t := &f.tasks[i]
		lost := free
		if t.milli > 0 && allowed[i] && t.cpu <= cpu {
			var small int64
			fits := 0
			for _, c := range cards {
				if c >= t.milli {
					fits++
				} else {
					small += c
				}
			}
			if fits >= t.cards {
				lost = small
			}
		}
		sum += float64(t.part * float64(lost))
	}
	return sum
}

// score is the published one: what fragment loses, squeezed into 0 to 100.
func score(before, after float64) int64 {
	return int64(100 / (1 + math.Exp((after-before)/1000)))
}

// Judge implements replay.Policy.
func (f *FGD) Judge(n *fit.Node, a *fit.Ask) (fit.Placement, int64, bool) {
	each, count := request(a)
	cards := f.scratch[:0]
	for i := range n.Cards {
		cards = append(cards, left(&n.Cards[i]))
	}
	f.scratch = cards
	model := ""
	if len(n.Cards) > 0 {
		model = n.Cards[0].Model
	}
	allowed := f.allowed(model)
	cpu := n.Host.CPUMilli - a.Host.CPUMilli
	if count == 1 && each < 1000 {
		var before float64
		best, asked := int64(0), false
		p, ok := fit.Choose(n, a, func(c *fit.Card, _ fit.Amount) int64 {
			if !asked {
				before = f.fragment(n.Host.CPUMilli, cards, allowed)
			}
			cards[c.Index] -= each
			s := score(before, f.fragment(cpu, cards, allowed))
			cards[c.Index] += each
			if !asked || s > best {
				best, asked = s, true
			}
			return -s
		})
		return p, -best, ok
	}
	p, ok := fit.Choose(n, a, bestCard)
	if !ok {
		return nil, 0, false
	}
	before := f.fragment(n.Host.CPUMilli, cards, allowed)
	for _, on := range p {
		for _, at := range on {
			cards[at] -= each
		}
	}
	return p, -score(before, f.fragment(cpu, cards, allowed)), true
}
