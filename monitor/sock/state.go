package sock

import (
	"sort"

	"google.golang.org/protobuf/proto"

	nodev1 "github.com/carve-gpu/carve/api/node/v1"
	"github.com/carve-gpu/carve/monitor"
)

// state is what a watch has told: cards and slices by their identity.
type state struct {
	cards  map[string]*nodev1.Card
	slices map[string]*nodev1.Slice
}

// stateOf takes a view apart; without usage, what changes by itself is left
// out.
func stateOf(v monitor.View, usage bool) state {
	s := state{map[string]*nodev1.Card{}, map[string]*nodev1.Slice{}}
	for _, c := range cards(v) {
		if !usage {
			c.UsedBytes = 0
		}
		s.cards[c.GetUuid()] = c
	}
	for _, sl := range slices(v) {
		if !usage {
			sl.UsedBytes, sl.ResidualBytes, sl.PeakBytes, sl.Refusals, sl.Processes = 0, 0, 0, 0, 0
		}
		s.slices[sliceKey(sl)] = sl
	}
	return s
}

// diff is what leads from one state to the other: slices go before their
// cards, and come after them.
func diff(from, to state) []*nodev1.WatchResponse {
	var out []*nodev1.WatchResponse
	card := func(t nodev1.WatchResponse_Type, c *nodev1.Card) {
		out = append(out, &nodev1.WatchResponse{Type: t, Thing: &nodev1.WatchResponse_Card{Card: c}})
	}
	slice := func(t nodev1.WatchResponse_Type, s *nodev1.Slice) {
		out = append(out, &nodev1.WatchResponse{Type: t, Thing: &nodev1.WatchResponse_Slice{Slice: s}})
	}
	for _, k := range keys(from.slices) {
		if to.slices[k] == nil {
			slice(nodev1.WatchResponse_REMOVED, from.slices[k])
		}
	}
	for _, k := range keys(from.cards) {
		if to.cards[k] == nil {
			card(nodev1.WatchResponse_REMOVED, from.cards[k])
		}
	}
	for _, k := range keys(to.cards) {
		if was, is := from.cards[k], to.cards[k]; was == nil {
			card(nodev1.WatchResponse_ADDED, is)
		} else if !proto.Equal(was, is) {
			card(nodev1.WatchResponse_CHANGED, is)
		}
	}
	for _, k := range keys(to.slices) {
		if was, is := from.slices[k], to.slices[k]; was == nil {
			slice(nodev1.WatchResponse_ADDED, is)
		} else if !proto.Equal(was, is) {
			slice(nodev1.WatchResponse_CHANGED, is)
		}
	}
	return out
}

func keys[T any](m map[string]T) []string {
	out := make([]string, 0, len(m))
	for k := range m {
		out = append(out, k)
	}
	sort.Strings(out)
	return out
}
