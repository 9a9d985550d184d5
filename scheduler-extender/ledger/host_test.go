package ledger_test

import (
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/scheduler-extender/fit"
	"github.com/carve-gpu/carve/scheduler-extender/ledger"
	"github.com/carve-gpu/carve/scheduler-extender/score"
)

// hostPod is a pod in the model: what it asks, and where anybody thinks that it is.
type hostPod struct {
	ref   ledger.Ref
	host  fit.Host
	cards bool
	node  string // it was offered, or is bound
	mind  string // offered, bound, or empty
	shown bool   // the API shows it there
	until time.Time
}

// TestWhatPodsTakeOfNodesBesideCards: whatever happens in whichever order, a node has left
// what it may give away less what pods on it ask for, each counted once.
func TestWhatPodsTakeOfNodesBesideCards(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		l, now := ledger.New(ledger.Config{}), epoch
		nodes := []string{"n0", "n1"}
		has := map[string]fit.Host{}
		for _, n := range nodes {
			has[n] = fit.Host{CPUMilli: 64_000, MemMiB: 1 << 18, Pods: 110}
			l.SetNode(n, ledger.NodeInfo{Managed: true, Host: has[n]})
			l.SetAgent(n, ledger.Agent{Ready: true})
			l.SetReport(report(n, 10_000, 1), now)
		}
		pods, serial := map[string]*hostPod{}, 0
		pick := func(t *rapid.T, ok func(p *hostPod) bool) *hostPod {
			var some []string
			for _, uid := range slices.Sorted(maps.Keys(pods)) {
				if ok(pods[uid]) {
					some = append(some, uid)
				}
			}
			if len(some) == 0 {
				t.Skip("no such pod")
			}
			return pods[rapid.SampledFrom(some).Draw(t, "pod")]
		}
		grant := func(p *hostPod) *api.Grant {
			return &api.Grant{Version: api.GrantVersion, UID: p.ref.UID, Node: p.node, Generation: 1,
				Containers: map[string][]api.CardGrant{"app": {{Card: "GPU-" + p.node + "-0", MemMiB: 10, Mode: api.ModeVGPU}}}}
		}
		show := func(p *hostPod) {
			l.SetHost(p.ref.UID, p.node, p.host)
			if p.shown = true; p.cards {
				l.SetPod(ledger.Pod{Ref: p.ref, Node: p.node, Grant: grant(p), Containers: []ledger.Container{{Name: "app", MemMiB: 10}}}, now)
				p.mind = "bound"
			}
		}
		t.Repeat(map[string]func(*rapid.T){
			"a pod comes": func(t *rapid.T) {
				serial++
				uid := fmt.Sprintf("u%d", serial)
				pods[uid] = &hostPod{ref: ledger.Ref{UID: uid, Namespace: "d", Name: uid}, cards: rapid.Bool().Draw(t, "cards"),
					host: fit.Host{CPUMilli: rapid.Int64Range(0, 4000).Draw(t, "cpu"), MemMiB: rapid.Int64Range(0, 9000).Draw(t, "mem"), Pods: 1}}
			},
			"it is offered": func(t *rapid.T) {
				p := pick(t, func(p *hostPod) bool { return p.cards && !p.shown && p.mind != "bound" })
				node := rapid.SampledFrom(nodes).Draw(t, "node")
				ask, _ := fit.NewAsk(api.Request{Containers: []api.ContainerRequest{{Name: "app", Cards: 1, MemMiB: 10}}})
				err := l.Offer(ledger.Offer{Ref: p.ref, Node: l.Node(node), Ask: ask.WithHost(p.host).Settle(), Prefer: score.Binpack.Card}, now)
				if err != nil {
					t.Fatal(err)
				}
				p.node, p.mind, p.until = node, "offered", now.Add(15*time.Second)
			},
			"it is bound": func(t *rapid.T) {
				p := pick(t, func(p *hostPod) bool { return p.mind == "offered" })
				if _, _, err := l.BeginBind(p.ref, p.node, now); err != nil {
					t.Fatal(err)
				}
				l.EndBind(p.ref.UID, ledger.Written, now)
				p.mind = "bound"
			},
			"the bind is refused": func(t *rapid.T) {
				p := pick(t, func(p *hostPod) bool { return p.mind == "offered" })
				if _, _, err := l.BeginBind(p.ref, p.node, now); err != nil {
					t.Fatal(err)
				}
				l.EndBind(p.ref.UID, ledger.Refused, now)
				p.mind = ""
			},
			"it is withdrawn": func(t *rapid.T) {
				p := pick(t, func(p *hostPod) bool { return p.mind == "offered" })
				l.Withdraw(p.ref.UID)
				p.mind = ""
			},
			"time passes": func(t *rapid.T) {
				now = now.Add(20 * time.Second)
				l.Sweep(now)
				for _, p := range pods {
					if p.mind == "offered" {
						p.mind = ""
					}
				}
			},
			"the API shows it": func(t *rapid.T) {
				show(pick(t, func(p *hostPod) bool { return p.mind == "bound" && !p.shown }))
			},
			"one without cards is bound": func(t *rapid.T) {
				p := pick(t, func(p *hostPod) bool { return !p.cards && !p.shown })
				p.node = rapid.SampledFrom(nodes).Draw(t, "node")
				show(p)
			},
			"it is shown again": func(t *rapid.T) {
				p := pick(t, func(p *hostPod) bool { return p.shown })
				p.host.CPUMilli = rapid.Int64Range(0, 4000).Draw(t, "cpu") // a resize
				show(p)
			},
			"it is gone": func(t *rapid.T) {
				p := pick(t, func(p *hostPod) bool { return p.shown })
				l.DropHost(p.ref.UID, p.node)
				l.DropPod(p.ref.UID, now)
				delete(pods, p.ref.UID)
			},
			"": func(t *rapid.T) {
				for _, n := range nodes {
					want := has[n]
					for _, p := range pods {
						if p.node == n && (p.shown || p.mind != "") {
							want = want.Minus(p.host)
						}
					}
					if v := l.Node(n).Snapshot().View; !v.HostKnown || v.Host != want {
						t.Fatalf("%s has %+v left, want %+v", n, v.Host, want)
					}
				}
			},
		})
		for uid, p := range pods {
			l.Withdraw(uid)
			l.DropHost(uid, p.node)
			l.DropPod(uid, now)
		}
		for _, n := range nodes {
			if v := l.Node(n).Snapshot().View; v.Host != has[n] {
				t.Fatalf("all are gone, and %s has %+v of %+v", n, v.Host, has[n])
			}
		}
	})
}

// A pod that was refused for something beside cards hears of it when that is there.
func TestRoomBesideCardsIsNews(t *testing.T) {
	l, now := ledger.New(ledger.Config{}), epoch
	l.SetNode("n0", ledger.NodeInfo{Managed: true, Host: fit.Host{CPUMilli: 4000, MemMiB: 1000, Pods: 10}})
	l.SetReport(report("n0", 1000, 1), now)
	l.SetHost("plain", "n0", fit.Host{CPUMilli: 3000, MemMiB: 10, Pods: 1})
	l.TakeFreed()
	before := l.FreedCount()
	l.SetHost("plain", "n0", fit.Host{CPUMilli: 3500, MemMiB: 10, Pods: 1})
	if l.FreedCount() != before || len(l.TakeFreed()) != 0 {
		t.Error("less room is taken for more")
	}
	l.DropHost("plain", "n0")
	if freed := l.TakeFreed(); l.FreedCount() == before || len(freed) != 1 || freed[0].Name != "n0" {
		t.Errorf("freed %v", freed)
	}
}
