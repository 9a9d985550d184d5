package sock

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/carve-gpu/carve/api"
	nodev1 "github.com/carve-gpu/carve/api/node/v1"
	"github.com/carve-gpu/carve/monitor"
	"github.com/carve-gpu/carve/vgpu/gpu"
)

// TestMain also is the agent that dies: a process that holds a socket until it
// is killed.
func TestMain(m *testing.M) {
	if path := os.Getenv("CARVE_TEST_HOLD_SOCKET"); path != "" {
		if _, err := Listen(context.Background(), Options{Path: path}); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		fmt.Println("held")
		select {}
	}
	goleak.VerifyTestMain(m)
}

// source is a node that the test changes.
type source struct {
	mu      sync.Mutex
	view    monitor.View
	changed chan struct{}
}

func (s *source) View() monitor.View {
	s.mu.Lock()
	defer s.mu.Unlock()
	v := s.view
	v.Cards = append([]monitor.Card{}, v.Cards...)
	v.Slices = append([]monitor.Slice{}, v.Slices...)
	return v
}

func (s *source) Changed() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.changed
}

func (s *source) Doctor(context.Context) []api.Finding {
	return []api.Finding{{Check: "c", Level: api.LevelWarn, Where: "w", What: "x", Why: "y", Do: "z"}}
}

func (s *source) change(f func(*monitor.View)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f(&s.view)
	close(s.changed)
	s.changed = make(chan struct{})
}

func newSource() *source {
	return &source{changed: make(chan struct{}), view: monitor.View{
		Node: "n1", Version: "v", DriverVersion: "550.1", LinkedSince: time.Unix(1, 0),
		Cards: []monitor.Card{
			{Card: gpu.Card{UUID: "GPU-b", Index: 1, MemoryBytes: 80 << 30}},
			{Card: gpu.Card{UUID: "GPU-a", Index: 0, MemoryBytes: 40 << 30}, GrantedBytes: 8 << 30, GrantedCores: 30},
		},
		Slices: []monitor.Slice{{PodUID: "u1", Namespace: "team", Pod: "p", Container: "app", Card: "GPU-a", Mode: "vgpu", Active: true, LimitBytes: 8 << 30, UsedBytes: 1 << 30, Generation: 2}},
	}}
}

// said collects a log.
type said struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (s *said) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.Write(p)
}

func (s *said) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.b.String()
}

func folder(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "sock") // t.TempDir is too long for a socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// serve runs a server until the test ends or stop is called.
func serve(t *testing.T, path string, s Source) (log *said, stop func()) {
	t.Helper()
	log = &said{}
	l, err := Listen(t.Context(), Options{Path: path})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- Serve(ctx, l, s, slog.New(slog.NewTextHandler(log, nil))) }()
	var once sync.Once
	stop = func() {
		once.Do(func() {
			cancel()
			if err := <-done; err != nil {
				t.Error(err)
			}
		})
	}
	t.Cleanup(stop)
	return log, stop
}

func dial(t *testing.T, path string) *Client {
	t.Helper()
	c, err := Dial(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func TestCalls(t *testing.T) {
	path := filepath.Join(folder(t), "s.sock")
	log, _ := serve(t, path, newSource())
	c := dial(t, path)

	cards, err := c.Cards(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if n := len(cards.GetCards()); n != 2 || cards.GetNode() != "n1" || !cards.GetHookLinked() {
		t.Fatalf("cards: %v", cards)
	}
	if a := cards.GetCards()[0]; a.GetUuid() != "GPU-a" || a.GetMemoryBytes() != 40<<30 || a.GetGrantedBytes() != 8<<30 || a.GetExclusive() {
		t.Errorf("first card: %v", a)
	}
	slices, err := c.Slices(t.Context())
	if err != nil || len(slices.GetSlices()) != 1 {
		t.Fatalf("slices: %v, %v", slices, err)
	}
	if s := slices.GetSlices()[0]; s.GetPod() != "p" || s.GetLimitBytes() != 8<<30 || s.GetUsedBytes() != 1<<30 || s.GetGeneration() != 2 {
		t.Errorf("slice: %v", s)
	}
	if of, err := c.node.ListSlices(t.Context(), &nodev1.ListSlicesRequest{Card: "GPU-b"}); err != nil || len(of.GetSlices()) != 0 {
		t.Errorf("slices of the other card: %v, %v", of, err)
	}
	findings, err := c.Doctor(t.Context())
	if err != nil || len(findings) != 1 || findings[0] != newSource().Doctor(t.Context())[0] {
		t.Errorf("findings: %v, %v", findings, err)
	}

	// A write is refused with the way to go, and its caller is on record.
	err = c.Resize(t.Context(), &nodev1.ResizeRequest{PodUid: "u1", Container: "app", LimitBytes: 1 << 40})
	if err == nil || !strings.Contains(err.Error(), "carve resize -n team pod/p --container app") {
		t.Errorf("resize of a pod's slice: %v", err)
	}
	if err := c.Resize(t.Context(), &nodev1.ResizeRequest{PodUid: "nobody", Container: "app"}); err == nil || !strings.Contains(err.Error(), "no slice") {
		t.Errorf("resize of nothing: %v", err)
	}
	for _, want := range []string{fmt.Sprintf("pid=%d uid=%d gid=%d", os.Getpid(), os.Getuid(), os.Getgid()), "pod=u1", "container=app"} {
		if !strings.Contains(log.String(), want) {
			t.Errorf("the log has no %q:\n%s", want, log.String())
		}
	}
}

func TestWatch(t *testing.T) {
	path := filepath.Join(folder(t), "s.sock")
	s := newSource()
	_, stop := serve(t, path, s)
	c := dial(t, path)
	events := make(chan *nodev1.WatchResponse)
	ended := make(chan error, 1)
	go func() {
		ended <- c.Watch(t.Context(), false, func(e *nodev1.WatchResponse) error { events <- e; return nil })
	}()
	next := func() string {
		t.Helper()
		select {
		case e := <-events:
			switch {
			case e.GetCard() != nil:
				return fmt.Sprintf("%s %s", e.GetType(), e.GetCard().GetUuid())
			case e.GetSlice() != nil:
				return fmt.Sprintf("%s %s/%s %d", e.GetType(), e.GetSlice().GetPod(), e.GetSlice().GetContainer(), e.GetSlice().GetLimitBytes()>>30)
			}
			return e.GetType().String()
		case err := <-ended:
			t.Fatalf("the watch ended: %v", err)
		case <-time.After(time.Minute):
			t.Fatal("no event")
		}
		return ""
	}
	want := func(list ...string) {
		t.Helper()
		for _, w := range list {
			if got := next(); got != w {
				t.Fatalf("event %q, want %q", got, w)
			}
		}
	}
	want("ADDED GPU-a", "ADDED GPU-b", "ADDED p/app 8", "SYNCED")
	// What is in use is no change for this watch: the next event is another's.
	s.change(func(v *monitor.View) { v.Slices[0].UsedBytes = 5 })
	s.change(func(v *monitor.View) { v.Slices[0].LimitBytes = 4 << 30 })
	want("CHANGED p/app 4")
	s.change(func(v *monitor.View) { v.Slices = nil; v.Cards = v.Cards[1:] })
	want("REMOVED p/app 4", "REMOVED GPU-b")
	stop()
	if err := <-ended; err == nil {
		t.Error("the watch ended without an error though its agent went away")
	}
}

func TestWatchOfUsage(t *testing.T) {
	path := filepath.Join(folder(t), "s.sock")
	s := newSource()
	serve(t, path, s)
	c := dial(t, path)
	enough := errors.New("enough")
	synced := false
	err := c.Watch(t.Context(), true, func(e *nodev1.WatchResponse) error {
		if e.GetType() == nodev1.WatchResponse_SYNCED {
			synced = true
			s.mu.Lock() // no Changed: found by looking
			s.view.Slices[0].UsedBytes = 3 << 30
			s.mu.Unlock()
		}
		if synced && e.GetSlice().GetUsedBytes() == 3<<30 {
			return enough
		}
		return nil
	})
	if !errors.Is(err, enough) {
		t.Fatal(err)
	}
}

func TestSocketIsRootsAndTheGroups(t *testing.T) {
	dir := folder(t)
	path := filepath.Join(dir, "s.sock")
	groups := filepath.Join(dir, "group")
	gid := os.Getgid()
	if os.Geteuid() == 0 {
		gid = 4711
	}
	if err := os.WriteFile(groups, fmt.Appendf(nil, "root:x:0:\ncarver:x:1:\ncarve:x:%d:me\n", gid), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]int{"carve": gid, "nosuch": os.Getegid()} {
		l, err := Listen(t.Context(), Options{Path: path, GroupFile: groups, Group: name})
		if err != nil {
			t.Fatal(err)
		}
		var st unix.Stat_t
		if err := unix.Lstat(path, &st); err != nil {
			t.Fatal(err)
		}
		if st.Mode&0o7777 != 0o660 || st.Mode&unix.S_IFMT != unix.S_IFSOCK || int(st.Uid) != os.Geteuid() || int(st.Gid) != want {
			t.Errorf("group %s: mode %o, owner %d:%d, want 660, %d:%d", name, st.Mode, st.Uid, st.Gid, os.Geteuid(), want)
		}
		if err := l.Close(); err != nil {
			t.Error(err)
		}
		if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("closed, the socket is still there: %v", err)
		}
	}
	if left, _ := filepath.Glob(filepath.Join(dir, ".sock-*")); left != nil {
		t.Errorf("left over: %v", left)
	}
}

func TestUnsafeFolderIsRefused(t *testing.T) {
	for _, mode := range []os.FileMode{0o777, 0o775} {
		dir := folder(t)
		if err := os.Chmod(dir, mode); err != nil {
			t.Fatal(err)
		}
		if _, err := Listen(t.Context(), Options{Path: filepath.Join(dir, "s.sock")}); err == nil || !strings.Contains(err.Error(), "written by others") {
			t.Errorf("mode %o: %v", mode, err)
		}
	}
	dir := folder(t)
	if err := os.Symlink("/", filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	if _, err := Listen(t.Context(), Options{Path: filepath.Join(dir, "link", "s.sock")}); err == nil || !strings.Contains(err.Error(), "no directory") {
		t.Errorf("a link in the folder's place: %v", err)
	}
}

// TestSecondAgentWaits: while one serves, another neither takes the socket nor
// gives up; it serves as soon as the first one ends.
func TestSecondAgentWaits(t *testing.T) {
	path := filepath.Join(folder(t), "s.sock")
	_, stop := serve(t, path, newSource())
	before, err := os.Lstat(path)
	if err != nil {
		t.Fatal(err)
	}
	impatient, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if _, err := Listen(impatient, Options{Path: path}); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("a second listener: %v", err)
	}
	if now, err := os.Lstat(path); err != nil || !os.SameFile(before, now) {
		t.Fatalf("the socket was replaced while its owner lives: %v", err)
	}
	dial(t, path)
	got := make(chan error, 1)
	go func() {
		l, err := Listen(t.Context(), Options{Path: path})
		if err == nil {
			err = l.Close()
		}
		got <- err
	}()
	stop()
	if err := <-got; err != nil {
		t.Errorf("after the first one's end: %v", err)
	}
}

// TestKilledAgentLeavesNoWedge kills a process that holds the socket: callers
// are told what is wrong, and the next agent serves under the same name.
func TestKilledAgentLeavesNoWedge(t *testing.T) {
	path := filepath.Join(folder(t), "s.sock")
	for range 3 {
		cmd := exec.Command("/proc/self/exe")
		cmd.Env = append(os.Environ(), "CARVE_TEST_HOLD_SOCKET="+path)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		line := make([]byte, 100)
		if n, err := out.Read(line); err != nil || string(line[:n]) != "held\n" {
			t.Fatalf("the holder said %q, %v", line[:n], err)
		}
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		_ = cmd.Wait()
		if _, err := os.Lstat(path); err != nil {
			t.Fatalf("the test is void: the killed process left no socket: %v", err)
		}
		if _, err := Dial(t.Context(), path); !errors.Is(err, ErrNoAgent) || !strings.Contains(err.Error(), "left over") {
			t.Errorf("a call to a dead agent: %v", err)
		}
	}
	serve(t, path, newSource())
	if _, err := dial(t, path).Cards(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func TestDialSaysWhatIsMissing(t *testing.T) {
	_, err := Dial(t.Context(), filepath.Join(folder(t), "none.sock"))
	if !errors.Is(err, ErrNoAgent) || !strings.Contains(err.Error(), "carve-node pod") {
		t.Errorf("%v", err)
	}
}

// TestGarbageHarmsNobody speaks nonsense to the socket and hangs on it, and
// others are served.
func TestGarbageHarmsNobody(t *testing.T) {
	path := filepath.Join(folder(t), "s.sock")
	serve(t, path, newSource())
	for _, talk := range []string{"", "GET / HTTP/1.1\r\n\r\n", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\xff\xff\xff\xff\xff", strings.Repeat("\x00", 1<<16)} {
		c, err := net.Dial("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		_, _ = c.Write([]byte(talk)) // it may be hung up on
	}
	if _, err := dial(t, path).Cards(t.Context()); err != nil {
		t.Fatal(err)
	}
}
