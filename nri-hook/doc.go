// Package nrihook decides what a container gets of the node's cards, at the
// moment at which the container is created.
//
// Adjust is the decision: a pure function of the container, its prepared slice
// and the driver's files, in terms of the OCI runtime specification. Link is
// the thin shell that speaks NRI with the container runtime and calls it.
//
// It never talks to the API server, the driver or the disk: NRI serialises all
// container creations of a node behind this code, and closes a plugin that
// takes two seconds. A container that it doesn't adjust has no card.
//
// Start reading at Adjust.
package nrihook
