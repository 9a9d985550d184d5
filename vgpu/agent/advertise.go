package agent

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/tools/cache"

	"github.com/carve-gpu/carve/api"
)

// advertise keeps the node's capacity of the resources that are amounts and not
// devices: memory, compute, priority. The extender does the accounting, and
// kube-scheduler is told to ignore them; they are there for those who ask
// whether an empty node of this kind could hold a pod. That is kube-scheduler
// itself, which otherwise never looks again at a pod when its node comes back
// (NodeResourcesFit's hint, isFit in noderesources/fit.go, counts ignored
// resources too; seen with v1.37), and cluster autoscalers.
//
// The kubelet leaves such entries alone and copies them to allocatable, save
// that it zeroes them when it registers anew; so the node is watched.
func (a *Agent) advertise(ctx context.Context) {
	factory := informers.NewSharedInformerFactoryWithOptions(a.Pods, 0,
		informers.WithTransform(onlyCapacity),
		informers.WithTweakListOptions(func(o *metav1.ListOptions) {
			o.FieldSelector = fields.OneTermEqualSelector("metadata.name", a.Node).String()
		}))
	nodes := factory.Core().V1().Nodes()
	changed := make(chan struct{}, 1)
	note := func(any) {
		select {
		case changed <- struct{}{}:
		default:
		}
	}
	if _, err := nodes.Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: note, UpdateFunc: func(_, o any) { note(o) },
	}); err != nil {
		a.Log.Error("the node can't be watched", "error", err)
		return
	}
	factory.Start(ctx.Done())
	defer factory.Shutdown()
	var retry <-chan time.Time
	for {
		select {
		case <-ctx.Done():
			return
		case <-changed:
		case <-a.resized:
		case <-retry:
		}
		retry = nil
		node, err := nodes.Lister().Get(a.Node)
		if err != nil {
			continue // not seen yet: the watch will tell
		}
		if a.NodeLabels != nil {
			a.NodeLabels(node.Labels)
		}
		if err := a.patchCapacity(ctx, node); err != nil && ctx.Err() == nil {
			a.Log.Warn("the node's capacity isn't advertised; trying again", "error", err)
			retry = time.After(5 * time.Second)
		}
	}
}

// capacity is what this node's cards amount to.
func (a *Agent) capacity() corev1.ResourceList {
	slots, perCard := 0, int(a.slotsPerCard())
	a.mu.Lock()
	cards := a.hardware.inventory.Cards
	var memoryBytes int64
	for _, c := range cards {
		memoryBytes += c.MemoryMiB() * api.MiB
		slots += a.slotsOf(c.UUID, perCard)
	}
	a.mu.Unlock()
	n := int64(len(cards))
	if n == 0 {
		return nil
	}
	return corev1.ResourceList{
		// In binary form, as the unit of such a quantity is bytes: it compares
		// right with pods that ask in bytes, and is no bound for those that ask
		// in MiB.
		api.ResourceMemory:        *resource.NewQuantity(memoryBytes, resource.BinarySI),
		api.ResourceMemoryPercent: *resource.NewQuantity(100*n, resource.DecimalSI),
		api.ResourceCores:         *resource.NewQuantity(100*n, resource.DecimalSI),
		api.ResourcePriority:      *resource.NewQuantity(int64(slots), resource.DecimalSI),
	}
}

// patchCapacity writes what differs, and nothing if nothing does.
func (a *Agent) patchCapacity(ctx context.Context, node *corev1.Node) error {
	differing := map[string]string{}
	for name, want := range a.capacity() {
		if is, ok := node.Status.Capacity[name]; !ok || is.Cmp(want) != 0 {
			differing[string(name)] = want.String()
		}
	}
	if len(differing) == 0 {
		return nil
	}
	patch, err := json.Marshal(map[string]any{"status": map[string]any{"capacity": differing}})
	if err == nil {
		_, err = a.Pods.CoreV1().Nodes().Patch(ctx, a.Node, types.MergePatchType, patch, metav1.PatchOptions{}, "status")
	}
	if err != nil {
		return fmt.Errorf("patch the capacity of node %s: %w", a.Node, err)
	}
	return nil
}

// configLabels keeps the label that chooses a configuration.
func configLabels(all map[string]string) map[string]string {
	if v, ok := all[api.LabelNVIDIAConfig]; ok {
		return map[string]string{api.LabelNVIDIAConfig: v}
	}
	return nil
}

// onlyCapacity drops all else of a node, which changes with every heartbeat.
func onlyCapacity(o any) (any, error) {
	n, ok := o.(*corev1.Node)
	if !ok {
		return o, nil
	}
	return &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: n.Name, UID: n.UID, ResourceVersion: n.ResourceVersion, Labels: configLabels(n.Labels)},
		Status:     corev1.NodeStatus{Capacity: n.Status.Capacity},
	}, nil
}
