package place

import (
	"cmp"
	"slices"
	"strings"

	"github.com/carve-gpu/carve/scheduler-extender/fit"
	"github.com/carve-gpu/carve/scheduler-extender/ledger"
	"github.com/carve-gpu/carve/scheduler-extender/score"
)

// Judgement is what one managed node says to a request.
type Judgement struct {
	Node string
	// Refusal is nil where the pod fits; Place then holds its cards.
	Refusal *fit.Refusal
	Place   fit.Placement
	// Message is the refusal as a pending pod's reason has it.
	Message string
	// Otherwise is true of a refused node where the pod would fit if nothing
	// blocked the node and none of its cards were cordoned.
	Otherwise bool
	Cards     []CardJudgement
}

// CardJudgement is what one card says to the container that its node refuses,
// or to the first one where the node refuses none.
type CardJudgement struct {
	fit.Card
	// Refusal is nil where the container fits, alone of its pod.
	Refusal *fit.Refusal
	// Held names who is on the card.
	Held string
}

// Judge asks all managed nodes whether the request fits, by the code that Filter
// runs and without booking anything: those that fit first, then the nearest
// misses. A node with room that the pod's namespace may not have is a miss, and so is one that
// has too little beside cards. A request that no node can serve is refused as a whole.
func Judge(l *ledger.Ledger, pod Pod, policy score.Policy) ([]Judgement, *fit.Refusal) {
	ask, refusal := fit.NewAsk(pod.Request)
	if refusal != nil {
		return nil, refusal
	}
	ask = ask.WithHost(pod.Host)
	if own, ok := score.ByName(ask.Policy); ok && ask.Policy != "" {
		policy = own
	}
	var out []Judgement
	for _, n := range l.Nodes() {
		snap := n.Snapshot()
		if !snap.Known || !snap.Managed {
			continue
		}
		j := Judgement{Node: n.Name}
		j.Place, j.Refusal = fit.Fit(&snap.View, ask, policy.Card)
		ci := 0
		over := (*ledger.QuotaRefusal)(nil)
		if j.Refusal == nil {
			over = l.JudgeQuota(pod.Ref, ask, &snap.View, j.Place)
		}
		switch {
		case over != nil:
			j.Refusal, j.Place, j.Message = over.Refusal, nil, clip(over.Error())
		case j.Refusal != nil:
			ci = j.Refusal.Container
			held := ""
			if j.Refusal.Card >= 0 && !j.Refusal.Never {
				held = Names(l.Holders(n, snap.View.Cards[j.Refusal.Card].UUID), j.Refusal)
			}
			j.Message = clip(j.Refusal.Message(&snap.View, ask, held))
			if free := snap.View; unblock(&free) {
				_, left := fit.Fit(&free, ask, policy.Card)
				j.Otherwise = left == nil
			}
		}
		for i, c := range snap.View.Cards {
			miss := ask.Miss(&snap.View, i, ci)
			j.Cards = append(j.Cards, CardJudgement{c, miss, Names(l.Holders(n, c.UUID), miss)})
		}
		slices.SortStableFunc(j.Cards, func(a, b CardJudgement) int { return cmp.Compare(a.Index, b.Index) })
		out = append(out, j)
	}
	slices.SortFunc(out, func(a, b Judgement) int {
		switch {
		case a.Refusal == nil || b.Refusal == nil:
			if (a.Refusal == nil) != (b.Refusal == nil) {
				if a.Refusal == nil {
					return -1
				}
				return 1
			}
		case a.Refusal.Nearer(b.Refusal):
			return -1
		case b.Refusal.Nearer(a.Refusal):
			return 1
		}
		return strings.Compare(a.Node, b.Node)
	})
	return out, nil
}

// unblock takes away what people and agents hold against a node, in a copy, and
// reports whether there was any.
func unblock(v *fit.Node) bool {
	was := v.Blocked != ""
	v.Blocked, v.Cards = "", slices.Clone(v.Cards)
	for i := range v.Cards {
		if v.Cards[i].Blocked == fit.ReasonCordoned {
			v.Cards[i].Blocked, was = "", true
		}
	}
	return was
}
