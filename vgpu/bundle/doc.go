// Package bundle tries the share of a card on a machine with a card: whether limits
// are exact, compute is divided, and what the library costs. It measures beside that
// what the software GPU and the simulator assume of cards.
//
// It works on a bare machine: a driver, and the folder that `make gpu-bundle` makes.
// It puts the front libraries in the driver's place as containers have it, runs
// programs under them, and divides compute in its own process as the agent does. All
// that it starts is ended, and all that it makes is removed, before it returns.
//
// It never changes a setting of the card, and never decides what a figure should
// have been where nobody knows: such a row is only noted.
//
// Start reading at Run.
package bundle
