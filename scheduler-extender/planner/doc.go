// Package planner decides where pods go before kube-scheduler sees them. The webhook holds such
// pods back with the scheduling gate api.GatePlan; the planner looks at all nodes, books room
// in the ledger, and sends one patch: gate off, the plan, and node affinity to the chosen node
// and a few spares. kube-scheduler then looks at these alone, and the extender's filter answers
// with the booked one. A pod for which there is no room stays gated, holds nothing, and is
// planned within a second of the room that it needs.
//
// What is pinned to nodes can go nowhere else any more, so only pods are whose place depends on
// nothing that is unknown here, and whose controller makes another if the nodes are lost: that
// one is made anew. Others get status.nominatedNodeName, which kube-scheduler tries first.
//
// All of it is in the API: a planner that dies before the patch leaves a gated pod, which the
// next one plans; after it, a plan, whose room the next one books before it answers.
package planner
