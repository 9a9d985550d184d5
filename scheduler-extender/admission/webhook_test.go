package admission_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"
	admissionv1 "k8s.io/api/admission/v1"
	registrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/scheduler-extender/admission"
	"github.com/carve-gpu/carve/scheduler-extender/pki"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// newWebhook takes its time, so that a busy machine changes no answer.
func newWebhook() *admission.Webhook { return newWebhookWithin(time.Minute) }

func newWebhookWithin(limit time.Duration) *admission.Webhook {
	return admission.New(admission.Config{Limit: limit, Registry: prometheus.NewRegistry(), Log: slog.New(slog.DiscardHandler)})
}

// review is what the API server sends for a new pod.
func review(t testing.TB, p *corev1.Pod) admissionv1.AdmissionReview {
	t.Helper()
	raw, err := json.Marshal(p)
	if err != nil {
		t.Fatal(err)
	}
	dry := true
	return admissionv1.AdmissionReview{
		TypeMeta: metav1.TypeMeta{APIVersion: "admission.k8s.io/v1", Kind: "AdmissionReview"},
		Request: &admissionv1.AdmissionRequest{
			UID: "review-1", Operation: admissionv1.Create, DryRun: &dry,
			Kind: metav1.GroupVersionKind{Version: "v1", Kind: "Pod"}, Resource: metav1.GroupVersionResource{Version: "v1", Resource: "pods"},
			Object: runtime.RawExtension{Raw: raw},
		},
	}
}

func send(w *admission.Webhook, body []byte) *httptest.ResponseRecorder {
	out := httptest.NewRecorder()
	w.Handler().ServeHTTP(out, httptest.NewRequest(http.MethodPost, admission.Path, bytes.NewReader(body)))
	return out
}

func TestReview(t *testing.T) {
	w := newWebhook()
	body, err := json.Marshal(review(t, pod(api.ResourceMemory, "10Gi")))
	if err != nil {
		t.Fatal(err)
	}
	out := send(w, body)
	var answer admissionv1.AdmissionReview
	if err := json.Unmarshal(out.Body.Bytes(), &answer); err != nil || out.Code != http.StatusOK {
		t.Fatalf("%d %s", out.Code, out.Body)
	}
	r := answer.Response
	if answer.Kind != "AdmissionReview" || r == nil || r.UID != "review-1" || !r.Allowed || r.PatchType == nil || *r.PatchType != admissionv1.PatchTypeJSONPatch {
		t.Fatalf("%s", out.Body)
	}
	if !strings.Contains(string(r.Patch), `"10240"`) || !strings.Contains(string(r.Patch), "nvidia.com~1gpu") {
		t.Errorf("patch %s", r.Patch)
	}
	for name, change := range map[string]func(*admissionv1.AdmissionRequest){
		"an update":      func(r *admissionv1.AdmissionRequest) { r.Operation = admissionv1.Update },
		"a subresource":  func(r *admissionv1.AdmissionRequest) { r.SubResource = "binding" },
		"something else": func(r *admissionv1.AdmissionRequest) { r.Resource.Resource = "services" },
	} {
		in := review(t, pod(api.ResourceMemory, "10Gi"))
		change(in.Request)
		body, err := json.Marshal(in)
		if err != nil {
			t.Fatal(err)
		}
		out := send(w, body)
		answer = admissionv1.AdmissionReview{}
		if err := json.Unmarshal(out.Body.Bytes(), &answer); err != nil || answer.Response == nil || !answer.Response.Allowed || answer.Response.Patch != nil {
			t.Errorf("%s: %d %s", name, out.Code, out.Body)
		}
	}
}

func TestMalformedReviewsGetAnError(t *testing.T) {
	w := newWebhook()
	good, err := json.Marshal(review(t, pod(api.ResourceMemory, "10Gi")))
	if err != nil {
		t.Fatal(err)
	}
	for name, body := range map[string]string{
		"nothing":                "",
		"not JSON":               "{",
		"another kind":           strings.Replace(string(good), "AdmissionReview", "Pod", 1),
		"another version":        strings.Replace(string(good), "admission.k8s.io/v1", "admission.k8s.io/v2", 1),
		"no request":             `{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview"}`,
		"no UID":                 strings.Replace(string(good), "review-1", "", 1),
		"no pod":                 strings.Replace(string(good), `"object":{`, `"object":7,"x":{`, 1),
		"a quantity of no sense": strings.Replace(string(good), "10Gi", "ten", 1),
		"nine million bytes":     strings.Repeat(" ", 9<<20) + string(good),
	} {
		if out := send(w, []byte(body)); out.Code != http.StatusBadRequest || !strings.Contains(out.Body.String(), "read the admission review") {
			t.Errorf("%s: %d %.200s", name, out.Code, out.Body)
		}
	}
	out := httptest.NewRecorder()
	w.Handler().ServeHTTP(out, httptest.NewRequest(http.MethodGet, admission.Path, nil))
	if out.Code == http.StatusOK {
		t.Error("a GET was answered")
	}
}

// slow is a body that doesn't come.
type slow struct{ end chan struct{} }

func (s slow) Read([]byte) (int, error) { <-s.end; return 0, io.ErrUnexpectedEOF }

func TestASlowReviewIsGivenUp(t *testing.T) {
	end := make(chan struct{})
	defer close(end)
	out := httptest.NewRecorder()
	newWebhookWithin(0).Handler().ServeHTTP(out, httptest.NewRequest(http.MethodPost, admission.Path, slow{end}))
	if out.Code != http.StatusServiceUnavailable {
		t.Errorf("%d %s", out.Code, out.Body)
	}
}

func FuzzReview(f *testing.F) {
	good, err := json.Marshal(review(f, annotated(pod(api.ResourceMemory, "10Gi"), api.AnnotationGrant, "{}")))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	f.Add([]byte(`{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{"uid":"x","operation":"CREATE","resource":{"version":"v1","resource":"pods"},"object":{"spec":null}}}`))
	f.Add([]byte("null"))
	w := newWebhook()
	f.Fuzz(func(t *testing.T, body []byte) {
		out := send(w, body)
		if out.Code != http.StatusOK {
			return
		}
		var answer admissionv1.AdmissionReview
		if err := json.Unmarshal(out.Body.Bytes(), &answer); err != nil || answer.Response == nil || !answer.Response.Allowed || answer.Response.UID == "" {
			t.Fatalf("%s", out.Body)
		}
	})
}

// The API server checks the certificate against the CA that the Keeper writes.
func TestServeAndRotate(t *testing.T) {
	bundle, err := pki.NewBundle("kube-scheduler", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	certs, err := pki.NewServer(bundle, []string{"carve-webhook.carve-system.svc"}, time.Now)
	if err != nil {
		t.Fatal(err)
	}
	certs.SetLife(6 * time.Second) // certificates tell time in whole seconds
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	served := make(chan error, 1)
	w := newWebhook()
	go func() { served <- w.Serve(ctx, l, certs.Public()) }()
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(bundle.CACert)
	body, err := json.Marshal(review(t, pod(api.ResourceMemory, "10Gi")))
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for end := time.Now().Add(30 * time.Second); len(seen) < 2; time.Sleep(50 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d leaves", len(seen))
		}
		// Each connection is a new one, as after the API server closed it.
		tr := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool, ServerName: "carve-webhook.carve-system.svc"}}
		resp, err := (&http.Client{Transport: tr}).Post("https://"+l.Addr().String()+admission.Path, "application/json", bytes.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		seen[resp.TLS.PeerCertificates[0].SerialNumber.String()] = true
		resp.Body.Close()
		tr.CloseIdleConnections()
	}
	stop()
	if err := <-served; err != nil {
		t.Error(err)
	}
}

func TestKeeperPutsTheCABack(t *testing.T) {
	kube := fake.NewClientset(&registrationv1.MutatingWebhookConfiguration{
		ObjectMeta: metav1.ObjectMeta{Name: admission.Configuration}, Webhooks: []registrationv1.MutatingWebhook{{Name: "pods.carve.dev"}}})
	configurations := kube.AdmissionregistrationV1().MutatingWebhookConfigurations()
	ctx, stop := context.WithCancel(t.Context())
	kept := make(chan error, 1)
	go func() {
		kept <- admission.Keeper{Kube: kube, CA: []byte("ca"), Log: slog.New(slog.DiscardHandler)}.Run(ctx)
	}()
	holds := func(what string) {
		t.Helper()
		for end := time.Now().Add(20 * time.Second); ; time.Sleep(5 * time.Millisecond) {
			c, err := configurations.Get(ctx, admission.Configuration, metav1.GetOptions{})
			if err == nil && string(c.Webhooks[0].ClientConfig.CABundle) == "ca" {
				return
			}
			if time.Now().After(end) {
				t.Fatalf("%s: %+v, %v", what, c, err)
			}
		}
	}
	holds("at the start")
	for _, other := range []string{"", "another"} {
		c, err := configurations.Get(ctx, admission.Configuration, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		c.Webhooks[0].ClientConfig.CABundle = []byte(other)
		if _, err := configurations.Update(ctx, c, metav1.UpdateOptions{}); err != nil {
			t.Fatal(err)
		}
		holds("after somebody wrote " + other)
	}
	if err := configurations.Delete(ctx, admission.Configuration, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := configurations.Create(ctx, &registrationv1.MutatingWebhookConfiguration{
		ObjectMeta: metav1.ObjectMeta{Name: admission.Configuration}, Webhooks: []registrationv1.MutatingWebhook{{Name: "pods.carve.dev"}}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	holds("made anew")
	stop()
	if err := <-kept; err != nil {
		t.Error(err)
	}
}
