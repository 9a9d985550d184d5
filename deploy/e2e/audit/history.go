package audit

import (
	"fmt"
	"maps"
	"slices"
	"sync"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/v1alpha1"
)

// History is what the API server said of one node's pods and of its report, in
// the order in which it happened. A look at a busy node can't tell a card that
// was given away twice for a moment from two looks at different moments; the
// order of the writes can. It may be used concurrently.
type History struct {
	mu     sync.Mutex
	events []event
	// grants are all that a pod ever carried.
	grants map[string][]api.Grant
}

type event struct {
	version uint64
	pod     *Pod
	gone    string // UID of a pod that was deleted
	cards   []v1alpha1.Card
}

// NewHistory makes an empty one.
func NewHistory() *History { return &History{grants: map[string][]api.Grant{}} }

// SawPod enters a pod as it was from a resource version on.
func (h *History) SawPod(version uint64, p Pod) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.events = append(h.events, event{version: version, pod: &p})
	if p.Grant != nil && !slices.ContainsFunc(h.grants[p.UID], func(g api.Grant) bool { return sameGrant(g, *p.Grant) }) {
		h.grants[p.UID] = append(h.grants[p.UID], *p.Grant)
	}
}

// SawNoPod enters that a pod was gone from a resource version on.
func (h *History) SawNoPod(version uint64, uid string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.events = append(h.events, event{version: version, gone: uid})
}

// SawReport enters the report as it was from a resource version on.
func (h *History) SawReport(version uint64, cards []v1alpha1.Card) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.events = append(h.events, event{version: version, cards: cards})
}

// Len is the number of events.
func (h *History) Len() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.events)
}

// DoubleBookings says when a card was given away beyond what it has: to pods
// that live, and to pods that are over or gone and that the report still showed
// at work. Each set of pods is named once.
func (h *History) DoubleBookings() []string {
	h.mu.Lock()
	events := slices.Clone(h.events)
	h.mu.Unlock()
	slices.SortStableFunc(events, func(a, b event) int {
		switch {
		case a.version < b.version:
			return -1
		case a.version > b.version:
			return 1
		}
		return 0
	})
	var out []string
	said := map[string]bool{}
	pods, gone := map[string]Pod{}, map[string]bool{}
	var cards []v1alpha1.Card
	for _, e := range events {
		switch {
		case e.pod != nil:
			pods[e.pod.UID] = *e.pod
		case e.gone != "":
			gone[e.gone] = true
		default:
			cards = e.cards
		}
		for _, card := range cards {
			var total Amount
			var who []string
			for _, uid := range slices.Sorted(maps.Keys(pods)) {
				if a := held(pods[uid], gone[uid], card); a.Pods > 0 {
					total = total.plus(a)
					who = append(who, pods[uid].Name)
				}
			}
			if fault := total.over(card.MemoryMiB); fault != "" {
				key := fmt.Sprint(card.UUID, who)
				if !said[key] {
					said[key] = true
					out = append(out, fmt.Sprintf("card %s at version %d: %s: pods %v", card.UUID, e.version, fault, who))
				}
			}
		}
		// What nobody can hold any more needn't be looked at again.
		for uid := range gone {
			if held := reported(uid, cards); !held {
				delete(pods, uid)
				delete(gone, uid)
			}
		}
	}
	return out
}

func reported(uid string, cards []v1alpha1.Card) bool {
	for _, c := range cards {
		if slices.ContainsFunc(c.Slices, func(s v1alpha1.Slice) bool { return s.PodUID == uid }) {
			return true
		}
	}
	return false
}

// held is what a pod holds of a card: what it was granted, or where the report
// shows more, that; once it is over or gone only what the report shows at work.
func held(p Pod, gone bool, card v1alpha1.Card) Amount {
	live := p.live() && !gone
	g := api.Grant{Containers: map[string][]api.CardGrant{}}
	if live {
		for name, cards := range p.Grant.Containers {
			g.Containers[name] = slices.Clone(cards)
		}
	}
	for _, s := range card.Slices {
		if s.PodUID != p.UID || !live && s.State != v1alpha1.Active {
			continue
		}
		cg := api.CardGrant{Card: card.UUID, MemMiB: s.MemMiB, Cores: int(s.Cores), Mode: api.Mode(s.Mode)}
		at := slices.IndexFunc(g.Containers[s.Container], func(c api.CardGrant) bool { return c.Card == card.UUID })
		if at < 0 {
			g.Containers[s.Container] = append(g.Containers[s.Container], cg)
			continue
		}
		was := &g.Containers[s.Container][at]
		was.MemMiB, was.Cores = max(was.MemMiB, cg.MemMiB), max(was.Cores, cg.Cores)
	}
	return Peak(g, p.Containers, card.UUID)
}

// Strange says in what way a running container has what its pod was never
// granted: limits of another, or another's card. A container with nothing at
// all is none of that, since the hook may have been away; nor is one of a pod
// that the history doesn't know yet.
func (h *History) Strange(k Container) string {
	if k.Limits == nil && len(k.Cards) == 0 {
		return ""
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	grants, known := h.grants[k.UID]
	if !known {
		return ""
	}
	for _, g := range grants {
		var cards []string
		for _, cg := range g.Containers[k.Name] {
			cards = append(cards, cg.Card)
		}
		slices.Sort(cards)
		if maps.Equal(wantLimits(&g, k.Name), k.Limits) && slices.Equal(cards, slices.Sorted(slices.Values(k.Cards))) {
			return ""
		}
	}
	return fmt.Sprintf("pod %s container %s (%s) maps %v and has cards %v; it was granted %+v", k.Pod, k.Name, k.ID, k.Limits, k.Cards, grants)
}
