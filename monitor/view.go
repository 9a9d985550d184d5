package monitor

import (
	"time"

	"github.com/carve-gpu/carve/vgpu/gpu"
)

// View is a node at one moment.
type View struct {
	Node, Version, DriverVersion string
	Software                     bool
	// LinkedSince is zero while the hook's link to the runtime is down.
	LinkedSince time.Time
	// KubeletConnected says that the kubelet listens to the device plugin.
	KubeletConnected bool
	// Unadjusted counts containers that should have a card and have none,
	// Refused pods whose grant isn't honoured, Records the pods in the journal.
	Unadjusted, Refused, Records int
	// Enforcement is the strongest layer that holds memory limits on all cards,
	// "advisory" for none but the library, and then EnforcementReason says why.
	Enforcement, EnforcementReason string
	// AccessRepairs counts the containers that had lost their devices and got
	// them back since the agent started.
	AccessRepairs uint64
	// LimitsRestored counts the limits files that others had written to and that
	// were put right, CutOff the running containers with a file that is no longer
	// the node's.
	LimitsRestored uint64
	CutOff         int
	Cards          []Card
	Slices         []Slice
}

// Card is one card.
type Card struct {
	gpu.Card
	Sample gpu.Sample
	// Fault says why there is no sample.
	Fault string
	// GrantedBytes and GrantedCores (percent) are what slices hold.
	GrantedBytes uint64
	GrantedCores int
	// Layers hold memory limits on it, strongest first.
	Layers []string
	// SharingMode and Replicas are what NVIDIA's configuration says of it, empty and 0
	// for nothing; MPS says that an MPS daemon is wanted for it, or hasn't let go of it,
	// MPSFault why it serves nobody new.
	SharingMode string
	Replicas    int
	MPS         bool
	MPSFault    string
	// ContextBytes is what a context costs there, 0 where nobody has shown it yet.
	ContextBytes uint64
}

// Slice is one container's share of one card.
type Slice struct {
	PodUID, Namespace, Pod, Container string
	Card, Mode                        string
	Active                            bool
	// Generation is the grant's that is in force.
	Generation int
	// Fault says what is wrong with the files by which the node reaches the
	// container.
	Fault string
	// Unread is true where the file in which the container counts can't be read; its own
	// figures are 0 then, and mean nothing.
	Unread bool
	// The memory figures are 0 for a whole card. PeakBytes is the largest use that was
	// seen: of each process exactly, of all together as they were looked at, once a second.
	// ManagedBytes is a part of UsedBytes.
	LimitBytes, UsedBytes, PeakBytes, ManagedBytes uint64
	// UnchargedBytes is managed memory that the pod's policy leaves uncharged, what was
	// oversold included; the driver keeps it on the card or on the host.
	UnchargedBytes uint64
	// ResidualBytes is held beyond UsedBytes, as the driver says.
	ResidualBytes uint64
	Refusals      uint64
	Cores         int // percent
	// ComputeSeconds is the card's time that the container had since it began to run, or
	// since the agent started; ComputeRatio is its part of the driver's last period, 0 to
	// 1. Both are nil where the driver doesn't say.
	ComputeSeconds, ComputeRatio *float64
	Processes                    int
}
