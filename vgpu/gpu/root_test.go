package gpu

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// tree makes files and links ("->target") below a directory of its own.
func tree(t *testing.T, files map[string]string) string {
	t.Helper()
	root := t.TempDir()
	for name, content := range files {
		p := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			t.Fatal(err)
		}
		var err error
		if target, ok := strings.CutPrefix(content, "->"); ok {
			err = os.Symlink(target, p)
		} else {
			err = os.WriteFile(p, []byte(content), 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return root
}

// The layouts of NVIDIA's own packages, of Debian with its alternatives, and of
// Red Hat's kin. Absolute links are the node's.
var layouts = map[string]struct {
	files  map[string]string
	libDir string
	source map[string]string // by library name, below the root
}{
	"flat, Debian's directory": {map[string]string{
		"/usr/lib/x86_64-linux-gnu/libcuda.so.550.90.07":                  "cuda",
		"/usr/lib/x86_64-linux-gnu/libcuda.so.1":                          "->libcuda.so.550.90.07",
		"/usr/lib/x86_64-linux-gnu/libcuda.so":                            "->libcuda.so.1",
		"/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.550.90.07":             "nvml",
		"/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1":                     "->libnvidia-ml.so.550.90.07",
		"/usr/lib/x86_64-linux-gnu/libnvidia-ptxjitcompiler.so.1":         "->libnvidia-ptxjitcompiler.so.550.90.07",
		"/usr/lib/x86_64-linux-gnu/libnvidia-ptxjitcompiler.so.550.90.07": "ptx",
		"/usr/lib/x86_64-linux-gnu/libnvidia-encode.so.1":                 "encoder",
		"/usr/lib/x86_64-linux-gnu/libcudart.so.12":                       "not the driver's",
		"/usr/lib/x86_64-linux-gnu/libcuda.sock":                          "not a library",
		"/usr/lib/x86_64-linux-gnu/libnvidia-nvvm.so.4":                   "->gone",
		"/usr/bin/nvidia-smi":                                             "smi",
		"/usr/bin/nvidia-cuda-mps-control":                                "mps",
	}, "/usr/lib/x86_64-linux-gnu", map[string]string{
		"libcuda.so":                  "/usr/lib/x86_64-linux-gnu/libcuda.so.550.90.07 libcuda.so libcuda.so.1 libcuda.so.550.90.07",
		"libnvidia-ml.so":             "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.550.90.07 libnvidia-ml.so.1 libnvidia-ml.so.550.90.07",
		"libnvidia-ptxjitcompiler.so": "/usr/lib/x86_64-linux-gnu/libnvidia-ptxjitcompiler.so.550.90.07 libnvidia-ptxjitcompiler.so.1 libnvidia-ptxjitcompiler.so.550.90.07",
	}},
	"alternatives by absolute links": {map[string]string{
		"/usr/lib/x86_64-linux-gnu/nvidia/current/libcuda.so.535.1":      "cuda",
		"/usr/lib/x86_64-linux-gnu/nvidia/current/libcuda.so.1":          "->libcuda.so.535.1",
		"/etc/alternatives/libcuda":                                      "->/usr/lib/x86_64-linux-gnu/nvidia/current/libcuda.so.1",
		"/usr/lib/x86_64-linux-gnu/libcuda.so.1":                         "->/etc/alternatives/libcuda",
		"/usr/lib/x86_64-linux-gnu/nvidia/current/libnvidia-ml.so.535.1": "nvml",
		"/etc/alternatives/libnvidia-ml":                                 "->/usr/lib/x86_64-linux-gnu/nvidia/current/libnvidia-ml.so.535.1",
		"/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1":                    "->/etc/alternatives/libnvidia-ml",
	}, "/usr/lib/x86_64-linux-gnu", map[string]string{
		"libcuda.so":      "/usr/lib/x86_64-linux-gnu/nvidia/current/libcuda.so.535.1 libcuda.so.1",
		"libnvidia-ml.so": "/usr/lib/x86_64-linux-gnu/nvidia/current/libnvidia-ml.so.535.1 libnvidia-ml.so.1",
	}},
	"Red Hat's kin": {map[string]string{
		"/usr/lib64/libcuda.so.570.1":      "cuda",
		"/usr/lib64/libcuda.so.1":          "->libcuda.so.570.1",
		"/usr/lib64/libnvidia-ml.so.570.1": "nvml",
		"/usr/lib64/libnvidia-ml.so.1":     "->libnvidia-ml.so.570.1",
		"/lib64":                           "->usr/lib64",
		"/usr/lib/libcuda.so.1":            "32 bit",
	}, "/usr/lib64", map[string]string{
		"libcuda.so":      "/usr/lib64/libcuda.so.570.1 libcuda.so.1 libcuda.so.570.1",
		"libnvidia-ml.so": "/usr/lib64/libnvidia-ml.so.570.1 libnvidia-ml.so.1 libnvidia-ml.so.570.1",
	}},
}

func TestDriverFilesOfEachLayout(t *testing.T) {
	for name, l := range layouts {
		t.Run(name, func(t *testing.T) {
			for where, root := range map[string]func(dir string) Root{
				"as it is": func(dir string) Root { return Root{Path: dir} },
				// The agent in a container, with the node's root at another place.
				"from a container": func(dir string) Root { return Root{Path: "/", HostRoot: dir} },
			} {
				dir := tree(t, l.files)
				r := root(dir)
				f, err := r.DriverFiles()
				if err != nil {
					t.Fatalf("%s: %v", where, err)
				}
				if f.LibDir != l.libDir || len(f.Libraries) != len(l.source) {
					t.Errorf("%s: %s with %+v", where, f.LibDir, f.Libraries)
				}
				for _, lib := range f.Libraries {
					got := strings.TrimPrefix(lib.Source, strings.TrimSuffix(r.Path, "/")) + " " + strings.Join(lib.Names, " ")
					if got != l.source[lib.Name] {
						t.Errorf("%s: %s is %q, want %q", where, lib.Name, got, l.source[lib.Name])
					}
					if want := map[bool]string{true: "utility", false: "compute"}[lib.Name == LibraryNVML]; lib.Capability != want {
						t.Errorf("%s: %s has capability %s", where, lib.Name, lib.Capability)
					}
				}
				path, err := r.NVMLPath()
				if err != nil {
					t.Fatal(err)
				}
				if b, err := os.ReadFile(path); err != nil || string(b) != "nvml" {
					t.Errorf("%s: NVML is at %s: %q, %v", where, path, b, err)
				}
				if _, smi := l.files["/usr/bin/nvidia-smi"]; smi != (len(f.Binaries) == 1 && f.Binaries[0].Path == "/usr/bin/nvidia-smi") {
					t.Errorf("%s: programs %+v", where, f.Binaries)
				}
			}
		})
	}
}

func TestARootWithoutADriver(t *testing.T) {
	r := Root{Path: tree(t, map[string]string{"/usr/lib64/libcuda.so.1": "cuda"})}
	if _, err := r.NVMLPath(); !errors.Is(err, ErrNoDriver) {
		t.Errorf("NVMLPath: %v", err)
	}
	r = Root{Path: tree(t, map[string]string{"/usr/lib64/libnvidia-ml.so.1": "nvml"})}
	if _, err := r.DriverFiles(); err == nil || !strings.Contains(err.Error(), "no libcuda.so") {
		t.Errorf("DriverFiles: %v", err)
	}
	if _, err := (Root{Path: "/nonexistent"}).DriverFiles(); err == nil {
		t.Error("a root that isn't there has files")
	}
}

func TestTwoVersionsSideBySide(t *testing.T) {
	r := Root{Path: tree(t, map[string]string{
		"/usr/lib64/libcuda.so.535.1":  "old",
		"/usr/lib64/libcuda.so.550.1":  "new",
		"/usr/lib64/libcuda.so.1":      "->libcuda.so.550.1",
		"/usr/lib64/libnvidia-ml.so.1": "nvml",
	})}
	f, err := r.DriverFiles()
	if err != nil {
		t.Fatal(err)
	}
	l, ok := f.Library(LibraryCUDA)
	if !ok || !strings.HasSuffix(l.Source, "libcuda.so.550.1") {
		t.Errorf("%+v", l)
	}
	n := 0
	for _, l := range f.Libraries {
		if l.Name == LibraryCUDA {
			n++
		}
	}
	if n != 2 {
		t.Errorf("%d of the 2 versions are listed: the other would stay without a front", n)
	}
}

func TestSoftwareMarker(t *testing.T) {
	for name, c := range map[string]struct {
		files map[string]string
		want  bool
		fails bool
	}{
		"a driver":         {nil, false, false},
		"the software":     {map[string]string{"/softgpu/config.json": `{"software":true,"driver":"550"}`}, true, false},
		"a broken mark":    {map[string]string{"/softgpu/config.json": `{`}, false, true},
		"a mark that lies": {map[string]string{"/softgpu/config.json": `{"software":false}`}, false, false},
	} {
		got, err := (Root{Path: tree(t, c.files)}).Software()
		if got != c.want || (err != nil) != c.fails {
			t.Errorf("%s: %v, %v", name, got, err)
		}
	}
}

func TestDeviceNodes(t *testing.T) {
	dir := t.TempDir()
	if err := os.MkdirAll(filepath.Join(dir, "dev"), 0o755); err != nil {
		t.Fatal(err)
	}
	r := Root{Path: "/", HostRoot: dir}
	if _, err := r.ControlNodes(); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("without nvidiactl: %v", err)
	}
	for name, minor := range map[string]uint32{"nvidiactl": 255, "nvidia-uvm": 0, "nvidia7": 7} {
		if err := unix.Mknod(filepath.Join(dir, "dev", name), unix.S_IFCHR|0o666, int(unix.Mkdev(195, minor))); err != nil {
			t.Fatal(err)
		}
	}
	control, err := r.ControlNodes()
	if err != nil || len(control) != 2 || control[0] != (DeviceNode{"/dev/nvidiactl", 195, 255}) {
		t.Errorf("%+v, %v: nvidia-uvm-tools isn't in every driver", control, err)
	}
	if n, err := r.CardNode(7); err != nil || n != (DeviceNode{"/dev/nvidia7", 195, 7}) {
		t.Errorf("%+v, %v", n, err)
	}
	if err := os.WriteFile(filepath.Join(dir, "dev", "nvidia0"), nil, 0o666); err != nil {
		t.Fatal(err)
	}
	if n, err := r.CardNode(0); err == nil {
		t.Errorf("a plain file passes for a card: %+v", n)
	}
}

func TestMemoryThatCanBeHandedOut(t *testing.T) {
	for _, c := range []struct {
		total, reserved uint64
		want            int64
	}{{81920 << 20, 0, 81920}, {81920 << 20, 512<<20 + 1, 81407}, {1 << 20, 2 << 20, 0}} {
		if got := (Card{MemoryBytes: c.total, ReservedBytes: c.reserved}).MemoryMiB(); got != c.want {
			t.Errorf("%d less %d: %d MiB, want %d", c.total, c.reserved, got, c.want)
		}
	}
}
