package place_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/v1alpha1"
	"github.com/carve-gpu/carve/scheduler-extender/fit"
	"github.com/carve-gpu/carve/scheduler-extender/ledger"
	"github.com/carve-gpu/carve/scheduler-extender/place"
	"github.com/carve-gpu/carve/scheduler-extender/score"
)

var epoch = time.Unix(1_700_000_000, 0)

func report(node string, memMiB int64, cards int, slices ...v1alpha1.Slice) *v1alpha1.GPUNode {
	since := metav1.NewTime(epoch)
	g := &v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: node}, Status: v1alpha1.GPUNodeStatus{HookConnectedSince: &since}}
	for i := range cards {
		g.Status.Cards = append(g.Status.Cards, v1alpha1.Card{UUID: fmt.Sprintf("GPU-%s-%d", node, i), Index: int32(i), Model: "NVIDIA A100-80", MemoryMiB: memMiB,
			Health: v1alpha1.Health{State: v1alpha1.Healthy}})
	}
	if cards > 0 {
		g.Status.Cards[0].Slices = slices
	}
	return g
}

type rig struct {
	*place.Placer
	l     *ledger.Ledger
	names []string
}

// cluster is a placer over managed nodes n1, n2, … with the given cards of 80 GiB.
func cluster(c place.Config, nodes, cards int) *rig {
	if c.Policy.Card == nil {
		c.Policy = score.Binpack
	}
	l := ledger.New(ledger.Config{})
	r := &rig{Placer: place.New(l, c), l: l}
	for i := range nodes {
		name := fmt.Sprint("n", i+1)
		l.SetNode(name, ledger.NodeInfo{Managed: true})
		l.SetAgent(name, ledger.Agent{Ready: true})
		l.SetReport(report(name, 81920, cards), epoch)
		r.names = append(r.names, name)
	}
	l.TakeFreed()
	return r
}

func pod(name string, cs ...api.ContainerRequest) place.Pod {
	return place.Pod{Ref: ledger.Ref{UID: "uid-" + name, Namespace: "default", Name: name}, Request: api.Request{Containers: cs}}
}

func share(mib int64) api.ContainerRequest {
	return api.ContainerRequest{Name: "app", Cards: 1, MemMiB: mib}
}

func (r *rig) filter(p place.Pod, names ...string) place.Filtered {
	if len(names) == 0 {
		names = r.names
	}
	var raw [][]byte
	for _, n := range names {
		raw = append(raw, []byte(n))
	}
	return r.Filter(p, raw, epoch)
}

// run takes a pod through filter and bind, and returns its grant.
func (r *rig) run(t testing.TB, p place.Pod) api.Grant {
	t.Helper()
	f := r.filter(p)
	if f.Err != nil || len(f.Nodes) == 0 {
		t.Fatalf("%s: %+v", p.Name, f)
	}
	g, _, err := r.l.BeginBind(p.Ref, f.Nodes[0], epoch)
	if err != nil {
		t.Fatal(err)
	}
	r.l.EndBind(p.UID, ledger.Written, epoch)
	return g
}

func TestFilterAnswersOneNodeAndBooksIt(t *testing.T) {
	r := cluster(place.Config{}, 3, 2)
	f := r.filter(pod("a", share(8000)))
	if !slices.Equal(f.Nodes, []string{"n1"}) || f.Failed != nil || f.Never != nil || f.Err != nil {
		t.Fatalf("%+v", f)
	}
	// gang-23: the second sees what was offered to the first, before any bind.
	f = r.filter(pod("b", share(80000)))
	if len(f.Nodes) != 1 || r.l.Node("n1").Snapshot().View.Cards[0].Used.MemMiB != 8000 {
		t.Fatalf("%+v", f)
	}
}

func TestAskingNothingPassesEverything(t *testing.T) {
	r := cluster(place.Config{}, 1, 1)
	if f := r.filter(pod("a")); !f.All {
		t.Fatalf("%+v", f)
	}
}

// gang-1: sixteen halves on eight cards, at once.
func TestHalvesGoTwoToACard(t *testing.T) {
	r := cluster(place.Config{}, 1, 8)
	var mu sync.Mutex
	perCard := map[string]int{}
	var all sync.WaitGroup
	for i := range 16 {
		all.Go(func() {
			p := pod(fmt.Sprint("p", i), share(40960))
			f := r.filter(p)
			if len(f.Nodes) != 1 {
				t.Errorf("%+v", f)
				return
			}
			g, _, err := r.l.BeginBind(p.Ref, "n1", epoch)
			if err != nil {
				t.Error(err)
				return
			}
			r.l.EndBind(p.UID, ledger.Written, epoch)
			mu.Lock()
			defer mu.Unlock()
			perCard[g.Containers["app"][0].Card]++
		})
	}
	all.Wait()
	if len(perCard) != 8 {
		t.Fatalf("%v", perCard)
	}
	for c, n := range perCard {
		if n != 2 {
			t.Errorf("%s has %d", c, n)
		}
	}
}

// share-7, gang-16, gang-23: sixteen at once for room for one.
func TestOneOfSixteenGetsTheLastShare(t *testing.T) {
	for range 20 {
		r := cluster(place.Config{}, 1, 1)
		r.run(t, pod("holder", share(60000)))
		var mu sync.Mutex
		var won []string
		var lost []place.Filtered
		var all sync.WaitGroup
		for i := range 16 {
			all.Go(func() {
				p := pod(fmt.Sprint("p", i), share(20000))
				f := r.filter(p)
				mu.Lock()
				defer mu.Unlock()
				if len(f.Nodes) == 0 {
					lost = append(lost, f)
					return
				}
				if _, _, err := r.l.BeginBind(p.Ref, f.Nodes[0], epoch); err != nil {
					t.Error(err)
				}
				r.l.EndBind(p.UID, ledger.Written, epoch)
				won = append(won, p.Name)
			})
		}
		all.Wait()
		if len(won) != 1 || len(lost) != 15 {
			t.Fatalf("%d won, %d lost", len(won), len(lost))
		}
		for _, f := range lost {
			m := f.Failed["n1"]
			if !strings.Contains(m, "asked 20000 MiB, free 1920 of 81920 MiB") || !strings.Contains(m, "default/holder (60000 MiB)") || !strings.Contains(m, "default/"+won[0]+" (20000") {
				t.Fatalf("message %q does not name the holders", m)
			}
		}
	}
}

func TestASecondFilterOfTheSamePodKeepsItsOffer(t *testing.T) {
	r := cluster(place.Config{}, 2, 1)
	p := pod("a", share(50000))
	for range 3 {
		if f := r.filter(p); !slices.Equal(f.Nodes, []string{"n1"}) {
			t.Fatalf("%+v", f)
		}
	}
	// Without that node among the names it moves.
	if f := r.filter(p, "n2"); !slices.Equal(f.Nodes, []string{"n2"}) {
		t.Fatalf("%+v", f)
	}
	if got := r.l.Node("n1").Snapshot().View.Cards[0].Used.MemMiB; got != 0 {
		t.Fatalf("n1 still holds %d MiB", got)
	}
	// A pod that asks for something else now is decided anew.
	p.Request.Containers[0].MemMiB = 60000
	if r.filter(p); r.l.Totals().UsedMiB != 60000 {
		t.Fatalf("%d MiB are held", r.l.Totals().UsedMiB)
	}
}

func TestAPodsOwnOfferIsNotInItsWay(t *testing.T) {
	r := cluster(place.Config{}, 1, 1)
	p := pod("a", share(50000))
	r.filter(p)
	p.Request.Containers[0].MemMiB = 60000
	if f := r.filter(p); len(f.Nodes) != 1 || r.l.Totals().UsedMiB != 60000 {
		t.Fatalf("%+v, %d MiB are held", f, r.l.Totals().UsedMiB)
	}
	p.Soft = true
	if f := r.filter(p); len(f.Nodes) != 1 {
		t.Fatalf("%+v", f)
	}
}

func TestPodsThatAreBoundOrBinding(t *testing.T) {
	r := cluster(place.Config{}, 2, 1)
	p := pod("a", share(8000))
	r.filter(p)
	if _, _, err := r.l.BeginBind(p.Ref, "n1", epoch); err != nil {
		t.Fatal(err)
	}
	if f := r.filter(p); !errors.Is(f.Err, ledger.ErrInFlight) {
		t.Fatalf("%+v", f)
	}
	r.l.EndBind(p.UID, ledger.Written, epoch)
	if f := r.filter(p); !slices.Equal(f.Nodes, []string{"n1"}) {
		t.Fatalf("%+v", f)
	}
	if f := r.filter(p, "n2"); f.Err == nil {
		t.Fatalf("%+v", f)
	}
	if r.l.Totals().UsedMiB != 8000 {
		t.Fatalf("%d MiB are held", r.l.Totals().UsedMiB)
	}
}

// share-8: where the pod has preferences, kube-scheduler chooses.
func TestSoftPreferencesGetEveryNodeThatFits(t *testing.T) {
	for name, c := range map[string]struct {
		config place.Config
		soft   bool
	}{"a soft pod": {place.Config{}, true}, "the cooperative policy": {place.Config{Cooperative: true}, false}} {
		t.Run(name, func(t *testing.T) {
			r := cluster(c.config, 3, 1)
			r.run(t, pod("full", share(81920)))
			p := pod("a", share(8000))
			p.Soft = c.soft
			f := r.filter(p)
			if !slices.Equal(f.Nodes, []string{"n2", "n3"}) {
				t.Fatalf("%+v", f)
			}
			scores := r.Prioritize(p, [][]byte{[]byte("n2"), []byte("n3")})
			if scores[0] != 10 {
				t.Fatalf("the offered node has score %d", scores[0])
			}
			// The scheduler chooses the other.
			if g, _, err := r.l.BeginBind(p.Ref, "n3", epoch); err != nil || g.Node != "n3" {
				t.Fatalf("%+v, %v", g, err)
			}
			if r.l.Totals().UsedMiB != 81920+8000 {
				t.Fatalf("%d MiB are held", r.l.Totals().UsedMiB)
			}
		})
	}
}

func TestNodesThatCarveDoesNotManage(t *testing.T) {
	r := cluster(place.Config{}, 1, 1)
	r.l.SetNode("other", ledger.NodeInfo{Cards: true})
	r.l.SetNode("plain", ledger.NodeInfo{})
	names := []string{"n1", "other", "plain", "unseen"}
	p := pod("a", api.ContainerRequest{Name: "app", Cards: 1, Whole: true})
	if f := r.filter(p, names...); !slices.Equal(f.Nodes, []string{"n1", "other"}) {
		t.Fatalf("%+v", f)
	}
	if s := r.Prioritize(p, [][]byte{[]byte("n1"), []byte("other")}); s[0] != 10 || s[1] != 0 {
		t.Fatalf("scores %v", s)
	}
	if f := r.filter(pod("b", api.ContainerRequest{Name: "app", Cards: 1, Whole: true}), names...); !slices.Equal(f.Nodes, []string{"other"}) {
		t.Fatalf("%+v", f)
	}
	// A share is held where carve manages the cards, and nowhere else.
	if f := r.filter(pod("s", share(8000)), "other"); f.Nodes != nil || f.Never["other"] != "other: shares are handed out on nodes labelled carve.dev/managed=true only" {
		t.Fatalf("%+v", f)
	}
	f := r.filter(pod("c", share(81920)), "n1", "plain", "unseen")
	if f.Nodes != nil || f.Never["plain"] != "plain: the node offers no cards" || f.Failed["unseen"] == "" || f.Failed["n1"] == "" {
		t.Fatalf("%+v", f)
	}
	// A managed node without a report is closed.
	r.l.SetNode("new", ledger.NodeInfo{Managed: true, Cards: true})
	r.l.SetAgent("new", ledger.Agent{Ready: true})
	if f := r.filter(pod("d", share(1)), "new"); f.Nodes != nil || f.Failed["new"] != "new: the node's agent has not reported its cards" {
		t.Fatalf("%+v", f)
	}
}

func TestRefusalsOfManyNodesAreSummedUp(t *testing.T) {
	r := cluster(place.Config{}, 100, 1)
	for i := range 60 {
		r.run(t, pod(fmt.Sprint("half", i), share(50000)))
	}
	r.run(t, pod("near", share(11920)))
	for i := range 40 {
		r.run(t, pod(fmt.Sprint("whole", i), api.ContainerRequest{Name: "app", Cards: 1, Whole: true}))
	}
	f := r.filter(pod("a", share(33000)))
	if len(f.Nodes) > 0 || len(f.Failed) != 1 || len(f.Never) != 0 || f.Reason != fit.ReasonMemory {
		t.Fatalf("%+v", f)
	}
	m := f.Failed["carve"]
	if !strings.HasPrefix(m, "no card for the pod on 100 nodes (60 memory, 40 held-whole); nearest miss n") ||
		!strings.Contains(m, "asked 33000 MiB, free 31920 of 81920 MiB; held by default/half") {
		t.Fatalf("message %q", m)
	}
	if len(m) > 400 {
		t.Fatalf("%d bytes", len(m))
	}
}

func TestRequestsThatCanNeverBeServed(t *testing.T) {
	r := cluster(place.Config{}, 2, 1)
	p := pod("a", share(1))
	p.Request.Isolation = api.ModeMIG
	f := r.filter(p)
	if f.Reason != fit.ReasonIsolation || !strings.Contains(f.Never["carve"], `"mig"`) || r.Waiting() != 0 {
		t.Fatalf("%+v", f)
	}
	f = r.filter(pod("b", share(90000)))
	if f.Never["n1"] != "n1: card 0 (GPU-n1-0, A100-80): asked 90000 MiB, the card has 81920 MiB" || len(f.Never) != 2 || r.Waiting() != 0 {
		t.Fatalf("%+v", f)
	}
	if f := r.filter(place.Pod{Request: p.Request}); f.Err == nil {
		t.Fatal("a pod without UID was served")
	}
}

// share-9 and milestone M4: a waiting pod is woken when room appears, once.
func TestWake(t *testing.T) {
	r := cluster(place.Config{}, 2, 1)
	g := r.run(t, pod("holder", share(60000)))
	r.run(t, pod("other", share(81920)))
	old, young := pod("old", share(40000)), pod("young", share(40000))
	old.Created, young.Created = epoch, epoch.Add(time.Second)
	urgent := pod("urgent", share(50000))
	urgent.Priority, urgent.Created = 10, epoch.Add(2*time.Second)
	big := pod("big", share(81920))
	big.Created = epoch.Add(3 * time.Second)
	pinned := pod("pinned", share(1000)) // to the other node
	for _, p := range []place.Pod{young, old, urgent, big} {
		if f := r.filter(p); len(f.Nodes) > 0 {
			t.Fatalf("%s: %+v", p.Name, f)
		}
	}
	if f := r.filter(pinned, "n2"); len(f.Nodes) > 0 {
		t.Fatalf("%+v", f)
	}
	if r.Waiting() != 5 {
		t.Fatalf("%d wait", r.Waiting())
	}
	r.l.TakeFreed()
	r.l.SetPod(ledger.Pod{Ref: ledger.Ref{UID: "uid-holder", Namespace: "default", Name: "holder"}, Node: "n1", Grant: &g, Containers: []ledger.Container{{Name: "app"}}}, epoch)
	r.l.SetPod(ledger.Pod{Ref: ledger.Ref{UID: "uid-holder", Namespace: "default", Name: "holder"}, Node: "n1", Ended: true}, epoch)
	freed := r.l.TakeFreed()
	if len(freed) != 1 || freed[0].Name != "n1" {
		t.Fatalf("freed %v", freed)
	}
	woken := func(refs []ledger.Ref) string {
		var names []string
		for _, r := range refs {
			names = append(names, r.Name)
		}
		return strings.Join(names, " ")
	}
	// 81,920 MiB are free: the urgent one takes 50,000, no 40,000 fits beside
	// it, and neither does the big one.
	refs, again := r.Wake(freed, 10, epoch)
	if woken(refs) != "urgent" || !again.IsZero() {
		t.Fatalf("woke %q, again %v", woken(refs), again)
	}
	// It isn't woken again at once, and the room is kept for it meanwhile.
	refs, again = r.Wake(freed, 10, epoch.Add(100*time.Millisecond))
	if woken(refs) != "" || !again.Equal(epoch.Add(time.Second)) {
		t.Fatalf("woke %q, again %v", woken(refs), again)
	}
	// Later it is; if it doesn't come then, the others get their turn.
	if refs, _ = r.Wake(freed, 10, epoch.Add(time.Second)); woken(refs) != "urgent" {
		t.Fatalf("woke %q", woken(refs))
	}
	if refs, _ = r.Wake(freed, 10, epoch.Add(1100*time.Millisecond)); woken(refs) != "old young" {
		t.Fatalf("woke %q", woken(refs))
	}
	if f := r.filter(urgent); len(f.Nodes) != 1 || r.Waiting() != 4 {
		t.Fatalf("%+v, %d wait", f, r.Waiting())
	}
	if refs, _ = r.Wake(freed, 10, epoch.Add(time.Hour)); woken(refs) != "" {
		t.Fatalf("woke %q for room that is taken", woken(refs))
	}
	r.Forget("uid-old")
	if r.Waiting() != 3 {
		t.Fatalf("%d wait", r.Waiting())
	}
}

// Room that appears while a pod is being refused is not missed: the pod is
// served, or it is woken.
func TestNoRoomIsMissed(t *testing.T) {
	r := cluster(place.Config{}, 1, 1)
	// Many nodes without a report make a refusal take long enough to be
	// overtaken.
	for i := range 2000 {
		name := fmt.Sprint("empty", i)
		r.l.SetNode(name, ledger.NodeInfo{Managed: true})
		r.l.SetAgent(name, ledger.Agent{Ready: true})
		r.names = append(r.names, name)
	}
	for i := range 300 {
		holder := pod(fmt.Sprint("holder", i), share(81920))
		r.run(t, holder)
		r.l.TakeFreed()
		p := pod(fmt.Sprint("p", i), share(8000))
		var all sync.WaitGroup
		var served bool
		var woken []ledger.Ref
		all.Go(func() { served = len(r.filter(p).Nodes) > 0 })
		all.Go(func() {
			for start := time.Now(); time.Since(start) < time.Duration(i)*4*time.Microsecond; {
			}
			r.l.DropPod(holder.UID, epoch)
			woken, _ = r.Wake(r.l.TakeFreed(), 10, epoch)
		})
		all.Wait()
		if !served && len(woken) == 0 {
			t.Fatalf("round %d: neither served nor woken", i)
		}
		r.l.Withdraw(p.UID)
		r.Forget(p.UID)
	}
}

func TestAPodThatSuitsOtherNodesDoesNotHideOneBehindIt(t *testing.T) {
	r := cluster(place.Config{}, 2, 1)
	r.run(t, pod("h1", share(81920)))
	r.run(t, pod("h2", share(81920)))
	first, second := pod("first", share(8000)), pod("second", share(8000))
	first.Created, second.Created = epoch, epoch.Add(time.Second)
	r.filter(first, "n2")
	r.filter(second, "n1")
	r.l.TakeFreed()
	r.l.DropPod("uid-h1", epoch)
	if refs, _ := r.Wake(r.l.TakeFreed(), 10, epoch); len(refs) != 1 || refs[0].Name != "second" {
		t.Fatalf("woke %v", refs)
	}
}

func TestWakingInVainGetsRare(t *testing.T) {
	r := cluster(place.Config{}, 1, 1)
	r.run(t, pod("holder", share(81920)))
	p := pod("a", share(1000))
	r.filter(p)
	r.l.SetPod(ledger.Pod{Ref: ledger.Ref{UID: "uid-holder", Namespace: "default", Name: "holder"}, Node: "n1", Ended: true}, epoch)
	freed := r.l.TakeFreed()
	now, wakes := epoch, 0
	for range 20 {
		refs, again := r.Wake(freed, 10, now)
		wakes += len(refs)
		if again.IsZero() && len(refs) == 0 {
			break
		}
		now = now.Add(time.Second)
	}
	if wakes < 2 || wakes > 6 {
		t.Fatalf("woken %d times in twenty seconds", wakes)
	}
	// The limit of a round leaves the rest for the next.
	for i := range 5 {
		r.filter(pod(fmt.Sprint("b", i), share(81920)))
	}
	r.l.TakeFreed()
	if refs, _ := r.Wake(freed, 0, now.Add(time.Hour)); len(refs) != 0 {
		t.Fatal("the limit is not kept")
	}
}

func TestAPolicyOfThePod(t *testing.T) {
	r := cluster(place.Config{}, 2, 2)
	r.run(t, pod("a", share(1000)))
	p := pod("b", share(1000))
	p.Request.Policy = "spread"
	if g := r.run(t, p); g.Node != "n2" {
		t.Fatalf("%+v", g)
	}
	if g := r.run(t, pod("c", share(1000))); g.Node != "n1" || g.Containers["app"][0].Card != "GPU-n1-0" {
		t.Fatalf("%+v", g)
	}
}

// A contrived pod can't hold up the others for long.
func TestContrivedPodsAreGivenUp(t *testing.T) {
	r := cluster(place.Config{}, 0, 0)
	for i := range 300 {
		name := fmt.Sprint("m", i)
		g := report(name, 81920, 16)
		for j := range g.Status.Cards {
			g.Status.Cards[j].MemoryMiB = int64(50000 + j)
		}
		r.l.SetNode(name, ledger.NodeInfo{Managed: true})
		r.l.SetAgent(name, ledger.Agent{Ready: true})
		r.l.SetReport(g, epoch)
		r.names = append(r.names, name)
	}
	var cs []api.ContainerRequest
	for i := range 18 {
		cs = append(cs, api.ContainerRequest{Name: fmt.Sprint("c", i), Cards: 1, MemMiB: int64(26000 - i)})
	}
	start := time.Now()
	f := r.filter(pod("a", cs...))
	if len(f.Nodes) > 0 || f.Reason != fit.ReasonSearchLimit {
		t.Fatalf("%+v", f)
	}
	if d := time.Since(start); d > 5*time.Second {
		t.Fatalf("took %v", d)
	}
}

// A hundred pods that wait for room are woken in as many rounds as the limit
// makes of them, without a pause between the rounds, and no more than fit.
func TestABurstOfWaitersIsWokenAtOnce(t *testing.T) {
	r := cluster(place.Config{}, 1, 8)
	for i := range 8 {
		r.run(t, pod(fmt.Sprint("holder", i), share(81920)))
	}
	for i := range 100 {
		p := pod(fmt.Sprintf("w%03d", i), share(8192))
		p.Created = epoch.Add(time.Duration(i) * time.Millisecond)
		if f := r.filter(p); len(f.Nodes) > 0 {
			t.Fatalf("%+v", f)
		}
	}
	for i := range 8 {
		r.l.DropPod(fmt.Sprint("uid-holder", i), epoch)
	}
	freed := r.l.TakeFreed()
	now, woken := epoch, map[string]bool{}
	for round := 1; ; round++ {
		refs, again := r.Wake(freed, 20, now)
		for _, ref := range refs {
			if woken[ref.Name] {
				t.Fatalf("%s is woken again in round %d", ref.Name, round)
			}
			woken[ref.Name] = true
		}
		if len(woken) == 80 {
			break // ten to a card
		}
		if again.After(now) {
			t.Fatalf("round %d: %d are woken, and the next round is at %v", round, len(woken), again.Sub(epoch))
		}
		now = now.Add(100 * time.Millisecond)
	}
	if refs, _ := r.Wake(freed, 20, now); len(refs) > 0 {
		t.Fatalf("%d more are woken than fit", len(refs))
	}
}

// Pods that don't fit are no obstacle for those behind them, however many.
func TestManyWaitersThatDoNotFitHideNone(t *testing.T) {
	r := cluster(place.Config{}, 2, 1)
	r.run(t, pod("holder", share(40000)))
	r.run(t, pod("half", share(41920)))
	r.run(t, pod("other", share(81920)))
	for i := range 3000 {
		p := pod(fmt.Sprintf("big%04d", i), share(81920))
		p.Priority = 10
		r.filter(p)
	}
	r.filter(pod("small", share(30000)))
	r.l.TakeFreed()
	r.l.DropPod("uid-holder", epoch)
	refs, _ := r.Wake(r.l.TakeFreed(), 20, epoch)
	if len(refs) != 1 || refs[0].Name != "small" {
		t.Fatalf("woke %v", refs)
	}
}

// A pod that is filtered again keeps its offer only while it would be made the same way.
func TestAnOfferThatIsOutOfDateIsMadeAnew(t *testing.T) {
	r := cluster(place.Config{}, 1, 1)
	given := func(replicas int32) {
		g := report("n1", 80000, 1)
		g.Status.Cards[0].Modes = []string{"timeslice"}
		g.Status.Cards[0].Sharing = &v1alpha1.Sharing{Mode: "timeslice", Replicas: replicas}
		r.l.SetReport(g, epoch)
	}
	p := pod("a", api.ContainerRequest{Name: "app", Cards: 1, Whole: true})
	for _, replicas := range []int32{4, 2, 2, 5} {
		given(replicas)
		if f := r.filter(p); !slices.Equal(f.Nodes, []string{"n1"}) {
			t.Fatalf("%d replicas: %+v", replicas, f)
		}
		if got := r.l.Node("n1").Snapshot().View.Cards[0].Used.MemMiB; got != 80000/int64(replicas) {
			t.Errorf("%d replicas: %d MiB are held", replicas, got)
		}
	}
	g := report("n1", 80000, 1)
	g.Status.Cards[0].Health.State = v1alpha1.Lost
	r.l.SetReport(g, epoch)
	if f := r.filter(p); len(f.Nodes) > 0 || f.Reason != fit.ReasonUnhealthy {
		t.Errorf("a lost card: %+v", f)
	}
}
