package rank_test

import (
	"fmt"
	"hash/fnv"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/carve-gpu/carve/scheduler-extender/rank"
)

// TestAnIndexAgreesWithAskingAllNodes changes nodes at random and compares with a scan.
func TestAnIndexAgreesWithAskingAllNodes(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, 40).Draw(t, "nodes")
		x := rank.New(n)
		costs := make([][]int64, rapid.IntRange(1, 300).Draw(t, "classes"))
		// Some nodes have no state that anybody knows, others are told apart by their costs.
		state := func(node int) uint64 {
			h := fnv.New64a()
			for c := range min(8, len(costs)) {
				fmt.Fprint(h, costs[c][node], ";")
			}
			return h.Sum64() * uint64(node%3)
		}
		draw := rapid.OneOf(rapid.Int64Range(-3, 3), rapid.Just(rank.None))
		for c := range costs {
			costs[c] = make([]int64, n)
			for i := range costs[c] {
				costs[c][i] = draw.Draw(t, "cost")
			}
			if c >= 8 {
				costs[c] = costs[c%8]
			}
		}
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			switch rapid.IntRange(0, 9).Draw(t, "step") {
			case 0:
				costs[0][0] = draw.Draw(t, "cost")
				x.Touch(0, state(0))
				x.Reset()
			case 1, 2, 3:
				node := rapid.IntRange(0, n-1).Draw(t, "node")
				for c := range min(8, len(costs)) {
					costs[c][node] = draw.Draw(t, "cost")
				}
				for range rapid.IntRange(1, 3*n).Draw(t, "touches") {
					x.Touch(node, state(node))
				}
			}
			c := rapid.IntRange(0, len(costs)-1).Draw(t, "class")
			cost := func(node int) int64 { return costs[c][node] }
			least := slices.Min(costs[c])
			want := -1
			var ties []int
			for i, v := range costs[c] {
				if v == least && v != rank.None {
					if ties = append(ties, i); want < 0 {
						want = i
					}
				}
			}
			key := fmt.Sprint(c)
			if got, v := x.Best(key, cost); got != want || v != least {
				t.Fatalf("class %d: node %d at %d, want %d at %d", c, got, v, want, least)
			}
			choice := rapid.Uint64().Draw(t, "choice")
			got, v := x.Any(key, cost, choice)
			if again, _ := x.Any(key, cost, choice); again != got || v != least || (got < 0) != (want < 0) || got >= 0 && !slices.Contains(ties, got) {
				t.Fatalf("class %d: node %d, then %d at %d of %v", c, got, again, v, ties)
			}
			if got := x.Ties(key, cost, nil); !slices.Equal(got, ties) {
				t.Fatalf("class %d: ties %v, want %v", c, got, ties)
			}
		}
	})
}

// TestOnlyChangedNodesAreAsked is what the index is for.
func TestOnlyChangedNodesAreAsked(t *testing.T) {
	const n = 1000
	x := rank.New(n)
	cost := func(node int) int64 { return int64(node) }
	x.Best("a", cost)
	for _, node := range []int{3, 4, 3} {
		x.Touch(node, 0)
	}
	before := x.Judged
	x.Best("a", cost)
	if asked := x.Judged - before; asked != 2 {
		t.Errorf("%d nodes were asked after two changed", asked)
	}
	x.Best("a", cost)
	if asked := x.Judged - before; asked != 2 {
		t.Errorf("%d nodes were asked after two changed", asked)
	}
}
