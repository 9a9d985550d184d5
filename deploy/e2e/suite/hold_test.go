package suite

import (
	"context"
	"fmt"
	"sync"
	"time"

	nri "github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/stub"
)

// holder is a plugin of the runtime that holds a container back between its
// creation and its start. The runtime waits two seconds for a plugin, so what
// is to happen meanwhile must be quick.
type holder struct {
	pod      string
	reached  chan struct{}
	once     sync.Once
	released chan struct{}
	release  func()
}

// holdLimit is how long a container is held at most: less than the runtime
// waits.
const holdLimit = 1800 * time.Millisecond

// holdCreated connects a holder for one pod. It comes after carve's hook, which
// has had its say on the start by then.
func holdCreated(ctx context.Context, pod string) (*holder, func(), error) {
	h := &holder{pod: pod, reached: make(chan struct{}), released: make(chan struct{})}
	h.release = sync.OnceFunc(func() { close(h.released) })
	s, err := stub.New(h, stub.WithPluginName("hold"), stub.WithPluginIdx("90"), stub.WithSocketPath(onNode("/run/nri/nri.sock")),
		stub.WithOnClose(func() {}), stub.WithLogger(quiet{}))
	if err != nil {
		return nil, nil, fmt.Errorf("make the plugin that holds containers: %w", err)
	}
	if err := s.Start(context.WithoutCancel(ctx)); err != nil {
		return nil, nil, fmt.Errorf("start the plugin that holds containers: %w", err)
	}
	return h, s.Stop, nil
}

// StartContainer holds the pod's container, once.
func (h *holder) StartContainer(_ context.Context, p *nri.PodSandbox, _ *nri.Container) error {
	if p.GetName() != h.pod {
		return nil
	}
	h.once.Do(func() {
		close(h.reached)
		select {
		case <-h.released:
		case <-time.After(holdLimit):
		}
	})
	return nil
}

type quiet struct{}

func (quiet) Debugf(context.Context, string, ...any) {}
func (quiet) Infof(context.Context, string, ...any)  {}
func (quiet) Warnf(context.Context, string, ...any)  {}
func (quiet) Errorf(context.Context, string, ...any) {}
