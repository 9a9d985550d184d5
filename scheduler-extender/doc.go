// Package extender is the HTTP side of carve's scheduler extender: it speaks
// k8s.io/kube-scheduler/extender/v1 with kube-scheduler, and health and metrics
// with everybody else. It decodes, asks package place, writes the Binding
// through an interface, and encodes; decisions are made elsewhere.
//
// Foreign bytes never make it panic or grow: bodies are bounded, and what can't
// be read is answered with status 200 and an Error, as the protocol has it.
//
// Start reading at Server.Verbs.
package extender
