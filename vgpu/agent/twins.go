package agent

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"

	"github.com/carve-gpu/carve/vgpu/gpu"
	"github.com/carve-gpu/carve/vgpu/twin"
)

// twins are the front libraries made for the driver of this node.
type twins struct {
	// of says which files they were made of.
	of string
	// installed names them, or the fronts as they were built where the driver's
	// file is strange.
	installed Installed
	// sums are of the twins' content, by path.
	sums map[string][sha256.Size]byte
	// fault says why containers get a front as it was built, "" if none does.
	fault string
	// again asks for another try: the disk was at fault, not the driver.
	again bool
}

// twinned gives what containers get for a driver. It makes new twins when the
// driver's files have changed, under names that no other content ever had: what
// a container has mapped is never touched.
func (a *Agent) twinned(files gpu.Files, version string) Installed {
	a.mu.Lock()
	have := a.twins
	a.mu.Unlock()
	next := twins{installed: a.installed, sums: map[string][sha256.Size]byte{}}
	next.of = a.identity(files, version)
	if next.of == have.of && !have.again {
		return have.installed
	}
	var faults []string
	for _, l := range []struct {
		name  string
		front *string
	}{{gpu.LibraryCUDA, &next.installed.FrontCUDA}, {gpu.LibraryNVML, &next.installed.FrontNVML}} {
		made, err := a.makeTwin(files, l.name, *l.front)
		var path string
		if err == nil {
			path = filepath.Join(filepath.Dir(*l.front), twinName(l.name, version, made.File))
			if err = writeOnce(path, made.File); err != nil {
				next.again = true
			}
		}
		if err != nil {
			faults = append(faults, fmt.Sprintf("no twin of %s: %v", l.name, err))
			continue
		}
		*l.front, next.sums[path] = path, sha256.Sum256(made.File)
		a.Log.Info("front made for the driver", "file", path, "driver", version,
			"hooks", len(made.Hooks), "behind", len(made.Behind), "absent", strings.Join(made.Absent, " "))
	}
	next.fault = strings.Join(faults, "; ")
	if next.fault != "" && next.fault != have.fault {
		a.Log.Error("containers get a front library as it was built: limits hold, but programs can't be linked with it, and find functions that the driver lacks",
			"error", next.fault)
	}
	a.mu.Lock()
	a.twins = next
	a.mu.Unlock()
	return next.installed
}

// TwinFault says why containers get a front library that isn't made for the
// node's driver, "" if they don't.
func (a *Agent) TwinFault() string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.twins.fault
}

// makeTwin makes the twin of one of the driver's libraries.
func (a *Agent) makeTwin(files gpu.Files, name, front string) (*twin.Twin, error) {
	l, ok := files.Library(name)
	if !ok {
		return nil, errors.New("the driver has no such library")
	}
	f, err := a.Root.Open(l.Source)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	driver, err := twin.Read(f)
	if err != nil {
		return nil, fmt.Errorf("read the driver's %s: %w", l.Source, err)
	}
	b, err := os.ReadFile(front)
	if err != nil {
		return nil, err
	}
	made, err := twin.Make(b, driver)
	if err != nil {
		return nil, fmt.Errorf("for the driver's %s: %w", l.Source, err)
	}
	return made, nil
}

// identity changes when the driver's libraries do: not only with another
// version, but also when one is installed anew.
func (a *Agent) identity(files gpu.Files, version string) string {
	id := version
	for _, name := range []string{gpu.LibraryCUDA, gpu.LibraryNVML} {
		l, _ := files.Library(name)
		id += " " + l.Source
		f, err := a.Root.Open(l.Source)
		if err != nil {
			id += " " + err.Error()
			continue
		}
		if st, err := f.Stat(); err == nil {
			id += fmt.Sprint(" ", st.Size(), " ", st.ModTime().UnixNano())
			if s, ok := st.Sys().(*syscall.Stat_t); ok {
				id += fmt.Sprint(" ", s.Dev, " ", s.Ino, " ", s.Ctim.Nano())
			}
		}
		f.Close()
	}
	return id
}

// plainVersion is what a driver's version may look like in a file's name.
var plainVersion = regexp.MustCompile(`^[0-9A-Za-z.]{1,32}$`)

// twinName is made from the driver's version and the content.
func twinName(library, version string, content []byte) string {
	if !plainVersion.MatchString(version) {
		version = "unknown"
	}
	sum := sha256.Sum256(content)
	return fmt.Sprintf("%s-%s-%s.so", strings.TrimSuffix(library, ".so"), version, hex.EncodeToString(sum[:])[:16])
}

// writeOnce writes a file, whole or not at all, unless it is there with just
// that content. A damaged one is replaced by a new file of the same name: who
// has the old one mapped keeps it.
func writeOnce(path string, content []byte) error {
	have, err := os.ReadFile(path)
	if err == nil && bytes.Equal(have, content) {
		return nil
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(path), ".new-")
	if err != nil {
		return err
	}
	_, err = f.Write(content)
	if err == nil {
		err = f.Chmod(0o755)
	}
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		os.Remove(f.Name())
		return err
	}
	if have, err = os.ReadFile(path); err == nil && !bytes.Equal(have, content) {
		err = fmt.Errorf("%s isn't what was written to it", path)
	}
	return err
}
