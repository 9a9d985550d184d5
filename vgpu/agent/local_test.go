package agent

import (
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"

	"github.com/carve-gpu/carve/api"
)

// firstFit places pods with one container on the first card with enough memory.
func firstFit(p LocalPod) (api.Grant, error) {
	ask := p.Request.Containers[0]
	for _, r := range p.Cards {
		if !r.Unfit && !r.Cordoned && !r.Whole && r.UsedMiB+ask.MemMiB <= r.MemMiB && r.UsedSlots < r.Slots {
			g := grantOf(p.UID, 1, map[string][]api.CardGrant{ask.Name: shareOf(r.UUID, ask.MemMiB, ask.Cores)})
			return g, nil
		}
	}
	return api.Grant{}, fmt.Errorf("no card has %d MiB", ask.MemMiB)
}

func placesLocally(c *Config) { c.Place = firstFit }

// past makes a pod that came past the extender.
func past(uid, mib string) *corev1.Pod {
	p := &corev1.Pod{}
	p.Name, p.Namespace, p.UID = "pod-"+uid, "default", types.UID(uid)
	p.Spec.NodeName = nodeName
	p.Spec.Containers = []corev1.Container{{Name: "app", Resources: corev1.ResourceRequirements{
		Limits: corev1.ResourceList{api.ResourceMemory: resource.MustParse(mib)}}}}
	return p
}

func TestPodsPastTheExtenderGetNoCardUnlessTheNodeMayChoose(t *testing.T) {
	n := startNode(t)
	n.link()
	n.api.setPod(past("uid-1", "8000"))
	eventually(t, "the container is refused", func() bool {
		_, err := n.Slice(RuntimeContainer{ID: "c", PodUID: "uid-1", Name: "app"})
		return err != nil && strings.Contains(err.Error(), "came past carve's scheduler extender")
	})
	if left := n.leftovers(); len(left) != 0 {
		t.Errorf("left behind: %v", left)
	}
}

func TestTheNodePlacesPodsThatCamePastTheExtender(t *testing.T) {
	n := startNode(t, placesLocally)
	n.link()
	whole := int64(81408) // of a card, less what its driver keeps
	// One with a grant comes first, and leaves 1408 MiB of the first card.
	n.api.setPod(podWith(t, "uid-granted", grantOf("uid-granted", 1, map[string][]api.CardGrant{"app": shareOf(cardA, whole-1408, 0)})))
	n.api.setPod(past("uid-local", "8000"))
	eventually(t, "both are prepared", func() bool { return n.prepared("uid-granted", "app") && n.prepared("uid-local", "app") })
	eventually(t, "the report shows it where it fits", func() bool {
		s, _ := n.api.report()
		return slicesOf(s, cardB) == "uid-local/app=prepared" && slicesOf(s, cardA) == "uid-granted/app=prepared"
	})
	if err := n.AwaitPrepared(t.Context(), "default", "pod-uid-local", "app"); err != nil {
		t.Errorf("the kubelet is told %v", err)
	}
	n.Adjusted(RuntimeContainer{ID: "c1", PodUID: "uid-local", Name: "app"})

	// A grant that was in flight: the node took the room, so it is refused, and
	// nothing is over-committed.
	n.api.setPod(podWith(t, "uid-late", grantOf("uid-late", 1, map[string][]api.CardGrant{"app": shareOf(cardB, whole-7999, 0)})))
	eventually(t, "the grant that doesn't fit is refused", func() bool { return strings.Contains(n.refusal("uid-late"), "8000 are in use") })

	// One more than fits waits, with a reason, until there is room.
	n.api.setPod(past("uid-waits", "80000"))
	eventually(t, "it is refused", func() bool { return strings.Contains(n.refusal("uid-waits"), "no card has 80000 MiB") })
	eventually(t, "an event", func() bool { return strings.Contains(n.api.said(), "pod-uid-waits GrantRefused: the pod came past") })

	// The choice outlasts the agent, and a policy that changed meanwhile.
	n.stop()
	n.edit = nil
	n.start()
	n.link(RuntimeContainer{ID: "c1", PodUID: "uid-local", Name: "app", Adjusted: true})
	eventually(t, "it has its slice still", func() bool { return n.prepared("uid-local", "app") })
	eventually(t, "it is reported as before", func() bool { s, _ := n.api.report(); return slicesOf(s, cardB) == "uid-local/app=active" })
	n.stop()
	n.edit = []func(*Config){placesLocally}
	n.start()
	n.link(RuntimeContainer{ID: "c1", PodUID: "uid-local", Name: "app", Adjusted: true})
	eventually(t, "the one that waits is refused again", func() bool { return n.refusal("uid-waits") != "" })
	n.api.deletePod("uid-local")
	n.api.deletePod("uid-late")
	n.Exited("c1")
	eventually(t, "the room goes to the one that waits", func() bool { return n.prepared("uid-waits", "app") })
	n.api.deletePod("uid-waits")
	n.api.deletePod("uid-granted")
	eventually(t, "nothing is left", func() bool { return len(n.leftovers()) == 0 })
}

// A grant that the watch has shown counts, even if it isn't in place yet.
func TestGrantsOnTheirWayCount(t *testing.T) {
	n := startNode(t)
	n.link()
	eventually(t, "the cards are known", n.hardwareReady)
	n.mu.Lock()
	defer n.mu.Unlock()
	n.pods["uid-way"] = readPod(podWith(t, "uid-way", grantOf("uid-way", 1, map[string][]api.CardGrant{"app": shareOf(cardA, 5000, 20)})))
	n.cordoned = []string{cardB}
	rooms := n.rooms(n.ledger())
	if r := rooms[0]; r.UsedMiB != 5000 || r.UsedCores != 20 || r.UsedSlots != 1 || !r.Touched || r.Slots != api.SlotsPerCard {
		t.Errorf("%+v", r)
	}
	if r := rooms[1]; r.Touched || !r.Cordoned {
		t.Errorf("%+v", r)
	}
	n.refused["uid-way"] = "it is forged"
	if r := n.rooms(n.ledger())[0]; r.Touched {
		t.Errorf("a refused grant counts: %+v", r)
	}
}

func TestARequestThatCannotBeMeantIsRefusedByTheNodeToo(t *testing.T) {
	n := startNode(t, placesLocally)
	n.link()
	p := past("uid-1", "8000")
	p.Spec.Containers[0].Resources.Limits[api.ResourceCores] = resource.MustParse("101")
	n.api.setPod(p)
	eventually(t, "it is refused", func() bool { return strings.Contains(n.refusal("uid-1"), "nvidia.com/gpucores") })
}
