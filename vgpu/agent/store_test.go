package agent

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/carve-gpu/carve/api"
)

// readOnly makes a directory a read-only file system, until the function that it
// returns is called.
func readOnly(t *testing.T, dir string) (writable func()) {
	t.Helper()
	err := unix.Mount(dir, dir, "", unix.MS_BIND, "")
	if err == nil {
		err = unix.Mount("", dir, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, "")
	}
	if err != nil {
		t.Fatal(err)
	}
	done := false
	writable = func() {
		if !done {
			done = true
			if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
				t.Error(err)
			}
		}
	}
	t.Cleanup(writable)
	return writable
}

// A node that can't keep slices says so to everybody and takes no pods; what
// waited is served when it can again.
func TestANodeThatCannotKeepSlicesIsNotReady(t *testing.T) {
	for _, name := range []string{"the journal", "the run directory"} {
		t.Run(name, func(t *testing.T) {
			n := startNode(t)
			n.link()
			eventually(t, "the node is ready", func() bool { return n.Ready() == nil })
			dir := n.journal.dir
			if name != "the journal" {
				dir = n.RunDir
			}
			writable := readOnly(t, dir)
			n.api.setPod(podWith(t, "uid-1", grantOf("uid-1", 1, map[string][]api.CardGrant{"app": shareOf(cardA, 100, 0)})))
			cause := unix.EROFS.Error()
			eventually(t, "the node isn't ready and says why", func() bool {
				err := n.Ready()
				return err != nil && strings.Contains(err.Error(), "slices can't be kept") && strings.Contains(err.Error(), cause)
			})
			if _, err := n.Slice(RuntimeContainer{PodUID: "uid-1", Name: "app", Asked: true}); err == nil || !strings.Contains(err.Error(), cause) {
				t.Errorf("the hook: %v", err)
			}
			short, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
			defer cancel()
			if err := n.AwaitPrepared(short, "default", "pod-uid-1", "app"); err == nil || !strings.Contains(err.Error(), cause) {
				t.Errorf("the device plugin: %v", err)
			}
			eventually(t, "an event on the node", func() bool { return strings.Contains(n.api.said(), reasonUnwritable+": ") })
			writable()
			eventually(t, "the slice is prepared", func() bool { return n.prepared("uid-1", "app") })
			eventually(t, "the node is ready again", func() bool { return n.Ready() == nil })
			eventually(t, "the other event", func() bool { return strings.Contains(n.api.said(), reasonWritable+": ") })
			n.api.deletePod("uid-1")
			eventually(t, "nothing is left", func() bool { return len(n.leftovers()) == 0 })
			for _, f := range []string{filepath.Join(n.journal.dir, ".new-try"), filepath.Join(n.RunDir, ".try")} {
				if _, err := os.Stat(f); !os.IsNotExist(err) {
					t.Errorf("%s: %v", f, err)
				}
			}
		})
	}
}
