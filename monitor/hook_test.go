package monitor

import (
	"strings"
	"testing"
	"time"
)

func TestHooksAnswersAreCountedByResult(t *testing.T) {
	hook := NewHook()
	h := Handler(Config{Node: "n1", Source: &source{view: testView()}, Hook: hook})
	hook.Answered("adjusted", 60*time.Microsecond)
	hook.Answered("adjusted", 3*time.Millisecond)
	hook.Answered("refused", time.Second)
	got := scrape(t, h)
	for _, want := range []string{
		`carve_hook_create_seconds_bucket{node="n1",result="adjusted",le="0.0001"} 1`,
		`carve_hook_create_seconds_bucket{node="n1",result="adjusted",le="0.005"} 2`,
		`carve_hook_create_seconds_count{node="n1",result="refused"} 1`,
	} {
		if !strings.Contains(got, want) {
			t.Errorf("the scrape lacks %s:\n%s", want, got)
		}
	}
}
