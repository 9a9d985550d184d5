// Package doctor says what is wrong with a node: what keeps carve from serving
// its cards, and what hands cards out past it.
//
// Gather reads the node and decides nothing; Check is pure and judges what was
// read. A fault of the node must not keep the rest from being looked at, so
// what can't be read is a fact like others.
//
// Start reading at Facts and Check.
package doctor
