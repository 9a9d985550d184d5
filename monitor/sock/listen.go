package sock

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// maxPath is what fits in a socket's address with its closing zero
// (sockaddr_un, 108 bytes).
const maxPath = 107

// Options say where the socket is and whose.
type Options struct {
	// Path of the socket. Its directory must belong to the caller and be
	// writable by nobody else; it is made if it is missing.
	Path string
	// GroupFile is the /etc/group of the node in which Group is looked for. The
	// socket is the caller's own group's where that has no such group.
	GroupFile, Group string
}

// Listener is the agent's socket. While it is open, no other process of this
// package takes its place.
type Listener struct {
	*net.UnixListener
	path string
	lock *os.File
	// own is the socket's file as this process made it.
	own os.FileInfo
}

// Listen makes the socket, in the place of one whose owner has ended. While
// another process serves it, Listen waits for that one to end, until ctx ends:
// two agents overlap for a moment while a DaemonSet rolls.
//
// The socket gets its owner, group and mode before it gets its name, so nobody
// can open it with other ones.
func Listen(ctx context.Context, o Options) (*Listener, error) {
	fail := func(err error) (*Listener, error) {
		return nil, fmt.Errorf("listen on %s: %w", o.Path, err)
	}
	dir := filepath.Dir(o.Path)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fail(err)
	}
	if err := safe(dir); err != nil {
		return fail(err)
	}
	gid, err := groupID(o.GroupFile, o.Group)
	if err != nil {
		return fail(err)
	}
	lock, err := acquire(ctx, o.Path+".lock")
	if err != nil {
		return fail(err)
	}
	l, err := replace(dir, o.Path, gid)
	if err != nil {
		lock.Close()
		return fail(err)
	}
	l.lock = lock
	return l, nil
}

// safe refuses a directory in which others could put a socket of their own.
func safe(dir string) error {
	var st unix.Stat_t
	if err := unix.Lstat(dir, &st); err != nil {
		return err
	}
	switch {
	case st.Mode&unix.S_IFMT != unix.S_IFDIR:
		return fmt.Errorf("%s is no directory", dir)
	case int(st.Uid) != os.Geteuid():
		return fmt.Errorf("%s belongs to user %d, it must be user %d's", dir, st.Uid, os.Geteuid())
	case st.Mode&0o022 != 0:
		return fmt.Errorf("%s can be written by others (mode %o)", dir, st.Mode&0o7777)
	}
	return nil
}

// groupID looks a group up, -1 if it isn't there. The node's own file is read:
// in a container, the C library would read the image's.
func groupID(file, name string) (int, error) {
	if file == "" || name == "" {
		return -1, nil
	}
	f, err := os.Open(file)
	if errors.Is(err, fs.ErrNotExist) {
		return -1, nil
	}
	if err != nil {
		return 0, err
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		fields := strings.Split(lines.Text(), ":")
		if len(fields) < 3 || fields[0] != name {
			continue
		}
		id, err := strconv.ParseUint(fields[2], 10, 31)
		if err != nil {
			return 0, fmt.Errorf("group %s in %s: %w", name, file, err)
		}
		return int(id), nil
	}
	return -1, nil
}

// acquire takes the lock that the socket's owner holds. The kernel gives it
// back when a process dies, however it dies.
func acquire(ctx context.Context, path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, err
	}
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return f, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) {
			f.Close()
			return nil, fmt.Errorf("lock %s: %w", path, err)
		}
		select {
		case <-ctx.Done():
			f.Close()
			return nil, fmt.Errorf("another process serves it: %w", ctx.Err())
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// replace makes the socket in a private directory and moves it to its place.
func replace(dir, path string, gid int) (*Listener, error) {
	if old, err := filepath.Glob(filepath.Join(dir, ".sock-*")); err == nil {
		for _, o := range old {
			os.RemoveAll(o) // of one that died in between; the lock is ours
		}
	}
	private, err := os.MkdirTemp(dir, ".sock-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(private)
	made := filepath.Join(private, "s")
	if len(made) > maxPath || len(path) > maxPath {
		return nil, fmt.Errorf("the path is too long for a socket: allowed are %d bytes", maxPath)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: made, Net: "unix"})
	if err != nil {
		return nil, err
	}
	l.SetUnlinkOnClose(false)
	err = os.Chown(made, os.Geteuid(), gid)
	if err == nil {
		err = os.Chmod(made, 0o660)
	}
	var own os.FileInfo
	if err == nil {
		own, err = os.Lstat(made)
	}
	if err == nil {
		err = os.Rename(made, path)
	}
	if err != nil {
		l.Close()
		return nil, err
	}
	return &Listener{UnixListener: l, path: path, own: own}, nil
}

// Close ends the listener, removes the socket if it is still this one's, and
// lets another process serve.
func (l *Listener) Close() error {
	err := l.UnixListener.Close()
	if now, e := os.Lstat(l.path); e == nil && os.SameFile(now, l.own) {
		err = errors.Join(err, os.Remove(l.path))
	}
	if l.lock != nil {
		err = errors.Join(err, l.lock.Close())
		l.lock = nil
	}
	return err
}
