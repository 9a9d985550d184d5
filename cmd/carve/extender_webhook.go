package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/spf13/pflag"
	"k8s.io/client-go/kubernetes"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/scheduler-extender/admission"
	"github.com/carve-gpu/carve/scheduler-extender/ledger"
	"github.com/carve-gpu/carve/scheduler-extender/pki"
)

// webhookOptions are the flags of the extender's admission webhook.
type webhookOptions struct {
	listen, service string
	schedulerName   string
	life            time.Duration
}

func (w *webhookOptions) flags(f *pflag.FlagSet) {
	f.StringVar(&w.listen, "webhook-listen", ":9443", "address of the admission webhook, HTTPS; empty for none")
	f.StringVar(&w.service, "webhook-service", "carve-webhook", "Service by which the API server reaches the webhook")
	f.StringVar(&w.schedulerName, "scheduler-name", "", "scheduler that the webhook gives to pods that ask for cards and name none; empty leaves them to the cluster's")
	f.DurationVar(&w.life, "webhook-cert-life", 30*24*time.Hour, "how long a certificate of the webhook is valid; it is replaced when a third is left")
}

// webhook is the admission webhook with what it needs to be trusted.
type webhook struct {
	*admission.Webhook
	keeper   admission.Keeper
	certs    *pki.Server
	listener net.Listener
}

// newWebhook makes the webhook that the flags ask for, nil if none.
func (o *extenderOptions) newWebhook(kube kubernetes.Interface, bundle pki.Bundle, books *ledger.Ledger, registry prometheus.Registerer, log *slog.Logger) (*webhook, error) {
	if o.webhook.listen == "" {
		return nil, nil
	}
	certs, err := pki.NewServer(bundle, []string{o.webhook.service + "." + o.namespace + ".svc", "localhost", "127.0.0.1"}, time.Now)
	if err != nil {
		return nil, err
	}
	certs.SetLife(o.webhook.life)
	l, err := net.Listen("tcp", o.webhook.listen)
	if err != nil {
		return nil, fmt.Errorf("--webhook-listen: %w", err)
	}
	placement := api.Placement(o.placement)
	if o.placement == cooperative {
		placement = api.Offered
	}
	return &webhook{
		Webhook: admission.New(admission.Config{
			Options:  admission.Options{SchedulerName: o.webhook.schedulerName, Placement: placement, Nodes: books.ManagedNodes},
			Registry: registry, Log: log,
		}),
		keeper: admission.Keeper{Kube: kube, CA: bundle.CACert, Log: log}, certs: certs, listener: l,
	}, nil
}

// run serves until the context ends.
func (w *webhook) run(ctx context.Context) error {
	if w == nil {
		return nil
	}
	ctx, stop := context.WithCancel(ctx)
	kept := make(chan error, 1)
	go func() { kept <- w.keeper.Run(ctx) }()
	err := w.Serve(ctx, w.listener, w.certs.Public())
	stop()
	return errors.Join(err, <-kept)
}
