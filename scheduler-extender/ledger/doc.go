// Package ledger knows what is where: for every card of every managed node
// what is offered, bound, leaving, and free. It is fed with what the API shows
// (reports, pods, nodes) and with the extender's own decisions, and it can be
// rebuilt from the former alone.
//
// It never does I/O, never reads a clock and never decides where something
// should go. All writes go through one lock, under which nothing blocks; reads
// are snapshots per node that need no lock.
//
// What holds at any moment, after each call:
//   - I2: free is what the node reports less what its entries hold. No entry
//     counts twice. Of a live pod's share the larger of grant and report
//     counts; of a pod that left, what the report still shows. A node that
//     reports less than it owes has debt, never negative free.
//   - I4: an offer that isn't bound ends by itself within seconds.
//   - I5: what isn't in the API is offers only, so a crash loses time and
//     nothing else.
//
// Start reading at Ledger, then entry.use, which is the whole arithmetic.
package ledger
