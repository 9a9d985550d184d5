package extender

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/carve-gpu/carve/scheduler-extender/fit"
	"github.com/carve-gpu/carve/scheduler-extender/ledger"
)

type metrics struct {
	seconds  *prometheus.HistogramVec
	refusals *prometheus.CounterVec
	binds    *prometheus.CounterVec
	denied   prometheus.Counter
	// lastFilter shows whether kube-scheduler asks at all.
	lastFilter prometheus.Gauge
}

func newMetrics(c Config) *metrics {
	m := &metrics{
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "carve_extender_verb_seconds", Help: "Time to answer kube-scheduler, by verb.",
			// 0.3 ms and 5 ms are what a planned and an unplanned pod should take.
			Buckets: []float64{.00005, .0001, .0002, .0003, .0005, .001, .002, .003, .005, .0075, .01, .025, .1, .5, 1, 5},
		}, []string{"verb"}),
		refusals: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "carve_extender_refusals_total", Help: "Pods that no node takes, by reason of the nearest miss.",
		}, []string{"reason"}),
		binds: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "carve_extender_binds_total", Help: "Bind calls by result: granted, plain (no grant), again (bound already), conflict (room gone, or the card given otherwise), blocked (agent or hook gone since the offer), quota (the namespace's is used up since the offer), refused, failed, fault.",
		}, []string{"result"}),
		denied: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "carve_extender_denied_total", Help: "Calls without the scheduler's certificate.",
		}),
	}
	m.lastFilter = prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "carve_extender_last_filter_timestamp_seconds", Help: "When kube-scheduler last asked where a pod fits, 0 for never.",
	})
	c.Registry.MustRegister(m.seconds, m.refusals, m.binds, m.denied, m.lastFilter, &ledgerMetrics{c})
	return m
}

var (
	entriesDesc = prometheus.NewDesc("carve_ledger_entries", "Pods in the ledger by state.", []string{"state"}, nil)
	memoryDesc  = prometheus.NewDesc("carve_ledger_memory_mib", "Memory of all managed cards: total, used, free, debt.", []string{"kind"}, nil)
	cardsDesc   = prometheus.NewDesc("carve_ledger_cards", "Cards of the managed nodes.", nil, nil)
	nodesDesc   = prometheus.NewDesc("carve_ledger_nodes", "Managed nodes.", nil, nil)
	blockedDesc = prometheus.NewDesc("carve_ledger_blocked_nodes", "Managed nodes that take no new pods, by reason.", []string{"reason"}, nil)
	waitingDesc = prometheus.NewDesc("carve_extender_waiting_pods", "Refused pods that wait for room.", nil, nil)
)

// ledgerMetrics adds up the ledger when it is scraped.
type ledgerMetrics struct{ Config }

func (m *ledgerMetrics) Describe(out chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{entriesDesc, memoryDesc, cardsDesc, nodesDesc, blockedDesc, waitingDesc} {
		out <- d
	}
}

func (m *ledgerMetrics) Collect(out chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		out <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	t := m.Ledger.Totals()
	gauge(entriesDesc, float64(t.Offers), ledger.Offered.String())
	gauge(entriesDesc, float64(t.Bound), ledger.Bound.String())
	gauge(entriesDesc, float64(t.Releasing), ledger.Releasing.String())
	gauge(memoryDesc, float64(t.MemMiB), "total")
	gauge(memoryDesc, float64(t.UsedMiB), "used")
	gauge(memoryDesc, float64(t.FreeMiB), "free")
	gauge(memoryDesc, float64(t.DebtMiB), "debt")
	gauge(cardsDesc, float64(t.Cards))
	gauge(nodesDesc, float64(t.Nodes))
	blocked := map[fit.Reason]int{}
	for _, n := range m.Ledger.Nodes() {
		if s := n.Snapshot(); s.Managed && s.View.Blocked != "" {
			blocked[s.View.Blocked]++
		}
	}
	// The two that somebody should be woken for are there always, so that an
	// alert has something to look at.
	for _, r := range []fit.Reason{fit.ReasonAgentDown, fit.ReasonHookDown} {
		gauge(blockedDesc, float64(blocked[r]), string(r))
		delete(blocked, r)
	}
	for r, n := range blocked {
		gauge(blockedDesc, float64(n), string(r))
	}
	gauge(waitingDesc, float64(m.Placer.Waiting()))
}
