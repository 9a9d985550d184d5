package api_test

import (
	"errors"
	"reflect"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/carve-gpu/carve/api"
)

const exampleResize = `{"v":1,"id":"r1","containers":{"app":{"memMiB":12000,"cores":50}}}`

func TestTheFormatOfAResize(t *testing.T) {
	r, err := api.DecodeResize(exampleResize)
	if err != nil {
		t.Fatal(err)
	}
	mem, cores := int64(12000), 50
	if want := (api.Resize{Version: 1, ID: "r1", Containers: map[string]api.ResizeAmounts{"app": {MemMiB: &mem, Cores: &cores}}}); !reflect.DeepEqual(r, want) {
		t.Fatalf("%+v", r)
	}
	if s, err := r.Encode(); err != nil || s != exampleResize {
		t.Fatalf("%s, %v", s, err)
	}
	for _, decode := range []func(string) error{
		func(s string) error { _, err := api.DecodeResize(s); return err },
		func(s string) error { _, err := api.DecodeResizeResult(s); return err },
	} {
		if err := decode(""); !errors.Is(err, api.ErrNoResize) {
			t.Fatalf("error %v", err)
		}
	}
	// Compute may be given back whole, memory may not.
	if _, err := api.DecodeResize(`{"v":1,"id":"r","containers":{"app":{"cores":0}}}`); err != nil {
		t.Fatal(err)
	}
}

func TestResizesThatAreRefused(t *testing.T) {
	for name, c := range map[string]struct{ text, want, id string }{
		"no JSON":                {`memMiB=12000`, "invalid character", ""},
		"a later version":        {`{"v":2,"id":"r","containers":{"app":{"cores":1}}}`, `v: "2" is not allowed; allowed is 1`, "r"},
		"no id":                  {`{"v":1,"containers":{"app":{"cores":1}}}`, `id: "" is not allowed`, ""},
		"an id with a space":     {`{"v":1,"id":"a b","containers":{"app":{"cores":1}}}`, `id: "a b"`, ""},
		"no containers":          {`{"v":1,"id":"r","containers":{}}`, "containers:", "r"},
		"no amount":              {`{"v":1,"id":"r","containers":{"app":{}}}`, "containers.app:", "r"},
		"no memory":              {`{"v":1,"id":"r","containers":{"app":{"memMiB":0}}}`, `containers.app.memMiB: "0" is not allowed; allowed is 1 to`, "r"},
		"memory beyond any card": {`{"v":1,"id":"r","containers":{"app":{"memMiB":99999999}}}`, `containers.app.memMiB: "99999999"`, "r"},
		"101 percent":            {`{"v":1,"id":"r","containers":{"app":{"cores":101}}}`, `containers.app.cores: "101" is not allowed; allowed is 0 to 100 percent`, "r"},
		"a fraction":             {`{"v":1,"id":"r","containers":{"app":{"memMiB":1.5}}}`, "memMiB", "r"},
		"an unknown field":       {`{"v":1,"id":"r","force":true,"containers":{"app":{"cores":1}}}`, `"force"`, "r"},
		"an unknown amount":      {`{"v":1,"id":"r","containers":{"app":{"gpumem":1}}}`, `"gpumem"`, "r"},
		"something after it":     {exampleResize + `{}`, "after the object", ""},
		"too much":               {exampleResize + strings.Repeat(" ", 8<<10), "allowed are 8192", ""},
	} {
		t.Run(name, func(t *testing.T) {
			r, err := api.DecodeResize(c.text)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Fatalf("%+v, %v; want %q", r, err, c.want)
			}
			if !reflect.DeepEqual(r, api.Resize{ID: c.id}) {
				t.Fatalf("left %+v, want the id %q alone", r, c.id)
			}
		})
	}
	for name, text := range map[string]string{
		"an unknown outcome":       `{"v":1,"id":"r","outcome":"maybe","gen":2}`,
		"an unknown field":         `{"v":1,"id":"r","outcome":"granted","gen":2,"x":1}`,
		"a grant without id":       `{"v":1,"outcome":"granted","gen":2}`,
		"a grant without one":      `{"v":1,"id":"r","outcome":"granted"}`,
		"a message that is long":   `{"v":1,"id":"r","outcome":"refused","message":"` + strings.Repeat("x", 1025) + `"}`,
		"a generation below 0":     `{"v":1,"id":"r","outcome":"refused","gen":-1}`,
		"another version":          `{"v":0,"id":"r","outcome":"refused"}`,
		"an id with control bytes": `{"v":1,"id":"\u0000","outcome":"refused"}`,
	} {
		if r, err := api.DecodeResizeResult(text); err == nil || r != (api.ResizeResult{}) {
			t.Errorf("%s was read: %+v, %v", name, r, err)
		}
	}
	if _, err := (api.Resize{}).Encode(); err == nil {
		t.Error("an empty resize was written")
	}
	if _, err := (api.ResizeResult{}).Encode(); err == nil {
		t.Error("an empty result was written")
	}
}

func TestResizesComeBackAsTheyWere(t *testing.T) {
	id := rapid.StringMatching(`[A-Za-z0-9._-]{1,64}`)
	rapid.Check(t, func(t *rapid.T) {
		r := api.Resize{Version: 1, ID: id.Draw(t, "id"), Containers: map[string]api.ResizeAmounts{}}
		for range rapid.IntRange(1, 4).Draw(t, "containers") {
			var a api.ResizeAmounts
			which := rapid.IntRange(1, 3).Draw(t, "which")
			if which&1 != 0 {
				m := rapid.Int64Range(1, api.MaxMemoryMiB).Draw(t, "mem")
				a.MemMiB = &m
			}
			if which&2 != 0 {
				c := rapid.IntRange(0, 100).Draw(t, "cores")
				a.Cores = &c
			}
			r.Containers[rapid.StringMatching(`[a-z][a-z0-9-]{0,10}`).Draw(t, "name")] = a
		}
		s, err := r.Encode()
		if err != nil {
			t.Fatal(err)
		}
		if back, err := api.DecodeResize(s); err != nil || !reflect.DeepEqual(back, r) {
			t.Fatalf("%+v, %v\nwant %+v", back, err, r)
		}
		result := api.ResizeResult{Version: 1, ID: r.ID, Outcome: rapid.SampledFrom([]string{api.ResizeGranted, api.ResizeRefused}).Draw(t, "outcome"),
			Generation: rapid.IntRange(1, 1000).Draw(t, "gen"), Message: rapid.StringN(0, 100, 1024).Draw(t, "message")}
		if s, err = result.Encode(); err != nil {
			t.Fatal(err)
		}
		if back, err := api.DecodeResizeResult(s); err != nil || back != result {
			t.Fatalf("%+v, %v\nwant %+v", back, err, result)
		}
	})
}

func FuzzDecodeResize(f *testing.F) {
	f.Add(exampleResize)
	f.Add(`{"v":1,"id":"r","containers":{"a":{"memMiB":1},"b":{"cores":0}}}`)
	f.Add(`{"v":1,"id":"r","containers":{"a":null}}`)
	f.Add(`{"v":1e0,"id":"r"}`)
	f.Add(``)
	f.Fuzz(func(t *testing.T, s string) {
		r, err := api.DecodeResize(s)
		if err != nil {
			if r.Version != 0 || r.Containers != nil || len(r.ID) > api.MaxResizeID {
				t.Fatalf("%+v beside %v", r, err)
			}
			if len(err.Error()) > 1000+len(s) {
				t.Fatalf("a message of %d bytes", len(err.Error()))
			}
			return
		}
		out, err := r.Encode()
		if err != nil {
			t.Fatalf("read, but not written: %v", err)
		}
		if again, err := api.DecodeResize(out); err != nil || !reflect.DeepEqual(again, r) {
			t.Fatalf("%+v, then %+v, %v", r, again, err)
		}
	})
}

func FuzzDecodeResizeResult(f *testing.F) {
	f.Add(`{"v":1,"id":"r","outcome":"granted","gen":2}`)
	f.Add(`{"v":1,"outcome":"refused","message":"no"}`)
	f.Add(``)
	f.Fuzz(func(t *testing.T, s string) {
		r, err := api.DecodeResizeResult(s)
		if err != nil {
			if r != (api.ResizeResult{}) {
				t.Fatalf("%+v beside %v", r, err)
			}
			return
		}
		out, err := r.Encode()
		if err != nil {
			t.Fatalf("read, but not written: %v", err)
		}
		if again, err := api.DecodeResizeResult(out); err != nil || again != r {
			t.Fatalf("%+v, then %+v, %v", r, again, err)
		}
	})
}
