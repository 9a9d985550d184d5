package page

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// browser is set by `make test-page`: the page is then drawn by a real one.
var (
	browser = flag.String("browser", "", "a Chromium to test the page in")
	shots   = flag.String("shots", "", "folder to leave screenshots in")
)

// busyState is a cluster of so many nodes in all conditions.
func busyState(scope string, nodes int) State {
	s := State{Scope: scope, At: time.Unix(1_790_000_000, 0).UTC()}
	u := func(v uint64) *uint64 { return &v }
	f := func(v float64) *float64 { return &v }
	count := 2
	for i := range nodes {
		n := Node{Name: fmt.Sprintf("gpu-%d", i+1), Version: "v1", Driver: "550.90.07", HookUp: true}
		for c := range 8 {
			card := Card{Index: c, UUID: fmt.Sprintf("GPU-%08x-7f51-4f0e-9d0b-5c1f5f0a%04x", i, c), Model: "NVIDIA A100-SXM4-80GB", Health: "healthy", MemoryBytes: 81050 << 20, Holders: []Holder{}}
			for k := range (i + c) % 4 {
				h := Holder{Namespace: fmt.Sprintf("team-%c", 'a'+(c+k)%3), Pod: fmt.Sprintf("infer-%d-%d-7c9f8d6b5-x2x%d", c, k, k), State: []string{"active", "prepared", "offered", "releasing"}[(i*7+c+k)%4], LimitBytes: uint64(8000+4000*k) << 20, Percent: 20 * k}
				if scope == ScopeNode {
					h.Container, h.UsedBytes, h.PeakBytes, h.Refusals, h.Processes = "app", u(uint64(2000+2500*k)<<20), u(uint64(4000+2600*k)<<20), u(uint64(k*3)), &count
				}
				card.GrantedBytes += h.LimitBytes
				card.GrantedPercent += h.Percent
				card.Holders = append(card.Holders, h)
			}
			if scope == ScopeNode {
				card.UsedBytes, card.UtilizationRatio, card.PowerWatts, card.TemperatureCelsius, card.Processes = u(card.GrantedBytes/2), f(.37), f(212.4), f(54), &count
			}
			if len(card.Holders) == 0 && c == 5 {
				card.GrantedBytes, card.GrantedPercent = card.MemoryBytes, 100
				card.Holders = []Holder{{Namespace: "team-c", Pod: "train-whole", State: "active", Whole: true, LimitBytes: card.MemoryBytes, Percent: 100}}
			}
			n.Cards = append(n.Cards, card)
		}
		switch i % 9 {
		case 3:
			n.Blocked, n.BlockedFor, n.HookUp = "agent-down", "carve's agent on the node is down (its pod is not ready)", false
		case 5:
			n.Cards[2].Health, n.Cards[2].Reason = "lost", "it fell off the bus"
			n.Cards[6].Cordoned, n.Cards[6].CordonedFor = true, "ECC errors, ticket 4711"
		}
		s.Nodes = append(s.Nodes, n)
	}
	return s
}

func TestInABrowser(t *testing.T) {
	if *browser == "" {
		t.Skip("no browser given: make test-page")
	}
	hostileState := testState("n1", `<img src=x onerror="document.title='owned'">`)
	for _, c := range []struct {
		name  string
		state State
		names Names
		flags []string
		want  []string
	}{
		{"hostile", hostileState, NamesAll, nil, []string{"&lt;/script&gt;&lt;img src=x", "team-b/infer-b app", "lost: it fell off the bus", "1 of 2 cards out"}},
		{"node", busyState(ScopeNode, 1), NamesAll, nil, []string{"node gpu-1", "37% busy", "212 W", "54 °C", "refusals"}},
		{"node-dark", busyState(ScopeNode, 1), NamesAll, []string{"--force-dark-mode", "--blink-settings=preferredColorScheme=0"}, []string{"node gpu-1"}},
		{"eight", busyState(ScopeCluster, 8), NamesAll, nil, []string{"8 nodes, 64 cards", "agent on the node is down", "cordoned: ECC errors, ticket 4711"}},
		{"thousand", busyState(ScopeCluster, 1000), NamesAll, nil, []string{"1,000 nodes, 8,000 cards", "gpu-1000"}},
		{"narrow", busyState(ScopeNode, 1), NamesAll, []string{"--window-size=420,900"}, []string{"node gpu-1"}},
		{"hidden", busyState(ScopeCluster, 2), NamesNone, nil, []string{"Names of holders are hidden", "a pod"}},
		{"empty", State{Scope: ScopeCluster}, NamesAll, nil, []string{"No node reports cards"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			done := make(chan struct{})
			server := httptest.NewServer(slowToLoad(Handler(Config{Source: &source{state: c.state}, Names: c.names, Done: done})))
			defer server.Close()
			defer close(done)
			dom := chromium(t, server, append(c.flags, "--dump-dom")...)
			for _, want := range append(c.want, `class="live"`) {
				if !strings.Contains(dom, want) {
					t.Errorf("the page doesn't say %q", want)
				}
			}
			if strings.Contains(dom, "<img src=x") || strings.Contains(dom, "<title>owned") {
				t.Error("a name became markup")
			}
			if t.Failed() {
				t.Log(dom[:min(len(dom), 4000)])
			}
			if *shots != "" {
				chromium(t, server, append([]string{"--screenshot=" + filepath.Join(*shots, c.name+".png")}, c.flags...)...)
			}
		})
	}
}

// slowToLoad adds a picture that is long in coming: the browser dumps a page when
// all of it is loaded, and by then the script shall have drawn.
func slowToLoad(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/":
			page := httptest.NewRecorder()
			h.ServeHTTP(page, r)
			maps.Copy(w.Header(), page.Header())
			w.Header().Del("Content-Length")
			fmt.Fprint(w, page.Body.String(), `<img src="slow.svg" alt="">`)
		case "/slow.svg":
			select {
			case <-time.After(4 * time.Second):
			case <-r.Context().Done():
			}
			http.NotFound(w, r)
		default:
			h.ServeHTTP(w, r)
		}
	})
}

func chromium(t *testing.T, server *httptest.Server, flags ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	args := append([]string{"--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--user-data-dir=" + t.TempDir(),
		"--window-size=1360,1000", "--timeout=30000"}, flags...)
	cmd := exec.CommandContext(ctx, *browser, append(args, server.URL+"/")...)
	var out, talk bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &talk
	if err := cmd.Run(); err != nil {
		t.Fatalf("%v: %s", err, talk.String())
	}
	return out.String()
}
