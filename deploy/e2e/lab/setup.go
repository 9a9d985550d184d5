package lab

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// bound are the folders of the lab's Dir and where the lab sees them: bound
// rather than part of an overlay, since images are themselves overlays, and an
// overlay can't be an overlay's upper layer.
var bound = []struct{ source, target string }{
	{"kubernetes", "/etc/kubernetes"},
	{"containerd", "/var/lib/containerd"},
	{"kubelet", "/var/lib/kubelet"},
	{"etcd", "/var/lib/etcd"},
}

// machineSettings are written by the kubelet for the whole machine and are not
// part of any namespace: the lab sees files with the values that it wants.
var machineSettings = map[string]string{
	"vm/overcommit_memory":      "1",
	"vm/panic_on_oom":           "0",
	"kernel/panic":              "10",
	"kernel/panic_on_oops":      "1",
	"kernel/keys/root_maxkeys":  "1000000",
	"kernel/keys/root_maxbytes": "25000000",
}

// setUp turns fresh namespaces into a node: mounts, host name, network, cgroups.
func (l *Lab) setUp(ctx context.Context) error {
	c := l.config
	for _, dir := range append([]string{"log", "images"}, boundSources()...) {
		if err := os.MkdirAll(c.path(dir), 0o755); err != nil {
			return fmt.Errorf("make the lab's folder: %w", err)
		}
	}
	// /proc shows the PID namespace of the process that mounts it, so a process
	// of the lab must do it.
	mount := l.Command(ctx, "mount", "-t", "proc", "proc", "/proc")
	if _, err := l.output(mount); err != nil {
		return fmt.Errorf("mount the lab's /proc: %w", err)
	}
	return inside(l.state.Holder, labNamespaces, func() error {
		if err := c.mountAll(); err != nil {
			return err
		}
		if err := unix.Sethostname([]byte(c.Node.Name)); err != nil {
			return fmt.Errorf("set the lab's host name: %w", err)
		}
		if err := c.network(); err != nil {
			return fmt.Errorf("set up the lab's network: %w", err)
		}
		return c.makeCgroups()
	})
}

func boundSources() []string {
	var dirs []string
	for _, b := range bound {
		dirs = append(dirs, b.source)
	}
	return dirs
}

func mount(source, target, kind string, flags uintptr, data string) error {
	if err := unix.Mount(source, target, kind, flags, data); err != nil {
		return fmt.Errorf("mount %s on %s: %w", source, target, err)
	}
	return nil
}

func (c Config) mountAll() error {
	for _, dir := range overlaid {
		if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
			continue
		}
		name := strings.ReplaceAll(dir[1:], "/", "-")
		upper, work := c.path("overlay", name, "upper"), c.path("overlay", name, "work")
		for _, d := range []string{upper, work} {
			if err := os.MkdirAll(d, 0o755); err != nil {
				return fmt.Errorf("make the private %s: %w", dir, err)
			}
		}
		options := "lowerdir=" + dir + ",upperdir=" + upper + ",workdir=" + work
		if err := mount("overlay", dir, "overlay", 0, options); err != nil {
			return fmt.Errorf("make the private %s (is %s itself on an overlay? choose another --dir): %w", dir, c.Dir, err)
		}
	}
	if err := mount("tmpfs", "/run", "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=0755"); err != nil {
		return err
	}
	for _, b := range bound {
		if err := bindMount(c.path(b.source), b.target); err != nil {
			return err
		}
	}
	for _, b := range c.Binds {
		if err := bindMount(b.Source, b.Target); err != nil {
			return err
		}
	}
	if err := fakeSettings(); err != nil {
		return err
	}
	// No resolver: the lab has no way out. containerd copies this file to pods.
	os.Remove("/etc/resolv.conf") // may be a link into the hidden /run
	if err := os.WriteFile("/etc/resolv.conf", []byte("# the lab has no resolver\n"), 0o644); err != nil {
		return err
	}
	conflist, err := os.ReadFile("/etc/kubernetes/cni.conflist")
	if err != nil {
		return err
	}
	if err := os.MkdirAll("/etc/cni/net.d", 0o755); err != nil {
		return err
	}
	if err := os.WriteFile("/etc/cni/net.d/10-lab.conflist", conflist, 0o644); err != nil {
		return err
	}
	// Shared inside, so that mounts propagate between the node and pods; with the
	// machine nothing has been shared since the namespace was made.
	return mount("none", "/", "", unix.MS_REC|unix.MS_SHARED, "")
}

// fakeSettings hides machine-wide files of /proc/sys behind plain files.
func fakeSettings() error {
	const dir = "/run/lab-settings"
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	for name, value := range machineSettings {
		file := filepath.Join(dir, strings.ReplaceAll(name, "/", "."))
		if err := os.WriteFile(file, []byte(value+"\n"), 0o644); err != nil {
			return err
		}
		if err := mount(file, "/proc/sys/"+name, "", unix.MS_BIND, ""); err != nil {
			return err
		}
	}
	return nil
}

func bindMount(source, target string) error {
	info, err := os.Stat(source)
	if err != nil {
		return fmt.Errorf("bind: %w", err)
	}
	if _, err := os.Lstat(target); errors.Is(err, fs.ErrNotExist) {
		if privateParent(target) == "" {
			return fmt.Errorf("bind %s: %s doesn't exist, and to make it would change the machine: choose a target in one of %s", source, target, strings.Join(PrivateDirs(), " "))
		}
		if err := makeTarget(target, info.IsDir()); err != nil {
			return fmt.Errorf("bind %s: %w", source, err)
		}
	}
	return mount(source, target, "", unix.MS_BIND|unix.MS_REC, "")
}

func makeTarget(target string, dir bool) error {
	if dir {
		return os.MkdirAll(target, 0o755)
	}
	if err := os.MkdirAll(filepath.Dir(target), 0o755); err != nil {
		return err
	}
	return os.WriteFile(target, nil, 0o644)
}

// network gives the node its address on a bridge of its own (the node's address
// must not be a loopback one) and turns on what Services need.
func (c Config) network() error {
	loopback, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	if err := netlink.LinkSetUp(loopback); err != nil {
		return fmt.Errorf("bring lo up: %w", err)
	}
	bridge := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "lab0"}}
	if err := netlink.LinkAdd(bridge); err != nil {
		return fmt.Errorf("add bridge lab0: %w", err)
	}
	address := &netlink.Addr{IPNet: ipNet(c.Node.Address)}
	if err := netlink.AddrAdd(bridge, address); err != nil {
		return fmt.Errorf("give lab0 the address %s: %w", c.Node.Address, err)
	}
	if err := netlink.LinkSetUp(bridge); err != nil {
		return fmt.Errorf("bring lab0 up: %w", err)
	}
	// An address is routed before it is rewritten, so ClusterIPs need a route,
	// wherever it points. There is no default route: what is not in the lab is
	// refused at once instead of timing out.
	route := &netlink.Route{LinkIndex: bridge.Attrs().Index, Dst: ipNet(netip.MustParsePrefix(services)), Scope: netlink.SCOPE_LINK}
	if err := netlink.RouteAdd(route); err != nil {
		return fmt.Errorf("add the route to %s: %w", services, err)
	}
	for _, name := range []string{
		"net/ipv4/ip_forward",
		// A pod's traffic to a Service may be answered by a pod on the same bridge:
		// without this the answer would not pass the rules that rewrite it back.
		"net/bridge/bridge-nf-call-iptables",
	} {
		if err := os.WriteFile("/proc/sys/"+name, []byte("1"), 0); err != nil {
			return fmt.Errorf("set %s (kernel module br_netfilter?): %w", name, err)
		}
	}
	return nil
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}

const cgroupMount = "/sys/fs/cgroup"

// hierarchy is the root of a mounted cgroup hierarchy.
type hierarchy struct {
	dir string
	// unused: the cgroup2 hierarchy beside those of version 1. The kubelet wants
	// nothing there, but runc makes its groups in it too.
	unused bool
}

// hierarchies returns the one cgroup2 hierarchy, or each of version 1 and the
// cgroup2 one beside them.
func hierarchies() ([]hierarchy, error) {
	var root unix.Statfs_t
	if err := unix.Statfs(cgroupMount, &root); err != nil {
		return nil, fmt.Errorf("find the cgroup hierarchies in %s: %w", cgroupMount, err)
	}
	if root.Type == unix.CGROUP2_SUPER_MAGIC {
		return []hierarchy{{dir: cgroupMount}}, nil
	}
	entries, err := os.ReadDir(cgroupMount)
	if err != nil {
		return nil, fmt.Errorf("find the cgroup hierarchies: %w", err)
	}
	var all []hierarchy
	used := false
	for _, e := range entries {
		h := hierarchy{dir: filepath.Join(cgroupMount, e.Name())}
		var at unix.Statfs_t
		if !e.IsDir() || unix.Statfs(h.dir, &at) != nil {
			continue // cpu,cpuacct and the like are links
		}
		switch at.Type {
		case unix.CGROUP_SUPER_MAGIC:
			used = true
			all = append(all, h)
		case unix.CGROUP2_SUPER_MAGIC:
			h.unused = true
			all = append(all, h)
		}
	}
	if !used {
		return nil, fmt.Errorf("find the cgroup hierarchies: none is mounted in %s", cgroupMount)
	}
	return all, nil
}

// makeCgroups makes the kubelet's root cgroup, which it wants to find.
func (c Config) makeCgroups() error {
	all, err := hierarchies()
	if err != nil {
		return err
	}
	for _, h := range all {
		if h.unused {
			continue
		}
		dir := filepath.Join(h.dir, c.cgroup())
		if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			return fmt.Errorf("make the lab's cgroup: %w", err)
		}
		// In a cpuset of version 1 a new group may use no CPU and no memory node
		// until told which.
		for _, name := range []string{"cpuset.cpus", "cpuset.mems"} {
			data, err := os.ReadFile(filepath.Join(h.dir, name))
			if errors.Is(err, fs.ErrNotExist) {
				continue
			}
			if err == nil {
				err = os.WriteFile(filepath.Join(dir, name), data, 0)
			}
			if err != nil {
				return fmt.Errorf("fill the lab's cpuset: %w", err)
			}
		}
	}
	return nil
}

// removeCgroups removes the lab's cgroups once its processes are gone.
func (c Config) removeCgroups(ctx context.Context) error {
	all, err := hierarchies()
	if err != nil {
		return err
	}
	ctx, cancel := within(ctx, 10*time.Second)
	defer cancel()
	for _, h := range all {
		for {
			err := removeTree(filepath.Join(h.dir, c.cgroup()))
			if err == nil {
				break
			}
			// The kernel may still be taking the last process out.
			if !errors.Is(err, syscall.EBUSY) || ctx.Err() != nil {
				return fmt.Errorf("remove the lab's cgroup: %w", err)
			}
			time.Sleep(20 * time.Millisecond)
		}
	}
	return nil
}

// removeTree removes a cgroup and those below: their files go with them.
func removeTree(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	} else if err != nil {
		return err
	}
	for _, e := range entries {
		if e.IsDir() {
			if err := removeTree(filepath.Join(dir, e.Name())); err != nil {
				return err
			}
		}
	}
	if err := unix.Rmdir(dir); err != nil && !errors.Is(err, unix.ENOENT) {
		return &fs.PathError{Op: "rmdir", Path: dir, Err: err}
	}
	return nil
}
