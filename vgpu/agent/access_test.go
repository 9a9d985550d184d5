package agent

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/vgpu/gpu"
)

func TestDeviceRules(t *testing.T) {
	card := gpu.DeviceNode{Path: "/dev/nvidia0", Major: 195, Minor: 0}
	for rule, want := range map[string]bool{
		"c 195:0 rwm": true, "c 195:0 rw": true, "c 195:* rwm": true, "c *:* rwm": true, "a *:* rwm": true,
		"c 195:0 r": false, "c 195:1 rwm": false, "c 19:50 rwm": false, "b 195:0 rwm": false, "c *:* m": false, "": false, "nonsense here": false,
	} {
		if got := allows(rule, card); got != want {
			t.Errorf("%q: %v", rule, got)
		}
	}
}

// fakeCgroups is a kernel that shows one process in a cgroup of version 1. What
// is written to devices.allow is seen in devices.list as the kernel does it.
type fakeCgroups struct {
	cgroups
	t   *testing.T
	dir string
}

func newFakeCgroups(t *testing.T, pid int, id string) *fakeCgroups {
	root := t.TempDir()
	f := &fakeCgroups{cgroups{filepath.Join(root, "proc"), filepath.Join(root, "cgroup")}, t, filepath.Join(root, "cgroup/devices/kubepods", "pod1", id)}
	f.write(filepath.Join(f.proc, fmt.Sprint(pid), "cgroup"), "4:memory:/kubepods/pod1/"+id+"\n3:devices:/kubepods/pod1/"+id+"\n0::/\n")
	f.write(filepath.Join(f.dir, "devices.allow"), "")
	return f
}

func (f *fakeCgroups) write(path, text string) {
	f.t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		f.t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		f.t.Fatal(err)
	}
}

func (f *fakeCgroups) rules(text string) { f.write(filepath.Join(f.dir, "devices.list"), text) }

func (f *fakeCgroups) allowed() string {
	b, err := os.ReadFile(filepath.Join(f.dir, "devices.allow"))
	if err != nil {
		f.t.Fatal(err)
	}
	return strings.TrimSpace(string(b))
}

func TestLostDeviceAccessIsGivenBack(t *testing.T) {
	n := startNode(t)
	n.link()
	n.api.setPod(podWith(t, "uid-1", grantOf("uid-1", 1, map[string][]api.CardGrant{"app": shareOf(cardA, 100, 0)})))
	eventually(t, "the slice is prepared", func() bool { return n.prepared("uid-1", "app") })
	n.Adjusted(RuntimeContainer{ID: "c1", PodUID: "uid-1", Name: "app"})
	n.Started("c1", 77)
	g := newFakeCgroups(t, 77, "c1")

	// All is well: the control node and the card.
	g.rules("c *:* m\nc 195:0 rwm\nc 195:1 rwm\n")
	n.mendAccess(g.cgroups)
	if got := g.allowed(); got != "" || n.View().AccessRepairs != 0 {
		t.Errorf("without a fault %q was written", got)
	}
	// The card is lost, the control node isn't.
	g.rules("c *:* m\nc 195:0 rwm\n")
	n.mendAccess(g.cgroups)
	if got := g.allowed(); got != "c 195:1 rw" || n.View().AccessRepairs != 1 {
		t.Errorf("%q was written, %d repairs", got, n.View().AccessRepairs)
	}
	eventually(t, "an event", func() bool {
		return strings.Contains(n.api.said(), "pod-uid-1 DeviceAccessRepaired: container app had lost access to /dev/nvidia0")
	})

	// After the agent's restart, the runtime says what the container has; its
	// own devices are not ours to give.
	n.stop()
	n.start()
	n.link(RuntimeContainer{ID: "c1", PodUID: "uid-1", Name: "app", Adjusted: true, HostPID: 77,
		Devices: []gpu.DeviceNode{{Path: "/dev/nvidia0", Major: 195, Minor: 1}, {Path: "/dev/fuse", Major: 10, Minor: 229}}})
	eventually(t, "the cards are known", n.hardwareReady)
	g.write(filepath.Join(g.dir, "devices.allow"), "")
	g.rules("")
	eventually(t, "the slice is prepared", func() bool { return n.prepared("uid-1", "app") })
	n.mendAccess(g.cgroups)
	if got := g.allowed(); got != "c 195:1 rw" {
		t.Errorf("after a restart %q was written", got)
	}
}

func TestDeviceAccessThatCannotBeMendedIsSaidOnce(t *testing.T) {
	n := startNode(t)
	n.link()
	n.api.setPod(podWith(t, "uid-1", grantOf("uid-1", 1, map[string][]api.CardGrant{"app": shareOf(cardA, 100, 0)})))
	eventually(t, "the slice is prepared", func() bool { return n.prepared("uid-1", "app") })
	n.Adjusted(RuntimeContainer{ID: "c1", PodUID: "uid-1", Name: "app"})
	n.Started("c1", 77)
	g := newFakeCgroups(t, 77, "c1")
	g.rules("")
	if err := os.Remove(filepath.Join(g.dir, "devices.allow")); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		n.mendAccess(g.cgroups)
	}
	eventually(t, "an event", func() bool { return strings.Contains(n.api.said(), "DeviceAccessLost") })
	if n.View().AccessRepairs != 0 {
		t.Error("what failed counts as a repair")
	}
	// Another process with that pid, or cgroup v2: hands off.
	for _, text := range []string{"3:devices:/system.slice/sshd\n", "0::/kubepods/pod1/c1\n"} {
		g.write(filepath.Join(g.proc, "77/cgroup"), text)
		if dir, _ := g.devices(77, "c1"); dir != "" {
			t.Errorf("%q: rules in %s", text, dir)
		}
	}
}

func TestSystemdFindsTheDevices(t *testing.T) {
	dir := t.TempDir()
	a := &Agent{Config: Config{Root: gpu.Root{Path: "/run/nvidia/driver", HostRoot: dir}}}
	nodes := []gpu.DeviceNode{{Path: "/dev/nvidiactl", Major: 195, Minor: 255}, {Path: "/dev/nvidia0", Major: 195, Minor: 0}}
	for range 2 {
		if err := a.linkDevices(nodes); err != nil {
			t.Fatal(err)
		}
	}
	if to, err := os.Readlink(filepath.Join(dir, "dev/char/195:0")); err != nil || to != "/run/nvidia/driver/dev/nvidia0" {
		t.Errorf("%q, %v", to, err)
	}
	other := &Agent{Config: Config{Root: gpu.Root{Path: "/", HostRoot: t.TempDir()}, Software: true}}
	if err := other.linkDevices(nodes); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(filepath.Join(other.Root.HostRoot, "dev")); err == nil {
		t.Error("the software GPU's nodes were linked")
	}
}
