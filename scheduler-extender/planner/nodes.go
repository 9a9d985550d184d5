package planner

import (
	"sync"

	corev1 "k8s.io/api/core/v1"
)

// fleet is the nodes as far as pods choose between them by their own words: names, labels,
// taints, and whether they are cordoned.
type fleet struct {
	mu    sync.RWMutex
	nodes map[string]*corev1.Node
	list  []*named // nil: to be made anew
}

type named struct {
	node *corev1.Node
	name []byte
}

// set takes in a node, and reports whether pods may be there now that might not before.
func (f *fleet) set(n *corev1.Node) (opens bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	old := f.nodes[n.Name]
	if f.nodes == nil {
		f.nodes = map[string]*corev1.Node{}
	}
	f.nodes[n.Name] = n
	if old == nil || !sameChoice(old, n) {
		f.list = nil
		return true
	}
	return false
}

func (f *fleet) drop(name string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.nodes, name)
	f.list = nil
}

// sameChoice reports whether both let the same pods in.
func sameChoice(a, b *corev1.Node) bool {
	if a.Spec.Unschedulable != b.Spec.Unschedulable || len(a.Labels) != len(b.Labels) || len(a.Spec.Taints) != len(b.Spec.Taints) {
		return false
	}
	for k, v := range a.Labels {
		if w, ok := b.Labels[k]; !ok || v != w {
			return false
		}
	}
	for i := range a.Spec.Taints {
		if a.Spec.Taints[i] != b.Spec.Taints[i] {
			return false
		}
	}
	return true
}

// all are the nodes as of now; the slice isn't changed any more.
func (f *fleet) all() []*named {
	f.mu.RLock()
	list := f.list
	f.mu.RUnlock()
	if list != nil {
		return list
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.list == nil {
		f.list = make([]*named, 0, len(f.nodes))
		for name, n := range f.nodes {
			f.list = append(f.list, &named{n, []byte(name)})
		}
	}
	return f.list
}

func (f *fleet) node(name string) *corev1.Node {
	f.mu.RLock()
	defer f.mu.RUnlock()
	return f.nodes[name]
}
