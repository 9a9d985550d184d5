package inroot

import (
	"errors"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func open(t *testing.T, dir string) int {
	t.Helper()
	fd, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	return fd
}

func TestStaysInTheRoot(t *testing.T) {
	dir := t.TempDir()
	root := filepath.Join(dir, "root")
	for _, d := range []string{"root/etc", "outside"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for name, content := range map[string]string{"root/etc/file": "inside", "outside/file": "outside", "root/file": "top"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for link, to := range map[string]string{"absolute": "/etc/file", "up": "../../../outside/file", "top": "../file"} {
		if err := os.Symlink(to, filepath.Join(root, link)); err != nil {
			t.Fatal(err)
		}
	}
	fd := open(t, root)
	for path, want := range map[string]string{"absolute": "inside", "/etc/file": "inside", "top": "top", "../../file": "top"} {
		f, err := Open(fd, path, unix.O_RDONLY, 0)
		if err != nil {
			t.Errorf("%s: %v", path, err)
			continue
		}
		content := make([]byte, 16)
		n, _ := unix.Read(f, content)
		unix.Close(f)
		if string(content[:n]) != want {
			t.Errorf("%s has %q, want %q", path, content[:n], want)
		}
	}
	if _, err := Open(fd, "up", unix.O_RDONLY, 0); !errors.Is(err, unix.ENOENT) {
		t.Errorf("a link out of the root: %v", err)
	}
}

// Elsewhere on the node things are renamed and mounted all the time.
func TestOthersRename(t *testing.T) {
	dir := t.TempDir()
	if err := os.MkdirAll(filepath.Join(dir, "root/usr/lib/carve"), 0o755); err != nil {
		t.Fatal(err)
	}
	var stop atomic.Bool
	var others sync.WaitGroup
	for _, name := range []string{"x", "y", "z"} {
		a, b := filepath.Join(dir, name), filepath.Join(dir, name+"2")
		if err := os.Mkdir(a, 0o755); err != nil {
			t.Fatal(err)
		}
		others.Go(func() {
			for !stop.Load() {
				if err := errors.Join(os.Rename(a, b), os.Rename(b, a)); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	root := open(t, filepath.Join(dir, "root"))
	how := unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT}
	met := 0
	// Until it is sure that without another try some would have failed.
	for deadline := time.Now().Add(30 * time.Second); met < 20 && time.Now().Before(deadline); {
		if fd, err := unix.Openat2(root, "/usr/lib/carve/..", &how); errors.Is(err, unix.EAGAIN) {
			met++
		} else if err == nil {
			unix.Close(fd)
		}
		fd, err := Open(root, "/usr/lib/carve/..", unix.O_PATH|unix.O_DIRECTORY, 0)
		if err != nil {
			t.Fatal(err)
		}
		unix.Close(fd)
	}
	stop.Store(true)
	others.Wait()
	if met == 0 {
		t.Skip("nothing got in the way on this machine")
	}
}
