package doctor

import (
	"fmt"
	"sort"
	"strings"

	"github.com/carve-gpu/carve/api"
)

// Check judges a cluster, in an order that is always the same.
func Check(f Facts) []api.Finding {
	var out []api.Finding
	for _, check := range []func(Facts) []api.Finding{
		access, installed, extender, certificates, called, schedulerPods, schedulerConfig, webhooks,
		nodes, strays, versions, doubleServing, hamiNodes, hamiWebhook, runtimeClasses, privileged,
	} {
		out = append(out, check(f)...)
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

func access(f Facts) []api.Finding {
	var out []api.Finding
	keys := make([]string, 0, len(f.Unread))
	for k := range f.Unread {
		keys = append(keys, k)
	}
	sort.Strings(keys)
	for _, k := range keys {
		out = append(out, warn("access", k, "it can't be read: "+f.Unread[k], "what depends on it wasn't looked at",
			"run doctor with more rights, or see whether carve is installed")...)
	}
	return out
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
