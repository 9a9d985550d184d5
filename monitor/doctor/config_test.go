package doctor

import (
	"fmt"
	"io/fs"
	"net"
	"os"
	"path"
	"path/filepath"
	"reflect"
	"sort"
	"strings"
	"testing"
	"time"

	"github.com/carve-gpu/carve/vgpu/gpu"
)

// files is a node's file system in memory.
type files map[string]string

func (f files) read(p string) ([]byte, error) {
	text, ok := f[p]
	if !ok {
		return nil, fmt.Errorf("open %s: %w", p, fs.ErrNotExist)
	}
	return []byte(text), nil
}

func (f files) glob(pattern string) []string {
	var out []string
	for p := range f {
		if ok, _ := path.Match(pattern, p); ok {
			out = append(out, p)
		}
	}
	sort.Strings(out)
	return out
}

func TestContainerdConfig(t *testing.T) {
	for name, c := range map[string]struct {
		files files
		want  Runtime
	}{
		"none: containerd's defaults": {files{}, Runtime{}},
		"1.7 with NRI off and NVIDIA's runtime as default": {files{"/c.toml": `
version = 2
[plugins."io.containerd.nri.v1.nri"]
  disable = true
[plugins."io.containerd.grpc.v1.cri".containerd]
  default_runtime_name = "nvidia"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.nvidia.options]
    BinaryName = "/usr/bin/nvidia-container-runtime"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
`}, Runtime{ConfigVersion: 2, NRI: "off", DefaultRuntime: "nvidia", DefaultBinary: "/usr/bin/nvidia-container-runtime", NVIDIARuntimes: []string{"nvidia"}}},
		"2.x with NRI on": {files{"/c.toml": `
version = 3
[plugins.'io.containerd.nri.v1.nri']
  disable = false
[plugins.'io.containerd.cri.v1.runtime'.containerd]
  default_runtime_name = 'runc'
`}, Runtime{ConfigVersion: 3, NRI: "on", DefaultRuntime: "runc"}},
		"a drop-in wins": {files{"/c.toml": "version = 3\nimports = [\"conf.d/*.toml\"]\n[plugins.\"io.containerd.nri.v1.nri\"]\ndisable = false\n[plugins.\"io.containerd.cri.v1.runtime\".containerd]\ndefault_runtime_name = \"runc\"\n",
			"/conf.d/a.toml": "version = 3\n[plugins.\"io.containerd.cri.v1.runtime\".containerd.runtimes.gpu.options]\nBinaryName = \"/opt/nvidia-container-runtime\"\n",
			"/conf.d/b.toml": "version = 3\n[plugins.\"io.containerd.nri.v1.nri\"]\ndisable = true\n"},
			Runtime{ConfigVersion: 3, NRI: "off", DefaultRuntime: "runc", NVIDIARuntimes: []string{"gpu"}}},
		"NRI as a disabled plugin":     {files{"/c.toml": "version = 3\ndisabled_plugins = [\"io.containerd.nri.v1.nri\"]\n"}, Runtime{ConfigVersion: 3, NRI: "off"}},
		"files that import each other": {files{"/c.toml": "version = 3\nimports = [\"/d.toml\"]\n", "/d.toml": "imports = [\"/c.toml\"]\n"}, Runtime{ConfigVersion: 3}},
	} {
		t.Run(name, func(t *testing.T) {
			r := Runtime{ConfigPath: "/c.toml"}
			readContainerd(&r, c.files.read, c.files.glob)
			c.want.ConfigPath = "/c.toml"
			if !reflect.DeepEqual(r, c.want) {
				t.Errorf("got  %+v\nwant %+v", r, c.want)
			}
		})
	}
	r := Runtime{ConfigPath: "/c.toml"}
	readContainerd(&r, files{"/c.toml": "version = [\n"}.read, files{}.glob)
	if !strings.Contains(r.ConfigFault, "/c.toml") {
		t.Errorf("a broken file gives %+v", r)
	}
}

func TestCRIOConfig(t *testing.T) {
	r := Runtime{ConfigPath: "/etc/crio/crio.conf"}
	f := files{
		"/etc/crio/crio.conf":         "[crio.nri]\nenable_nri = true\n[crio.runtime]\ndefault_runtime = \"crun\"\n",
		"/etc/crio/crio.conf.d/99-nv": "[crio.nri]\nenable_nri = false\n[crio.runtime]\ndefault_runtime = \"nvidia\"\n[crio.runtime.runtimes.nvidia]\nruntime_path = \"/usr/bin/nvidia-container-runtime\"\n",
	}
	readCRIO(&r, f.read, f.glob)
	if r.NRI != "off" || r.DefaultRuntime != "nvidia" || r.DefaultBinary != "/usr/bin/nvidia-container-runtime" || len(r.NVIDIARuntimes) != 1 || r.ConfigFault != "" {
		t.Errorf("%+v", r)
	}
}

func TestToolkitConfig(t *testing.T) {
	for text, want := range map[string]Toolkit{
		"": {AcceptEnv: true},
		"accept-nvidia-visible-devices-envvar-when-unprivileged = false\naccept-nvidia-visible-devices-as-volume-mounts = true\n[nvidia-container-runtime]\nmode = \"auto\"\n": {AcceptMounts: true},
		"accept-nvidia-visible-devices-envvar-when-unprivileged = true\n": {AcceptEnv: true},
	} {
		var got Toolkit
		if err := readToolkit(&got, []byte(text)); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%q: %+v, %v, want %+v", text, got, err, want)
		}
	}
}

func TestMountInfo(t *testing.T) {
	const info = `22 1 0:20 / / rw,relatime - overlay overlay rw
30 22 0:25 / /run rw,nosuid shared:5 - tmpfs tmpfs rw
31 30 0:26 / /run/carve rw,nosuid master:7 - tmpfs tmpfs rw
32 30 0:27 / /run/carved rw,nosuid shared:9 - tmpfs tmpfs rw
`
	for p, want := range map[string]bool{"/run/carve": false, "/run/carve/x": false, "/run/carved": true, "/run/other": true, "/var": false} {
		if got := shared([]byte(info), p); got != want {
			t.Errorf("%s: shared is %v", p, got)
		}
	}
}

func TestMajors(t *testing.T) {
	got := readMajors([]byte("Character devices:\n  1 mem\n195 nvidia\n511 nvidia-uvm\n\nBlock devices:\n  8 sd\n195 other\n"))
	if want := map[string]int64{"mem": 1, "nvidia": 195, "nvidia-uvm": 511}; !reflect.DeepEqual(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

func FuzzContainerdConfig(f *testing.F) {
	f.Add([]byte("version = 3\nimports = [\"/c.toml\", 3]\n[plugins.a]\ncontainerd = 3\n"))
	f.Add([]byte("plugins = 3\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		n := files{"/c.toml": string(b)}
		r := Runtime{ConfigPath: "/c.toml"}
		readContainerd(&r, n.read, n.glob)
		r = Runtime{ConfigPath: "/c.toml"}
		readCRIO(&r, n.read, n.glob)
		_ = readToolkit(&Toolkit{}, b)
	})
}

// TestGather reads a made-up node from disk.
func TestGather(t *testing.T) {
	root := t.TempDir()
	write := func(p, text string) {
		t.Helper()
		p = filepath.Join(root, p)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write("etc/custom.toml", "version = 3\nimports = [\"/etc/conf.d/*.toml\"]\n")
	write("etc/conf.d/x.toml", "[plugins.\"io.containerd.nri.v1.nri\"]\ndisable = true\n")
	write("proc/12/cmdline", "/usr/bin/containerd\x00--config\x00/etc/custom.toml\x00")
	write("proc/13/cmdline", "/usr/bin/nvidia-ctk-installer\x00--runtime=containerd\x00")
	write("proc/13/environ", "A=b\x00ENABLE_NRI_PLUGIN=true\x00")
	write("proc/devices", "Character devices:\n195 nvidia\n")
	write("etc/nvidia-container-runtime/config.toml", "accept-nvidia-visible-devices-envvar-when-unprivileged = false\n")
	write("var/run/cdi/nvidia.yaml", "")
	write("usr/lib64/libnvidia-ml.so.550.90.07", "")
	write("usr/lib64/libcuda.so.550.90.07", "")
	for name, to := range map[string]string{"libnvidia-ml.so.1": "libnvidia-ml.so.550.90.07", "libcuda.so.1": "libcuda.so.550.90.07"} {
		if err := os.Symlink(to, filepath.Join(root, "usr/lib64", name)); err != nil {
			t.Fatal(err)
		}
	}
	write("dev/nvidia0", "")
	state, run, kubelet := filepath.Join(root, "state"), filepath.Join(root, "run"), filepath.Join(root, "kubelet")
	write("state/journal/a.json", "{}")
	write("state/journal/b.json.damaged", "{}")
	write("state/journal/.new-1", "{}")
	write("run/x", "")
	write("kubelet/device-plugins/x", "")
	now := time.Now()
	f := Gather(Config{
		Node: "n", HostRoot: root, Proc: filepath.Join(root, "proc"), NRISocket: filepath.Join(root, "nri.sock"),
		RunDir: run, StateDir: state, KubeletDir: kubelet, Root: gpu.Root{Path: "/", HostRoot: root},
		APITime: func() (time.Time, error) { return now.Add(2 * time.Minute), nil },
	})
	if f.Runtime.ConfigPath != "/etc/custom.toml" || f.Runtime.NRI != "off" || !strings.Contains(f.Runtime.NRISocketFault, "no such socket") {
		t.Errorf("runtime: %+v", f.Runtime)
	}
	if f.Toolkit.AcceptEnv || f.Toolkit.NRIPlugin != "process 13 (nvidia-ctk-installer)" || len(f.Toolkit.CDISpecs) != 1 {
		t.Errorf("toolkit: %+v", f.Toolkit)
	}
	if f.Driver.Version != "550.90.07" || f.Driver.Software {
		t.Errorf("driver: %+v", f.Driver)
	}
	if len(f.Devices) != 1 || f.Devices[0].Path != "/dev/nvidia0" || f.Devices[0].Fault == "" {
		t.Errorf("devices: %+v", f.Devices)
	}
	if f.Journal.Records != 1 || len(f.Journal.Damaged) != 1 {
		t.Errorf("journal: %+v", f.Journal)
	}
	if f.Kubelet.Fault == "" || f.Clock.Skew > -time.Minute || !f.Library.Unknown {
		t.Errorf("kubelet %+v, clock %+v, library %+v", f.Kubelet, f.Clock, f.Library)
	}
	// A socket that is served, and one whose server has gone.
	short, err := os.MkdirTemp("", "nri")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(short)
	sock := filepath.Join(short, "s")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: sock, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	if fault := served(sock, nil); fault != "" {
		t.Errorf("a served socket: %s", fault)
	}
	l.Close()
	if fault := served(sock, nil); !strings.Contains(fault, "left over") {
		t.Errorf("a dead socket: %q", fault)
	}
}
