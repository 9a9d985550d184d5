// Package schedconfig writes carve's entry into a KubeSchedulerConfiguration.
// It is pure: text in, text out. Everything else in the configuration stays as
// the operator wrote it.
package schedconfig

import (
	"cmp"
	"errors"
	"fmt"
	"net/url"
	"path"
	"time"

	"sigs.k8s.io/yaml"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/scheduler-extender/pki"
)

const (
	apiVersion = "kubescheduler.config.k8s.io/v1"
	kind       = "KubeSchedulerConfiguration"
)

// Options say how kube-scheduler reaches the extender.
type Options struct {
	// URL of the extender, https and best with an IP address: a static pod on
	// the host's network often can't resolve names of Services.
	URL string
	// TLSDir is where kube-scheduler finds ca.crt, client.crt and client.key.
	TLSDir string
	// Timeout of a call; 0 means five seconds.
	Timeout time.Duration
	// SchedulerName makes the configuration that of a second scheduler, which
	// serves the pods that name it, for clusters whose own scheduler can't be
	// configured. Empty: the cluster's own.
	SchedulerName string
}

// Merge adds the entry to a configuration, or replaces the one that is there.
// An empty base stands for a configuration with nothing else in it.
func Merge(base []byte, o Options) ([]byte, error) {
	u, err := url.Parse(o.URL)
	switch {
	case err != nil:
		return nil, fmt.Errorf("URL of the extender: %w", err)
	case u.Scheme != "https" || u.Hostname() == "":
		return nil, fmt.Errorf("URL of the extender: %q is not https://ADDRESS:PORT", o.URL)
	case o.TLSDir == "" || !path.IsAbs(o.TLSDir):
		return nil, fmt.Errorf("folder of the credentials: %q is not an absolute path", o.TLSDir)
	}
	config := map[string]any{}
	if err := yaml.Unmarshal(base, &config); err != nil {
		return nil, fmt.Errorf("read the scheduler's configuration: %w", err)
	}
	if config == nil {
		config = map[string]any{}
	}
	if len(config) == 0 {
		config["apiVersion"], config["kind"] = apiVersion, kind
	}
	if config["apiVersion"] != apiVersion || config["kind"] != kind {
		return nil, fmt.Errorf("read the scheduler's configuration: it is %v %v, expected is %s %s", config["apiVersion"], config["kind"], apiVersion, kind)
	}
	entry := entry(o)
	var others []any
	switch list := config["extenders"].(type) {
	case nil:
	case []any:
		for _, e := range list {
			m, ok := e.(map[string]any)
			if !ok {
				return nil, errors.New("read the scheduler's configuration: an extender is not an object")
			}
			if ours(m, entry) {
				continue
			}
			if m["bindVerb"] != nil && m["bindVerb"] != "" {
				return nil, fmt.Errorf("extender %v binds pods as well, and kube-scheduler allows one such; remove it, or give carve a scheduler of its own", m["urlPrefix"])
			}
			others = append(others, e)
		}
	default:
		return nil, errors.New("read the scheduler's configuration: extenders is not a list")
	}
	config["extenders"] = append(others, entry)
	if o.SchedulerName != "" {
		if err := secondScheduler(config, o.SchedulerName); err != nil {
			return nil, err
		}
	}
	out, err := yaml.Marshal(config)
	if err != nil {
		return nil, fmt.Errorf("write the scheduler's configuration: %w", err)
	}
	return out, nil
}

// secondScheduler gives the configuration's one profile a name of its own, and
// its leader election a lease beside that of the cluster's scheduler.
func secondScheduler(config map[string]any, name string) error {
	profile := map[string]any{}
	switch list := config["profiles"].(type) {
	case nil:
	case []any:
		if len(list) > 1 {
			return fmt.Errorf("read the scheduler's configuration: it has %d profiles; a scheduler of carve's own has one", len(list))
		}
		if len(list) == 1 {
			p, ok := list[0].(map[string]any)
			if !ok {
				return errors.New("read the scheduler's configuration: a profile is not an object")
			}
			profile = p
		}
	default:
		return errors.New("read the scheduler's configuration: profiles is not a list")
	}
	profile["schedulerName"] = name
	config["profiles"] = []any{profile}
	election, ok := config["leaderElection"].(map[string]any)
	if !ok {
		election = map[string]any{}
	}
	election["resourceName"] = name
	config["leaderElection"] = election
	return nil
}

// ours recognises an entry that an earlier Merge wrote.
func ours(m, entry map[string]any) bool {
	if m["urlPrefix"] == entry["urlPrefix"] {
		return true
	}
	t, _ := m["tlsConfig"].(map[string]any)
	return t != nil && t["caFile"] == entry["tlsConfig"].(map[string]any)["caFile"]
}

// entry has the field names of kubescheduler.config.k8s.io/v1 Extender (v1.37).
func entry(o Options) map[string]any {
	managed := func(name string, ignored bool) any {
		return map[string]any{"name": name, "ignoredByScheduler": ignored}
	}
	return map[string]any{
		"urlPrefix":      o.URL,
		"filterVerb":     "filter",
		"prioritizeVerb": "prioritize",
		"bindVerb":       "bind",
		// It keeps kube-scheduler from evicting pods where cards would be in the way still.
		"preemptVerb": "preempt",
		"weight":      1,
		// HTTP/2, so that a burst of binds shares one connection, and the
		// only way in.
		"enableHTTPS": true,
		"tlsConfig": map[string]any{
			"caFile":   path.Join(o.TLSDir, pki.CACert),
			"certFile": path.Join(o.TLSDir, pki.ClientCert),
			"keyFile":  path.Join(o.TLSDir, pki.ClientKey),
		},
		"httpTimeout": cmp.Or(o.Timeout, 5*time.Second).String(),
		// With false, kube-scheduler would lose sight of the pods on each node
		// in its later steps.
		"nodeCacheCapable": true,
		// A bind that is skipped would start the pod without its grant.
		"ignorable": false,
		"managedResources": []any{
			// Nodes advertise slots under this name, so the scheduler counts
			// them too.
			managed(api.ResourceGPU, false),
			managed(api.ResourceMemory, true),
			managed(api.ResourceMemoryPercent, true),
			managed(api.ResourceCores, true),
			managed(api.ResourcePriority, true),
		},
	}
}
