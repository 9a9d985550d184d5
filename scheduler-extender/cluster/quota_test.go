package cluster

import (
	"reflect"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/scheduler-extender/ledger"
)

func TestWhatAQuotaSaysOfCards(t *testing.T) {
	hard := func(pairs ...string) corev1.ResourceList {
		l := corev1.ResourceList{}
		for i := 0; i < len(pairs); i += 2 {
			l[corev1.ResourceName(pairs[i])] = resource.MustParse(pairs[i+1])
		}
		return l
	}
	for name, c := range map[string]struct {
		spec corev1.ResourceQuotaSpec
		want ledger.Quota
	}{
		"memory in MiB":   {corev1.ResourceQuotaSpec{Hard: hard("requests.nvidia.com/gpumem", "10k", "pods", "4")}, ledger.Quota{Name: "q", MemMiB: 10000, Cores: -1}},
		"memory in bytes": {corev1.ResourceQuotaSpec{Hard: hard("requests.nvidia.com/gpumem", "8Gi")}, ledger.Quota{Name: "q", MemMiB: 8192, Cores: -1}},
		"compute, none":   {corev1.ResourceQuotaSpec{Hard: hard("requests.nvidia.com/gpucores", "0")}, ledger.Quota{Name: "q", MemMiB: -1, Cores: 0}},
		"cards alone":     {corev1.ResourceQuotaSpec{Hard: hard("requests.nvidia.com/gpu", "4", "requests.memory", "1Gi")}, ledger.Quota{Name: "q", MemMiB: -1, Cores: -1}},
		"some pods only": {corev1.ResourceQuotaSpec{Hard: hard("requests.nvidia.com/gpumem", "10"), Scopes: []corev1.ResourceQuotaScope{corev1.ResourceQuotaScopeNotTerminating}},
			ledger.Quota{Name: "q", MemMiB: -1, Cores: -1}},
		"pods of a class only": {corev1.ResourceQuotaSpec{Hard: hard("requests.nvidia.com/gpumem", "10"), ScopeSelector: &corev1.ScopeSelector{}},
			ledger.Quota{Name: "q", MemMiB: -1, Cores: -1}},
	} {
		o, err := trimQuota(&corev1.ResourceQuota{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "q", Annotations: map[string]string{"x": "y"}}, Spec: c.spec,
			Status: corev1.ResourceQuotaStatus{Hard: hard("pods", "4")}})
		if err != nil {
			t.Fatal(err)
		}
		q := o.(*corev1.ResourceQuota)
		if got := bound(q); got != c.want {
			t.Errorf("%s: %+v, want %+v", name, got, c.want)
		}
		if _, kept := q.Spec.Hard["pods"]; kept || q.Annotations != nil || q.Status.Hard != nil || q.Spec.Scopes != nil || q.Spec.ScopeSelector != nil {
			t.Errorf("%s: kept %+v", name, q)
		}
	}
	tomb := cache.DeletedFinalStateUnknown{Key: "x"}
	if o, err := trimQuota(tomb); err != nil || o != tomb {
		t.Error("a tombstone was changed")
	}
}

// What a pod's spec asks for goes with its containers, so that growth is seen.
func TestContainersCarryWhatTheyAsk(t *testing.T) {
	limits := func(pairs ...string) corev1.Container {
		c := corev1.Container{Name: pairs[0], Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{}}}
		for i := 1; i < len(pairs); i += 2 {
			c.Resources.Limits[corev1.ResourceName("nvidia.com/"+pairs[i])] = resource.MustParse(pairs[i+1])
		}
		return c
	}
	p := gpuPod("a")
	p.Spec.InitContainers = []corev1.Container{limits("init", "gpumem", "8Gi")}
	p.Spec.Containers = []corev1.Container{limits("plain"), limits("app", "gpu", "2", "gpumem", "3000", "gpucores", "20"), limits("half", "gpumem-percentage", "50"), limits("whole", "gpu", "1")}
	share := []api.CardGrant{{Card: "GPU-a", Mode: api.ModeVGPU}}
	g := &api.Grant{Containers: map[string][]api.CardGrant{"init": share, "app": share, "half": share, "whole": {{Card: "GPU-b", Mode: api.ModeExclusive}}}}
	want := []ledger.Container{{Name: "init", Kind: api.Init, MemMiB: 8192}, {Name: "app", MemMiB: 3000, Cores: 20}, {Name: "half", MemPercent: 50}, {Name: "whole"}}
	if got := containers(p, g); !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, want %+v", got, want)
	}
}

func TestWhoIsOnCards(t *testing.T) {
	runs := corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}
	for name, c := range map[string]struct {
		resource, amount string
		change           func(p *corev1.Pod)
		want             bool
	}{
		"it runs with a card":       {"nvidia.com/gpu", "1", nil, true},
		"a card that others share":  {"nvidia.com/gpu.shared", "1", nil, true},
		"an instance":               {"nvidia.com/mig-1g.10gb", "1", nil, true},
		"memory alone":              {"nvidia.com/gpumem", "1000", nil, false},
		"another thing of NVIDIA's": {"nvidia.com/hostdev", "1", nil, false},
		"no card":                   {"nvidia.com/gpu", "0", nil, false},
		"it waits": {"nvidia.com/gpu", "1", func(p *corev1.Pod) {
			p.Status.ContainerStatuses[0].State = corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{}}
		}, false},
		"its container has ended": {"nvidia.com/gpu", "1", func(p *corev1.Pod) {
			p.Status.ContainerStatuses[0].State = corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{}}
		}, false},
		"it has ended": {"nvidia.com/gpu", "1", func(p *corev1.Pod) { p.Status.Phase = corev1.PodFailed }, false},
		"the container beside it runs": {"nvidia.com/gpu", "1", func(p *corev1.Pod) {
			p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Name: "side"})
			p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "app"}, {Name: "side", State: runs}}
		}, false},
		"a sidecar runs with a card": {"nvidia.com/gpu", "1", func(p *corev1.Pod) {
			p.Spec.InitContainers, p.Spec.Containers = p.Spec.Containers, []corev1.Container{{Name: "x"}}
			p.Status.InitContainerStatuses, p.Status.ContainerStatuses = p.Status.ContainerStatuses, nil
		}, true},
	} {
		p := gpuPod("a")
		p.Spec.Containers[0].Resources.Limits = corev1.ResourceList{corev1.ResourceName(c.resource): resource.MustParse(c.amount)}
		if c.change != nil {
			c.change(p)
		}
		o, err := trimPod(p.DeepCopy())
		if err != nil {
			t.Fatal(err)
		}
		if whole, trimmed := OnCards(p), OnCards(o.(*corev1.Pod)); whole != c.want || trimmed != c.want {
			t.Errorf("%s: %t, and %t of what the informer keeps", name, whole, trimmed)
		}
	}
}
