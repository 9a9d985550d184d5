// Package inroot opens files below a directory as a process with that directory for
// its root would.
package inroot

import (
	"errors"
	"time"

	"golang.org/x/sys/unix"
)

// Patience is for how long one file is tried to be opened.
const Patience = 10 * time.Second

// Open resolves a path as the container would, links included, and never leaves the
// root. flags and mode are those of open(2). It fails with ENOSYS before Linux 5.6.
//
// A rename or a mount anywhere on the machine while a path with ".." in it, or a link
// with one, is resolved makes the kernel give up with EAGAIN rather than guess (openat2(2)).
// On a node where containers start all the time that isn't rare, so it is tried again.
func Open(root int, path string, flags, mode uint64) (int, error) {
	how := unix.OpenHow{Flags: flags | unix.O_CLOEXEC, Mode: mode, Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS}
	begin := time.Now()
	for tries := 0; ; tries++ {
		fd, err := unix.Openat2(root, path, &how)
		if !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EINTR) || time.Since(begin) > Patience {
			return fd, err
		}
		if tries >= 100 {
			time.Sleep(time.Millisecond)
		}
	}
}
