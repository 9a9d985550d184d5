package suite

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/gpunodes"
	"github.com/carve-gpu/carve/api/v1alpha1"
)

// forged is a grant of everything, for a pod.
func forged(t *testing.T, uid string) string {
	t.Helper()
	card := cards(t.Context(), t)[0].UUID
	s, err := api.Grant{
		Version: api.GrantVersion, UID: uid, Node: cluster.Lab.Config().Node.Name, Generation: 1,
		Containers: map[string][]api.CardGrant{"app": {{Card: card, Mode: api.ModeExclusive}}},
	}.Encode()
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// wantDenied checks that the policy said no, and said what it is about.
func wantDenied(t *testing.T, err error) {
	t.Helper()
	if err == nil {
		t.Error("the forged grant was accepted")
	} else if !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), api.AnnotationGrant) {
		t.Errorf("refused, but not by the policy: %v", err)
	}
}

// TestForgedGrantIsDenied tries, as cluster administrator, every path on which
// an annotation reaches a pod.
func TestForgedGrantIsDenied(t *testing.T) {
	pods := cluster.Client.CoreV1().Pods(ns)
	ctx := t.Context()

	t.Run("create", func(t *testing.T) {
		p := pod("forger", container("app", nil))
		p.Annotations = map[string]string{api.AnnotationGrant: forged(t, "00000000-0000-0000-0000-000000000000")}
		// The webhook takes it off; where that is away, the policy denies it.
		q, err := pods.Create(ctx, p, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		if err != nil {
			wantDenied(t, err)
		} else if q.Annotations[api.AnnotationGrant] != "" {
			t.Errorf("the pod was made with %q", q.Annotations[api.AnnotationGrant])
		}
	})

	// A pod that no scheduler looks at, so that it stays unbound.
	p := pod("victim", container("app", nil))
	p.Spec.SchedulerName = "nobody"
	p = create(t, p)
	value := forged(t, string(p.UID))
	patch := fmt.Appendf(nil, `{"metadata":{"annotations":{%q:%q}}}`, api.AnnotationGrant, value)

	t.Run("update", func(t *testing.T) {
		q := p.DeepCopy()
		q.Annotations = map[string]string{api.AnnotationGrant: value}
		_, err := pods.Update(ctx, q, metav1.UpdateOptions{})
		wantDenied(t, err)
	})
	t.Run("patch", func(t *testing.T) {
		_, err := pods.Patch(ctx, p.Name, types.MergePatchType, patch, metav1.PatchOptions{})
		wantDenied(t, err)
	})
	t.Run("patch of status", func(t *testing.T) {
		_, err := pods.Patch(ctx, p.Name, types.MergePatchType, patch, metav1.PatchOptions{}, "status")
		wantDenied(t, err)
	})
	// The API server drops annotations from these two before admission sees
	// them (seen with v1.37), so there is nothing to deny; what counts is that
	// none arrives.
	wantIgnored := func(t *testing.T, err error) {
		t.Helper()
		if err != nil {
			wantDenied(t, err)
		}
		if q := get(ctx, t, p.Name); q.Annotations[api.AnnotationGrant] != "" {
			t.Errorf("the pod now carries %q", q.Annotations[api.AnnotationGrant])
		}
	}
	t.Run("patch of resize", func(t *testing.T) {
		_, err := pods.Patch(ctx, p.Name, types.MergePatchType, patch, metav1.PatchOptions{}, "resize")
		wantIgnored(t, err)
	})
	t.Run("patch of ephemeralcontainers", func(t *testing.T) {
		body := fmt.Appendf(nil, `{"metadata":{"annotations":{%q:%q}},"spec":{"ephemeralContainers":[{"name":"debug","image":%q}]}}`, api.AnnotationGrant, value, probeImage)
		_, err := pods.Patch(ctx, p.Name, types.StrategicMergePatchType, body, metav1.PatchOptions{}, "ephemeralcontainers")
		wantIgnored(t, err)
	})
	binding := &corev1.Binding{
		ObjectMeta: metav1.ObjectMeta{Name: p.Name, Namespace: ns, UID: p.UID, Annotations: map[string]string{api.AnnotationGrant: value}},
		Target:     corev1.ObjectReference{Kind: "Node", Name: cluster.Lab.Config().Node.Name},
	}
	t.Run("binding", func(t *testing.T) { wantDenied(t, pods.Bind(ctx, binding, metav1.CreateOptions{})) })
	t.Run("legacy bindings", func(t *testing.T) {
		err := cluster.Client.CoreV1().RESTClient().Post().Namespace(ns).Resource("bindings").Body(binding).Do(ctx).Error()
		wantDenied(t, err)
	})
	if q := get(ctx, t, p.Name); q.Annotations[api.AnnotationGrant] != "" || q.Spec.NodeName != "" {
		t.Errorf("after all that the pod carries %q on node %q", q.Annotations[api.AnnotationGrant], q.Spec.NodeName)
	}

	t.Run("removing a real grant", func(t *testing.T) {
		create(t, pod("granted", container("app", share{"gpumem": "1000"})))
		running(t, "granted")
		_, err := pods.Patch(ctx, "granted", types.MergePatchType, fmt.Appendf(nil, `{"metadata":{"annotations":{%q:null}}}`, api.AnnotationGrant), metav1.PatchOptions{})
		wantDenied(t, err)
	})
}

// createPast makes a pod that another scheduler than ours puts on the node, by a
// binding without a grant. (spec.nodeName at creation is refused by a policy.)
func createPast(t *testing.T, p *corev1.Pod) *corev1.Pod {
	t.Helper()
	p.Spec.SchedulerName = "nobody"
	p = create(t, p)
	if err := cluster.Client.CoreV1().Pods(p.Namespace).Bind(t.Context(), &corev1.Binding{
		ObjectMeta: metav1.ObjectMeta{Name: p.Name, Namespace: p.Namespace, UID: p.UID},
		Target:     corev1.ObjectReference{Kind: "Node", Name: cluster.Lab.Config().Node.Name},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatalf("bind pod %s: %v", p.Name, err)
	}
	return p
}

// TestBypassingTheExtenderGivesNoCard binds a pod that asks for a card without
// a grant, as any user with the right to create bindings can.
func TestBypassingTheExtenderGivesNoCard(t *testing.T) {
	createPast(t, pod("past", container("app", share{"gpumem": "1000"})))
	eventually(t, "the container to be refused with a sentence", func(ctx context.Context) string {
		p := get(ctx, t, "past")
		if p.Status.Phase == corev1.PodFailed {
			return ""
		}
		for _, s := range p.Status.ContainerStatuses {
			if s.State.Running != nil {
				t.Fatal("a container without a grant runs")
			}
			if w := s.State.Waiting; w != nil && strings.Contains(w.Message, "grant") {
				return ""
			}
		}
		return fmt.Sprintf("%+v", p.Status.ContainerStatuses)
	})
}

// TestExtenderRefusesStrangers speaks to the extender as a pod of the host
// network could.
func TestExtenderRefusesStrangers(t *testing.T) {
	create(t, pod("owner", container("app", share{"gpumem": "2000"})))
	owner := running(t, "owner")
	service, err := cluster.Client.CoreV1().Services(api.Namespace).Get(t.Context(), "carve-extender", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	url := "https://" + service.Spec.ClusterIP + ":443/bind"
	body, err := json.Marshal(map[string]string{"PodName": "owner", "PodNamespace": ns, "PodUID": string(owner.UID), "Node": owner.Spec.NodeName})
	if err != nil {
		t.Fatal(err)
	}
	post := func(config *tls.Config) (string, error) {
		client := &http.Client{Transport: &http.Transport{DialContext: cluster.Lab.DialContext, TLSClientConfig: config}}
		defer client.CloseIdleConnections()
		r, err := client.Post(url, "application/json", bytes.NewReader(body))
		if err != nil {
			return "", err
		}
		defer r.Body.Close()
		b, err := io.ReadAll(r.Body)
		return string(b), err
	}
	t.Run("without a certificate", func(t *testing.T) {
		if answer, err := post(&tls.Config{InsecureSkipVerify: true}); err == nil {
			t.Errorf("answered %q", answer)
		}
	})
	t.Run("with the scheduler's certificate, but without an offer", func(t *testing.T) {
		read := func(file string) []byte {
			out, err := cluster.Lab.Output(t.Context(), "cat", "/etc/kubernetes/carve/"+file)
			if err != nil {
				t.Fatal(err)
			}
			return out
		}
		pair, err := tls.X509KeyPair(read("client.crt"), read("client.key"))
		if err != nil {
			t.Fatal(err)
		}
		trusted := &tls.Config{InsecureSkipVerify: true, Certificates: []tls.Certificate{pair}}
		body = []byte(strings.Replace(string(body), `"owner"`, `"nobody"`, 1))
		answer, err := post(trusted)
		if err != nil {
			t.Fatal(err)
		}
		var result struct{ Error string }
		if err := json.Unmarshal([]byte(answer), &result); err != nil || result.Error == "" {
			t.Errorf("answered %q, want an error", answer)
		}
	})
	if g := grant(t, get(t.Context(), t, "owner")); g.Containers["app"][0].MemMiB != 2000 {
		t.Errorf("the owner's grant is now %+v", g)
	}
	for _, c := range cards(t.Context(), t) {
		for _, s := range c.Slices {
			if s.Pod == "owner" && s.MemMiB != 2000 {
				t.Errorf("the owner's slice is now %+v", s)
			}
		}
	}
}

// TestAgentsWriteTheirOwnReportOnly holds policy-gpunode.yaml: the agent's
// account with a token of another node, or of none, may not write this one's
// report.
func TestAgentsWriteTheirOwnReportOnly(t *testing.T) {
	config, err := cluster.Lab.RESTConfig()
	if err != nil {
		t.Fatal(err)
	}
	name := cluster.Lab.Config().Node.Name
	as := func(node string) *gpunodes.Client {
		c := rest.CopyConfig(config)
		c.Impersonate = rest.ImpersonationConfig{UserName: "system:serviceaccount:carve-system:carve-node"}
		if node != "" {
			c.Impersonate.Extra = map[string][]string{"authentication.kubernetes.io/node-name": {node}}
		}
		client, err := gpunodes.New(c)
		if err != nil {
			t.Fatal(err)
		}
		return client
	}
	for _, node := range []string{"", "another-node"} {
		report, err := cluster.Nodes.Get(t.Context(), name)
		if err != nil {
			t.Fatal(err)
		}
		report.Status.DriverVersion = "forged"
		_, err = as(node).UpdateStatus(t.Context(), report)
		if err == nil {
			t.Errorf("the agent of %q wrote the report of %s", node, name)
		} else if !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "may not write the report") {
			t.Errorf("refused, but not by the policy: %v", err)
		}
	}
	// Its own it may: what is written is what is there, so nothing changes.
	report, err := cluster.Nodes.Get(t.Context(), name)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := as(name).UpdateStatus(t.Context(), report); err != nil && !apierrors.IsConflict(err) {
		t.Errorf("the agent of %s may not write its own report: %v", name, err)
	}

	// Other nodes' objects, the operator's wishes, and taking an object away.
	slots := int32(1)
	for what, err := range map[string]error{
		"another node's object": func() error {
			_, err := as(name).Create(t.Context(), &v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: "another-node"}})
			return err
		}(),
		"its own with a spec": func() error {
			_, err := as("another-node").Create(t.Context(), &v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: "another-node"}, Spec: v1alpha1.GPUNodeSpec{SlotsPerCard: &slots}})
			return err
		}(),
		"a change of its spec": func() error {
			_, err := as(name).Patch(t.Context(), name, types.MergePatchType, []byte(`{"spec":{"slotsPerCard":1}}`))
			return err
		}(),
		"the end of its object": as(name).Delete(t.Context(), name),
	} {
		if !apierrors.IsForbidden(err) {
			t.Errorf("%s: %v", what, err)
		}
	}
	// The status subresource drops the spec.
	if report, err = cluster.Nodes.Get(t.Context(), name); err != nil {
		t.Fatal(err)
	}
	report.Spec.SlotsPerCard = &slots
	if out, err := as(name).UpdateStatus(t.Context(), report); err == nil && out.Spec.SlotsPerCard != nil {
		t.Error("the agent changed its spec by way of the status")
	}
	// The capacity of another Node, which anybody's scheduler believes.
	for node, good := range map[string]bool{"another-node": false, name: true} {
		c := rest.CopyConfig(config)
		c.Impersonate = rest.ImpersonationConfig{UserName: "system:serviceaccount:carve-system:carve-node", Extra: map[string][]string{"authentication.kubernetes.io/node-name": {node}}}
		client, err := kubernetes.NewForConfig(c)
		if err != nil {
			t.Fatal(err)
		}
		_, err = client.CoreV1().Nodes().Patch(t.Context(), name, types.MergePatchType, []byte(`{"status":{"capacity":{"carve.dev/test":null}}}`), metav1.PatchOptions{DryRun: []string{metav1.DryRunAll}}, "status")
		if good && err != nil || !good && !apierrors.IsForbidden(err) {
			t.Errorf("the agent of %s writes the capacity of %s: %v", node, name, err)
		}
	}
}
