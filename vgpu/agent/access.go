package agent

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"

	"github.com/carve-gpu/carve/vgpu/gpu"
)

// A container's access to its devices is a list of rules of its cgroup, which
// others may rewrite while it runs: systemd on daemon-reload, where it owns the
// cgroup, or the runtime on an update of the container's resources. Devices
// that they don't know of are lost then; the program gets EPERM from the next
// open. Two things are done about it:
//
// The device nodes are part of the container's OCI specification, so whoever
// writes the rules from that knows of them. systemd finds a device by its link in
// /dev/char, which NVIDIA's driver doesn't make: the agent does.
//
// And the rules are looked at, and mended. That works on cgroup v1, where they
// can be read and added to. On v2 they are a BPF program, which can be neither;
// there is only the first.

// accessEvery is the pace of looking at the rules; a look takes some reads of
// files for each container and writes nothing.
const accessEvery = 10 * time.Second

// cgroups is where the kernel shows processes and the node's cgroups.
type cgroups struct{ proc, root string }

// watchAccess looks at the containers' rules until ctx ends.
func (a *Agent) watchAccess(ctx context.Context) {
	tick := time.NewTicker(accessEvery)
	defer tick.Stop()
	g := cgroups{procRoot, filepath.Join("/", a.Root.HostRoot, "sys/fs/cgroup")}
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-a.accessDoubted:
		}
		a.mendAccess(g)
	}
}

// Updated notes that the runtime changed a running container's resources, and
// with them perhaps its device rules.
func (a *Agent) Updated(string) { a.doubtAccess() }

func (a *Agent) doubtAccess() {
	select {
	case a.accessDoubted <- struct{}{}:
	default:
	}
}

// opened is a container that should be able to open devices.
type opened struct {
	id  string
	use use
	pod pod
}

// mendAccess gives back what containers lost.
func (a *Agent) mendAccess(g cgroups) {
	var all []opened
	a.mu.Lock()
	for id, u := range a.containers {
		h := a.held[u.uid]
		if !u.adjusted || !u.started || h == nil || h.Grant.Containers[u.container] == nil {
			continue
		}
		if u.devices = a.hardware.given(u.devices); len(u.devices) > 0 {
			all = append(all, opened{id, u, a.pods[u.uid]})
		}
	}
	a.mu.Unlock()
	for _, o := range all {
		dir, err := g.devices(o.use.hostPID, o.id)
		if err != nil || dir == "" {
			continue // it ended, or its rules can't be read
		}
		lost, err := lostDevices(dir, o.use.devices)
		if err != nil || len(lost) == 0 {
			continue
		}
		var names []string
		for _, d := range lost {
			names = append(names, d.Path)
		}
		what := fmt.Sprintf("container %s had lost access to %s: the device rules of its cgroup were rewritten", o.use.container, strings.Join(names, ", "))
		if err := allowDevices(dir, lost); err != nil {
			a.saidOf(o, what+"; they can't be mended: "+err.Error(), reasonAccessLost)
			continue
		}
		a.mu.Lock()
		a.accessRepairs++
		a.mu.Unlock()
		a.saidOf(o, what+"; it has been given back", reasonAccessMended)
	}
}

// saidOf says something of a container's access on its pod, and once in the log.
func (a *Agent) saidOf(o opened, message, reason string) {
	a.mu.Lock()
	u, ok := a.containers[o.id]
	again := ok && reason == reasonAccessLost && u.accessLost
	if ok {
		u.accessLost = reason == reasonAccessLost
		a.containers[o.id] = u
	}
	a.mu.Unlock()
	if again {
		return
	}
	a.Log.Warn(message, "pod", o.pod.namespace+"/"+o.pod.name, "id", o.id)
	a.event(o.pod, corev1.EventTypeWarning, reason, message)
}

// devices is the directory with the device rules of a container's cgroup, empty
// where cgroup v2 holds them. The pid may be another's by now, so the cgroup
// must be named after the container.
func (g cgroups) devices(pid int, id string) (string, error) {
	if pid == 0 || id == "" {
		return "", errors.New("its process isn't known")
	}
	b, err := os.ReadFile(filepath.Join(g.proc, strconv.Itoa(pid), "cgroup"))
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(b)) {
		// hierarchy:controllers:path
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(f) != 3 || !slices.Contains(strings.Split(f[1], ","), "devices") {
			continue
		}
		if !strings.Contains(filepath.Base(f[2]), id) {
			return "", fmt.Errorf("process %d is not in the cgroup of container %s", pid, id)
		}
		return filepath.Join(g.root, "devices", f[2]), nil
	}
	return "", nil
}

// lostDevices are those that the rules in dir don't let be read and written.
func lostDevices(dir string, want []gpu.DeviceNode) ([]gpu.DeviceNode, error) {
	b, err := os.ReadFile(filepath.Join(dir, "devices.list"))
	if err != nil {
		return nil, err
	}
	rules := strings.Split(strings.TrimSpace(string(b)), "\n")
	var lost []gpu.DeviceNode
	for _, d := range want {
		allowed := false
		for _, r := range rules {
			allowed = allowed || allows(r, d)
		}
		if !allowed {
			lost = append(lost, d)
		}
	}
	return lost, nil
}

// allows reports whether a rule, "c 195:* rwm", lets a device be read and
// written.
func allows(rule string, d gpu.DeviceNode) bool {
	f := strings.Fields(rule)
	if len(f) != 3 || f[0] != "a" && f[0] != "c" || !strings.Contains(f[2], "r") || !strings.Contains(f[2], "w") {
		return false
	}
	major, minor, ok := strings.Cut(f[1], ":")
	is := func(text string, n int64) bool { return text == "*" || text == strconv.FormatInt(n, 10) }
	return ok && is(major, d.Major) && is(minor, d.Minor)
}

// allowDevices adds the rules with which the runtime made the container.
func allowDevices(dir string, devices []gpu.DeviceNode) error {
	path := filepath.Join(dir, "devices.allow")
	var faults []error
	for _, d := range devices {
		// One rule for each write, as the kernel takes them.
		f, err := os.OpenFile(path, os.O_WRONLY, 0)
		if err != nil {
			return err
		}
		_, err = fmt.Fprintf(f, "c %d:%d rw\n", d.Major, d.Minor)
		faults = append(faults, err, f.Close())
	}
	return errors.Join(faults...)
}

// linkDevices makes the links by which systemd finds the devices' nodes. They
// are made again when the directory was emptied, and never replaced.
func (a *Agent) linkDevices(nodes []gpu.DeviceNode) error {
	if a.Software {
		return nil // its nodes are no devices of this node
	}
	root := a.Root.DevPath
	if root == "" {
		root = a.Root.Path
	}
	var faults []error
	for _, d := range nodes {
		dir := filepath.Join("/", a.Root.HostRoot, "dev/char")
		link := filepath.Join(dir, fmt.Sprintf("%d:%d", d.Major, d.Minor))
		if _, err := os.Lstat(link); !errors.Is(err, fs.ErrNotExist) {
			continue
		}
		err := errors.Join(os.MkdirAll(dir, 0o755), os.Symlink(filepath.Join(root, d.Path), link))
		if err != nil && !errors.Is(err, fs.ErrExist) && !errors.Is(err, unix.EROFS) {
			faults = append(faults, err)
		}
	}
	return errors.Join(faults...)
}

// given are the devices of a container that the agent knows of: those that its
// grant brought.
func (h *hardwareState) given(list []gpu.DeviceNode) []gpu.DeviceNode {
	var known []gpu.DeviceNode
	for _, n := range h.nodes {
		known = append(known, n)
	}
	if h.driver != nil {
		known = append(known, h.driver.Control...)
	}
	var out []gpu.DeviceNode
	for _, d := range list {
		for _, k := range known {
			if d.Major == k.Major && d.Minor == k.Minor {
				out = append(out, d)
				break
			}
		}
	}
	return out
}
