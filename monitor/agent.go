package monitor

import (
	"strconv"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/carve-gpu/carve/api/v1alpha1"
)

var (
	agentInfo       = prometheus.NewDesc("carve_node_info", "The agent and the driver of this node.", []string{"version", "driver_version", "software_gpu"}, nil)
	hookConnected   = prometheus.NewDesc("carve_hook_connected", "1 while the hook is linked to the container runtime. While it is not, no card is handed out.", nil, nil)
	hookSince       = prometheus.NewDesc("carve_hook_connected_timestamp_seconds", "When the hook's link was made.", nil, nil)
	pluginConnected = prometheus.NewDesc("carve_kubelet_connected", "1 while the kubelet listens to the device plugin.", nil, nil)
	unadjusted      = prometheus.NewDesc("carve_unadjusted_containers", "Running containers that should have a card and were started without the hook: they have none.", nil, nil)
	refusedGrants   = prometheus.NewDesc("carve_refused_grants", "Pods whose grant isn't honoured: stale, foreign, forged, or without room.", nil, nil)
	accessRepairs   = prometheus.NewDesc("carve_device_access_repairs_total", "Times that a running container had lost access to its cards, by device rules that were rewritten, and was given it back.", nil, nil)
	limitsAdvisory  = prometheus.NewDesc("carve_limits_advisory", "1 while nothing but the library in the containers holds the memory limits of some card: a program that goes past it is seen, and not stopped.", nil, nil)
	limitsRestored  = prometheus.NewDesc("carve_limits_restored_total", "Times that the limits file of a container didn't say what was granted and was put right: something else than the agent writes there.", nil, nil)
	cutOff          = prometheus.NewDesc("carve_cut_off_containers", "Running containers whose limits or usage file was removed from the node, or replaced there: their share can't be changed until they start anew.", nil, nil)
	journalRecords  = prometheus.NewDesc("carve_journal_records", "Pods that hold slices on this node.", nil, nil)
)

// agentCollector shows the agent itself.
type agentCollector struct{ *cached }

func (agentCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{agentInfo, hookConnected, hookSince, pluginConnected, unadjusted, refusedGrants, accessRepairs, limitsAdvisory, limitsRestored, cutOff, journalRecords} {
		ch <- d
	}
}

func (c agentCollector) Collect(ch chan<- prometheus.Metric) {
	v := c.get()
	gauge(ch, agentInfo, 1, v.Version, v.DriverVersion, strconv.FormatBool(v.Software))
	gauge(ch, hookConnected, oneIf(!v.LinkedSince.IsZero()))
	if !v.LinkedSince.IsZero() {
		gauge(ch, hookSince, float64(v.LinkedSince.Unix()))
	}
	gauge(ch, pluginConnected, oneIf(v.KubeletConnected))
	gauge(ch, unadjusted, float64(v.Unadjusted))
	gauge(ch, refusedGrants, float64(v.Refused))
	ch <- prometheus.MustNewConstMetric(accessRepairs, prometheus.CounterValue, float64(v.AccessRepairs))
	gauge(ch, limitsAdvisory, oneIf(v.Enforcement == v1alpha1.EnforcementAdvisory))
	ch <- prometheus.MustNewConstMetric(limitsRestored, prometheus.CounterValue, float64(v.LimitsRestored))
	gauge(ch, cutOff, float64(v.CutOff))
	gauge(ch, journalRecords, float64(v.Records))
}
