package score

import (
	"slices"

	"github.com/carve-gpu/carve/scheduler-extender/fit"
	"github.com/carve-gpu/carve/scheduler-extender/price"
)

const (
	// drifted is by how much what pods ask must have changed for new prices. It is above what
	// chance alone changes in a mix of some hundred shapes.
	drifted = 0.08
	// lookEvery is after how many arrivals that is looked at, once the first few are past.
	lookEvery = 512

	// Of cards that were asked for and not given, as a moving mean over pods: above the
	// first the cluster is overloaded, below the second it isn't any more.
	overloadAbove, overloadBelow = 0.008, 0.002
	overloadMean                 = 2000
)

// Learner makes prices of the pods that arrive. It isn't safe for concurrent use.
type Learner struct {
	fleet      Fleet
	mix        *price.Mix
	prices     *Prices
	arrivals   int
	next       int // arrivals at which the mix is looked at
	refused    float64
	overloaded bool
	several    map[string]bool // pods of several cards that were seen
	news       bool            // some of them after prices were made last
	// Fixed keeps the weights as they are, whatever is turned away.
	Fixed bool
}

// NewLearner begins with prices for a common mix of pods.
func NewLearner(fleet Fleet) *Learner {
	l := &Learner{fleet: fleet, mix: price.NewMix(0), next: 16, several: map[string]bool{}}
	l.prices = NewPrices(1, price.Common(), fleet, Usual)
	return l
}

// Prices as of now.
func (l *Learner) Prices() *Prices { return l.prices }

// Arrived counts a pod, and whether it got its cards. It reports whether prices are others now.
func (l *Learner) Arrived(a *fit.Ask, placed bool) bool {
	l.mix.Add(a)
	l.arrivals++
	changed := false
	if cards := l.cards(a); cards > 1 && !l.several[a.Key()] {
		l.several[a.Key()], l.news = true, true
	}
	if cards := l.cards(a); cards > 0 {
		was := 0.0
		if !placed {
			was = cards
		}
		l.refused += (was - l.refused) / overloadMean
		switch {
		case l.Fixed:
		case !l.overloaded && l.refused > overloadAbove, l.overloaded && l.refused < overloadBelow:
			l.overloaded, changed = !l.overloaded, true
		}
	}
	if l.arrivals >= l.next {
		l.next = max(4*l.next, lookEvery)
		if l.arrivals >= lookEvery {
			l.next = l.arrivals + lookEvery
		}
		if shapes := l.mix.Shapes(); l.news || l.prices.Generation == 1 || price.Drift(shapes, l.prices.Shapes) > drifted {
			l.news = false
			l.make(shapes)
			return true
		}
	}
	if changed {
		l.make(l.prices.Shapes)
	}
	return changed
}

// SetFleet says what nodes there are now, and reports whether prices are others for that.
func (l *Learner) SetFleet(f Fleet) bool {
	if slices.Equal(f, l.fleet) {
		return false
	}
	l.fleet = slices.Clone(f)
	l.make(l.prices.Shapes)
	return true
}

func (l *Learner) make(shapes []price.Shape) {
	w := Usual
	if l.overloaded {
		w = Overloaded
	}
	l.prices = NewPrices(l.prices.Generation+1, shapes, l.fleet, w)
}

// cards is what an ask takes of cards of the fleet's usual size.
func (l *Learner) cards(a *fit.Ask) float64 {
	f := l.prices.families[0]
	whole, shares := asked(a, f.cardMiB)
	return volume(f, whole, shares)
}

// Know gives the learner what pods will ask, and it learns no more.
func (l *Learner) Know(shapes []price.Shape) {
	l.next = 1 << 62
	l.make(shapes)
}
