// Package sim puts simulated nodes beside the real one of a lab: Nodes with
// leases, GPUNodes, and for each node a kubelet and an agent that do what the
// real ones do as far as the API server can tell. Scheduler, extender and
// controllers are the real ones and see no difference; there is no container.
//
// All nodes of a Fleet live in one process and share their informers, so that
// thousands of them cost a goroutine each and little else.
//
// A simulated node speaks the agent's protocol with the agent's own types and
// pacing: it takes the grants of pods that are bound to it, reports prepared and
// active slices when they change, and drops them when the pod is over. It checks
// each grant by itself, and remembers those that no card has room for: that is
// how a burst finds out that a card was booked twice (Fleet.Refused).
//
// The agent's pod is made by carve's DaemonSet where that is installed, as on a
// real node; else the Fleet makes one. Simulated nodes write as whoever the
// clients are. The policy on GPUNodes holds the agents' service account to the
// object of its token's node; an administrator's client is not held, so tests
// use that.
//
// Start reading at Fleet.
package sim
