package explain

import (
	"strings"
	"testing"

	"github.com/carve-gpu/carve/api"
)

// What is said of a pod's limits is what holds on its weakest card.
func TestWhatHoldsAPodsLimits(t *testing.T) {
	slice := func(mode api.Mode, layers ...string) Slice {
		return Slice{Container: "app", Mode: string(mode), Layers: layers}
	}
	for name, c := range map[string]struct {
		slices []Slice
		want   string
	}{
		"nobody has said":        {[]Slice{slice(api.ModeVGPU)}, ""},
		"a whole card":           {[]Slice{slice(api.ModeExclusive, "library")}, ""},
		"the library":            {[]Slice{slice(api.ModeVGPU, "library")}, "advisory"},
		"the kernel":             {[]Slice{slice(api.ModeVGPU, "dmem", "library")}, "held by dmem beside"},
		"on one of two cards":    {[]Slice{slice(api.ModeVGPU, "dmem", "library"), slice(api.ModeVGPU, "library")}, "advisory"},
		"two layers on two":      {[]Slice{slice(api.ModeVGPU, "dmem", "library"), slice(api.ModeVGPU, "guard", "library")}, "held by dmem, guard beside"},
		"a whole card beside it": {[]Slice{slice(api.ModeExclusive, "library"), slice(api.ModeVGPU, "dmem", "library")}, "held by dmem beside"},
	} {
		got := limits(c.slices)
		if (got == "") != (c.want == "") || !strings.HasPrefix(got, c.want) {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
		if c.want == "advisory" && !strings.Contains(got, api.AdvisoryMeans) {
			t.Errorf("%s: %q doesn't say what that means", name, got)
		}
	}
}
