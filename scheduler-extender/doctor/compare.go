package doctor

import (
	"bytes"
	"fmt"
	"io/fs"
	"slices"
	"sort"
	"strings"

	"sigs.k8s.io/yaml"

	"github.com/carve-gpu/carve/api"
)

// resources are the kinds that are compared, with the parts that say what they
// do. The rest of an installation shows in what it does.
var resources = map[string]struct {
	path  string
	parts []string
}{
	"CustomResourceDefinition":         {"/apis/apiextensions.k8s.io/v1/customresourcedefinitions", []string{"spec"}},
	"ValidatingAdmissionPolicy":        {"/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies", []string{"spec"}},
	"ValidatingAdmissionPolicyBinding": {"/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings", []string{"spec"}},
	"MutatingWebhookConfiguration":     {"/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations", []string{"webhooks"}},
	"ValidatingWebhookConfiguration":   {"/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations", []string{"webhooks"}},
	"ClusterRole":                      {"/apis/rbac.authorization.k8s.io/v1/clusterroles", []string{"rules"}},
	"ClusterRoleBinding":               {"/apis/rbac.authorization.k8s.io/v1/clusterrolebindings", []string{"roleRef", "subjects"}},
}

// Expect reads the manifests that this version installs, for an installation
// in the given namespace.
func Expect(files fs.FS, namespace string) ([]Object, error) {
	index, err := fs.ReadFile(files, "kustomization.yaml")
	if err != nil {
		return nil, fmt.Errorf("read manifests: %w", err)
	}
	var list struct {
		Resources []string `json:"resources"`
	}
	if err := yaml.Unmarshal(index, &list); err != nil {
		return nil, fmt.Errorf("read manifests: kustomization.yaml: %w", err)
	}
	var out []Object
	for _, name := range list.Resources {
		text, err := fs.ReadFile(files, name)
		if err != nil {
			return nil, fmt.Errorf("read manifests: %w", err)
		}
		// The policies and bindings name the accounts of the namespace.
		text = bytes.ReplaceAll(text, []byte(api.Namespace), []byte(namespace))
		for _, document := range bytes.Split(text, []byte("\n---\n")) {
			var content map[string]any
			if err := yaml.Unmarshal(document, &content); err != nil {
				return nil, fmt.Errorf("read manifests: %s: %w", name, err)
			}
			o := Object{File: name, Content: content}
			o.APIVersion, _ = content["apiVersion"].(string)
			o.Kind, _ = content["kind"].(string)
			meta, _ := content["metadata"].(map[string]any)
			o.Name, _ = meta["name"].(string)
			o.Namespace, _ = meta["namespace"].(string)
			if _, compared := resources[o.Kind]; compared && o.Name != "" {
				out = append(out, o)
			}
		}
	}
	return out, nil
}

// differences lists where an object of the cluster lacks or contradicts what
// was installed. What the API server or an operator added is no difference:
// defaults, labels, the certificate that a webhook is given later.
func (o Object) differences(have map[string]any) []string {
	var out []string
	for _, part := range resources[o.Kind].parts {
		if want, ok := o.Content[part]; ok {
			out = append(out, differ(part, want, have[part])...)
		}
	}
	return slices.DeleteFunc(out, func(path string) bool { return strings.HasSuffix(path, ".caBundle") })
}

func differ(path string, want, have any) []string {
	switch w := want.(type) {
	case map[string]any:
		h, ok := have.(map[string]any)
		if !ok {
			return []string{path}
		}
		var out []string
		keys := make([]string, 0, len(w))
		for k := range w {
			keys = append(keys, k)
		}
		sort.Strings(keys)
		for _, k := range keys {
			// Empty and absent are the same to the API server.
			if v, there := h[k]; there || !empty(w[k]) {
				out = append(out, differ(path+"."+k, w[k], v)...)
			}
		}
		return out
	case []any:
		h, ok := have.([]any)
		if !ok || len(h) != len(w) {
			return []string{path}
		}
		var out []string
		for i := range w {
			out = append(out, differ(fmt.Sprintf("%s[%d]", path, i), w[i], h[i])...)
		}
		return out
	}
	if plain(want) != plain(have) {
		return []string{path}
	}
	return nil
}

// plain is a value as text. Tools that pass manifests on break long expressions
// anew, so white space doesn't count.
func plain(v any) string { return strings.Join(strings.Fields(fmt.Sprint(v)), " ") }

func empty(v any) bool {
	switch v := v.(type) {
	case nil:
		return true
	case map[string]any:
		return len(v) == 0
	case []any:
		return len(v) == 0
	case string:
		return v == ""
	case bool:
		return !v
	}
	return false
}
