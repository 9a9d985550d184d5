// Package dmem is the kernel's device-memory controller of cgroup v2 (Linux 6.14
// with CONFIG_CGROUP_DMEM): a hard limit for each cgroup and region of device
// memory, and what each holds. NVIDIA's driver registers its cards' memory with it
// from R615 on.
//
// A card is found among the regions by its PCI address or UUID in the region's
// name, and only where exactly one region is as large as the card. Names that
// nobody has seen yet make a card unheld, with a sentence that says why, and never
// limit the wrong one.
//
// What it never does: it makes no cgroup, moves no process, and limits no cgroup
// that isn't named after the container it was asked for.
//
// Start reading at Controller.
package dmem
