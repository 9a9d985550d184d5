package doctor

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/carve-gpu/carve/api"
)

// Check judges a cluster, in an order that is always the same.
func Check(f Facts) []api.Finding {
	var out []api.Finding
	for _, check := range []func(Facts) []api.Finding{
		access, installed, extender, certificates, called, schedulerPods, schedulerConfig, webhooks,
		nodes, strays, versions, foreign, doubleServing, hamiNodes, hamiWebhook, runtimeClasses, privileged,
	} {
		out = append(out, check(f)...)
	}
	// Where nothing could be looked at, nothing is known to be well.
	if len(out) > 0 && !slices.ContainsFunc(out, func(x api.Finding) bool { return x.Check != checkAccess }) {
		last := &out[len(out)-1]
		last.Level, last.Why = api.LevelFail, "nothing at all could be checked: whether carve works is not known"
	}
	return out
}

func ok(check, where, what string) []api.Finding {
	return []api.Finding{{Check: check, Level: api.LevelOK, Where: where, What: what}}
}

func warn(check, where, what, why, do string) []api.Finding {
	return []api.Finding{{Check: check, Level: api.LevelWarn, Where: where, What: what, Why: why, Do: do}}
}

func fail(check, where, what, why, do string) []api.Finding {
	return []api.Finding{{Check: check, Level: api.LevelFail, Where: where, What: what, Why: why, Do: do}}
}

// unread reports whether one of these couldn't be read: what depends on it
// isn't judged, and access says so.
func (f Facts) unread(what ...string) bool {
	for _, w := range what {
		if _, is := f.Unread[w]; is {
			return true
		}
	}
	return false
}

const checkAccess = "access"

// access tells what couldn't be read: in one finding what may not be, and each
// of the rest by itself.
func access(f Facts) []api.Finding {
	var out []api.Finding
	for _, k := range slices.Sorted(maps.Keys(f.Unread)) {
		if !f.Forbidden[k] {
			out = append(out, warn(checkAccess, k, "it can't be read: "+f.Unread[k], "what depends on it wasn't looked at",
				"see whether the API server is well and carve is installed")...)
		}
	}
	if hidden := f.forbidden(); len(hidden) > 0 {
		out = append(out, warn(checkAccess, "cluster", "you may not read "+strings.Join(hidden, ", "), "what depends on them wasn't looked at",
			"have the ClusterRole carve-viewer bound to you (deploy/manifests/people-rbac.yaml), which reads nodes, pods and GPUNodes; for the rest run doctor as the cluster's administrator")...)
	}
	return out
}

// forbidden lists what may not be read: of the objects that carve installs the
// kinds, where that holds for all of a kind.
func (f Facts) forbidden() []string {
	hidden, all := map[string]int{}, map[string]int{}
	for _, o := range f.Expected {
		all[o.Kind]++
		if f.Forbidden[o.Key()] {
			hidden[o.Kind]++
		}
	}
	out := map[string]bool{}
	for k := range f.Forbidden {
		if kind, _, _ := strings.Cut(k, "/"); hidden[kind] > 0 && hidden[kind] == all[kind] {
			k = kind
		}
		out[k] = true
	}
	return slices.Sorted(maps.Keys(out))
}

// installed compares what is there with what this version installs.
func installed(f Facts) []api.Finding {
	const check = "installed"
	apply := func(o Object) string { return "kubectl apply -k deploy/manifests (" + o.File + ")" }
	var out []api.Finding
	same := 0
	for _, o := range f.Expected {
		if f.unread(o.Key()) {
			continue
		}
		have := f.Actual[o.Key()]
		why := map[string]string{
			"CustomResourceDefinition":         "nodes can't report their cards",
			"ValidatingAdmissionPolicy":        "a rule that keeps pods or nodes from claiming what isn't theirs is not held",
			"ValidatingAdmissionPolicyBinding": "a rule that keeps pods or nodes from claiming what isn't theirs is not held",
			"ClusterRole":                      "carve's own programs lack rights",
			"ClusterRoleBinding":               "carve's own programs lack rights",
		}[o.Kind]
		if why == "" {
			why = "requests aren't completed and checked when pods are created"
		}
		switch {
		case have == nil:
			out = append(out, fail(check, o.Key(), "it is missing", why, apply(o))...)
			continue
		case o.Kind == "CustomResourceDefinition" && !established(have):
			out = append(out, fail(check, o.Key(), "it isn't established", why, "kubectl describe crd "+o.Name)...)
			continue
		case o.Kind == "ValidatingAdmissionPolicyBinding" && !denies(have):
			out = append(out, fail(check, o.Key(), "its validationActions lack Deny", why, apply(o))...)
			continue
		case o.Kind == "ValidatingAdmissionPolicy" && ignores(have):
			out = append(out, fail(check, o.Key(), "its failurePolicy is Ignore", "what can't be judged is let through", apply(o))...)
			continue
		}
		if d := o.differences(have); d != nil {
			shown := d
			if len(shown) > 3 {
				shown = append(shown[:3:3], fmt.Sprintf("and %d more", len(d)-3))
			}
			out = append(out, warn(check, o.Key(), "it differs from what this version ("+f.Version+") installs: "+strings.Join(shown, ", "),
				"another version is installed, or somebody changed it", apply(o))...)
			continue
		}
		same++
	}
	if same > 0 {
		out = append(out, ok(check, "deploy/manifests", fmt.Sprintf("%d objects are as this version installs them", same))...)
	}
	return out
}

func established(crd map[string]any) bool {
	status, _ := crd["status"].(map[string]any)
	conditions, _ := status["conditions"].([]any)
	for _, c := range conditions {
		m, _ := c.(map[string]any)
		if m["type"] == "Established" && m["status"] == "True" {
			return true
		}
	}
	return false
}

func denies(binding map[string]any) bool {
	spec, _ := binding["spec"].(map[string]any)
	actions, _ := spec["validationActions"].([]any)
	for _, a := range actions {
		if a == "Deny" {
			return true
		}
	}
	return false
}

func ignores(policy map[string]any) bool {
	spec, _ := policy["spec"].(map[string]any)
	return spec["failurePolicy"] == "Ignore"
}
