// Package sim runs compute shares against a model of a card, on a clock of its
// own: the processes' half is the very C code of vgpu/lib/src/credit.c, the
// agent's half is package compute. Nothing of it is in a shipped binary.
//
// The card gives its time round robin to the processes that have work, a quantum
// each with a cost for switching; a kernel is stopped at the end of a quantum.
// Kernels of one stream follow each other, those of different streams of a process
// run side by side. Processes launch, wait and think as programs do. What the
// driver says of busy time comes late and rounded. All of it is drawn from a seed,
// so a run can be repeated.
//
// Simpler ways to divide a card are here as well, for comparison (Designs): each is
// the same code given worse input.
package sim
