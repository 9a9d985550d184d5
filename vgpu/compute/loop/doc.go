// Package loop runs package compute on a node: every few milliseconds it reads what
// the processes of all shares say of their work, has each card's time divided, and
// publishes the terms in the limits files; a few times a second it asks the driver
// for the truth.
//
// It takes nothing from its caller but a list of shares and doors to the driver and
// the clock, and never waits for a container. What it reads of a container can be
// wrong in any way: it then harms that container's share only. If it ends, shares
// stay in force as they were last; see vgpu/lib/README.md.
package loop
