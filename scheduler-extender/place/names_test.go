package place

import (
	"testing"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/scheduler-extender/fit"
	"github.com/carve-gpu/carve/scheduler-extender/ledger"
)

func TestHoldersAreNamedByWhatTheyHold(t *testing.T) {
	hs := []ledger.Holder{
		{Pod: "a/memory", MemMiB: 9000, State: ledger.Bound}, {Pod: "a/some", MemMiB: 8000, Cores: 10, State: ledger.Bound}, {Pod: "a/most", MemMiB: 4000, Cores: 60, State: ledger.Releasing},
	}
	for reason, want := range map[fit.Reason]string{
		fit.ReasonMemory: "a/memory (9000 MiB), a/some (8000 MiB), a/most (4000 MiB, leaving)",
		fit.ReasonCores:  "a/most (60 %, leaving), a/some (10 %)",
	} {
		if got := Names(hs, &fit.Refusal{Reason: reason}); got != want {
			t.Errorf("%v: %s, want %s", reason, got, want)
		}
	}
	sliced := []ledger.Holder{{Pod: "a/time", MemMiB: 9000, Cores: 25, State: ledger.Releasing, Mode: api.ModeTimeslice}}
	if got := Names(sliced, nil); got != "a/time (9000 MiB counted, leaving)" {
		t.Error(got)
	}
	if got := Names(hs[:1], nil); got != "a/memory (9000 MiB)" {
		t.Error(got)
	}
}
