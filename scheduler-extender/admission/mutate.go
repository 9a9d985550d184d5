package admission

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/scheduler-extender/fit"
)

// Options say what admission does besides what it always does.
type Options struct {
	// SchedulerName is given to pods that ask for cards and name no scheduler,
	// where carve has a kube-scheduler of its own. Empty: none.
	SchedulerName string
	// Placement is how pods are placed that say nothing, offered if it is empty. Auto is
	// planned where Nodes, the number of nodes that carve manages, is that of a cluster in
	// which kube-scheduler names a sample of them only.
	Placement api.Placement
	Nodes     func() int
}

// Operation is one of a JSON patch.
type Operation struct {
	Op    string `json:"op"`
	Path  string `json:"path"`
	Value any    `json:"value,omitempty"`
}

// Change is what becomes of a pod. The zero Change leaves it as it is.
type Change struct {
	Patch []Operation
	// Warnings are shown to whoever creates the pod.
	Warnings []string
}

// corePolicy is the variable by which HAMi's users choose between a guarantee and a
// hard cap.
const corePolicy = "GPU_CORE_UTILIZATION_POLICY"

// Mutate says what becomes of a pod that is being created. It is idempotent: a pod
// with its change applied isn't changed again.
//
// A request that can't be meant is left as it was written, so that the refusal
// names what the user wrote.
func Mutate(p *corev1.Pod, o Options) Change {
	if _, mirror := p.Annotations[corev1.MirrorPodAnnotationKey]; mirror {
		// The kubelet demands its mirror as it sent it.
		return Change{}
	}
	m := mutation{pod: p}
	_, granted := p.Annotations[api.AnnotationGrant]
	m.strip()
	m.Warnings = append(m.Warnings, api.StrangeResources(specs(p))...)
	request, err := api.ParseRequest(specs(p), p.Annotations)
	if err != nil || request.Empty() {
		return m.Change
	}
	m.amounts(request)
	m.computePolicy(request)
	if granted && p.Spec.NodeName != "" {
		// One write gave the original both; with the grant goes the node.
		m.remove("/spec/nodeName")
		m.warn("spec.nodeName was taken off with the grant that it came with: the copy is scheduled anew")
	}
	if s := p.Spec.SchedulerName; o.SchedulerName != "" && (s == "" || s == corev1.DefaultSchedulerName) {
		m.add("/spec/schedulerName", o.SchedulerName)
	}
	m.gate(o)
	m.Warnings = append(m.Warnings, request.Warnings()...)
	if _, refusal := fit.NewAsk(request); refusal != nil {
		m.warn("no node will take the pod: " + refusal.Detail)
	}
	return m.Change
}

// mutation collects the change of one pod.
type mutation struct {
	Change
	pod *corev1.Pod
}

func (m *mutation) add(path string, value any) {
	m.Patch = append(m.Patch, Operation{"add", path, value})
}

func (m *mutation) remove(path string) {
	m.Patch = append(m.Patch, Operation{Op: "remove", Path: path})
}

func (m *mutation) warn(text string) { m.Warnings = append(m.Warnings, text) }

// strip takes off what speaks of another pod: copies and restores of pods carry
// their annotations along.
func (m *mutation) strip() {
	for _, key := range api.OwnAnnotations() {
		if _, ok := m.pod.Annotations[key]; ok {
			m.remove("/metadata/annotations/" + escape(key))
			m.warn("annotation " + key + " was taken off: it speaks of the pod that this one is a copy of")
		}
	}
}

// gate holds a pod back until it has a plan, where it is to have one. Pods of a DaemonSet have
// their node, and those of other schedulers aren't ours to hold.
func (m *mutation) gate(o Options) {
	p := m.pod
	placement := o.Placement
	if own, err := api.ParsePlacement(p.Annotations[api.AnnotationPlacement]); err == nil && own != "" {
		placement = own
	}
	if placement == api.Auto {
		if placement = api.Offered; o.Nodes != nil && o.Nodes() >= api.SampledFrom {
			placement = api.Planned
		}
	}
	scheduler := cmp.Or(p.Spec.SchedulerName, corev1.DefaultSchedulerName)
	if placement != api.Planned || p.Spec.NodeName != "" || scheduler != corev1.DefaultSchedulerName && scheduler != o.SchedulerName {
		return
	}
	if c := metav1.GetControllerOfNoCopy(p); c != nil && c.Kind == "DaemonSet" {
		return
	}
	gate := corev1.PodSchedulingGate{Name: api.GatePlan}
	switch {
	case slices.Contains(p.Spec.SchedulingGates, gate):
	case len(p.Spec.SchedulingGates) == 0:
		m.add("/spec/schedulingGates", []corev1.PodSchedulingGate{gate})
	default:
		m.add("/spec/schedulingGates/-", gate)
	}
}

// amounts gives shares their card, and memory its unit.
func (m *mutation) amounts(r api.Request) {
	shares := map[string]bool{}
	for _, c := range r.Containers {
		shares[c.Name] = c.MIG == nil && !c.Whole
	}
	each := func(kind string, containers []corev1.Container) {
		for i := range containers {
			c := &containers[i]
			path := fmt.Sprintf("/spec/%s/%d/resources/", kind, i)
			for list, amounts := range map[string]corev1.ResourceList{"limits": c.Resources.Limits, "requests": c.Resources.Requests} {
				// Where there are no requests, the API server copies the limits.
				if len(amounts) == 0 {
					continue
				}
				if _, ok := amounts[api.ResourceGPU]; !ok && shares[c.Name] {
					// So that the kubelet counts the slot and waits for the slice.
					m.add(path+list+"/"+escape(api.ResourceGPU), "1")
				}
				if q, ok := amounts[api.ResourceMemory]; ok {
					if mib, bytes := inMiB(q); bytes {
						m.add(path+list+"/"+escape(api.ResourceMemory), mib)
					}
				}
			}
		}
	}
	each("initContainers", m.pod.Spec.InitContainers)
	each("containers", m.pod.Spec.Containers)
}

// inMiB turns memory that is written in bytes into its number of MiB, which is
// what quotas and other readers count.
func inMiB(q resource.Quantity) (string, bool) {
	s := q.String()
	if !strings.HasSuffix(s, "i") {
		return "", false
	}
	mib, err := api.ParseMemoryMiB(s)
	if err != nil {
		return "", false
	}
	return fmt.Sprint(mib), true
}

// computePolicy puts HAMi's variable into our words, which win where both speak.
func (m *mutation) computePolicy(r api.Request) {
	if _, said := m.pod.Annotations[api.AnnotationCompute]; said {
		return
	}
	asks := map[string]bool{}
	for _, c := range r.Containers {
		asks[c.Name] = true
	}
	for _, c := range append(m.pod.Spec.Containers[:len(m.pod.Spec.Containers):len(m.pod.Spec.Containers)], m.pod.Spec.InitContainers...) {
		for _, e := range c.Env {
			if !asks[c.Name] || e.Name != corePolicy {
				continue
			}
			switch strings.ToLower(e.Value) {
			case "force":
				if m.pod.Annotations == nil {
					m.add("/metadata/annotations", map[string]string{})
				}
				m.add("/metadata/annotations/"+escape(api.AnnotationCompute), "fixed")
				return
			case "disable":
				m.warn("container " + c.Name + ": " + corePolicy + "=disable isn't honoured: a share of compute stays a guarantee for the others")
			}
		}
	}
}

// specs lists the pod's containers in its order.
func specs(p *corev1.Pod) []api.ContainerSpec {
	var out []api.ContainerSpec
	add := func(c *corev1.Container, kind api.ContainerKind) {
		s := api.ContainerSpec{Name: c.Name, Kind: kind, Resources: map[string]string{}, Requests: map[string]string{}}
		for name, q := range c.Resources.Limits {
			s.Resources[string(name)] = q.String()
		}
		for name, q := range c.Resources.Requests {
			s.Requests[string(name)] = q.String()
		}
		out = append(out, s)
	}
	for i := range p.Spec.InitContainers {
		c := &p.Spec.InitContainers[i]
		if c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways {
			add(c, api.Sidecar)
		} else {
			add(c, api.Init)
		}
	}
	for i := range p.Spec.Containers {
		add(&p.Spec.Containers[i], api.App)
	}
	return out
}

// escape makes a key a part of a JSON pointer.
func escape(key string) string {
	return strings.ReplaceAll(strings.ReplaceAll(key, "~", "~0"), "/", "~1")
}
