// Package place decides: which node and which cards a pod gets, what a refused
// pod is told, and which waiting pods are worth waking. It joins the ledger
// (what is where) with fit (what fits) and score (what is good), and keeps what
// it computed for a request shape on a node until that node changes, so that a
// decision over many unchanged nodes is a scan of cached answers.
//
// It does no I/O and reads no clock. Start reading at Placer.Filter.
package place
