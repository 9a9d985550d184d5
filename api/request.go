package api

import (
	"fmt"
	"sort"
	"strconv"
	"strings"
)

// ContainerKind tells when a container runs relative to the others of its pod.
type ContainerKind uint8

// Kinds of container.
const (
	// App containers run together, after all init containers ended.
	App ContainerKind = iota
	// Init containers run alone, one after another.
	Init
	// Sidecar is a native sidecar: an init container with restartPolicy
	// Always. It runs beside the init containers that follow it and beside
	// the app containers.
	Sidecar
)

func (k ContainerKind) String() string {
	switch k {
	case Init:
		return "init"
	case Sidecar:
		return "sidecar"
	}
	return "app"
}

// ContainerSpec is the part of a container's spec that a request is read from.
type ContainerSpec struct {
	Name string
	Kind ContainerKind
	// Resources are the container's limits, by resource name, each as the API
	// server writes the quantity ("8k", "10Gi").
	Resources map[string]string
	// Privileged is its securityContext.privileged.
	Privileged bool
	// Requests are its requests. The API server demands that they equal the
	// limits for resources such as ours; where they are given, that is checked.
	Requests map[string]string
}

// ContainerRequest is what one container asks for. Amounts hold for each of
// its cards.
type ContainerRequest struct {
	Name string
	Kind ContainerKind
	// Cards is how many different cards, 1..MaxCardsPerContainer.
	Cards int
	// Whole asks for untouched, exclusive cards; then the amounts are zero.
	Whole bool
	// MemMiB is memory in MiB; 0 with MemPercent 0 means all memory of the card.
	MemMiB int64
	// MemPercent is memory as a percentage of the card's, 1..100, or 0.
	MemPercent int
	// Cores is compute in percent, 0..100; 0 has no share of its own.
	Cores int
	// MIG counts instances by profile name ("1g.10gb"), nil when none. A
	// container asks for instances or for shares, never both.
	MIG map[string]int
	// Privileged containers see every card of their node, whatever they are granted.
	Privileged bool
}

// Request is what a pod asks of carve: its containers that use a card, in the
// order of the pod (init containers first), and what it says about placement.
type Request struct {
	Containers []ContainerRequest
	// Isolation is the wished mode, empty for the node's default.
	Isolation Mode
	// Models and UUIDs restrict the cards; empty means any.
	Models, UUIDs Selector
	// Policy is the wish for choosing among cards: binpack, spread, topology,
	// or empty for the cluster's.
	Policy string
	// Fixed is true for a hard compute cap, false for an elastic guarantee.
	Fixed bool
	// LowPriority is true for tenants that wait while others are busy.
	LowPriority bool
	// Managed is what becomes of managed memory, empty for ManagedCharge.
	Managed ManagedMemory
	// Oversell is what becomes of requests beyond the share, empty where they are
	// refused.
	Oversell Oversell
}

// Selector restricts cards by an attribute. The zero Selector admits all.
type Selector struct {
	Only, Not []string
}

// Admits reports whether the value may be used. Models are matched without
// regard to case and by part ("A100" admits "NVIDIA A100-SXM4-80GB").
func (s Selector) Admits(value string) bool {
	v := strings.ToLower(value)
	for _, n := range s.Not {
		if strings.Contains(v, strings.ToLower(n)) {
			return false
		}
	}
	for _, o := range s.Only {
		if strings.Contains(v, strings.ToLower(o)) {
			return true
		}
	}
	return len(s.Only) == 0
}

// FieldError is a request that can't be meant: it names the field, the value
// and what is allowed.
type FieldError struct {
	Field, Value, Allowed string
}

func (e *FieldError) Error() string {
	return fmt.Sprintf("%s: %q is not allowed; allowed is %s", e.Field, clip(e.Value), e.Allowed)
}

// Empty reports whether the pod asks for nothing that carve hands out.
func (r Request) Empty() bool { return len(r.Containers) == 0 }

// WholeOnly reports whether the pod asks for nothing but a number of whole
// cards: what any device plugin for nvidia.com/gpu can give.
func (r Request) WholeOnly() bool {
	for _, c := range r.Containers {
		if !c.Whole || c.MIG != nil {
			return false
		}
	}
	return r.Isolation == "" || r.Isolation == ModeExclusive
}

// ParseRequest reads what a pod asks for. A pod that asks for no card gets an
// empty Request, whatever its annotations say. The error, if any, is a
// *FieldError for the first fault found.
func ParseRequest(containers []ContainerSpec, annotations map[string]string) (Request, error) {
	var r Request
	for _, c := range containers {
		cr, asks, err := parseContainer(c)
		if err != nil {
			return Request{}, err
		}
		if asks {
			r.Containers = append(r.Containers, cr)
		}
	}
	if r.Empty() {
		return Request{}, nil
	}
	for _, c := range containers {
		if v, ok := c.Resources[ResourcePriority]; ok {
			q, err := parseQuantity(v)
			if err != nil || q.value > 1 {
				return Request{}, &FieldError{field(c, ResourcePriority), v, "0 (high) or 1 (low)"}
			}
			r.LowPriority = r.LowPriority || q.value == 1
		}
	}
	if err := r.parseAnnotations(annotations); err != nil {
		return Request{}, err
	}
	return r, nil
}

func field(c ContainerSpec, resource string) string {
	return "container " + c.Name + ": " + resource
}

func parseContainer(c ContainerSpec) (ContainerRequest, bool, error) {
	cr := ContainerRequest{Name: c.Name, Kind: c.Kind, Privileged: c.Privileged}
	number := func(resource string, max int64, allowed string) (int64, bool, error) {
		s, ok := c.Resources[resource]
		if !ok {
			return 0, false, nil
		}
		q, err := parseQuantity(s)
		if err != nil || q.value > max {
			return 0, false, &FieldError{field(c, resource), s, allowed}
		}
		return q.value, true, nil
	}
	if err := equalRequests(c); err != nil {
		return cr, false, err
	}
	cards, hasCards, err := number(ResourceGPU, MaxCardsPerContainer, fmt.Sprintf("0 to %d cards", MaxCardsPerContainer))
	if err != nil {
		return cr, false, err
	}
	cores, _, err := number(ResourceCores, 100, "0 to 100 percent of each card")
	if err != nil {
		return cr, false, err
	}
	percent, _, err := number(ResourceMemoryPercent, 100, "1 to 100 percent of the memory of each card")
	if err != nil {
		return cr, false, err
	}
	if s, ok := c.Resources[ResourceMemory]; ok {
		if cr.MemMiB, err = ParseMemoryMiB(s); err != nil {
			return cr, false, &FieldError{field(c, ResourceMemory), s, "a number of MiB (8000) or of bytes in binary form (8Gi), no more than a card has"}
		}
	}
	for name, s := range c.Resources {
		profile, ok := strings.CutPrefix(name, ResourceMIGPrefix)
		if !ok {
			continue
		}
		q, err := parseQuantity(s)
		if err != nil || q.value > MaxCardsPerContainer*8 {
			return cr, false, &FieldError{field(c, name), s, "a small whole number of instances"}
		}
		if q.value > 0 {
			if cr.MIG == nil {
				cr.MIG = map[string]int{}
			}
			cr.MIG[profile] = int(q.value)
		}
	}
	cr.MemPercent, cr.Cores, cr.Cards = int(percent), int(cores), int(cards)
	// Zero could be meant as none or as no bound; with a card, or with a share of
	// its compute, it must be said.
	for _, name := range []string{ResourceMemory, ResourceMemoryPercent} {
		if s, ok := c.Resources[name]; ok && (cards > 0 || cores > 0) && cr.MemMiB == 0 && cr.MemPercent == 0 {
			return cr, false, &FieldError{field(c, name), s, "1 or more (leave it out for all memory of the card)"}
		}
	}
	if cr.MemMiB > 0 && cr.MemPercent > 0 {
		return cr, false, &FieldError{field(c, ResourceMemoryPercent), c.Resources[ResourceMemoryPercent], "either " + ResourceMemory + " or " + ResourceMemoryPercent + ", not both"}
	}
	shares := cr.MemMiB > 0 || cr.MemPercent > 0 || cr.Cores > 0
	if cr.MIG != nil {
		if shares || cr.Cards > 0 {
			return cr, false, &FieldError{field(c, ResourceMIGPrefix+"*"), profiles(cr.MIG), "instances alone, without " + ResourceGPU + ", " + ResourceMemory + " or " + ResourceCores}
		}
		return cr, true, nil
	}
	if shares && cr.Cards == 0 {
		if hasCards {
			return cr, false, &FieldError{field(c, ResourceGPU), c.Resources[ResourceGPU], "1 or more beside a share (or leave it out: a share alone means one card)"}
		}
		cr.Cards = 1
	}
	// All of the memory and no share of compute is what nvidia.com/gpu alone
	// means; a share that happens to be everything is not the same: it goes
	// through the library and may have neighbours for the rest.
	cr.Whole = !shares
	return cr, cr.Cards > 0, nil
}

// equalRequests holds the rule for resources that are whole and can't be
// overcommitted.
func equalRequests(c ContainerSpec) error {
	names := make([]string, 0, len(c.Requests))
	for name := range c.Requests {
		if ours(name) {
			names = append(names, name)
		}
	}
	sort.Strings(names)
	for _, name := range names {
		limit, ok := c.Resources[name]
		if !ok {
			return &FieldError{field(c, name) + " in requests", c.Requests[name], "the same amount in limits"}
		}
		if limit == c.Requests[name] {
			continue
		}
		// A quantity that can't be read is refused below, where it is a limit.
		l, errL := parseQuantity(limit)
		r, errR := parseQuantity(c.Requests[name])
		if errL == nil && (errR != nil || l.value != r.value) {
			return &FieldError{field(c, name) + " in requests", c.Requests[name], "the amount in limits, " + clip(limit)}
		}
	}
	return nil
}

// ours reports whether carve hands out a resource.
func ours(name string) bool {
	switch name {
	case ResourceGPU, ResourceMemory, ResourceMemoryPercent, ResourceCores, ResourcePriority:
		return true
	}
	return strings.HasPrefix(name, ResourceMIGPrefix)
}

func profiles(m map[string]int) string {
	var names []string
	for n := range m {
		names = append(names, n)
	}
	sort.Strings(names)
	return strings.Join(names, ",")
}

func (r *Request) parseAnnotations(a map[string]string) error {
	if err := mistyped(a); err != nil {
		return err
	}
	if v, ok := a[AnnotationIsolation]; ok {
		// Instances aren't served yet: who asks for them is understood, and told so
		// where it is refused.
		if err := oneOf(AnnotationIsolation, v, "vgpu", "mps", "timeslice", "exclusive"); err != nil && v != string(ModeMIG) {
			return err
		}
		r.Isolation = Mode(v)
	} else if v, ok := a[HAMiMode]; ok {
		if err := oneOf(HAMiMode, v, hamiModeSharing, "mps"); err != nil && v != string(ModeMIG) {
			return err
		}
		if r.Isolation = Mode(v); v == hamiModeSharing {
			r.Isolation = ModeVGPU
		}
	}
	if r.Isolation == ModeMPS {
		for _, c := range r.Containers {
			if c.Cards > 1 {
				return &FieldError{"container " + c.Name + ": " + ResourceGPU, strconv.Itoa(c.Cards), "1 card with isolation mps, since the processes of a container reach one MPS daemon"}
			}
		}
	}
	if v, ok := a[AnnotationCardPolicy]; ok {
		if err := oneOf(AnnotationCardPolicy, v, "binpack", "spread", "topology"); err != nil {
			return err
		}
		r.Policy = v
	} else if v, ok := a[HAMiCardPolicy]; ok {
		if err := oneOf(HAMiCardPolicy, v, "binpack", "spread", "topology-aware", "mutex"); err != nil {
			return err
		}
		switch v {
		case "topology-aware":
			r.Policy = "topology"
		case "mutex":
			r.Policy = "spread"
		default:
			r.Policy = v
		}
	}
	if v, ok := a[AnnotationCompute]; ok {
		if err := oneOf(AnnotationCompute, v, "elastic", "fixed"); err != nil {
			return err
		}
		r.Fixed = v == "fixed"
	}
	if v, ok := a[AnnotationComputePriority]; ok {
		if err := oneOf(AnnotationComputePriority, v, "high", "low"); err != nil {
			return err
		}
		r.LowPriority = v == "low"
	}
	if err := r.memoryPolicies(a); err != nil {
		return err
	}
	var err error
	if r.Models, err = selector(a, AnnotationCardModels, HAMiUseModel, HAMiAvoidModel, allowedModels, namesModel); err != nil {
		return err
	}
	r.UUIDs, err = selector(a, AnnotationCardUUIDs, HAMiUseUUID, HAMiAvoidUUID, allowedUUIDs, namesCard)
	return err
}

// memoryPolicies reads what becomes of memory that needn't be on the card.
func (r *Request) memoryPolicies(a map[string]string) error {
	if v, ok := a[AnnotationManagedMemory]; ok {
		if err := oneOf(AnnotationManagedMemory, v, string(ManagedCharge), string(ManagedCount), string(ManagedForbid)); err != nil {
			return err
		}
		if v != string(ManagedCharge) {
			r.Managed = ManagedMemory(v)
		}
	}
	if v, ok := a[AnnotationOversell]; ok {
		if err := oneOf(AnnotationOversell, v, string(OversellHost)); err != nil {
			return err
		}
		if r.Managed == ManagedForbid {
			return &FieldError{"annotation " + AnnotationOversell, v, "none beside " + AnnotationManagedMemory + ": forbid, since what is oversold is managed memory"}
		}
		r.Oversell = Oversell(v)
	}
	return nil
}

// selector reads our list with '!' exclusions, or HAMi's pair of lists, whose
// empty entries mean nothing.
func selector(a map[string]string, ours, hamiOnly, hamiNot, allowed string, good func(string) bool) (Selector, error) {
	if v, ok := a[ours]; ok {
		return ourList(ours, v, allowed, good)
	}
	return Selector{Only: list(a[hamiOnly]), Not: list(a[hamiNot])}, nil
}

func list(v string) []string {
	var out []string
	for _, e := range strings.Split(v, ",") {
		if e = strings.TrimSpace(e); e != "" {
			out = append(out, e)
		}
	}
	return out
}
