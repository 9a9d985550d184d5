package replay

import (
	"strings"
	"testing"

	"github.com/carve-gpu/carve/scheduler-extender/fit"
	"github.com/carve-gpu/carve/scheduler-extender/packing/openb"
)

// TestTheCheckFindsWhatIsWrong makes decisions of each kind that must not be.
func TestTheCheckFindsWhatIsWrong(t *testing.T) {
	order := openb.Order{
		Nodes: []openb.Node{{Name: "a", CPUMilli: 4000, MemMiB: 4000, Cards: 2, Model: "G2"}, {Name: "b", CPUMilli: 4000, MemMiB: 4000, Cards: 1, Model: "T4"}},
		Pods: []openb.Pod{
			{CPUMilli: 1000, MemMiB: 100, Cards: 1, Milli: 600},
			{CPUMilli: 1000, MemMiB: 100, Cards: 1, Milli: 600, Models: "T4"},
			{CPUMilli: 2500, MemMiB: 100},
			{CPUMilli: 500, MemMiB: 100, Cards: 2, Milli: 1000},
		},
	}
	on := func(node int, cards ...int) placed { return placed{node, fit.Placement{cards}} }
	none := placed{-1, nil}
	for name, c := range map[string]struct {
		decisions []placed
		says      string
	}{
		"all right":                        {[]placed{on(0, 0), on(1, 0), {0, fit.Placement{}}, none}, ""},
		"a card that holds too much":       {[]placed{on(1, 0), on(1, 0), {0, fit.Placement{}}, none}, "card 0 of node 1"},
		"a model that isn't allowed":       {[]placed{on(0, 0), on(0, 1), {0, fit.Placement{}}, none}, "model G2"},
		"too little processor":             {[]placed{on(0, 0), on(1, 0), {0, fit.Placement{}}, on(0, 0, 1)}, "holds"},
		"one card instead of two":          {[]placed{on(0, 0), on(1, 0), {0, fit.Placement{}}, on(0, 1)}, "asked 2 cards"},
		"the same card twice":              {[]placed{none, on(1, 0), {0, fit.Placement{}}, on(0, 1, 1)}, "twice"},
		"a pod turned away that would fit": {[]placed{on(0, 0), none, {0, fit.Placement{}}, none}, "turned away"},
	} {
		t.Run(name, func(t *testing.T) {
			arrivals, err := NewArrivals(order.Pods)
			if err != nil {
				t.Fatal(err)
			}
			cluster := NewCluster(order.Nodes)
			for i, d := range c.decisions {
				if d.node >= 0 {
					cluster.place(d.node, &arrivals[i], d.p)
				}
			}
			err = check(order, cluster, arrivals, c.decisions)
			if (err == nil) != (c.says == "") || err != nil && !strings.Contains(err.Error(), c.says) {
				t.Fatalf("%v, should say %q", err, c.says)
			}
		})
	}
}
