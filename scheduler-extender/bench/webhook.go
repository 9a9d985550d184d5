package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	admissionv1 "k8s.io/api/admission/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/carve-gpu/carve/scheduler-extender/admission"
	"github.com/carve-gpu/carve/scheduler-extender/pki"
)

const reviews = 2000

// webhookLatency is the 99th percentile of a review as its caller sees it, over
// TLS on one connection, the caller's own work included.
func webhookLatency() (p99 time.Duration, err error) {
	bundle, err := pki.NewBundle("kube-scheduler", time.Now())
	if err != nil {
		return 0, err
	}
	certs, err := pki.NewServer(bundle, []string{"127.0.0.1"}, time.Now)
	if err != nil {
		return 0, err
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	ctx, stop := context.WithCancel(context.Background())
	served := make(chan error, 1)
	w := admission.New(admission.Config{Registry: prometheus.NewRegistry(), Log: slog.New(slog.DiscardHandler)})
	go func() { served <- w.Serve(ctx, l, certs.Public()) }()
	defer func() { stop(); <-served }()
	raw, err := json.Marshal(pod(1))
	if err != nil {
		return 0, err
	}
	body, err := json.Marshal(admissionv1.AdmissionReview{
		TypeMeta: metav1.TypeMeta{APIVersion: "admission.k8s.io/v1", Kind: "AdmissionReview"},
		Request: &admissionv1.AdmissionRequest{UID: "bench", Operation: admissionv1.Create,
			Resource: metav1.GroupVersionResource{Version: "v1", Resource: "pods"}, Object: runtime.RawExtension{Raw: raw}},
	})
	if err != nil {
		return 0, err
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(bundle.CACert)
	tr := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool}, ForceAttemptHTTP2: true}
	defer tr.CloseIdleConnections()
	client := &http.Client{Transport: tr}
	took := make([]time.Duration, 0, reviews)
	for range reviews {
		start := time.Now()
		resp, err := client.Post("https://"+l.Addr().String()+admission.Path, "application/json", bytes.NewReader(body))
		if err != nil {
			return 0, err
		}
		_, err = io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
		if err != nil || resp.StatusCode != http.StatusOK {
			return 0, fmt.Errorf("review: %s, %v", resp.Status, err)
		}
		took = append(took, time.Since(start))
	}
	slices.Sort(took)
	return took[len(took)*99/100], nil
}
