package doctor

import (
	"time"
)

// Facts are what was read of a node. Paths are the node's own.
type Facts struct {
	Node string
	// Agent is what the agent of the node says of itself; nil if none was asked.
	Agent *Agent
	// AgentFault says why no agent was asked.
	AgentFault string
	// Runtime is the container runtime's part.
	Runtime Runtime
	// Toolkit is NVIDIA's container toolkit's.
	Toolkit Toolkit
	Driver  Driver
	// Devices are the device nodes /dev/nvidia….
	Devices []Device
	// Majors are the character devices of /proc/devices by name.
	Majors map[string]int64
	Cgroup Cgroup
	RunDir RunDir
	// Kubelet is the kubelet's device-plugin directory.
	Kubelet Kubelet
	Journal Journal
	Library Library
	// Clock compares the node's clock with the API server's.
	Clock Clock
}

// Agent is what the agent knows.
type Agent struct {
	Version string
	// Software: the cards are the software GPU's.
	Software bool
	// LinkedSince is zero while the hook has no link to the runtime.
	LinkedSince time.Time
	// PlainFront says why containers get a front library that isn't made for the
	// node's driver, empty if they don't.
	PlainFront string
	// NotReady says why it isn't ready, empty if it is.
	NotReady string
	// KubeletConnected: the kubelet listens to the device plugin.
	KubeletConnected bool
	// Unadjusted counts containers that started without the hook, Refused pods
	// whose grant isn't honoured, Records the pods in the journal.
	Unadjusted, Refused, Records int
	SlotsPerCard                 int
	// Enforcement is the strongest layer that holds memory limits on all cards,
	// "advisory" for none but the library, and then EnforcementReason says why.
	Enforcement, EnforcementReason string
	Cards                          []Card
	// Sharing is how NVIDIA's configuration stands, nil where none is followed.
	Sharing *Sharing
}

// Sharing is a configuration of NVIDIA's device plugin that the agent follows.
type Sharing struct {
	// Path is the file or directory, Source the file in force, empty for none.
	Path, Source string
	// Fault says why the file that should be in force isn't; Warnings, what of the one
	// that is has no effect.
	Fault    string
	Warnings []string
}

// Card is a card as the agent sees it.
type Card struct {
	UUID  string
	Index int
	// MIGMode and Persistence are "enabled", "disabled" or empty.
	MIGMode, Persistence string
	// ComputeMode is the mode that somebody else than carve has set, "prohibited" or
	// "exclusive-process"; empty where nobody has.
	ComputeMode string
	Fault       string
	// ComputeFault says why its compute is given in turns, without the driver's word on
	// what processes use; empty where it isn't.
	ComputeFault string
	MemoryMiB    int64
	GrantedMiB   int64
	GrantedCores int
	// Slices are the containers that hold a share of it.
	Slices int
	// MPS is how its MPS daemon stands, nil where none is wanted.
	MPS *MPS
}

// MPS is a card's MPS daemon.
type MPS struct {
	// Fault says why it serves nobody, empty if it does, and Since when that began,
	// zero if that isn't known.
	Fault string
	Since time.Time
}

// Runtime is the container runtime.
type Runtime struct {
	// Kind is "containerd" or "cri-o", empty if neither was found.
	Kind string
	// ConfigPath is its configuration file, which may be missing: then defaults
	// hold. ConfigFault says why it can't be read.
	ConfigPath, ConfigFault string
	// ConfigVersion is the file's format: 2 is containerd 1.x' (2.x reads it
	// too), 3 and later are 2.x'.
	ConfigVersion int
	// NRI says what the configuration has: "on", "off", or empty.
	NRI string
	// DefaultRuntime is the name of the runtime that pods get, DefaultBinary the
	// program behind it. NVIDIARuntimes are the names of those with NVIDIA's.
	DefaultRuntime, DefaultBinary string
	NVIDIARuntimes                []string
	// NRISocket is the path of the socket; NRISocketFault says why it can't be
	// connected to, empty if it can.
	NRISocket, NRISocketFault string
}

// Toolkit is NVIDIA's container toolkit on the node.
type Toolkit struct {
	// ConfigPath is empty where there is none.
	ConfigPath, ConfigFault string
	// AcceptEnv and AcceptMounts say whether unprivileged containers get the
	// cards that they name in NVIDIA_VISIBLE_DEVICES or by mounts. The former is
	// on where the file says nothing, as the toolkit does (v1.17).
	AcceptEnv, AcceptMounts bool
	// NRIPlugin names what injects CDI devices for pod annotations, empty if
	// nothing was found.
	NRIPlugin string
	// CDISpecs are specifications of NVIDIA's own kinds.
	CDISpecs []string
}

// Driver is the NVIDIA driver.
type Driver struct {
	// Root is where it was looked for, Version its version, empty if Fault says
	// why it isn't known.
	Root, Version, Fault string
	// Software: it is the software GPU's.
	Software bool
}

// Device is one device node.
type Device struct {
	Path         string
	Major, Minor int64
	// Fault says why it can't be used.
	Fault string
}

// Cgroup is how the kernel groups processes.
type Cgroup struct {
	// Version is 1 or 2, 0 if neither was found.
	Version int
	// Devices: device rules can be set (v1: the controller is mounted; v2: by
	// eBPF, so always).
	Devices bool
}

// RunDir is where slices' files are.
type RunDir struct {
	Path, Fault string
	// Tmpfs: it is lost at a reboot, as it should be. Shared: mounts that the
	// agent makes reach the runtime.
	Tmpfs, Shared bool
	// Mode is its permission bits, UID its owner.
	Mode uint32
	UID  int
}

// Kubelet is the kubelet's part.
type Kubelet struct {
	Dir string
	// Fault says why the directory or its socket can't be used.
	Fault string
}

// Journal is the agent's.
type Journal struct {
	Dir, Fault string
	// Records are the pods in it; Damaged the records that were set aside.
	Records int
	Damaged []string
}

// Library is what the agent installed for containers.
type Library struct {
	Dir string
	// Fault says what differs from what the agent came with.
	Fault string
	// Unknown: it wasn't looked at.
	Unknown bool
}

// Clock is the node's clock and the API server's at one moment.
type Clock struct {
	// Skew is how far the node's is ahead.
	Skew time.Duration
	// Fault says why it isn't known.
	Fault string
	// Unknown: there was no API server to ask.
	Unknown bool
}
