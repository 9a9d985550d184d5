package agent

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/v1alpha1"
)

// A pod that came and went between two reports is told of, for the extender counts it
// until it hears; one that a report showed isn't.
func TestAPodThatNoReportShowedIsToldToBeReleased(t *testing.T) {
	n := startNode(t)
	n.link()
	eventually(t, "the node is reported", func() bool { s, _ := n.api.report(); return s.HookConnectedSince != nil })
	take := func(uid string, shown bool) {
		t.Helper()
		n.api.setPod(podWith(t, uid, grantOf(uid, 1, map[string][]api.CardGrant{"app": shareOf(cardA, 100, 0)})))
		eventually(t, "the slice is prepared", func() bool { return n.prepared(uid, "app") })
		if shown {
			n.Adjusted(RuntimeContainer{ID: uid, PodUID: uid, Name: "app"})
			eventually(t, "the slice is reported", func() bool { s, _ := n.api.report(); return s.Summary.Slices == 1 })
			n.Exited(uid)
		} else {
			n.mu.Lock()
			n.held[uid].preparedAt = time.Now().Add(time.Hour) // no report shows it by itself
			n.mu.Unlock()
		}
		n.api.deletePod(uid)
	}
	take("uid-1", false)
	eventually(t, "the report says that it is released", func() bool {
		s, _ := n.api.report()
		return slices.Equal(s.Released, []string{"uid-1"}) && s.Summary.Slices == 0
	})
	_, before := n.api.report()
	n.report()
	time.Sleep(5 * gatherAtMost)
	if s, writes := n.api.report(); writes != before || len(s.Released) != 1 {
		t.Fatalf("%d writes without a change; released are %v", writes-before, s.Released)
	}
	take("uid-2", true)
	eventually(t, "the report shows none", func() bool { s, _ := n.api.report(); return s.Summary.Slices == 0 })
	if s, _ := n.api.report(); len(s.Released) != 0 {
		t.Errorf("released are %v: a report showed that one", s.Released)
	}
}

// Many at once: the report names the last ones.
func TestTheReportNamesABoundedNumberOfReleasedPods(t *testing.T) {
	a := &Agent{held: map[string]*holding{}}
	for i := range v1alpha1.MaxReleased + 10 {
		uid := fmt.Sprint("uid-", i)
		a.held[uid] = &holding{}
		a.letGo(uid)
		a.letGo(uid)
	}
	if n := len(a.unshown); n != v1alpha1.MaxReleased || a.unshown[n-1] != fmt.Sprint("uid-", n+9) || a.unshown[0] != "uid-10" {
		t.Errorf("%d are named, from %s to %s", n, a.unshown[0], a.unshown[n-1])
	}
	a.shown(v1alpha1.GPUNodeStatus{Released: slices.Clone(a.unshown[:5])})
	if a.unshown[0] != "uid-15" {
		t.Errorf("after a report that named five the first is %s", a.unshown[0])
	}
}
