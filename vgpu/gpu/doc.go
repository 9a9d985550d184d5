// Package gpu is the hardware door: what a card is to the rest of carve, which
// files of the driver a container needs, and which device nodes.
//
// It holds nouns and the reading of driver roots. It never talks to the driver
// itself: package nvml below it does, and it is the only one that does. Rooms
// declare the interface that they need of it where they use it.
//
// Start reading at Inventory, then Root.DriverFiles.
package gpu
