package monitor

import (
	"slices"
	"strconv"

	"github.com/prometheus/client_golang/prometheus"
)

var cardLabels = []string{"card_uuid", "card_index", "model"}

func cardDesc(name, help string) *prometheus.Desc {
	return prometheus.NewDesc("carve_card_"+name, help, cardLabels, nil)
}

var (
	cardHealthy    = cardDesc("healthy", "1 while the card answers and takes slices.")
	cardTotal      = cardDesc("memory_total_bytes", "The card's memory.")
	cardReserved   = cardDesc("memory_reserved_bytes", "What the driver keeps of the card's memory for itself.")
	cardUsed       = cardDesc("memory_used_bytes", "Memory in use on the card, by whoever, without what is reserved.")
	cardGranted    = cardDesc("memory_granted_bytes", "Memory that slices on this node hold of the card; the whole card where one pod holds it.")
	cardCores      = cardDesc("compute_granted_ratio", "Compute that slices hold of the card, 0 to 1.")
	cardContext    = cardDesc("context_bytes", "What one context costs on the card with this driver, as processes have shown that had nothing else.")
	cardProcesses  = cardDesc("processes", "Processes with a context on the card.")
	cardBusy       = cardDesc("utilization_ratio", "Part of the driver's last period in which a kernel ran, 0 to 1.")
	cardPower      = cardDesc("power_watts", "Power that the card draws.")
	cardTemp       = cardDesc("temperature_celsius", "Temperature of the card's chip.")
	cardLayer      = prometheus.NewDesc("carve_card_limit_layer", "1 for each layer that holds memory limits on the card: dmem, guard, library.", append(slices.Clone(cardLabels), "layer"), nil)
	cardMPS        = cardDesc("mps_ready", "1 while the card's MPS daemon serves or is started for the first time, 0 while it serves nobody and all pods of the card stand still; only of cards that have one, or should.")
	cardSampleTime = cardDesc("sample_timestamp_seconds", "When the card's memory was read.")
)

// cardCollector shows the cards. Those that don't answer keep the series that
// need no answer.
type cardCollector struct{ *cached }

func (cardCollector) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{cardHealthy, cardTotal, cardReserved, cardUsed, cardGranted, cardCores, cardContext, cardLayer, cardMPS, cardProcesses, cardBusy, cardPower, cardTemp, cardSampleTime} {
		ch <- d
	}
}

func (c cardCollector) Collect(ch chan<- prometheus.Metric) {
	for _, card := range c.get().Cards {
		labels := []string{card.UUID, strconv.Itoa(card.Index), card.Model}
		gauge(ch, cardHealthy, oneIf(card.Fault == ""), labels...)
		gauge(ch, cardTotal, float64(card.MemoryBytes), labels...)
		gauge(ch, cardReserved, float64(card.ReservedBytes), labels...)
		gauge(ch, cardGranted, float64(card.GrantedBytes), labels...)
		gauge(ch, cardCores, float64(card.GrantedCores)/100, labels...)
		for _, layer := range card.Layers {
			gauge(ch, cardLayer, 1, append(slices.Clone(labels), layer)...)
		}
		if card.MPS {
			gauge(ch, cardMPS, oneIf(card.MPSFault == ""), labels...)
		}
		if card.ContextBytes != 0 {
			gauge(ch, cardContext, float64(card.ContextBytes), labels...)
		}
		if card.Fault != "" {
			continue
		}
		gauge(ch, cardUsed, float64(card.Sample.UsedBytes), labels...)
		gauge(ch, cardProcesses, float64(len(card.Sample.Processes)), labels...)
		for _, l := range []struct {
			desc  *prometheus.Desc
			value *float64
		}{{cardBusy, card.Sample.UtilizationRatio}, {cardPower, card.Sample.PowerWatts}, {cardTemp, card.Sample.TemperatureCelsius}} {
			if l.value != nil {
				gauge(ch, l.desc, *l.value, labels...)
			}
		}
		gauge(ch, cardSampleTime, float64(card.Sample.At.UnixMilli())/1000, labels...)
	}
}
