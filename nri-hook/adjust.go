package nrihook

import (
	"fmt"
	"path/filepath"
	"sort"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/vgpu/gpu"
)

// Where a container finds what belongs to its share. The paths are compiled
// into the front libraries; they lie outside /run and /tmp, which images and
// pods like to cover with a tmpfs.
const (
	containerPrivate = "/usr/lib/carve"
	containerLimits  = "/usr/lib/carve/limits"
	containerUsage   = "/usr/lib/carve/usage"
	containerDriver  = "/usr/lib/carve/driver"
	// containerMPS is where clients of MPS find their card's daemon.
	containerMPS = "/usr/lib/carve/mps"
	// containerSoftware is where the software GPU's libraries look for its
	// state.
	containerSoftware = "/usr/lib/softgpu"
)

// hookTimeoutSeconds bounds carve-hook; the runtime fails the container then.
const hookTimeoutSeconds = 10

// visibleDevices is the variable by which NVIDIA's own runtime is told which
// cards to hand out. "void" means none, and that the runtime keeps away.
const (
	visibleDevices = "NVIDIA_VISIBLE_DEVICES"
	void           = "void"
)

// Container is what the runtime says of a container.
type Container struct {
	ID                              string
	PodUID, Namespace, Pod, Name    string
	Annotations, SandboxAnnotations map[string]string
	Env                             []string
	// AllDevices is true where the container may open every device of the
	// node: a privileged one.
	AllDevices bool
	// HostPID is the pid of its first process, 0 if it has none.
	HostPID int
	// Devices are those of its specification.
	Devices []gpu.DeviceNode
}

// Mark is the slice that a carve hook gave the container, empty for none.
func (c Container) Mark() string { return c.Annotations[api.AnnotationSlice] }

// AskedForCards reports whether the container met the device plugin.
func (c Container) AskedForCards() bool { return c.Annotations[api.AnnotationSlots] != "" }

// Slice is what the node holds ready for one container.
type Slice struct {
	PodUID, Container string
	// Generation is the grant's.
	Generation int
	// Cards are the device nodes of the cards.
	Cards []gpu.DeviceNode
	// LimitsPath and UsagePath are the two files on the node. They are empty
	// for a container with whole cards or slices of their time, which gets the
	// driver as it is.
	LimitsPath, UsagePath string
	// MPS is set for a container whose processes are clients of a card's MPS daemon.
	MPS *MPS
	// MayBePrivileged lets a container that may open every device hold a share,
	// whose limits then are advice.
	MayBePrivileged bool
}

// MPS is what makes a container's processes clients of its card's daemon.
type MPS struct {
	// PipePath and ShmPath are the daemon's folders on the node. The second becomes
	// the container's /dev/shm: daemon and clients exchange memory there.
	PipePath, ShmPath string
	// Percent is of the card's multiprocessors, 1 to 100; MemMiB bounds the device
	// memory of each process.
	Percent int
	MemMiB  int64
}

// env are the variables that NVIDIA's library reads. They say what is wanted and hold
// nobody: the limits file does, and the card, which takes no process but the daemon's.
func (m MPS) env() []string {
	return []string{
		"CUDA_MPS_PIPE_DIRECTORY=" + containerMPS,
		fmt.Sprintf("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=%d", m.Percent),
		// Of the container's only card.
		fmt.Sprintf("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=%dM", m.MemMiB),
	}
}

// Share reports whether the slice is part of a card to which the front library holds it.
func (s Slice) Share() bool { return s.LimitsPath != "" }

// Mark is what containers with this slice are marked with.
func (s Slice) Mark() string {
	return fmt.Sprintf("%s/%s@%d", s.PodUID, s.Container, s.Generation)
}

// Driver is what a node has for all its containers.
type Driver struct {
	Files   gpu.Files
	Control []gpu.DeviceNode
	// FrontCUDA and FrontNVML are the libraries that stand before the driver's,
	// Hook is carve-hook; all are paths of the node.
	FrontCUDA, FrontNVML, Hook string
	// SoftwareState is the software GPU's state directory on the node, empty
	// with a real driver.
	SoftwareState string
}

// Edits is what is added to a container's OCI specification. Mounts replace
// those with the same destination.
type Edits struct {
	Annotations map[string]string
	Env         []string // NAME=value
	Mounts      []specs.Mount
	Devices     []specs.LinuxDevice
	// CreateContainer are hooks that run in the container's namespaces before
	// its root is entered.
	CreateContainer []specs.Hook
}

// Adjust says what a container gets. A nil slice is a container without a
// grant: it gets nothing, and NVIDIA's runtime is told so. An error means that
// the container must not start; its text is for the pod's owner.
func Adjust(c Container, s *Slice, d Driver) (Edits, error) {
	var e Edits
	if c.Mark() != "" {
		// Another carve hook, of an agent that is being replaced, has done it.
		return e, nil
	}
	if !hasEnv(c.Env, visibleDevices, void) {
		// A device list here, also from the image, would make NVIDIA's runtime
		// mount the real libraries, perhaps over ours.
		e.Env = append(e.Env, visibleDevices+"="+void)
	}
	if s == nil {
		return e, nil
	}
	if s.Share() && c.AllDevices && !s.MayBePrivileged {
		return Edits{}, fmt.Errorf("container %s is privileged and so sees every card of the node whole: a share can't be held; drop privileged, ask for whole cards, or label the namespace %s=true", c.Name, api.LabelAllowPrivileged)
	}
	if key, found := api.NamesCDIDevices(c.SandboxAnnotations); found {
		return Edits{}, fmt.Errorf("container %s has cards by grant, and its pod names others in annotation %s: take one of them", c.Name, key)
	}
	e.Annotations = map[string]string{api.AnnotationSlice: s.Mark()}
	for _, n := range append(append([]gpu.DeviceNode{}, d.Control...), s.Cards...) {
		mode := uint32(0o666)
		e.Devices = append(e.Devices, specs.LinuxDevice{
			Path: n.Path, Type: "c", Major: n.Major, Minor: n.Minor, FileMode: fileMode(mode),
		})
	}
	e.Mounts = append(e.Mounts, libraryMounts(s, d)...)
	for _, b := range d.Files.Binaries {
		e.Mounts = append(e.Mounts, readOnly(b.Source, b.Path))
	}
	if s.Share() {
		e.Mounts = append(e.Mounts,
			private(),
			readOnly(s.LimitsPath, containerLimits),
			bind(s.UsagePath, containerUsage, "rw", "noexec"))
	}
	if s.MPS != nil {
		e.Env = append(e.Env, s.MPS.env()...)
		e.Mounts = append(e.Mounts,
			bind(s.MPS.PipePath, containerMPS, "rw", "noexec"),
			bind(s.MPS.ShmPath, "/dev/shm", "rw", "noexec"))
	}
	if d.SoftwareState != "" {
		e.Mounts = append(e.Mounts, bind(d.SoftwareState, containerSoftware, "rw", "noexec"))
	}
	sort.SliceStable(e.Mounts, func(a, b int) bool { return e.Mounts[a].Destination < e.Mounts[b].Destination })
	e.CreateContainer = []specs.Hook{hook(s, d)}
	return e, nil
}

// libraryMounts puts the driver's libraries under all their names. In a share,
// the front stands in libcuda's and NVML's place, and the real ones at a path
// that only the front knows. One file is behind all names of a library: two
// copies would be loaded as two libraries.
func libraryMounts(s *Slice, d Driver) []specs.Mount {
	var m []specs.Mount
	for _, l := range d.Files.Libraries {
		source := l.Source
		if s.Share() {
			source = d.front(l)
		}
		for _, name := range l.Names {
			m = append(m, readOnly(source, filepath.Join(d.Files.LibDir, name)))
		}
	}
	if s.Share() {
		for _, name := range []string{gpu.LibraryCUDA, gpu.LibraryNVML} {
			if l, ok := d.Files.Library(name); ok {
				m = append(m, readOnly(l.Source, filepath.Join(containerDriver, name+".1")))
			}
		}
	}
	return m
}

// front is the file that a share sees as a library of the driver.
func (d Driver) front(l gpu.Library) string {
	switch l.Name {
	case gpu.LibraryCUDA:
		return d.FrontCUDA
	case gpu.LibraryNVML:
		return d.FrontNVML
	}
	return l.Source
}

// hook is the call of carve-hook, which mends what can be seen only once the
// container's root is there: further copies of the libraries in the image, and
// images whose loader looks elsewhere.
func hook(s *Slice, d Driver) specs.Hook {
	timeout := hookTimeoutSeconds
	args := []string{filepath.Base(d.Hook), "-dir", d.Files.LibDir}
	var names []string
	for _, l := range d.Files.Libraries {
		names = append(names, l.Names...)
	}
	sort.Strings(names)
	args = append(args, "-libraries", strings.Join(names, ","))
	if s.Share() {
		args = append(args, "-fronts", gpu.LibraryCUDA+","+gpu.LibraryNVML, "-private", containerPrivate)
	}
	return specs.Hook{Path: d.Hook, Args: args, Timeout: &timeout}
}

// private is a small file system of the container's own under the files of a
// share. Their mount points are files in it; in a volume, whoever else mounts the
// volume could move them away, and the mounts with them. carve-hook checks that
// what it stands in is no volume.
func private() specs.Mount {
	return specs.Mount{
		Type: "tmpfs", Source: "carve", Destination: containerPrivate,
		Options: []string{"nosuid", "nodev", "noexec", "mode=0755", "size=64k", "nr_inodes=32"},
	}
}

func readOnly(source, destination string) specs.Mount {
	return bind(source, destination, "ro")
}

func bind(source, destination string, options ...string) specs.Mount {
	return specs.Mount{
		Type: "bind", Source: source, Destination: destination,
		Options: append([]string{"bind", "rprivate", "nosuid", "nodev"}, options...),
	}
}

// hasEnv reports whether the last value of a variable is the given one.
func hasEnv(env []string, name, value string) bool {
	for i := len(env) - 1; i >= 0; i-- {
		if v, ok := strings.CutPrefix(env[i], name+"="); ok {
			return v == value
		}
	}
	return false
}

// WantsAllCards reports whether the container's environment, as a rule set by
// its image, asks NVIDIA's runtime for cards.
func (c Container) WantsAllCards() bool {
	for i := len(c.Env) - 1; i >= 0; i-- {
		if v, ok := strings.CutPrefix(c.Env[i], visibleDevices+"="); ok {
			return v != "" && v != void && v != "none"
		}
	}
	return false
}
