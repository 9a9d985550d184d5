package gpu

import "time"

// Inventory is what the driver says of a node's cards.
type Inventory struct {
	// DriverVersion is for example "550.90.07".
	DriverVersion string
	// Cards are the node's cards by index. A card that stopped answering keeps
	// its place with what was last known of it and with a Fault.
	Cards []Card
	// Faults are sentences about cards that can't be named, since they failed
	// before their UUID was read.
	Faults []string
}

// Card is one card.
type Card struct {
	// UUID is the card's identity everywhere: "GPU-…".
	UUID string
	// Index is the driver's index on this node. It may change when a card is
	// lost, and is for people.
	Index int
	// Minor is N of /dev/nvidiaN.
	Minor int
	// Model is the driver's product name.
	Model string
	// PCIBusID is "00000000:07:00.0".
	PCIBusID string
	// NUMANode is the card's NUMA node, -1 where there is none or it is unknown.
	NUMANode int
	// MemoryBytes is the card's memory; ReservedBytes the part of it that the
	// driver keeps for itself (0 before R510, which doesn't say).
	MemoryBytes, ReservedBytes uint64
	// ComputeMajor is the major number of its compute capability, 0 where that isn't
	// known: 7 is Volta, 9 Hopper.
	ComputeMajor int
	// Multiprocessors is how many it has, 0 where that isn't known.
	Multiprocessors int
	// MIGMode is "enabled", "disabled", or empty where the card has none.
	MIGMode string
	// Persistence is "enabled", "disabled", or empty where the driver doesn't
	// say.
	Persistence string
	// ComputeMode says how many processes may have contexts, empty where that isn't known.
	ComputeMode ComputeMode
	// Links are the links to the node's other cards.
	Links []Link
	// Fault says in a sentence why the card can't be used; empty for a card
	// that answers. Lost says that the card is gone until a reset or reboot.
	Fault string
	Lost  bool
}

// MemoryMiB is what can be handed out, in whole MiB.
func (c Card) MemoryMiB() int64 {
	if c.ReservedBytes > c.MemoryBytes {
		return 0
	}
	return int64((c.MemoryBytes - c.ReservedBytes) >> 20)
}

// Link is a link to another card of the node.
type Link struct {
	UUID string
	// Class is one of the Link constants, best first.
	Class string
	// Lanes is the number of NVLinks, 0 for other classes.
	Lanes int
}

// Classes of links, best to worst, as the report names them.
const (
	LinkNVLink     = "nvlink"
	LinkNVSwitch   = "nvswitch"
	LinkPCIeSwitch = "pcie-switch"
	LinkPCIeHost   = "pcie-host"
	LinkNUMA       = "numa"
	LinkSystem     = "system"
)

// Sample is what a card holds at a moment.
type Sample struct {
	At time.Time
	// UsedBytes is the memory in use, without ReservedBytes.
	UsedBytes, ReservedBytes uint64
	// Processes are those with a context on the card. Their pids are those of
	// the node when the caller runs in its PID namespace.
	Processes []Process
	Load
}

// Load is how hard a card works; a field is nil where the driver doesn't say.
type Load struct {
	// UtilizationRatio is the part of the driver's last period (some tenths of
	// a second) in which a kernel ran, 0 to 1.
	UtilizationRatio *float64
	PowerWatts       *float64
	// TemperatureCelsius is that of the chip.
	TemperatureCelsius *float64
}

// Utilization is how much of a card's time each process had in a period of the
// driver's.
type Utilization struct {
	// At is the end of the period in microseconds of the driver's clock.
	At uint64
	// Percent is by pid, of the period, rounded down. Processes that had nothing are
	// left out.
	Percent map[int]int
}

// Account is what the driver has written down of one process on a card.
type Account struct {
	// Percent is the part of its life in which it had a kernel on the card.
	Percent int
	// PeakBytes is the most memory that it had.
	PeakBytes uint64
	// Milliseconds is how long it has had a context; 0 while it runs.
	Milliseconds uint64
	Running      bool
}

// Process is one process on a card.
type Process struct {
	PID int
	// UsedBytes is 0 where the driver doesn't say.
	UsedBytes uint64
}
