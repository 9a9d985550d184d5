package nvidiaconfig_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fsnotify/fsnotify"
	"golang.org/x/sys/unix"

	"github.com/carve-gpu/carve/api/v1alpha1"
	"github.com/carve-gpu/carve/deviceplugin/nvidiaconfig"
)

// follows is a follower with what it was heard to say.
type follows struct {
	*nvidiaconfig.Follower
	t    *testing.T
	stop func()

	mu    sync.Mutex
	set   string // "?" until it is known
	said  []string
	cards []nvidiaconfig.Card
}

func follow(t *testing.T, path, keep string) *follows {
	t.Helper()
	return followWith(t, path, keep, 0)
}

// followWith has a file that is gone forgotten after another time, 0 for the usual one.
func followWith(t *testing.T, path, keep string, grace time.Duration) *follows {
	t.Helper()
	f := &follows{t: t, set: "?", cards: node(2)}
	f.Follower = nvidiaconfig.NewFollower(nvidiaconfig.FollowerConfig{
		Path: path, Keep: keep, Log: slog.New(slog.DiscardHandler),
		Cards: func() []nvidiaconfig.Card { f.mu.Lock(); defer f.mu.Unlock(); return f.cards },
		Set: func(_ []nvidiaconfig.Card, s map[string]v1alpha1.Sharing) {
			f.mu.Lock()
			defer f.mu.Unlock()
			f.set = words(s)
		},
		Changed: func(fault bool, sentence string) {
			f.mu.Lock()
			defer f.mu.Unlock()
			f.said = append(f.said, fmt.Sprint(fault, " ", sentence))
		},
	})
	if grace > 0 {
		f.SetGrace(grace)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := f.Run(ctx); err != nil {
			t.Error(err)
		}
	}()
	f.stop = func() { cancel(); <-done }
	t.Cleanup(f.stop)
	return f
}

func (f *follows) wants(what, set, fault string) {
	f.t.Helper()
	var is, why string
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		f.mu.Lock()
		is = f.set
		f.mu.Unlock()
		if why = f.Status().Fault; is == set && (why == "") == (fault == "") && strings.Contains(why, fault) {
			return
		}
	}
	f.t.Fatalf("%s: in force is %q, fault %q; want %q, %q", what, is, why, set, fault)
}

func (f *follows) heard(part string) {
	f.t.Helper()
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		f.mu.Lock()
		all := strings.Join(f.said, "\n")
		f.mu.Unlock()
		if strings.Contains(all, part) {
			return
		}
	}
	f.t.Fatalf("nobody said %q: %q", part, f.said)
}

// mounted writes files as the kubelet mounts a ConfigMap: links into a directory that
// is swapped whole.
func mounted(t *testing.T, dir string, files map[string]string) {
	t.Helper()
	data, err := os.MkdirTemp(dir, "..data-")
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(data, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(filepath.Base(data), filepath.Join(dir, "..new")); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(filepath.Join(dir, "..new"), filepath.Join(dir, "..data")); err != nil {
		t.Fatal(err)
	}
	entries, _ := os.ReadDir(dir)
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), ".") && files[e.Name()] == "" {
			os.Remove(filepath.Join(dir, e.Name()))
		}
	}
	for name := range files {
		if err := os.Symlink(filepath.Join("..data", name), filepath.Join(dir, name)); err != nil && !os.IsExist(err) {
			t.Fatal(err)
		}
	}
}

func times(n int) string {
	return slicing + fmt.Sprintf("    - {name: nvidia.com/gpu, devices: [0], replicas: %d}\n", n)
}

// A node may have no inotify instances left: the file is in force all the same.
func TestAFileThatCantBeWatched(t *testing.T) {
	was := *nvidiaconfig.NewWatcher
	*nvidiaconfig.NewWatcher = func() (*fsnotify.Watcher, error) { return nil, errors.New("too many open files") }
	t.Cleanup(func() { *nvidiaconfig.NewWatcher = was })
	path := filepath.Join(t.TempDir(), "config.yaml")
	if err := os.WriteFile(path, []byte(times(4)), 0o644); err != nil {
		t.Fatal(err)
	}
	f := follow(t, path, filepath.Join(t.TempDir(), "kept.json"))
	f.wants("it is there", "0=4×timeslice", "")
	f.stop()
}

func TestAFileIsFollowed(t *testing.T) {
	dir := t.TempDir()
	path, keep := filepath.Join(dir, "config.yaml"), filepath.Join(t.TempDir(), "kept.json")
	write := func(s string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(s), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	f := follow(t, path, keep)
	f.wants("a file that isn't there", "", "no such file")
	write(times(4))
	f.wants("it is there", "0=4×timeslice", "")
	f.heard("false NVIDIA's configuration " + path + " is in force: card 0 in 4 replicas of mode timeslice")
	write(times(2))
	f.wants("it has changed", "0=2×timeslice", "")
	write(strings.Replace(times(2), "timeSlicing", "timeslicing", 1))
	f.wants("a misspelt key", "", "")
	f.heard("false NVIDIA's configuration " + path + " is in force: it gives no card in replicas; without effect: sharing.timeslicing")
	write(times(2))
	f.wants("spelt right", "0=2×timeslice", "")
	write(times(1))
	f.wants("a wrong one", "0=2×timeslice", "1 isn't allowed")
	f.heard("true NVIDIA's configuration isn't taken: " + path + ": sharing.timeSlicing.resources[0].replicas: 1 isn't allowed; allowed are 2 to 256 (leave the cards out that are to stay whole); what it said before stays in force")
	f.stop()

	// What was good outlives the process.
	f = follow(t, path, keep)
	f.wants("a wrong one, after a restart", "0=2×timeslice", "1 isn't allowed")
	// So does it where the cards don't suit what is new.
	write("sharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 20}]}}")
	f.wants("a good one", "0=20×mps 1=20×mps", "")
	f.mu.Lock()
	f.cards = []nvidiaconfig.Card{{UUID: "GPU-0", Model: "Tesla P40", Major: 6}}
	f.mu.Unlock()
	f.Look()
	f.wants("cards that can't be given so", "", "takes 16 clients at most")
	write(times(3))
	f.wants("mended", "0=3×timeslice", "")
}

func TestADirectoryIsFollowedByTheNodesLabel(t *testing.T) {
	dir, keep := t.TempDir(), filepath.Join(t.TempDir(), "kept.json")
	f := follow(t, dir, keep)
	time.Sleep(20 * time.Millisecond) // it could only be too fast
	f.wants("the label isn't known", "?", "")
	f.SetLabel("")
	f.wants("an empty directory", "", "")
	mounted(t, dir, map[string]string{"a100": times(4), "t4": times(2)})
	f.SetLabel("a100")
	f.wants("the label's file", "0=4×timeslice", "")
	f.SetLabel("t4")
	f.wants("another one", "0=2×timeslice", "")
	f.SetLabel("h100")
	f.wants("one that isn't there", "0=2×timeslice", `label nvidia.com/device-plugin.config of the node says "h100", and there is no such file; there are: a100, t4`)
	f.heard("what " + filepath.Join(dir, "t4") + " said stays in force")
	f.SetLabel("../a100")
	f.wants("one from elsewhere", "0=2×timeslice", "no such file")
	f.SetLabel("")
	f.wants("several, and no label", "", "")
	mounted(t, dir, map[string]string{"a100": times(4), "config.yaml": times(5)})
	f.wants("config.yaml", "0=5×timeslice", "")
	mounted(t, dir, map[string]string{"a100": times(4), "config.yaml": times(5), "default": times(6)})
	f.wants("default", "0=6×timeslice", "")
	mounted(t, dir, map[string]string{"any": times(7)})
	f.wants("the only one", "0=7×timeslice", "")
	f.stop()
	// The API server is away at the start: the label isn't known.
	f = followWith(t, dir, keep, time.Millisecond)
	f.wants("what was in force", "0=7×timeslice", "")
	f.SetLabel("")
	mounted(t, dir, nil)
	f.wants("the ConfigMap is gone", "", "")
	if _, err := os.Stat(keep); !os.IsNotExist(err) {
		t.Errorf("it is remembered: %v", err)
	}
}

// node-23: a ConfigMap that is made anew, or a mount that is swapped, leaves nothing to read for
// a moment. That un-shares no card; a deletion that lasts does.
func TestAFileThatIsGoneForAMoment(t *testing.T) {
	for name, c := range map[string]struct {
		label  string
		remove func(dir string) error
		put    func(t *testing.T, dir, text string)
		path   string // below dir
		after  string // the fault once it is forgotten
	}{
		"a ConfigMap": {
			remove: func(dir string) error { return os.Remove(filepath.Join(dir, "..data")) },
			put:    func(t *testing.T, dir, text string) { mounted(t, dir, map[string]string{"any": text}) },
		},
		"one that a label chooses": {
			label:  "any",
			remove: func(dir string) error { return os.Remove(filepath.Join(dir, "..data")) },
			put: func(t *testing.T, dir, text string) {
				mounted(t, dir, map[string]string{"any": text, "other": times(9)})
			},
			after: "there is no such file; there are: none",
		},
		"a directory": {
			path:   "config",
			remove: func(dir string) error { return os.RemoveAll(filepath.Join(dir, "config")) },
			put: func(t *testing.T, dir, text string) {
				if err := os.MkdirAll(filepath.Join(dir, "config"), 0o755); err != nil {
					t.Fatal(err)
				}
				mounted(t, filepath.Join(dir, "config"), map[string]string{"any": text})
			},
			after: "no such file",
		},
		"a file": {
			path:   "config.yaml",
			remove: func(dir string) error { return os.Remove(filepath.Join(dir, "config.yaml")) },
			put: func(t *testing.T, dir, text string) {
				if err := os.WriteFile(filepath.Join(dir, "config.yaml"), []byte(text), 0o644); err != nil {
					t.Fatal(err)
				}
			},
			after: "no such file",
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir, keep := t.TempDir(), filepath.Join(t.TempDir(), "kept.json")
			path := filepath.Join(dir, c.path)
			c.put(t, dir, times(4))
			f := followWith(t, path, keep, time.Hour)
			f.SetLabel(c.label)
			f.wants("it is there", "0=4×timeslice", "")
			if err := c.remove(dir); err != nil {
				t.Fatal(err)
			}
			f.wants("it is gone", "0=4×timeslice", "it is gone")
			f.heard("it is gone; what it said before stays in force for 1h0m0s, should it come back")
			c.put(t, dir, times(5))
			f.wants("it is back", "0=5×timeslice", "")
			f.stop()
			// A restart in such a moment, and then it stays away.
			if err := c.remove(dir); err != nil {
				t.Fatal(err)
			}
			f = followWith(t, path, keep, 300*time.Millisecond)
			f.SetLabel(c.label)
			f.wants("it is gone, after a restart", "0=5×timeslice", "it is gone")
			f.wants("it stays away", "", c.after)
			f.heard("no card is given in replicas")
			if _, err := os.Stat(keep); !os.IsNotExist(err) {
				t.Errorf("it is remembered: %v", err)
			}
		})
	}
}

// What isn't a file holds nobody, and is said.
func TestWhatIsNoFileIsRefused(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config.yaml")
	if err := unix.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	f := follow(t, path, filepath.Join(t.TempDir(), "kept.json"))
	f.wants("a pipe", "", "a named pipe is in the file's place, and only a regular file is read: put one there")
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(times(4)), 0o644); err != nil {
		t.Fatal(err)
	}
	f.wants("a file", "0=4×timeslice", "")
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/dev/zero", path); err != nil {
		t.Fatal(err)
	}
	f.wants("a device", "0=4×timeslice", "a device is in the file's place")
	if err := os.WriteFile(path+".new", make([]byte, 1<<20), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		t.Fatal(err)
	}
	f.wants("a large file", "0=4×timeslice", "it has more than 65536 bytes")
}
