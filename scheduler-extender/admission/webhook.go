package admission

import (
	"cmp"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/carve-gpu/carve/scheduler-extender/trace"
)

const (
	// maxBody bounds a review: the API server takes objects of up to 3 MiB.
	maxBody = 8 << 20
	// answerLimit is the usual Limit.
	answerLimit     = 200 * time.Millisecond
	shutdownTimeout = 3 * time.Second
	// Path is where the API server sends reviews.
	Path = "/mutate"
)

// Config is what a Webhook is made of.
type Config struct {
	Options
	// Limit is when the webhook gives up on a review, 0: after 200 ms. The API server
	// then lets the pod through as it is.
	Limit    time.Duration
	Registry prometheus.Registerer
	Log      *slog.Logger
}

// Webhook answers admission reviews of pods.
type Webhook struct {
	Config
	seconds prometheus.Histogram
	reviews *prometheus.CounterVec
}

// New makes a webhook and registers its metrics.
func New(c Config) *Webhook {
	w := &Webhook{Config: c,
		seconds: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "carve_webhook_seconds", Help: "Time to answer an admission review.",
			Buckets: []float64{.0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .2},
		}),
		reviews: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "carve_webhook_reviews_total", Help: "Admission reviews by result: changed, unchanged, fault (the pod is let through as it is).",
		}, []string{"result"}),
	}
	c.Registry.MustRegister(w.seconds, w.reviews)
	return w
}

// Handler serves reviews. Who calls isn't checked: an answer says nothing that the
// caller didn't bring, and changes nothing.
func (w *Webhook) Handler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("POST "+Path, trace.Handler(http.TimeoutHandler(http.HandlerFunc(w.serve), cmp.Or(w.Limit, answerLimit), "the review took too long")))
	return mux
}

func (w *Webhook) serve(out http.ResponseWriter, r *http.Request) {
	start := time.Now()
	defer func() { w.seconds.Observe(time.Since(start).Seconds()) }()
	reply, result, err := w.review(http.MaxBytesReader(out, r.Body, maxBody))
	w.reviews.WithLabelValues(result).Inc()
	if err != nil {
		id := trace.ID(r.Context())
		w.Log.Warn("admission review failed; the pod is let through as it is", "trace", id, "error", err)
		http.Error(out, err.Error(), http.StatusBadRequest)
		return
	}
	out.Header().Set("Content-Type", "application/json")
	if _, err := out.Write(reply); err != nil {
		w.Log.Debug("admission reply lost", "trace", trace.ID(r.Context()), "error", err)
	}
}

// review reads a review and writes its answer.
func (w *Webhook) review(body io.Reader) (reply []byte, result string, err error) {
	fail := func(err error) ([]byte, string, error) {
		return nil, "fault", fmt.Errorf("read the admission review: %w", err)
	}
	raw, err := io.ReadAll(body)
	if err != nil {
		return fail(err)
	}
	var in admissionv1.AdmissionReview
	if err := json.Unmarshal(raw, &in); err != nil {
		return fail(err)
	}
	q := in.Request
	switch {
	case in.APIVersion != admissionv1.SchemeGroupVersion.String() || in.Kind != "AdmissionReview":
		return fail(fmt.Errorf("it is a %.40q of %.40q", in.Kind, in.APIVersion))
	case q == nil || q.UID == "":
		return fail(errors.New("it has no request"))
	}
	answer := admissionv1.AdmissionResponse{UID: q.UID, Allowed: true}
	result = "unchanged"
	if q.Operation == admissionv1.Create && q.SubResource == "" && q.Resource == (metav1.GroupVersionResource{Version: "v1", Resource: "pods"}) {
		var p corev1.Pod
		if err := json.Unmarshal(q.Object.Raw, &p); err != nil {
			return fail(fmt.Errorf("the pod: %w", err))
		}
		change := Mutate(&p, w.Options)
		answer.Warnings = change.Warnings
		if len(change.Patch) > 0 {
			kind := admissionv1.PatchTypeJSONPatch
			answer.PatchType = &kind
			if answer.Patch, err = json.Marshal(change.Patch); err != nil {
				return fail(err)
			}
			result = "changed"
		}
	}
	reply, err = json.Marshal(admissionv1.AdmissionReview{TypeMeta: in.TypeMeta, Response: &answer})
	if err != nil {
		return fail(err)
	}
	return reply, result, nil
}

// Serve answers on the listener until the context ends, and closes it.
func (w *Webhook) Serve(ctx context.Context, l net.Listener, t *tls.Config) error {
	s := &http.Server{Handler: w.Handler(), TLSConfig: t, ErrorLog: slog.NewLogLogger(w.Log.Handler(), slog.LevelDebug),
		ReadHeaderTimeout: 2 * time.Second, ReadTimeout: 2 * time.Second, WriteTimeout: 2 * time.Second, IdleTimeout: 5 * time.Minute}
	ended := make(chan error, 1)
	go func() { ended <- s.ServeTLS(l, "", "") }()
	select {
	case <-ctx.Done():
		stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownTimeout)
		defer cancel()
		err := s.Shutdown(stop)
		<-ended
		return err
	case err := <-ended:
		return fmt.Errorf("serve admission: %w", err)
	}
}
