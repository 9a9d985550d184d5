// Package admission is the mutating webhook: it puts a new pod's request into the
// form that the rest of the cluster counts in, and takes off what a copied pod
// carries of another one.
//
// Mutate is pure. Webhook is its HTTP shell, Keeper keeps the API server's trust in
// it. Nothing depends on the webhook: where it is down the pod is let through as
// it is, and the filter, the policies and the node treat it as they do any other.
package admission
