// Package packing is the experiment that the extender's packing is measured by: the one of the
// FGD paper, published policies beside carve's, and the bound that nobody can pass.
//
// openb has the trace and makes arrivals of it, rival the published policies, carve the
// extender's own, replay runs one, compare several, bound says what is possible. shares and
// instances are experiments of the same kind on cards alone: shares of unequal compute and memory,
// and MIG instances. bench is the command that prints the figures.
// Nothing here is part of the extender.
package packing
