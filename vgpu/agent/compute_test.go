package agent

import (
	"context"
	"encoding/binary"
	"os"
	"testing"
	"time"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/vgpu/compute/loop"
	"github.com/carve-gpu/carve/vgpu/region"
)

// withCores gives the shares of a software card parts of its compute.
func (s *softCard) withCores(cards ...api.CardGrant) {
	for i, c := range cards {
		h := s.held[podName(i)]
		c.Card, c.Mode, c.MemMiB = s.card, api.ModeVGPU, h.Grant.Containers["app"][0].MemMiB
		h.Grant.Containers["app"] = []api.CardGrant{c}
		if err := s.prepareFiles(h.record); err != nil {
			s.t.Fatal(err)
		}
	}
}

func podName(i int) string { return "pod-" + string(rune('0'+i)) }

func TestSharesOfComputeAreThoseThatRun(t *testing.T) {
	s := newSoftCard(t, 1000, 2000, 3000)
	s.t = t
	s.withCores(api.CardGrant{Cores: 30, Fixed: true}, api.CardGrant{Cores: 50, Low: true})
	delete(s.containers, "container-of-pod-1")
	names := func() map[string]loop.CardShare {
		out := map[string]loop.CardShare{}
		for _, share := range s.computeShares() {
			if len(share.Cards) != 1 || share.Container != "app" || share.Limits != s.files.limits(share.UID, "app") || share.Usage != s.files.usage(share.UID, "app") {
				t.Errorf("%+v", share)
			}
			out[share.UID] = share.Cards[0]
		}
		return out
	}
	want := loop.CardShare{UUID: s.card, SharePPM: 300_000}
	if got := names(); len(got) != 2 || got["pod-0"] != want || got["pod-2"] != (loop.CardShare{UUID: s.card, Elastic: true}) {
		t.Errorf("%+v", got)
	}
	s.Agent.listed = false // until the runtime has told, each may run
	if got := names(); len(got) != 3 || got["pod-1"] != (loop.CardShare{UUID: s.card, SharePPM: 500_000, Elastic: true, Low: true}) {
		t.Errorf("%+v", got)
	}
	// A resize counts once it is in the journal.
	h := s.held["pod-0"]
	next := h.record
	next.Grant = grantOf("pod-0", 2, map[string][]api.CardGrant{"app": shareOf(s.card, 1000, 60)})
	h.granted = &next
	if got := names(); got["pod-0"] != (loop.CardShare{UUID: s.card, SharePPM: 600_000, Elastic: true}) {
		t.Errorf("after a resize: %+v", got)
	}
}

// What is launched before anybody has looked is held to the share as well.
func TestComputeIsLimitedFromTheFirstLaunchOn(t *testing.T) {
	for mode, want := range map[ComputeMode]uint64{"": 1, ComputeTurns: 1, ComputeOff: 0} {
		n := startNode(t, func(c *Config) { c.Compute = mode })
		n.api.setPod(podWith(t, "uid-1", grantOf("uid-1", 1, map[string][]api.CardGrant{"app": shareOf(cardA, 100, 30)})))
		eventually(t, "the slice is prepared", func() bool { return n.prepared("uid-1", "app") })
		b, err := os.ReadFile(n.files.limits("uid-1", "app"))
		if err != nil || binary.LittleEndian.Uint64(b[24:]) != want {
			t.Errorf("%q: %v, %v", mode, b[24:32], err)
		}
		n.stop()
		if err := n.files.clear("uid-1"); err != nil {
			t.Error(err)
		}
		n.start()
	}
}

// A container's process finds its terms, and the driver's pid finds the container.
func TestComputeOfARunningProgramIsDivided(t *testing.T) {
	s := newSoftCard(t, 2000)
	s.t = t
	s.withCores(api.CardGrant{Cores: 40, Fixed: true})
	p := s.run(t, 0, false)
	path := s.files.limits("pod-0", "app")
	divided := func() bool {
		b, err := os.ReadFile(path)
		if err != nil || len(b) != region.LimitsFileBytes {
			t.Fatalf("%d bytes, %v", len(b), err)
		}
		return binary.LittleEndian.Uint64(b[24:]) == 1
	}
	until := func(what string, is func() bool) {
		t.Helper()
		for end := time.Now().Add(20 * time.Second); !is(); time.Sleep(5 * time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("%s: not so", what)
			}
		}
	}
	run := func(mode ComputeMode) (stop func()) {
		ctx, cancel := context.WithCancel(t.Context())
		s.Compute = mode
		done := make(chan struct{})
		go func() { defer close(done); s.divideCompute(ctx) }()
		return func() { cancel(); <-done }
	}
	stop := run(ComputeShares)
	until("compute is divided", divided)
	p.say("launch 2ms", "launch")

	r, err := region.OpenComputeReader(s.files.usage("pod-0", "app"), 1)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	f, err := region.OpenCompute(path, 1)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	owners, err := r.Owners()
	if err != nil || len(owners) != 1 {
		t.Fatalf("%+v, %v", owners, err)
	}
	until("the process has its terms", func() bool {
		terms, ok, err := f.Terms(0, owners[0])
		return err == nil && ok && terms.SharePPM == 400_000 && terms.Gate == region.GateCredit
	})
	until("it says what it paid", func() bool {
		out, known := make([]region.ComputeUsage, 1), make([]bool, 1)
		p.say("launch 1ms", "launch")
		p.say("info", "memory")
		return r.Read(0, owners, out, known) == nil && known[0] && out[0].ChargedNS > int64(time.Millisecond)
	})
	found := 0
	for pid := range s.listed() {
		process, key, ok := s.shareOf(pid)
		if ok && key == (loop.Key{UID: "pod-0", Container: "app"}) && process.Owns(owners[0].Slot()) {
			found++
		}
	}
	if found != 1 {
		t.Errorf("%d processes of the driver are the container's", found)
	}
	if _, _, ok := s.shareOf(os.Getpid()); ok {
		t.Error("this process is taken for a container's")
	}
	stop()
	if !divided() {
		t.Error("an agent that ends takes the shares off")
	}
	stop = run(ComputeOff)
	until("one that divides nothing does", func() bool { return !divided() })
	stop()
}
