// Package fit answers one question: does what a pod asks for fit on the cards
// of one node, and on which of them. It is pure: it does no I/O, keeps no
// state, reads no clock and knows nothing of Kubernetes objects, so the same
// code serves filter, bind, waking, simulation and explanation.
//
// Start reading at NewAsk, which compiles a request, and Fit, which places it.
package fit
