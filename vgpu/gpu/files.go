package gpu

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sort"
	"strings"
)

// Files are the parts of a driver that a container needs for the capabilities
// compute and utility. Encoders and graphics are left out: they allocate
// memory behind the driver API's back.
type Files struct {
	// LibDir is the directory of the libraries, under the driver root and so
	// in the container.
	LibDir string
	// Libraries are sorted by name. CUDA and NVML, if there, are among them.
	Libraries []Library
	// Binaries are programs such as nvidia-smi.
	Binaries []Binary
}

// Library is one shared library of the driver.
type Library struct {
	// Name is the name without a version: "libcuda.so".
	Name string
	// Capability is "compute" or "utility".
	Capability string
	// Source is the real file, as the node sees it.
	Source string
	// Names are the names by which the library is known in LibDir, sorted:
	// libcuda.so, libcuda.so.1, libcuda.so.550.90.07.
	Names []string
}

// Binary is one program of the driver.
type Binary struct {
	// Source is the real file, as the node sees it; Path is where it belongs in
	// a container.
	Source, Path string
}

// Names of the two libraries that a share replaces by its own.
const (
	LibraryCUDA = "libcuda.so"
	LibraryNVML = "libnvidia-ml.so"
)

// libraries are the driver's libraries by capability, as NVIDIA's container
// tools divide them. A library that a driver lacks is passed over: the list
// spans R470 to R580 and later.
var libraries = map[string]string{
	LibraryCUDA:                    "compute",
	"libcudadebugger.so":           "compute", // R515: cuda-gdb's server side
	"libnvidia-compiler.so":        "compute", // until R515: OpenCL compiler
	"libnvidia-fatbinaryloader.so": "compute", // until R440
	"libnvidia-gpucomp.so":         "compute", // R535: shared by the compilers
	"libnvidia-nvvm.so":            "compute", // R470: loaded by the PTX compiler
	"libnvidia-nvvm70.so":          "compute", // R550 and later: older NVVM beside it
	"libnvidia-opencl.so":          "compute",
	"libnvidia-pkcs11.so":          "compute", // R545: confidential computing, OpenSSL 1.1
	"libnvidia-pkcs11-openssl3.so": "compute",
	"libnvidia-ptxjitcompiler.so":  "compute", // loaded by libcuda for PTX
	"libnvidia-tileiras.so":        "compute", // R590: tile kernels
	LibraryNVML:                    "utility",
	"libnvidia-cfg.so":             "utility",
	"libnvidia-sandboxutils.so":    "utility",
}

// binaries are the programs that are handed out. MPS's control programs are
// not: their daemon belongs to the node.
var binaries = []string{"nvidia-smi", "nvidia-debugdump"}

// libDirs are where drivers put their 64-bit libraries, most specific first:
// Debian and Ubuntu, Fedora, RHEL and SUSE, and the flat ones.
var libDirs = []string{
	"/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64",
	"/lib/x86_64-linux-gnu", "/lib/aarch64-linux-gnu", "/lib64",
	"/usr/lib", "/lib", "/usr/local/nvidia/lib64", "/lib/nvidia", "/opt/nvidia/lib64",
}

// ErrNoDriver says that a root holds no NVML, so no driver.
var ErrNoDriver = errors.New("no libnvidia-ml.so.1 in any library directory")

// libDir finds the directory with NVML in it.
func (r Root) libDir() (string, error) {
	for _, dir := range libDirs {
		_, err := r.resolve(dir + "/" + LibraryNVML + ".1")
		if err == nil {
			return dir, nil
		}
		if !errors.Is(err, errNotFound) {
			return "", err
		}
	}
	return "", fmt.Errorf("driver root %s: %w", r.Path, ErrNoDriver)
}

// NVMLPath is where this process finds the driver's NVML.
func (r Root) NVMLPath() (string, error) {
	dir, err := r.libDir()
	if err != nil {
		return "", err
	}
	real, err := r.resolve(dir + "/" + LibraryNVML + ".1")
	if err != nil {
		return "", err
	}
	return r.see(filepath.Join(r.Path, real)), nil
}

// DriverFiles lists the driver's files for containers. It is an error if CUDA
// or NVML is missing.
func (r Root) DriverFiles() (Files, error) {
	dir, err := r.libDir()
	if err != nil {
		return Files{}, err
	}
	real, err := r.resolve(dir)
	if err != nil {
		return Files{}, fmt.Errorf("list driver files: %w", err)
	}
	entries, err := os.ReadDir(r.see(filepath.Join(r.Path, real)))
	if err != nil {
		return Files{}, fmt.Errorf("list driver files: %w", err)
	}
	f := Files{LibDir: dir}
	bySource := map[string]int{}
	for _, e := range entries {
		name, _, ok := strings.Cut(e.Name(), ".so")
		if !ok {
			continue
		}
		name += ".so"
		rest := strings.TrimPrefix(e.Name(), name)
		capability, wanted := libraries[name]
		if !wanted || (rest != "" && rest[0] != '.') {
			continue
		}
		inside, err := r.resolve(dir + "/" + e.Name())
		if errors.Is(err, errNotFound) {
			continue // a dangling link
		}
		if err != nil {
			return Files{}, fmt.Errorf("list driver files: %w", err)
		}
		source := filepath.Join(r.Path, inside)
		i, seen := bySource[source]
		if !seen {
			i = len(f.Libraries)
			bySource[source] = i
			f.Libraries = append(f.Libraries, Library{Name: name, Capability: capability, Source: source})
		}
		l := &f.Libraries[i]
		l.Names = append(l.Names, e.Name())
	}
	sort.Slice(f.Libraries, func(a, b int) bool { return f.Libraries[a].Source < f.Libraries[b].Source })
	for _, name := range binaries {
		path := "/usr/bin/" + name
		inside, err := r.resolve(path)
		if errors.Is(err, errNotFound) {
			continue
		}
		if err != nil {
			return Files{}, fmt.Errorf("list driver files: %w", err)
		}
		f.Binaries = append(f.Binaries, Binary{Source: filepath.Join(r.Path, inside), Path: path})
	}
	for _, must := range []string{LibraryCUDA, LibraryNVML} {
		if _, ok := f.Library(must); !ok {
			return Files{}, fmt.Errorf("list driver files: no %s in %s of driver root %s", must, dir, r.Path)
		}
	}
	return f, nil
}

// Library finds a library by its name without a version. Where several
// versions lie side by side it is the one that the name with ".1" leads to.
func (f Files) Library(name string) (Library, bool) {
	var found Library
	for _, l := range f.Libraries {
		if l.Name != name {
			continue
		}
		if found.Name == "" {
			found = l
		}
		for _, n := range l.Names {
			if n == name+".1" {
				return l, true
			}
		}
	}
	return found, found.Name != ""
}
