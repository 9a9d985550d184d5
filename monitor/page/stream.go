package page

import (
	"bytes"
	"encoding/json"
	"net/http"
	"time"
)

const (
	// beat is how long a stream may be silent: proxies end those that are.
	beat = 15 * time.Second
	// stall bounds one write; a viewer that reads no more is let go.
	stall = 10 * time.Second
)

// changes is one event of the stream.
type changes struct {
	Version int             `json:"v"`
	Scope   string          `json:"scope"`
	At      time.Time       `json:"at"`
	Hidden  bool            `json:"hidden,omitempty"`
	All     bool            `json:"all,omitempty"`  // Nodes are all there are
	Gone    []string        `json:"gone,omitempty"` // names of nodes
	Nodes   json.RawMessage `json:"nodes"`
}

// events streams the state: the first event has all nodes, later ones those
// that changed. A viewer that connects again gets all once more, so nothing has
// to be remembered for it.
func (h *handler) events(w http.ResponseWriter, r *http.Request) {
	select {
	case h.streams <- struct{}{}:
		defer func() { <-h.streams }()
	default:
		w.Header().Set("Retry-After", "5")
		http.Error(w, "too many viewers at once", http.StatusServiceUnavailable)
		return
	}
	control := http.NewResponseController(w)
	// The server's limits are for short answers. Writers without deadlines
	// (tests) can do without.
	_ = control.SetReadDeadline(time.Time{})
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("Cache-Control", "no-store")
	w.Header().Set("X-Accel-Buffering", "no")
	tick := h.Tick
	if tick == nil {
		t := time.NewTicker(keepFor)
		defer t.Stop()
		tick = t.C
	}
	known := map[string][]byte{}
	said := h.Now()
	for first := true; ; first = false {
		v, err := h.get(h.Names.rights(r))
		if err != nil {
			return
		}
		event, err := v.since(known, first)
		if err != nil {
			return
		}
		now := h.Now()
		switch {
		case event != nil:
			event = append(append([]byte("data: "), event...), "\n\n"...)
			if first {
				event = append([]byte("retry: 2000\n"), event...)
			}
		case now.Sub(said) >= beat:
			event = []byte(": still here\n\n")
		}
		if event != nil {
			_ = control.SetWriteDeadline(time.Now().Add(stall))
			if _, err := w.Write(event); err != nil {
				return
			}
			if err := control.Flush(); err != nil {
				return
			}
			said = now
		}
		select {
		case <-r.Context().Done():
			return
		case <-h.Done:
			return
		case <-tick:
		}
	}
}

// since encodes what differs from what the viewer knows and notes it as known;
// nil where nothing does.
func (v *view) since(known map[string][]byte, first bool) ([]byte, error) {
	c := changes{Version: v.state.Version, Scope: v.state.Scope, At: v.state.At, Hidden: v.state.Hidden, All: first}
	nodes := []byte{'['}
	there := make(map[string]bool, len(v.nodes))
	for i, encoded := range v.nodes {
		name := v.state.Nodes[i].Name
		there[name] = true
		if bytes.Equal(known[name], encoded) {
			continue
		}
		known[name] = encoded
		if len(nodes) > 1 {
			nodes = append(nodes, ',')
		}
		nodes = append(nodes, encoded...)
	}
	for name := range known {
		if !there[name] {
			c.Gone = append(c.Gone, name)
			delete(known, name)
		}
	}
	if !first && len(nodes) == 1 && c.Gone == nil {
		return nil, nil
	}
	c.Nodes = append(nodes, ']')
	return json.Marshal(c)
}
