package suite

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kubelet "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/carve-gpu/carve/api"
)

// otherPlugin is a device plugin of somebody else's, which hands out two cards
// without saying to whom.
type otherPlugin struct {
	kubelet.UnimplementedDevicePluginServer
	ended chan struct{}
}

func (p *otherPlugin) GetDevicePluginOptions(context.Context, *kubelet.Empty) (*kubelet.DevicePluginOptions, error) {
	return &kubelet.DevicePluginOptions{}, nil
}

func (p *otherPlugin) ListAndWatch(_ *kubelet.Empty, stream grpc.ServerStreamingServer[kubelet.ListAndWatchResponse]) error {
	var all kubelet.ListAndWatchResponse
	for _, id := range []string{"GPU-other-0", "GPU-other-1"} {
		all.Devices = append(all.Devices, &kubelet.Device{ID: id, Health: kubelet.Healthy})
	}
	if err := stream.Send(&all); err != nil {
		return err
	}
	select {
	case <-stream.Context().Done():
	case <-p.ended:
	}
	return nil
}

func (p *otherPlugin) Allocate(_ context.Context, r *kubelet.AllocateRequest) (*kubelet.AllocateResponse, error) {
	out := &kubelet.AllocateResponse{}
	for range r.ContainerRequests {
		out.ContainerResponses = append(out.ContainerResponses, &kubelet.ContainerAllocateResponse{})
	}
	return out, nil
}

// servePlugin registers the plugin with the node's kubelet, until end is called or
// the test is over.
func servePlugin(t *testing.T) (end func()) {
	t.Helper()
	const dir, name = "/var/lib/kubelet/device-plugins", "other.sock"
	socket := onNode(dir, name)
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	p := &otherPlugin{ended: make(chan struct{})}
	s := grpc.NewServer()
	kubelet.RegisterDevicePluginServer(s, p)
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = s.Serve(l) // until it is stopped
	}()
	over := false
	end = func() {
		if over {
			return
		}
		over = true
		close(p.ended)
		s.Stop()
		<-done
		if err := os.Remove(socket); err != nil && !errors.Is(err, os.ErrNotExist) {
			t.Error(err)
		}
	}
	t.Cleanup(end)
	conn, err := grpc.NewClient("unix://"+onNode(dir, "kubelet.sock"), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := kubelet.NewRegistrationClient(conn).Register(t.Context(), &kubelet.RegisterRequest{Version: kubelet.Version, Endpoint: name, ResourceName: api.ResourceGPU}); err != nil {
		t.Fatalf("register a device plugin: %v", err)
	}
	return end
}

// offers waits until the node offers so many of nvidia.com/gpu.
func offers(t *testing.T, n int64) {
	t.Helper()
	eventually(t, fmt.Sprintf("the node to offer %d cards", n), func(ctx context.Context) string {
		node, err := cluster.Client.CoreV1().Nodes().Get(ctx, "node1", metav1.GetOptions{})
		if err != nil {
			return err.Error()
		}
		if q := node.Status.Allocatable[api.ResourceGPU]; q.Value() != n {
			return q.String()
		}
		return ""
	})
}

// TestNodeThatWasUsedBefore labels a node while a pod runs there on a card of
// another device plugin's: carve places nothing on it, says why, and does once the
// pod is gone.
func TestNodeThatWasUsedBefore(t *testing.T) {
	manage(t, nil)
	back := false
	t.Cleanup(func() {
		if !back {
			manage(t, "true")
			if err := cluster.WaitReady(context.Background()); err != nil {
				t.Error(err)
			}
		}
	})
	offers(t, 0)
	end := servePlugin(t)
	offers(t, 2)
	create(t, pod("old", container("app", share{"gpu": "1"})))
	if p := running(t, "old"); p.Annotations[api.AnnotationGrant] != "" {
		t.Fatalf("it has a grant: %s", p.Annotations[api.AnnotationGrant])
	}
	end()

	manage(t, "true")
	back = true
	if err := serving(t.Context()); err != nil {
		t.Fatal(err)
	}
	create(t, pod("new", container("app", share{"gpumem": "1000"})))
	wantPending(t, "new", "default/old runs there on cards that carve didn't give it")
	if e := decoded[explained](t, "explain", "pod", "new", "-n", ns); e.Verdict != "foreign-pods" {
		t.Errorf("explain: %+v", e)
	}
	found := false
	for _, f := range diagnose(t, nil) {
		found = found || f.Check == "foreign-pods" && f.Level == api.LevelWarn && strings.Contains(f.What, "default/old") && strings.Contains(f.Do, "kubectl drain node1")
	}
	if !found {
		t.Error("doctor says nothing of it")
	}
	for _, s := range get(t.Context(), t, "old").Status.ContainerStatuses {
		if s.State.Running == nil || s.RestartCount > 0 {
			t.Errorf("the pod that was there was disturbed: %+v", s)
		}
	}
	if n, err := cluster.Client.CoreV1().Nodes().Get(t.Context(), "node1", metav1.GetOptions{}); err != nil {
		t.Fatal(err)
	} else {
		for _, taint := range n.Spec.Taints {
			if taint.Key == api.TaintHookDown && taint.Effect == corev1.TaintEffectNoSchedule {
				t.Error("the node is tainted, which keeps pods off that ask for no card")
			}
		}
	}
	remove(t, "old")
	running(t, "new")
	wantShare(t, "new", "app", 1000)
	agree(t)
}
