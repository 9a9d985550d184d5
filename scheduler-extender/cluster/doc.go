// Package cluster is the extender's side of the API server: informers that feed
// the ledger, the Binding that places a pod, and the touch that wakes a waiting
// one. It decides nothing.
//
// Everything the ledger knows at start comes from here, from API objects alone:
// pods with their grants, Nodes, GPUNodes. Ready tells when all of it is in.
package cluster
