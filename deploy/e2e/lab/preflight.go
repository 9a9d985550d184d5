package lab

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/carve-gpu/carve/deploy/e2e/image"
)

// PreflightConfig says for what the machine is checked.
type PreflightConfig struct {
	// Module is the folder of deploy/e2e; see FindModule.
	Module string
	// Dir is the lab's folder.
	Dir string
	// Install lets Preflight install missing Debian packages.
	Install bool
}

// Fault is something that the machine lacks.
type Fault struct {
	// What is missing, and Why it is needed.
	What, Why string
	// Fix is what to do about it.
	Fix string
	// Package is the Debian package that brings it, where there is one.
	Package string
}

func (f Fault) Error() string {
	text := "missing: " + f.What + "\n    needed: " + f.Why
	if f.Fix != "" {
		text += "\n    do:     " + f.Fix
	}
	return text
}

const (
	gib = 1 << 30
	// What a build from nothing was seen to take: modules 1.2 GiB, Go's build
	// cache 2.5 GiB, programs 0.3 GiB; and a lab with images.
	buildDiskBytes = 8 * gib
	labDiskBytes   = 2 * gib
	// All programs together take about 0.9 GiB; compiling them takes more.
	buildMemoryBytes = 4 * gib
	labMemoryBytes   = 2 * gib
)

// Preflight checks that a lab can be built and run here, and reports all that
// is missing at once, as a join of Faults.
func Preflight(ctx context.Context, c PreflightConfig, progress *Progress) error {
	faults := check(ctx, c)
	if c.Install && os.Geteuid() == 0 {
		var packages []string
		for _, f := range faults {
			if f.Package != "" && !slices.Contains(packages, f.Package) {
				packages = append(packages, f.Package)
			}
		}
		if len(packages) > 0 {
			if err := install(ctx, packages, progress); err != nil {
				return fmt.Errorf("preflight: %w", err)
			}
			faults = check(ctx, c)
		}
	}
	if len(faults) == 0 {
		return nil
	}
	var packages []string
	all := make([]error, 0, len(faults))
	for _, f := range faults {
		all = append(all, f)
		if f.Package != "" && !slices.Contains(packages, f.Package) {
			packages = append(packages, f.Package)
		}
	}
	hint := ""
	if len(packages) > 0 {
		hint = "\n`lab preflight --install` as root, or: apt-get install " + strings.Join(packages, " ")
	}
	return fmt.Errorf("preflight: this machine lacks %d thing(s):\n  %w%s", len(faults), errors.Join(all...), hint)
}

// requirement is a check for one thing; it returns nil or what is missing.
type requirement func(context.Context) *Fault

func check(ctx context.Context, c PreflightConfig) []Fault {
	built := false
	if dir, err := ProgramsDir(c.Module); err == nil {
		built = checkPrograms(dir) == nil
	}
	if runtime.GOOS != "linux" {
		return []Fault{{What: "Linux (this is " + runtime.GOOS + ")", Why: "the lab is made of Linux namespaces", Fix: "use a Linux machine or VM"}}
	}
	requirements := []requirement{
		root,
		program("mount", "mount", "to mount the lab's /proc"),
		program("iptables", "iptables", "kube-proxy programs Services and the kubelet its chains with it"),
		program("busybox", "busybox-static", "the base image's shell and tools"),
		staticBusybox,
		fileSystem("overlay", "private copies of /etc and /var/lib, and container images"),
		fileSystem("tmpfs", "the private /run"),
		cgroups,
		network,
		memory(labMemoryBytes, "to run the cluster"),
		disk(c.Dir, labDiskBytes, "for the lab's state and images"),
	}
	if !built {
		requirements = append(requirements,
			program("go", "", "to build the programs"),
			program("gcc", "gcc", "to build runc, a part of which is C"),
			program("pkg-config", "pkg-config", "to find libseccomp for runc"),
			libseccomp,
			memory(buildMemoryBytes, "to compile Kubernetes"),
			goDisk,
		)
	}
	var faults []Fault
	for _, r := range requirements {
		if f := r(ctx); f != nil {
			faults = append(faults, *f)
		}
	}
	return faults
}

func root(context.Context) *Fault {
	if os.Geteuid() == 0 {
		return nil
	}
	return &Fault{What: fmt.Sprintf("root (this is user %d)", os.Geteuid()), Why: "namespaces, mounts and cgroups", Fix: "run it as root, for example by sudo"}
}

func program(name, pkg, why string) requirement {
	return func(context.Context) *Fault {
		if _, err := exec.LookPath(name); err == nil {
			return nil
		}
		fix := "install it"
		if pkg != "" {
			fix = "apt-get install " + pkg
		}
		return &Fault{What: "program " + name + " in PATH", Why: why, Fix: fix, Package: pkg}
	}
}

func staticBusybox(context.Context) *Fault {
	path, err := exec.LookPath("busybox")
	if err != nil {
		return nil // reported already
	}
	if libraries, err := image.Needed(path); err == nil && len(libraries) == 0 {
		return nil
	}
	return &Fault{
		What: path + " as a static program", Why: "the base image has no libraries for it",
		Fix: "apt-get install busybox-static", Package: "busybox-static",
	}
}

func libseccomp(ctx context.Context) *Fault {
	if _, err := exec.LookPath("pkg-config"); err != nil {
		return &Fault{What: "libseccomp's headers (not looked for: no pkg-config)", Why: "runc filters system calls with it", Fix: "apt-get install libseccomp-dev", Package: "libseccomp-dev"}
	}
	if exec.CommandContext(ctx, "pkg-config", "--exists", "libseccomp").Run() == nil {
		return nil
	}
	return &Fault{What: "libseccomp's headers", Why: "runc filters system calls with it", Fix: "apt-get install libseccomp-dev", Package: "libseccomp-dev"}
}

func fileSystem(name, why string) requirement {
	return func(context.Context) *Fault {
		data, err := os.ReadFile("/proc/filesystems")
		if err == nil && slices.Contains(strings.Fields(string(data)), name) {
			return nil
		}
		return &Fault{What: "file system " + name + " in the kernel (/proc/filesystems)", Why: why, Fix: "modprobe " + name}
	}
}

func cgroups(context.Context) *Fault {
	all, err := hierarchies()
	if err != nil {
		return &Fault{What: "cgroups: " + err.Error(), Why: "the kubelet and runc put containers into them", Fix: "mount them"}
	}
	for _, h := range all {
		probe, err := os.MkdirTemp(h.dir, "carve-preflight")
		if err != nil {
			return &Fault{What: "cgroups that can be written: " + err.Error(), Why: "the kubelet and runc put containers into them", Fix: "run where /sys/fs/cgroup is writable (not in an unprivileged container)"}
		}
		unix.Rmdir(probe)
	}
	return nil
}

// network tries, in a network namespace that ends with the check, what the lab
// will do in its own.
func network(context.Context) *Fault {
	if os.Geteuid() != 0 {
		return nil // reported already
	}
	done := make(chan *Fault)
	go func() {
		runtime.LockOSThread() // the thread, and its namespace, end with this goroutine
		done <- tryNetwork()
	}()
	return <-done
}

func tryNetwork() *Fault {
	if unix.Gettid() == unix.Getpid() {
		return network(context.Background()) // not on the main thread: see inside
	}
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return &Fault{What: "network namespaces: " + err.Error(), Why: "the lab has a network of its own", Fix: "use a kernel with CONFIG_NET_NS, and CAP_SYS_ADMIN"}
	}
	self, err := unix.PidfdOpen(os.Getpid(), 0)
	if err == nil {
		err = unix.Setns(self, unix.CLONE_NEWUTS)
		unix.Close(self)
	}
	if err != nil {
		return &Fault{What: "entering namespaces by a pidfd: " + err.Error(), Why: "how a lab is entered", Fix: "use Linux 5.8 or later"}
	}
	const fix = "use a kernel with bridge, veth and br_netfilter; as modules: modprobe bridge veth br_netfilter"
	bridge := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "probe0"}}
	if err := netlink.LinkAdd(bridge); err != nil {
		return &Fault{What: "network bridges: " + err.Error(), Why: "the network of node and pods", Fix: fix}
	}
	veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "probe1"}, PeerName: "probe2"}
	if err := netlink.LinkAdd(veth); err != nil {
		return &Fault{What: "veth pairs: " + err.Error(), Why: "a pod's network interface", Fix: fix}
	}
	if _, err := os.Stat("/proc/sys/net/bridge/bridge-nf-call-iptables"); err != nil {
		return &Fault{What: "netfilter on bridges: " + err.Error(), Why: "Services between pods of one node", Fix: fix}
	}
	iptables, err := exec.LookPath("iptables")
	if err != nil {
		return nil // reported already
	}
	cmd := exec.Command(iptables, "-t", "nat", "-A", "OUTPUT", "-p", "tcp", "-m", "comment", "--comment", "probe",
		"-m", "statistic", "--mode", "random", "--probability", "0.5", "-j", "DNAT", "--to-destination", "127.0.0.1:1")
	if out, err := cmd.CombinedOutput(); err != nil {
		return &Fault{
			What: fmt.Sprintf("address translation: %v: %s", err, bytes.TrimSpace(out)), Why: "kube-proxy makes Services of it",
			Fix: "use a kernel with netfilter NAT (nf_tables or iptables) and the matches comment and statistic",
		}
	}
	return nil
}

func memory(want uint64, why string) requirement {
	return func(context.Context) *Fault {
		have, err := availableMemory()
		if err == nil && have >= want {
			return nil
		}
		return &Fault{What: fmt.Sprintf("%d GiB of free memory (%.1f GiB are)", want/gib, float64(have)/gib), Why: why, Fix: "end other programs, or use a larger machine"}
	}
}

func availableMemory() (bytes uint64, err error) {
	f, err := os.Open("/proc/meminfo")
	if err != nil {
		return 0, err
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		fields := strings.Fields(lines.Text())
		if len(fields) == 3 && fields[0] == "MemAvailable:" {
			kib, err := strconv.ParseUint(fields[1], 10, 64)
			return kib << 10, err
		}
	}
	return 0, errors.New("/proc/meminfo has no MemAvailable")
}

func disk(dir string, want uint64, why string) requirement {
	return func(context.Context) *Fault {
		at := existing(dir)
		var fs unix.Statfs_t
		if err := unix.Statfs(at, &fs); err != nil {
			return &Fault{What: fmt.Sprintf("disk space in %s: %v", at, err), Why: why, Fix: "choose another folder"}
		}
		if fs.Type == unix.OVERLAYFS_SUPER_MAGIC {
			return &Fault{What: "a folder that is not on an overlay file system (" + at + ")", Why: "container images are overlays, which can't lie on one", Fix: "choose another folder with --dir, such as a volume or a tmpfs"}
		}
		if have := fs.Bavail * uint64(fs.Bsize); have < want {
			return &Fault{
				What: fmt.Sprintf("%d GiB of free disk in %s (%.1f GiB are)", want/gib, at, float64(have)/gib), Why: why,
				Fix: fmt.Sprintf("free some, or choose another folder (--dir for the lab, %s for its programs, GOCACHE and GOMODCACHE for Go)", cacheVariable),
			}
		}
		return nil
	}
}

// goDisk looks where Go keeps what it compiles.
func goDisk(ctx context.Context) *Fault {
	out, err := exec.CommandContext(ctx, "go", "env", "GOCACHE").Output()
	if err != nil {
		return nil // no Go: reported already
	}
	return disk(strings.TrimSpace(string(out)), buildDiskBytes, "for the modules, Go's build cache and the programs")(ctx)
}

// existing returns path or the nearest folder above it that exists.
func existing(path string) string {
	for {
		if _, err := os.Stat(path); err == nil || path == filepath.Dir(path) {
			return path
		}
		path = filepath.Dir(path)
	}
}

func install(ctx context.Context, packages []string, progress *Progress) error {
	if _, err := exec.LookPath("apt-get"); err != nil {
		return fmt.Errorf("install %s: this machine has no apt-get: install them by its own means", strings.Join(packages, " "))
	}
	return progress.step("apt-get install "+strings.Join(packages, " "), nil, func() error {
		for _, args := range [][]string{{"update"}, append([]string{"install", "-y", "--no-install-recommends"}, packages...)} {
			cmd := exec.CommandContext(ctx, "apt-get", args...)
			cmd.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive")
			if out, err := cmd.CombinedOutput(); err != nil {
				return fmt.Errorf("apt-get %s: %w\n%s", strings.Join(args, " "), err, bytes.TrimSpace(out))
			}
		}
		return nil
	})
}
