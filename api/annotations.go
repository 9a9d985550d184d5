package api

import (
	"fmt"
	"slices"
	"strings"
)

// AnnotationPrefix begins every annotation of ours.
const AnnotationPrefix = "carve.dev/"

// Labels of namespaces that lift a rule of admission for their pods ("true").
// Whoever may label namespaces may do so; by default only administrators.
const (
	// LabelAllowPrivileged lets privileged pods ask for shares. They see every
	// card of their node, so that their limits are advice.
	LabelAllowPrivileged = "carve.dev/allow-privileged"
	// LabelAllowCDI lets pods name CDI devices of NVIDIA's in annotations, as
	// the GPU operator's own do.
	LabelAllowCDI = "carve.dev/allow-cdi"
	// LabelAllowNodeName lets pods that ask for cards be created with
	// spec.nodeName set, past the scheduler.
	LabelAllowNodeName = "carve.dev/allow-node-name"
)

// CDI annotations by which a pod names devices past every scheduler: NVIDIA's
// NRI plugin reads the first kind, runtimes read the second.
const (
	CDINVIDIAPrefix = "nvidia.cdi.k8s.io/"
	CDIPrefix       = "cdi.k8s.io/"
	// CDIVendor is in the name of each of NVIDIA's devices, "nvidia.com/gpu=0".
	CDIVendor = "nvidia.com/"
)

// annotations are those that a pod may carry. A key of ours that isn't among
// them is mistyped, and what it was to say would be lost in silence.
var annotations = []string{
	AnnotationCardModels,
	AnnotationCardPolicy,
	AnnotationCardUUIDs,
	AnnotationCompute,
	AnnotationComputePriority,
	AnnotationGrant,
	AnnotationIsolation,
	AnnotationManagedMemory,
	AnnotationOversell,
	AnnotationPlacement,
	AnnotationPlan,
	AnnotationResize,
	AnnotationResizeResult,
	AnnotationWake,
}

// Annotations lists the annotations of ours that a pod may carry, sorted. The
// list in deploy/manifests/policy-request.yaml is tested against it.
func Annotations() []string { return slices.Clone(annotations) }

// OwnAnnotations lists the annotations that speak of one pod and no other: a copy of the
// pod must not take them along.
func OwnAnnotations() []string {
	return []string{AnnotationGrant, AnnotationPlan, AnnotationResize, AnnotationResizeResult, AnnotationWake}
}

// NamesCDIDevices returns the annotation, if any, by which a pod names devices
// of NVIDIA's past the scheduler.
func NamesCDIDevices(a map[string]string) (key string, found bool) {
	for k, v := range a {
		if strings.HasPrefix(k, CDINVIDIAPrefix) || strings.HasPrefix(k, CDIPrefix) && strings.Contains(v, CDIVendor) {
			if !found || k < key {
				key, found = k, true
			}
		}
	}
	return key, found
}

// oneOf checks what an annotation says against the words that may be said.
func oneOf(key, v string, allowed ...string) error {
	if slices.Contains(allowed, v) {
		return nil
	}
	return &FieldError{"annotation " + key, v, strings.Join(allowed, ", ") + didYouMean(v, allowed)}
}

// didYouMean is the word that one was likely meant to be, as a hint, or nothing.
func didYouMean(word string, known []string) string {
	word = strings.ToLower(strings.TrimSpace(word))
	best, least := "", 3
	for _, k := range known {
		// Of a short word two changes leave too little.
		if d := changes(word, k); d < least && 3*d < len(k) {
			best, least = k, d
		}
	}
	if best == "" {
		return ""
	}
	return " (did you mean " + best + "?)"
}

// mistyped finds the first annotation of ours that doesn't exist.
func mistyped(a map[string]string) error {
	first := ""
	for k := range a {
		if strings.HasPrefix(k, AnnotationPrefix) && !slices.Contains(annotations, k) && (first == "" || k < first) {
			first = k
		}
	}
	if first == "" {
		return nil
	}
	// Those that speak of one pod are written by programs.
	written := slices.DeleteFunc(Annotations(), func(k string) bool { return slices.Contains(OwnAnnotations(), k) })
	return &FieldError{"annotations", first, "one of " + strings.Join(written, ", ") + didYouMean(first, written)}
}

// What entries of the card lists look like.
const (
	allowedModels = "a list of models or parts of their names, separated by commas, with ! before those that are excluded (A100,!A100-PCIE)"
	allowedUUIDs  = "a list of card UUIDs, separated by commas, with ! before those that are excluded (GPU-xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx)"
)

// ourList reads one of our lists strictly: an empty entry would say nothing, or
// exclude nothing, and so is a mistake.
func ourList(key, v, allowed string, good func(string) bool) (Selector, error) {
	var s Selector
	for _, e := range strings.Split(v, ",") {
		e = strings.TrimSpace(e)
		name, not := strings.CutPrefix(e, "!")
		if name = strings.TrimSpace(name); !good(name) {
			if v != e {
				v = fmt.Sprintf("%s (in %s)", clip(e), clip(v))
			}
			return Selector{}, &FieldError{"annotation " + key, v, allowed}
		}
		if not {
			s.Not = append(s.Not, name)
		} else {
			s.Only = append(s.Only, name)
		}
	}
	return s, nil
}

func namesModel(s string) bool { return s != "" }

// namesCard reports whether s has the form of a card's UUID, which NVML writes as
// GPU- and 36 characters.
func namesCard(s string) bool {
	id, ok := strings.CutPrefix(s, "GPU-")
	if !ok || len(id) != 36 {
		return false
	}
	for i := range len(id) {
		c := id[i]
		switch {
		case i == 8 || i == 13 || i == 18 || i == 23:
			if c != '-' {
				return false
			}
		case c >= '0' && c <= '9', c >= 'a' && c <= 'f', c >= 'A' && c <= 'F':
		default:
			return false
		}
	}
	return true
}

// contextMiB is about what the context of one process takes on today's cards:
// 100 to 620 MiB (vgpu/soft/state/models.c has the figures).
const contextMiB = 512

// Warnings say what a request that can be served is unlikely to be meant to be.
func (r Request) Warnings() []string {
	var out []string
	for _, c := range r.Containers {
		if c.MemMiB > 0 && c.MemMiB < contextMiB {
			out = append(out, fmt.Sprintf("container %s: %s: %d MiB may not hold the context of one process, which takes 100 to 620 MiB depending on the card; write 8000 or 8Gi for 8 GB", c.Name, ResourceMemory, c.MemMiB))
		}
	}
	var idle []string
	without := func(why string, said map[string]bool) {
		for key, is := range said {
			if is {
				idle = append(idle, "annotation "+key+" has no effect: "+why)
			}
		}
	}
	memory := map[string]bool{AnnotationManagedMemory: r.Managed != "", AnnotationOversell: r.Oversell != ""}
	compute := map[string]bool{AnnotationCompute: r.Fixed, AnnotationComputePriority: r.LowPriority}
	switch {
	case len(r.Containers) == 0:
	case r.WholeOnly() || r.Isolation == ModeExclusive:
		without("the pod asks for whole cards, which nothing of carve's stands before", memory)
	case r.Isolation == ModeTimeslice:
		out = append(out, "isolation timeslice holds no program to its memory or compute: the amounts are counted for placement, and nothing more")
		without("with isolation timeslice nothing of carve's stands before the card", memory)
		without("with isolation timeslice the driver divides the compute", compute)
	case r.Isolation == ModeMPS:
		without("with isolation mps "+ResourceCores+" is always a cap, and MPS divides the rest", compute)
	}
	if r.Fixed && (r.Isolation == "" || r.Isolation == ModeVGPU) {
		for _, c := range r.Containers {
			if c.MIG == nil && !c.Whole && c.Cores == 0 {
				out = append(out, fmt.Sprintf("container %s: annotation %s: fixed caps nothing without %s: it has what others leave", c.Name, AnnotationCompute, ResourceCores))
			}
		}
	}
	if r.Isolation == ModeExclusive {
		for _, c := range r.Containers {
			if c.MIG == nil && !c.Whole {
				out = append(out, "container "+c.Name+": isolation exclusive gives a whole card, of all its memory and compute; what is asked for is the least that the card must have")
			}
		}
	}
	if r.Isolation == ModeMPS || r.Isolation == ModeTimeslice {
		for _, c := range r.Containers {
			if c.MIG == nil && c.MemMiB == 0 && c.MemPercent == 0 {
				out = append(out, fmt.Sprintf("container %s: isolation %s without %s or %s is for cards that NVIDIA's configuration gives in replicas; on others no node will take the pod", c.Name, r.Isolation, ResourceMemory, ResourceMemoryPercent))
			}
		}
	}
	slices.Sort(idle)
	return append(out, idle...)
}
