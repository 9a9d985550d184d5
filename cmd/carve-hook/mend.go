package main

import (
	"errors"
	"fmt"
	"os"
	"path"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// mender works on one container.
type mender struct {
	root root
	// dir holds the mounted libraries, named libraries.
	dir       string
	libraries []string
	// fronts are those, by name without version, that win over the image's.
	fronts      []string
	libraryPath []string
}

// mend does all that the image needs.
func (m mender) mend() error {
	if err := m.besideLoader(); err != nil {
		return err
	}
	if err := m.unversioned(m.dir); err != nil {
		return err
	}
	return m.coverCopies()
}

// mounted opens a library as it was mounted for the container. It must be on a
// read-only mount: a bind of it is as writable as it is.
func (m mender) mounted(name string) (*os.File, identity, error) {
	p := path.Join(m.dir, name)
	f, st, err := m.root.look(p)
	if err != nil {
		return nil, identity{}, err
	}
	if f == nil || !regular(st) {
		return nil, identity{}, fmt.Errorf("%s isn't mounted in the container", p)
	}
	var fs unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &fs); err != nil {
		f.Close()
		return nil, identity{}, fmt.Errorf("look at %s of the container: %w", p, err)
	}
	if fs.Flags&unix.ST_RDONLY == 0 {
		f.Close()
		return nil, identity{}, fmt.Errorf("%s is mounted writable in the container", p)
	}
	return f, identityOf(st), nil
}

// besideLoader puts the libraries into the image's own library directories.
// The driver's lie in the directory that its packages use, which a loader of
// another distribution doesn't search; but every loader finds what lies beside
// its libc. Images without a glibc have no use for the libraries.
func (m mender) besideLoader() error {
	_, own := m.root.entries(m.dir)
	done := []identity{own}
	for _, dir := range standardDirs {
		libc, st, err := m.root.look(path.Join(dir, "libc.so.6"))
		if err != nil {
			return err
		}
		if libc == nil {
			continue
		}
		libc.Close()
		d, dst, err := m.root.look(dir)
		if err != nil {
			return err
		}
		if d == nil {
			continue
		}
		d.Close()
		if !regular(st) || !directory(dst) || slices.Contains(done, identityOf(dst)) {
			continue
		}
		done = append(done, identityOf(dst))
		for _, name := range m.libraries {
			if err := m.place(name, path.Join(dir, name)); err != nil {
				return err
			}
		}
		if err := m.unversioned(dir); err != nil {
			return err
		}
	}
	return nil
}

// place binds a mounted library to a further path.
func (m mender) place(name, at string) error {
	source, id, err := m.mounted(name)
	if err != nil {
		return err
	}
	defer source.Close()
	target, st, err := m.root.look(at)
	if err != nil {
		return err
	}
	if target == nil {
		if err := m.root.create(at); err != nil {
			return err
		}
		if target, st, err = m.root.look(at); err != nil {
			return err
		}
		if target == nil {
			return fmt.Errorf("%s of the image leads nowhere", at)
		}
	}
	defer target.Close()
	if identityOf(st) == id {
		return nil
	}
	if !regular(st) {
		return fmt.Errorf("%s of the image is no file", at)
	}
	return m.root.bind(source, target)
}

// unversioned makes the name that programs link and some dlopen: libcuda.so.
func (m mender) unversioned(dir string) error {
	if !slices.Contains(m.libraries, "libcuda.so.1") || slices.Contains(m.libraries, "libcuda.so") {
		return nil
	}
	return m.root.link("libcuda.so.1", path.Join(dir, "libcuda.so"))
}

// coverCopies binds the fronts over every other copy of their libraries that
// the image holds where a loader could find it: forward-compatibility packages,
// drivers that were installed into the image, copies beside a program.
func (m mender) coverCopies() error {
	sources := map[string]*os.File{}
	ids := map[string]identity{}
	for _, name := range m.fronts {
		f, id, err := m.mounted(name + ".1")
		if err != nil {
			return err
		}
		defer f.Close()
		sources[name], ids[name] = f, id
	}
	if len(sources) == 0 {
		return nil
	}
	for _, dir := range searchDirs(m.root, m.libraryPath, time.Now) {
		if path.Base(dir) == "stubs" {
			continue // for linking only: they hold no driver
		}
		entries, _ := m.root.entries(dir)
		for _, e := range entries {
			library, ok := libraryOf(e.Name())
			source := sources[library]
			if !ok || source == nil || strings.HasSuffix(e.Name(), ".conf") {
				continue
			}
			if err := m.cover(source, ids[library], path.Join(dir, e.Name())); err != nil {
				return err
			}
		}
	}
	return nil
}

// cover binds a front over one file, and makes sure that it is there.
func (m mender) cover(source *os.File, id identity, p string) error {
	target, st, err := m.root.look(p)
	if err != nil {
		return err
	}
	if target == nil {
		return nil // a link that leads nowhere
	}
	defer target.Close()
	if !regular(st) || identityOf(st) == id {
		return nil
	}
	if err := m.root.bind(source, target); err != nil {
		return err
	}
	now, st, err := m.root.look(p)
	if err != nil {
		return err
	}
	if now != nil {
		now.Close()
	}
	if now == nil || identityOf(st) != id {
		return errors.New("the image's " + p + " can't be covered by carve's library")
	}
	return nil
}
