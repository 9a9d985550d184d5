package extender

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/scheduler-extender/trace"
)

// fromScheduler is a request of the client that the server trusts.
func fromScheduler(verb string, body []byte) *http.Request {
	r := httptest.NewRequest(http.MethodPost, "/"+verb, bytes.NewReader(body))
	r.TLS = &tls.ConnectionState{VerifiedChains: [][]*x509.Certificate{{{Subject: pkix.Name{CommonName: "kube-scheduler"}}}}}
	return r
}

// Every line that a request leaves in the log, whatever comes of it, carries the caller's
// trace. What kube-scheduler shows of an error is the same at each try.
func TestEveryLineHasTheTrace(t *testing.T) {
	const id = "4bf92f3577b34da6a3ce929d0e0e4736"
	s, b := bare()
	s.Client = "kube-scheduler"
	var out bytes.Buffer
	s.Log = slog.New(slog.NewJSONHandler(&out, &slog.HandlerOptions{Level: slog.LevelDebug}))
	pod := schedulers(t, sharing("a", "8000"), "n1")
	big := schedulers(t, sharing("b", "90000"), "n1")
	ours := []byte(`{"PodName":"a","PodNamespace":"default","PodUID":"uid-a","Node":"n1"}`)
	for _, c := range []struct {
		verb   string
		body   []byte
		failed bool
	}{
		{"filter", pod, false}, {"filter", big, false}, {"filter", []byte("x"), true},
		{"prioritize", pod, false}, {"prioritize", []byte("x"), false},
		{"bind", []byte("x"), true}, {"bind", []byte(`{"PodName":"c","PodNamespace":"default","PodUID":"uid-c","Node":"n1"}`), true}, {"bind", ours, false},
	} {
		for _, known := range []bool{true, false} {
			out.Reset()
			r := fromScheduler(c.verb, c.body)
			if !known {
				r.TLS = nil
			}
			r.Header.Set(trace.Header, "00-"+id+"-00f067aa0ba902b7-01")
			w := httptest.NewRecorder()
			s.Verbs().ServeHTTP(w, r)
			if known && w.Code != http.StatusOK || !known && w.Code != http.StatusForbidden {
				t.Errorf("%s %.60s: status %d", c.verb, c.body, w.Code)
			}
			if known && c.failed {
				var reply struct{ Error string }
				if err := json.Unmarshal(w.Body.Bytes(), &reply); err != nil || reply.Error == "" || strings.Contains(reply.Error, id) {
					t.Errorf("%s %.60s: %v, error %q", c.verb, c.body, err, reply.Error)
				}
			}
			lines := strings.Split(strings.TrimSpace(out.String()), "\n")
			if (!known || c.failed) && lines[0] == "" {
				t.Errorf("%s %.60s: failed without a line", c.verb, c.body)
			}
			for _, l := range lines {
				if l != "" && !strings.Contains(l, `"trace":"`+id+`"`) {
					t.Errorf("%s %.60s: %s", c.verb, c.body, l)
				}
			}
		}
	}
	if b.bound["uid-a"] != "n1" {
		t.Errorf("bound %v: the calls above were not what they seem", b.bound)
	}
}

// A caller's buffer that was large once isn't held for ever.
func TestALargeBodyIsNotKept(t *testing.T) {
	s, _ := bare()
	var got int
	h := s.verb("filter", func(_ context.Context, body []byte, fault error) any {
		if got = len(body); fault != nil {
			t.Error(fault)
		}
		return struct{}{}
	})
	h(httptest.NewRecorder(), httptest.NewRequest(http.MethodPost, "/", bytes.NewReader(make([]byte, 4<<20))))
	if got != 4<<20 {
		t.Fatalf("read %d bytes", got)
	}
	for range 100 {
		if b := bodies.Get().(*bytes.Buffer); b.Cap() > maxKept {
			t.Fatalf("%d bytes are kept", b.Cap())
		}
	}
}

// sharing is a pod that asks for a share.
func sharing(name, mib string) *corev1.Pod {
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default", UID: types.UID("uid-" + name)},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "app", Resources: corev1.ResourceRequirements{
			Limits: corev1.ResourceList{api.ResourceMemory: resource.MustParse(mib)}}}}}}
}
