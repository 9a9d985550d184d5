package api

// Resource names. They are HAMi's and NVIDIA's, so that manifests move over
// unchanged.
const (
	// ResourceGPU counts cards: N different ones. Alone it means N whole cards.
	ResourceGPU = "nvidia.com/gpu"
	// ResourceMemory is memory on each of the cards: MiB where the quantity is
	// written in decimal form, bytes where it is written in binary form.
	ResourceMemory = "nvidia.com/gpumem"
	// ResourceMemoryPercent is memory as a percentage of each card's, 1..100.
	ResourceMemoryPercent = "nvidia.com/gpumem-percentage"
	// ResourceCores is compute on each of the cards in percent, 0..100; 0 or
	// absent means no share of its own.
	ResourceCores = "nvidia.com/gpucores"
	// ResourcePriority is HAMi's task priority: 0 high, 1 low.
	ResourcePriority = "nvidia.com/priority"
	// ResourceMIGPrefix precedes a MIG profile's name: nvidia.com/mig-1g.10gb.
	ResourceMIGPrefix = "nvidia.com/mig-"
)

// Annotations that carve reads or writes.
const (
	// AnnotationGrant carries the Grant. Only the extender may write it.
	AnnotationGrant = "carve.dev/grant"
	// AnnotationResize carries a Resize, which asks for other amounts for a
	// running pod. Users who may update pods/resize of the pod may write it;
	// the extender takes it away in the write that answers it.
	AnnotationResize = "carve.dev/resize"
	// AnnotationResizeResult carries the ResizeResult that answers the last
	// resize. Only the extender may write it.
	AnnotationResizeResult = "carve.dev/resize-result"
	// AnnotationWake is touched by the extender on a waiting pod when room
	// for it appeared: kube-scheduler then looks at the pod again at once.
	AnnotationWake = "carve.dev/wake"
	// AnnotationPlacement is a Placement: offered, planned or auto.
	AnnotationPlacement = "carve.dev/placement"
	// AnnotationPlan carries a Plan. Only the extender may write it.
	AnnotationPlan = "carve.dev/plan"
	// AnnotationLeadingSince, on the extender's pod, is when it began to answer. It has a
	// prefix of its own, since pods of users may not carry it.
	AnnotationLeadingSince = "leader.carve.dev/since"
	// AnnotationIsolation chooses a Mode for the pod's shares.
	AnnotationIsolation = "carve.dev/isolation"
	// AnnotationCardModels lists card models that the pod accepts, separated
	// by commas; an entry with a leading '!' excludes a model.
	AnnotationCardModels = "carve.dev/card-models"
	// AnnotationCardUUIDs lists card UUIDs that the pod accepts, separated by
	// commas; an entry with a leading '!' excludes a card.
	AnnotationCardUUIDs = "carve.dev/card-uuids"
	// AnnotationCardPolicy is binpack, spread or topology.
	AnnotationCardPolicy = "carve.dev/card-policy"
	// AnnotationCompute is elastic or fixed.
	AnnotationCompute = "carve.dev/compute"
	// AnnotationComputePriority is high or low.
	AnnotationComputePriority = "carve.dev/compute-priority"
	// AnnotationManagedMemory is a ManagedMemory, charge where it is left out.
	AnnotationManagedMemory = "carve.dev/managed-memory"
	// AnnotationOversell is an Oversell; left out, nothing goes beyond the share.
	AnnotationOversell = "carve.dev/oversell"
)

// Annotations of containers, not of pods: the runtime and its plugins see
// them, the API server never does.
const (
	// AnnotationSlots is what the device plugin answers to Allocate: the slot
	// ids, separated by commas. It says that a container asked for cards, and
	// nothing about which it gets.
	AnnotationSlots = "carve.dev/slots"
	// AnnotationSlice is the hook's mark on a container that it adjusted:
	// "<pod UID>/<container>@<generation of the grant>".
	AnnotationSlice = "carve.dev/slice"
)

// GatePlan is the scheduling gate of pods that wait for their plan. The webhook adds it, and
// the extender takes it away in the write that carries the plan.
const GatePlan = "carve.dev/plan"

// AnnotationRequiredPlugins is NRI's: a YAML list of the plugins without which a
// container of the pod isn't created, where the runtime's default validator is
// on (containerd 2.2 and later). The extender adds HookPlugin to it with the
// grant, so that a container with a grant never starts while the hook is away.
const AnnotationRequiredPlugins = "required-plugins.noderesource.dev"

// HookPlugin is the name by which the runtime knows carve's hook.
const HookPlugin = "carve"

// HAMi's annotations that are read as synonyms of ours; ours win.
const (
	HAMiUseModel    = "nvidia.com/use-gputype"
	HAMiAvoidModel  = "nvidia.com/nouse-gputype"
	HAMiUseUUID     = "nvidia.com/use-gpuuuid"
	HAMiAvoidUUID   = "nvidia.com/nouse-gpuuuid"
	HAMiMode        = "nvidia.com/vgpu-mode"
	HAMiCardPolicy  = "hami.io/gpu-scheduler-policy"
	HAMiNodePolicy  = "hami.io/node-scheduler-policy"
	hamiModeSharing = "hami-core"
)

const (
	// LabelManaged marks the nodes whose cards carve manages ("true").
	LabelManaged = "carve.dev/managed"
	// LabelNVIDIAConfig names the node's file among several configurations of NVIDIA's
	// device plugin, as it does for NVIDIA's own.
	LabelNVIDIAConfig = "nvidia.com/device-plugin.config"
	// TaintHookDown is the taint that the extender keeps, with the effect
	// NoSchedule, on managed nodes that can't serve cards.
	TaintHookDown = "carve.dev/hook-down"
	// LabelLeading ("true") is on the pod of the extender that answers, to which the Service
	// sends kube-scheduler.
	LabelLeading = "carve.dev/leading"
	// LabelName and AgentName tell the agent's pods from others in carve's
	// namespace.
	LabelName = "app.kubernetes.io/name"
	AgentName = "carve-node"
	// ExtenderName tells the extender's.
	ExtenderName = "carve-extender"
	// Namespace is where carve's own objects are installed by default.
	Namespace = "carve-system"
	// SlotsPerCard is how many containers may share one card by default.
	SlotsPerCard = 32
	// MaxCardsPerContainer bounds what one container may ask for: as many
	// cards as the largest NVLink node has, and as the limits file can hold.
	MaxCardsPerContainer = 16
)

// ManagedMemory says what becomes of the managed memory that the pod's programs
// ask for. In requests and grants charge is the empty string.
type ManagedMemory string

const (
	// ManagedCharge charges it in full: all of it can be on the card at once.
	ManagedCharge ManagedMemory = "charge"
	// ManagedCount counts it and charges nothing: what is asked for may be more
	// than the share, and the driver keeps on the host what has no room.
	ManagedCount ManagedMemory = "count"
	// ManagedForbid refuses it.
	ManagedForbid ManagedMemory = "forbid"
)

// Oversell says what a program gets that asks for ordinary memory beyond its share.
type Oversell string

// OversellHost gives it managed memory, which the driver keeps on the host where the
// card has no room. It is counted, and not charged to the share.
const OversellHost Oversell = "host"

// Mode says how a card is shared.
type Mode string

// Modes of sharing, as they stand in grants and in the isolation annotation.
const (
	ModeVGPU      Mode = "vgpu"      // memory and compute limits at the driver API
	ModeMIG       Mode = "mig"       // a hardware instance
	ModeMPS       Mode = "mps"       // a client of NVIDIA's MPS daemon
	ModeTimeslice Mode = "timeslice" // plain time slicing: amounts are counted, nothing holds them
	ModeExclusive Mode = "exclusive" // the whole card, nothing injected but devices
)

// Share reports whether a card of the mode is given in parts, each with an amount of
// memory, to several containers at once. A card with such tenants has one mode of them.
func (m Mode) Share() bool {
	return m == ModeVGPU || m == ModeMPS || m == ModeTimeslice
}

// FixedSize says in a sentence why what is given in the mode keeps its size; empty
// for vgpu, whose shares can be resized.
func (m Mode) FixedSize() string {
	switch m {
	case ModeVGPU:
		return ""
	case ModeMPS:
		return "the limits of a client of MPS are fixed when it starts; only shares of mode vgpu change their size"
	case ModeTimeslice:
		return "its amounts are counted only, and nothing holds the program to them; only shares of mode vgpu change their size"
	}
	return "only shares of mode vgpu change their size"
}

func (m Mode) valid() bool {
	switch m {
	case ModeVGPU, ModeMIG, ModeMPS, ModeTimeslice, ModeExclusive:
		return true
	}
	return false
}
