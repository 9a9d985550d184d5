package nrihook

import (
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/vgpu/gpu"
)

var update = flag.Bool("update", false, "rewrite the golden files")

func testDriver() Driver {
	lib := func(name, capability string, names ...string) gpu.Library {
		return gpu.Library{Name: name, Capability: capability, Source: "/driver/usr/lib/x86_64-linux-gnu/" + names[len(names)-1], Names: names}
	}
	return Driver{
		Files: gpu.Files{
			LibDir: "/usr/lib/x86_64-linux-gnu",
			Libraries: []gpu.Library{
				lib("libcuda.so", "compute", "libcuda.so", "libcuda.so.1", "libcuda.so.550.90.07"),
				lib("libnvidia-ml.so", "utility", "libnvidia-ml.so.1", "libnvidia-ml.so.550.90.07"),
				lib("libnvidia-ptxjitcompiler.so", "compute", "libnvidia-ptxjitcompiler.so.1", "libnvidia-ptxjitcompiler.so.550.90.07"),
			},
			Binaries: []gpu.Binary{{Source: "/driver/usr/bin/nvidia-smi", Path: "/usr/bin/nvidia-smi"}},
		},
		Control: []gpu.DeviceNode{
			{Path: "/dev/nvidiactl", Major: 195, Minor: 255},
			{Path: "/dev/nvidia-uvm", Major: 510, Minor: 0},
		},
		FrontCUDA: "/var/lib/carve/lib/0123/libcarve-cuda.so",
		FrontNVML: "/var/lib/carve/lib/0123/libcarve-nvml.so",
		Hook:      "/var/lib/carve/lib/0123/carve-hook",
	}
}

func testShare() *Slice {
	return &Slice{
		PodUID: "uid-1", Container: "app", Generation: 2,
		Cards:      []gpu.DeviceNode{{Path: "/dev/nvidia3", Major: 195, Minor: 3}},
		LimitsPath: "/run/carve/slices/uid-1/app/limits",
		UsagePath:  "/run/carve/slices/uid-1/app/usage.d/usage",
	}
}

func testContainer() Container {
	return Container{ID: "c1", PodUID: "uid-1", Namespace: "default", Pod: "p", Name: "app",
		Env: []string{"PATH=/bin", "NVIDIA_VISIBLE_DEVICES=all"}}
}

func TestAdjustGolden(t *testing.T) {
	whole := testShare()
	whole.LimitsPath, whole.UsagePath = "", ""
	client := testShare()
	client.MPS = &MPS{PipePath: "/run/carve/mps/GPU-a/pipe", ShmPath: "/run/carve/mps/GPU-a/shm", Percent: 30, MemMiB: 8000}
	software := testDriver()
	software.SoftwareState = "/softroot/softgpu"
	cases := map[string]struct {
		slice  *Slice
		driver Driver
	}{
		"share":      {testShare(), testDriver()},
		"whole-card": {whole, testDriver()},
		"software":   {testShare(), software},
		"mps":        {client, testDriver()},
		"no-grant":   {nil, Driver{}},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			got, err := Adjust(testContainer(), c.slice, c.driver)
			if err != nil {
				t.Fatal(err)
			}
			b, err := json.MarshalIndent(got, "", "  ")
			if err != nil {
				t.Fatal(err)
			}
			b = append(b, '\n')
			golden := filepath.Join("testdata", name+".json")
			if *update {
				if err := os.WriteFile(golden, b, 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			if string(b) != string(want) {
				t.Errorf("edits differ from %s (rewrite it with -update):\n%s", golden, b)
			}
		})
	}
}

func TestEveryNameOfCUDAAndNVMLIsTheFrontInAShare(t *testing.T) {
	e, err := Adjust(testContainer(), testShare(), testDriver())
	if err != nil {
		t.Fatal(err)
	}
	fronts := 0
	for _, m := range e.Mounts {
		base := filepath.Base(m.Destination)
		switch {
		case strings.HasPrefix(m.Destination, containerDriver):
			if !strings.HasPrefix(m.Source, "/driver/") {
				t.Errorf("%s is %s, want the driver's own", m.Destination, m.Source)
			}
		case strings.HasPrefix(base, "libcuda.so"), strings.HasPrefix(base, "libnvidia-ml.so"):
			fronts++
			if strings.HasPrefix(m.Source, "/driver/") {
				t.Errorf("%s is the driver's own %s: a share would have no limit", m.Destination, m.Source)
			}
		}
		writable := m.Destination == containerUsage || m.Destination == containerPrivate
		if got := !contains(m.Options, "ro"); got != writable {
			t.Errorf("%s: writable %v, want %v", m.Destination, got, writable)
		}
		for _, o := range []string{"nosuid", "nodev"} {
			if !contains(m.Options, o) {
				t.Errorf("%s is mounted without %s", m.Destination, o)
			}
		}
	}
	if fronts != 5 {
		t.Errorf("%d names lead to a front, want 5", fronts)
	}
}

func TestAWholeCardGetsTheDriverAsItIs(t *testing.T) {
	s := testShare()
	s.LimitsPath, s.UsagePath = "", ""
	e, err := Adjust(testContainer(), s, testDriver())
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range e.Mounts {
		if !strings.HasPrefix(m.Source, "/driver/") {
			t.Errorf("%s at %s: nothing of carve belongs to a whole card", m.Source, m.Destination)
		}
	}
	if strings.Contains(strings.Join(e.CreateContainer[0].Args, " "), "-fronts") {
		t.Error("carve-hook is told to cover the image's libraries")
	}
}

// node-24: a CPU pod whose image sets NVIDIA_VISIBLE_DEVICES=all.
func TestNoContainerKeepsAVisibleDevicesListOfItsImage(t *testing.T) {
	for name, c := range map[string]struct {
		env  []string
		want string
	}{
		"all from the image":       {[]string{"NVIDIA_VISIBLE_DEVICES=all"}, "NVIDIA_VISIBLE_DEVICES=void"},
		"a card by name":           {[]string{"NVIDIA_VISIBLE_DEVICES=GPU-1"}, "NVIDIA_VISIBLE_DEVICES=void"},
		"not set":                  {nil, "NVIDIA_VISIBLE_DEVICES=void"},
		"void already":             {[]string{"NVIDIA_VISIBLE_DEVICES=void"}, ""},
		"void, then all over it":   {[]string{"NVIDIA_VISIBLE_DEVICES=void", "NVIDIA_VISIBLE_DEVICES=all"}, "NVIDIA_VISIBLE_DEVICES=void"},
		"another variable's value": {[]string{"X=NVIDIA_VISIBLE_DEVICES=void"}, "NVIDIA_VISIBLE_DEVICES=void"},
	} {
		for _, s := range []*Slice{nil, testShare()} {
			e, err := Adjust(Container{Name: "app", Env: c.env}, s, testDriver())
			if err != nil {
				t.Fatal(err)
			}
			if got := strings.Join(e.Env, " "); got != c.want {
				t.Errorf("%s, slice %v: env %q, want %q", name, s != nil, got, c.want)
			}
			if s == nil && (len(e.Devices) != 0 || len(e.Mounts) != 0 || len(e.CreateContainer) != 0 || len(e.Annotations) != 0) {
				t.Errorf("%s: a container without a grant gets %+v", name, e)
			}
		}
	}
}

func TestAPrivilegedContainerGetsNoShare(t *testing.T) {
	c := testContainer()
	c.AllDevices = true
	if e, err := Adjust(c, testShare(), testDriver()); err == nil || !strings.Contains(err.Error(), "privileged") {
		t.Errorf("got %+v, %v", e, err)
	}
	if _, err := Adjust(c, nil, Driver{}); err != nil {
		t.Errorf("a privileged container without a grant is refused: %v", err)
	}
	allowed := testShare()
	allowed.MayBePrivileged = true
	if e, err := Adjust(c, allowed, testDriver()); err != nil || len(e.Mounts) == 0 {
		t.Errorf("where the namespace allows it: %+v, %v", e, err)
	}
}

// NVIDIA's NRI plugin would put whole cards beside the share.
func TestAContainerWithASliceNamesNoOtherCards(t *testing.T) {
	for key, value := range map[string]string{"nvidia.cdi.k8s.io/container.app": "nvidia.com/gpu=all", "cdi.k8s.io/x": "nvidia.com/gpu=0"} {
		c := testContainer()
		c.SandboxAnnotations = map[string]string{key: value}
		if e, err := Adjust(c, testShare(), testDriver()); err == nil || !strings.Contains(err.Error(), key) {
			t.Errorf("%s: %+v, %v", key, e, err)
		}
		if _, err := Adjust(c, nil, Driver{}); err != nil {
			t.Errorf("%s without a slice: %v", key, err)
		}
	}
}

func TestAContainerThatAnotherHookAdjustedIsLeftAlone(t *testing.T) {
	c := testContainer()
	c.Annotations = map[string]string{api.AnnotationSlice: testShare().Mark()}
	e, err := Adjust(c, testShare(), testDriver())
	if err != nil {
		t.Fatal(err)
	}
	if len(e.Env)+len(e.Mounts)+len(e.Devices)+len(e.CreateContainer)+len(e.Annotations) != 0 {
		t.Errorf("edits %+v: two plugins that set the same field fail the container", e)
	}
}

func contains(list []string, s string) bool {
	for _, x := range list {
		if x == s {
			return true
		}
	}
	return false
}
