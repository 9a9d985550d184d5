// Package sock serves the node's local API (api/node/v1) on a unix socket and
// is the client of it.
//
// It shows what the agent has in place and changes nothing: amounts belong to
// the extender's ledger, so a resize is refused with the way to go. Whoever may
// open the socket may read names of pods and amounts: root, and the group that
// the operator made for it.
//
// Start reading at Listen, which makes the socket, and Server.
package sock
