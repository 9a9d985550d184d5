package cluster

import (
	"io"
	"log/slog"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/v1alpha1"
	"github.com/carve-gpu/carve/scheduler-extender/ledger"
)

// Lists are the objects of a cluster at one moment. They aren't changed.
type Lists struct {
	Nodes   []corev1.Node
	Reports []v1alpha1.GPUNode
	// Pods are those of all namespaces, the agent's included.
	Pods []corev1.Pod
	// Quotas are those of the namespaces that matter to the reader.
	Quotas []corev1.ResourceQuota
	// Blind is true where pods can't be listed. What is on the cards is then
	// known by the nodes' reports alone, and every agent is taken to be ready.
	Blind bool
}

// Snapshot makes a ledger from lists, by the code that feeds the extender's from
// watches. It is for those who explain what the extender does: nothing is
// watched, and nothing is written anywhere. What the extender has offered and
// not written yet isn't in it.
func Snapshot(in Lists, now time.Time) *ledger.Ledger {
	books := ledger.New(ledger.Config{})
	s := &Source{Config: Config{
		Ledger: books, Forget: func(string) {}, Log: slog.New(slog.NewTextHandler(io.Discard, nil)), Now: func() time.Time { return now },
	}}
	for i := range in.Nodes {
		if o, err := trimNode(in.Nodes[i].DeepCopy()); err == nil {
			s.setNode(o)
		}
		if in.Blind {
			books.SetAgent(in.Nodes[i].Name, ledger.Agent{Ready: true})
		}
	}
	for i := range in.Reports {
		if o, err := trimReport(in.Reports[i].DeepCopy()); err == nil {
			s.setReport(o)
		}
		if in.Blind {
			for _, p := range podsOf(&in.Reports[i]) {
				books.SetPod(p, now)
			}
		}
	}
	agents := map[string][]*corev1.Pod{}
	for i := range in.Pods {
		p := &in.Pods[i]
		if p.Namespace == api.Namespace && p.Labels[api.LabelName] == api.AgentName && p.Spec.NodeName != "" {
			if o, err := trimAgent(p.DeepCopy()); err == nil {
				agents[p.Spec.NodeName] = append(agents[p.Spec.NodeName], o.(*corev1.Pod))
			}
		}
		if o, err := trimPod(p.DeepCopy()); err == nil {
			s.setPod(o)
		}
	}
	for i := range in.Quotas {
		if o, err := trimQuota(&in.Quotas[i]); err == nil {
			s.setQuota(o)
		}
	}
	for node, pods := range agents {
		books.SetAgent(node, bestAgent(pods))
	}
	return books
}

// podsOf makes up pods for the slices of a report, for readers who see no pods.
func podsOf(n *v1alpha1.GPUNode) map[string]ledger.Pod {
	out := map[string]ledger.Pod{}
	for _, c := range n.Status.Cards {
		for _, s := range c.Slices {
			p, seen := out[s.PodUID]
			if !seen {
				p = ledger.Pod{Ref: ledger.Ref{UID: s.PodUID, Namespace: s.Namespace, Name: s.Pod}, Node: n.Name, Started: true,
					Grant: &api.Grant{Version: api.GrantVersion, UID: s.PodUID, Node: n.Name, Generation: int(s.Generation), Containers: map[string][]api.CardGrant{}}}
			}
			if p.Grant.Containers[s.Container] == nil {
				p.Containers = append(p.Containers, ledger.Container{Name: s.Container, Kind: api.App, MemMiB: s.MemMiB, Cores: int(s.Cores)})
			}
			p.Grant.Containers[s.Container] = append(p.Grant.Containers[s.Container], api.CardGrant{Card: c.UUID, MemMiB: s.MemMiB, Cores: int(s.Cores), Mode: api.Mode(s.Mode)})
			out[s.PodUID] = p
		}
	}
	return out
}

// ContainerSpecs is what a pod's containers ask for, in the pod's order.
func ContainerSpecs(p *corev1.Pod) []api.ContainerSpec { return specs(p) }
