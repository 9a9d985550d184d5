package sim

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"

	"github.com/carve-gpu/carve/api"
)

// Late holds back each further report of a node for so long; 0 ends it.
func (f *Fleet) Late(name string, by time.Duration) error {
	n, err := f.node(name)
	if err != nil {
		return err
	}
	n.mu.Lock()
	n.late = by
	n.mu.Unlock()
	n.report()
	return nil
}

// AgentGone takes the agent of a node away, or brings it back. Without it the
// node's kubelet goes on: containers that run stay, those that need a slice
// don't start, nothing is reported, and the agent's pod isn't Ready.
func (f *Fleet) AgentGone(_ context.Context, name string, gone bool) error {
	n, err := f.node(name)
	if err != nil {
		return err
	}
	n.mu.Lock()
	n.gone = gone
	n.mu.Unlock()
	n.report()
	all, err := f.pods.List(labels.Everything())
	if err != nil {
		return fmt.Errorf("look at the pods of %s: %w", name, err)
	}
	for _, p := range all {
		if p.Spec.NodeName == name {
			f.queue.Add(key(p))
		}
	}
	return nil
}

func (f *Fleet) node(name string) (*node, error) {
	if n := f.nodes[name]; n != nil {
		return n, nil
	}
	return nil, fmt.Errorf("simulated node %s: there is none", name)
}

// isAgent reports whether a pod is a node's agent.
func isAgent(p *corev1.Pod) bool {
	return p.Namespace == api.Namespace && p.Labels[agentLabel] == agentName
}
