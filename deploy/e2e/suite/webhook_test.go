package suite

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/carve-gpu/carve/api"
)

// webhookName is the MutatingWebhookConfiguration's.
const webhookName = "carve"

// webhookServes waits until the API server trusts the webhook and gets its answers.
func webhookServes(t *testing.T) {
	t.Helper()
	eventually(t, "the webhook to serve", func(ctx context.Context) string {
		p, err := dryRun(ctx, cluster.Client, pod("asked", container("app", share{"gpumem": "1Gi"})))
		if err != nil {
			return err.Error()
		}
		if q := p.Spec.Containers[0].Resources.Limits[api.ResourceMemory]; q.String() != "1024" {
			return "memory is still " + q.String()
		}
		return ""
	})
}

// TestWebhookGivesRequestsOneForm: exactly the MiB that bytes are, a card for a
// share, in limits and requests, and no change of what asks for nothing.
func TestWebhookGivesRequestsOneForm(t *testing.T) {
	webhookServes(t)
	create(t, pod("bytes", container("app", share{"gpumem": "10Gi"})))
	p := running(t, "bytes")
	for list, amounts := range map[string]corev1.ResourceList{"limits": p.Spec.Containers[0].Resources.Limits, "requests": p.Spec.Containers[0].Resources.Requests} {
		mem, cards := amounts[api.ResourceMemory], amounts[api.ResourceGPU]
		if mem.String() != "10240" || cards.String() != "1" {
			t.Errorf("%s: %s of memory, %s cards", list, mem.String(), cards.String())
		}
	}
	if g := grant(t, p); g.Containers["app"][0].MemMiB != 10240 {
		t.Errorf("granted %+v", g)
	}
	wantShare(t, "bytes", "app", 10240)

	plain := pod("plain", container("app", nil))
	plain.Spec.SchedulerName = "nobody"
	q, err := dryRun(t.Context(), cluster.Client, plain)
	if err != nil {
		t.Fatal(err)
	}
	if len(q.Spec.Containers[0].Resources.Limits) > 0 || len(q.Annotations) > 0 {
		t.Errorf("a pod that asks for nothing became %+v %v", q.Spec.Containers[0].Resources, q.Annotations)
	}
}

// warnings collects what the API server says to whoever creates a pod.
type warnings struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (w *warnings) HandleWarningHeader(_ int, _ string, text string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	fmt.Fprintln(&w.text, text)
}

func TestSmallSharesAreAcceptedWithAWarning(t *testing.T) {
	webhookServes(t)
	config, err := cluster.Lab.RESTConfig()
	if err != nil {
		t.Fatal(err)
	}
	said := &warnings{}
	config = rest.CopyConfig(config)
	config.WarningHandler = said
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := dryRun(t.Context(), client, pod("small", container("app", share{"gpumem": "100"}))); err != nil {
		t.Fatal(err)
	}
	if text := said.text.String(); !strings.Contains(text, "100 MiB may not hold") {
		t.Errorf("warned of %q", text)
	}
}

// TestCopiesOfGrantedPodsRun: share-14. A backup, or `kubectl get -o yaml`, brings
// the grant along, which must neither count nor be in the way.
func TestCopiesOfGrantedPodsRun(t *testing.T) {
	webhookServes(t)
	create(t, pod("original", container("app", share{"gpumem": "2000"})))
	original := running(t, "original")
	restored := original.DeepCopy()
	restored.ObjectMeta = metav1.ObjectMeta{Name: "restored", Namespace: ns, Annotations: original.Annotations, Labels: original.Labels}
	restored.Status = corev1.PodStatus{}
	create(t, restored)
	p := running(t, "restored")
	if g := grant(t, p); g.UID != string(p.UID) || g.Generation != 1 || g.Containers["app"][0].MemMiB != 2000 {
		t.Errorf("the copy's grant is %+v", g)
	}
	wantShare(t, "restored", "app", 2000)
}

// TestQuotaCountsMiB: a quota on requests counts what the webhook made of bytes.
func TestQuotaCountsMiB(t *testing.T) {
	webhookServes(t)
	const name = "quota-mib"
	quotas := cluster.Client.CoreV1().ResourceQuotas(name)
	inNamespace(t, name, "carve.test/quota")
	if _, err := quotas.Create(t.Context(), &corev1.ResourceQuota{
		ObjectMeta: metav1.ObjectMeta{Name: "cards"},
		Spec:       corev1.ResourceQuotaSpec{Hard: corev1.ResourceList{"requests." + api.ResourceMemory: resource.MustParse("20000"), "requests." + api.ResourceGPU: resource.MustParse("5")}},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the quota to be counted", func(ctx context.Context) string {
		q, err := quotas.Get(ctx, "cards", metav1.GetOptions{})
		if err != nil {
			return err.Error()
		}
		if len(q.Status.Used) == 0 {
			return "no usage yet"
		}
		return ""
	})
	make := func(name, mem string) error {
		p := pod(name, container("app", share{"gpumem": mem}))
		p.Namespace, p.Spec.SchedulerName = "quota-mib", "nobody"
		_, err := cluster.Client.CoreV1().Pods(p.Namespace).Create(t.Context(), p, metav1.CreateOptions{})
		return err
	}
	if err := make("first", "10Gi"); err != nil {
		t.Fatal(err)
	}
	if err := make("second", "10Gi"); err == nil || !strings.Contains(err.Error(), "exceeded quota") {
		t.Errorf("20,480 of 20,000 MiB: %v", err)
	}
	if err := make("third", "9000Mi"); err != nil {
		t.Error(err)
	}
	eventually(t, "19,240 MiB and two cards to be used", func(ctx context.Context) string {
		q, err := quotas.Get(ctx, "cards", metav1.GetOptions{})
		if err != nil {
			return err.Error()
		}
		mem, cards := q.Status.Used["requests."+api.ResourceMemory], q.Status.Used["requests."+api.ResourceGPU]
		if mem.Value() != 19240 || cards.Value() != 2 {
			return fmt.Sprintf("%s MiB, %s cards", mem.String(), cards.String())
		}
		return ""
	})
}

// TestTheCAIsPutBack: somebody applies the manifest anew, or empties the field.
func TestTheCAIsPutBack(t *testing.T) {
	webhookServes(t)
	configurations := cluster.Client.AdmissionregistrationV1().MutatingWebhookConfigurations()
	c, err := configurations.Get(t.Context(), webhookName, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	ca := c.Webhooks[0].ClientConfig.CABundle
	c.Webhooks[0].ClientConfig.CABundle = nil
	if _, err := configurations.Update(t.Context(), c, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the CA to be back", func(ctx context.Context) string {
		c, err := configurations.Get(ctx, webhookName, metav1.GetOptions{})
		if err != nil {
			return err.Error()
		}
		if !bytes.Equal(c.Webhooks[0].ClientConfig.CABundle, ca) {
			return "it isn't"
		}
		return ""
	})
	webhookServes(t)
}

// pointWebhook says at which Service the API server looks for the webhook.
func pointWebhook(ctx context.Context, service string) error {
	configurations := cluster.Client.AdmissionregistrationV1().MutatingWebhookConfigurations()
	return await(ctx, "the webhook to be at "+service, func(ctx context.Context) error {
		c, err := configurations.Get(ctx, webhookName, metav1.GetOptions{})
		if err != nil {
			return err
		}
		c.Webhooks[0].ClientConfig.Service.Name = service
		_, err = configurations.Update(ctx, c, metav1.UpdateOptions{})
		return err
	})
}

// hideWebhook points the webhook at nothing, until the returned function is
// called: pods are made as they were written.
func hideWebhook(ctx context.Context) (show func() error, err error) {
	show = func() error { return pointWebhook(context.WithoutCancel(ctx), "carve-webhook") }
	if err = pointWebhook(ctx, "nobody-there"); err == nil {
		err = await(ctx, "pods to be let through as they are", func(ctx context.Context) error {
			p, err := dryRun(ctx, cluster.Client, pod("asked", container("app", share{"gpumem": "1Gi"})))
			if err != nil {
				return err
			}
			if q := p.Spec.Containers[0].Resources.Limits[api.ResourceMemory]; q.String() != "1Gi" {
				return errors.New("memory became " + q.String())
			}
			return nil
		})
	}
	return show, err
}

// withoutWebhook hides the webhook until the test's end.
func withoutWebhook(t *testing.T) {
	t.Helper()
	show, err := hideWebhook(t.Context())
	t.Cleanup(func() {
		if err := show(); err != nil {
			t.Errorf("bring the webhook back: %v", err)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestWithoutTheWebhook: share-10. Pods are let through as they are, and the filter
// and the node treat them as any other; the policies say what they always say.
func TestWithoutTheWebhook(t *testing.T) {
	webhookServes(t)
	withoutWebhook(t)
	create(t, pod("unchanged", container("app", share{"gpumem": "3Gi"})))
	if g := grant(t, running(t, "unchanged")); g.Containers["app"][0].MemMiB != 3072 {
		t.Errorf("granted %+v", g)
	}
	wantShare(t, "unchanged", "app", 3072)
	count := 100
	if os.Getenv("CARVE_E2E_LONG") != "" {
		count = 2000
	}
	sameVerdict(t, count)
	granted := pod("forger", container("app", nil))
	granted.Annotations = map[string]string{api.AnnotationGrant: forged(t, "00000000-0000-0000-0000-000000000000")}
	_, err := dryRun(t.Context(), cluster.Client, granted)
	wantDenied(t, err)
}
