package audit

import (
	"cmp"
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
	// breaks counts the times that the watch may have lost something; told is
	// how many there were when an object was last told of.
	breaks int
	told   map[string]int
	// gaps are the pods of which something may have been lost.
	gaps map[string]bool
	// grants are all that a pod ever carried.
	grants map[string][]api.Grant
}

type event struct {
	version uint64
	// gap says that there may be others between this and the last one of the
	// same object.
	gap   bool
	pod   *Pod
	gone  string // UID of a pod that was deleted
	cards []v1alpha1.Card
}

// NewHistory makes an empty one.
func NewHistory() *History {
	return &History{grants: map[string][]api.Grant{}, told: map[string]int{}, gaps: map[string]bool{}}
}

// Break enters that from now on the watch may have lost something: the API
// server is away. What isn't known of the time between is then taken for the
// least that it can have been.
func (h *History) Break() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.breaks++
}

// gap reports whether something may have been lost of an object since it was
// last told of, and notes that it is told of now. h.mu is held.
func (h *History) gap(object string) bool {
	last, known := h.told[object]
	h.told[object] = h.breaks
	if known && last != h.breaks {
		h.gaps[object] = true
		return true
	}
	return false
}

// SawPod enters a pod as it was from a resource version on.
func (h *History) SawPod(version uint64, p Pod) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.events = append(h.events, event{version: version, gap: h.gap(p.UID), pod: &p})
	if p.Grant != nil && !slices.ContainsFunc(h.grants[p.UID], func(g api.Grant) bool { return sameGrant(g, *p.Grant) }) {
		h.grants[p.UID] = append(h.grants[p.UID], *p.Grant)
	}
}

// SawNoPod enters that a pod was gone from a resource version on.
func (h *History) SawNoPod(version uint64, uid string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.gap(uid)
	h.events = append(h.events, event{version: version, gone: uid})
}

// SawReport enters the report as it was from a resource version on.
func (h *History) SawReport(version uint64, cards []v1alpha1.Card) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.events = append(h.events, event{version: version, gap: h.gap("report"), cards: cards})
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
	events := bridged(h.events)
	h.mu.Unlock()
	slices.SortStableFunc(events, func(a, b event) int { return cmp.Compare(a.version, b.version) })
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
			var who, how []string
			for _, uid := range slices.Sorted(maps.Keys(pods)) {
				if a := held(pods[uid], gone[uid], card); a.Pods > 0 {
					total = total.plus(a)
					who = append(who, pods[uid].Name)
					how = append(how, explained(pods[uid], gone[uid], card, a))
				}
			}
			if fault := total.over(card.MemoryMiB); fault != "" {
				key := fmt.Sprint(card.UUID, who)
				if !said[key] {
					said[key] = true
					out = append(out, fmt.Sprintf("card %s at version %d: %s: pods %v", card.UUID, e.version, fault, how))
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

// bridged makes what isn't known of a gap the least that it can have been: a pod
// that was over behind it was over from the last word before it on, one that
// had less had less, and of the report only what it showed on both sides was
// there in between.
func bridged(events []event) []event {
	var out []event
	last := map[string]event{}
	for _, e := range events {
		object := "report"
		switch {
		case e.pod != nil:
			object = e.pod.UID
		case e.gone != "":
			out = append(out, e)
			continue
		}
		if before, known := last[object]; known && e.gap {
			switch {
			case e.pod != nil && (e.pod.Over || less(*e.pod, *before.pod)):
				out = append(out, event{version: before.version, pod: e.pod})
			case e.pod == nil:
				out = append(out, event{version: before.version, cards: common(before.cards, e.cards)})
			}
		}
		last[object] = e
		out = append(out, e)
	}
	return out
}

// less reports whether a pod has less of some card than it had.
func less(now, before Pod) bool {
	if now.Grant == nil || before.Grant == nil {
		return now.Grant == nil
	}
	for name, cards := range before.Grant.Containers {
		for _, was := range cards {
			if is, ok := cardGrant(now.Grant, name, was.Card); !ok || is.MemMiB < was.MemMiB || is.Cores < was.Cores {
				return true
			}
		}
	}
	return false
}

// common is the report with only those slices that both have, each with the
// smaller amounts.
func common(a, b []v1alpha1.Card) []v1alpha1.Card {
	var out []v1alpha1.Card
	for _, card := range a {
		var kept []v1alpha1.Slice
		for _, s := range card.Slices {
			for _, other := range b {
				for _, o := range other.Slices {
					if other.UUID == card.UUID && o.PodUID == s.PodUID && o.Container == s.Container {
						s.MemMiB, s.Cores = min(s.MemMiB, o.MemMiB), min(s.Cores, o.Cores)
						kept = append(kept, s)
					}
				}
			}
		}
		card.Slices = kept
		out = append(out, card)
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

// explained names a pod with what it holds, as what, and what the report shows of it.
func explained(p Pod, gone bool, card v1alpha1.Card, a Amount) string {
	as := "granted"
	switch {
	case gone:
		as = "gone"
	case p.Over:
		as = "over"
	case p.Grant != nil && p.Grant.Generation > 1:
		as = fmt.Sprintf("granted, generation %d", p.Grant.Generation)
	}
	for _, s := range card.Slices {
		if s.PodUID == p.UID {
			as += fmt.Sprintf("; %s %s %d MiB of generation %d", s.Container, s.State, s.MemMiB, s.Generation)
		}
	}
	return fmt.Sprintf("%s %d MiB (%s)", p.Name, a.MemMiB, as)
}

// Strange says in what way a running container has what its pod was never
// granted: limits of another, or another's card. A container with nothing at
// all is none of that, since the hook may have been away; nor is one of a pod
// that the history doesn't know yet, or of which it may have lost something. The
// node may hear of a grant before the history does, so an answer counts when the
// history is complete.
func (h *History) Strange(k Container) string {
	if k.Limits == nil && len(k.Cards) == 0 {
		return ""
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	grants, known := h.grants[k.UID]
	if !known || h.gaps[k.UID] {
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
