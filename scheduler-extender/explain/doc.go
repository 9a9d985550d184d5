// Package explain says of one pod why it is where it is, or why it is nowhere:
// what it asks for as carve reads it, what each node and card says to that, what
// it was granted and what its node made of it.
//
// It is pure: it is given the objects that its caller may read and says what is
// missing from them. What nodes say is computed by the code that the extender
// runs (cluster.Snapshot, place.Judge), so the two can't disagree; nothing is
// booked and nothing is written.
//
// Start reading at Explain.
package explain
