package deviceplugin

import (
	"context"
	"fmt"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"
)

// owners asks the kubelet which container holds a slot. PreStartContainer is
// told slot ids only.
type owners struct {
	socket string
	conn   *grpc.ClientConn
	err    error
}

// owner names a container.
type owner struct{ namespace, pod, container string }

const (
	// maxAnswerBytes is the kubelet's own limit for this service.
	maxAnswerBytes = 16 << 20
	// askAgain is the pause after the kubelet had no answer: it limits the rate
	// of this service, and shows a pod a moment after it is admitted.
	askAgain = 20 * time.Millisecond
	// heldLimit bounds the question which slots are held.
	heldLimit = 500 * time.Millisecond
)

func newOwners(socket string) *owners {
	o := &owners{socket: socket}
	// The connection is made with the first call, and again when it is lost.
	o.conn, o.err = grpc.NewClient("unix://"+socket,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: backoff.Config{BaseDelay: shortestBackoff, Multiplier: 2, MaxDelay: longestBackoff}}),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxAnswerBytes)))
	return o
}

func (o *owners) close() {
	if o.conn != nil {
		o.conn.Close()
	}
}

// find returns the container that holds all of ids. It keeps asking until ctx
// ends.
func (o *owners) find(ctx context.Context, resource string, ids []string) (owner, error) {
	if o.err != nil {
		return owner{}, fmt.Errorf("reach pod-resources: %w", o.err)
	}
	client := podresources.NewPodResourcesListerClient(o.conn)
	for {
		list, err := client.List(ctx, &podresources.ListPodResourcesRequest{}, grpc.WaitForReady(true))
		if err != nil && status.Code(err) != codes.ResourceExhausted {
			return owner{}, fmt.Errorf("ask pod-resources at %s: %w", o.socket, err)
		}
		for _, p := range list.GetPodResources() {
			for _, c := range p.Containers {
				if holds(c.Devices, resource, ids) {
					return owner{p.Namespace, p.Name, c.Name}, nil
				}
			}
		}
		select {
		case <-ctx.Done():
			return owner{}, fmt.Errorf("pod-resources names no such container: %w", ctx.Err())
		case <-time.After(askAgain):
		}
	}
}

// held lists the ids that containers hold, as far as the kubelet says within
// heldLimit.
func (o *owners) held(ctx context.Context, resource string) []string {
	if o.err != nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, heldLimit)
	defer cancel()
	list, err := podresources.NewPodResourcesListerClient(o.conn).List(ctx, &podresources.ListPodResourcesRequest{})
	if err != nil {
		return nil
	}
	var ids []string
	for _, p := range list.PodResources {
		for _, c := range p.Containers {
			for _, d := range c.Devices {
				if d.ResourceName == resource {
					ids = append(ids, d.DeviceIds...)
				}
			}
		}
	}
	slices.Sort(ids)
	return slices.Compact(ids)
}

func holds(devices []*podresources.ContainerDevices, resource string, ids []string) bool {
	var held []string
	for _, d := range devices {
		if d.ResourceName == resource {
			held = append(held, d.DeviceIds...)
		}
	}
	for _, id := range ids {
		if !slices.Contains(held, id) {
			return false
		}
	}
	return len(ids) > 0
}
