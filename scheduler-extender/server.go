package extender

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	wirev1 "k8s.io/kube-scheduler/extender/v1"

	"github.com/carve-gpu/carve/scheduler-extender/fit"
	"github.com/carve-gpu/carve/scheduler-extender/ledger"
	"github.com/carve-gpu/carve/scheduler-extender/place"
	"github.com/carve-gpu/carve/scheduler-extender/trace"
)

// maxBody bounds a request: ten thousand names of 253 bytes and the largest
// pod that etcd stores fit well.
const maxBody = 8 << 20

// maxKept is the largest buffer that is kept for the next request: what ten
// thousand names take. One that a single large request has grown goes.
const maxKept = 1 << 20

// Config is what a Server is made of.
type Config struct {
	Ledger *ledger.Ledger
	Placer *place.Placer
	Binder Binder
	Pods   Pods
	// Agents is asked about a node before each bind; nil where what the ledger
	// has been told must do.
	Agents Agents
	// Ready reports whether the ledger shows the cluster, and this process is the one that
	// answers.
	Ready func() bool
	// Serves is what /readyz says: also of a process that stands by. nil is Ready.
	Serves func() bool
	// Client is the common name that a certificate must have for the verbs.
	Client   string
	Registry *prometheus.Registry
	// Page is served beside health and metrics, for all other paths; nil for
	// nothing. Whom it shows names to is its own affair.
	Page http.Handler
	Log  *slog.Logger
	// Now is the clock.
	Now func() time.Time
}

// Server answers kube-scheduler.
type Server struct {
	Config
	metrics *metrics
}

// New makes a server and registers its metrics.
func New(c Config) *Server {
	return &Server{Config: c, metrics: newMetrics(c)}
}

// Verbs serves /filter, /prioritize, /preempt and /bind. It answers only connections with
// a verified client certificate of the right name, whatever listener it is put
// behind.
func (s *Server) Verbs() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /filter", s.verb("filter", s.filter))
	mux.HandleFunc("POST /prioritize", s.verb("prioritize", s.prioritize))
	mux.HandleFunc("POST /preempt", s.verb("preempt", s.preempt))
	mux.HandleFunc("POST /bind", s.verb("bind", s.bind))
	return trace.Handler(s.authenticated(mux))
}

// Plain serves what needs no certificate and shows no names: /healthz (the
// process runs), /readyz (the ledger shows the cluster; it answers, or stands by) and /metrics.
func (s *Server) Plain() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if serves := s.Serves; serves != nil && !serves() || serves == nil && !s.Ready() {
			http.Error(w, "the ledger is not complete yet", http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
	})
	if s.Page != nil {
		mux.Handle("GET /", s.Page)
	}
	mux.Handle("GET /metrics", promhttp.HandlerFor(s.Registry, promhttp.HandlerOpts{}))
	return mux
}

func (s *Server) authenticated(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		name := ""
		if r.TLS != nil && len(r.TLS.VerifiedChains) > 0 {
			name = r.TLS.VerifiedChains[0][0].Subject.CommonName
		}
		if name == "" || name != s.Client {
			s.metrics.denied.Inc()
			s.log(r.Context()).Warn("refused a caller", "remote", r.RemoteAddr, "path", r.URL.Path, "name", name)
			http.Error(w, "a client certificate of the scheduler is needed", http.StatusForbidden)
			return
		}
		next.ServeHTTP(w, r)
	})
}

var errNotReady = errors.New("the extender's ledger is not complete yet, or another extender answers")

// bodies are reused: a request over ten thousand nodes takes 200 KiB.
var bodies = sync.Pool{New: func() any { return new(bytes.Buffer) }}

// log is the log of one request: its lines carry the request's trace. Replies don't: an error
// that reads otherwise at each try makes an event of each, and a write of the pod's condition.
func (s *Server) log(ctx context.Context) *slog.Logger {
	return s.Log.With("trace", trace.ID(ctx))
}

// verb reads a bounded body, measures, and writes what the handler returns.
// Faults of any kind go through the handler's own error reply.
func (s *Server) verb(name string, handle func(ctx context.Context, body []byte, fault error) any) http.HandlerFunc {
	seconds := s.metrics.seconds.WithLabelValues(name)
	return func(w http.ResponseWriter, r *http.Request) {
		start := time.Now()
		defer func() { seconds.Observe(time.Since(start).Seconds()) }()
		buf := bodies.Get().(*bytes.Buffer)
		defer func() {
			if buf.Cap() <= maxKept {
				bodies.Put(buf)
			}
		}()
		buf.Reset()
		n, fault := buf.ReadFrom(io.LimitReader(r.Body, maxBody+1))
		switch {
		case fault != nil:
			fault = fmt.Errorf("read the request: %w", fault)
		case n > maxBody:
			fault = fmt.Errorf("read the request: it has more than %d bytes", maxBody)
		case !s.Ready():
			fault = errNotReady
			// Over a new connection the caller comes to the one that answers.
			w.Header().Set("Connection", "close")
		}
		answer := handle(r.Context(), buf.Bytes(), fault)
		if failed, is := answer.(failure); is {
			http.Error(w, failed.Error(), http.StatusServiceUnavailable)
			return
		}
		reply, err := json.Marshal(answer)
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		if _, err := w.Write(reply); err != nil {
			s.log(r.Context()).Debug("reply lost", "verb", name, "error", err)
		}
	}
}

// failure is the answer of a verb whose reply has no place for an error: another status than
// 200 is one.
type failure struct{ error }

func (s *Server) filter(ctx context.Context, body []byte, fault error) any {
	s.metrics.lastFilter.Set(float64(s.Now().Unix()))
	var a args
	if fault == nil {
		a, fault = decodeArgs(body)
	}
	if fault != nil {
		s.log(ctx).Info("filter: not answered", "error", fault)
		return &wirev1.ExtenderFilterResult{Error: fault.Error()}
	}
	var out place.Filtered
	if a.invalid != nil {
		out = place.Refuse(fit.ReasonInvalid, a.invalid.Error())
	} else {
		out = s.Placer.Filter(a.pod, a.names, s.Now())
	}
	log := s.log(ctx).With("pod", a.pod.Namespace+"/"+a.pod.Name, "uid", a.pod.UID)
	switch {
	case out.Err != nil:
		log.Info("filter: not now", "error", out.Err)
		return &wirev1.ExtenderFilterResult{Error: out.Err.Error()}
	case out.All:
		out.Nodes = make([]string, len(a.names))
		for i, n := range a.names {
			out.Nodes[i] = string(n)
		}
	case len(out.Nodes) == 0 && out.Reason != "":
		s.metrics.refusals.WithLabelValues(string(out.Reason)).Inc()
		// Refused pods are filtered again with every event of the cluster; the
		// reason stands in the pod's condition and in the metric.
		log.Debug("filter: refused", "nodes", len(a.names), "reason", out.Reason)
	default:
		log.Debug("filter: offered", "of", len(a.names), "nodes", len(out.Nodes))
	}
	if out.Nodes == nil {
		out.Nodes = []string{}
	}
	return &wirev1.ExtenderFilterResult{NodeNames: &out.Nodes, FailedNodes: out.Failed, FailedAndUnresolvableNodes: out.Never}
}

// prioritize has no way to report an error but the status; a fault scores all
// nodes alike, and bind decides.
func (s *Server) prioritize(ctx context.Context, body []byte, fault error) any {
	list := wirev1.HostPriorityList{}
	var a args
	if fault == nil {
		a, fault = decodeArgs(body)
	}
	if fault != nil {
		s.log(ctx).Info("prioritize: all nodes alike", "error", fault)
		return list
	}
	scores := make([]int64, len(a.names))
	if a.invalid == nil {
		scores = s.Placer.Prioritize(a.pod, a.names)
	}
	for i, n := range a.names {
		list = append(list, wirev1.HostPriority{Host: string(n), Score: scores[i]})
	}
	return list
}
