package audit

import (
	"fmt"
	"strings"

	"github.com/carve-gpu/carve/api"
)

// Amount is what pods hold of a card. Whole counts those that hold all of it.
type Amount struct {
	MemMiB int64
	Cores  int
	Whole  int
	Pods   int
	// Mode is that of shares, or several with a plus between them.
	Mode string
}

func modes(a, b string) string {
	switch {
	case a == "" || a == b:
		return b
	case b == "":
		return a
	}
	return a + "+" + b
}

func (a Amount) plus(b Amount) Amount {
	return Amount{a.MemMiB + b.MemMiB, a.Cores + b.Cores, a.Whole + b.Whole, a.Pods + b.Pods, modes(a.Mode, b.Mode)}
}

func (a Amount) max(b Amount) Amount {
	return Amount{max(a.MemMiB, b.MemMiB), max(a.Cores, b.Cores), max(a.Whole, b.Whole), max(a.Pods, b.Pods), modes(a.Mode, b.Mode)}
}

// over says in what way an amount is more than one card.
func (a Amount) over(memMiB int64) string {
	switch {
	case strings.Contains(a.Mode, "+"):
		return "its pods are in modes " + a.Mode
	case a.Whole > 1, a.Whole == 1 && a.Pods > 1:
		return fmt.Sprintf("it is held whole by %d of %d pods on it", a.Whole, a.Pods)
	case a.MemMiB > memMiB:
		return fmt.Sprintf("%d MiB are given of %d", a.MemMiB, memMiB)
	case a.Cores > 100:
		return fmt.Sprintf("%d percent of its compute are given", a.Cores)
	}
	return ""
}

// Peak is the most that a pod holds of a card over its life: init containers
// run one after another beside the sidecars that started before them, app
// containers all at once beside all sidecars. It is written anew here, so that
// extender and agent are held against something that is neither's.
func Peak(g api.Grant, order []PodContainer, card string) Amount {
	if len(order) == 0 {
		for name := range g.Containers {
			order = append(order, PodContainer{Name: name, Kind: api.App})
		}
	}
	var peak, sidecars, apps Amount
	for _, c := range order {
		cg, ok := cardGrant(&g, c.Name, card)
		if !ok {
			continue
		}
		a := Amount{MemMiB: cg.MemMiB, Cores: cg.Cores, Mode: string(cg.Mode)}
		if !cg.Mode.Share() {
			a = Amount{Whole: 1}
		}
		switch c.Kind {
		case api.Init:
			peak = peak.max(sidecars.plus(a))
		case api.Sidecar:
			sidecars = sidecars.plus(a)
			peak = peak.max(sidecars)
		default:
			apps = apps.plus(a)
		}
	}
	peak = peak.max(sidecars.plus(apps))
	// However many of its containers are on the card, the pod is there once.
	peak.Whole = min(peak.Whole, 1)
	if peak != (Amount{}) {
		peak.Pods = 1
	}
	return peak
}
