package page

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// source serves a state that tests change, and counts how often it is read.
type source struct {
	mu    sync.Mutex
	state State
	reads atomic.Int32
}

func (s *source) State() State {
	s.reads.Add(1)
	s.mu.Lock()
	defer s.mu.Unlock()
	out := s.state
	out.Nodes = append([]Node(nil), s.state.Nodes...)
	return out
}

func (s *source) set(change func(*State)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change(&s.state)
}

const hostile = `</script><img src=x onerror="document.title='owned'">`

// testState has one node per name, with a shared card and one that is out.
func testState(names ...string) State {
	used, peak, refusals, busy, watts := uint64(3<<30), uint64(4<<30), uint64(2), 0.4, 211.0
	s := State{Scope: ScopeCluster, At: time.Unix(1_790_000_000, 0).UTC()}
	for _, name := range names {
		s.Nodes = append(s.Nodes, Node{Name: name, Version: "v1", Driver: "550.90.07", HookUp: true, Cards: []Card{
			{Index: 0, UUID: "GPU-a-" + name, Model: "NVIDIA A100-SXM4-80GB", Health: "healthy", MemoryBytes: 81050 << 20, GrantedBytes: 24000 << 20, GrantedPercent: 30,
				UsedBytes: &used, UtilizationRatio: &busy, PowerWatts: &watts, Holders: []Holder{
					{Namespace: "team-a", Pod: hostile, Container: "app", State: "active", LimitBytes: 8000 << 20, Percent: 30, UsedBytes: &used, PeakBytes: &peak, Refusals: &refusals},
					{Namespace: "team-b", Pod: "infer-b", Container: "app", State: "prepared", LimitBytes: 16000 << 20},
				}},
			{Index: 1, UUID: "GPU-b-" + name, Model: "NVIDIA A100-SXM4-80GB", Health: "lost", Reason: "it fell off the bus", MemoryBytes: 81050 << 20, Holders: []Holder{}},
		}})
	}
	return s
}

func answer(h http.Handler, method, path string, change func(*http.Request)) *http.Response {
	r := httptest.NewRequest(method, path, nil)
	if change != nil {
		change(r)
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w.Result()
}

func body(t *testing.T, r *http.Response) string {
	t.Helper()
	b, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestThePageIsReadOnlyAndHeldByTheBrowser(t *testing.T) {
	h := Handler(Config{Source: &source{state: testState("n1")}})
	for path, kind := range map[string]string{"/": "text/html", "/page.css": "text/css", "/page.js": "text/javascript", "/icon.svg": "image/svg+xml", "/api/v1/cards": "application/json"} {
		r := answer(h, http.MethodGet, path, nil)
		if r.StatusCode != 200 || !strings.HasPrefix(r.Header.Get("Content-Type"), kind) {
			t.Errorf("GET %s: %d, %s", path, r.StatusCode, r.Header.Get("Content-Type"))
		}
		if csp := r.Header.Get("Content-Security-Policy"); !strings.HasPrefix(csp, "default-src 'self';") || strings.Contains(csp, "unsafe") || r.Header.Get("X-Content-Type-Options") != "nosniff" {
			t.Errorf("GET %s: headers %v", path, r.Header)
		}
		for _, method := range []string{http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete} {
			if r := answer(h, method, path, nil); r.StatusCode != http.StatusMethodNotAllowed {
				t.Errorf("%s %s: %d", method, path, r.StatusCode)
			}
		}
	}
	for _, path := range []string{"/index.html.bak", "/assets/", "/../handler.go", "/api/v1/", "/api/v1/nodes"} {
		if r := answer(h, http.MethodGet, path, nil); r.StatusCode == 200 {
			t.Errorf("GET %s: %d", path, r.StatusCode)
		}
	}
}

// The policy forbids inline code, so any of it would be dead; and nothing comes
// from elsewhere. Names are put into the document as text only.
func TestAssetsNeedNothingThatThePolicyForbids(t *testing.T) {
	h := Handler(Config{Source: &source{}})
	html, js, css := body(t, answer(h, "GET", "/", nil)), body(t, answer(h, "GET", "/page.js", nil)), body(t, answer(h, "GET", "/page.css", nil))
	for _, bad := range []string{"<style", " style=", " onclick", " onload", "http://", "https://", "<script>"} {
		if strings.Contains(html, bad) {
			t.Errorf("the page has %q", bad)
		}
	}
	for _, bad := range []string{"innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(", "http://", "https://", "localStorage"} {
		if strings.Contains(js, bad) {
			t.Errorf("the script has %q", bad)
		}
	}
	if strings.Contains(css, "url(") || strings.Contains(css, "@import") {
		t.Error("the style loads something")
	}
}

func TestHostileNamesStayData(t *testing.T) {
	h := Handler(Config{Source: &source{state: testState("n1")}, Names: NamesAll})
	text := body(t, answer(h, "GET", "/api/v1/cards", nil))
	if strings.Contains(text, "<") || strings.Contains(text, ">") {
		t.Errorf("markup in the JSON: %s", text)
	}
	var s State
	if err := json.Unmarshal([]byte(text), &s); err != nil || s.Nodes[0].Cards[0].Holders[0].Pod != hostile || s.Version != StateVersion {
		t.Errorf("%v, %+v", err, s)
	}
}

func TestWhoReadsNames(t *testing.T) {
	from := func(remote, host string) func(*http.Request) {
		return func(r *http.Request) { r.RemoteAddr, r.Host = remote, host }
	}
	far := from("10.244.0.9:4711", "10.244.0.3:8080")
	near := from("127.0.0.1:4711", "localhost:8080")
	for _, c := range []struct {
		names          Names
		from           func(*http.Request)
		pod, namespace bool
	}{
		{NamesAll, far, true, true},
		{NamesLocal, far, false, false},
		{NamesLocal, near, true, true},
		{NamesLocal, from("[::1]:4711", "[::1]:8080"), true, true},
		{NamesLocal, from("127.0.0.1:4711", "127.0.0.1"), true, true},
		// A foreign name that resolves to the viewer's loopback.
		{NamesLocal, from("127.0.0.1:4711", "evil.example:8080"), false, false},
		{NamesNamespace, near, false, true},
		{NamesNone, near, false, false},
		{"", near, false, false},
	} {
		h := Handler(Config{Source: &source{state: testState("n1")}, Names: c.names})
		text := body(t, answer(h, "GET", "/api/v1/cards", c.from))
		if strings.Contains(text, "infer-b") != c.pod || strings.Contains(text, "team-b") != c.namespace || strings.Contains(text, `"hidden":true`) == c.pod {
			t.Errorf("%q: %s", c.names, text)
		}
		if !strings.Contains(text, `"limitBytes":16777216000`) {
			t.Errorf("%q: the amounts are gone as well", c.names)
		}
	}
	// Readers with different rights, one after the other within a second.
	h := Handler(Config{Source: &source{state: testState("n1")}, Names: NamesLocal})
	for _, c := range []struct {
		from func(*http.Request)
		pod  bool
	}{{near, true}, {far, false}, {near, true}, {far, false}} {
		if text := body(t, answer(h, "GET", "/api/v1/cards", c.from)); strings.Contains(text, "infer-b") != c.pod {
			t.Errorf("names shown is %v", !c.pod)
		}
	}
}

// stream connects and returns what reads the next event.
func stream(t *testing.T, url string) (next func() changes, end func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	r, err := http.NewRequestWithContext(ctx, "GET", url+"/api/v1/events", nil)
	if err != nil {
		t.Fatal(err)
	}
	tr := &http.Transport{}
	resp, err := (&http.Client{Transport: tr}).Do(r)
	if err != nil {
		t.Fatal(err)
	}
	if resp.StatusCode != 200 || resp.Header.Get("Content-Type") != "text/event-stream" {
		t.Fatalf("events: %d, %v", resp.StatusCode, resp.Header)
	}
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(nil, 64<<20)
	next = func() changes {
		t.Helper()
		for lines.Scan() {
			if data, ok := strings.CutPrefix(lines.Text(), "data: "); ok {
				var c changes
				if err := json.Unmarshal([]byte(data), &c); err != nil {
					t.Fatal(err)
				}
				return c
			}
		}
		t.Fatalf("the stream ended: %v", lines.Err())
		return changes{}
	}
	return next, func() {
		cancel()
		resp.Body.Close()
		tr.CloseIdleConnections()
	}
}

func nodeNames(t *testing.T, c changes) string {
	t.Helper()
	var nodes []Node
	if err := json.Unmarshal(c.Nodes, &nodes); err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, n := range nodes {
		names = append(names, n.Name)
	}
	return strings.Join(names, " ")
}

func TestStreamTellsWhatChanged(t *testing.T) {
	s := &source{state: testState("n1", "n2", "n3")}
	var now atomic.Int64
	tick := make(chan time.Time)
	done := make(chan struct{})
	server := httptest.NewServer(Handler(Config{Source: s, Names: NamesAll, Done: done, Tick: tick, Now: func() time.Time { return time.Unix(now.Load(), 0) }}))
	defer server.Close()
	look := func() { now.Add(2); tick <- time.Time{} }

	next, end := stream(t, server.URL)
	defer end()
	if c := next(); !c.All || nodeNames(t, c) != "n1 n2 n3" || c.Scope != ScopeCluster {
		t.Errorf("first event: %+v", c)
	}
	look() // nothing changed: nothing is said
	s.set(func(st *State) { st.Nodes[1].HookUp = false })
	look()
	if c := next(); c.All || nodeNames(t, c) != "n2" || c.Gone != nil {
		t.Errorf("after n2 changed: %+v", c)
	}
	s.set(func(st *State) { st.Nodes = append(st.Nodes[:1], testState("n4").Nodes...) })
	look()
	c := next()
	if nodeNames(t, c) != "n4" || len(c.Gone) != 2 {
		t.Errorf("after two nodes left and one came: %+v", c)
	}
	// Whoever connects again gets all.
	again, endAgain := stream(t, server.URL)
	defer endAgain()
	if c := again(); !c.All || nodeNames(t, c) != "n1 n4" {
		t.Errorf("again: %+v", c)
	}
	// A server that stops isn't kept by those who look.
	close(done)
	stopped := make(chan struct{})
	go func() { server.Close(); close(stopped) }()
	select {
	case <-stopped:
	case <-time.After(time.Minute):
		t.Error("the streams keep the server")
	}
}

func TestStreamsAreBounded(t *testing.T) {
	done := make(chan struct{})
	server := httptest.NewServer(Handler(Config{Source: &source{state: testState("n1")}, Done: done}))
	defer server.Close()
	defer close(done)
	for range maxStreams {
		next, end := stream(t, server.URL)
		defer end()
		next()
	}
	r, err := http.Get(server.URL + "/api/v1/events")
	if err != nil {
		t.Fatal(err)
	}
	defer http.DefaultClient.CloseIdleConnections()
	defer r.Body.Close()
	if r.StatusCode != http.StatusServiceUnavailable || r.Header.Get("Retry-After") == "" {
		t.Errorf("one too many: %d", r.StatusCode)
	}
}

// A server's limits for short answers must not end a stream.
func TestStreamOutlivesTheServersTimeouts(t *testing.T) {
	s := &source{state: testState("n1")}
	tick := make(chan time.Time)
	done := make(chan struct{})
	var now atomic.Int64
	server := httptest.NewUnstartedServer(Handler(Config{Source: s, Done: done, Tick: tick, Now: func() time.Time { return time.Unix(now.Load(), 0) }}))
	server.Config.ReadTimeout, server.Config.WriteTimeout = 200*time.Millisecond, 200*time.Millisecond
	server.Start()
	defer server.Close()
	defer close(done)
	next, end := stream(t, server.URL)
	defer end()
	next()
	time.Sleep(time.Second) // longer than both: what is waited for is that nothing happens
	s.set(func(st *State) { st.Nodes[0].HookUp = false })
	now.Add(2)
	select {
	case tick <- time.Time{}:
		if c := next(); nodeNames(t, c) != "n1" {
			t.Errorf("%+v", c)
		}
	case <-time.After(10 * time.Second):
		t.Fatal("the server ended the stream")
	}
}

func TestManyViewersCostOneReading(t *testing.T) {
	s := &source{state: testState("n1")}
	h := Handler(Config{Source: s, Now: func() time.Time { return time.Unix(5, 0) }})
	var all sync.WaitGroup
	for range 10 {
		all.Go(func() { answer(h, "GET", "/api/v1/cards", nil) })
	}
	all.Wait()
	if n := s.reads.Load(); n != 1 {
		t.Errorf("%d readings for ten viewers within a second", n)
	}
}

func BenchmarkAThousandNodes(b *testing.B) {
	var names []string
	for i := range 1000 {
		names = append(names, fmt.Sprint("n", i))
	}
	s := &source{state: testState(names...)}
	h := &handler{Config: Config{Source: s}}
	now := time.Unix(0, 0)
	h.Now = func() time.Time { now = now.Add(time.Minute); return now }
	known := map[string][]byte{}
	for b.Loop() {
		v, err := h.get(seesAll)
		if err != nil {
			b.Fatal(err)
		}
		if _, err := v.since(known, false); err != nil {
			b.Fatal(err)
		}
	}
}
