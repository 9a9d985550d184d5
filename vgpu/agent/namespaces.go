package agent

import (
	"context"
	"sync"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/tools/cache"

	"github.com/carve-gpu/carve/api"
)

// namespaces are those whose privileged containers may hold shares. It is empty
// until the API server was heard, so that the rule holds meanwhile. The zero value
// is ready for use.
type namespaces struct {
	mu    sync.Mutex
	names map[string]bool
}

func (n *namespaces) set(name string, allowed bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.names == nil {
		n.names = map[string]bool{}
	}
	if allowed {
		n.names[name] = true
	} else {
		delete(n.names, name)
	}
}

func (n *namespaces) has(name string) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.names[name]
}

// watchNamespaces follows the namespaces with the label, and no others.
func (a *Agent) watchNamespaces(ctx context.Context) {
	factory := informers.NewSharedInformerFactoryWithOptions(a.Pods, 0,
		informers.WithTransform(func(o any) (any, error) {
			if n, ok := o.(*corev1.Namespace); ok {
				return &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: n.Name, ResourceVersion: n.ResourceVersion, Labels: n.Labels}}, nil
			}
			return o, nil
		}),
		informers.WithTweakListOptions(func(o *metav1.ListOptions) { o.LabelSelector = api.LabelAllowPrivileged + "=true" }))
	set := func(o any) {
		if n, ok := o.(*corev1.Namespace); ok {
			a.privileged.set(n.Name, n.Labels[api.LabelAllowPrivileged] == "true")
		}
	}
	if _, err := factory.Core().V1().Namespaces().Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    set,
		UpdateFunc: func(_, now any) { set(now) },
		DeleteFunc: func(o any) {
			if tombstone, ok := o.(cache.DeletedFinalStateUnknown); ok {
				o = tombstone.Obj
			}
			if n, ok := o.(*corev1.Namespace); ok {
				a.privileged.set(n.Name, false)
			}
		},
	}); err != nil {
		a.Log.Error("namespaces can't be watched", "error", err)
		return
	}
	factory.Start(ctx.Done())
	defer factory.Shutdown()
	<-ctx.Done()
}

// MayBePrivileged reports whether a namespace's privileged containers may hold
// shares: somebody who may label namespaces said so.
func (a *Agent) MayBePrivileged(namespace string) bool { return a.privileged.has(namespace) }
