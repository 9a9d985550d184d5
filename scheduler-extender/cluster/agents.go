package cluster

import (
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	coreinformers "k8s.io/client-go/informers/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/scheduler-extender/ledger"
)

// byNode indexes the agent's pods.
const byNode = "node"

// probeAt is the key under which a trimmed pod keeps where it is asked.
const probeAt = "address"

// maxWhy bounds what a pod's status says about itself.
const maxWhy = 100

// newAgentInformer informs of the agent's pods and no others. A node takes pods
// only while its agent is ready: what the kubelet says of the agent's pod is
// the one sign of life that needs no write of ours, no clock and no lease.
func newAgentInformer(kube kubernetes.Interface, namespace string) cache.SharedIndexInformer {
	index := func(o any) ([]string, error) { return []string{o.(*corev1.Pod).Spec.NodeName}, nil }
	return coreinformers.NewFilteredPodInformer(kube, namespace, 0, cache.Indexers{byNode: index}, func(o *metav1.ListOptions) {
		o.LabelSelector = api.LabelName + "=" + api.AgentName
	})
}

// trimAgent keeps identity, node, deletion and readiness.
func trimAgent(o any) (any, error) {
	p, ok := o.(*corev1.Pod)
	if !ok {
		return o, nil
	}
	out := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
		Namespace: p.Namespace, Name: p.Name, UID: p.UID, ResourceVersion: p.ResourceVersion,
		CreationTimestamp: p.CreationTimestamp, DeletionTimestamp: p.DeletionTimestamp,
	}}
	if v, ok := p.Labels[api.LabelName]; ok {
		out.Labels = map[string]string{api.LabelName: v}
	}
	out.Spec.NodeName = p.Spec.NodeName
	if address := probeAddress(p); address != "" {
		out.Annotations = map[string]string{probeAt: address}
	}
	out.Status.Phase, out.Status.Reason = p.Status.Phase, p.Status.Reason
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodReady {
			out.Status.Conditions = []corev1.PodCondition{{Type: c.Type, Status: c.Status}}
		}
	}
	// Why a container waits says more than that it isn't ready.
	for _, s := range p.Status.ContainerStatuses {
		if w := s.State.Waiting; w != nil && w.Reason != "" {
			out.Status.Reason = w.Reason
		}
	}
	return out, nil
}

func (s *Source) setAgent(o any) {
	p := o.(*corev1.Pod)
	if p.Labels[api.LabelName] != api.AgentName || p.Spec.NodeName == "" {
		return
	}
	s.agentOf(p.Spec.NodeName)
}

// agentOf tells the ledger how the agent of a node is. It looks at all of the
// node's agent pods: while the DaemonSet rolls there can be two.
func (s *Source) agentOf(node string) {
	s.agentMu.Lock()
	defer s.agentMu.Unlock()
	pods, err := s.agents.GetIndexer().ByIndex(byNode, node)
	if err != nil {
		s.Log.Error("could not look up the agent", "node", node, "error", err)
		return
	}
	list := make([]*corev1.Pod, len(pods))
	address := map[string]string{}
	for i, o := range pods {
		list[i] = o.(*corev1.Pod)
		address[list[i].Name] = list[i].Annotations[probeAt]
	}
	best := bestAgent(list)
	switch {
	case !best.Ready:
		// What the API says is enough.
		delete(s.addresses, node)
		delete(s.suspects, node)
	case s.suspects[node]:
		best.Ready, best.Why = false, silentAgent
		fallthrough
	default:
		s.addresses[node] = address[best.Pod]
	}
	s.Ledger.SetAgent(node, best)
}

// bestAgent is how the agent of a node is, by all of its pods there.
func bestAgent(pods []*corev1.Pod) ledger.Agent {
	best := ledger.Agent{}
	for _, p := range pods {
		if p.Labels[api.LabelName] != api.AgentName {
			continue
		}
		if a := agent(p); best.Pod == "" || rank(a) > rank(best) || rank(a) == rank(best) && a.Pod < best.Pod {
			best = a
		}
	}
	return best
}

// rank orders a node's agent pods: the one that is best off speaks for the node.
func rank(a ledger.Agent) int {
	switch {
	case a.Ready:
		return 2
	case !a.Leaving:
		return 1
	}
	return 0
}

func agent(p *corev1.Pod) ledger.Agent {
	a := ledger.Agent{Namespace: p.Namespace, Pod: p.Name, Leaving: p.DeletionTimestamp != nil}
	for _, c := range p.Status.Conditions {
		a.Ready = a.Ready || c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	}
	a.Ready = a.Ready && !a.Leaving && !ended(p)
	if !a.Ready {
		if a.Why = p.Status.Reason; len(a.Why) > maxWhy {
			a.Why = strings.ToValidUTF8(a.Why[:maxWhy], "")
		}
	}
	return a
}
