package agent

import (
	"fmt"
	"testing"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/vgpu/region"
)

// managed asks for managed memory and returns CUDA's error, 0 for none.
func (p *program) managed(mib int64) int {
	p.t.Helper()
	m := p.say(fmt.Sprintf("managed %dMiB", mib), "alloc")
	if m["ok"] == true {
		p.held = append(p.held, uint64(mib)<<20)
		return 0
	}
	return int(m["error"].(float64))
}

// total is what the programs of a pod say of themselves, in MiB.
func (s *softCard) total(i int) (charged, uncharged uint64) {
	s.t.Helper()
	u, err := region.ReadUsage(s.files.usage(fmt.Sprintf("pod-%d", i), "app"), 1)
	if err != nil {
		s.t.Fatal(err)
	}
	t := u.Total(0)
	return t.UsedBytes >> 20, t.UnchargedBytes >> 20
}

// What a pod says of managed memory and of memory beyond its share holds for its
// programs, and for no others: with a program in each of four shares of 2000 MiB.
func TestPoliciesOnMemoryHoldForPrograms(t *testing.T) {
	s := newSoftShares(t, api.CardGrant{MemMiB: 2000, Oversell: api.OversellHost}, api.CardGrant{MemMiB: 2000, Managed: api.ManagedCount},
		api.CardGrant{MemMiB: 2000, Managed: api.ManagedForbid}, api.CardGrant{MemMiB: 2000})
	s.t = t
	oversold, counted, forbidden, plain := s.run(t, 0, false), s.run(t, 1, false), s.run(t, 2, false), s.run(t, 3, false)

	if !oversold.alloc(1000<<20) || !oversold.alloc(3000<<20) || !oversold.alloc(100<<30) {
		t.Error("a share that may be oversold is refused memory, as much as the card has or more")
	}
	if charged, uncharged := s.total(0); charged > 2000 || charged < 1000 || uncharged != 3000+100<<10 {
		t.Errorf("%d MiB are charged and %d MiB beside, of 1000 within the share and 103 GiB beyond it", charged, uncharged)
	}
	if e := oversold.managed(2000); e != 2 {
		t.Errorf("managed memory beyond an oversold share: error %d, it is charged all the same", e)
	}

	if e := counted.managed(5000); e != 0 {
		t.Errorf("managed memory that is counted only: error %d", e)
	}
	if charged, uncharged := s.total(1); charged > 1000 || uncharged != 5000 {
		t.Errorf("%d MiB are charged and %d MiB counted", charged, uncharged)
	}
	if counted.alloc(2000 << 20) {
		t.Error("other memory beyond the share was granted to a pod that counts managed memory")
	}

	if e := forbidden.managed(1); e != 801 {
		t.Errorf("managed memory that is forbidden: error %d", e)
	}
	if !forbidden.alloc(1000<<20) || forbidden.alloc(1000<<20) {
		t.Error("other memory of a pod that forbids managed memory")
	}

	if e := plain.managed(1000); e != 0 {
		t.Errorf("managed memory within the share: error %d", e)
	}
	if charged, uncharged := s.total(3); charged < 1000 || uncharged != 0 {
		t.Errorf("%d MiB are charged, %d MiB aren't", charged, uncharged)
	}
	if e := plain.managed(1000); e != 2 || plain.alloc(1000<<20) {
		t.Errorf("memory beyond a plain share: error %d", e)
	}

	for range 2 * residualSamples {
		s.look()
	}
	for i := range 4 {
		if r := s.residual(i); r != 0 {
			t.Errorf("pod-%d has a residual of %d bytes and took nothing past its library", i, r)
		}
	}

	// A grant without it, as an earlier extender writes with a resize, takes it away at
	// once, from what comes.
	share := s.held["pod-0"].Grant.Containers["app"]
	share[0].Oversell = ""
	if err := s.prepareFiles(s.held["pod-0"].record); err != nil {
		t.Fatal(err)
	}
	if oversold.alloc(3000 << 20) {
		t.Error("oversold, and the grant says so no more")
	}
	for len(oversold.held) > 0 {
		oversold.free(0)
	}
	if charged, uncharged := s.total(0); charged > 1000 || uncharged != 0 {
		t.Errorf("%d MiB are charged and %d MiB beside, all were freed", charged, uncharged)
	}
}
