// Package simulate says where pods would go that nobody has created yet: by the code that the
// extender runs, on what the API shows of the cluster, and without writing anywhere.
//
// What it doesn't know: what the extender has offered and not bound yet, what it has learnt of
// the pods that came (prices are made of those that run), and whatever kube-scheduler's other
// plugins say beyond node affinity, taints, cordons, processors, memory and places for pods.
package simulate
