package deviceplugin

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sort"
	"strings"
	"time"

	"google.golang.org/grpc"
	kubelet "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/carve-gpu/carve/api"
)

// preStartLimit ends a wait before the kubelet does (30 s), so that the pod's
// event carries our sentence and not "deadline exceeded".
const preStartLimit = 25 * time.Second

func options() *kubelet.DevicePluginOptions {
	return &kubelet.DevicePluginOptions{PreStartRequired: true}
}

// GetDevicePluginOptions asks the kubelet to call PreStartContainer.
func (p *Plugin) GetDevicePluginOptions(context.Context, *kubelet.Empty) (*kubelet.DevicePluginOptions, error) {
	return options(), nil
}

// ListAndWatch tells the kubelet the slots, and again whenever their number
// changes.
func (p *Plugin) ListAndWatch(_ *kubelet.Empty, stream grpc.ServerStreamingServer[kubelet.ListAndWatchResponse]) error {
	p.mu.Lock()
	p.streams++
	p.notify()
	p.mu.Unlock()
	defer func() {
		p.mu.Lock()
		p.streams--
		p.notify()
		p.mu.Unlock()
	}()
	sent := -1
	for {
		slots, _, changed := p.state()
		if slots != sent {
			if err := stream.Send(&kubelet.ListAndWatchResponse{Devices: devices(slots, p.owners.held(stream.Context(), api.ResourceGPU))}); err != nil {
				return err
			}
			sent = slots
		}
		select {
		case <-stream.Context().Done():
			return nil
		case <-changed:
		}
	}
}

// devices are so many slots, and those that containers hold among them: a slot
// that is taken back from a running pod would turn it away when the kubelet
// admits it again.
func devices(slots int, held []string) []*kubelet.Device {
	var d []*kubelet.Device
	add := func(id string) { d = append(d, &kubelet.Device{ID: id, Health: kubelet.Healthy}) }
	for _, id := range held {
		add(id)
	}
	for i := 0; len(d) < slots; i++ {
		if id := slotID(i); !slices.Contains(held, id) {
			add(id)
		}
	}
	sort.Slice(d, func(i, j int) bool { return d[i].ID < d[j].ID })
	return d
}

func slotID(i int) string { return fmt.Sprintf("slot-%04d", i) }

// GetPreferredAllocation has no preference: one slot is as good as another.
func (p *Plugin) GetPreferredAllocation(context.Context, *kubelet.PreferredAllocationRequest) (*kubelet.PreferredAllocationResponse, error) {
	return &kubelet.PreferredAllocationResponse{}, nil
}

// Allocate answers at once and never fails: an error here would leave the pod
// failed for good, and while it waits the kubelet admits no other pod. The
// answer marks the container for the hook and keeps NVIDIA's own runtime from
// handing out cards.
func (p *Plugin) Allocate(_ context.Context, r *kubelet.AllocateRequest) (*kubelet.AllocateResponse, error) {
	out := &kubelet.AllocateResponse{}
	for _, c := range r.ContainerRequests {
		out.ContainerResponses = append(out.ContainerResponses, &kubelet.ContainerAllocateResponse{
			Envs:        map[string]string{"NVIDIA_VISIBLE_DEVICES": "void"},
			Annotations: map[string]string{api.AnnotationSlots: strings.Join(c.DevicesIds, ",")},
		})
	}
	return out, nil
}

// PreStartContainer holds a container back until its slice is in place. The
// kubelet tries again after an error.
func (p *Plugin) PreStartContainer(ctx context.Context, r *kubelet.PreStartContainerRequest) (*kubelet.PreStartContainerResponse, error) {
	if len(r.DevicesIds) == 0 {
		return nil, errors.New("the kubelet named no slot")
	}
	ctx, cancel := context.WithTimeout(ctx, preStartLimit)
	defer cancel()
	o, err := p.owners.find(ctx, api.ResourceGPU, r.DevicesIds)
	if err != nil {
		return nil, fmt.Errorf("find the container of %s: %w", strings.Join(r.DevicesIds, ","), err)
	}
	if err := p.slices.AwaitPrepared(ctx, o.namespace, o.pod, o.container); err != nil {
		p.log.Warn("a container waits for its slice", "namespace", o.namespace, "pod", o.pod, "container", o.container, "error", err)
		return nil, err
	}
	return &kubelet.PreStartContainerResponse{}, nil
}
