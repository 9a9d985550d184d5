package score

import (
	"slices"

	"github.com/carve-gpu/carve/scheduler-extender/fit"
	"github.com/carve-gpu/carve/scheduler-extender/price"
)

// Weights say how much each part of a cost counts. They are round numbers on purpose: results
// hardly move around them, and a finer choice would fit one trace.
type Weights struct {
	Regret   float64 // value that the card loses beyond the price of the share
	Fill     float64 // cards that stay unused when the node is filled up with pods of one kind
	CPUPoor  float64 // processors taken beyond the node's proportion
	Slots    float64 // places for pods of several cards that are lost
	Model    float64 // cards of a model that pods insist on
	Fragment float64 // free cards that the typical pod can't use: FGD's measure
}

// Usual are the weights of a cluster with room, Overloaded those while pods are turned away.
var (
	Usual      = Weights{Regret: 1.5, Fill: .25, CPUPoor: .25, Slots: .05, Model: .1}
	Overloaded = Weights{Regret: 1, Fill: .25, CPUPoor: .25, Slots: .05, Model: .1, Fragment: 1}
)

// one is a card; costs are whole numbers in parts of it.
const one = price.One

// bucket is the grain of costs: what differs by less is equal. Which of equals is taken should
// be left to chance, or to a hash of the pod: always the first one makes all kinds of pods meet on
// the same nodes, which leaves rests there that suit none of them.
const bucket = one / 10

// Prices are what costs are reckoned with: tables of a generation. They are never changed.
type Prices struct {
	// Generation tells prices apart; costs of different ones can't be compared.
	Generation uint64
	// Shapes are those that they were made of.
	Shapes []price.Shape

	weights  Weights
	families []*family // by memory of the card, ascending
	models   map[string]*market
	other    *market // of models that weren't in the fleet
}

// family is what cards of one size are worth.
type family struct {
	cardMiB int64
	table   *price.Table
	amount  []int64   // by state: what is left, in parts of One
	sizes   []share   // of the shapes that ask for a part of a card
	fits    [][]int64 // by state, then by size: how many go into what is left
	none    []int64   // by size: 0

	untouched int // state of a card that nothing is on
}

type share struct{ cores, mem int }

// kind is what typical pods ask, summed up.
type kind struct {
	cards    int // whole ones; 0 is a share
	size     int // which of the family's, of a share
	amount   int64
	cpu, mem int64
	part     int64 // of all pods that ask for cards, in parts of One
}

// market is the demand that may go to cards of one model, of one family.
type market struct {
	shapes  []kind
	others  int64 // part of the pods that may not be on this model
	noCards int64 // pods that ask for none, over those that do
	several []several
	insist  int64 // demand that insists on the model, over its cards
}

// several is a shape of more than one card, and what a place for it is worth.
type several struct {
	cards    int
	cpu, mem int64
	worth    int64
}

// NewPrices makes prices of what pods ask and of what there is.
func NewPrices(generation uint64, shapes []price.Shape, fleet Fleet, w Weights) *Prices {
	p := &Prices{Generation: generation, Shapes: shapes, weights: w, models: map[string]*market{}}
	var sizes []int64
	for i := range fleet {
		if !slices.Contains(sizes, fleet[i].CardMiB) {
			sizes = append(sizes, fleet[i].CardMiB)
		}
	}
	slices.Sort(sizes)
	for _, mib := range sizes {
		p.families = append(p.families, newFamily(mib, shapes))
	}
	if len(p.families) == 0 {
		p.families = []*family{newFamily(1<<14, shapes)}
	}
	for i := range fleet {
		f := &fleet[i]
		if p.models[f.Model] == nil {
			p.models[f.Model] = newMarket(f.Model, p.family(f.CardMiB), shapes, fleet)
		}
	}
	p.other = newMarket("", p.families[0], shapes, fleet)
	return p
}

// family is that of the card's size, or the next larger one.
func (p *Prices) family(mib int64) *family {
	for _, f := range p.families {
		if mib <= f.cardMiB {
			return f
		}
	}
	return p.families[len(p.families)-1]
}

func (p *Prices) market(model string) *market {
	if m := p.models[model]; m != nil {
		return m
	}
	return p.other
}

// percent rounds up what a container takes of a card.
func percent(a fit.Amount, mib int64) share {
	return share{a.Cores, int((a.MemMiB*100 + mib - 1) / max(1, mib))}
}

// asked is the whole of what an ask wants of cards of a size: of several containers those
// that run together, each share on a card of its own.
func asked(a *fit.Ask, mib int64) (whole int, shares []share) {
	card := fit.Card{MemMiB: mib, Slots: 1}
	for i := range a.Containers {
		c := &a.Containers[i]
		if c.Whole {
			whole = max(whole, c.Cards)
			continue
		}
		for range c.Cards {
			shares = append(shares, percent(c.On(&card), mib))
		}
	}
	return whole, shares
}

// popular is the part of all pods whose shapes stand for them all; the rest are many that come
// rarely.
const popular = 0.97

// unit is the grain of tables in two dimensions, in percent.
const unit = 1

func newFamily(mib int64, shapes []price.Shape) *family {
	f := &family{cardMiB: mib}
	var slots []price.Slot
	for _, s := range shapes {
		_, shares := asked(s.Ask, mib)
		for _, sh := range shares {
			slots = append(slots, price.Slot{Cores: sh.cores, Mem: sh.mem, Demand: s.Part})
			if !slices.Contains(f.sizes, sh) {
				f.sizes = append(f.sizes, sh)
			}
		}
	}
	f.table = price.Cut(slots, 100, unit)
	f.amount = make([]int64, f.table.States())
	f.fits = make([][]int64, f.table.States())
	f.none = make([]int64, len(f.sizes))
	f.untouched = f.table.State(100, 100)
	for state := range f.amount {
		f.amount[state] = f.table.Amount(state)
		f.fits[state] = make([]int64, len(f.sizes))
		for k, s := range f.sizes {
			f.fits[state][k] = int64(f.table.Fits(state, s.cores, s.mem))
		}
	}
	return f
}

// state of a card with so much in use.
func (f *family) state(c *fit.Card, used fit.Amount) int {
	if c.MemMiB <= 0 {
		return 0
	}
	return f.table.State(100-used.Cores, int((c.MemMiB-used.MemMiB)*100/c.MemMiB))
}

func newMarket(model string, f *family, shapes []price.Shape, fleet Fleet) *market {
	m := &market{}
	withCards, demand := 0.0, 0.0
	var whole []int
	var shares [][]share
	for _, s := range shapes {
		w, sh := asked(s.Ask, f.cardMiB)
		whole, shares = append(whole, w), append(shares, sh)
		if w > 0 || len(sh) > 0 {
			withCards += s.Part
		}
		demand += s.Part * volume(f, w, sh)
	}
	if withCards == 0 {
		return m
	}
	counted := 0.0
	m.noCards = int64((1 - withCards) / withCards * one)
	for i, s := range shapes {
		if whole[i] == 0 && len(shares[i]) == 0 {
			continue
		}
		selector := s.Ask.Models
		part := int64(s.Part / withCards * one)
		insists := len(selector.Only) > 0 || len(selector.Not) > 0
		if insists && !selector.Admits(model) {
			m.others += part
			continue
		}
		part64 := s.Part * volume(f, whole[i], shares[i]) / demand
		if insists {
			m.insist += int64(part64 / capacity(fleet, func(n *FleetNode) bool { return selector.Admits(n.Model) }) * one)
		}
		sh := kind{cards: whole[i], cpu: s.Ask.Host.CPUMilli, mem: s.Ask.Host.MemMiB, part: part, amount: int64(whole[i]) * one}
		if whole[i] == 0 {
			// One of the shares stands for a pod that has several: the largest.
			largest := slices.MaxFunc(shares[i], func(a, b share) int { return a.cores + a.mem - b.cores - b.mem })
			sh.size = slices.Index(f.sizes, largest)
			sh.amount = f.table.AmountOf(largest.cores, largest.mem)
			if len(shares[i]) > 1 {
				sh.cpu, sh.mem = sh.cpu/int64(len(shares[i])), sh.mem/int64(len(shares[i]))
			}
		}
		if counted < popular*withCards {
			m.add(sh)
		}
		counted += s.Part
		if whole[i] > 1 {
			h := s.Ask.Host
			can := capacity(fleet, func(n *FleetNode) bool {
				return n.Cards >= whole[i] && (!insists || selector.Admits(n.Model)) &&
					(!n.HostKnown || h.CPUMilli <= n.Host.CPUMilli && h.MemMiB <= n.Host.MemMiB)
			})
			if can > 0 {
				m.several = append(m.several, several{whole[i], h.CPUMilli, h.MemMiB, int64(float64(whole[i]) * min(1, part64/can) * one)})
			}
		}
	}
	m.normalise()
	m.expect(fleet)
	return m
}

// expected is the part of the demand that is taken to ask for a whole machine of each sort,
// though nobody has done so of late. Pods of that kind come rarely, and are turned away for good
// if the last machine that could have them is in use by then.
const expected = 0.005

// expect adds pods that take nearly all of a machine, for each sort that has several cards.
func (m *market) expect(fleet Fleet) {
	for i := range fleet {
		n := &fleet[i]
		if n.Cards < 4 {
			continue
		}
		can := capacity(fleet, func(o *FleetNode) bool {
			return o.Cards >= n.Cards && o.Host.CPUMilli >= n.Host.CPUMilli && o.Host.MemMiB >= n.Host.MemMiB
		})
		worth := float64(n.Cards) * min(1, expected/can) * one
		m.several = append(m.several, several{n.Cards, n.Host.CPUMilli * 15 / 16, n.Host.MemMiB * 3 / 4, int64(worth)})
	}
}

// normalise makes parts of shapes, of those on other models included, One together.
func (m *market) normalise() {
	sum := m.others
	for i := range m.shapes {
		sum += m.shapes[i].part
	}
	for i := range m.shapes {
		m.shapes[i].part = m.shapes[i].part * one / max(1, sum)
	}
	m.others = m.others * one / max(1, sum)
}

// add joins shapes that differ by the node's memory alone: that is never what is short.
func (m *market) add(s kind) {
	s.mem = 0
	for i := range m.shapes {
		if o := &m.shapes[i]; o.cards == s.cards && o.size == s.size && o.cpu == s.cpu && o.amount == s.amount {
			o.part += s.part
			return
		}
	}
	m.shapes = append(m.shapes, s)
}

// volume is what an ask takes of cards, in cards.
func volume(f *family, whole int, shares []share) float64 {
	v := float64(whole)
	for _, s := range shares {
		v += float64(f.table.AmountOf(s.cores, s.mem)) / one
	}
	return v
}

// capacity is the part of the fleet's cards that are on such nodes.
func capacity(fleet Fleet, on func(n *FleetNode) bool) float64 {
	n := 0
	for i := range fleet {
		if on(&fleet[i]) {
			n += fleet[i].Cards * fleet[i].Nodes
		}
	}
	return float64(n) / float64(max(1, fleet.cards()))
}
