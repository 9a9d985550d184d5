package image

import (
	"debug/elf"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sort"
	"strings"
)

// triplets are Debian's names of the library folders by machine.
var triplets = map[elf.Machine]string{
	elf.EM_X86_64:  "x86_64-linux-gnu",
	elf.EM_AARCH64: "aarch64-linux-gnu",
}

// DynamicProgram adds source, an ELF program of this machine, to the layer at
// name, with its interpreter and every library that it needs, directly or
// through another one, at the paths that Debian gives them. extra names
// libraries that the program loads only later, by dlopen, such as libdl.so.2.
//
// A library's place is found as the loader finds it: DT_RPATH/DT_RUNPATH with
// $ORIGIN, then the multiarch folders, then the plain ones. A static program
// has neither interpreter nor libraries and is added alone.
func (l *Layer) DynamicProgram(name, source string, extra ...string) error {
	libraries, err := Needed(source, extra...)
	if err != nil {
		return err
	}
	for _, lib := range libraries {
		l.File(lib.Name, lib.Source, 0o755)
	}
	l.File(merged(name), source, 0o755)
	return nil
}

// Library is a file that a program needs: Source on this machine, Name in an
// image with Debian's merged /usr.
type Library struct{ Name, Source string }

// Needed returns the interpreter and the libraries of an ELF program, sorted by
// Name. It fails on a file that is no ELF and on a library that is not found.
func Needed(program string, extra ...string) ([]Library, error) {
	found := map[string]Library{}
	f, err := elf.Open(program)
	if err != nil {
		return nil, fmt.Errorf("read program %s: %w", program, err)
	}
	defer f.Close()
	interpreter, err := interp(f)
	if err != nil {
		return nil, fmt.Errorf("read program %s: %w", program, err)
	}
	if interpreter == "" && len(extra) == 0 {
		return nil, nil
	}
	if interpreter != "" {
		// The loader is a library too (of its own SONAME): one entry for both.
		found[filepath.Base(interpreter)] = Library{merged(interpreter), interpreter}
	}
	if err := collect(f, program, found); err != nil {
		return nil, err
	}
	for _, lib := range extra {
		if err := need(lib, searchPath(f, program), program, found); err != nil {
			return nil, err
		}
	}
	all := make([]Library, 0, len(found))
	for _, lib := range found {
		all = append(all, lib)
	}
	sort.Slice(all, func(i, j int) bool { return all[i].Name < all[j].Name })
	return all, nil
}

func interp(f *elf.File) (string, error) {
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP {
			data := make([]byte, p.Filesz)
			if _, err := p.ReadAt(data, 0); err != nil {
				return "", fmt.Errorf("PT_INTERP: %w", err)
			}
			return strings.TrimRight(string(data), "\x00"), nil
		}
	}
	return "", nil
}

func collect(f *elf.File, file string, found map[string]Library) error {
	names, err := f.ImportedLibraries()
	if err != nil {
		return fmt.Errorf("read the needed libraries of %s: %w", file, err)
	}
	dirs := searchPath(f, file)
	for _, name := range names {
		if err := need(name, dirs, file, found); err != nil {
			return err
		}
	}
	return nil
}

func need(name string, dirs []string, by string, found map[string]Library) error {
	if _, ok := found[filepath.Base(name)]; ok {
		return nil
	}
	candidates := []string{name}
	if !filepath.IsAbs(name) {
		candidates = nil
		for _, dir := range dirs {
			candidates = append(candidates, filepath.Join(dir, name))
		}
	}
	for _, path := range candidates {
		f, err := elf.Open(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		} else if err != nil {
			return fmt.Errorf("read library %s, needed by %s: %w", path, by, err)
		}
		defer f.Close()
		found[filepath.Base(name)] = Library{merged(path), path}
		return collect(f, path, found)
	}
	return fmt.Errorf("library %s, needed by %s: in none of %s", name, by, strings.Join(dirs, ", "))
}

func searchPath(f *elf.File, file string) []string {
	var dirs []string
	for _, tag := range []elf.DynTag{elf.DT_RUNPATH, elf.DT_RPATH} {
		values, err := f.DynString(tag)
		if err != nil {
			continue // no dynamic section: nothing to search for
		}
		for _, value := range values {
			for _, dir := range strings.Split(value, ":") {
				dir = strings.NewReplacer("$ORIGIN", filepath.Dir(file), "${ORIGIN}", filepath.Dir(file)).Replace(dir)
				if filepath.IsAbs(dir) {
					dirs = append(dirs, filepath.Clean(dir))
				}
			}
		}
	}
	if triplet, ok := triplets[f.Machine]; ok {
		dirs = append(dirs, "/lib/"+triplet, "/usr/lib/"+triplet)
	}
	for _, dir := range []string{"/lib64", "/usr/lib64", "/lib", "/usr/lib", "/usr/local/lib"} {
		if _, err := os.Stat(dir); err == nil {
			dirs = append(dirs, dir)
		}
	}
	return dirs
}

// merged returns where path lies once /bin, /sbin, /lib and /lib64 are links
// into /usr, as they are in Base: a layer that brought its own /lib would
// replace the link and hide what lies below.
func merged(path string) string {
	for _, dir := range []string{"/bin", "/sbin", "/lib", "/lib64"} {
		if strings.HasPrefix(path, dir+"/") {
			return "/usr" + path
		}
	}
	return path
}
