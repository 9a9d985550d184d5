package audit

import (
	"testing"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/v1alpha1"
)

func liveOn(uid string, mem int64) Pod {
	return Pod{UID: uid, Name: uid, Grant: grantOf(uid, map[string][]api.CardGrant{"app": share(card0, mem, 0)}), Containers: []PodContainer{{"app", api.App}}}
}

func cardWith(ss ...v1alpha1.Slice) []v1alpha1.Card {
	return []v1alpha1.Card{{UUID: card0, MemoryMiB: 100, Slices: ss}}
}

func TestHistoryFindsACardThatWasGivenTwice(t *testing.T) {
	prepared := slice(a, "app", 60, 0)
	prepared.State = v1alpha1.Prepared
	over := liveOn(a, 60)
	over.Over = true
	for name, c := range map[string]struct {
		tell func(*History)
		want int
	}{
		"two pods that don't fit": {func(h *History) {
			h.SawReport(1, cardWith())
			h.SawPod(2, liveOn(a, 60))
			h.SawPod(3, liveOn(b, 60))
		}, 1},
		"the same for a moment only": {func(h *History) {
			h.SawReport(1, cardWith())
			h.SawPod(2, liveOn(a, 60))
			h.SawPod(3, liveOn(b, 60))
			h.SawNoPod(4, a)
		}, 1},
		"told in another order than it happened": {func(h *History) {
			h.SawNoPod(3, a)
			h.SawPod(4, liveOn(b, 60))
			h.SawReport(1, cardWith())
			h.SawPod(2, liveOn(a, 60))
		}, 0},
		"one after the other": {func(h *History) {
			h.SawReport(1, cardWith())
			h.SawPod(2, liveOn(a, 60))
			h.SawNoPod(3, a)
			h.SawPod(4, liveOn(b, 60))
		}, 0},
		"after a pod that is over": {func(h *History) {
			h.SawReport(1, cardWith())
			h.SawPod(2, over)
			h.SawPod(4, liveOn(b, 60))
		}, 0},
		"beside one that is gone and still runs": {func(h *History) {
			h.SawReport(1, cardWith())
			h.SawPod(2, liveOn(a, 60))
			h.SawReport(3, cardWith(slice(a, "app", 60, 0)))
			h.SawNoPod(4, a)
			h.SawPod(5, liveOn(b, 60))
		}, 1},
		"beside one that is gone and never ran": {func(h *History) {
			h.SawReport(1, cardWith())
			h.SawPod(2, liveOn(a, 60))
			h.SawReport(3, cardWith(prepared))
			h.SawNoPod(4, a)
			h.SawPod(5, liveOn(b, 60))
		}, 0},
		"in a gap, after one whose slice went in it": {func(h *History) {
			h.SawReport(1, cardWith(slice(a, "app", 60, 0)))
			h.SawPod(2, liveOn(a, 60))
			h.SawNoPod(3, a)
			h.Break()
			h.SawPod(5, liveOn(b, 60))
			h.SawReport(6, cardWith(slice(b, "app", 60, 0)))
		}, 0},
		"in a gap, beside one that is still there behind it": {func(h *History) {
			h.SawReport(1, cardWith(slice(a, "app", 60, 0)))
			h.SawPod(2, liveOn(a, 60))
			h.SawNoPod(3, a)
			h.Break()
			h.SawPod(5, liveOn(b, 60))
			h.SawReport(6, cardWith(slice(a, "app", 60, 0)))
		}, 1},
		"in a gap, beside one that was over behind it": {func(h *History) {
			h.SawReport(1, cardWith())
			h.SawPod(2, liveOn(a, 60))
			h.Break()
			h.SawPod(7, over)
			h.SawPod(5, liveOn(b, 60))
		}, 0},
		"beside one that keeps more than it was left": {func(h *History) {
			h.SawReport(1, cardWith(slice(a, "app", 60, 0)))
			h.SawPod(2, liveOn(a, 20))
			h.SawPod(3, liveOn(b, 60))
		}, 1},
	} {
		t.Run(name, func(t *testing.T) {
			h := NewHistory()
			c.tell(h)
			if got := h.DoubleBookings(); len(got) != c.want {
				t.Errorf("found %q, want %d", got, c.want)
			}
		})
	}
}

// A grant that the watch lost, or tells later than the node acts on it, makes
// nothing strange.
func TestWhatWasLostOrComesLateIsNotStrange(t *testing.T) {
	grant := func(mib int64, generation int) *api.Grant {
		return &api.Grant{UID: "u", Generation: generation, Containers: map[string][]api.CardGrant{"app": {{Card: "c", MemMiB: mib, Mode: api.ModeVGPU}}}}
	}
	grown := Container{ID: "id", UID: "u", Name: "app", Limits: Limits{"c": {MemMiB: 9}}, Cards: []string{"c"}}
	for name, more := range map[string]struct {
		do      func(h *History)
		strange bool
	}{
		"nothing more":              {func(*History) {}, true},
		"gone":                      {func(h *History) { h.SawNoPod(3, "u") }, true},
		"the grant comes late":      {func(h *History) { h.SawPod(3, Pod{UID: "u", Grant: grant(9, 2)}) }, false},
		"gone behind a break":       {func(h *History) { h.Break(); h.SawNoPod(3, "u") }, false},
		"back behind a break":       {func(h *History) { h.Break(); h.SawPod(3, Pod{UID: "u", Grant: grant(7, 3)}) }, false},
		"a break after it was gone": {func(h *History) { h.SawNoPod(3, "u"); h.Break() }, true},
	} {
		h := NewHistory()
		h.SawPod(2, Pod{UID: "u", Grant: grant(5, 1)})
		more.do(h)
		if got := h.Strange(grown); (got != "") != more.strange {
			t.Errorf("%s: %q", name, got)
		}
	}
}

func TestStrangeContainers(t *testing.T) {
	h := NewHistory()
	h.SawPod(1, liveOn(a, 60))
	grown := liveOn(a, 80)
	grown.Grant.Generation = 2
	h.SawPod(2, grown)
	limits := func(mem int64) Limits { return Limits{card0: {MemMiB: mem}} }
	for name, c := range map[string]struct {
		container Container
		strange   bool
	}{
		"as granted":                      {Container{UID: a, Name: "app", Limits: limits(60), Cards: []string{card0}}, false},
		"as granted later":                {Container{UID: a, Name: "app", Limits: limits(80), Cards: []string{card0}}, false},
		"nothing at all":                  {Container{UID: a, Name: "app"}, false},
		"a pod that isn't known":          {Container{UID: b, Name: "app", Limits: limits(1), Cards: []string{card0}}, false},
		"other limits":                    {Container{UID: a, Name: "app", Limits: limits(61), Cards: []string{card0}}, true},
		"another card":                    {Container{UID: a, Name: "app", Limits: limits(60), Cards: []string{card1}}, true},
		"a card without limits":           {Container{UID: a, Name: "app", Cards: []string{card0}}, true},
		"a container that wasn't granted": {Container{UID: a, Name: "side", Limits: limits(60), Cards: []string{card0}}, true},
	} {
		if got := h.Strange(c.container); (got != "") != c.strange {
			t.Errorf("%s: %q", name, got)
		}
	}
}
