package api

import (
	"encoding/json"
	"fmt"
	"time"
)

// Placement says when a pod's place is decided.
type Placement string

const (
	// Offered: when kube-scheduler asks about the pod, among the nodes that it names.
	Offered Placement = "offered"
	// Planned: before kube-scheduler sees the pod, among all nodes. The pod is held back by
	// GatePlan until one has room.
	Planned Placement = "planned"
	// Auto is Planned where kube-scheduler would name a sample of the nodes only.
	Auto Placement = "auto"
)

// SampledFrom is the number of nodes from which on kube-scheduler names a sample of them
// (minFeasibleNodesToFind, v1.37).
const SampledFrom = 100

// ParsePlacement reads one; an empty text is an empty Placement.
func ParsePlacement(s string) (Placement, error) {
	switch p := Placement(s); p {
	case "", Offered, Planned, Auto:
		return p, nil
	}
	return "", fmt.Errorf("%s: %.63q is not allowed; allowed is offered, planned, auto", AnnotationPlacement, s)
}

// Plan is where a pod was planned to go, in the annotation AnnotationPlan.
type Plan struct {
	UID   string   `json:"uid"`
	Nodes []string `json:"nodes"` // the chosen one, then those that it may be moved to
	// Pinned says that the pod's node affinity allows no other nodes.
	Pinned bool      `json:"pinned,omitempty"`
	At     time.Time `json:"at"`
}

// Encode writes the annotation's value.
func (p Plan) Encode() (string, error) {
	b, err := json.Marshal(p)
	if err != nil {
		return "", fmt.Errorf("%s: %w", AnnotationPlan, err)
	}
	return string(b), nil
}

// DecodePlan reads the annotation's value. A plan without a node, or for no pod, is an error.
func DecodePlan(s string) (Plan, error) {
	var p Plan
	if err := json.Unmarshal([]byte(s), &p); err != nil {
		return Plan{}, fmt.Errorf("%s: %w", AnnotationPlan, err)
	}
	if p.UID == "" || len(p.Nodes) == 0 {
		return Plan{}, fmt.Errorf("%s: it names no pod or no node", AnnotationPlan)
	}
	return p, nil
}
