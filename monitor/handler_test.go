package monitor

import (
	"errors"
	"flag"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil/promlint"
	"go.uber.org/goleak"

	"github.com/carve-gpu/carve/vgpu/gpu"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var update = flag.Bool("update", false, "rewrite the golden files")

// source serves a view that tests change, and counts how often it is read.
type source struct {
	mu    sync.Mutex
	view  View
	reads atomic.Int32
}

func (s *source) View() View {
	s.reads.Add(1)
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.view
}

func (s *source) set(change func(*View)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change(&s.view)
}

func testView() View {
	busy, watts, seconds, ratio := 0.25, 103.5, 12.5, 0.29 // and no temperature
	card := func(index int, uuid, model string) gpu.Card {
		return gpu.Card{UUID: uuid, Index: index, Model: model, MemoryBytes: 80 << 30, ReservedBytes: 1 << 29}
	}
	return View{
		Version: "v1", DriverVersion: "550.90.07", Software: true, LinkedSince: time.Unix(1700000000, 0), KubeletConnected: true,
		Unadjusted: 1, Refused: 2, Records: 3, Enforcement: "advisory",
		Cards: []Card{
			{Card: card(0, "GPU-a", "NVIDIA A100-SXM4-80GB"), GrantedBytes: 24000 << 20, GrantedCores: 80, ContextBytes: 304 << 20, Layers: []string{"dmem", "library"}, MPS: true,
				Sample: gpu.Sample{At: time.Unix(1700000100, 5e8), UsedBytes: 3 << 30, Processes: make([]gpu.Process, 4), Load: gpu.Load{UtilizationRatio: &busy, PowerWatts: &watts}}},
			{Card: card(1, "GPU-b", "NVIDIA A30"), Fault: "GPU is lost", MPS: true, MPSFault: "it has ended"},
			{Card: card(2, "GPU-c", "NVIDIA A30"), Fault: "GPU is lost"},
		},
		Slices: []Slice{
			{Namespace: "team", Pod: "one", Container: "app", Card: "GPU-a", Mode: "vgpu", Active: true,
				LimitBytes: 8000 << 20, UsedBytes: 1 << 30, UnchargedBytes: 5 << 20, ResidualBytes: 3 << 20, PeakBytes: 2 << 30, Refusals: 5, Cores: 30, ComputeSeconds: &seconds, ComputeRatio: &ratio, Processes: 2},
			{Namespace: "team", Pod: "two", Container: "app", Card: "GPU-a", Mode: "vgpu", LimitBytes: 16000 << 20, Cores: 50},
			{Namespace: "team", Pod: "time", Container: "app", Card: "GPU-a", Mode: "timeslice", Active: true, LimitBytes: 16000 << 20, UsedBytes: 7 << 30, Processes: 3},
			// Of these nobody knows what they use: the card says nothing, the file can't be read.
			{Namespace: "team", Pod: "dark", Container: "app", Card: "GPU-c", Mode: "timeslice", Active: true, LimitBytes: 16000 << 20},
			{Namespace: "team", Pod: "unread", Container: "app", Card: "GPU-a", Mode: "vgpu", Active: true, LimitBytes: 16000 << 20, Unread: true},
			// This one says itself what it uses, whatever its card does.
			{Namespace: "team", Pod: "own", Container: "app", Card: "GPU-c", Mode: "mps", Active: true, LimitBytes: 16000 << 20, UsedBytes: 1 << 30, Processes: 1},
			{Namespace: "team", Pod: "whole", Container: "app", Card: "GPU-b", Mode: "exclusive", Active: true},
		},
	}
}

func get(t *testing.T, h http.Handler, path string) (int, string) {
	t.Helper()
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, nil))
	b, err := io.ReadAll(w.Result().Body)
	if err != nil {
		t.Fatal(err)
	}
	return w.Code, string(b)
}

// scrape returns carve's own series.
func scrape(t *testing.T, h http.Handler) string {
	t.Helper()
	code, body := get(t, h, "/metrics")
	if code != http.StatusOK {
		t.Fatalf("/metrics answers %d: %s", code, body)
	}
	var own []string
	for line := range strings.Lines(body) {
		if strings.Contains(line, "carve_") {
			own = append(own, line)
		} else if line = strings.TrimSpace(line); line != "" && line[0] != '#' && !strings.Contains(line, `node="n1"`) {
			t.Errorf("a series without its node: %s", line)
		}
	}
	return strings.Join(own, "")
}

func TestScrapeGolden(t *testing.T) {
	h := Handler(Config{Node: "n1", Source: &source{view: testView()}})
	got := scrape(t, h)
	golden := filepath.Join("testdata", "scrape.txt")
	if *update {
		if err := os.WriteFile(golden, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("the scrape differs from %s (rewrite it with -update):\n%s", golden, got)
	}
	problems, err := promlint.New(strings.NewReader(got)).Lint()
	if err != nil || len(problems) > 0 {
		t.Errorf("lint: %v, %v", problems, err)
	}
}

func TestSeriesGoWithTheirSlice(t *testing.T) {
	now := time.Unix(1700000000, 0)
	s := &source{view: testView()}
	h := Handler(Config{Node: "n1", Source: s, Now: func() time.Time { return now }})
	if !strings.Contains(scrape(t, h), `pod="one"`) {
		t.Fatal("the slice isn't shown")
	}
	s.set(func(v *View) { v.Slices = v.Slices[1:] })
	now = now.Add(keepFor)
	if got := scrape(t, h); strings.Contains(got, `pod="one"`) || !strings.Contains(got, `pod="two"`) {
		t.Errorf("after the slice is gone:\n%s", got)
	}
}

func TestTenScrapersCostOneReading(t *testing.T) {
	now := time.Unix(1700000000, 0)
	s := &source{view: testView()}
	h := Handler(Config{Node: "n1", Source: s, Now: func() time.Time { return now }})
	var all sync.WaitGroup
	for range 10 {
		all.Go(func() { scrape(t, h) })
	}
	all.Wait()
	if n := s.reads.Load(); n != 1 {
		t.Errorf("%d readings for ten scrapes within a second", n)
	}
	now = now.Add(keepFor)
	scrape(t, h)
	if n := s.reads.Load(); n != 2 {
		t.Errorf("%d readings after a second", n)
	}
	now = now.Add(-time.Hour) // the clock was set back
	scrape(t, h)
	if n := s.reads.Load(); n != 3 {
		t.Errorf("%d readings after the clock was set back", n)
	}
}

func TestHealthAndReadiness(t *testing.T) {
	var problem error
	h := Handler(Config{Node: "n1", Source: &source{}, Ready: func() error { return problem }})
	for _, c := range []struct {
		problem error
		code    int
	}{{nil, 200}, {errors.New("the hook has no link"), 503}, {nil, 200}} {
		problem = c.problem
		code, body := get(t, h, "/readyz")
		if code != c.code || c.problem != nil && !strings.Contains(body, c.problem.Error()) {
			t.Errorf("/readyz with %v: %d %q", c.problem, code, body)
		}
		if code, _ := get(t, h, "/healthz"); code != 200 {
			t.Errorf("/healthz with %v: %d: a node that waits for its runtime must not be restarted", c.problem, code)
		}
	}
	if code, _ := get(t, h, "/"); code != 404 {
		t.Errorf("/ answers %d", code)
	}
}

func TestALinkThatIsDown(t *testing.T) {
	v := testView()
	v.LinkedSince = time.Time{}
	got := scrape(t, Handler(Config{Node: "n1", Source: &source{view: v}}))
	if !strings.Contains(got, `carve_hook_connected{node="n1"} 0`) || strings.Contains(got, "carve_hook_connected_timestamp_seconds{") {
		t.Errorf("got\n%s", got)
	}
}
