package suite

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/v1alpha1"
)

// TestMemoryTakenPastTheLibrary lets a program of a container open the driver's own
// file. share-16, share-19: the driver's word on a container's processes counts.
func TestMemoryTakenPastTheLibrary(t *testing.T) {
	create(t, pod("crooked", container("app", share{"gpumem": "4000"})))
	create(t, pod("straight", container("app", share{"gpumem": "5000"})))
	running(t, "crooked")
	running(t, "straight")
	sibling := allocateAndHold(t, "crooked", "app", 500*mib)
	defer sibling.end()
	past := startPast(t, "crooked", "app")
	const taken = 6000 * mib
	if code := past.alloc(taken); code != 0 {
		past.end()
		t.Fatalf("the driver refused a program that goes past the library: CUDA error %d", code)
	}
	eventually(t, "what was taken to count against the container", func(context.Context) string {
		if free := sibling.info(); free != 0 {
			return fmt.Sprintf("%d bytes are free to its sibling", free)
		}
		return ""
	})
	if code := sibling.alloc(2 * mib); code != 2 {
		t.Errorf("a sibling was granted more: CUDA error %d, want 2", code)
	}
	wantShare(t, "straight", "app", 5000)
	if r := sample(metrics(t), "carve_slice_memory_residual_bytes", `pod="straight"`); r != 0 {
		t.Errorf("the neighbour is said to hold %.0f bytes past the library", r)
	}
	if r := sample(metrics(t), "carve_slice_memory_residual_bytes", `pod="crooked"`); r < taken || r > taken+oneContext {
		t.Errorf("the metric says %.0f bytes", r)
	}
	eventually(t, "the report to tell", func(ctx context.Context) string {
		for _, c := range cards(ctx, t) {
			for _, s := range c.Slices {
				if s.Pod == "crooked" && s.State == v1alpha1.Active && s.ResidualMiB >= 6000 {
					return ""
				}
			}
		}
		return "no such slice"
	})
	out, err := cluster.Carve(t.Context(), "top", "pods", "-n", ns)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("carve top pods\n%s", out)
	for line := range strings.Lines(string(out)) {
		if f := strings.Fields(line); len(f) > 7 && f[1] == "crooked" && (len(f[6]) != 4 || f[6] < "6000") {
			t.Errorf("carve top pods says %q", line)
		}
	}
	// Wherever limits are shown stands what they are worth here, and why.
	for what, args := range map[string][]string{
		"carve cards -o wide": {"cards", "-o", "wide"},
		"carve explain pod":   {"explain", "pod", "crooked", "-n", ns},
	} {
		out, err := cluster.Carve(t.Context(), args...)
		if err != nil {
			t.Fatal(err)
		}
		if text := string(out); !strings.Contains(text, api.AdvisoryMeans) {
			t.Errorf("%s says\n%s", what, text)
		}
	}
	if text := metrics(t); !strings.Contains(text, `carve_limits_advisory{node="`) || !strings.Contains(text, `layer="library"`) {
		t.Error("no metric says that limits are advisory")
	}
	past.end()
	eventually(t, "the room to be back once the program has ended", func(context.Context) string {
		if free := sibling.info(); free < 2000*mib {
			return fmt.Sprintf("%d bytes are free", free)
		}
		return ""
	})
	if code := sibling.alloc(2000 * mib); code != 0 {
		t.Errorf("refused though there is room again: CUDA error %d", code)
	}
}
