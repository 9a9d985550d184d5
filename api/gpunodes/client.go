// Package gpunodes is the typed client of the GPUNode resource: the few calls
// that the extender, the agent and the command line make, and an informer.
// It holds no state and decides nothing.
package gpunodes

import (
	"context"
	"fmt"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"github.com/carve-gpu/carve/api/v1alpha1"
)

const resource = "gpunodes"

// Client reads and writes GPUNodes. It is safe for concurrent use.
type Client struct {
	rest   rest.Interface
	params runtime.ParameterCodec
}

// New makes a client from a configuration, which isn't changed.
func New(config *rest.Config) (*Client, error) {
	scheme := runtime.NewScheme()
	if err := v1alpha1.AddToScheme(scheme); err != nil {
		return nil, fmt.Errorf("make gpunodes client: %w", err)
	}
	c := rest.CopyConfig(config)
	c.GroupVersion = &v1alpha1.GroupVersion
	c.APIPath = "/apis"
	// Custom resources are served as JSON only.
	c.ContentType, c.AcceptContentTypes = "application/json", "application/json"
	c.NegotiatedSerializer = serializer.NewCodecFactory(scheme).WithoutConversion()
	r, err := rest.RESTClientFor(c)
	if err != nil {
		return nil, fmt.Errorf("make gpunodes client: %w", err)
	}
	return &Client{r, runtime.NewParameterCodec(scheme)}, nil
}

// Get reads one node's object.
func (c *Client) Get(ctx context.Context, name string) (*v1alpha1.GPUNode, error) {
	out := &v1alpha1.GPUNode{}
	return out, c.rest.Get().Resource(resource).Name(name).Do(ctx).Into(out)
}

// List reads all nodes' objects.
func (c *Client) List(ctx context.Context, o metav1.ListOptions) (*v1alpha1.GPUNodeList, error) {
	out := &v1alpha1.GPUNodeList{}
	return out, c.rest.Get().Resource(resource).VersionedParams(&o, c.params).Do(ctx).Into(out)
}

// Watch streams changes.
func (c *Client) Watch(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
	o.Watch = true
	return c.rest.Get().Resource(resource).VersionedParams(&o, c.params).Watch(ctx)
}

// Create makes an object; its status is ignored by the API server.
func (c *Client) Create(ctx context.Context, n *v1alpha1.GPUNode) (*v1alpha1.GPUNode, error) {
	out := &v1alpha1.GPUNode{}
	return out, c.rest.Post().Resource(resource).Body(n).Do(ctx).Into(out)
}

// UpdateStatus writes the status; the object's resourceVersion must be current.
func (c *Client) UpdateStatus(ctx context.Context, n *v1alpha1.GPUNode) (*v1alpha1.GPUNode, error) {
	out := &v1alpha1.GPUNode{}
	return out, c.rest.Put().Resource(resource).Name(n.Name).SubResource("status").Body(n).Do(ctx).Into(out)
}

// Patch changes the spec with a patch of the given type.
func (c *Client) Patch(ctx context.Context, name string, t types.PatchType, body []byte) (*v1alpha1.GPUNode, error) {
	out := &v1alpha1.GPUNode{}
	return out, c.rest.Patch(t).Resource(resource).Name(name).Body(body).Do(ctx).Into(out)
}

// Delete removes a node's object.
func (c *Client) Delete(ctx context.Context, name string) error {
	return c.rest.Delete().Resource(resource).Name(name).Do(ctx).Error()
}

// Informer keeps a local copy of the objects that the selector admits (nil
// options admit all). It isn't started.
func (c *Client) Informer(resync time.Duration, tweak func(*metav1.ListOptions)) cache.SharedIndexInformer {
	with := func(o metav1.ListOptions) metav1.ListOptions {
		if tweak != nil {
			tweak(&o)
		}
		return o
	}
	lw := &cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			return c.List(ctx, with(o))
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			return c.Watch(ctx, with(o))
		},
	}
	return cache.NewSharedIndexInformer(lw, &v1alpha1.GPUNode{}, resync, cache.Indexers{})
}
