package monitor

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Hook counts how fast the hook answers the runtime. The runtime waits for each
// answer, and closes the link after two seconds.
type Hook struct{ seconds *prometheus.HistogramVec }

// NewHook makes one; Config.Hook shows it.
func NewHook() *Hook {
	return &Hook{prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name:    "carve_hook_create_seconds",
		Help:    "Time from a CreateContainer request to its answer, by result: adjusted (the container got a slice), plain (it is to have no card), refused (it must not start).",
		Buckets: []float64{10e-6, 20e-6, 50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 20e-3, 50e-3, .1, .2, .5, 1, 2},
	}, []string{"result"})}
}

// Answered notes one answer.
func (h *Hook) Answered(result string, took time.Duration) {
	h.seconds.WithLabelValues(result).Observe(took.Seconds())
}
