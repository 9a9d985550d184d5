package ledger_test

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/v1alpha1"
	"github.com/carve-gpu/carve/scheduler-extender/fit"
	"github.com/carve-gpu/carve/scheduler-extender/ledger"
	"github.com/carve-gpu/carve/scheduler-extender/score"
)

// resizing is one node whose pods are resized while events, reports and replies
// come late, twice or never, and the extender forgets everything now and then.
// What the limits files allow is the truth: it must never add up to more than a
// card has, whoever is late.
type resizing struct {
	l      *ledger.Ledger
	report *v1alpha1.GPUNode // the last that was written
	pods   map[string]*resizedPod
	serial int
	quota  int64 // of the namespace, in MiB, 0 for none
}

type resizedPod struct {
	ref      ledger.Ref
	app      int64 // MiB that the containers ask for
	side     int64
	versions []api.Grant // in the API, the last is current
	shown    int         // the version that the informer has
	force    api.Grant   // what the limits files say; no generation: not yet
	refused  int         // the generation that the node can't put in force
	writing  *api.Grant  // a write in flight
	landed   bool        // and whether it happened
	gone     bool
}

func (p *resizedPod) api() api.Grant { return p.versions[len(p.versions)-1] }

const (
	resizeCards = 2
	resizeMiB   = 100
)

func (w *resizing) pick(t *rapid.T, ok func(p *resizedPod) bool) *resizedPod {
	var uids []string
	for _, uid := range slices.Sorted(maps.Keys(w.pods)) {
		if !w.pods[uid].gone && ok(w.pods[uid]) {
			uids = append(uids, uid)
		}
	}
	if len(uids) == 0 {
		t.Skip("no such pod")
	}
	return w.pods[rapid.SampledFrom(uids).Draw(t, "pod")]
}

func (w *resizing) show(p *resizedPod) {
	g := p.versions[p.shown]
	w.l.SetPod(ledger.Pod{Ref: p.ref, Node: "n1", Grant: &g, Containers: []ledger.Container{{Name: "app", MemMiB: p.app}, {Name: "side", MemMiB: p.side}}, Started: p.force.Generation > 0}, epoch)
}

// create takes a pod of two containers all the way to its binding.
func (w *resizing) create(t *rapid.T) {
	w.serial++
	p := &resizedPod{ref: ref(fmt.Sprint("p", w.serial))}
	mib := func() int64 { return int64(rapid.IntRange(1, 40).Draw(t, "mib")) }
	p.app, p.side = mib(), mib()
	cards := rapid.IntRange(1, resizeCards).Draw(t, "cards")
	if w.quota > 0 {
		// Kubernetes counts the amount once, however many cards it is asked of.
		cards = 1
		if w.asked()+p.app+p.side > w.quota {
			t.Skip("Kubernetes doesn't let it in")
		}
	}
	a, refusal := fit.NewAsk(api.Request{Containers: []api.ContainerRequest{{Name: "app", Cards: cards, MemMiB: p.app}, {Name: "side", Cards: 1, MemMiB: p.side}}})
	if refusal != nil {
		t.Fatal(refusal)
	}
	if err := w.l.Offer(ledger.Offer{Ref: p.ref, Node: w.l.Node("n1"), Ask: a, Prefer: score.Binpack.Card}, epoch); err != nil {
		var over *ledger.QuotaRefusal
		if errors.As(err, &over) && w.held()+p.app+p.side <= w.quota {
			t.Fatalf("%v; in truth %d MiB are held, and %d are asked for", err, w.held(), p.app+p.side)
		}
		t.Skip("no room")
	}
	g, _, err := w.l.BeginBind(p.ref, "n1", epoch)
	if err != nil {
		t.Fatal(err)
	}
	w.l.EndBind(p.ref.UID, ledger.Written, epoch)
	p.versions = []api.Grant{g}
	w.pods[p.ref.UID] = p
	w.show(p)
}

func (w *resizing) resize(t *rapid.T) {
	p := w.pick(t, func(p *resizedPod) bool { return p.writing == nil })
	ask := resizeTo("app", int64(rapid.IntRange(1, resizeMiB+1).Draw(t, "mib")), -1)
	if rapid.Bool().Draw(t, "both") {
		m := int64(rapid.IntRange(1, resizeMiB).Draw(t, "side"))
		ask.Containers["side"] = api.ResizeAmounts{MemMiB: &m}
	}
	g, err := w.l.BeginResize(p.ref, ask)
	var refusal *ledger.ResizeRefusal
	switch {
	case errors.As(err, &refusal), errors.Is(err, ledger.ErrUnsettled), errors.Is(err, ledger.ErrInFlight):
	case err != nil:
		t.Fatal(err)
	case g.Generation > p.api().Generation:
		p.writing = &g
	}
}

func (w *resizing) rollback(t *rapid.T) {
	p := w.pick(t, func(p *resizedPod) bool { return p.writing == nil })
	if g, _, ok := w.l.BeginRollback(p.ref.UID); ok {
		p.writing = &g
	}
}

// land is the API server's side of a write, once.
func (w *resizing) land(t *rapid.T) {
	p := w.pick(t, func(p *resizedPod) bool { return p.writing != nil && !p.landed })
	if p.writing.Generation != p.api().Generation+1 {
		t.Fatalf("generation %d follows %d", p.writing.Generation, p.api().Generation)
	}
	p.versions, p.landed = append(p.versions, *p.writing), true
}

// reply is the extender's side of it.
func (w *resizing) reply(t *rapid.T) {
	p := w.pick(t, func(p *resizedPod) bool { return p.writing != nil })
	switch {
	case rapid.Bool().Draw(t, "lost"):
		w.l.EndResize(p.ref.UID, ledger.Unknown)
		return
	case p.landed:
		w.l.EndResize(p.ref.UID, ledger.Written)
	default:
		w.l.EndResize(p.ref.UID, ledger.Refused)
	}
	p.writing, p.landed = nil, false
}

// event shows the informer's version of a pod again, or the next one.
func (w *resizing) event(t *rapid.T) {
	p := w.pick(t, func(*resizedPod) bool { return true })
	if p.shown < len(p.versions)-1 && rapid.Bool().Draw(t, "newer") {
		p.shown++
	}
	w.show(p)
}

// apply lets the node's agent take in a pod's current grant.
func (w *resizing) apply(t *rapid.T) {
	p := w.pick(t, func(p *resizedPod) bool { return p.force.Generation < p.api().Generation })
	g := p.api()
	if p.force.Generation > 0 && g.Generation != p.refused && rapid.IntRange(0, 2).Draw(t, "in use") == 0 {
		for name, cards := range g.Containers {
			for i := range cards {
				if cards[i].MemMiB < p.force.Containers[name][i].MemMiB {
					p.refused = g.Generation
				}
			}
		}
	}
	if g.Generation != p.refused {
		p.force = g
	}
}

func (w *resizing) tell(*rapid.T) {
	r := report("n1", resizeMiB, resizeCards)
	for _, uid := range slices.Sorted(maps.Keys(w.pods)) {
		p := w.pods[uid]
		if p.gone {
			r.Status.Released = append(r.Status.Released, uid) // at least those that no report showed
			continue
		}
		for _, name := range []string{"app", "side"} {
			for _, c := range p.force.Containers[name] {
				s := of(uid, name, c.MemMiB, int32(p.force.Generation))
				if p.refused > p.force.Generation {
					s.RefusedGeneration, s.Refusal = int32(p.refused), "in use"
				}
				at := slices.IndexFunc(r.Status.Cards, func(k v1alpha1.Card) bool { return k.UUID == c.Card })
				r.Status.Cards[at].Slices = append(r.Status.Cards[at].Slices, s)
			}
		}
	}
	w.report = r
	w.l.SetReport(r, epoch)
}

// remove lets a pod end; the node has let go of it before the API shows it.
func (w *resizing) remove(t *rapid.T) {
	p := w.pick(t, func(*resizedPod) bool { return true })
	p.gone = true
	w.l.SetPod(ledger.Pod{Ref: p.ref, Node: "n1", Ended: true}, epoch)
	w.l.DropPod(p.ref.UID, epoch)
}

// restart rebuilds the ledger from what the API shows.
func (w *resizing) restart(t *rapid.T) {
	w.l = w.books()
	for _, uid := range slices.Sorted(maps.Keys(w.pods)) {
		p := w.pods[uid]
		if p.gone {
			continue
		}
		// A write that hasn't landed by now was of the process that died.
		p.writing, p.landed, p.shown = nil, false, len(p.versions)-1
		w.show(p)
	}
	w.l.SetReport(w.report, epoch)
}

// asked is what Kubernetes' own quota counts.
func (w *resizing) asked() (sum int64) {
	for _, p := range w.pods {
		if !p.gone {
			sum += p.app + p.side
		}
	}
	return sum
}

// held is what the pods of the namespace have or may have in a moment.
func (w *resizing) held() (sum int64) {
	for _, p := range w.pods {
		if p.gone {
			continue
		}
		most := func(gs ...api.Grant) (out int64) {
			for _, g := range gs {
				var mib int64
				for _, cards := range g.Containers {
					for _, c := range cards {
						mib += c.MemMiB
					}
				}
				out = max(out, mib)
			}
			return out
		}
		gs := append([]api.Grant{p.force}, p.versions[p.shown:]...)
		if p.writing != nil {
			gs = append(gs, *p.writing)
		}
		for _, c := range w.report.Status.Cards {
			for _, s := range c.Slices {
				if s.PodUID == p.ref.UID {
					gs = append(gs, p.versions[s.Generation-1])
				}
			}
		}
		sum += most(gs...)
	}
	return sum
}

// inQuota wants what is granted and what is in force within the quota.
func (w *resizing) inQuota(t *rapid.T) {
	var granted, force int64
	for _, p := range w.pods {
		if p.gone {
			continue
		}
		for sum, g := range map[*int64]api.Grant{&granted: p.api(), &force: p.force} {
			for _, cards := range g.Containers {
				for _, c := range cards {
					*sum += c.MemMiB
				}
			}
		}
	}
	if granted > w.quota || force > w.quota {
		t.Fatalf("the namespace may hold %d MiB; granted are %d, in force %d", w.quota, granted, force)
	}
}

func (w *resizing) check(t *rapid.T) {
	if w.quota > 0 {
		w.inQuota(t)
	}
	force := map[string]int64{}
	for _, p := range w.pods {
		for _, cards := range p.force.Containers {
			for _, c := range cards {
				if !p.gone {
					force[c.Card] += c.MemMiB
				}
			}
		}
	}
	for _, c := range w.l.Node("n1").Snapshot().View.Cards {
		if force[c.UUID] > c.MemMiB {
			t.Fatalf("%s: limits in force add up to %d MiB", c.UUID, force[c.UUID])
		}
		if c.Used.MemMiB < force[c.UUID] {
			t.Fatalf("%s: %d MiB are in force, the ledger counts %d", c.UUID, force[c.UUID], c.Used.MemMiB)
		}
		if c.Used.MemMiB > c.MemMiB {
			t.Fatalf("%s: %d MiB are booked", c.UUID, c.Used.MemMiB)
		}
	}
}

// settle lets everything that is under way arrive, and wants grants, limits and
// ledger to be the same.
func (w *resizing) settle(t *rapid.T) {
	for range 3 {
		for _, uid := range slices.Sorted(maps.Keys(w.pods)) {
			p := w.pods[uid]
			if p.gone {
				continue
			}
			if g, _, ok := w.l.BeginRollback(uid); ok {
				p.writing, p.landed = &g, false
			}
			if p.writing != nil {
				if !p.landed {
					p.versions = append(p.versions, *p.writing)
				}
				w.l.EndResize(uid, ledger.Written)
				p.writing, p.landed = nil, false
			}
			p.shown = len(p.versions) - 1
			w.show(p)
			if p.refused != p.api().Generation {
				p.force = p.api()
			}
		}
		w.tell(t)
		w.check(t)
	}
	sum := map[string]int64{}
	for _, p := range w.pods {
		if p.gone {
			continue
		}
		if fmt.Sprint(p.force) != fmt.Sprint(p.api()) {
			t.Fatalf("%s: in force is %+v, granted %+v", p.ref.Name, p.force, p.api())
		}
		for _, cards := range p.force.Containers {
			for _, c := range cards {
				sum[c.Card] += c.MemMiB
			}
		}
	}
	for _, c := range w.l.Node("n1").Snapshot().View.Cards {
		if c.Used.MemMiB != sum[c.UUID] {
			t.Fatalf("%s: the ledger counts %d MiB, in force are %d", c.UUID, c.Used.MemMiB, sum[c.UUID])
		}
	}
}

// books is a ledger that knows the node and the quota.
func (w *resizing) books() *ledger.Ledger {
	l := ledger.New(ledger.Config{})
	l.SetNode("n1", ledger.NodeInfo{Managed: true})
	l.SetAgent("n1", ledger.Agent{Ready: true})
	if w.quota > 0 {
		l.SetQuota("default", ledger.Quota{Name: "q", MemMiB: w.quota, Cores: -1})
	}
	return l
}

func TestResizesNeverGiveOutACardTwice(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := &resizing{pods: map[string]*resizedPod{}, quota: int64(rapid.SampledFrom([]int{0, 60, 120}).Draw(t, "quota"))}
		w.l = w.books()
		w.tell(t)
		t.Repeat(map[string]func(*rapid.T){
			"create": w.create, "resize": w.resize, "rollback": w.rollback, "land": w.land, "reply": w.reply,
			"event": w.event, "apply": w.apply, "tell": w.tell, "remove": w.remove, "restart": w.restart, "settle": w.settle,
			"": w.check,
		})
		w.settle(t)
	})
}
