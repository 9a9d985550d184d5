// Package compute holds the agent's half of compute shares: it looks at what
// the processes of one card say of themselves every few milliseconds, and tells
// them at which pace the card's time passes for each, what share is in force,
// who may borrow, whose turn it is, and by how much their accounts were wrong.
//
// The other half is vgpu/lib/src/credit.c, in the processes. Neither does any
// I/O or has a clock: the agent reads and writes the files, and asks the driver
// for the truth, through its own doors. Package sim runs both halves against a
// model of a card, on a clock of its own.
//
// What processes say is trusted by nobody: any value may be in it, and the
// worst that a liar gets is the time of his own container.
//
// Start reading at Card.Tick.
package compute
