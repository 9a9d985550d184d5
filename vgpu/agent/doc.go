// Package agent is the life of a slice on its node: a grant seen on a pod is
// checked, prepared (files and a small tmpfs for each container), active while
// a container uses it, and released when the pod is over and its containers
// are gone. It keeps the node's report up to date and takes the charge of dead
// processes off.
//
// It never decides who gets what: the grant does. It never talks to the
// container runtime or the kubelet itself; the hook and the device plugin ask
// it, and their questions are answered from memory.
//
// Start reading at Agent.reconcile: everything that happens only marks a pod
// for it.
package agent
