package nrihook

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	nri "github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/net/multiplex"
	"github.com/containerd/ttrpc"
)

// refusing is a runtime that takes no plugin.
type refusing struct{}

func (refusing) RegisterPlugin(context.Context, *nri.RegisterPluginRequest) (*nri.Empty, error) {
	return nil, errors.New("plugin carve is there already")
}

func (refusing) UpdateContainers(context.Context, *nri.UpdateContainersRequest) (*nri.UpdateContainersResponse, error) {
	return nil, errors.New("unexpected")
}

// Whoever looks at a node without NRI finds out from the agent what to do.
func TestALinkThatCannotBeMadeSaysHowToMendIt(t *testing.T) {
	serve := func(handle func(net.Conn)) func(*testing.T, string) {
		return func(t *testing.T, socket string) {
			l, err := net.Listen("unix", socket)
			if err != nil {
				t.Fatal(err)
			}
			done := make(chan struct{})
			go func() {
				defer close(done)
				for {
					c, err := l.Accept()
					if err != nil {
						return
					}
					handle(c)
				}
			}()
			t.Cleanup(func() { l.Close(); <-done })
		}
	}
	for name, c := range map[string]struct {
		runtime func(*testing.T, string)
		want    []string
	}{
		"there is no socket": {nil, []string{"doesn't exist", "NRI is off", "containerd 1.7", "disable = false", "enable_nri = true"}},
		"nobody listens": {func(t *testing.T, socket string) {
			l, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
			if err != nil {
				t.Fatal(err)
			}
			l.SetUnlinkOnClose(false)
			l.Close()
		}, []string{"nobody listens", "isn't running"}},
		"it is a file": {func(t *testing.T, socket string) {
			if err := os.WriteFile(socket, nil, 0o600); err != nil {
				t.Fatal(err)
			}
		}, []string{"nobody listens"}},
		"it speaks a protocol of before": {serve(func(c net.Conn) { c.Close() }), []string{"closed the connection", "NRI older than 0.2"}},
		"it doesn't answer":              {serve(func(c net.Conn) { t.Cleanup(func() { c.Close() }) }), []string{"didn't complete the NRI registration"}},
		"it refuses the plugin": {serve(func(c net.Conn) {
			m := multiplex.Multiplex(c)
			l, err := m.Listen(multiplex.RuntimeServiceConn)
			if err != nil {
				return
			}
			s, err := ttrpc.NewServer()
			if err != nil {
				return
			}
			nri.RegisterRuntimeService(s, refusing{})
			go s.Serve(context.Background(), l)
			t.Cleanup(func() { s.Close(); m.Close() })
		}), []string{"refused the hook as NRI plugin 45-carve", "plugin carve is there already", "another plugin may have that name"}},
	} {
		t.Run(name, func(t *testing.T) {
			socket := filepath.Join(filepath.Dir(socketPath(t)), "nri.sock")
			if c.runtime != nil {
				c.runtime(t, socket)
			}
			n := newNodeState()
			l := NewLink(Config{Socket: socket, State: n, Log: slog.New(slog.DiscardHandler)})
			l.greetingLimit = 300 * time.Millisecond
			ctx, cancel := context.WithCancel(context.Background())
			done := make(chan error, 1)
			go func() { done <- l.Run(ctx) }()
			defer func() { cancel(); <-done }()
			for end := time.Now().Add(20 * time.Second); ; time.Sleep(10 * time.Millisecond) {
				said, missing := n.said(), ""
				for _, w := range append(c.want, "fault ") {
					if !strings.Contains(said, w) {
						missing = w
					}
				}
				if missing == "" {
					return
				}
				if time.Now().After(end) {
					t.Fatalf("said %q, want %q in it", said, missing)
				}
			}
		})
	}
}
