package cluster

import (
	"slices"

	"sigs.k8s.io/yaml"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/scheduler-extender/ledger"
)

// requireHook is the value of api.AnnotationRequiredPlugins for a pod with a
// grant: its own list and carve's hook. False for a list of its own that can't
// be read, with which the runtime refuses the pod by itself.
func requireHook(own string) (string, bool) {
	var plugins []string
	if err := yaml.Unmarshal([]byte(own), &plugins); err != nil {
		return "", false
	}
	if !slices.Contains(plugins, api.HookPlugin) {
		plugins = append(plugins, api.HookPlugin)
	}
	// One line of JSON, which is YAML.
	b, err := yaml.Marshal(plugins)
	if err == nil {
		b, err = yaml.YAMLToJSON(b)
	}
	return string(b), err == nil
}

// requiredPlugins is what a known pod says itself of the plugins that it needs.
func (s *Source) requiredPlugins(r ledger.Ref) string {
	if p := s.pod(r); p != nil {
		return p.Annotations[api.AnnotationRequiredPlugins]
	}
	return ""
}
