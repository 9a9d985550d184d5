package agent

import (
	"testing"

	"github.com/carve-gpu/carve/api"
)

// After the API server was away the watch of pods comes back seconds later than its
// answers do. A pod that lived and died in between was never in the watch, so no event
// says that it is gone (seen with the API server killed and a pod made and deleted right
// after: its slices stayed for good).
func TestAPodThatTheWatchNeverShowedIsReleased(t *testing.T) {
	for name, same := range map[string]bool{"gone": false, "replaced by one of its name": true} {
		t.Run(name, func(t *testing.T) {
			n := startNode(t)
			n.link()
			eventually(t, "pods are known", func() bool { n.mu.Lock(); defer n.mu.Unlock(); return n.watched && n.hardware.known })
			n.api.setMute(true)
			annotations := map[string]string{configSource: "api"}
			for _, uid := range []string{"uid-1", "uid-2"} {
				g := grantOf(uid, 1, map[string][]api.CardGrant{"app": shareOf(cardA, 100, 0)})
				text, err := g.Encode()
				if err != nil {
					t.Fatal(err)
				}
				n.api.setPod(podWith(t, uid, g))
				annotations[api.AnnotationGrant] = text
				n.SandboxStarted(uid, "default", "pod-"+uid, annotations)
				eventually(t, "the slice is prepared", func() bool { return n.prepared(uid, "app") })
			}
			n.Adjusted(RuntimeContainer{ID: "one", PodUID: "uid-1", Name: "app", Adjusted: true})
			n.api.deletePod("uid-1")
			if same {
				next := podWith(t, "uid-3", grantOf("uid-3", 1, map[string][]api.CardGrant{"app": shareOf(cardA, 100, 0)}))
				next.Name = "pod-uid-1"
				n.api.setPod(next)
			}
			n.Exited("one")
			eventually(t, "the slice of the pod that is gone is released", func() bool { return !n.prepared("uid-1", "app") })
			if !n.prepared("uid-2", "app") {
				t.Error("the slice of a pod that lives went")
			}
			n.api.setMute(false)
			eventually(t, "the watch shows the pod that lives", func() bool {
				n.mu.Lock()
				defer n.mu.Unlock()
				p, known := n.pods["uid-2"]
				return known && p.asked.IsZero()
			})
			n.api.deletePod("uid-2")
			if same {
				n.api.deletePod("uid-3")
			}
			eventually(t, "nothing is left", func() bool { return len(n.leftovers()) == 0 })
		})
	}
}
