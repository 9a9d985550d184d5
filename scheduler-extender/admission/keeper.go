package admission

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	admissioninformers "k8s.io/client-go/informers/admissionregistration/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
)

// Configuration is the name of the MutatingWebhookConfiguration.
const Configuration = "carve"

// Keeper keeps the CA of the webhook's certificate in its configuration, where the
// API server looks for it: manifests can't carry what is made at the first start,
// and applying them again may take it off.
type Keeper struct {
	Kube kubernetes.Interface
	// CA is the certificate in PEM.
	CA  []byte
	Log *slog.Logger
}

// longest wait between tries to write.
const longestWait = 30 * time.Second

// Run watches the configuration until the context ends.
func (k Keeper) Run(ctx context.Context) error {
	one := fields.OneTermEqualSelector(metav1.ObjectNameField, Configuration).String()
	informer := admissioninformers.NewFilteredMutatingWebhookConfigurationInformer(k.Kube, 0, cache.Indexers{},
		func(o *metav1.ListOptions) { o.FieldSelector = one })
	look := make(chan struct{}, 1)
	changed := func(any) {
		select {
		case look <- struct{}{}:
		default:
		}
	}
	if _, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: changed, UpdateFunc: func(_, now any) { changed(now) },
	}); err != nil {
		return fmt.Errorf("watch the webhook's configuration: %w", err)
	}
	done := make(chan struct{})
	go func() { defer close(done); informer.RunWithContext(ctx) }()
	defer func() { <-done }()
	for wait := time.Second; ; {
		select {
		case <-ctx.Done():
			return nil
		case <-look:
		}
		if err := k.write(ctx); err != nil && ctx.Err() == nil {
			k.Log.Warn("the webhook isn't trusted by the API server yet; pods are let through as they are", "error", err)
			select {
			case <-ctx.Done():
				return nil
			case <-time.After(wait):
			}
			wait = min(2*wait, longestWait)
			changed(nil)
			continue
		}
		wait = time.Second
	}
}

// write puts the CA where it is missing.
func (k Keeper) write(ctx context.Context) error {
	configurations := k.Kube.AdmissionregistrationV1().MutatingWebhookConfigurations()
	c, err := configurations.Get(ctx, Configuration, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil // it was taken away; its return is an event
	}
	if err != nil {
		return fmt.Errorf("read the configuration: %w", err)
	}
	if !k.missing(c) {
		return nil
	}
	for i := range c.Webhooks {
		c.Webhooks[i].ClientConfig.CABundle = k.CA
	}
	if _, err := configurations.Update(ctx, c, metav1.UpdateOptions{FieldManager: "carve-extender"}); err != nil {
		return fmt.Errorf("write the CA: %w", err)
	}
	k.Log.Info("the API server trusts the webhook", "configuration", Configuration)
	return nil
}

func (k Keeper) missing(c *admissionv1.MutatingWebhookConfiguration) bool {
	for i := range c.Webhooks {
		if !bytes.Equal(c.Webhooks[i].ClientConfig.CABundle, k.CA) {
			return true
		}
	}
	return false
}
