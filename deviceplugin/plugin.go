package deviceplugin

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/fsnotify/fsnotify"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	kubelet "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/carve-gpu/carve/api"
)

const (
	// endpoints are the plugin's sockets in the kubelet's plugin directory. Each
	// session has its own, since a kubelet that hasn't noticed yet that a socket's
	// last owner is gone takes no other one on it ("already connected").
	endpoints = "carve-gpu*.sock"
	// kubeletSocket is where the kubelet takes registrations.
	kubeletSocket = "kubelet.sock"

	registerLimit = 5 * time.Second
	// A registered plugin must be asked for its devices soon; if that doesn't
	// happen the kubelet has lost the registration.
	streamLimit     = 10 * time.Second
	shortestBackoff = 100 * time.Millisecond
	longestBackoff  = 5 * time.Second
)

// Slices is what the plugin needs of the node's agent.
type Slices interface {
	// AwaitPrepared returns nil once the slice of the container is in place and
	// the hook can adjust containers. The error, on ctx's end or before, says
	// in a sentence what is missing.
	AwaitPrepared(ctx context.Context, namespace, pod, container string) error
}

// Config is what a Plugin is made of.
type Config struct {
	// KubeletDir is the kubelet's directory, "/var/lib/kubelet" as a rule.
	KubeletDir string
	Slices     Slices
	// Linger is asked once when Run is to end: whether to go on counting slots
	// until the plugin of a next agent has registered, for lingerLimit at most. It
	// may be nil.
	Linger func() bool
	// Farewell is how long it goes on in any other case: pods that were bound a moment
	// before are on their way to the kubelet, which turns them away for good once
	// nobody counts slots.
	Farewell time.Duration
	Log      *slog.Logger
}

// Plugin serves nvidia.com/gpu to the kubelet and registers again whenever the
// kubelet starts anew.
type Plugin struct {
	// A method that a later protocol version adds must be looked at, so a
	// build with it should fail.
	kubelet.UnsafeDevicePluginServer

	dir    string
	slices Slices
	owners *owners
	linger func() bool
	leave  time.Duration
	log    *slog.Logger

	mu      sync.Mutex
	slots   int
	changed chan struct{} // closed and replaced when slots or streams change
	streams int           // open ListAndWatch calls
	// sessions counts the sockets that were made.
	sessions int
}

// New makes a plugin without slots. It serves once Run is called.
func New(c Config) *Plugin {
	return &Plugin{
		dir:     filepath.Join(c.KubeletDir, "device-plugins"),
		slices:  c.Slices,
		owners:  newOwners(filepath.Join(c.KubeletDir, "pod-resources", "kubelet.sock")),
		linger:  c.Linger,
		leave:   c.Farewell,
		log:     c.Log,
		changed: make(chan struct{}),
	}
}

// SetSlots says how many containers the node's cards can take.
func (p *Plugin) SetSlots(n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if n != p.slots {
		p.slots = n
		p.notify()
	}
}

// Connected reports whether the kubelet listens to the plugin.
func (p *Plugin) Connected() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.streams > 0
}

// notify wakes all that wait for a change. p.mu is held.
func (p *Plugin) notify() {
	close(p.changed)
	p.changed = make(chan struct{})
}

// state gives the slots, whether the kubelet listens, and a channel that is
// closed when one of them changes.
func (p *Plugin) state() (slots int, connected bool, changed <-chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.slots, p.streams > 0, p.changed
}

// Run serves until ctx ends and keeps the plugin registered. It returns an
// error only if the kubelet's plugin directory can't be watched.
func (p *Plugin) Run(ctx context.Context) error {
	defer p.owners.close()
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		return fmt.Errorf("serve device plugin: %w", err)
	}
	defer watcher.Close()
	if err := watcher.Add(p.dir); err != nil {
		return fmt.Errorf("serve device plugin: watch %s: %w", p.dir, err)
	}
	wait := shortestBackoff
	for ctx.Err() == nil {
		registered, err := p.session(ctx, watcher.Events)
		if err != nil {
			p.log.Warn("device plugin isn't registered", "error", err)
		}
		if registered {
			wait = shortestBackoff
		}
		if rest(ctx, wait, watcher.Events) {
			wait = shortestBackoff
			continue
		}
		wait = min(2*wait, longestBackoff)
	}
	return nil
}

// rest waits before the next try, and reports whether it was cut short since
// the kubelet has just opened its socket: until the plugin is registered, the
// kubelet turns pods away for good.
func rest(ctx context.Context, d time.Duration, events <-chan fsnotify.Event) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	for {
		select {
		case <-ctx.Done():
			return false
		case <-t.C:
			return false
		case e := <-events:
			if filepath.Base(e.Name) == kubeletSocket && e.Has(fsnotify.Create) {
				return true
			}
		}
	}
}

// session serves on a fresh socket, registers, and stays until the kubelet is
// gone or starts anew. It reports whether the kubelet ever listened.
func (p *Plugin) session(ctx context.Context, events <-chan fsnotify.Event) (bool, error) {
	if !p.awaitSlots(ctx) {
		return false, nil
	}
	old, err := filepath.Glob(filepath.Join(p.dir, endpoints))
	if err != nil {
		return false, fmt.Errorf("find old sockets: %w", err)
	}
	p.sessions++
	endpoint := strings.Replace(endpoints, "*", fmt.Sprintf("-%d-%d", os.Getpid(), p.sessions), 1)
	path := filepath.Join(p.dir, endpoint)
	l, err := net.Listen("unix", path)
	if err != nil {
		return false, fmt.Errorf("listen: %w", err)
	}
	server := grpc.NewServer()
	kubelet.RegisterDevicePluginServer(server, p)
	served := make(chan error, 1)
	go func() { served <- server.Serve(l) }()
	defer func() {
		server.Stop()
		<-served
	}()
	own, kubeletsOwn := identity(path), identity(filepath.Join(p.dir, kubeletSocket))
	if err := p.register(ctx, endpoint); err != nil {
		return false, err
	}
	connected := false
	limit := time.NewTimer(streamLimit)
	defer limit.Stop()
	for {
		_, now, changed := p.state()
		switch {
		case now && !connected:
			connected = true
			limit.Stop()
			p.log.Info("device plugin is registered", "resource", api.ResourceGPU)
			// An earlier agent that lingers ends now.
			for _, path := range old {
				if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
					p.log.Warn("an old socket can't be removed", "error", err)
				}
			}
		case connected && !now:
			p.log.Info("the kubelet left the device plugin")
			return true, nil
		}
		select {
		case <-ctx.Done():
			if connected && p.linger != nil && p.linger() {
				p.lingerOn(path, own)
			} else if connected {
				p.sayFarewell()
			}
			return connected, nil
		case <-changed:
		case <-limit.C:
			return false, fmt.Errorf("the kubelet didn't ask for devices within %v", streamLimit)
		case <-events:
			// Events tell that something happened, perhaps before this session;
			// what counts is how things are now.
			if now := identity(filepath.Join(p.dir, kubeletSocket)); now != kubeletsOwn && now != (socketIdentity{}) {
				p.log.Info("the kubelet started anew")
				return connected, nil
			}
			if identity(path) != own {
				p.log.Info("the plugin's socket was removed")
				return connected, nil
			}
		case err := <-served:
			served <- err
			return connected, fmt.Errorf("serve: %w", err)
		}
	}
}

// lingerLimit is how long a next agent may take to register.
const lingerLimit = 5 * time.Second

// lingerOn serves until the next agent's plugin, once registered, has removed
// this one's socket.
func (p *Plugin) lingerOn(path string, own socketIdentity) {
	p.log.Info("counting slots until the next agent does")
	for end := time.Now().Add(lingerLimit); time.Now().Before(end) && identity(path) == own; {
		time.Sleep(10 * time.Millisecond)
	}
}

// sayFarewell serves for a while, unless the kubelet leaves.
func (p *Plugin) sayFarewell() {
	end := time.NewTimer(p.leave)
	defer end.Stop()
	for {
		_, connected, changed := p.state()
		if !connected {
			return
		}
		select {
		case <-end.C:
			return
		case <-changed:
		}
	}
}

// socketIdentity tells a socket from another one that took its place; it is
// zero where there is none.
type socketIdentity struct {
	inode uint64
	made  int64 // nanoseconds
}

func identity(path string) socketIdentity {
	var st unix.Stat_t
	if unix.Lstat(path, &st) != nil {
		return socketIdentity{}
	}
	return socketIdentity{st.Ino, st.Mtim.Nano()}
}

// awaitSlots waits until the node's slots are known: a plugin with none would
// have the kubelet turn pods away. It reports false when ctx ends.
func (p *Plugin) awaitSlots(ctx context.Context) bool {
	for {
		slots, _, changed := p.state()
		if slots > 0 {
			return true
		}
		select {
		case <-ctx.Done():
			return false
		case <-changed:
		}
	}
}

func (p *Plugin) register(ctx context.Context, endpoint string) error {
	ctx, cancel := context.WithTimeout(ctx, registerLimit)
	defer cancel()
	conn, err := grpc.NewClient("unix://"+filepath.Join(p.dir, kubeletSocket), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return fmt.Errorf("register: %w", err)
	}
	defer conn.Close()
	_, err = kubelet.NewRegistrationClient(conn).Register(ctx, &kubelet.RegisterRequest{
		Version:      kubelet.Version,
		Endpoint:     endpoint,
		ResourceName: api.ResourceGPU,
		Options:      options(),
	})
	if err != nil {
		return fmt.Errorf("register with the kubelet: %w", err)
	}
	return nil
}
