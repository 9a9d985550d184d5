package fit_test

import (
	"testing"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/scheduler-extender/fit"
	"github.com/carve-gpu/carve/scheduler-extender/score"
)

func TestWhatANodeHasBesideCardsIsLookedAtWhereItIsKnown(t *testing.T) {
	card := fit.Card{UUID: "a", MemMiB: 1000, Slots: 4}
	has := fit.Host{CPUMilli: 4000, MemMiB: 8000, Pods: 2}
	known := &fit.Node{Name: "known", Cards: []fit.Card{card}, Host: has, HostKnown: true}
	unknown := &fit.Node{Name: "unknown", Cards: []fit.Card{card}}
	share := api.Request{Containers: []api.ContainerRequest{{Name: "app", Cards: 1, MemMiB: 100}}}
	for name, c := range map[string]struct {
		request api.Request
		host    fit.Host
		fits    bool
	}{
		"all of it":             {share, has, true},
		"nothing said":          {share, fit.Host{}, true},
		"too much processor":    {share, fit.Host{CPUMilli: 4001}, false},
		"too much memory":       {share, fit.Host{MemMiB: 8001}, false},
		"too many pods":         {share, fit.Host{Pods: 3}, false},
		"no card, fits":         {api.Request{}, has, true},
		"no card, too much":     {api.Request{}, fit.Host{CPUMilli: 5000}, false},
		"no card, nothing said": {api.Request{}, fit.Host{}, true},
	} {
		t.Run(name, func(t *testing.T) {
			plain, _ := fit.NewAsk(c.request)
			a := plain.WithHost(c.host)
			p, refusal := fit.Fit(known, a, score.Binpack.Card)
			if (refusal == nil) != c.fits {
				t.Fatalf("refusal %+v, fits %t", refusal, c.fits)
			}
			if q, ok := fit.Choose(known, a, score.Binpack.Card); ok != c.fits || len(q) != len(p) {
				t.Fatalf("Choose says %t, Fit %+v", ok, refusal)
			}
			if _, r := fit.Fit(unknown, a, score.Binpack.Card); r != nil {
				t.Fatalf("refused where nothing is known: %+v", r)
			}
			if (a.Key() == plain.Key()) != (c.host == fit.Host{}) {
				t.Fatalf("key %q", a.Key())
			}
			if refusal != nil {
				if refusal.Reason != fit.ReasonHost || refusal.Message(known, a, "") == "" || refusal.Never {
					t.Fatalf("refusal %+v", refusal)
				}
				return
			}
			if after := fit.Apply(known, a, p); after.Host != has.Minus(c.host) || known.Host != has {
				t.Fatalf("after: %+v, before: %+v", after.Host, known.Host)
			}
		})
	}
}
