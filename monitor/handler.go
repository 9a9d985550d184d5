package monitor

import (
	"fmt"
	"net/http"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// keepFor is how long a view is served again.
const keepFor = time.Second

// Source reads the node now; it may take some milliseconds.
type Source interface {
	View() View
}

// Config is what a Handler is made of.
type Config struct {
	Node   string
	Source Source
	// Ready says what keeps the agent from being ready, nil for nothing.
	Ready func() error
	// Hook may be nil.
	Hook *Hook
	// Now is the clock, time.Now if nil.
	Now func() time.Time
}

// Handler serves /metrics, /healthz and /readyz. Every series has the label
// node.
func Handler(c Config) http.Handler {
	registry := prometheus.NewRegistry()
	node := prometheus.WrapRegistererWith(prometheus.Labels{"node": c.Node}, registry)
	s := &cached{source: c.Source, now: c.Now}
	if s.now == nil {
		s.now = time.Now
	}
	node.MustRegister(agentCollector{s}, cardCollector{s}, sliceCollector{s},
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	if c.Hook != nil {
		node.MustRegister(c.Hook.seconds)
	}
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{
		EnableOpenMetrics: true, ErrorHandling: promhttp.ContinueOnError,
	}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if err := c.Ready(); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
	})
	return mux
}

// cached keeps a view for a moment. While one is being read, others wait for
// it instead of reading as well.
type cached struct {
	source Source
	now    func() time.Time

	mu   sync.Mutex
	at   time.Time
	view View
}

func (c *cached) get() View {
	c.mu.Lock()
	defer c.mu.Unlock()
	if now := c.now(); c.at.IsZero() || now.Sub(c.at) >= keepFor || now.Before(c.at) {
		c.view, c.at = c.source.View(), now
	}
	return c.view
}

// gauge and counter emit one series.
func gauge(ch chan<- prometheus.Metric, d *prometheus.Desc, v float64, labels ...string) {
	ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
}

func counter(ch chan<- prometheus.Metric, d *prometheus.Desc, v float64, labels ...string) {
	ch <- prometheus.MustNewConstMetric(d, prometheus.CounterValue, v, labels...)
}

func oneIf(b bool) float64 {
	if b {
		return 1
	}
	return 0
}
