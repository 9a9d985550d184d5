package agent

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/carve-gpu/carve/api"
)

// The node advertises what its cards amount to, again after a kubelet zeroed it,
// leaves all else alone, and writes nothing when nothing changed.
func TestAmountsAreAdvertised(t *testing.T) {
	n := startNode(t)
	n.api.setCapacity(corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("4")})
	whole := func() bool {
		c := n.api.capacity()
		for name, want := range map[corev1.ResourceName]string{
			corev1.ResourceCPU: "4",
			// Two cards of 80 GiB less 512 MiB that the driver keeps.
			api.ResourceMemory: "162816Mi", api.ResourceMemoryPercent: "200", api.ResourceCores: "200", api.ResourcePriority: "64",
		} {
			if is := c[name]; is.Cmp(resource.MustParse(want)) != 0 {
				return false
			}
		}
		return true
	}
	eventually(t, "the node advertises its cards", whole)
	patches := func() int { n.api.mu.Lock(); defer n.api.mu.Unlock(); return n.api.patches }
	// A heartbeat of the kubelet with the same capacity.
	n.api.setCapacity(n.api.capacity())
	before := patches()
	time.Sleep(200 * time.Millisecond)
	if now := patches(); now != before {
		t.Errorf("%d writes for a heartbeat", now-before)
	}
	zeroed := n.api.capacity()
	zeroed[api.ResourceMemory], zeroed[api.ResourceCores] = resource.MustParse("0"), resource.MustParse("0")
	n.api.setCapacity(zeroed)
	eventually(t, "it does so again after a kubelet zeroed it", whole)
}
