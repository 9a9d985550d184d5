package place_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/scheduler-extender/fit"
	"github.com/carve-gpu/carve/scheduler-extender/ledger"
	"github.com/carve-gpu/carve/scheduler-extender/place"
	"github.com/carve-gpu/carve/scheduler-extender/score"
)

// grow shows a pod that asked 1,000 MiB with a share of another size.
func (r *rig) grow(mib int64, generation int) {
	g := api.Grant{Version: 1, UID: "uid-grown", Node: "n1", Generation: generation, Containers: map[string][]api.CardGrant{"app": {{Card: "GPU-n1-0", MemMiB: mib, Mode: api.ModeVGPU}}}}
	r.l.SetPod(ledger.Pod{Ref: ledger.Ref{UID: "uid-grown", Namespace: "default", Name: "grown"}, Node: "n1", Grant: &g,
		Containers: []ledger.Container{{Name: "app", MemMiB: 1000}}}, epoch)
}

// A pod that has room and is over its namespace's quota is refused with the
// sentence, and woken when the quota allows it, not when cards come free.
func TestAPodOverItsQuotaWaitsForTheQuota(t *testing.T) {
	r := cluster(place.Config{}, 2, 1)
	r.l.SetQuota("default", ledger.Quota{Name: "q", MemMiB: 10000, Cores: -1})
	r.grow(10000, 2)
	for i, name := range []string{"first", "second", "third"} {
		p := pod(name, share(3000))
		p.Created = epoch.Add(time.Duration(i) * time.Second)
		f := r.filter(p)
		if len(f.Nodes) > 0 || f.Reason != fit.ReasonQuota || len(f.Failed) != 1 || f.Never != nil {
			t.Fatalf("%+v", f)
		}
		for _, m := range f.Failed {
			if !strings.HasPrefix(m, "ResourceQuota default/q allows requests.nvidia.com/gpumem of 10000") || !strings.Contains(m, "grown (asked 1000, holds 10000)") {
				t.Fatal(m)
			}
		}
	}
	elsewhere := pod("elsewhere", share(3000))
	elsewhere.Namespace = "other"
	if f := r.filter(elsewhere); len(f.Nodes) != 1 {
		t.Fatalf("%+v", f)
	}
	whole := pod("whole", api.ContainerRequest{Name: "app", Cards: 1, Whole: true})
	if f := r.filter(whole); len(f.Nodes) != 1 {
		t.Fatalf("whole cards are no memory to a quota: %+v", f)
	}
	freed := []*ledger.Node{r.l.Node("n1"), r.l.Node("n2")}
	if refs, again := r.Wake(freed, 10, epoch); len(refs) > 0 || !again.IsZero() {
		t.Fatalf("woke %v for cards", refs)
	}
	// Each judgement of `carve explain` is the same.
	judged, _ := place.Judge(r.l, place.Pod{Ref: ledger.Ref{Namespace: "default"}, Request: pod("x", share(3000)).Request}, score.Binpack)
	if len(judged) != 2 || judged[0].Refusal == nil || judged[0].Refusal.Reason != fit.ReasonQuota || !strings.Contains(judged[0].Message, "grown (asked 1000, holds 10000)") {
		t.Fatalf("%+v", judged)
	}
	if _, again := r.WakeSpaces(map[string]bool{"other": true}, 10, epoch); !again.IsZero() {
		t.Fatal("another namespace's quota concerns nobody")
	}

	// Room for two of the three, and for the oldest of them.
	r.grow(4000, 3)
	spaces := map[string]bool{}
	for _, n := range r.l.TakeRelaxed() {
		spaces[n] = true
	}
	names := func(refs []ledger.Ref) (out []string) {
		for _, r := range refs {
			out = append(out, r.Name)
		}
		return out
	}
	refs, again := r.WakeSpaces(spaces, 1, epoch)
	if !slices.Equal(names(refs), []string{"first"}) || !again.Equal(epoch) {
		t.Fatalf("woke %v, again %v", names(refs), again)
	}
	refs, again = r.WakeSpaces(spaces, 10, epoch)
	if !slices.Equal(names(refs), []string{"second"}) || !again.Equal(epoch.Add(time.Second)) {
		t.Fatalf("woke %v, again %v", names(refs), again)
	}
	for _, name := range []string{"first", "second"} {
		if f := r.filter(pod(name, share(3000))); len(f.Nodes) != 1 {
			t.Fatalf("%+v", f)
		}
	}
	if refs, again = r.WakeSpaces(spaces, 10, epoch.Add(time.Hour)); len(refs) > 0 || !again.IsZero() {
		t.Fatalf("woke %v for what is taken", names(refs))
	}
	r.grow(1000, 4) // no share is larger than asked: Kubernetes' count is all there is
	if refs, _ = r.WakeSpaces(spaces, 10, epoch); !slices.Equal(names(refs), []string{"third"}) {
		t.Fatalf("woke %v", names(refs))
	}
}

// BenchmarkFilter is one decision over a thousand nodes whose answers are cached,
// in a namespace with many pods: without quota, with one and nothing grown, and
// with one and a share that has grown.
func BenchmarkFilter(b *testing.B) {
	for name, prepare := range map[string]func(r *rig){
		"no quota": func(*rig) {},
		"quota":    func(r *rig) { r.l.SetQuota("default", ledger.Quota{Name: "q", MemMiB: 1 << 40, Cores: -1}) },
		"quota, grown share": func(r *rig) {
			r.l.SetQuota("default", ledger.Quota{Name: "q", MemMiB: 1 << 40, Cores: -1})
			r.grow(5000, 2)
		},
	} {
		b.Run(name, func(b *testing.B) {
			r := cluster(place.Config{}, 1000, 8)
			prepare(r)
			var raw [][]byte
			for _, n := range r.names {
				raw = append(raw, []byte(n))
			}
			for i := range 4000 {
				r.run(b, pod(fmt.Sprint("old", i), share(1000)))
			}
			p := pod("new", share(1000))
			b.ReportAllocs()
			for b.Loop() {
				if f := r.Filter(p, raw, epoch); len(f.Nodes) != 1 {
					b.Fatalf("%+v", f)
				}
				r.l.Withdraw(p.UID)
			}
		})
	}
}
