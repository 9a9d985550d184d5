package page

import (
	"embed"
	"encoding/json"
	"io/fs"
	"net/http"
	"sync"
	"time"
)

const (
	// keepFor is how long a state is served again, and how often a stream
	// looks for changes.
	keepFor = time.Second
	// maxStreams bounds the viewers that are served at once.
	maxStreams = 64
)

//go:embed assets
var embedded embed.FS

// Source reads the cards now; it may take some milliseconds.
type Source interface {
	State() State
}

// Config is what a Handler is made of.
type Config struct {
	Source Source
	// Names says who reads the names of holders; none by default.
	Names Names
	// Done ends the streams when it is closed, so that a server can stop.
	Done <-chan struct{}
	// Now is the clock, time.Now if nil. Tick paces the streams: a time is
	// received for each look at what changed; a ticker if nil.
	Now  func() time.Time
	Tick <-chan time.Time
}

// Register adds the page to a mux: / (HTML), /api/v1/cards (the State as JSON)
// and /api/v1/events (its changes). Everything is read only.
func Register(mux *http.ServeMux, c Config) {
	h := &handler{Config: c, streams: make(chan struct{}, maxStreams)}
	if h.Now == nil {
		h.Now = time.Now
	}
	assets, err := fs.Sub(embedded, "assets")
	if err != nil {
		panic(err) // the name above is the one embedded
	}
	files := http.FileServerFS(assets)
	static := secured(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Cache-Control", "no-cache")
		files.ServeHTTP(w, r)
	})
	for _, path := range []string{"/{$}", "/page.css", "/page.js", "/icon.svg"} {
		mux.Handle("GET "+path, static)
	}
	mux.Handle("GET /api/v1/cards", secured(h.cards))
	mux.Handle("GET /api/v1/events", secured(h.events))
}

// Handler serves the page alone.
func Handler(c Config) http.Handler {
	mux := http.NewServeMux()
	Register(mux, c)
	return mux
}

// secured sets what a browser should hold the page to.
func secured(next http.HandlerFunc) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("Content-Security-Policy", "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'")
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("X-Frame-Options", "DENY")
		h.Set("Referrer-Policy", "no-referrer")
		h.Set("Cross-Origin-Opener-Policy", "same-origin")
		h.Set("Cross-Origin-Resource-Policy", "same-origin")
		next(w, r)
	})
}

type handler struct {
	Config
	streams chan struct{}

	mu    sync.Mutex
	at    time.Time
	views [seesAll + 1]*view
}

// view is a state as some readers see it, encoded once for all of them.
type view struct {
	state State
	// nodes are encoded one by one, in the order of the state.
	nodes [][]byte
}

// get reads the state, or serves the one that was read a moment ago. While one
// is being read, others wait for it.
func (h *handler) get(r rights) (*view, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	now := h.Now()
	if h.at.IsZero() || now.Sub(h.at) >= keepFor || now.Before(h.at) {
		s := h.Source.State()
		s.Version = StateVersion
		if s.Nodes == nil {
			s.Nodes = []Node{}
		}
		h.views = [seesAll + 1]*view{seesAll: {state: s}}
		h.at = now
	}
	v := h.views[r]
	if v == nil {
		v = &view{state: hide(h.views[seesAll].state, r == seesNamespace)}
		h.views[r] = v
	}
	if v.nodes == nil {
		nodes := make([][]byte, len(v.state.Nodes))
		for i := range v.state.Nodes {
			var err error
			if nodes[i], err = json.Marshal(&v.state.Nodes[i]); err != nil {
				return nil, err
			}
		}
		v.nodes = nodes
	}
	return v, nil
}

func (h *handler) cards(w http.ResponseWriter, r *http.Request) {
	v, err := h.get(h.Names.rights(r))
	if err != nil {
		http.Error(w, "encode the cards: "+err.Error(), http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	_ = json.NewEncoder(w).Encode(v.state) // a reader that left has no use for an error
}
