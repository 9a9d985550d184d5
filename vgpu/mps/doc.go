// Package mps keeps NVIDIA's MPS daemons of a node: one for each card that has tenants
// in mode mps, and none for others.
//
// Two processes meet in files below one folder (Dir): the agent writes which cards'
// daemons are wanted, the keeper (`carve mps`, a DaemonSet of its own) what is. Nothing
// else passes between them, so each may die and come back alone; an upgrade of the
// agent never touches what tenants run with.
//
// The keeper holds a card to one process before its daemon starts, and lets go of that
// after the daemon and its servers have ended. So whoever isn't a client of MPS, and
// would run without its limits, can't use the card. It never gives out a card, and
// knows no pod.
//
// Start reading at Dir, then Keeper.Run, then card.tick.
package mps
