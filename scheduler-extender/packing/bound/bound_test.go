package bound_test

import (
	"math"
	"testing"

	"github.com/carve-gpu/carve/scheduler-extender/packing/bound"
	"github.com/carve-gpu/carve/scheduler-extender/packing/openb"
	"github.com/carve-gpu/carve/scheduler-extender/packing/replay"
)

func TestPrefix(t *testing.T) {
	nodes := []openb.Node{{Cards: 2, Model: "G2"}, {Cards: 2, Model: "T4"}}
	share := func(milli int64) openb.Pod { return openb.Pod{Cards: 1, Milli: milli} }
	g2 := openb.Pod{Cards: 2, Milli: openb.Card, Models: "G2"}
	for name, c := range map[string]struct {
		pods []openb.Pod
		want float64
	}{
		"all of it fits":                  {[]openb.Pod{share(500), share(500), g2}, 75},
		"shares that leave holes":         {[]openb.Pod{share(600), share(600), share(600), share(600), share(600)}, 60},
		"two models' cards, one's demand": {[]openb.Pod{g2, {Cards: 1, Milli: 1000, Models: "G2"}, share(500)}, 50},
		"no card":                         {[]openb.Pod{{CPUMilli: 5}}, 0},
	} {
		if got := bound.Prefix(openb.Order{Nodes: nodes, Pods: c.pods}); math.Abs(got-c.want) > 1e-6 {
			t.Errorf("%s: %v %%, want %v", name, got, c.want)
		}
	}
}

// TestTheBoundOfTheTrace is what facts of the experiment say: 96.3 %.
func TestTheBoundOfTheTrace(t *testing.T) {
	trace, err := openb.Draw(1)
	if err != nil {
		t.Fatal(err)
	}
	if trace.Capacity() != 6212*openb.Card || len(trace.Nodes) != 1213 {
		t.Fatalf("%d nodes, %d thousandths of cards", len(trace.Nodes), trace.Capacity())
	}
	if got := bound.Prefix(openb.Arrivals(trace, replay.Ratio, 42)); got < 95.8 || got > 96.8 {
		t.Errorf("%.2f %%", got)
	}
}
