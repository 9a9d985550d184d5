package monitor

import (
	"strconv"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/carve-gpu/carve/api"
)

var sliceLabels = append([]string{"namespace", "pod", "container"}, cardLabels...)

func sliceDesc(name, help string) *prometheus.Desc {
	return prometheus.NewDesc("carve_slice_"+name, help, sliceLabels, nil)
}

var (
	sliceActive    = sliceDesc("active", "1 while a container runs with the slice, 0 while it is only prepared.")
	sliceLimit     = sliceDesc("memory_limit_bytes", "Memory that the container may hold on the card.")
	sliceUsed      = sliceDesc("memory_used_bytes", "Memory that the container's processes hold on the card, contexts included, as they say themselves; in mode timeslice, as the driver says.")
	sliceResidual  = sliceDesc("memory_residual_bytes", "Memory that the container's processes hold on the card beyond what they say, as the driver says: taken past carve's library. It counts against the limit.")
	sliceUncharged = sliceDesc("memory_uncharged_bytes", "Managed memory that isn't charged, by the pod's annotations carve.dev/managed-memory and carve.dev/oversell; it is on the card or on the host.")
	slicePeak      = sliceDesc("memory_peak_bytes", "The largest use that was seen: of each process exactly, of all processes together once a second.")
	sliceRefusals  = sliceDesc("memory_refusals_total", "Allocations that were refused because of the limit.")
	sliceCores     = sliceDesc("compute_granted_ratio", "Compute granted, 0 to 1; 0 has no share of its own.")
	sliceBusy      = sliceDesc("compute_used_seconds_total", "The card's time that the container had, as the driver says.")
	sliceBusyRatio = sliceDesc("compute_used_ratio", "The part of the card's time that the container had in the driver's last period, a sixth of a second or more, 0 to 1.")
	sliceProcesses = sliceDesc("processes", "Processes of the container that use the card.")
)

// sliceCollector shows the slices; their series go with them.
type sliceCollector struct{ *cached }

func (sliceCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{sliceActive, sliceLimit, sliceUsed, sliceResidual, sliceUncharged, slicePeak, sliceRefusals, sliceCores, sliceBusy, sliceBusyRatio, sliceProcesses} {
		ch <- d
	}
}

func (c sliceCollector) Collect(ch chan<- prometheus.Metric) {
	v := c.get()
	cards := map[string]Card{}
	for _, card := range v.Cards {
		cards[card.UUID] = card
	}
	for _, s := range v.Slices {
		card := cards[s.Card]
		labels := []string{s.Namespace, s.Pod, s.Container, s.Card, strconv.Itoa(card.Index), card.Model}
		gauge(ch, sliceActive, oneIf(s.Active), labels...)
		if s.LimitBytes == 0 {
			continue // a whole card has no limit, and what is used is the card's
		}
		if s.known(card) {
			gauge(ch, sliceUsed, float64(s.UsedBytes), labels...)
			gauge(ch, sliceProcesses, float64(s.Processes), labels...)
		}
		if s.Mode != string(api.ModeTimeslice) { // nothing holds that to an amount, or counts for it
			gauge(ch, sliceLimit, float64(s.LimitBytes), labels...)
		}
		if s.Mode != string(api.ModeTimeslice) && !s.Unread {
			gauge(ch, sliceResidual, float64(s.ResidualBytes), labels...)
			gauge(ch, sliceUncharged, float64(s.UnchargedBytes), labels...)
			gauge(ch, slicePeak, float64(s.PeakBytes), labels...)
			counter(ch, sliceRefusals, float64(s.Refusals), labels...)
		}
		gauge(ch, sliceCores, float64(s.Cores)/100, labels...)
		if s.ComputeSeconds != nil && s.ComputeRatio != nil {
			counter(ch, sliceBusy, *s.ComputeSeconds, labels...)
			if card.Fault == "" {
				gauge(ch, sliceBusyRatio, *s.ComputeRatio, labels...)
			}
		}
	}
}

// known reports whether anybody says what the slice uses: its own processes, or in mode
// timeslice the driver. A figure that nobody knows has no series, since a zero would be one.
func (s Slice) known(card Card) bool {
	return !s.Unread && (s.Mode != string(api.ModeTimeslice) || card.Fault == "")
}
