package agent

import (
	"strings"
	"sync/atomic"
	"testing"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/v1alpha1"
)

// node-23: replicas of a card are counted, and what runs keeps what it has: more
// containers than a card has replicas now don't use up the slots of the others.
func TestReplicasAreReportedAndCounted(t *testing.T) {
	var slots atomic.Int64
	n := startNode(t, func(c *Config) { c.SlotsChanged = func(s int) { slots.Store(int64(s)) } })
	eventually(t, "two cards' slots", func() bool { return slots.Load() == 2*api.SlotsPerCard })
	both := []string{cardA, cardB}
	n.SetSharing(both, map[string]v1alpha1.Sharing{cardA: {Mode: "timeslice", Replicas: 4}, cardB: {Mode: "mps", Replicas: 2}})
	eventually(t, "replicas", func() bool { return slots.Load() == 6 })
	eventually(t, "a report of them", func() bool {
		s, _ := n.api.report()
		return len(s.Cards) == 2 && s.Cards[0].Sharing != nil && *s.Cards[0].Sharing == v1alpha1.Sharing{Mode: "timeslice", Replicas: 4} &&
			s.Cards[1].Sharing != nil && s.Cards[1].Sharing.Replicas == 2 && len(s.Cards[0].Modes) > 0 && s.Cards[0].Modes[0] == "timeslice"
	})
	n.SetSharing(both, nil)
	eventually(t, "no replicas", func() bool { return slots.Load() == 2*api.SlotsPerCard })
	for _, uid := range []string{"u1", "u2", "u3"} {
		n.api.setPod(podWith(t, uid, grantOf(uid, 1, map[string][]api.CardGrant{"app": shareOf(cardA, 100, 0)})))
	}
	n.link()
	eventually(t, "three slices", func() bool {
		s, _ := n.api.report()
		return len(s.Cards) == 2 && len(s.Cards[0].Slices) == 3
	})
	n.SetSharing(both, map[string]v1alpha1.Sharing{cardA: {Mode: "timeslice", Replicas: 2}, cardB: {Mode: "mps", Replicas: 2}})
	eventually(t, "three in use and two replicas", func() bool { return slots.Load() == 5 })
	n.api.deletePod("u1")
	eventually(t, "replicas alone", func() bool { return slots.Load() == 4 })
}

// A card that is to be shared isn't reported, and so not given whole, before that is
// known; nor one that has come since.
func TestNothingIsReportedBeforeTheConfigurationIsKnown(t *testing.T) {
	asked := make(chan struct{}, 100)
	n := startNode(t, func(c *Config) {
		c.CardsChanged = func() {
			select {
			case asked <- struct{}{}:
			default:
			}
		}
	})
	<-asked
	if s, _ := n.api.report(); len(s.Cards) > 0 {
		t.Fatalf("reported before: %+v", s.Cards)
	}
	n.SetSharing([]string{cardA}, nil)
	<-asked
	if s, _ := n.api.report(); len(s.Cards) > 0 {
		t.Fatalf("reported before the second card's was known: %+v", s.Cards)
	}
	n.SetSharing([]string{cardA, cardB}, map[string]v1alpha1.Sharing{cardB: {Mode: "timeslice", Replicas: 4}})
	eventually(t, "a report", func() bool {
		s, _ := n.api.report()
		return len(s.Cards) == 2 && s.Cards[0].Sharing == nil && s.Cards[1].Sharing != nil
	})
	n.SharingSaid(true, "it can't be meant")
	eventually(t, "an event", func() bool {
		return strings.Contains(n.api.said(), nodeName+" SharingConfigRefused: it can't be meant")
	})
}
