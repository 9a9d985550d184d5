package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	kubelet "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/carve-gpu/carve/api"
)

// benchKubelet is the kubelet's side of device plugins and pod-resources.
type benchKubelet struct {
	kubelet.UnimplementedRegistrationServer
	podresources.UnimplementedPodResourcesListerServer

	dir        string
	registered chan string
	servers    []*grpc.Server

	mu   sync.Mutex
	pods []*podresources.PodResources
}

func startKubelet(dir string) (*benchKubelet, error) {
	k := &benchKubelet{dir: dir, registered: make(chan string, 8)}
	for _, d := range []string{"device-plugins", "pod-resources"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			return nil, err
		}
		l, err := net.Listen("unix", filepath.Join(dir, d, "kubelet.sock"))
		if err != nil {
			return nil, err
		}
		s := grpc.NewServer()
		kubelet.RegisterRegistrationServer(s, k)
		podresources.RegisterPodResourcesListerServer(s, k)
		k.servers = append(k.servers, s)
		go s.Serve(l)
	}
	return k, nil
}

func (k *benchKubelet) stop() {
	for _, s := range k.servers {
		s.Stop()
	}
}

func (k *benchKubelet) Register(_ context.Context, r *kubelet.RegisterRequest) (*kubelet.Empty, error) {
	k.registered <- r.Endpoint
	return &kubelet.Empty{}, nil
}

func (k *benchKubelet) List(context.Context, *podresources.ListPodResourcesRequest) (*podresources.ListPodResourcesResponse, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	return &podresources.ListPodResourcesResponse{PodResources: k.pods}, nil
}

// hold gives a slot to a container. The pods of before stay, as on a full node.
func (k *benchKubelet) hold(pod, container, slot string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	const fullNode = 110
	if len(k.pods) == fullNode {
		k.pods = k.pods[1:]
	}
	k.pods = append(k.pods, &podresources.PodResources{Namespace: "default", Name: pod, Containers: []*podresources.ContainerResources{
		{Name: container, Devices: []*podresources.ContainerDevices{{ResourceName: api.ResourceGPU, DeviceIds: []string{slot}}}},
	}})
}

// plugin waits for the registration and listens to the plugin.
func (k *benchKubelet) plugin(ctx context.Context) (kubelet.DevicePluginClient, error) {
	select {
	case endpoint := <-k.registered:
		conn, err := grpc.NewClient("unix://"+filepath.Join(k.dir, "device-plugins", endpoint), grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			return nil, err
		}
		c := kubelet.NewDevicePluginClient(conn)
		stream, err := c.ListAndWatch(ctx, &kubelet.Empty{})
		if err == nil {
			_, err = stream.Recv()
		}
		return c, err
	case <-time.After(20 * time.Second):
		return nil, errors.New("the device plugin didn't register")
	}
}

func (k *benchKubelet) allocate(ctx context.Context, c kubelet.DevicePluginClient, i int) error {
	_, err := c.Allocate(ctx, &kubelet.AllocateRequest{ContainerRequests: []*kubelet.ContainerAllocateRequest{{DevicesIds: []string{slot(i)}}}})
	return err
}

func (k *benchKubelet) preStart(ctx context.Context, c kubelet.DevicePluginClient, i int) error {
	_, err := c.PreStartContainer(ctx, &kubelet.PreStartContainerRequest{DevicesIds: []string{slot(i)}})
	return err
}

func slot(i int) string { return fmt.Sprintf("slot-%04d", i) }
