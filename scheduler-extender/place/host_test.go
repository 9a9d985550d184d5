package place_test

import (
	"strings"
	"testing"

	"github.com/carve-gpu/carve/scheduler-extender/fit"
	"github.com/carve-gpu/carve/scheduler-extender/ledger"
	"github.com/carve-gpu/carve/scheduler-extender/place"
	"github.com/carve-gpu/carve/scheduler-extender/score"
)

// What kube-scheduler said that a node has beside cards, that it has: it knows of pods that
// are gone, and of others that aren't shown yet. Who explains, or wakes, goes by what is shown.
func TestWhatNodesHaveBesideCards(t *testing.T) {
	r := cluster(place.Config{}, 1, 1)
	r.l.SetNode("n1", ledger.NodeInfo{Managed: true, Host: fit.Host{CPUMilli: 4000, MemMiB: 1000, Pods: 10}})
	r.l.SetHost("uid-plain", "n1", fit.Host{CPUMilli: 3000, Pods: 1})
	large := pod("large", share(8000))
	large.Host = fit.Host{CPUMilli: 2000, Pods: 1}
	if f := r.filter(large); len(f.Nodes) != 1 {
		t.Fatalf("kube-scheduler found the node to have room: %+v", f)
	}
	if v := r.l.Node("n1").Snapshot().View; v.Host != (fit.Host{CPUMilli: -1000, MemMiB: 1000, Pods: 8}) {
		t.Errorf("left %+v", v.Host)
	}
	r.l.Withdraw(large.UID)
	judged, refusal := place.Judge(r.l, large, score.Binpack)
	if refusal != nil || len(judged) != 1 || judged[0].Refusal == nil || judged[0].Refusal.Reason != fit.ReasonHost ||
		!strings.Contains(judged[0].Message, "asked 2000m of cpu, free 1000") {
		t.Errorf("%+v, %+v", judged, refusal)
	}

	full := pod("full", share(81920))
	r.run(t, full)
	if f := r.filter(large); len(f.Nodes) != 0 {
		t.Fatalf("%+v", f)
	}
	r.l.TakeFreed()
	r.l.DropPod(full.UID, epoch)
	if refs, _ := r.Wake(r.l.TakeFreed(), 10, epoch); len(refs) != 0 {
		t.Errorf("woken though the node has no processors for it: %v", refs)
	}
	r.l.DropHost("uid-plain", "n1")
	if refs, _ := r.Wake(r.l.TakeFreed(), 10, epoch); len(refs) != 1 || refs[0] != large.Ref {
		t.Errorf("woken %v", refs)
	}
}
