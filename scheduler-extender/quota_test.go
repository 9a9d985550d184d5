package extender_test

import (
	"io"
	"net/http"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/v1alpha1"
	"github.com/carve-gpu/carve/scheduler-extender/fit"
)

func quota(mib string, scopes ...corev1.ResourceQuotaScope) *corev1.ResourceQuota {
	return &corev1.ResourceQuota{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "gpus"},
		Spec: corev1.ResourceQuotaSpec{Scopes: scopes, Hard: corev1.ResourceList{"requests." + api.ResourceMemory: resource.MustParse(mib), "pods": resource.MustParse("9")}}}
}

// regrant changes what a pod holds, as a resize does, and has its node report it.
func (r *rig) regrant(name string, mib int64) {
	r.t.Helper()
	p := r.pod(name)
	g, err := api.DecodeGrant(p.Annotations[api.AnnotationGrant])
	if err != nil {
		r.t.Fatal(err)
	}
	g.Generation++
	g.Containers["app"][0].MemMiB = mib
	if p.Annotations[api.AnnotationGrant], err = g.Encode(); err != nil {
		r.t.Fatal(err)
	}
	if err := r.kube.Tracker().Update(corev1.SchemeGroupVersion.WithResource("pods"), p, p.Namespace); err != nil {
		r.t.Fatal(err)
	}
	r.reports.Modify(gpuNode(g.Node, v1alpha1.Slice{PodUID: string(p.UID), Namespace: p.Namespace, Pod: name, Container: "app", MemMiB: mib, Mode: "vgpu", Generation: int32(g.Generation)}))
	r.until("the share of "+name+" to be counted", func() bool { return r.used(g.Node) >= mib && r.used(g.Node) < mib+9000 })
}

func (r *rig) metrics() string {
	r.t.Helper()
	resp, err := http.Get(r.plain + "/metrics")
	if err != nil {
		r.t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		r.t.Fatal(err)
	}
	return string(b)
}

// A pod that Kubernetes let in beside a share that has grown waits with a sentence,
// and is woken when the share shrinks or ends, or the quota changes.
func TestPodsWaitForTheQuota(t *testing.T) {
	for name, mend := range map[string]func(r *rig){
		"the share shrinks": func(r *rig) { r.regrant("grows", 1000) },
		"the share's pod ends": func(r *rig) {
			if err := r.kube.Tracker().Delete(corev1.SchemeGroupVersion.WithResource("pods"), "default", "grows"); err != nil {
				r.t.Fatal(err)
			}
		},
		"the quota is raised": func(r *rig) {
			if err := r.kube.Tracker().Update(corev1.SchemeGroupVersion.WithResource("resourcequotas"), quota("19k"), "default"); err != nil {
				r.t.Fatal(err)
			}
		},
		"the quota is deleted": func(r *rig) {
			if err := r.kube.Tracker().Delete(corev1.SchemeGroupVersion.WithResource("resourcequotas"), "default", "gpus"); err != nil {
				r.t.Fatal(err)
			}
		},
		"the quota bounds some pods only": func(r *rig) {
			if err := r.kube.Tracker().Update(corev1.SchemeGroupVersion.WithResource("resourcequotas"), quota("10k", corev1.ResourceQuotaScopeBestEffort), "default"); err != nil {
				r.t.Fatal(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, quota("10k"))
			r.managed("n1")
			r.run(newPod("grows", "1000"), "n1")
			r.regrant("grows", 10000)
			waiting := r.create(newPod("waiting", "9000"))
			f := r.filter(waiting, "n1")
			says := ""
			for _, m := range f.FailedNodes {
				says += m
			}
			if len(*f.NodeNames) != 0 || !strings.Contains(says, "ResourceQuota default/gpus allows requests.nvidia.com/gpumem of 10000; the namespace's shares hold 10000 and the pod takes 9000 more; grown since they were made: grows (asked 1000, holds 10000)") {
				t.Fatalf("%+v", f)
			}
			if m := r.metrics(); !strings.Contains(m, `carve_extender_refusals_total{reason="quota"} 1`) {
				t.Error("the metric doesn't have the reason")
			}
			if r.pod("waiting").Annotations[api.AnnotationWake] != "" {
				t.Fatal("woken too early")
			}
			// A restarted extender knows it again.
			r.start()
			if f := r.filter(waiting, "n1"); len(*f.NodeNames) != 0 {
				t.Fatalf("%+v", f)
			}
			mend(r)
			r.until("the wake", func() bool { return r.pod("waiting").Annotations[api.AnnotationWake] != "" })
			r.bound(waiting, "n1")
		})
	}
}

// A node that was given to carve while pods ran on its cards takes nobody until
// they are gone.
func TestNodesThatWereUsedBefore(t *testing.T) {
	r := newRig(t)
	old := newPod("old", "0")
	old.Spec.NodeName = "n1"
	delete(old.Spec.Containers[0].Resources.Limits, api.ResourceMemory)
	old.Status = corev1.PodStatus{Phase: corev1.PodRunning, ContainerStatuses: []corev1.ContainerStatus{{Name: "app", State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}}}}
	r.create(old)
	r.reports.Add(gpuNode("n1"))
	r.agent(agentPod("n1", true))
	r.node("n1", true)
	r.blocked("n1", fit.ReasonForeignPods)
	waiting := r.create(newPod("waiting", "8000"))
	f := r.filter(waiting, "n1")
	if len(*f.NodeNames) != 0 || !strings.Contains(f.FailedNodes["n1"], "default/old runs there on cards that carve didn't give it") {
		t.Fatalf("%+v", f)
	}
	if m := r.metrics(); !strings.Contains(m, `carve_ledger_blocked_nodes{reason="foreign-pods"} 1`) {
		t.Error("the metric doesn't have the reason")
	}
	old.Status.Phase, old.Status.ContainerStatuses[0].State = corev1.PodSucceeded, corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{}}
	if err := r.kube.Tracker().Update(corev1.SchemeGroupVersion.WithResource("pods"), old, old.Namespace); err != nil {
		t.Fatal(err)
	}
	r.until("the wake", func() bool { return r.pod("waiting").Annotations[api.AnnotationWake] != "" })
	r.bound(waiting, "n1")
}
