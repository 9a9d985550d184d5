package main

import (
	"bytes"
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"

	corev1 "k8s.io/api/core/v1"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/v1alpha1"
	"github.com/carve-gpu/carve/monitor/page"
	"github.com/carve-gpu/carve/scheduler-extender/ledger"
)

// What agents say of use is there; a container that nobody knows of, and a node whose agent
// doesn't answer, show none.
func TestSlicesShowWhatIsKnownOfUse(t *testing.T) {
	l, server, _ := liveRig(t)
	lost := server.nodes["n2"]
	lost.Status.Cards[0].Slices = []v1alpha1.Slice{{Namespace: "team-b", Pod: "far", Container: "app", MemMiB: 4000, Mode: "timeslice", State: v1alpha1.Active}}
	list, notes, err := l.slices(t.Context(), "")
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := printSlices(&out, list); err != nil {
		t.Fatal(err)
	}
	var got []string
	for line := range strings.Lines(out.String()) {
		got = append(got, strings.Join(strings.Fields(line), " "))
	}
	want := []string{
		"NODE NAMESPACE POD CONTAINER CARD MEMORY MiB USED MiB RESIDUAL MiB CORES MODE STATE",
		"n1 default infer-a app GPU-a 8000 3073 - 30% vgpu active",
		"n1 team-b infer-b app GPU-a 16000 0 - - vgpu prepared",
		"n1 default train app GPU-b whole card - - 100% exclusive active",
		"n2 team-b far app GPU-b 4000 counted - - - timeslice active",
	}
	if strings.Join(got, "\n") != strings.Join(want, "\n") {
		t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	if len(notes) != 1 || !strings.HasPrefix(notes[0], "no live use of n2: ") {
		t.Errorf("notes %q", notes)
	}

	// Who may see nothing but reports is told what is missing, and has them.
	l.ask = func(context.Context, corev1.Pod) (page.State, error) { return page.State{}, errors.New("not you") }
	if list, notes, err = l.slices(t.Context(), "n1"); err != nil || len(list) != 3 || list[0].UsedMiB != nil || len(notes) != 1 {
		t.Errorf("%+v, %q, %v", list, notes, err)
	}
	if _, _, err := l.slices(t.Context(), "n9"); err == nil {
		t.Error("a node that isn't there has slices")
	}
}

// Tables say beside them what their figures don't.
func TestRemarksOnModes(t *testing.T) {
	for mode, want := range map[api.Mode][2]string{
		api.ModeVGPU:      {"", ""},
		api.ModeTimeslice: {"counted, not enforced", ""},
		api.ModeMPS:       {"", "BUSY isn't known of containers in mode mps"},
	} {
		held := strings.Join(remarks("vgpu", string(mode)), "\n")
		busy := strings.Join(remarksOnBusy([]topPod{{Holder: page.Holder{Mode: string(mode)}}}), "\n")
		if (held == "") != (want[0] == "") || !strings.Contains(held, want[0]) || (busy == "") != (want[1] == "") || !strings.Contains(busy, want[1]) {
			t.Errorf("%s: %q, %q", mode, held, busy)
		}
	}
	ratio := 0.5
	if got := remarksOnBusy([]topPod{{Holder: page.Holder{Mode: "mps", ComputeRatio: &ratio}}}); got != nil {
		t.Errorf("of one that is known: %q", got)
	}
}

// The extender's page says how each pod has its part, and what holds nobody to it.
func TestClusterPageShowsModes(t *testing.T) {
	now := time.Unix(1_790_000_000, 0)
	since := metav1.NewTime(now)
	g := &v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: "n1"}, Status: v1alpha1.GPUNodeStatus{HookConnectedSince: &since}}
	for i, mode := range []string{"vgpu", "mps", "timeslice", "exclusive"} {
		g.Status.Cards = append(g.Status.Cards, v1alpha1.Card{UUID: "GPU-" + mode, Index: int32(i), MemoryMiB: 80000, Health: v1alpha1.Health{State: v1alpha1.Healthy},
			Slices: []v1alpha1.Slice{{PodUID: "uid-" + mode, Namespace: "team", Pod: mode, Container: "app", MemMiB: 8000, Mode: mode, State: v1alpha1.Active}}})
	}
	books := ledger.New(ledger.Config{})
	books.SetNode("n1", ledger.NodeInfo{Managed: true})
	books.SetReport(g, now)
	// One of them is known by its pod, the others by the report alone.
	books.SetPod(ledger.Pod{Ref: ledger.Ref{UID: "uid-timeslice", Namespace: "team", Name: "timeslice"}, Node: "n1", Containers: []ledger.Container{{Name: "app"}},
		Grant: &api.Grant{Version: 1, UID: "uid-timeslice", Node: "n1", Generation: 1, Containers: map[string][]api.CardGrant{"app": {{Card: "GPU-timeslice", MemMiB: 8000, Mode: api.ModeTimeslice}}}}}, now)
	reports := cache.NewStore(cache.MetaNamespaceKeyFunc)
	if err := reports.Add(g); err != nil {
		t.Fatal(err)
	}
	for _, c := range (clusterPage{ledger: books, reports: reports}).State().Nodes[0].Cards {
		h := c.Holders[0]
		if mode := strings.TrimPrefix(c.UUID, "GPU-"); len(c.Holders) != 1 || h.Mode != mode || h.Counted != (mode == "timeslice") || h.Whole != (mode == "exclusive") {
			t.Errorf("%s: %+v", mode, c.Holders)
		}
	}
}
