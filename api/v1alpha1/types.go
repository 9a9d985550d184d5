// Package v1alpha1 holds the custom resources of carve. So far that is
// GPUNode: what one node reports of its cards, and what its operator wishes.
//
// +kubebuilder:object:generate=true
// +groupName=carve.dev
package v1alpha1

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// GroupVersion is the API group and version of this package's kinds.
var GroupVersion = schema.GroupVersion{Group: "carve.dev", Version: "v1alpha1"}

// AddToScheme registers the kinds of this package.
func AddToScheme(s *runtime.Scheme) error {
	s.AddKnownTypes(GroupVersion, &GPUNode{}, &GPUNodeList{})
	metav1.AddToGroupVersion(s, GroupVersion)
	return nil
}

// GPUNode is one node's cards: cluster-scoped and named as the node. The spec
// belongs to the operator, the status to the node's agent, which writes it
// when something changed and never otherwise.
//
// +kubebuilder:object:root=true
// +kubebuilder:subresource:status
// +kubebuilder:resource:scope=Cluster,shortName=gn
// +kubebuilder:printcolumn:name="Cards",type=integer,JSONPath=`.status.summary.cards`
// +kubebuilder:printcolumn:name="Slices",type=integer,JSONPath=`.status.summary.slices`
// +kubebuilder:printcolumn:name="Granted MiB",type=integer,JSONPath=`.status.summary.grantedMiB`
// +kubebuilder:printcolumn:name="Memory MiB",type=integer,JSONPath=`.status.summary.memoryMiB`
// +kubebuilder:printcolumn:name="Limits",type=string,JSONPath=`.status.enforcement`
// +kubebuilder:printcolumn:name="Driver",type=string,JSONPath=`.status.driverVersion`
// +kubebuilder:printcolumn:name="Hook",type=date,JSONPath=`.status.hookConnectedSince`
// +kubebuilder:printcolumn:name="Age",type=date,JSONPath=`.metadata.creationTimestamp`
type GPUNode struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata,omitempty"`

	Spec   GPUNodeSpec   `json:"spec,omitempty"`
	Status GPUNodeStatus `json:"status,omitempty"`
}

// GPUNodeList is a list of GPUNodes.
//
// +kubebuilder:object:root=true
type GPUNodeList struct {
	metav1.TypeMeta `json:",inline"`
	metav1.ListMeta `json:"metadata,omitempty"`
	Items           []GPUNode `json:"items"`
}

// GPUNodeSpec is what the operator wishes for the node.
type GPUNodeSpec struct {
	// CordonedCards are UUIDs of cards that take no new slices; what runs on
	// them stays.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MaxItems=64
	// +kubebuilder:validation:items:Pattern=`^GPU-[0-9A-Za-z-]+$`
	// +kubebuilder:validation:items:MaxLength=80
	CordonedCards []string `json:"cordonedCards,omitempty"`
	// CordonReasons says why cards are out, by UUID, for people.
	// +optional
	// +kubebuilder:validation:MaxProperties=64
	CordonReasons map[string]CordonReason `json:"cordonReasons,omitempty"`
	// SlotsPerCard is how many containers may share one card. Unset means the
	// agent's setting, 32 by default.
	// +optional
	// +kubebuilder:validation:Minimum=1
	// +kubebuilder:validation:Maximum=256
	SlotsPerCard *int32 `json:"slotsPerCard,omitempty"`
}

// CordonReason is a sentence of the operator.
//
// +kubebuilder:validation:MaxLength=256
type CordonReason string

// GPUNodeStatus is what the node's agent found and did.
type GPUNodeStatus struct {
	// AgentVersion is the version of the agent that wrote the status.
	// +optional
	AgentVersion string `json:"agentVersion,omitempty"`
	// DriverVersion is the NVIDIA driver's version, for example 550.90.07.
	// +optional
	DriverVersion string `json:"driverVersion,omitempty"`
	// SoftwareGPU is true where the cards are the test instrument of that
	// name and not hardware.
	// +optional
	SoftwareGPU bool `json:"softwareGPU,omitempty"`
	// Enforcement names the strongest layer that holds memory limits on all
	// cards of this node: dmem, guard, or advisory where only the library in the
	// container does. A program that goes past the library is then seen and told
	// of, and not stopped.
	// +optional
	// +kubebuilder:validation:Enum=dmem;guard;advisory
	Enforcement string `json:"enforcement,omitempty"`
	// EnforcementReason says, in a sentence for each layer, why an advisory node has
	// none in force that a program can't go past.
	// +optional
	// +kubebuilder:validation:MaxLength=1024
	EnforcementReason string `json:"enforcementReason,omitempty"`
	// HookConnectedSince is when the hook's link to the container runtime was
	// made; unset while it is down, and then no card is handed out.
	// +optional
	HookConnectedSince *metav1.Time `json:"hookConnectedSince,omitempty"`
	// UnadjustedContainers counts running containers that have a grant but
	// were started without the hook: they have no card.
	// +optional
	UnadjustedContainers int32 `json:"unadjustedContainers,omitempty"`
	// SlotsPerCard is the setting in force.
	// +optional
	SlotsPerCard int32 `json:"slotsPerCard,omitempty"`
	// Summary adds up the cards, for readers of tables.
	// +optional
	Summary Summary `json:"summary,omitempty"`
	// Cards are the node's cards by index.
	// +optional
	// +listType=map
	// +listMapKey=uuid
	// +kubebuilder:validation:MaxItems=64
	Cards []Card `json:"cards,omitempty"`
	// Released are the UIDs of pods whose slices were made and taken away again since
	// the report before: none has shown them, and what was counted for them is free.
	// They stay until the next change; of very many the last ones are named.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MaxItems=256
	// +kubebuilder:validation:items:MaxLength=128
	Released []string `json:"released,omitempty"`
}

// Summary adds up a node's cards.
type Summary struct {
	Cards      int32 `json:"cards"`
	Slices     int32 `json:"slices"`
	MemoryMiB  int64 `json:"memoryMiB"`
	GrantedMiB int64 `json:"grantedMiB"`
}

// Card is one card.
type Card struct {
	// UUID is the card's identity everywhere: "GPU-…".
	// +kubebuilder:validation:Pattern=`^GPU-[0-9A-Za-z-]+$`
	// +kubebuilder:validation:MaxLength=80
	UUID string `json:"uuid"`
	// Index is the driver's index on this node, for people.
	Index int32 `json:"index"`
	// Model is the name that the driver gives, "NVIDIA A100-SXM4-80GB".
	Model string `json:"model"`
	// PCIBusID is the PCI address, "00000000:07:00.0".
	// +optional
	PCIBusID string `json:"pciBusID,omitempty"`
	// NUMANode is the card's NUMA node; unset where there is none.
	// +optional
	NUMANode *int32 `json:"numaNode,omitempty"`
	// MemoryMiB is what can be handed out: the card's memory less what the
	// driver keeps for itself.
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=16777216
	MemoryMiB int64 `json:"memoryMiB"`
	// PhysicalMiB is the card's memory as the driver states it.
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=16777216
	PhysicalMiB int64 `json:"physicalMiB"`
	// MIGMode is enabled, disabled, or empty where the card has none.
	// +optional
	MIGMode string `json:"migMode,omitempty"`
	// Modes are those in which the card can be given beside vgpu and exclusive:
	// timeslice, and mps where the node runs NVIDIA's MPS daemons. Unset, of an
	// older agent, means neither.
	// +optional
	// +listType=set
	// +kubebuilder:validation:MaxItems=8
	// +kubebuilder:validation:items:MaxLength=32
	Modes []string `json:"modes,omitempty"`
	// MPSClients is how many clients an MPS server takes on the card: 48 from Volta
	// on, 16 before. Each container in mode mps is one at least. Unset, of an
	// older agent, means 48.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=256
	MPSClients int32 `json:"mpsClients,omitempty"`
	// Sharing is what the node's file of NVIDIA's device plugin says of the card;
	// unset where it says nothing.
	// +optional
	Sharing *Sharing `json:"sharing,omitempty"`
	// MPS is the state of the card's MPS daemon; unset where none is wanted.
	// +optional
	MPS *MPS `json:"mps,omitempty"`
	// Layers hold memory limits on this card, strongest first: dmem, guard,
	// library.
	// +optional
	// +kubebuilder:validation:MaxItems=8
	Layers []string `json:"layers,omitempty"`
	// Links are the fast links to other cards of the node.
	// +optional
	Links []Link `json:"links,omitempty"`
	// Health is the card's state; a card that isn't healthy takes no new
	// slices.
	Health Health `json:"health"`
	// Slices are the shares in place.
	// +optional
	Slices []Slice `json:"slices,omitempty"`
}

// Sharing is a card's part of NVIDIA's device plugin configuration: whoever asks
// for a card and says no more gets one of its replicas.
type Sharing struct {
	// Mode is the one in which the card is given, and no other: mps or timeslice.
	// +kubebuilder:validation:Enum=mps;timeslice
	Mode string `json:"mode"`
	// Replicas is how many containers share the card. Each has that part of its
	// memory and compute unless it names amounts of its own.
	// +kubebuilder:validation:Minimum=2
	// +kubebuilder:validation:Maximum=256
	Replicas int32 `json:"replicas"`
	// FailRequestsGreaterThanOne keeps the card from containers that ask for more
	// than one.
	// +optional
	FailRequestsGreaterThanOne bool `json:"failRequestsGreaterThanOne,omitempty"`
}

// MPS is the state of one card's MPS daemon.
type MPS struct {
	// Ready says that the card takes new slices of mode mps, or takes its first one:
	// a daemon that nothing wants yet is started when it is wanted.
	Ready bool `json:"ready"`
	// Reason says in a sentence what is wrong where it isn't ready.
	// +optional
	// +kubebuilder:validation:MaxLength=512
	Reason string `json:"reason,omitempty"`
	// Since is when it came to be so.
	// +optional
	Since *metav1.Time `json:"since,omitempty"`
}

// Link is a link to another card.
type Link struct {
	// UUID of the other card.
	UUID string `json:"uuid"`
	// Class is nvlink, nvswitch, pcie-switch, pcie-host, numa or system, best
	// to worst.
	Class string `json:"class"`
	// Lanes is the number of NVLinks, 0 for other classes.
	// +optional
	Lanes int32 `json:"lanes,omitempty"`
}

// Health is a card's state with its cause.
type Health struct {
	// State is healthy, degraded, quarantined or lost.
	// +kubebuilder:validation:Enum=healthy;degraded;quarantined;lost
	State string `json:"state"`
	// Reason says why, in a sentence, for a state other than healthy.
	// +optional
	Reason string `json:"reason,omitempty"`
	// Since is when the state began.
	// +optional
	Since *metav1.Time `json:"since,omitempty"`
}

// States of health.
const (
	Healthy     = "healthy"
	Degraded    = "degraded"
	Quarantined = "quarantined"
	Lost        = "lost"
)

// Slice is a share of one card that is in place for one container.
type Slice struct {
	// PodUID and Container are the slice's identity on its card.
	PodUID    string `json:"podUID"`
	Container string `json:"container"`
	// Namespace and Pod name the pod for people.
	Namespace string `json:"namespace"`
	Pod       string `json:"pod"`
	// MemMiB and Cores are the limits in force; both 0 for a whole card. In mode
	// timeslice they are what was counted, and nothing holds the program to them.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=16777216
	MemMiB int64 `json:"memMiB,omitempty"`
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=100
	Cores int32 `json:"cores,omitempty"`
	// Mode is how the card is shared: vgpu, mig, mps, timeslice, exclusive.
	Mode string `json:"mode"`
	// ResidualMiB is memory that the container holds on the card beyond what its
	// library counted, 64 MiB or more: taken past the library, or by a call that
	// it doesn't count. It counts against the limit. The report has it as it was
	// when it last grew by half or shrank to half; metrics have it as it is.
	// +optional
	// +kubebuilder:validation:Minimum=0
	// +kubebuilder:validation:Maximum=16777216
	ResidualMiB int64 `json:"residualMiB,omitempty"`
	// Managed is the policy on managed memory in force, empty where it is charged.
	// +optional
	// +kubebuilder:validation:MaxLength=32
	Managed string `json:"managed,omitempty"`
	// Oversell is where memory beyond MemMiB goes, empty where it is refused.
	// +optional
	// +kubebuilder:validation:MaxLength=32
	Oversell string `json:"oversell,omitempty"`
	// Generation is the grant's that is in force.
	Generation int32 `json:"generation"`
	// RefusedGeneration is the generation of a newer grant of the pod that this
	// node can't put in force; the amounts above stay in force then.
	// +optional
	RefusedGeneration int32 `json:"refusedGeneration,omitempty"`
	// Refusal says why, in a sentence.
	// +optional
	Refusal string `json:"refusal,omitempty"`
	// Fault says in a sentence what is wrong with the files by which the node
	// reaches the running container; what it was granted stays counted.
	// +optional
	Fault string `json:"fault,omitempty"`
	// State is prepared (files are there, no container yet) or active.
	// +kubebuilder:validation:Enum=prepared;active
	State string `json:"state"`
}

// States of a slice.
const (
	Prepared = "prepared"
	Active   = "active"
)

// MaxReleased is how many pods a report names as released.
const MaxReleased = 256

// Layers that hold memory limits, strongest first; advisory is where only the
// library does.
const (
	LayerLibrary = "library"

	EnforcementDmem     = "dmem"
	EnforcementGuard    = "guard"
	EnforcementAdvisory = "advisory"
)
