// Package api holds the nouns that all rooms of carve share, and the one codec
// of each: what a pod asks for (Request), what it was given (Grant) and the
// names of resources, annotations and labels.
//
// It does no I/O and imports nothing but the standard library, so that the
// scheduler extender, the node agent and the command line can't disagree about
// a unit or a default. Start reading at ParseRequest and DecodeGrant.
package api
