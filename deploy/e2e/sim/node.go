package sim

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"maps"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/v1alpha1"
)

const (
	leaseNamespace = "kube-node-lease"
	// A kubelet's own figures.
	leaseSeconds = 40
	renewEvery   = 10 * time.Second
)

// Node says what a simulated node is like.
type Node struct {
	Name  string
	Cards []Model
	// Labels are added to those that every managed node has.
	Labels map[string]string
	// Pods is the most that the node takes; 110 if zero.
	Pods int64
	// SlotsPerCard is the agent's setting; api.SlotsPerCard if zero.
	SlotsPerCard int32
}

// node is a simulated node in memory.
type node struct {
	Node
	index int
	cards []v1alpha1.Card // without slices
	dirty chan struct{}

	mu    sync.Mutex
	since metav1.Time // when the hook was linked
	slots int32
	held  map[string]*holding // by pod UID
	ran   map[string]time.Time
	// gone and late are faults that were asked for.
	gone bool
	late time.Duration
	// written is the report as last written, writes how many there were.
	written *v1alpha1.GPUNode
	writes  int
	// unshown are pods that hold nothing any more and that no report has shown.
	unshown []string
}

func newNode(spec Node, index int) *node {
	n := &node{
		Node: spec, index: index, dirty: make(chan struct{}, 1),
		since: metav1.NewTime(time.Now().UTC().Truncate(time.Second)),
		slots: cmp.Or(spec.SlotsPerCard, int32(api.SlotsPerCard)),
		held:  map[string]*holding{}, ran: map[string]time.Time{},
	}
	for i, m := range spec.Cards {
		c := v1alpha1.Card{
			UUID: CardUUID(spec.Name, i), Index: int32(i), Model: m.Name, PCIBusID: fmt.Sprintf("00000000:%02X:00.0", i+1),
			MemoryMiB: m.MemoryMiB(), PhysicalMiB: m.PhysicalMiB, Health: v1alpha1.Health{State: v1alpha1.Healthy},
		}
		if m.MIG {
			c.MIGMode = "disabled"
		}
		n.cards = append(n.cards, c)
	}
	return n
}

// CardUUID is the identity of a simulated card: of the form that drivers give,
// and the same in each run.
func CardUUID(node string, index int) string {
	b := sha256.Sum256(fmt.Appendf(nil, "%s/%d", node, index))
	return fmt.Sprintf("GPU-%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:16])
}

// report asks for a look at what is reported.
func (n *node) report() {
	select {
	case n.dirty <- struct{}{}:
	default:
	}
}

// capacity is what kubelet and agent advertise. n.mu is held.
func (n *node) capacity() corev1.ResourceList {
	var memoryBytes int64
	for _, c := range n.cards {
		memoryBytes += c.MemoryMiB * api.MiB
	}
	count := int64(len(n.cards))
	out := corev1.ResourceList{
		corev1.ResourceCPU:              resource.MustParse("128"),
		corev1.ResourceMemory:           resource.MustParse("1Ti"),
		corev1.ResourceEphemeralStorage: resource.MustParse("1Ti"),
		corev1.ResourcePods:             *resource.NewQuantity(cmp.Or(n.Pods, 110), resource.DecimalSI),
	}
	if count > 0 {
		out[api.ResourceGPU] = *resource.NewQuantity(count*int64(n.slots), resource.DecimalSI)
		out[api.ResourceMemory] = *resource.NewQuantity(memoryBytes, resource.BinarySI)
		out[api.ResourceMemoryPercent] = *resource.NewQuantity(100*count, resource.DecimalSI)
		out[api.ResourceCores] = *resource.NewQuantity(100*count, resource.DecimalSI)
		out[api.ResourcePriority] = *resource.NewQuantity(count*int64(n.slots), resource.DecimalSI)
	}
	return out
}

func (n *node) address() string {
	return fmt.Sprintf("10.%d.%d.%d", 128+n.index/65536, n.index/256%256, n.index%256)
}

// add makes the API objects of a node.
func (f *Fleet) add(ctx context.Context, n *node) error {
	labels := map[string]string{api.LabelManaged: "true", Label: "true", corev1.LabelHostname: n.Name,
		corev1.LabelOSStable: "linux", corev1.LabelArchStable: "amd64"}
	maps.Copy(labels, n.Labels)
	made, err := f.Kube.CoreV1().Nodes().Create(ctx, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: n.Name, Labels: labels}}, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("make node %s: %w", n.Name, err)
	}
	n.mu.Lock()
	capacity := n.capacity()
	n.mu.Unlock()
	now := metav1.Now()
	made.Status = corev1.NodeStatus{
		Capacity: capacity, Allocatable: capacity,
		Addresses: []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: n.address()}, {Type: corev1.NodeHostName, Address: n.Name}},
		NodeInfo:  corev1.NodeSystemInfo{KubeletVersion: "v1.37.0", OperatingSystem: "linux", Architecture: "amd64", ContainerRuntimeVersion: "containerd://2.4.2"},
	}
	for _, c := range []struct {
		kind   corev1.NodeConditionType
		status corev1.ConditionStatus
	}{
		{corev1.NodeReady, corev1.ConditionTrue}, {corev1.NodeMemoryPressure, corev1.ConditionFalse},
		{corev1.NodeDiskPressure, corev1.ConditionFalse}, {corev1.NodePIDPressure, corev1.ConditionFalse},
	} {
		made.Status.Conditions = append(made.Status.Conditions, corev1.NodeCondition{
			Type: c.kind, Status: c.status, Reason: "Simulated", LastHeartbeatTime: now, LastTransitionTime: now})
	}
	if err := f.addLease(ctx, made); err != nil {
		return err
	}
	// The node's controllers write it as well.
	for {
		_, err = f.Kube.CoreV1().Nodes().UpdateStatus(ctx, made, metav1.UpdateOptions{})
		if !apierrors.IsConflict(err) {
			break
		}
		now, lookErr := f.Kube.CoreV1().Nodes().Get(ctx, n.Name, metav1.GetOptions{})
		if lookErr != nil {
			err = lookErr
			break
		}
		made.ResourceVersion = now.ResourceVersion
	}
	if err != nil {
		return fmt.Errorf("make node %s ready: %w", n.Name, err)
	}
	if f.ownAgents {
		return f.addAgent(ctx, n)
	}
	return nil
}

func (f *Fleet) addLease(ctx context.Context, of *corev1.Node) error {
	holder, seconds, now := of.Name, int32(leaseSeconds), metav1.NowMicro()
	lease := &coordinationv1.Lease{
		ObjectMeta: metav1.ObjectMeta{Namespace: leaseNamespace, Name: of.Name,
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: of.Name, UID: of.UID}}},
		Spec: coordinationv1.LeaseSpec{HolderIdentity: &holder, LeaseDurationSeconds: &seconds, RenewTime: &now},
	}
	if _, err := f.Kube.CoordinationV1().Leases(leaseNamespace).Create(ctx, lease, metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("make the lease of %s: %w", of.Name, err)
	}
	return nil
}

// addAgent makes the agent's pod, as the DaemonSet's controller would.
func (f *Fleet) addAgent(ctx context.Context, n *node) error {
	no := false
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: api.Namespace, Name: agentName + "-" + n.Name,
			Labels: map[string]string{agentLabel: agentName, Label: "true"}},
		Spec: corev1.PodSpec{
			NodeName: n.Name, AutomountServiceAccountToken: &no, HostNetwork: true,
			Tolerations: []corev1.Toleration{{Operator: corev1.TolerationOpExists}},
			Containers:  []corev1.Container{{Name: "node", Image: "localhost/carve:sim"}},
		},
	}
	if _, err := f.Kube.CoreV1().Pods(api.Namespace).Create(ctx, p, metav1.CreateOptions{}); err != nil {
		return fmt.Errorf("make the agent's pod of %s: %w", n.Name, err)
	}
	return nil
}

// renewLeases does what kubelets do to show that they live.
func (f *Fleet) renewLeases(ctx context.Context) {
	tick := time.NewTicker(renewEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if err := f.each(ctx, f.renew); err != nil && ctx.Err() == nil {
			f.Log.Warn("leases weren't renewed", "error", err)
		}
	}
}

func (f *Fleet) renew(ctx context.Context, n *node) error {
	patch, err := json.Marshal(map[string]any{"spec": map[string]any{"renewTime": metav1.NowMicro()}})
	if err == nil {
		_, err = f.Kube.CoordinationV1().Leases(leaseNamespace).Patch(ctx, n.Name, types.MergePatchType, patch, metav1.PatchOptions{})
	}
	if err != nil {
		return fmt.Errorf("renew the lease of %s: %w", n.Name, err)
	}
	return nil
}

// removeNode deletes a node's own objects. The lease goes with its owner.
func (f *Fleet) removeNode(ctx context.Context, n *node) error {
	if err := f.Kube.CoreV1().Nodes().Delete(ctx, n.Name, metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("delete node %s: %w", n.Name, err)
	}
	if err := f.Reports.Delete(ctx, n.Name); err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("delete the report of %s: %w", n.Name, err)
	}
	return nil
}
