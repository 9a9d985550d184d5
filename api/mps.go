package api

// MPSDownMeans says what it means that a card's MPS daemon doesn't serve, in every
// place that says so.
const MPSDownMeans = "what the card's pods in mode mps had there is lost and they get errors from CUDA, and no container starts there until it serves again"

// Clients that one MPS server takes: from Volta (compute capability 7) on, and before.
const (
	MaxMPSClients            = 48
	MaxMPSClientsBeforeVolta = 16
	volta                    = 7
)

// MPSClients is how many clients an MPS server takes on a card of a compute capability,
// by its major number; 0, which isn't known, is taken for one of today.
func MPSClients(major int) int {
	if major > 0 && major < volta {
		return MaxMPSClientsBeforeVolta
	}
	return MaxMPSClients
}

// MendMPS says what to look at where a card's MPS daemon doesn't serve.
func MendMPS(node string) string {
	return "kubectl -n " + Namespace + " get pods -l app.kubernetes.io/name=carve-mps --field-selector spec.nodeName=" + node + "\n" +
		"no pod: kubectl apply -k deploy/manifests/mps; else its log says why: kubectl -n " + Namespace + " logs POD\n" +
		"kubectl get events -A --field-selector reason=MPSContextLost names pods that kept a card from its server"
}
