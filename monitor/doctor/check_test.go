package doctor

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/carve-gpu/carve/api"
)

var update = flag.Bool("update", false, "write the golden files")

// healthy is a node with nothing wrong.
func healthy() Facts {
	return Facts{
		Node: "n1",
		Agent: &Agent{
			Version: "v1", LinkedSince: time.Date(2026, 11, 30, 10, 0, 0, 0, time.UTC), KubeletConnected: true, Records: 1, SlotsPerCard: 32, Enforcement: "dmem",
			Cards: []Card{
				{UUID: "GPU-a", Index: 0, MIGMode: "disabled", Persistence: "enabled", MemoryMiB: 81000, GrantedMiB: 8000, GrantedCores: 30, Slices: 1},
				{UUID: "GPU-b", Index: 1, MIGMode: "disabled", Persistence: "enabled", MemoryMiB: 81000},
			},
		},
		Runtime: Runtime{Kind: "containerd", ConfigPath: "/etc/containerd/config.toml", ConfigVersion: 3, NRI: "on", DefaultRuntime: "runc", DefaultBinary: "/usr/bin/runc", NRISocket: "/var/run/nri/nri.sock"},
		Toolkit: Toolkit{AcceptEnv: true},
		Driver:  Driver{Root: "/", Version: "550.90.07"},
		Devices: []Device{{Path: "/dev/nvidia0", Major: 195}, {Path: "/dev/nvidiactl", Major: 195, Minor: 255}, {Path: "/dev/nvidia-uvm", Major: 511}, {Path: "/dev/nvidia-modeset", Major: 195, Minor: 254}},
		Majors:  map[string]int64{"nvidia": 195, "nvidia-uvm": 511, "nvidia-caps": 500},
		Cgroup:  Cgroup{Version: 2, Devices: true},
		RunDir:  RunDir{Path: "/run/carve", Tmpfs: true, Shared: true, Mode: 0o755},
		Kubelet: Kubelet{Dir: "/var/lib/kubelet/device-plugins"},
		Journal: Journal{Dir: "/var/lib/carve/journal", Records: 1},
		Library: Library{Dir: "/var/lib/carve/lib/0123"},
	}
}

func TestHealthyNodeHasNoFinding(t *testing.T) {
	for _, f := range Check(healthy()) {
		if f.Level != api.LevelOK || f.Why != "" || f.Do != "" {
			t.Errorf("%+v", f)
		}
		if f.Where == "" || f.What == "" {
			t.Errorf("%s says nothing: %+v", f.Check, f)
		}
	}
}

// faults are nodes with one thing wrong each, and what must be said of it.
var faults = []struct {
	name  string
	plant func(*Facts)
	check string
	level api.Level
	// says must all stand in the finding.
	says []string
}{
	{"no agent", func(f *Facts) { f.Agent, f.AgentFault = nil, "there is no socket" }, "agent", api.LevelFail, []string{"there is no socket", "spec.nodeName=n1", "carve.dev/managed=true"}},
	{"agent not ready", func(f *Facts) { f.Agent.NotReady = "the cards aren't known" }, "agent", api.LevelFail, []string{"the cards aren't known"}},
	{"limits by the library alone", func(f *Facts) {
		f.Agent.Enforcement, f.Agent.EnforcementReason = "advisory", "dmem: the kernel has no dmem controller"
	}, "limits", api.LevelWarn, []string{"advisory", "no dmem controller", "isn't stopped at its limit", "R615"}},
	{"an agent that doesn't find the driver's pids", func(f *Facts) {
		f.Agent.Cards[0].ComputeFault = "the driver names the card's processes by pids that the agent doesn't find: it has to see the node's (hostPID: true)"
	}, "compute", api.LevelWarn, []string{"card 0", "doesn't find", "by turns", "run the agent with hostPID"}},
	{"an MPS daemon that is down", func(f *Facts) {
		f.Agent.Cards[0].MPS = &MPS{Fault: "no `carve mps` runs on this node", Since: time.Unix(1700000000, 0)}
	}, "mps", api.LevelFail, []string{"2023-11-14T22:13:20Z", "no `carve mps` runs", "kubectl apply -k deploy/manifests/mps", "carve-mps", "spec.nodeName=n1"}},
	{"a card that somebody prohibits", func(f *Facts) {
		f.Agent.Cards[1].ComputeMode, f.Agent.Cards[1].Fault = "prohibited", "its compute mode is PROHIBITED"
	}, "compute-mode", api.LevelFail, []string{"card 1 (GPU-b)", "PROHIBITED", "no program can use it", "nvidia-smi -i 1 -c DEFAULT"}},
	{"a card that takes one process", func(f *Facts) { f.Agent.Cards[1].ComputeMode = "exclusive-process" }, "compute-mode", api.LevelWarn,
		[]string{"card 1 (GPU-b)", "one process at a time", "nvidia-smi -i 1 -c DEFAULT"}},
	{"grants refused", func(f *Facts) { f.Agent.Refused = 2 }, "agent", api.LevelWarn, []string{"2 pod(s)"}},
	{"NRI switched off in containerd 1.7", func(f *Facts) {
		f.Runtime.NRI, f.Runtime.ConfigVersion, f.Agent.LinkedSince = "off", 2, time.Time{}
	}, "nri", api.LevelFail, []string{"/etc/containerd/config.toml", `[plugins."io.containerd.nri.v1.nri"]`, "disable = false", "systemctl restart containerd", "1.7"}},
	{"NRI switched off, runtime not restarted yet", func(f *Facts) { f.Runtime.NRI = "off" }, "nri", api.LevelFail, []string{"still on in the running runtime"}},
	{"NRI not served", func(f *Facts) {
		f.Runtime.NRI, f.Agent.LinkedSince, f.Runtime.NRISocketFault = "", time.Time{}, "there is no such socket"
	}, "nri", api.LevelFail, []string{"there is no such socket", "disable = false"}},
	{"NRI switched off in CRI-O", func(f *Facts) { f.Runtime.Kind, f.Runtime.NRI = "cri-o", "off" }, "nri", api.LevelFail, []string{"enable_nri = true", "crio"}},
	{"hook without a link though NRI is served", func(f *Facts) { f.Agent.LinkedSince = time.Time{} }, "nri", api.LevelFail, []string{"no link"}},
	{"NVIDIA's runtime by default, variable accepted", func(f *Facts) {
		f.Runtime.DefaultRuntime, f.Runtime.DefaultBinary, f.Runtime.NVIDIARuntimes = "nvidia", "/usr/bin/nvidia-container-runtime", []string{"nvidia"}
		f.Toolkit.ConfigPath = "/etc/nvidia-container-runtime/config.toml"
	}, "default-runtime", api.LevelFail, []string{"NVIDIA_VISIBLE_DEVICES", "accept-nvidia-visible-devices-envvar-when-unprivileged = false", `default_runtime_name = "runc"`}},
	{"a default runtime of another name with NVIDIA's program", func(f *Facts) {
		f.Runtime.DefaultRuntime, f.Runtime.DefaultBinary = "gpu", "/usr/local/nvidia/toolkit/nvidia-container-runtime"
	}, "default-runtime", api.LevelFail, []string{"(gpu)"}},
	{"NVIDIA's runtime by default, variable refused", func(f *Facts) {
		f.Runtime.DefaultRuntime, f.Runtime.DefaultBinary, f.Toolkit.AcceptEnv = "nvidia", "nvidia-container-runtime", false
	}, "default-runtime", api.LevelWarn, []string{"nothing to unprivileged"}},
	{"no runtime configuration found", func(f *Facts) { f.Runtime.Kind = "" }, "default-runtime", api.LevelWarn, []string{"--runtime-config"}},
	{"runtime configuration unreadable", func(f *Facts) { f.Runtime.ConfigFault = "line 3" }, "default-runtime", api.LevelWarn, []string{"line 3"}},
	{"NVIDIA's runtime as a class, variable accepted", func(f *Facts) {
		f.Runtime.NVIDIARuntimes, f.Toolkit.ConfigPath = []string{"nvidia"}, "/etc/nvidia-container-runtime/config.toml"
	}, "toolkit-env", api.LevelWarn, []string{"runtimeClassName nvidia", "/etc/nvidia-container-runtime/config.toml", "= false"}},
	{"cards by mounts", func(f *Facts) {
		f.Runtime.NVIDIARuntimes, f.Toolkit.ConfigPath, f.Toolkit.AcceptMounts = []string{"nvidia"}, "/x", true
	}, "toolkit-env", api.LevelFail, []string{"accept-nvidia-visible-devices-as-volume-mounts = false"}},
	{"toolkit's configuration unreadable", func(f *Facts) { f.Toolkit.ConfigPath, f.Toolkit.ConfigFault = "/x", "bad" }, "toolkit-env", api.LevelWarn, []string{"bad"}},
	{"NVIDIA's NRI plugin", func(f *Facts) { f.Toolkit.NRIPlugin = "process 7 (nvidia-ctk-installer)" }, "toolkit-nri", api.LevelFail, []string{"process 7", "nvidia.cdi.k8s.io"}},
	{"no driver", func(f *Facts) { f.Driver = Driver{Root: "/", Fault: "no libnvidia-ml.so.1"} }, "driver", api.LevelFail, []string{"no libnvidia-ml.so.1", "CARVE_NODE_DRIVER_ROOT"}},
	{"driver too old", func(f *Facts) { f.Driver.Version = "525.147.05" }, "driver", api.LevelFail, []string{"525.147.05", "R535"}},
	{"driver of no number", func(f *Facts) { f.Driver.Version = "rel-1" }, "driver", api.LevelWarn, []string{"rel-1"}},
	{"software cards", func(f *Facts) { f.Agent.Software = true }, "software-gpu", api.LevelWarn, []string{"test instrument"}},
	{"software root, no agent", func(f *Facts) { f.Agent, f.Driver.Software = nil, true }, "software-gpu", api.LevelWarn, []string{"--software-gpu"}},
	{"no device nodes", func(f *Facts) { f.Devices = nil }, "device-nodes", api.LevelFail, []string{"nvidia-modprobe"}},
	{"no control node", func(f *Facts) { f.Devices = f.Devices[:1] }, "device-nodes", api.LevelFail, []string{"/dev/nvidiactl"}},
	{"a card's node with a wrong major", func(f *Facts) { f.Devices[0].Major = 10 }, "device-nodes", api.LevelFail, []string{"/dev/nvidia0", "10", "195"}},
	{"uvm's node of an earlier boot", func(f *Facts) { f.Devices[2].Major = 510 }, "device-nodes", api.LevelFail, []string{"/dev/nvidia-uvm", "511"}},
	{"an old driver's name in /proc/devices", func(f *Facts) {
		f.Majors = map[string]int64{"nvidia-frontend": 195, "nvidia-uvm": 511}
		f.Devices[1].Major = 1
	}, "device-nodes", api.LevelFail, []string{"nvidia-frontend"}},
	{"a plain file in a device's place", func(f *Facts) { f.Devices[0].Fault = "it is no character device" }, "device-nodes", api.LevelFail, []string{"no character device"}},
	{"persistence off", func(f *Facts) { f.Agent.Cards[1].Persistence = "disabled" }, "persistence", api.LevelWarn, []string{"card 1", "nvidia-smi -pm 1"}},
	{"MIG on", func(f *Facts) { f.Agent.Cards[1].MIGMode = "enabled" }, "mig", api.LevelWarn, []string{"nvidia-smi -i 1 -mig 0"}},
	{"no cgroups", func(f *Facts) { f.Cgroup = Cgroup{} }, "cgroup", api.LevelFail, nil},
	{"cgroup v1 without devices", func(f *Facts) { f.Cgroup = Cgroup{Version: 1} }, "cgroup", api.LevelFail, []string{"devices"}},
	{"run directory gone", func(f *Facts) { f.RunDir.Fault = "gone" }, "run-dir", api.LevelFail, []string{"gone"}},
	{"run directory writable by others", func(f *Facts) { f.RunDir.Mode = 0o777 }, "run-dir", api.LevelFail, []string{"777", "chmod 0755 /run/carve"}},
	{"run directory of another user", func(f *Facts) { f.RunDir.UID = 1000 }, "run-dir", api.LevelFail, []string{"user 1000"}},
	{"mounts don't propagate", func(f *Facts) { f.RunDir.Shared = false }, "run-dir", api.LevelFail, []string{"Bidirectional"}},
	{"run directory on a disk", func(f *Facts) { f.RunDir.Tmpfs = false }, "run-dir", api.LevelWarn, []string{"tmpfs"}},
	{"kubelet's socket missing", func(f *Facts) { f.Kubelet.Fault = "there is no kubelet.sock" }, "kubelet", api.LevelFail, []string{"there is no kubelet.sock", "CARVE_NODE_KUBELET_DIR"}},
	{"NVIDIA's file is wrong", func(f *Facts) { f.Agent.Sharing = &Sharing{Path: "/etc/x", Fault: "no such file"} }, "nvidia-config", api.LevelFail, []string{"isn't taken: no such file"}},
	{"some of it has no effect", func(f *Facts) {
		f.Agent.Sharing = &Sharing{Path: "/etc/x", Source: "/etc/x/y", Warnings: []string{"flags.migStrategy: no"}}
	}, "nvidia-config", api.LevelWarn, []string{"migStrategy"}},
	{"kubelet doesn't listen", func(f *Facts) { f.Agent.KubeletConnected = false }, "kubelet", api.LevelFail, []string{"no slots"}},
	{"a card is lost", func(f *Facts) { f.Agent.Cards[0].Fault = "fell off the bus" }, "slots", api.LevelFail, []string{"GPU-a", "fell off the bus"}},
	{"more granted than there is", func(f *Facts) { f.Agent.Cards[0].GrantedMiB = 90000 }, "slots", api.LevelFail, []string{"90000 of 81000"}},
	{"more compute granted than there is", func(f *Facts) { f.Agent.Cards[0].GrantedCores = 130 }, "slots", api.LevelFail, []string{"130%"}},
	{"all slots taken", func(f *Facts) { f.Agent.Cards[0].Slices = 32 }, "slots", api.LevelWarn, []string{"32 slots", "slotsPerCard"}},
	{"journal unreadable", func(f *Facts) { f.Journal.Fault = "input/output error" }, "journal", api.LevelFail, []string{"input/output error"}},
	{"journal damaged", func(f *Facts) { f.Journal.Damaged = []string{"u.json.damaged"} }, "journal", api.LevelWarn, []string{"u.json.damaged"}},
	{"containers without the hook", func(f *Facts) { f.Agent.Unadjusted = 3 }, "unadjusted", api.LevelWarn, []string{"3 container(s)"}},
	{"library replaced", func(f *Facts) { f.Library.Fault = "libcarve-cuda.so differs" }, "front-library", api.LevelFail, []string{"libcarve-cuda.so differs", "/var/lib/carve/lib/0123"}},
	{"driver's library is strange", func(f *Facts) { f.Agent.PlainFront = "no twin of libcuda.so: it has no hash table" }, "front-library", api.LevelWarn, []string{"no twin of libcuda.so", "-lcuda"}},
	// share-22: a node two minutes off stays served, and somebody is told.
	{"clock two minutes ahead", func(f *Facts) { f.Clock.Skew = 2 * time.Minute }, "clock", api.LevelWarn, []string{"2m0s ahead of", "timedatectl"}},
	{"clock two minutes behind", func(f *Facts) { f.Clock.Skew = -2 * time.Minute }, "clock", api.LevelWarn, []string{"2m0s behind"}},
	{"clock two hours behind", func(f *Facts) { f.Clock.Skew = -2 * time.Hour }, "clock", api.LevelFail, []string{"certificates"}},
	{"API server doesn't answer", func(f *Facts) { f.Clock.Fault = "timeout" }, "clock", api.LevelWarn, []string{"timeout"}},
}

// TestPlantedFaultIsFound: each fault is found by its check, with the mend, and
// by no other check than those that it really concerns.
func TestPlantedFaultIsFound(t *testing.T) {
	for _, c := range faults {
		t.Run(c.name, func(t *testing.T) {
			f := healthy()
			c.plant(&f)
			found := false
			for _, got := range Check(f) {
				if got.Level == api.LevelOK {
					continue
				}
				if got.Check != c.check {
					if c.name != "no agent" && c.name != "software root, no agent" {
						t.Errorf("%s also speaks: %s", got.Check, got.What)
					}
					continue
				}
				text := got.Where + "\n" + got.What + "\n" + got.Why + "\n" + got.Do
				all := got.Level == c.level
				for _, s := range c.says {
					all = all && strings.Contains(text, s)
				}
				found = found || all
			}
			if !found {
				t.Errorf("no %s of %s with %q in\n%+v", c.level, c.check, c.says, Check(f))
			}
		})
	}
}

// TestText holds what people read.
func TestText(t *testing.T) {
	var b strings.Builder
	for _, c := range faults {
		f := healthy()
		c.plant(&f)
		fmt.Fprintf(&b, "# %s\n", c.name)
		for _, got := range Check(f) {
			if got.Check == c.check {
				fmt.Fprintf(&b, "%s %s %s\n  %s\n  %s\n  %s\n", got.Level, got.Check, got.Where, got.What, got.Why, strings.ReplaceAll(got.Do, "\n", "\n  "))
			}
		}
	}
	path := filepath.Join("testdata", "findings.txt")
	if *update {
		if err := os.WriteFile(path, []byte(b.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got := b.String(); got != string(want) {
		t.Errorf("the findings' text changed (go test -run TestText -update):\n%s", got)
	}
}
