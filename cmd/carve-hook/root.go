package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/carve-gpu/carve/vgpu/gpu/inroot"
)

// maxEntries bounds how much of one directory of the image is looked at.
const maxEntries = 20000

// privateType and privateSource are how the agent has the file system of a
// share's files mounted.
const privateType, privateSource = "tmpfs", "carve"

// root is a container's root directory. All paths given to its methods are
// the container's own.
type root struct{ fd int }

func openRoot(dir string) (root, error) {
	fd, err := unix.Open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return root{}, fmt.Errorf("open the container's root %s: %w", dir, err)
	}
	return root{fd}, nil
}

func (r root) close() { unix.Close(r.fd) }

// open resolves a path as the container would, links included, and never
// leaves its root. The flags are open's.
func (r root) open(p string, flags uint64, mode uint64) (*os.File, error) {
	if flags&unix.O_PATH == 0 {
		// A device or a pipe in the image must not hold us up. openat2, stricter
		// than open, refuses these flags beside O_PATH, which opens nothing.
		flags |= unix.O_NOCTTY | unix.O_NONBLOCK
	}
	fd, err := inroot.Open(r.fd, p, flags, mode)
	if errors.Is(err, unix.ENOSYS) {
		return nil, errors.New("this kernel has no openat2; Linux 5.6 or later is needed")
	}
	if err != nil {
		return nil, &os.PathError{Op: "open in the container", Path: p, Err: err}
	}
	return os.NewFile(uintptr(fd), p), nil
}

// guarded checks that nobody outside of the container can move away what is
// mounted in a directory: it is a file system of its own, and the directory above
// it is the image's. In a volume, whoever else has the volume mounted may rename a
// mount point, and the kernel lets the mount go with it.
func (r root) guarded(dir string) error {
	var ids [3]string
	for i, p := range []string{"/", dir, dir + "/.."} {
		f, err := r.open(p, unix.O_PATH|unix.O_DIRECTORY, 0)
		if err != nil {
			return fmt.Errorf("look at where the share's files are: %w", err)
		}
		ids[i], err = mountID(f)
		f.Close()
		if err != nil {
			return fmt.Errorf("look at where the share's files are: %w", err)
		}
	}
	own, err := mountedAs(ids[1], privateType, privateSource)
	switch {
	case err != nil:
		return fmt.Errorf("look at where the share's files are: %w", err)
	case !own:
		return fmt.Errorf("%s of the container isn't the file system that was made for the share's files", dir)
	case ids[2] != ids[0]:
		return fmt.Errorf("a volume of the container is mounted at or above %s: whoever shares it could replace the share's files; mount it elsewhere", path.Dir(dir))
	}
	return nil
}

// mountedAs reports whether a mount of this process' namespace is of a type and
// has a source: a word that whoever mounted it chose, and no pod can.
func mountedAs(id, kind, source string) (bool, error) {
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return false, err
	}
	for line := range strings.Lines(string(b)) {
		before, after, ok := strings.Cut(line, " - ")
		if fields := strings.Fields(after); ok && len(fields) >= 2 && strings.HasPrefix(before, id+" ") {
			return fields[0] == kind && fields[1] == source, nil
		}
	}
	return false, fmt.Errorf("mount %s isn't listed", id)
}

// mountID is the number of the mount that a file was opened on.
func mountID(f *os.File) (string, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/self/fdinfo/%d", f.Fd()))
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(b)) {
		if id, ok := strings.CutPrefix(line, "mnt_id:"); ok {
			return strings.TrimSpace(id), nil
		}
	}
	return "", errors.New("the kernel doesn't say which mount a file is on")
}

// absent reports whether an error means that a path leads nowhere.
func absent(err error) bool {
	return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.ELOOP) || errors.Is(err, unix.ENAMETOOLONG)
}

// identity tells files apart.
type identity struct {
	device, inode uint64
}

// look opens a path without reading it and says what it is. A path that leads
// nowhere gives a nil file and no error.
func (r root) look(p string) (*os.File, unix.Stat_t, error) {
	var st unix.Stat_t
	f, err := r.open(p, unix.O_PATH, 0)
	if err != nil {
		if absent(err) {
			return nil, st, nil
		}
		return nil, st, err
	}
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		f.Close()
		return nil, st, &os.PathError{Op: "stat in the container", Path: p, Err: err}
	}
	return f, st, nil
}

func identityOf(st unix.Stat_t) identity { return identity{st.Dev, st.Ino} }

func regular(st unix.Stat_t) bool   { return st.Mode&unix.S_IFMT == unix.S_IFREG }
func directory(st unix.Stat_t) bool { return st.Mode&unix.S_IFMT == unix.S_IFDIR }

// entries lists a directory, as far as it is sane. One that isn't there, or
// can't be read, has none.
func (r root) entries(dir string) ([]os.DirEntry, identity) {
	f, err := r.open(dir, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, identity{}
	}
	defer f.Close()
	var st unix.Stat_t
	if unix.Fstat(int(f.Fd()), &st) != nil {
		return nil, identity{}
	}
	list, err := f.ReadDir(maxEntries)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, identityOf(st)
	}
	return list, identityOf(st)
}

// read reads a regular file up to a limit; one that isn't there is empty.
func (r root) read(p string, limit int64) []byte {
	f, err := r.open(p, unix.O_RDONLY, 0)
	if err != nil {
		return nil
	}
	defer f.Close()
	var st unix.Stat_t
	if unix.Fstat(int(f.Fd()), &st) != nil || !regular(st) {
		return nil
	}
	b, err := io.ReadAll(io.LimitReader(f, limit))
	if err != nil {
		return nil
	}
	return b
}

// bind puts source over target. The source is mounted read-only already, and a
// bind of it stays so.
func (r root) bind(source, target *os.File) error {
	err := unix.Mount(descriptor(source), descriptor(target), "", unix.MS_BIND, "")
	if err != nil {
		return fmt.Errorf("bind %s over %s of the image: %w", source.Name(), target.Name(), err)
	}
	return nil
}

func descriptor(f *os.File) string { return fmt.Sprintf("/proc/self/fd/%d", f.Fd()) }

// create makes an empty file for a mount to stand on, if there is nothing.
func (r root) create(p string) error {
	f, err := r.open(p, unix.O_CREAT|unix.O_WRONLY, 0o644)
	if err != nil {
		return fmt.Errorf("make a place for a library: %w", err)
	}
	return f.Close()
}

// link makes a symbolic link, if there is nothing by its name.
func (r root) link(target, p string) error {
	dir, err := r.open(path.Dir(p), unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return err
	}
	defer dir.Close()
	if err := unix.Symlinkat(target, int(dir.Fd()), path.Base(p)); err != nil && !errors.Is(err, unix.EEXIST) {
		return &os.LinkError{Op: "symlink in the container", Old: target, New: p, Err: err}
	}
	return nil
}
