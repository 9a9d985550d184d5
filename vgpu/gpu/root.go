package gpu

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/carve-gpu/carve/vgpu/gpu/inroot"
)

// Root is where a driver is installed: "/" on most nodes, "/run/nvidia/driver"
// under the GPU Operator, a made-up root for the software GPU.
type Root struct {
	// Path is the root as the node, and so the container runtime, sees it.
	Path string
	// DevPath is the directory that holds dev/nvidia…, as the node sees it;
	// empty means Path.
	DevPath string
	// HostRoot is where this process sees the node's root file system; empty
	// means that it sees it as its own.
	HostRoot string
}

// see translates a path of the node into one of this process.
func (r Root) see(path string) string { return filepath.Join("/", r.HostRoot, path) }

// Open opens a file of the driver, such as a Library's Source, for reading.
func (r Root) Open(path string) (*os.File, error) { return os.Open(r.see(path)) }

func (r Root) devPath() string {
	if r.DevPath != "" {
		return r.DevPath
	}
	return r.Path
}

// marker is the file by which a software GPU's root is told from a driver's.
const marker = "softgpu/config.json"

// Software reports whether the root belongs to the software GPU, the test
// instrument, and not to a driver. A marker that can't be read is an error:
// nothing may guess which of the two it is.
func (r Root) Software() (bool, error) {
	b, err := os.ReadFile(r.see(filepath.Join(r.Path, marker)))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("read the mark of driver root %s: %w", r.Path, err)
	}
	var m struct {
		Software bool `json:"software"`
	}
	if err := json.Unmarshal(b, &m); err != nil {
		return false, fmt.Errorf("read the mark of driver root %s: %w", r.Path, err)
	}
	return m.Software, nil
}

// SoftwareState is the directory that a container needs to reach the software
// GPU, as the node sees it.
func (r Root) SoftwareState() string { return filepath.Join(r.Path, filepath.Dir(marker)) }

// errNotFound says that a path doesn't exist inside the root.
var errNotFound = errors.New("not found under the driver root")

// resolve follows all links of a path as a process with the root as its own
// root directory would, and returns the path without links, inside the root.
// Drivers are installed with absolute links (Debian's alternatives), which
// plain file functions would follow out of the root.
func (r Root) resolve(path string) (string, error) {
	base := r.see(r.Path)
	root, err := unix.Open(base, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return "", fmt.Errorf("open driver root %s: %w", r.Path, err)
	}
	defer unix.Close(root)
	fd, err := inroot.Open(root, strings.TrimPrefix(path, "/"), unix.O_PATH, 0)
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENOTDIR) {
		return "", fmt.Errorf("%s: %w", path, errNotFound)
	}
	if err != nil {
		return "", fmt.Errorf("open %s under driver root %s: %w", path, r.Path, err)
	}
	defer unix.Close(fd)
	real, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd))
	if err != nil {
		return "", fmt.Errorf("resolve %s under driver root %s: %w", path, r.Path, err)
	}
	// The kernel names the root itself without links, so do the same with it.
	top, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", root))
	if err != nil {
		return "", fmt.Errorf("resolve driver root %s: %w", r.Path, err)
	}
	inside, ok := strings.CutPrefix(real, strings.TrimSuffix(top, "/")+"/")
	if !ok {
		return "", fmt.Errorf("%s lies at %s, outside driver root %s", path, real, top)
	}
	return "/" + inside, nil
}

// DeviceNode is a character device for a container.
type DeviceNode struct {
	// Path is where it stands in a container: "/dev/nvidia0".
	Path         string
	Major, Minor int64
}

// controlNodes are the device nodes that every user of a card needs. The first
// must exist; the others come and go with kernel modules (nvidia-uvm is loaded
// on first use, and its tools node is absent with some drivers).
var controlNodes = []string{"nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"}

// ControlNodes lists the device nodes that are shared by all cards.
func (r Root) ControlNodes() ([]DeviceNode, error) {
	var nodes []DeviceNode
	for i, name := range controlNodes {
		n, err := r.node(name)
		if errors.Is(err, fs.ErrNotExist) && i > 0 {
			continue
		}
		if err != nil {
			return nil, err
		}
		nodes = append(nodes, n)
	}
	return nodes, nil
}

// CardNode is the device node of the card with the given minor number.
func (r Root) CardNode(minor int) (DeviceNode, error) {
	return r.node(fmt.Sprintf("nvidia%d", minor))
}

func (r Root) node(name string) (DeviceNode, error) {
	path := filepath.Join(r.devPath(), "dev", name)
	var st unix.Stat_t
	if err := unix.Stat(r.see(path), &st); err != nil {
		return DeviceNode{}, fmt.Errorf("look at device node %s: %w", path, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFCHR {
		return DeviceNode{}, fmt.Errorf("look at device node %s: it is no character device", path)
	}
	return DeviceNode{
		Path:  "/dev/" + name,
		Major: int64(unix.Major(st.Rdev)),
		Minor: int64(unix.Minor(st.Rdev)),
	}, nil
}
