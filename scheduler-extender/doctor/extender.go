package doctor

import (
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"strconv"
	"strings"
	"time"

	"sigs.k8s.io/yaml"

	"github.com/carve-gpu/carve/api"
)

const (
	// endsSoon is how long before its end a certificate is worth a word.
	endsSoon = 30 * 24 * time.Hour
	// waitsLong is from when a pod that nobody asked about shows that nobody
	// asks.
	waitsLong = 30 * time.Second
)

// Metrics of the extender that are read here.
const (
	metricFilters    = `carve_extender_verb_seconds_count{verb="filter"}`
	metricLastFilter = "carve_extender_last_filter_timestamp_seconds"
	metricDenied     = "carve_extender_denied_total"
)

func extender(f Facts) []api.Finding {
	const check = "extender"
	if f.unread(readDeployment) {
		return nil
	}
	where := "deployment " + f.Namespace + "/carve-extender"
	why := "pods that ask for cards stay pending; running ones go on"
	switch d := f.Deployment; {
	case d == nil:
		return fail(check, where, "it is missing", why, "kubectl apply -k deploy/manifests")
	case d.Status.ReadyReplicas < 1:
		return fail(check, where, "no replica is ready", why, "kubectl -n "+f.Namespace+" describe pods -l app.kubernetes.io/name=carve-extender; kubectl -n "+f.Namespace+" logs -l app.kubernetes.io/name=carve-extender")
	}
	return ok(check, where, "it is ready")
}

func certificates(f Facts) []api.Finding {
	const check = "certificates"
	if f.unread(readSecret) {
		return nil
	}
	where := "secret " + f.Namespace + "/carve-extender-tls"
	renew := "kubectl -n " + f.Namespace + " delete secret carve-extender-tls; kubectl -n " + f.Namespace + " rollout restart deployment carve-extender; then step 3 of the installation again"
	if f.CAEnds.IsZero() || f.ClientEnds.IsZero() {
		return warn(check, where, "there are no certificates in it", "kube-scheduler can't show who it is", renew)
	}
	var out []api.Finding
	for _, c := range []struct {
		name string
		ends time.Time
	}{{"CA", f.CAEnds}, {"scheduler's", f.ClientEnds}} {
		left := c.ends.Sub(f.Now)
		what := fmt.Sprintf("the %s certificate is valid until %s", c.name, c.ends.UTC().Format(time.DateOnly))
		switch {
		case left <= 0:
			out = append(out, fail(check, where, what, "kube-scheduler and the extender refuse each other: pods that ask for cards stay pending", renew)...)
		case left < endsSoon:
			out = append(out, warn(check, where, what, "then kube-scheduler and the extender refuse each other", renew)...)
		default:
			out = append(out, ok(check, where, what)...)
		}
	}
	return out
}

// called says whether kube-scheduler asks the extender at all: nothing else
// shows a scheduler without its entry.
func called(f Facts) []api.Finding {
	const check = "scheduler-calls"
	if f.unread(readMetrics) || f.Metrics == "" {
		return nil
	}
	where := "kube-scheduler"
	why := "pods that ask for cards are bound without a grant by a scheduler that doesn't ask, or stay pending; none gets a card"
	do := "give kube-scheduler its entry: carve extender scheduler-config --help, and step 3 of the installation; then carve doctor --scheduler-config FILE"
	filters, last := metric(f.Metrics, metricFilters), time.Unix(int64(metric(f.Metrics, metricLastFilter)), 0)
	var out []api.Finding
	for _, p := range f.Waiting {
		created := p.CreationTimestamp.Time
		if f.Now.Sub(created) > waitsLong && (filters == 0 || last.Before(created)) {
			return fail(check, where, fmt.Sprintf("it never asked the extender about pod %s/%s, which waits since %s", p.Namespace, p.Name, created.UTC().Format(time.RFC3339)), why, do)
		}
	}
	switch {
	case filters == 0:
		out = warn(check, where, "it hasn't asked the extender since that started; no pod that asks for cards was seen waiting either", "its configuration may lack the entry: the first such pod will tell", do)
	default:
		out = ok(check, where, "it last asked the extender at "+last.UTC().Format(time.RFC3339))
	}
	if n := metric(f.Metrics, metricDenied); n > 0 {
		out = append(out, warn("extender-strangers", "extender", fmt.Sprintf("%.0f calls came without the scheduler's certificate", n),
			"somebody else speaks to the extender, or kube-scheduler has the credentials of an earlier installation", "carve extender credentials --out /etc/kubernetes/carve, and restart kube-scheduler")...)
	}
	return out
}

// metric finds a series' value in the text format, 0 if it isn't there.
func metric(text, series string) float64 {
	for _, line := range strings.Split(text, "\n") {
		if v, ok := strings.CutPrefix(line, series+" "); ok {
			n, err := strconv.ParseFloat(strings.TrimSpace(v), 64)
			if err == nil {
				return n
			}
		}
	}
	return 0
}

func schedulerPods(f Facts) []api.Finding {
	const check = "scheduler"
	var out []api.Finding
	for _, p := range f.Schedulers {
		where := "pod " + p.Namespace + "/" + p.Name
		configured := false
		for _, c := range p.Spec.Containers {
			for _, a := range append(append([]string{}, c.Command...), c.Args...) {
				configured = configured || strings.HasPrefix(a, "--config=") || a == "--config"
			}
		}
		if !configured {
			out = append(out, fail(check, where, "it runs without --config, so it knows of no extender",
				"pods that ask for cards are never placed by carve", "--config=/etc/kubernetes/scheduler-carve.yaml in its manifest, see step 3 of the installation")...)
			continue
		}
		out = append(out, ok(check, where, "it has a configuration (carve doctor --scheduler-config FILE looks into that)")...)
	}
	return out
}

// schedulerConfig looks into a KubeSchedulerConfiguration.
func schedulerConfig(f Facts) []api.Finding {
	const check = "scheduler-entry"
	if f.SchedulerConfigPath == "" {
		return nil
	}
	where := f.SchedulerConfigPath
	do := "carve extender scheduler-config --base " + where + " --url … --tls-dir … writes a right one"
	var config struct {
		Extenders []struct {
			URLPrefix        string `json:"urlPrefix"`
			FilterVerb       string `json:"filterVerb"`
			BindVerb         string `json:"bindVerb"`
			PreemptVerb      string `json:"preemptVerb"`
			EnableHTTPS      bool   `json:"enableHTTPS"`
			NodeCacheCapable bool   `json:"nodeCacheCapable"`
			Ignorable        bool   `json:"ignorable"`
			TLSConfig        struct {
				CAFile   string `json:"caFile"`
				CertFile string `json:"certFile"`
				KeyFile  string `json:"keyFile"`
				Insecure bool   `json:"insecure"`
			} `json:"tlsConfig"`
			ManagedResources []struct {
				Name               string `json:"name"`
				IgnoredByScheduler bool   `json:"ignoredByScheduler"`
			} `json:"managedResources"`
		} `json:"extenders"`
	}
	if err := yaml.Unmarshal(f.SchedulerConfig, &config); err != nil {
		return fail(check, where, "it can't be read: "+err.Error(), "", do)
	}
	for _, e := range config.Extenders {
		managed := map[string]bool{}
		for _, m := range e.ManagedResources {
			managed[m.Name] = m.IgnoredByScheduler
		}
		if _, ours := managed[api.ResourceMemory]; !ours {
			continue
		}
		var faults []string
		fault := func(bad bool, what string) {
			if bad {
				faults = append(faults, what)
			}
		}
		fault(e.FilterVerb != "filter", "filterVerb isn't filter")
		fault(e.BindVerb != "bind", "bindVerb isn't bind: pods would be bound without a grant")
		fault(e.Ignorable, "ignorable is true: pods would be bound without a grant while the extender is away")
		fault(!e.NodeCacheCapable, "nodeCacheCapable is false")
		fault(!e.EnableHTTPS || !strings.HasPrefix(e.URLPrefix, "https://"), "it doesn't use HTTPS")
		fault(e.TLSConfig.Insecure || e.TLSConfig.CAFile == "" || e.TLSConfig.CertFile == "" || e.TLSConfig.KeyFile == "", "tlsConfig lacks caFile, certFile or keyFile")
		for _, r := range []string{api.ResourceMemory, api.ResourceMemoryPercent, api.ResourceCores, api.ResourcePriority} {
			ignored, there := managed[r]
			fault(!there || !ignored, "managedResources lacks "+r+" with ignoredByScheduler")
		}
		ignored, there := managed[api.ResourceGPU]
		fault(!there || ignored, "managedResources lacks "+api.ResourceGPU+" without ignoredByScheduler")
		if faults != nil {
			return fail(check, where, "carve's entry is wrong: "+strings.Join(faults, "; "), "pods are placed wrongly, or not at all", do)
		}
		if e.PreemptVerb != "preempt" {
			return warn(check, where, "preemptVerb isn't preempt", "kube-scheduler may evict pods for one that then finds no card", do)
		}
		return ok(check, where, "carve's entry is right: "+e.URLPrefix)
	}
	return fail(check, where, "it has no entry for carve's resources", "kube-scheduler never asks the extender", do)
}

// webhooks looks at those that this version installs: who answers, and whether
// the API server can believe it.
func webhooks(f Facts) []api.Finding {
	const check = "webhook"
	if f.unread(readWebhooks) {
		return nil
	}
	ours := map[string]bool{}
	for _, o := range f.Expected {
		ours[o.Name] = ours[o.Name] || o.Kind == "MutatingWebhookConfiguration"
	}
	var out []api.Finding
	for _, w := range f.Webhooks {
		if !ours[w.Name] {
			continue
		}
		for _, h := range w.Webhooks {
			where := "mutatingwebhookconfiguration " + w.Name + " (" + h.Name + ")"
			why := "requests aren't completed when pods are created; what the extender and the node check still holds"
			restart := "kubectl -n " + f.Namespace + " rollout restart deployment carve-extender (it writes the CA there)"
			ends, err := caEnds(h.ClientConfig.CABundle)
			switch {
			case err != nil:
				out = append(out, fail(check, where, "its caBundle is of no use: "+err.Error(), why, restart)...)
				continue
			case ends.Before(f.Now):
				out = append(out, fail(check, where, "the CA in its caBundle ended on "+ends.UTC().Format(time.DateOnly), why, restart)...)
				continue
			}
			if s := h.ClientConfig.Service; s != nil && s.Namespace == f.Namespace && f.Endpoints != nil && f.Endpoints[s.Name] == 0 {
				out = append(out, fail(check, where, "nobody answers behind Service "+s.Namespace+"/"+s.Name, why, "kubectl -n "+s.Namespace+" get endpointslices -l kubernetes.io/service-name="+s.Name)...)
				continue
			}
			out = append(out, ok(check, where, "it is answered, and its CA is valid until "+ends.UTC().Format(time.DateOnly))...)
		}
	}
	return out
}

// caEnds is the latest end among the certificates of a bundle.
func caEnds(bundle []byte) (time.Time, error) {
	var ends time.Time
	for len(bundle) > 0 {
		var block *pem.Block
		if block, bundle = pem.Decode(bundle); block == nil {
			break
		}
		c, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return time.Time{}, err
		}
		if c.NotAfter.After(ends) {
			ends = c.NotAfter
		}
	}
	if ends.IsZero() {
		return ends, fmt.Errorf("there is no certificate in it")
	}
	return ends, nil
}
