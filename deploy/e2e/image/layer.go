package image

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"sort"
	"strings"
)

// Layer is a set of files, directories and links by absolute path. Parents that
// are not named are made with mode 0755. All belong to root. A path that is
// added twice keeps what was added last.
//
// Mistakes, such as a relative path, are kept and returned when the layer is
// written, so that a layer can be put together without a check in each line.
type Layer struct {
	entries map[string]entry
	err     error
}

type entry struct {
	kind   byte // a tar.Type*
	mode   fs.FileMode
	data   []byte
	source string // file on this machine, instead of data
	target string // of a symlink
}

// Dir adds a directory. Of mode, the permission bits and fs.ModeSticky count.
func (l *Layer) Dir(name string, mode fs.FileMode) *Layer {
	return l.add(name, entry{kind: tar.TypeDir, mode: mode})
}

// File adds a copy of source, a file of this machine, read when the layer is
// written. A source that is a symlink is followed.
func (l *Layer) File(name, source string, mode fs.FileMode) *Layer {
	return l.add(name, entry{kind: tar.TypeReg, mode: mode, source: source})
}

// Bytes adds a file with this content.
func (l *Layer) Bytes(name string, data []byte, mode fs.FileMode) *Layer {
	return l.add(name, entry{kind: tar.TypeReg, mode: mode, data: data})
}

// Symlink adds a symbolic link that points to target.
func (l *Layer) Symlink(name, target string) *Layer {
	return l.add(name, entry{kind: tar.TypeSymlink, mode: 0o777, target: target})
}

func (l *Layer) add(name string, e entry) *Layer {
	if !path.IsAbs(name) || path.Clean(name) != name || name == "/" {
		l.err = errors.Join(l.err, fmt.Errorf("path %q in the image: want an absolute, clean path", name))
		return l
	}
	if l.entries == nil {
		l.entries = map[string]entry{}
	}
	l.entries[name] = e
	return l
}

// write writes the layer's tar: sorted by path, parents first, no owner names,
// no times.
func (l *Layer) write(w io.Writer) error {
	if l.err != nil {
		return l.err
	}
	all := map[string]entry{}
	for name, e := range l.entries {
		all[name] = e
		for dir := path.Dir(name); dir != "/"; dir = path.Dir(dir) {
			if parent, ok := l.entries[dir]; ok && parent.kind != tar.TypeDir {
				return fmt.Errorf("%s: its parent %s is not a directory", name, dir)
			} else if !ok {
				all[dir] = entry{kind: tar.TypeDir, mode: 0o755}
			}
		}
	}
	names := make([]string, 0, len(all))
	for name := range all {
		names = append(names, name)
	}
	sort.Strings(names)
	out := tar.NewWriter(w)
	for _, name := range names {
		if err := all[name].write(out, name); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return out.Close()
}

func (e entry) write(out *tar.Writer, name string) error {
	header := &tar.Header{
		Typeflag: e.kind, Name: strings.TrimPrefix(name, "/"), Linkname: e.target,
		Mode: int64(e.mode.Perm()), ModTime: epoch, Format: tar.FormatPAX,
	}
	if e.mode&fs.ModeSticky != 0 {
		header.Mode |= 0o1000
	}
	if e.kind == tar.TypeDir {
		header.Name += "/"
	}
	if e.kind != tar.TypeReg {
		return out.WriteHeader(header)
	}
	var src io.Reader = bytes.NewReader(e.data)
	header.Size = int64(len(e.data))
	if e.source != "" {
		f, err := os.Open(e.source)
		if err != nil {
			return err
		}
		defer f.Close()
		info, err := f.Stat()
		if err != nil {
			return err
		}
		if !info.Mode().IsRegular() {
			return fmt.Errorf("%s is not a regular file", e.source)
		}
		src, header.Size = f, info.Size()
	}
	if err := out.WriteHeader(header); err != nil {
		return err
	}
	_, err := io.Copy(out, src)
	return err
}
