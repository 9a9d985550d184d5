package page

import "time"

// StateVersion is the version of the JSON. It grows when a field changes its
// meaning; fields may be added freely.
const StateVersion = 1

// Scopes of a State.
const (
	ScopeNode    = "node"
	ScopeCluster = "cluster"
)

// State is all cards at one moment.
type State struct {
	Version int       `json:"v"`
	Scope   string    `json:"scope"` // node or cluster
	At      time.Time `json:"at"`
	// Hidden says that names of holders are left out for this reader.
	Hidden bool   `json:"hidden,omitempty"`
	Nodes  []Node `json:"nodes"`
}

// Node is one node.
type Node struct {
	Name    string `json:"name"`
	Version string `json:"version,omitempty"`
	Driver  string `json:"driver,omitempty"`
	// Software is true where the cards are the test instrument's.
	Software bool `json:"softwareGPU,omitempty"`
	// HookUp says whether the hook has its link to the runtime.
	HookUp bool `json:"hookUp"`
	// Blocked is the reason for which the node takes nothing new, from the
	// same closed set as in the reasons of pending pods; BlockedFor says it in
	// words.
	Blocked    string `json:"blocked,omitempty"`
	BlockedFor string `json:"blockedFor,omitempty"`
	// Unadjusted counts containers without the card that they should have,
	// Refused pods whose grant isn't honoured.
	Unadjusted int    `json:"unadjusted,omitempty"`
	Refused    int    `json:"refused,omitempty"`
	Cards      []Card `json:"cards"`
}

// Card is one card. Pointers are nil where nobody told.
type Card struct {
	Index  int    `json:"index"`
	UUID   string `json:"uuid"`
	Model  string `json:"model"`
	Health string `json:"health"` // healthy, degraded, quarantined, lost
	Reason string `json:"reason,omitempty"`
	// Cordoned is true for a card that the operator took out.
	Cordoned    bool   `json:"cordoned,omitempty"`
	CordonedFor string `json:"cordonedFor,omitempty"`
	// MemoryBytes is what can be handed out; GrantedBytes and GrantedPercent
	// (of compute) are what is.
	MemoryBytes    uint64 `json:"memoryBytes"`
	GrantedBytes   uint64 `json:"grantedBytes"`
	GrantedPercent int    `json:"grantedPercent"`
	// UsedBytes is in use on the card, by whoever.
	UsedBytes          *uint64  `json:"usedBytes,omitempty"`
	UtilizationRatio   *float64 `json:"utilizationRatio,omitempty"`
	PowerWatts         *float64 `json:"powerWatts,omitempty"`
	TemperatureCelsius *float64 `json:"temperatureCelsius,omitempty"`
	Processes          *int     `json:"processes,omitempty"`
	Holders            []Holder `json:"holders"`
}

// Holder is who has a part of a card: a container on the page of a node, a pod
// on that of the cluster.
type Holder struct {
	Namespace string `json:"namespace,omitempty"`
	Pod       string `json:"pod,omitempty"`
	Container string `json:"container,omitempty"`
	// State is offered (being placed), bound, prepared (no container runs yet),
	// active or releasing (the pod has ended, its node still holds the share).
	State string `json:"state"`
	// Whole is true for who has the card alone; LimitBytes is all of it then.
	Whole bool `json:"whole,omitempty"`
	// Mode is how it has its part: vgpu, mps, timeslice, exclusive.
	Mode       string `json:"mode,omitempty"`
	LimitBytes uint64 `json:"limitBytes"`
	// Counted says that LimitBytes is counted, and nothing holds the container to it (mode
	// timeslice). UsedBytes and Processes are the driver's figures then.
	Counted bool `json:"counted,omitempty"`
	// Percent is compute; 0 has no share of its own.
	Percent int `json:"percent,omitempty"`
	// ComputeRatio is the part of the card's time that the container had in the driver's
	// last period, 0 to 1.
	ComputeRatio *float64 `json:"computeRatio,omitempty"`
	// UsedBytes is what the container's processes say that they hold,
	// ResidualBytes what the driver says that they hold beyond it.
	UsedBytes     *uint64 `json:"usedBytes,omitempty"`
	ResidualBytes *uint64 `json:"residualBytes,omitempty"`
	// ManagedBytes is the part of UsedBytes that is managed memory, UnchargedBytes managed
	// memory beside it that the pod's policy leaves uncharged.
	ManagedBytes   *uint64 `json:"managedBytes,omitempty"`
	UnchargedBytes *uint64 `json:"unchargedBytes,omitempty"`
	// PeakBytes is the largest use that was seen: of each process exactly, of all together
	// as they were looked at, once a second.
	PeakBytes *uint64 `json:"peakBytes,omitempty"`
	Refusals  *uint64 `json:"refusals,omitempty"`
	Processes *int    `json:"processes,omitempty"`
}

// hide takes the names of holders out; keepNamespace leaves those of their
// namespaces.
func hide(s State, keepNamespace bool) State {
	s.Hidden = true
	nodes := make([]Node, len(s.Nodes))
	for i, n := range s.Nodes {
		cards := make([]Card, len(n.Cards))
		for j, c := range n.Cards {
			holders := make([]Holder, len(c.Holders))
			for k, h := range c.Holders {
				h.Pod, h.Container = "", ""
				if !keepNamespace {
					h.Namespace = ""
				}
				holders[k] = h
			}
			c.Holders = holders
			cards[j] = c
		}
		n.Cards = cards
		nodes[i] = n
	}
	s.Nodes = nodes
	return s
}
