// Package region is the node's side of the two files that it shares with a container: limits, which only
// the node writes, and usage, which the processes of the container write and nobody trusts.
//
// The layout is stated once, in vgpu/lib/include/carve_region.h; the numbers in layout.go repeat it and a
// test compiles the header and compares every one of them.
//
// What it never does: it doesn't read a usage file through a mapping (of a file that the container truncates
// that kills the reader; MappingOf maps one, and touches nothing), it doesn't follow a link or wait on a pipe that was put in a file's place, it takes no lock that
// a container could hold, and it doesn't believe a number that it read without bounding it. It has no
// opinion on which process is dead: ReclaimSlot does what its caller decided.
//
// Start reading at Limits and ReadUsage.
package region
