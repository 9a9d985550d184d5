package ledger_test

import (
	"errors"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/v1alpha1"
	"github.com/carve-gpu/carve/scheduler-extender/fit"
	"github.com/carve-gpu/carve/scheduler-extender/ledger"
	"github.com/carve-gpu/carve/scheduler-extender/score"
)

// world is a cluster in miniature: what the API shows, what each node really
// has, and what the extender has in mind, all as plain maps. The ledger must
// agree with it after every step.
type world struct {
	l   *ledger.Ledger
	now time.Time

	nodes   map[string]bool // Node objects that exist, all managed
	agents  map[string]bool // nodes whose agent is ready
	lost    map[string]bool // nodes declared out of service
	reports map[string]*v1alpha1.GPUNode
	pods    map[string]*modelPod
	serial  int
}

type modelPod struct {
	ref   ledger.Ref
	node  string
	card  string
	mib   int64
	mode  api.Mode
	grant api.Grant

	isolation api.Mode          // that it asks for
	seen      *v1alpha1.GPUNode // the report that the offer was made by

	mind   string // offered, binding, bound, leaving (a grace), or empty
	until  time.Time
	open   bool // a write may have had an effect
	bound  bool // in the API
	told   bool // and the ledger was told
	ended  bool
	gone   bool // from the API
	ran    bool
	onNode bool // the node really has the share
	shown  bool // some report showed it since the ledger knows it

	everTold bool // some report showed it
	released bool // the node let go of it, and no report showed it
}

func (w *world) held() []*modelPod {
	var out []*modelPod
	for _, uid := range slices.Sorted(maps.Keys(w.pods)) {
		if w.pods[uid].mind != "" {
			out = append(out, w.pods[uid])
		}
	}
	return out
}

// reported is what the last report of a node shows of a pod on a card.
func (w *world) reported(node, uid string) (card string, mib int64) {
	if r := w.reports[node]; r != nil {
		for _, c := range r.Status.Cards {
			for _, s := range c.Slices {
				if s.PodUID == uid {
					return c.UUID, s.MemMiB
				}
			}
		}
	}
	return "", 0
}

// used adds up a card the slow way.
func (w *world) used(node, card string) int64 {
	var sum int64
	counted := map[string]bool{}
	for _, p := range w.held() {
		if p.node != node {
			continue
		}
		counted[p.ref.UID] = true
		on, mib := w.reported(node, p.ref.UID)
		switch {
		case on == card && p.card == card:
			sum += max(mib, p.mib)
		case on == card:
			sum += mib
		case p.card == card:
			sum += p.mib
		}
	}
	if r := w.reports[node]; r != nil {
		for _, c := range r.Status.Cards {
			for _, s := range c.Slices {
				if c.UUID == card && !counted[s.PodUID] && !w.lost[node] {
					sum += s.MemMiB
				}
			}
		}
	}
	return sum
}

// on lists the pods on a card, by grant or report, with their mode.
func (w *world) on(node, card string) map[string]api.Mode {
	out := map[string]api.Mode{}
	for _, p := range w.held() {
		if c, _ := w.reported(node, p.ref.UID); p.node == node && (c == card || p.card == card) {
			out[p.ref.UID] = p.mode
		}
	}
	if r := w.reports[node]; r != nil && !w.lost[node] {
		for _, c := range r.Status.Cards {
			for _, s := range c.Slices {
				if c.UUID == card {
					out[s.PodUID] = w.pods[s.PodUID].mode
				}
			}
		}
	}
	return out
}

// mode is that of a card's pods.
func (w *world) mode(node, card string) api.Mode {
	seen := map[api.Mode]bool{}
	for _, m := range w.on(node, card) {
		seen[m] = true
	}
	if len(seen) > 1 {
		return fit.Mixed
	}
	for m := range seen {
		return m
	}
	return ""
}

// takes is the mode that a card gives to a share of so much memory, if it does.
func (w *world) takes(c *v1alpha1.Card, node string, isolation api.Mode, mib int64) (api.Mode, bool) {
	mode, slots := isolation, api.SlotsPerCard
	if mode == "" {
		mode = api.ModeVGPU
	}
	if s := c.Sharing; s != nil {
		slots = int(s.Replicas)
		if isolation == "" {
			mode = api.Mode(s.Mode)
		}
		if mode != api.Mode(s.Mode) || isolation == "" && mode == api.ModeTimeslice {
			return "", false
		}
	}
	if mode != api.ModeVGPU && !slices.Contains(c.Modes, string(mode)) || mode == api.ModeMPS && c.MPS != nil && !c.MPS.Ready {
		return "", false
	}
	is := w.mode(node, c.UUID)
	if is == "" && c.MPS != nil && !c.MPS.Ready {
		return "", false // MPS has it still
	}
	return mode, (is == "" || is == mode) && c.MemoryMiB-w.used(node, c.UUID) >= mib && len(w.on(node, c.UUID)) < slots
}

func (w *world) check(t *rapid.T) {
	for _, name := range slices.Sorted(maps.Keys(w.reports)) {
		if !w.nodes[name] {
			continue
		}
		s := w.l.Node(name).Snapshot()
		var debt int64
		for i, c := range w.reports[name].Status.Cards {
			got, want := s.View.Cards[i].Used.MemMiB, w.used(name, c.UUID)
			if got != want {
				t.Fatalf("%s %s: %d MiB in use, the model says %d", name, c.UUID, got, want)
			}
			if free := s.View.Cards[i].Free().MemMiB; free < 0 || free != max(0, c.MemoryMiB-want) {
				t.Fatalf("%s %s: %d MiB free", name, c.UUID, free)
			}
			if got, want := s.View.Cards[i].Mode, w.mode(name, c.UUID); got != want {
				t.Fatalf("%s %s: in mode %q, the model says %q", name, c.UUID, got, want)
			}
			if s.View.Cards[i].Touched != (want > 0) {
				t.Fatalf("%s %s: touched %t with %d MiB in use", name, c.UUID, s.View.Cards[i].Touched, want)
			}
			debt += max(0, want-c.MemoryMiB)
		}
		if s.DebtMiB != debt {
			t.Fatalf("%s: debt %d, want %d", name, s.DebtMiB, debt)
		}
	}
	w.checkRebuild(t)
}

// checkRebuild compares with a ledger that knows what the API shows and nothing
// else (I5), at moments when the extender has nothing in mind beyond that.
func (w *world) checkRebuild(t *rapid.T) {
	fresh := ledger.New(ledger.Config{})
	for _, p := range w.pods {
		if p.mind != "" && (p.mind != "bound" || !p.told) || p.mind == "" && p.bound && !p.gone && !p.ended {
			return
		}
	}
	for _, p := range w.pods {
		if p.mind == "bound" {
			fresh.SetPod(ledger.Pod{Ref: p.ref, Node: p.node, Grant: &p.grant, Containers: []ledger.Container{{Name: "app"}}}, w.now)
		}
	}
	for name, r := range w.reports {
		fresh.SetReport(r, w.now)
		if w.nodes[name] {
			fresh.SetNode(name, ledger.NodeInfo{Managed: true, OutOfService: w.lost[name]})
			fresh.SetAgent(name, ledger.Agent{Ready: w.agents[name]})
		}
	}
	for name := range w.reports {
		old, now := w.l.Node(name).Snapshot().View, fresh.Node(name).Snapshot().View
		if !reflect.DeepEqual(old, now) {
			t.Fatalf("%s: rebuilt\n%+v\nwas\n%+v", name, now, old)
		}
	}
}

// pick draws one pod that qualifies, or skips the action.
func (w *world) pick(t *rapid.T, ok func(p *modelPod) bool) *modelPod {
	var uids []string
	for _, uid := range slices.Sorted(maps.Keys(w.pods)) {
		if ok(w.pods[uid]) {
			uids = append(uids, uid)
		}
	}
	if len(uids) == 0 {
		t.Skip("no such pod")
	}
	return w.pods[rapid.SampledFrom(uids).Draw(t, "pod")]
}

func (w *world) node(t *rapid.T) string {
	return rapid.SampledFrom([]string{"n1", "n2"}).Draw(t, "node")
}

func (w *world) offer(t *rapid.T) {
	name := w.node(t)
	if !w.nodes[name] || w.reports[name] == nil {
		t.Skip("no such node")
	}
	w.serial++
	p := &modelPod{ref: ref(fmt.Sprint("p", w.serial)), node: name, mib: int64(rapid.IntRange(1, 60).Draw(t, "mib"))}
	n := w.l.Node(name)
	isolation := rapid.SampledFrom([]api.Mode{"", "", api.ModeVGPU, api.ModeMPS, api.ModeTimeslice}).Draw(t, "isolation")
	a, refusal := fit.NewAsk(api.Request{Containers: []api.ContainerRequest{{Name: "app", Cards: 1, MemMiB: p.mib}}, Isolation: isolation})
	if refusal != nil {
		t.Fatal(refusal)
	}
	before := map[string]int64{}
	room, modes := false, map[string]api.Mode{}
	for _, c := range w.reports[name].Status.Cards {
		before[c.UUID] = c.MemoryMiB - w.used(name, c.UUID)
		mode, takes := w.takes(&c, name, isolation, p.mib)
		if takes {
			modes[c.UUID] = mode
		}
		room = room || takes && w.agents[name]
	}
	o := ledger.Offer{Ref: p.ref, Node: n, Ask: a, Prefer: score.Binpack.Card}
	if err := w.l.Offer(o, w.now); (err == nil) != room {
		t.Fatalf("offer of %d MiB, isolation %q: %v, free are %v, modes %v", p.mib, isolation, err, before, modes)
	} else if err != nil {
		return
	}
	w.pods[p.ref.UID] = p
	p.mind, p.until = "offered", w.now.Add(15*time.Second)
	p.isolation, p.seen = isolation, w.reports[name]
	for _, c := range w.reports[name].Status.Cards {
		if n.Snapshot().View.Cards[slices.IndexFunc(n.Snapshot().View.Cards, func(f fit.Card) bool { return f.UUID == c.UUID })].Used.MemMiB == c.MemoryMiB-before[c.UUID]+p.mib {
			p.card = c.UUID
			break
		}
	}
	if p.mode = modes[p.card]; p.mode == "" {
		t.Fatalf("%d MiB, isolation %q, were offered on %q with %d free; these take it: %v", p.mib, isolation, p.card, before[p.card], modes)
	}
}

// takers are the cards that would take an offered pod now, were it not there yet, with
// the mode that it would get.
func (w *world) takers(p *modelPod) map[string]api.Mode {
	out := map[string]api.Mode{}
	mind := p.mind
	p.mind = ""
	defer func() { p.mind = mind }()
	for _, c := range w.reports[p.node].Status.Cards {
		if mode, takes := w.takes(&c, p.node, p.isolation, p.mib); takes {
			out[c.UUID] = mode
		}
	}
	return out
}

func (w *world) begin(t *rapid.T) {
	p := w.pick(t, func(p *modelPod) bool { return p.mind == "offered" })
	serves := w.nodes[p.node] && w.agents[p.node] && w.reports[p.node] != nil
	var want error
	takers := map[string]api.Mode{}
	switch {
	case !w.now.Before(p.until):
		want = ledger.ErrNoOffer
	case !serves:
		want = ledger.ErrBlocked
	default:
		takers = w.takers(p)
		if stands := w.reports[p.node] == p.seen || takers[p.card] == p.mode; stands {
			takers = map[string]api.Mode{p.card: p.mode}
		} else if len(takers) == 0 || p.open {
			want = ledger.ErrChanged
		}
	}
	g, bound, err := w.l.BeginBind(p.ref, p.node, w.now)
	if !errors.Is(err, want) || bound {
		t.Fatalf("begin: bound %t, %v, want %v", bound, err, want)
	}
	if want == ledger.ErrBlocked || want == ledger.ErrChanged {
		if !p.open {
			p.mind = "" // given back
		}
	}
	if err == nil {
		c := g.Containers["app"]
		if len(c) != 1 || takers[c[0].Card] != c[0].Mode || c[0].MemMiB != p.mib {
			t.Fatalf("grant %+v, want %d MiB on one of %v", g, p.mib, takers)
		}
		p.mind, p.grant, p.card, p.mode, p.seen = "binding", g, c[0].Card, c[0].Mode, w.reports[p.node]
	}
}

func (w *world) end(t *rapid.T) {
	p := w.pick(t, func(p *modelPod) bool { return p.mind == "binding" })
	o := rapid.SampledFrom([]ledger.Outcome{ledger.Written, ledger.Refused, ledger.Unknown}).Draw(t, "outcome")
	if p.bound {
		o = ledger.Written
	}
	w.l.EndBind(p.ref.UID, o, w.now)
	switch {
	case o == ledger.Written && !p.gone:
		p.mind, p.bound, p.until = "bound", true, w.now.Add(30*time.Second)
	case o == ledger.Unknown && !p.gone:
		p.mind, p.until, p.open = "offered", w.now.Add(15*time.Second), true
	case o != ledger.Refused:
		w.parts(p)
	default:
		p.mind = ""
	}
}

// tell delivers the event that shows the pod bound. It may come before the
// reply to the write.
func (w *world) tell(t *rapid.T) {
	p := w.pick(t, func(p *modelPod) bool { return !p.gone && !p.ended && (p.mind == "binding" || p.bound) })
	p.bound, p.told, p.mind = true, true, "bound"
	p.ran = p.ran || p.onNode
	p.shown = p.shown || func() bool { c, _ := w.reported(p.node, p.ref.UID); return c != "" }()
	w.l.SetPod(ledger.Pod{Ref: p.ref, Node: p.node, Grant: &p.grant, Containers: []ledger.Container{{Name: "app"}}, Started: p.ran}, w.now)
}

func (w *world) endPod(t *rapid.T) {
	p := w.pick(t, func(p *modelPod) bool { return p.told && !p.gone && !p.ended })
	p.ended, p.ran = true, p.ran || p.onNode
	w.l.SetPod(ledger.Pod{Ref: p.ref, Node: p.node, Grant: &p.grant, Ended: true, Started: p.ran}, w.now)
	if p.mind == "binding" {
		return // the reply decides
	}
	if p.mind = ""; p.ran {
		w.parts(p)
	}
}

// parts holds the share of a pod that may be at work for a while, unless a report told
// of it.
func (w *world) parts(p *modelPod) {
	if p.mind, p.until = "leaving", w.now.Add(10*time.Second); p.shown || w.lost[p.node] {
		p.mind = ""
	}
}

func (w *world) delete(t *rapid.T) {
	p := w.pick(t, func(p *modelPod) bool { return !p.gone })
	p.gone = true
	w.l.DropPod(p.ref.UID, w.now)
	switch {
	case p.mind == "binding":
	case p.mind == "leaving":
	case p.mind == "bound" && p.told:
		w.parts(p)
	default:
		p.mind = ""
	}
}

// work lets a node take in or let go of a share; nobody is told yet.
func (w *world) work(t *rapid.T) {
	p := w.pick(t, func(p *modelPod) bool { return p.bound })
	had := p.onNode
	p.onNode = !p.ended && !p.gone || p.onNode && rapid.Bool().Draw(t, "still")
	p.released = p.released || had && !p.onNode && !p.everTold // no report told of it
}

// report tells the truth about a node, sometimes with a smaller share.
func (w *world) report(t *rapid.T) {
	name := w.node(t)
	r := report(name, int64(rapid.SampledFrom([]int{100, 100, 100, 50}).Draw(t, "memory")), 2)
	for i := range r.Status.Cards {
		// What a card can be given as changes under its pods, too.
		c := &r.Status.Cards[i]
		c.Modes = rapid.SampledFrom([][]string{{"timeslice", "mps"}, {"timeslice", "mps"}, {"timeslice"}, nil}).Draw(t, "modes")
		if rapid.IntRange(0, 3).Draw(t, "down") == 0 {
			c.MPS = &v1alpha1.MPS{Reason: "it died"}
		}
		if mode := rapid.SampledFrom([]string{"", "", "mps", "timeslice"}).Draw(t, "sharing"); mode != "" {
			c.Sharing = &v1alpha1.Sharing{Mode: mode, Replicas: 2}
		}
	}
	for _, uid := range slices.Sorted(maps.Keys(w.pods)) {
		p := w.pods[uid]
		if p.node == name && p.released {
			p.released, p.shown = false, true
			r.Status.Released = append(r.Status.Released, uid)
			if p.mind == "leaving" {
				p.mind = ""
			}
		}
		if p.node != name || !p.onNode {
			continue
		}
		p.everTold = true
		for i := range r.Status.Cards {
			if r.Status.Cards[i].UUID == p.card {
				s := slice(uid, "app", max(1, p.mib+int64(rapid.IntRange(-1, 1).Draw(t, "drift"))))
				s.Mode = string(p.mode)
				r.Status.Cards[i].Slices = append(r.Status.Cards[i].Slices, s)
			}
		}
		if p.mind != "" {
			p.shown = true
		}
		if p.mind == "leaving" {
			p.mind = "" // from here on the report decides
		}
	}
	w.reports[name] = r
	w.l.SetReport(r, w.now)
}

func (w *world) pass(t *rapid.T) {
	w.now = w.now.Add(time.Duration(rapid.IntRange(1, 20).Draw(t, "seconds")) * time.Second)
	_, look := w.l.Sweep(w.now)
	unconfirmed := map[string]bool{}
	for _, p := range w.held() {
		if w.now.Before(p.until) {
			continue
		}
		switch {
		case p.mind == "leaving" && w.nodes[p.node] && !w.agents[p.node] && !w.lost[p.node]:
			p.until = w.now.Add(10 * time.Second) // nobody could have told
		case p.mind == "offered" || p.mind == "leaving":
			p.mind = ""
		case p.mind == "bound" && !p.told:
			unconfirmed[p.ref.UID] = true
			p.until = w.now.Add(30 * time.Second)
		}
	}
	if len(look) != len(unconfirmed) {
		t.Fatalf("to look up: %v, the model says %v", look, unconfirmed)
	}
	for _, r := range look {
		if !unconfirmed[r.UID] {
			t.Fatalf("to look up: %v, the model says %v", look, unconfirmed)
		}
	}
}

func (w *world) toggleNode(t *rapid.T) {
	name := w.node(t)
	w.nodes[name], w.lost[name] = !w.nodes[name], false
	if w.nodes[name] {
		w.l.SetNode(name, ledger.NodeInfo{Managed: true})
		return
	}
	w.l.DropNode(name, w.now)
	// The report of a node that is gone is void until the next one.
	delete(w.reports, name)
	w.l.DropReport(name, w.now)
}

// toggleAgent takes the agent of a node away or brings it back. Nothing that the
// node holds changes by that.
func (w *world) toggleAgent(t *rapid.T) {
	name := w.node(t)
	w.agents[name] = !w.agents[name]
	w.l.SetAgent(name, ledger.Agent{Ready: w.agents[name]})
}

// toggleLost declares a node out of service, or takes that back. What was
// leaving it has left then, and so has all of which only its report tells.
func (w *world) toggleLost(t *rapid.T) {
	name := w.node(t)
	if !w.nodes[name] {
		t.Skip("no such node")
	}
	w.lost[name] = !w.lost[name]
	w.l.SetNode(name, ledger.NodeInfo{Managed: true, OutOfService: w.lost[name]})
	for _, p := range w.pods {
		if w.lost[name] && p.node == name && p.mind == "leaving" {
			p.mind = ""
		}
	}
}

func TestLedgerAgreesWithAPlainModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := &world{l: ledger.New(ledger.Config{}), now: epoch, nodes: map[string]bool{}, agents: map[string]bool{}, lost: map[string]bool{}, reports: map[string]*v1alpha1.GPUNode{}, pods: map[string]*modelPod{}}
		for _, n := range []string{"n1", "n2"} {
			w.nodes[n], w.agents[n] = true, true
			w.l.SetNode(n, ledger.NodeInfo{Managed: true})
			w.l.SetAgent(n, ledger.Agent{Ready: true})
			w.reports[n] = report(n, 100, 2)
			w.l.SetReport(w.reports[n], w.now)
		}
		t.Repeat(map[string]func(*rapid.T){
			"offer": w.offer, "begin": w.begin, "end": w.end, "tell": w.tell, "endPod": w.endPod,
			"delete": w.delete, "work": w.work, "report": w.report, "pass": w.pass, "toggleNode": w.toggleNode,
			"toggleAgent": w.toggleAgent, "toggleLost": w.toggleLost,
			"": w.check,
		})
		// gang-17: when all is over nothing is left.
		for _, uid := range slices.Sorted(maps.Keys(w.pods)) {
			p := w.pods[uid]
			p.gone, p.onNode = true, false
			w.l.DropPod(uid, w.now)
			w.l.EndBind(uid, ledger.Refused, w.now)
		}
		for _, n := range []string{"n1", "n2"} {
			w.l.SetAgent(n, ledger.Agent{Ready: true}) // else nobody could tell that it is over
		}
		w.l.Sweep(w.now.Add(time.Hour))
		for _, n := range []string{"n1", "n2"} {
			w.l.SetNode(n, ledger.NodeInfo{Managed: true})
			w.l.SetAgent(n, ledger.Agent{Ready: true})
			w.l.SetReport(report(n, 100, 2), w.now)
			for _, c := range w.l.Node(n).Snapshot().View.Cards {
				if c.Used != (fit.Amount{}) || c.Touched {
					t.Fatalf("%s: %+v is left", n, c)
				}
			}
		}
	})
}
