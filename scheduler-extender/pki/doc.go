// Package pki makes and keeps the extender's certificates: a CA of its own, the
// certificate that kube-scheduler shows, and the server's, which is renewed in
// memory.
//
// The CA and the scheduler's certificate live ten years, because kube-scheduler
// reads both once, when it starts (pkg/scheduler/extender.go, v1.37), and must
// not stop working when nobody looks. Server certificates live a month and are
// replaced while the server runs. Replacing the CA is an act of the operator:
// delete the Secret, restart the extender, hand out the credentials anew.
//
// Start reading at Bundle.
package pki
