package agent

import (
	"context"
	"log/slog"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/carve-gpu/carve/api"
)

func TestOnlyLabelledNamespacesMayBePrivileged(t *testing.T) {
	ns := func(name, value string) *corev1.Namespace {
		return &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{api.LabelAllowPrivileged: value}}}
	}
	kube := fake.NewClientset(ns("yes", "true"), ns("no", "false"))
	a := &Agent{Config: Config{Pods: kube, Log: slog.New(slog.DiscardHandler)}}
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); a.watchNamespaces(ctx) }()
	defer func() { stop(); <-done }()
	if a.MayBePrivileged("never-seen") {
		t.Error("a namespace that nobody labelled")
	}
	until := func(what string, ok func() bool) {
		t.Helper()
		for end := time.Now().Add(20 * time.Second); !ok(); time.Sleep(2 * time.Millisecond) {
			if time.Now().After(end) {
				t.Fatal(what)
			}
		}
	}
	until("the label isn't seen", func() bool { return a.MayBePrivileged("yes") && !a.MayBePrivileged("no") })
	if _, err := kube.CoreV1().Namespaces().Update(ctx, ns("yes", "false"), metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	until("the label's end isn't seen", func() bool { return !a.MayBePrivileged("yes") })
}
