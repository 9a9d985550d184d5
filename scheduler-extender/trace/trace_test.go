package trace_test

import (
	"net/http"
	"net/http/httptest"
	"regexp"
	"testing"

	"github.com/carve-gpu/carve/scheduler-extender/trace"
)

const sent = "4bf92f3577b34da6a3ce929d0e0e4736"

func TestTheCallersTraceIsKept(t *testing.T) {
	for header, kept := range map[string]bool{
		"00-" + sent + "-00f067aa0ba902b7-01":                           true,
		"cc-" + sent + "-00f067aa0ba902b7-01-later":                     true,
		"00-" + sent + "-00f067aa0ba902b7-01-later":                     false,
		"cc-" + sent + "-00f067aa0ba902b7-01later":                      false,
		"ff-" + sent + "-00f067aa0ba902b7-01":                           false,
		"00-" + sent + "-0000000000000000-01":                           false,
		"00-00000000000000000000000000000000-00f067aa0ba902b7-01":       false,
		"00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01":       false,
		"00-" + sent + "-00f067aa0ba902b7-":                             false,
		"00-" + sent + "\n00f067aa0ba902b7-01":                          false,
		"":                                                              false,
		"00-\"}{\"error\":\"x\"}aaaaaaaaaaaaaaaaaa-00f067aa0ba902b7-01": false,
	} {
		h := http.Header{}
		h.Set(trace.Header, header)
		if got := trace.Of(h); (got == sent) != kept || !regexp.MustCompile("^[0-9a-f]{32}$").MatchString(got) {
			t.Errorf("%q: id %q; kept should be %v", header, got, kept)
		}
	}
	two := http.Header{"Traceparent": {"00-" + sent + "-00f067aa0ba902b7-01", "00-" + sent + "-00f067aa0ba902b8-01"}}
	if trace.Of(two) == sent {
		t.Error("one of two headers was chosen")
	}
}

func TestEachRequestHasItsOwn(t *testing.T) {
	seen := map[string]bool{}
	h := trace.Handler(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { seen[trace.ID(r.Context())] = true }))
	for range 100 {
		h.ServeHTTP(httptest.NewRecorder(), httptest.NewRequest(http.MethodPost, "/filter", nil))
	}
	if len(seen) != 100 || seen[""] {
		t.Errorf("100 requests had %d ids", len(seen))
	}
}
