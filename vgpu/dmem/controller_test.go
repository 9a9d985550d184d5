package dmem

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/carve-gpu/carve/vgpu/gpu"
)

const (
	uuidA = "GPU-00000000-0000-0000-0000-00000000000a"
	uuidB = "GPU-00000000-0000-0000-0000-00000000000b"
	id    = "4f1c0ffee4f1c0ffee"
	group = "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1.slice/cri-containerd-" + id + ".scope"
	pid   = 77
)

func cards() []gpu.Card {
	return []gpu.Card{
		{UUID: uuidA, PCIBusID: "00000000:07:00.0", MemoryBytes: 80 << 30},
		{UUID: uuidB, PCIBusID: "00000000:0F:00.0", MemoryBytes: 40 << 30},
	}
}

// kernel is a tree of files that behaves as cgroup v2 with the controller does.
type kernel struct {
	t     *testing.T
	mount string
	proc  string
	*Controller
	// writes are the files that were written, relative to the mount.
	writes []string
	// refuse fails writes to files with that name.
	refuse map[string]error
}

func newKernel(t *testing.T, capacity string) *kernel {
	t.Helper()
	dir := t.TempDir()
	k := &kernel{t: t, mount: filepath.Join(dir, "cgroup"), proc: filepath.Join(dir, "proc"), refuse: map[string]error{}}
	k.Controller = New(k.proc, k.mount)
	k.write = k.written
	k.put(fileControllers, "cpu memory dmem pids\n")
	k.put(fileSubtree, "cpu memory\n")
	k.put(fileCapacity, capacity)
	at := ""
	for _, name := range strings.Split(group, "/") {
		at = filepath.Join(at, name)
		k.put(filepath.Join(at, fileControllers), "cpu memory\n")
		k.put(filepath.Join(at, fileSubtree), "cpu memory\n")
	}
	k.process(pid, "12:devices:/kubepods\n0::/"+group+"\n")
	return k
}

func twoRegions() string {
	return fmt.Sprintf("drm/0000:07:00.0/vram0 %d\ndrm/0000:0f:00.0/vram0 %d\n", int64(80<<30)-300<<20, int64(40<<30))
}

func (k *kernel) process(pid int, groups string) {
	k.t.Helper()
	dir := filepath.Join(k.proc, fmt.Sprint(pid))
	if err := errors.Join(os.MkdirAll(dir, 0o755), os.WriteFile(filepath.Join(dir, "cgroup"), []byte(groups), 0o644)); err != nil {
		k.t.Fatal(err)
	}
}

func (k *kernel) put(name, content string) {
	k.t.Helper()
	path := filepath.Join(k.mount, name)
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(content), 0o644)); err != nil {
		k.t.Fatal(err)
	}
}

func (k *kernel) content(name string) string {
	b, err := os.ReadFile(filepath.Join(k.mount, name))
	if err != nil {
		return "(" + err.Error() + ")"
	}
	return string(b)
}

// written does what the kernel does with a write.
func (k *kernel) written(path, text string) error {
	name, err := filepath.Rel(k.mount, path)
	if err != nil {
		return err
	}
	base := filepath.Base(path)
	if err := k.refuse[base]; err != nil {
		return &os.PathError{Op: "write", Path: path, Err: err}
	}
	if _, err := os.Stat(path); err != nil {
		return err
	}
	k.writes = append(k.writes, name)
	switch base {
	case fileSubtree:
		if !strings.Contains(k.content(filepath.Join(filepath.Dir(name), fileControllers)), controller) {
			return &os.PathError{Op: "write", Path: path, Err: unix.ENOENT}
		}
		k.put(name, strings.TrimSpace(k.content(name))+" dmem\n")
		children, err := os.ReadDir(filepath.Dir(path))
		if err != nil {
			return err
		}
		for _, c := range children {
			if c.IsDir() {
				child := filepath.Join(filepath.Dir(name), c.Name())
				k.put(filepath.Join(child, fileControllers), "cpu memory dmem\n")
				k.put(filepath.Join(child, fileMax), "drm/0000:07:00.0/vram0 max\ndrm/0000:0f:00.0/vram0 max\n")
				k.put(filepath.Join(child, fileCurrent), "drm/0000:07:00.0/vram0 0\ndrm/0000:0f:00.0/vram0 0\n")
			}
		}
	case fileMax:
		now, err := parseAmounts([]byte(k.content(name)))
		if err != nil {
			return err
		}
		asked, err := parseAmounts([]byte(text))
		if err != nil {
			return &os.PathError{Op: "write", Path: path, Err: unix.EINVAL}
		}
		current, err := parseAmounts([]byte(k.content(filepath.Join(filepath.Dir(name), fileCurrent))))
		if err != nil {
			return err
		}
		var out strings.Builder
		for _, region := range sorted(now) {
			if want, ok := asked[region]; ok && current[region] <= want {
				now[region] = pages(want)
			}
			fmt.Fprintf(&out, "%s %s\n", region, amount(now[region]))
		}
		k.put(name, out.String())
	}
	return nil
}

func (k *kernel) looked() map[string]error {
	return k.Look(cards())
}

func TestCardsAndTheirRegions(t *testing.T) {
	for name, c := range map[string]struct {
		capacity string
		a, b     string // part of the sentence, empty for a card that is held
	}{
		"by address":         {twoRegions(), "", ""},
		"by UUID":            {fmt.Sprintf("nvidia/%s %d\nnvidia/%s/fb %d\n", strings.ToLower(uuidA), int64(80<<30), uuidB, int64(40<<30)), "", ""},
		"one of two":         {fmt.Sprintf("drm/0000:07:00.0/vram0 %d\n", int64(80<<30)), "", "no region of the card"},
		"another card's":     {fmt.Sprintf("drm/0000:08:00.0/vram0 %d\n", int64(80<<30)), "no region of the card", "no region of the card"},
		"of another name":    {fmt.Sprintf("nvidia0 %d\nnvidia1 %d\n", int64(80<<30), int64(40<<30)), "names it in a way that isn't known", "isn't known"},
		"host memory beside": {twoRegions() + fmt.Sprintf("drm/0000:07:00.0/gtt %d\ndrm/0000:07:00.0/stolen %d\n", int64(1<<40), 64<<20), "", ""},
		"two of its size":    {twoRegions() + fmt.Sprintf("drm/0000:07:00.0/vram1 %d\n", int64(80<<30)), "several regions", ""},
		"of another size":    {fmt.Sprintf("drm/0000:07:00.0/vram0 %d\ndrm/0000:0f:00.0/vram0 %d\n", int64(8<<30), int64(40<<30)), "as large as it is", ""},
		"without a size":     {"drm/0000:07:00.0/vram0 max\ndrm/0000:0f:00.0/vram0 0\n", "as large as it is", "as large as it is"},
		"nothing":            {"", "R615", "R615"},
		"nonsense":           {"drm/0000:07:00.0/vram0\n", "not a region and a number", "not a region"},
		"one for both":       {fmt.Sprintf("drm/0000:07:00.0/0000:0f:00.0/vram0 %d\n", int64(41<<30)), "could be of 2 cards", "could be of 2 cards"},
	} {
		t.Run(name, func(t *testing.T) {
			k := newKernel(t, c.capacity)
			got := k.looked()
			for uuid, want := range map[string]string{uuidA: c.a, uuidB: c.b} {
				if err := got[uuid]; (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
					t.Errorf("card %s: %v, want %q", uuid, err, want)
				}
			}
		})
	}
}

func TestNodesWithoutTheController(t *testing.T) {
	for name, c := range map[string]struct {
		change func(*kernel)
		want   string
	}{
		"no cgroup at all": {func(k *kernel) { os.RemoveAll(k.mount) }, "no cgroup v2"},
		"cgroup v1":        {func(k *kernel) { os.RemoveAll(k.mount); k.put("devices/tasks", "") }, "no cgroup v2"},
		"an older kernel":  {func(k *kernel) { k.put(fileControllers, "cpu memory pids\n") }, "no dmem controller"},
		"half present":     {func(k *kernel) { os.Remove(filepath.Join(k.mount, fileCapacity)) }, "no dmem.capacity"},
		"without a driver": {func(k *kernel) { k.put(fileCapacity, "") }, "no driver has registered"},
	} {
		k := newKernel(t, twoRegions())
		c.change(k)
		for uuid, err := range k.looked() {
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("%s: card %s: %v, want %q", name, uuid, err, c.want)
			}
		}
		// And nothing is tried then.
		if err := k.Hold(pid, id, map[string]uint64{uuidA: 1 << 30}); err != nil || k.writes != nil {
			t.Errorf("%s: hold: %v, written %v", name, err, k.writes)
		}
		if used, err := k.Used(pid, id); err != nil || used != nil {
			t.Errorf("%s: used %v, %v", name, used, err)
		}
	}
}

func TestCgroupV2BesideV1(t *testing.T) {
	k := newKernel(t, twoRegions())
	if err := os.Rename(k.mount, k.mount+".v2"); err != nil {
		t.Fatal(err)
	}
	k.put("devices/tasks", "")
	if err := os.Rename(k.mount+".v2", filepath.Join(k.mount, "unified")); err != nil {
		t.Fatal(err)
	}
	for uuid, err := range k.looked() {
		if err != nil {
			t.Errorf("card %s: %v", uuid, err)
		}
	}
}

func TestALimitIsPutInForceAndFollows(t *testing.T) {
	k := newKernel(t, twoRegions())
	k.looked()
	limits := map[string]uint64{uuidA: 8000 << 20, uuidB: 3<<30 + 100}
	if err := k.Hold(pid, id, limits); err != nil {
		t.Fatal(err)
	}
	want := fmt.Sprintf("drm/0000:07:00.0/vram0 %d\ndrm/0000:0f:00.0/vram0 %d\n", 8000<<20, int64(3<<30))
	if got := k.content(group + "/" + fileMax); got != want {
		t.Fatalf("dmem.max is %q, want %q", got, want)
	}
	// The others on the way down have no limit.
	if got := k.content("kubepods.slice/" + fileMax); strings.Count(got, "max") != 2 {
		t.Errorf("kubepods.slice has %q", got)
	}
	written := len(k.writes)
	if err := k.Hold(pid, id, limits); err != nil || len(k.writes) != written {
		t.Errorf("the same again: %v, written %v", err, k.writes[written:])
	}
	// Somebody takes it away.
	k.put(group+"/"+fileMax, "drm/0000:07:00.0/vram0 max\ndrm/0000:0f:00.0/vram0 max\n")
	if err := k.Hold(pid, id, limits); err != nil || k.content(group+"/"+fileMax) != want {
		t.Errorf("put back: %v, %q", err, k.content(group+"/"+fileMax))
	}
	k.put(group+"/"+fileCurrent, fmt.Sprintf("drm/0000:07:00.0/vram0 %d\ndrm/0000:0f:00.0/vram0 0\n", 5000<<20))
	if used, err := k.Used(pid, id); err != nil || len(used) != 2 || used[uuidA] != 5000<<20 || used[uuidB] != 0 {
		t.Errorf("used %v, %v", used, err)
	}
	limits[uuidA] = 5000 << 20
	if err := k.Hold(pid, id, limits); err != nil {
		t.Errorf("down to what is in use: %v", err)
	}
	limits[uuidA] = 4999 << 20
	if err := k.Hold(pid, id, limits); !errors.Is(err, gpu.ErrInUse) || !strings.Contains(err.Error(), "stays at 5242880000") {
		t.Errorf("below what is in use: %v", err)
	}
	limits[uuidA] = 9000 << 20
	if err := k.Hold(pid, id, limits); err != nil || !strings.Contains(k.content(group+"/"+fileMax), fmt.Sprint(9000<<20)) {
		t.Errorf("up: %v", err)
	}
}

func TestOnlyTheContainersOwnCgroupIsLimited(t *testing.T) {
	k := newKernel(t, twoRegions())
	k.looked()
	limits := map[string]uint64{uuidA: 1 << 30}
	// A program of the container made a cgroup below: the container's own counts,
	// whatever that one is called.
	k.process(78, "0::/"+group+"/inner-"+id+"/more\n")
	if err := k.Hold(78, id, limits); err != nil || !strings.Contains(k.content(group+"/"+fileMax), fmt.Sprint(1<<30)) {
		t.Errorf("from below: %v, %q", err, k.content(group+"/"+fileMax))
	}
	k.writes = nil
	for name, c := range map[string]struct {
		pid, id string
		groups  string
		ended   bool
	}{
		"the pid is another's by now":    {"79", id, "0::/kubepods.slice/other.scope\n", true},
		"the cgroup is gone":             {"80", id, "0::/kubepods.slice/gone/cri-containerd-" + id + ".scope\n", true},
		"the process is gone":            {"81", id, "", true},
		"it is in no cgroup of v2":       {"82", id, "4:devices:/" + group + "\n", false},
		"the root is nobody's container": {"83", id, "0::/\n", true},
		"no ID":                          {"84", "", "0::/" + group + "\n", false},
	} {
		var n int
		fmt.Sscan(c.pid, &n)
		if c.groups != "" {
			k.process(n, c.groups)
		}
		err := k.Hold(n, c.id, limits)
		if err == nil || errors.Is(err, gpu.ErrEnded) != c.ended {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := k.Used(n, c.id); err == nil || errors.Is(err, gpu.ErrEnded) != c.ended {
			t.Errorf("%s: used: %v", name, err)
		}
	}
	if err := k.Hold(0, id, limits); err == nil {
		t.Error("held without a process")
	}
	if len(k.writes) != 0 {
		t.Errorf("written %v", k.writes)
	}
}

func TestWhatTheKernelRefuses(t *testing.T) {
	limits := map[string]uint64{uuidA: 1 << 30}
	for name, c := range map[string]struct {
		change func(*kernel)
		want   error
	}{
		"read-only": {func(k *kernel) { k.refuse[fileSubtree], k.refuse[fileMax] = unix.EROFS, unix.EROFS }, unix.EROFS},
		"the limit is read-only": {func(k *kernel) {
			if err := k.Hold(pid, id, map[string]uint64{uuidA: 2 << 30}); err != nil {
				k.t.Fatal(err)
			}
			k.refuse[fileMax] = unix.EACCES
		}, unix.EACCES},
		"processes on the way down": {func(k *kernel) { k.refuse[fileSubtree] = unix.EBUSY }, unix.EBUSY},
		"no limits there":           {func(k *kernel) { k.write = func(string, string) error { return nil } }, os.ErrNotExist},
	} {
		k := newKernel(t, twoRegions())
		k.looked()
		c.change(k)
		if err := k.Hold(pid, id, limits); !errors.Is(err, c.want) || errors.Is(err, gpu.ErrEnded) {
			t.Errorf("%s: %v", name, err)
		}
	}
	// It ends while it is being held.
	k := newKernel(t, twoRegions())
	k.looked()
	k.write = func(path, text string) error {
		err := k.written(path, text)
		if filepath.Base(path) == fileMax {
			os.RemoveAll(filepath.Join(k.mount, group))
		}
		return err
	}
	if err := k.Hold(pid, id, limits); !errors.Is(err, gpu.ErrEnded) {
		t.Errorf("ended meanwhile: %v", err)
	}
}

func TestMIGIsNotHeld(t *testing.T) {
	k := newKernel(t, twoRegions())
	list := cards()
	list[0].MIGMode = "enabled"
	if got := k.Look(list); got[uuidA] == nil || got[uuidB] != nil {
		t.Errorf("%v", got)
	}
}

func FuzzAmounts(f *testing.F) {
	f.Add([]byte(twoRegions()))
	f.Add([]byte("a max\nb 1\n\nc\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := parseAmounts(b)
		if err != nil {
			return
		}
		var text strings.Builder
		for _, r := range sorted(m) {
			fmt.Fprintf(&text, "%s %s\n", r, amount(m[r]))
			of(r, cards()[0])
		}
		again, err := parseAmounts([]byte(text.String()))
		if err != nil || len(again) != len(m) {
			t.Fatalf("%q: %v", text.String(), err)
		}
	})
}
