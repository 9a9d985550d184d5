package image

import (
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
)

// searchedPath is the PATH of every image that has a shell.
const searchedPath = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin"

// Pause is the sandbox container's image: one static program.
func Pause(program string) Image {
	return Image{
		Ref:        "localhost/pause:1",
		Layers:     []*Layer{new(Layer).File("/pause", program, 0o755)},
		Entrypoint: []string{"/pause"},
	}
}

// BaseLayer is a small Debian-like tree: merged /usr, accounts, /tmp, and a
// shell with its tools from a static busybox. applets are the names that
// `busybox --list` prints.
func BaseLayer(busybox string, applets []string) *Layer {
	l := new(Layer).
		Dir("/usr/bin", 0o755).Dir("/usr/sbin", 0o755).Dir("/usr/lib", 0o755).Dir("/usr/lib64", 0o755).
		Symlink("/bin", "usr/bin").Symlink("/sbin", "usr/sbin").Symlink("/lib", "usr/lib").Symlink("/lib64", "usr/lib64").
		Dir("/dev", 0o755).Dir("/proc", 0o555).Dir("/sys", 0o555).Dir("/run", 0o755).
		Dir("/tmp", 0o777|fs.ModeSticky).Dir("/var/tmp", 0o777|fs.ModeSticky).Symlink("/var/run", "/run").
		Dir("/root", 0o700).Dir("/home", 0o755).
		Bytes("/etc/passwd", []byte("root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/usr/sbin/nologin\n"), 0o644).
		Bytes("/etc/group", []byte("root:x:0:\nnogroup:x:65534:\n"), 0o644).
		Bytes("/etc/nsswitch.conf", []byte("passwd: files\ngroup: files\nhosts: files dns\n"), 0o644)
	for _, name := range applets {
		if name != "busybox" {
			l.Symlink("/usr/bin/"+name, "busybox")
		}
	}
	return l.File("/usr/bin/busybox", busybox, 0o755)
}

// Base is a BaseLayer alone, with a shell as command.
func Base(base *Layer) Image {
	return Image{
		Ref:    "localhost/busybox:1",
		Layers: []*Layer{base},
		Cmd:    []string{"/bin/sh"},
		Env:    []string{searchedPath},
	}
}

// CarveFiles are the built files of the product's image.
type CarveFiles struct {
	// Carve is the carve binary, Hook the static OCI hook, CUDA and NVML the front
	// libraries.
	Carve, Hook, CUDA, NVML string
}

// carveLibraries is where `carve node` looks for what it installs on the node
// (its --lib-dir).
const carveLibraries = "/usr/lib/carve/node"

// Carve is the product's image: the carve binary with the libraries that it
// needs over base, and what it installs on nodes. The front libraries come
// alone: what they need belongs to the containers that load them.
func Carve(base *Layer, files CarveFiles) (Image, error) {
	m, err := Program("localhost/carve:dev", base, files.Carve)
	if err != nil {
		return Image{}, err
	}
	m.Layers = append(m.Layers, new(Layer).
		File(carveLibraries+"/carve-hook", files.Hook, 0o755).
		File(carveLibraries+"/libcarve-cuda.so", files.CUDA, 0o755).
		File(carveLibraries+"/libcarve-nvml.so", files.NVML, 0o755))
	return m, nil
}

// libc are the libraries of Debian's libc6 besides libc itself. Every image with
// glibc has them, so what is brought into a container later, such as a driver's
// library, may need them without the program doing so.
var libc = []string{"libdl.so.2", "libm.so.6", "libpthread.so.0", "librt.so.1"}

// Program is an image of one program, which becomes its entrypoint at
// /usr/bin/<its file name>, over base. A dynamic program comes with the
// libraries that it needs, all of libc's, and extra ones that it opens only
// later.
func Program(ref string, base *Layer, program string, extra ...string) (Image, error) {
	needed, err := Needed(program)
	if err != nil {
		return Image{}, fmt.Errorf("image %s: %w", ref, err)
	}
	if len(needed) > 0 {
		extra = append(slices.Clone(libc), extra...)
	}
	name := "/usr/bin/" + filepath.Base(program)
	l := new(Layer)
	if err := l.DynamicProgram(name, program, extra...); err != nil {
		return Image{}, fmt.Errorf("image %s: %w", ref, err)
	}
	return Image{Ref: ref, Layers: []*Layer{base, l}, Entrypoint: []string{name}, Env: []string{searchedPath}}, nil
}
