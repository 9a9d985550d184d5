package extender

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/scheduler-extender/cluster"
	"github.com/carve-gpu/carve/scheduler-extender/ledger"
	"github.com/carve-gpu/carve/scheduler-extender/place"
)

// args is an ExtenderArgs of k8s.io/kube-scheduler/extender/v1, read only as
// far as a decision needs it: kube-scheduler sends the whole pod and the name
// of every node for every pod.
type args struct {
	pod   place.Pod
	names [][]byte // parts of the body
	// invalid says what is wrong with the pod's request; the rest of the pod
	// is there all the same.
	invalid error
}

// decodeArgs reads the body of a filter or prioritize call. The result keeps
// pointing into the body.
func decodeArgs(body []byte) (args, error) {
	var pod, nodes, names []byte
	err := members(body, func(key, value []byte) {
		switch string(key) {
		case "Pod":
			pod = value
		case "Nodes":
			nodes = value
		case "NodeNames":
			names = value
		}
	})
	if err != nil {
		return args{}, fmt.Errorf("read the request: %w", err)
	}
	var a args
	switch {
	case pod == nil || isNull(pod):
		return args{}, errors.New("read the request: it has no Pod")
	case names == nil || isNull(names):
		if nodes != nil && !isNull(nodes) {
			return args{}, errors.New("read the request: it has Nodes and no NodeNames; set nodeCacheCapable: true for this extender")
		}
		return args{}, errors.New("read the request: it has neither Nodes nor NodeNames")
	}
	if a.names, err = stringList(names); err != nil {
		return args{}, fmt.Errorf("read NodeNames: %w", err)
	}
	var v podView
	if err := json.Unmarshal(pod, &v); err != nil {
		return args{}, fmt.Errorf("read Pod: %w", err)
	}
	a.pod, a.invalid = v.pod()
	return a, nil
}

// podView is the part of a v1.Pod that decisions depend on.
type podView struct {
	Metadata struct {
		Name              string            `json:"name"`
		Namespace         string            `json:"namespace"`
		UID               string            `json:"uid"`
		CreationTimestamp time.Time         `json:"creationTimestamp"`
		Annotations       map[string]string `json:"annotations"`
		OwnerReferences   []struct {
			UID        string `json:"uid"`
			Kind       string `json:"kind"`
			Controller bool   `json:"controller"`
		} `json:"ownerReferences"`
	} `json:"metadata"`
	Spec struct {
		Containers     []containerView `json:"containers"`
		InitContainers []containerView `json:"initContainers"`
		Priority       int32           `json:"priority"`
		Overhead       amounts         `json:"overhead"`
		Resources      *struct {
			Requests amounts `json:"requests"`
		} `json:"resources"`
		Affinity *struct {
			NodeAffinity    *preferences `json:"nodeAffinity"`
			PodAffinity     *preferences `json:"podAffinity"`
			PodAntiAffinity *preferences `json:"podAntiAffinity"`
		} `json:"affinity"`
		TopologySpreadConstraints []struct {
			WhenUnsatisfiable string `json:"whenUnsatisfiable"`
		} `json:"topologySpreadConstraints"`
	} `json:"spec"`
}

type preferences struct {
	Preferred []json.RawMessage `json:"preferredDuringSchedulingIgnoredDuringExecution"`
}

type containerView struct {
	Name          string `json:"name"`
	RestartPolicy string `json:"restartPolicy"`
	Security      struct {
		Privileged bool `json:"privileged"`
	} `json:"securityContext"`
	Resources struct {
		Limits   amounts `json:"limits"`
		Requests amounts `json:"requests"`
	} `json:"resources"`
}

type amounts map[string]quantity

// host is what of the amounts isn't ours: a node's processors and memory.
func (a amounts) host() corev1.ResourceList {
	var out corev1.ResourceList
	for _, name := range []corev1.ResourceName{corev1.ResourceCPU, corev1.ResourceMemory} {
		if v, ok := a[string(name)]; ok {
			if q, err := resource.ParseQuantity(string(v)); err == nil {
				if out == nil {
					out = corev1.ResourceList{}
				}
				out[name] = q
			}
		}
	}
	return out
}

// host is the pod as far as what it asks of a node beside cards depends on it.
func (v *podView) host() *corev1.Pod {
	p := &corev1.Pod{Spec: corev1.PodSpec{Overhead: v.Spec.Overhead.host()}}
	if r := v.Spec.Resources; r != nil {
		p.Spec.Resources = &corev1.ResourceRequirements{Requests: r.Requests.host()}
	}
	list := func(views []containerView) []corev1.Container {
		out := make([]corev1.Container, len(views))
		for i := range views {
			out[i].Resources.Requests = views[i].Resources.Requests.host()
			if views[i].RestartPolicy != "" {
				policy := corev1.ContainerRestartPolicy(views[i].RestartPolicy)
				out[i].RestartPolicy = &policy
			}
		}
		return out
	}
	p.Spec.InitContainers, p.Spec.Containers = list(v.Spec.InitContainers), list(v.Spec.Containers)
	return p
}

// quantity keeps a resource.Quantity as written. The API server writes strings;
// numbers are read too, as its own decoder does.
type quantity string

func (q *quantity) UnmarshalJSON(b []byte) error {
	if len(b) > 0 && b[0] == '"' {
		var s string
		if err := json.Unmarshal(b, &s); err != nil {
			return err
		}
		*q = quantity(s)
		return nil
	}
	if !isNull(b) {
		*q = quantity(b)
	}
	return nil
}

// pod gives the pod in the terms of package place. The error is that of the
// request, and the pod is complete without it.
func (v *podView) pod() (place.Pod, error) {
	p := place.Pod{
		Ref:      ledger.Ref{UID: v.Metadata.UID, Namespace: v.Metadata.Namespace, Name: v.Metadata.Name},
		Priority: v.Spec.Priority, Created: v.Metadata.CreationTimestamp, Host: cluster.HostOf(v.host()),
	}
	for _, o := range v.Metadata.OwnerReferences {
		if o.Controller {
			p.Owner, p.Serves = o.UID, o.Kind == "ReplicaSet" || o.Kind == "StatefulSet" || o.Kind == "ReplicationController"
		}
	}
	if a := v.Spec.Affinity; a != nil {
		for _, s := range []*preferences{a.NodeAffinity, a.PodAffinity, a.PodAntiAffinity} {
			p.Soft = p.Soft || s != nil && len(s.Preferred) > 0
		}
	}
	for _, s := range v.Spec.TopologySpreadConstraints {
		p.Soft = p.Soft || s.WhenUnsatisfiable == "ScheduleAnyway"
	}
	specs := make([]api.ContainerSpec, 0, len(v.Spec.InitContainers)+len(v.Spec.Containers))
	for i := range v.Spec.InitContainers {
		kind := api.Init
		if v.Spec.InitContainers[i].RestartPolicy == "Always" {
			kind = api.Sidecar
		}
		specs = append(specs, v.Spec.InitContainers[i].spec(kind))
	}
	for i := range v.Spec.Containers {
		specs = append(specs, v.Spec.Containers[i].spec(api.App))
	}
	var err error
	p.Request, err = api.ParseRequest(specs, v.Metadata.Annotations)
	return p, err
}

func (c *containerView) spec(kind api.ContainerKind) api.ContainerSpec {
	s := api.ContainerSpec{Name: c.Name, Kind: kind, Privileged: c.Security.Privileged, Resources: make(map[string]string, len(c.Resources.Limits))}
	for k, q := range c.Resources.Requests {
		if !strings.HasPrefix(k, "nvidia.com/") {
			continue
		}
		if s.Requests == nil {
			s.Requests = map[string]string{}
		}
		s.Requests[k] = string(q)
	}
	for k, q := range c.Resources.Limits {
		s.Resources[k] = string(q)
	}
	return s
}

func isNull(b []byte) bool { return bytes.Equal(b, []byte("null")) }

var errJSON = errors.New("not well-formed JSON")

// members calls visit for each member of a JSON object, with the key's raw
// inside and the value's raw bytes. It checks what it needs to find the ends
// of values and no more: whoever uses a value must decode it strictly. Keys
// with escapes are passed as they are written.
func members(b []byte, visit func(key, value []byte)) error {
	i := space(b, 0)
	if i == len(b) || b[i] != '{' {
		return errJSON
	}
	i = space(b, i+1)
	if i < len(b) && b[i] == '}' {
		return trailing(b, i+1)
	}
	for {
		end, err := skipString(b, i)
		if err != nil {
			return err
		}
		key := b[i+1 : end-1]
		i = space(b, end)
		if i == len(b) || b[i] != ':' {
			return errJSON
		}
		i = space(b, i+1)
		if end, err = skipValue(b, i); err != nil {
			return err
		}
		visit(key, b[i:end])
		i = space(b, end)
		switch {
		case i == len(b):
			return errJSON
		case b[i] == '}':
			return trailing(b, i+1)
		case b[i] != ',':
			return errJSON
		}
		i = space(b, i+1)
	}
}

// stringList reads a JSON array of strings. Strings without escapes are
// returned as parts of b.
func stringList(b []byte) ([][]byte, error) {
	i := space(b, 0)
	if i == len(b) || b[i] != '[' {
		return nil, errJSON
	}
	i = space(b, i+1)
	if i < len(b) && b[i] == ']' {
		return nil, trailing(b, i+1)
	}
	out := make([][]byte, 0, bytes.Count(b, []byte{','})+1)
	for {
		end, err := skipString(b, i)
		if err != nil {
			return nil, err
		}
		name := b[i+1 : end-1]
		if bytes.IndexByte(name, '\\') >= 0 {
			var s string
			if err := json.Unmarshal(b[i:end], &s); err != nil {
				return nil, err
			}
			name = []byte(s)
		}
		out = append(out, name)
		i = space(b, end)
		switch {
		case i == len(b):
			return nil, errJSON
		case b[i] == ']':
			return out, trailing(b, i+1)
		case b[i] != ',':
			return nil, errJSON
		}
		i = space(b, i+1)
	}
}

func space(b []byte, i int) int {
	for i < len(b) && (b[i] == ' ' || b[i] == '\n' || b[i] == '\r' || b[i] == '\t') {
		i++
	}
	return i
}

func trailing(b []byte, i int) error {
	if space(b, i) != len(b) {
		return errJSON
	}
	return nil
}

// skipString returns the position behind the string that starts at i. Control
// characters in it are let through.
func skipString(b []byte, i int) (int, error) {
	if i >= len(b) || b[i] != '"' {
		return 0, errJSON
	}
	for i++; ; {
		n := bytes.IndexByte(b[i:], '"')
		if n < 0 {
			return 0, errJSON
		}
		escape := bytes.IndexByte(b[i:i+n], '\\')
		if escape < 0 {
			return i + n + 1, nil
		}
		if i += escape + 2; i > len(b) {
			return 0, errJSON
		}
	}
}

// skipValue returns the position behind the value that starts at i. Brackets
// are counted, not matched.
func skipValue(b []byte, i int) (int, error) {
	if i >= len(b) {
		return 0, errJSON
	}
	switch b[i] {
	case '"':
		return skipString(b, i)
	case '{', '[':
		depth := 0
		for i < len(b) {
			switch b[i] {
			case '"':
				end, err := skipString(b, i)
				if err != nil {
					return 0, err
				}
				i = end
				continue
			case '{', '[':
				depth++
			case '}', ']':
				if depth--; depth == 0 {
					return i + 1, nil
				}
			}
			i++
		}
		return 0, errJSON
	}
	start := i
	for i < len(b) && b[i] != ',' && b[i] != '}' && b[i] != ']' && b[i] > ' ' {
		i++
	}
	if !json.Valid(b[start:i]) {
		return 0, errJSON
	}
	return i, nil
}
