// Package nvidiaconfig reads the configuration file of NVIDIA's device plugin and says
// what of it carve does: which cards are given in how many replicas, in which mode.
//
// It serves nothing. What can't be honoured is told, with the reason: as a warning where
// pods get no less than the file promises, as an error where they would get something
// else. Parse and Config.Apply are pure; Follower keeps to a file while it changes.
// Start reading at Parse.
package nvidiaconfig

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"sigs.k8s.io/yaml"

	"github.com/carve-gpu/carve/api"
)

const (
	// maxBytes bounds what is read: a file has some hundred bytes, and a node with a card
	// in each of its entries some thousand.
	maxBytes = 64 << 10
	// maxFaults bounds what is said to be wrong with one file.
	maxFaults = 20
	// maxReplicas is what a card's report can say.
	maxReplicas = 256
	// contextMiB is about what a process takes of a card for its context alone.
	contextMiB = 512
)

// Config is a file that was read.
type Config struct {
	entries []entry
	// Warnings say what of the file has no effect, and why.
	Warnings []string
}

// entry is one of sharing.*.resources.
type entry struct {
	at       string // "sharing.mps.resources[0]"
	mode     api.Mode
	replicas int
	one      bool // failRequestsGreaterThanOne
	// Which cards: all, the first so many, or those of a list.
	all   bool
	count int
	list  []string // indexes in decimal, or UUIDs
}

// errTooLarge says that a file has more than maxBytes.
var errTooLarge = fmt.Errorf("it has more than %d bytes, and no more than that are read: a configuration has some hundred; is it the right file?", maxBytes)

// Parse reads a file. The error names the key, the value, and what to write instead.
func Parse(file []byte) (Config, error) {
	var c Config
	if len(file) > maxBytes {
		return c, errTooLarge
	}
	var root map[string]any
	// Strictly: of a key that is there twice one would be lost.
	if err := yaml.UnmarshalStrict(file, &root); err != nil {
		return c, fmt.Errorf("it isn't YAML that can be read: %s", strings.TrimPrefix(err.Error(), "error converting YAML to JSON: "))
	}
	if len(root) == 0 {
		// What is being written is empty for a moment.
		return c, errors.New(`it is empty; a file that shares nothing says "version: v1"`)
	}
	r := reader{config: &c}
	r.file(root)
	if more := len(r.faults) - maxFaults; more > 0 {
		r.faults = append(r.faults[:maxFaults], fmt.Errorf("and %d faults more", more))
	}
	if len(r.faults) > 0 {
		return Config{}, errors.Join(r.faults...)
	}
	return c, nil
}

// reader walks through the file and gathers what is wrong.
type reader struct {
	config *Config
	faults []error
}

func (r *reader) fault(at, format string, a ...any) {
	r.faults = append(r.faults, errors.New(clip(at+": "+fmt.Sprintf(format, a...))))
}

func (r *reader) warn(at, format string, a ...any) {
	r.config.Warnings = append(r.config.Warnings, clip(at+": "+fmt.Sprintf(format, a...)))
}

// clip bounds a sentence: it may quote the file.
func clip(s string) string {
	const most = 480
	if len(s) <= most {
		return s
	}
	return strings.ToValidUTF8(s[:most], "") + "…"
}

// object reads a map; what is missing is empty.
func (r *reader) object(at string, v any) map[string]any {
	switch v := v.(type) {
	case nil:
		return nil
	case map[string]any:
		return v
	}
	r.fault(at, "%s stands where keys belong", kind(v))
	return nil
}

func kind(v any) string {
	switch v.(type) {
	case []any:
		return "a list"
	case string:
		return "a text"
	case map[string]any:
		return "an object"
	}
	return fmt.Sprint(v)
}

func (r *reader) boolean(at string, v any) bool {
	switch v := v.(type) {
	case nil:
		return false
	case bool:
		return v
	}
	r.fault(at, "%v isn't true or false", v)
	return false
}

// number reads a whole number; ok is false where it is none.
func number(v any) (int, bool) {
	f, is := v.(float64)
	n := int(f)
	return n, is && float64(n) == f
}

// unknown tells of keys that nothing is known of.
func (r *reader) unknown(at string, m map[string]any, known ...string) {
	for _, k := range slices.Sorted(maps.Keys(m)) {
		if !slices.Contains(known, k) {
			r.warn(join(at, k), "nothing is known of this key: it has no effect")
		}
	}
}

func join(at, key string) string {
	if at == "" {
		return key
	}
	return at + "." + key
}

func (r *reader) file(root map[string]any) {
	switch v := root["version"].(type) {
	case nil:
	case string:
		if v != "v1" {
			r.fault("version", "%q, and v1 is what is read", v)
		}
	default:
		r.fault("version", "%v, and v1 is what is read", v)
	}
	r.unknown("", root, "version", "flags", "sharing", "resources", "imex", "health")
	r.flags("flags", r.object("flags", root["flags"]))
	resources := r.object("resources", root["resources"])
	for _, k := range slices.Sorted(maps.Keys(resources)) {
		r.warn(join("resources", k), "%s", reasons["resources"])
	}
	for _, k := range []string{"imex", "health"} {
		if root[k] != nil {
			r.warn(k, "%s", reasons[k])
		}
	}
	sharing := r.object("sharing", root["sharing"])
	r.unknown("sharing", sharing, "timeSlicing", "mps")
	r.section("sharing.timeSlicing", api.ModeTimeslice, sharing["timeSlicing"])
	r.section("sharing.mps", api.ModeMPS, sharing["mps"])
}

// section reads sharing.timeSlicing or sharing.mps.
func (r *reader) section(at string, mode api.Mode, v any) {
	s := r.object(at, v)
	r.unknown(at, s, "renameByDefault", "failRequestsGreaterThanOne", "resources")
	if r.boolean(join(at, "renameByDefault"), s["renameByDefault"]) {
		r.fault(join(at, "renameByDefault"), "true, and replicas have one name with carve, %s: write false; pods that ask for %s.shared ask for %s, and those that want a whole card say carve.dev/isolation: exclusive", api.ResourceGPU, api.ResourceGPU, api.ResourceGPU)
	}
	one := r.boolean(join(at, "failRequestsGreaterThanOne"), s["failRequestsGreaterThanOne"])
	list, is := s["resources"].([]any)
	if !is && s["resources"] != nil {
		r.fault(join(at, "resources"), "%s stands where a list belongs", kind(s["resources"]))
	}
	for i, v := range list {
		at := fmt.Sprintf("%s.resources[%d]", at, i)
		if e, ok := r.entry(at, r.object(at, v)); ok {
			e.at, e.mode, e.one = at, mode, one
			if mode == api.ModeMPS && e.replicas > api.MaxMPSClients {
				r.fault(join(at, "replicas"), "%d, and an MPS server takes %d clients at most (%d on cards before Volta)", e.replicas, api.MaxMPSClients, api.MaxMPSClientsBeforeVolta)
			}
			r.config.entries = append(r.config.entries, e)
		}
	}
}

func (r *reader) entry(at string, m map[string]any) (entry, bool) {
	var e entry
	before := len(r.faults)
	r.unknown(at, m, "name", "rename", "devices", "replicas")
	name, _ := m["name"].(string)
	switch full := withPrefix(name); {
	case name == "":
		r.fault(join(at, "name"), "it is missing: write %s", api.ResourceGPU)
	case strings.HasPrefix(full, api.ResourceMIGPrefix):
		r.warn(at, "%s: instances aren't served, so they have no replicas", full)
		return e, false
	case full != api.ResourceGPU:
		r.warn(at, "%s: cards are %s with carve, whatever their model, so there are no replicas of this; pods choose models by annotation %s", full, api.ResourceGPU, api.AnnotationCardModels)
		return e, false
	}
	if rename, _ := m["rename"].(string); m["rename"] != nil && withPrefix(rename) != api.ResourceGPU {
		r.fault(join(at, "rename"), "%v, and replicas have one name with carve, %s: leave it out, and let pods ask for that", m["rename"], api.ResourceGPU)
	}
	n, ok := number(m["replicas"])
	switch {
	case m["replicas"] == nil:
		r.fault(join(at, "replicas"), "it is missing: write 2 or more")
	case !ok || n < 2 || n > maxReplicas:
		r.fault(join(at, "replicas"), "%v isn't allowed; allowed are 2 to %d (leave the cards out that are to stay whole)", m["replicas"], maxReplicas)
	}
	e.replicas = n
	r.devices(join(at, "devices"), m["devices"], &e)
	return e, len(r.faults) == before
}

// devices reads which cards are meant: all of them, the first so many, or a list.
func (r *reader) devices(at string, v any, e *entry) {
	const allowed = `allowed is "all", a number of cards, or a list of indexes and UUIDs`
	if list, is := v.([]any); is {
		listed := map[string]bool{}
		for i, v := range list {
			at := fmt.Sprintf("%s[%d]", at, i)
			s, _ := v.(string)
			if n, ok := number(v); ok {
				s = strconv.Itoa(n)
			}
			parent, _, instance := strings.Cut(s, ":")
			switch {
			case strings.HasPrefix(s, "MIG-") || instance && isIndex(parent):
				r.warn(at, "%s: instances aren't served, so they have no replicas", s)
			case !isIndex(s) && !strings.HasPrefix(s, "GPU-"):
				r.fault(at, "%v is neither the index of a card nor its UUID", v)
			case listed[s]:
				r.fault(at, "%s is there twice", s)
			default:
				listed[s] = true
				e.list = append(e.list, s)
			}
		}
		return
	}
	n, ok := number(v)
	if s, is := v.(string); is && isIndex(s) {
		n, _ = strconv.Atoi(s)
		ok = true
	}
	switch {
	case v == nil || v == "all":
		e.all = true
	case ok && n > 0:
		e.count = n
	default:
		r.fault(at, "%v isn't allowed; %s", v, allowed)
	}
}

func isIndex(s string) bool {
	n, err := strconv.ParseUint(s, 10, 16)
	return err == nil && strconv.FormatUint(n, 10) == s
}

// withPrefix is a resource's full name, as NVIDIA's plugin completes it.
func withPrefix(name string) string {
	if name == "" || strings.Contains(name, "/") {
		return name
	}
	return "nvidia.com/" + name
}
