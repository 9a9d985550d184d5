package place_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/v1alpha1"
	"github.com/carve-gpu/carve/scheduler-extender/fit"
	"github.com/carve-gpu/carve/scheduler-extender/ledger"
	"github.com/carve-gpu/carve/scheduler-extender/packing/openb"
	"github.com/carve-gpu/carve/scheduler-extender/place"
	"github.com/carve-gpu/carve/scheduler-extender/score"
)

func policy(name string) place.Config {
	p, ok := score.ByName(name)
	if !ok {
		panic(name)
	}
	return place.Config{Policy: p}
}

// trace is a cluster of the published trace's kinds of nodes under a placer, in the given order.
func trace(c place.Config, nodes []openb.Node) *rig {
	l := ledger.New(ledger.Config{})
	r := &rig{Placer: place.New(l, c), l: l}
	for _, n := range nodes {
		l.SetNode(n.Name, ledger.NodeInfo{Managed: true, Host: fit.Host{CPUMilli: n.CPUMilli, MemMiB: n.MemMiB, Pods: 1000}})
		l.SetAgent(n.Name, ledger.Agent{Ready: true})
		g := report(n.Name, 10_000, n.Cards)
		slots := int32(100)
		g.Spec = v1alpha1.GPUNodeSpec{SlotsPerCard: &slots}
		for i := range g.Status.Cards {
			g.Status.Cards[i].Model = n.Model
		}
		l.SetReport(g, epoch)
		r.names = append(r.names, n.Name)
	}
	return r
}

// podOf is a pod of the trace.
func podOf(i int, p *openb.Pod) place.Pod {
	out := pod(fmt.Sprintf("p%05d", i), api.ContainerRequest{Name: "app", Cards: p.Cards, Whole: p.Milli == openb.Card})
	if c := &out.Request.Containers[0]; !c.Whole {
		c.MemPercent, c.Cores = int(p.Milli/10), int(p.Milli/10)
	}
	if p.Models != "" {
		out.Request.Models.Only = strings.Split(p.Models, "|")
	}
	out.Host = fit.Host{CPUMilli: p.CPUMilli, MemMiB: p.MemMiB, Pods: 1}
	return out
}

// arrive sends pods that ask for cards until they would be 130 % of the cards, as
// kube-scheduler does: to the nodes that have enough beside cards. It returns where each
// went, and what part of the cards was given in percent.
func (r *rig) arrive(t testing.TB, tr *openb.Trace) (places []string, percent float64) {
	t.Helper()
	var given int64
	order := openb.Arrivals(tr, 1.3, 7)
	for i := range order.Pods {
		if order.Pods[i].Cards == 0 {
			continue
		}
		p := podOf(i, &order.Pods[i])
		var names []string
		for _, name := range r.names {
			h := r.l.Node(name).Snapshot().View.Host
			if h.CPUMilli >= p.Host.CPUMilli && h.MemMiB >= p.Host.MemMiB {
				names = append(names, name)
			}
		}
		f := place.Filtered{}
		if len(names) > 0 {
			f = r.filter(p, names...)
		}
		if f.Err != nil || len(f.Nodes) > 1 {
			t.Fatalf("%s: %+v", p.Name, f)
		}
		if len(f.Nodes) == 0 {
			places = append(places, "")
			continue
		}
		g, _, err := r.l.BeginBind(p.Ref, f.Nodes[0], epoch)
		if err != nil {
			t.Fatal(err)
		}
		r.l.EndBind(p.UID, ledger.Written, epoch)
		if len(g.Containers["app"]) != p.Request.Containers[0].Cards {
			t.Fatalf("%s: %+v", p.Name, g)
		}
		places = append(places, f.Nodes[0]+g.Containers["app"][0].Card)
		given += order.Pods[i].Total()
	}
	return places, 100 * float64(given) / float64(tr.Capacity())
}

// TestPricesPackBetterThanBinpack goes through the extender's own decisions, with the mix of
// pods learnt from those that come, and no more known at the beginning.
func TestPricesPackBetterThanBinpack(t *testing.T) {
	tr, err := openb.Draw(1)
	if err != nil {
		t.Fatal(err)
	}
	tr.Nodes = tr.Nodes[:200]
	packed := map[string]float64{}
	for _, name := range []string{"price", "binpack", "spread"} {
		_, packed[name] = trace(policy(name), tr.Nodes).arrive(t, tr)
		t.Logf("%s: %.2f %% of the cards", name, packed[name])
	}
	if packed["price"] < packed["binpack"]+1 || packed["price"] < packed["spread"]+3 {
		t.Errorf("by prices %.2f %% are given, by binpack %.2f, by spread %.2f", packed["price"], packed["binpack"], packed["spread"])
	}
}

// The same pods in the same order get the same places, whatever the order in which nodes became
// known, and however often the same is asked.
func TestPricesAreTheSameEachTime(t *testing.T) {
	tr, err := openb.Draw(2)
	if err != nil {
		t.Fatal(err)
	}
	tr.Nodes = tr.Nodes[:60]
	first, _ := trace(policy("price"), tr.Nodes).arrive(t, tr)
	turned := slices.Clone(tr.Nodes)
	slices.Reverse(turned)
	again := trace(policy("price"), turned)
	slices.Reverse(again.names)
	if second, _ := again.arrive(t, tr); !slices.Equal(first, second) {
		t.Error("the same pods went elsewhere")
	}
}

// What is remembered of nodes is what a scan of all of them would say: prices change, nodes
// change, and shapes are forgotten.
func TestChoiceByPriceIsThatOfAScan(t *testing.T) {
	tr, err := openb.Draw(3)
	if err != nil {
		t.Fatal(err)
	}
	tr.Nodes = tr.Nodes[:40]
	r := trace(policy("price"), tr.Nodes)
	order := openb.Arrivals(tr, 1.3, 3)
	looked := 0
	for i := range order.Pods {
		if order.Pods[i].Cards == 0 {
			continue
		}
		p := podOf(i, &order.Pods[i])
		prices := r.Prices()
		f := r.filter(p)
		ask, _ := fit.NewAsk(p.Request)
		hosted := ask.WithHost(p.Host).Settle()
		scorer := score.NewScorer(prices)
		least, cost := int64(-1), map[string]int64{}
		if len(f.Nodes) == 1 {
			r.l.Withdraw(p.UID)
		}
		for _, name := range r.names {
			if _, c, ok := scorer.Judge(&r.l.Node(name).Snapshot().View, hosted); ok {
				if len(cost) == 0 || c < least {
					least = c
				}
				cost[name] = c
			}
		}
		switch {
		case len(f.Nodes) != min(1, len(cost)):
			t.Fatalf("%s: %+v, %d nodes fit", p.Name, f, len(cost))
		case len(f.Nodes) == 0:
			continue
		case cost[f.Nodes[0]] != least:
			t.Fatalf("%s goes to %s at %d, the least is %d", p.Name, f.Nodes[0], cost[f.Nodes[0]], least)
		}
		looked++
		r.run(t, p)
	}
	if looked < 100 {
		t.Errorf("%d decisions only", looked)
	}
}

// Replicas of one owner that serve go to different nodes, unless they want to be together. Of
// others those nodes are taken that cost the least.
func TestReplicasAreSpread(t *testing.T) {
	for name, c := range map[string]struct {
		policy, owner, wish string
		serves              bool
		nodes               int
	}{
		"replicas that serve":   {"price", "deployment", "", true, 4},
		"as is usual":           {"binpack", "deployment", "", true, 4},
		"parts of a job":        {"price", "job", "", false, 1}, // other nodes are kept whole
		"pods of their own":     {"price", "", "", false, 1},
		"replicas that binpack": {"price", "deployment", "binpack", true, 1},
	} {
		t.Run(name, func(t *testing.T) {
			r := cluster(policy(c.policy), 4, 8)
			on := map[string]bool{}
			for i := range 4 {
				p := pod(fmt.Sprint("r", i), api.ContainerRequest{Name: "app", Cards: 1, Whole: true})
				p.Owner, p.Serves, p.Request.Policy = c.owner, c.serves, c.wish
				f := r.filter(p)
				if len(f.Nodes) != 1 {
					t.Fatalf("%+v", f)
				}
				r.run(t, p)
				on[f.Nodes[0]] = true
			}
			if len(on) != c.nodes {
				t.Errorf("on %v", on)
			}
		})
	}
}

// A placer that starts in a cluster where pods run knows at once what pods ask there.
func TestPricesAreMadeOfWhatRuns(t *testing.T) {
	r := cluster(policy("price"), 40, 8)
	for i := range 600 {
		r.run(t, pod(fmt.Sprint("p", i), api.ContainerRequest{Name: "app", Cards: 1, MemPercent: 40, Cores: 30}))
	}
	next := place.New(r.l, policy("price"))
	shapes := next.Prices().Shapes
	if len(shapes) == 0 || shapes[0].Part < 0.99 || shapes[0].Ask.Containers[0].MemPercent != 40 || shapes[0].Ask.Containers[0].Cores != 30 {
		t.Errorf("%+v", shapes)
	}
}

// A share goes to a card in use where prices see no difference, so that a pod that wants a
// whole one finds it.
func TestPricesOpenNoCardForNothing(t *testing.T) {
	for _, cards := range []int{2, 4, 8} {
		for first := range 20 {
			for _, cores := range []int{0, 30} {
				r := cluster(policy("price"), 1, cards)
				r.l.SetNode("n1", ledger.NodeInfo{Managed: true, Host: fit.Host{CPUMilli: 64000, MemMiB: 256 << 10, Pods: 110}})
				asks := []api.ContainerRequest{share(int64(first+1) * 1000), share(16000), share(3000)}
				asks[0].Cores = cores
				on := map[string]bool{}
				for i, c := range asks {
					p := pod(fmt.Sprint("p", i), c)
					p.Host = fit.Host{CPUMilli: 100, MemMiB: 128, Pods: 1}
					on[r.run(t, p).Containers["app"][0].Card] = true
				}
				if len(on) > 1 {
					t.Errorf("%d cards, a share of %d000 MiB and %d %%, two small ones: %d cards are in use", cards, first+1, cores, len(on))
				}
			}
		}
	}
}

// In a cluster of a few cards what has come so far says nothing of what will.
func TestPricesNeedACluster(t *testing.T) {
	c := policy("price")
	c.PricesFrom = 16
	for _, nodes := range []int{1, 2} {
		r := cluster(c, nodes, 8)
		where := map[string]bool{}
		for i := range 3 { // of 49 %: two on a card, or by the common prices one
			g := r.run(t, pod(fmt.Sprint("p", i), share(40000)))
			where[g.Node] = true
		}
		if r.l.Cards() != nodes*8 {
			t.Errorf("%d nodes: %d cards", nodes, r.l.Cards())
		}
		if byPrice := len(where) > 1; byPrice != (nodes > 1) {
			t.Errorf("%d nodes: %d are in use", nodes, len(where))
		}
	}
}
