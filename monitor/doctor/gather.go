package doctor

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"sort"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/carve-gpu/carve/vgpu/gpu"
)

// dialTimeout bounds the look at a socket.
const dialTimeout = 2 * time.Second

// Config says where to look. Paths are the node's.
type Config struct {
	Node string
	// HostRoot is where this process sees the node's root file system.
	HostRoot string
	// Proc is a /proc with the node's processes.
	Proc string
	// RuntimeConfig is the container runtime's configuration; empty: it is
	// looked for.
	RuntimeConfig string
	NRISocket     string
	// RunDir, StateDir and KubeletDir are seen under the same path here and on
	// the node.
	RunDir, StateDir, KubeletDir string
	Root                         gpu.Root
	// Agent is asked for what only it knows; nil where there is none, and
	// AgentFault then says why.
	Agent      *Agent
	AgentFault string
	// Library compares what is installed with what the agent came with; nil
	// where that isn't known.
	Library func() (dir string, fault error)
	// APITime asks the API server for its time; nil where there is none.
	APITime func() (time.Time, error)
}

// Gather reads the node. It never fails: what can't be read is a fact.
func Gather(c Config) Facts {
	g := gatherer{c}
	f := Facts{
		Node: c.Node, Agent: c.Agent, AgentFault: c.AgentFault,
		Runtime: g.runtime(), Toolkit: g.toolkit(), Driver: g.driver(),
		Majors: g.majors(), Cgroup: cgroups(g.see("/sys/fs/cgroup")), RunDir: g.runDir(),
		Kubelet: g.kubelet(), Journal: g.journal(), Clock: g.clock(),
	}
	f.Devices = g.devices()
	f.Library.Unknown = c.Library == nil
	if c.Library != nil {
		dir, fault := c.Library()
		f.Library.Dir = dir
		if fault != nil {
			f.Library.Fault = fault.Error()
		}
	}
	return f
}

type gatherer struct{ Config }

// see translates a path of the node.
func (g gatherer) see(path string) string { return filepath.Join("/", g.HostRoot, path) }

func (g gatherer) read(path string) ([]byte, error) { return os.ReadFile(g.see(path)) }

// runtimeConfigs are where distributions keep the runtimes' configuration.
var runtimeConfigs = []struct{ kind, path string }{
	{"containerd", "/etc/containerd/config.toml"},
	{"containerd", "/var/lib/rancher/k3s/agent/etc/containerd/config.toml"},
	{"containerd", "/var/lib/rancher/rke2/agent/etc/containerd/config.toml"},
	{"containerd", "/etc/k0s/containerd.toml"},
	{"containerd", "/var/snap/microk8s/current/args/containerd.toml"},
	{"cri-o", "/etc/crio/crio.conf"},
	{"cri-o", "/etc/crio/crio.conf.d"},
}

func (g gatherer) runtime() Runtime {
	r := Runtime{NRISocket: g.NRISocket, NRISocketFault: served(g.NRISocket, g.Agent)}
	r.Kind, r.ConfigPath = g.findRuntime()
	switch r.Kind {
	case "containerd":
		readContainerd(&r, g.read, g.glob)
	case "cri-o":
		readCRIO(&r, g.read, g.glob)
	}
	return r
}

// findRuntime names the configuration that was given, that the running
// containerd was started with, or that lies where distributions put it. A
// containerd without a file has a Kind and no file to read.
func (g gatherer) findRuntime() (kind, path string) {
	if g.RuntimeConfig != "" {
		if strings.Contains(g.RuntimeConfig, "crio") {
			return "cri-o", g.RuntimeConfig
		}
		return "containerd", g.RuntimeConfig
	}
	for _, p := range g.processes() {
		switch filepath.Base(p.args[0]) {
		case "containerd":
			path := option(p.args, "--config", "-c")
			if path == "" {
				path = "/etc/containerd/config.toml"
			}
			return "containerd", path
		case "crio":
			path := option(p.args, "--config", "-c")
			if path == "" {
				path = "/etc/crio/crio.conf"
			}
			return "cri-o", path
		}
	}
	for _, c := range runtimeConfigs {
		if _, err := os.Stat(g.see(c.path)); err == nil {
			return c.kind, c.path
		}
	}
	return "", ""
}

// option finds an option's value in a command line.
func option(args []string, names ...string) string {
	for i, a := range args {
		for _, n := range names {
			if v, ok := strings.CutPrefix(a, n+"="); ok {
				return v
			}
			if a == n && i+1 < len(args) {
				return args[i+1]
			}
		}
	}
	return ""
}

type process struct {
	pid  string
	args []string
}

// processes lists the node's processes that have a command line.
func (g gatherer) processes() []process {
	entries, err := os.ReadDir(g.Proc)
	if err != nil {
		return nil
	}
	var out []process
	for _, e := range entries {
		if _, err := strconv.Atoi(e.Name()); err != nil {
			continue
		}
		b, err := os.ReadFile(filepath.Join(g.Proc, e.Name(), "cmdline"))
		if err != nil || len(b) == 0 {
			continue
		}
		out = append(out, process{e.Name(), strings.Split(strings.TrimRight(string(b), "\x00"), "\x00")})
	}
	return out
}

// glob lists the node's files of a pattern, as the node names them.
func (g gatherer) glob(pattern string) []string {
	found, err := filepath.Glob(g.see(pattern))
	if err != nil {
		return nil
	}
	for i := range found {
		found[i] = "/" + strings.TrimPrefix(strings.TrimPrefix(found[i], filepath.Join("/", g.HostRoot)), "/")
	}
	sort.Strings(found)
	return found
}

// served says why a socket isn't served. A linked agent proves that it is; a
// second connection would only fill the runtime's log.
func served(path string, a *Agent) string {
	if a != nil && !a.LinkedSince.IsZero() {
		return ""
	}
	c, err := net.DialTimeout("unix", path, dialTimeout)
	switch {
	case err == nil:
		c.Close()
		return ""
	case errors.Is(err, fs.ErrNotExist):
		return "there is no such socket"
	case errors.Is(err, unix.ECONNREFUSED):
		return "the socket is left over, nobody listens"
	}
	return err.Error()
}

func (g gatherer) toolkit() Toolkit {
	var t Toolkit
	for _, path := range []string{"/etc/nvidia-container-runtime/config.toml", "/usr/local/nvidia/toolkit/.config/nvidia-container-runtime/config.toml"} {
		b, err := g.read(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		t.ConfigPath = path
		if err == nil {
			err = readToolkit(&t, b)
		}
		if err != nil {
			t.ConfigFault = err.Error()
		}
		break
	}
	if t.ConfigPath == "" {
		t.AcceptEnv = true // the toolkit's own default
	}
	for _, dir := range []string{"/etc/cdi", "/var/run/cdi", "/run/cdi"} {
		t.CDISpecs = append(t.CDISpecs, g.glob(dir+"/*nvidia*")...)
	}
	t.NRIPlugin = g.nriPlugin()
	return t
}

// nriPlugin finds NVIDIA's NRI plugin: in the runtime's plugin directory, or as
// a part of the toolkit's daemon.
func (g gatherer) nriPlugin() string {
	for _, f := range g.glob("/opt/nri/plugins/*") {
		if strings.Contains(strings.ToLower(filepath.Base(f)), "nvidia") {
			return f
		}
	}
	for _, p := range g.processes() {
		name := filepath.Base(p.args[0])
		if name != "nvidia-ctk-installer" && name != "nvidia-toolkit" {
			continue
		}
		if asked(p.args) || g.askedByEnv(p.pid) {
			return "process " + p.pid + " (" + name + ")"
		}
	}
	return ""
}

func asked(args []string) bool {
	for _, a := range args {
		if a == "--enable-nri-plugin" || a == "--enable-nri-plugin=true" {
			return true
		}
	}
	return false
}

func (g gatherer) askedByEnv(pid string) bool {
	b, err := os.ReadFile(filepath.Join(g.Proc, pid, "environ"))
	return err == nil && bytes.Contains(append([]byte{0}, b...), []byte("\x00ENABLE_NRI_PLUGIN=true"))
}

func (g gatherer) driver() Driver {
	d := Driver{Root: g.Root.Path}
	software, err := g.Root.Software()
	d.Software = software
	var files gpu.Files
	if err == nil {
		files, err = g.Root.DriverFiles()
	}
	if err != nil {
		d.Fault = err.Error()
		return d
	}
	cuda, _ := files.Library(gpu.LibraryCUDA)
	for _, n := range cuda.Names {
		if v, ok := strings.CutPrefix(n, gpu.LibraryCUDA+"."); ok && strings.Contains(v, ".") {
			d.Version = v
		}
	}
	if d.Version == "" {
		d.Fault = "the name of " + cuda.Source + " has no version"
	}
	return d
}

// devices lists the device nodes, those of the driver's root first.
func (g gatherer) devices() []Device {
	dir := g.Root.Path
	if g.Root.DevPath != "" {
		dir = g.Root.DevPath
	}
	dir = filepath.Join(dir, "dev")
	var out []Device
	for _, path := range g.glob(dir + "/nvidia*") {
		var st unix.Stat_t
		d := Device{Path: path}
		switch err := unix.Stat(g.see(path), &st); {
		case err != nil:
			d.Fault = err.Error()
		case st.Mode&unix.S_IFMT == unix.S_IFDIR:
			continue // nvidia-caps
		case st.Mode&unix.S_IFMT != unix.S_IFCHR:
			d.Fault = "it is no character device"
		default:
			d.Major, d.Minor = int64(unix.Major(st.Rdev)), int64(unix.Minor(st.Rdev))
		}
		out = append(out, d)
	}
	return out
}

func (g gatherer) majors() map[string]int64 {
	b, err := os.ReadFile(filepath.Join(g.Proc, "devices"))
	if err != nil {
		return nil
	}
	return readMajors(b)
}

// readMajors reads the character devices of /proc/devices.
func readMajors(b []byte) map[string]int64 {
	out := map[string]int64{}
	for lines := bufio.NewScanner(bytes.NewReader(b)); lines.Scan(); {
		if strings.HasPrefix(lines.Text(), "Block devices") {
			break
		}
		fields := strings.Fields(lines.Text())
		if len(fields) != 2 {
			continue
		}
		if n, err := strconv.ParseInt(fields[0], 10, 64); err == nil {
			out[fields[1]] = n
		}
	}
	return out
}

func cgroups(root string) Cgroup {
	var st unix.Statfs_t
	if err := unix.Statfs(root, &st); err != nil {
		return Cgroup{}
	}
	if st.Type == unix.CGROUP2_SUPER_MAGIC {
		return Cgroup{Version: 2, Devices: true}
	}
	if err := unix.Statfs(filepath.Join(root, "devices"), &st); err == nil && st.Type == unix.CGROUP_SUPER_MAGIC {
		return Cgroup{Version: 1, Devices: true}
	}
	if entries, err := os.ReadDir(root); err == nil {
		for _, e := range entries {
			if unix.Statfs(filepath.Join(root, e.Name()), &st) == nil && st.Type == unix.CGROUP_SUPER_MAGIC {
				return Cgroup{Version: 1}
			}
		}
	}
	return Cgroup{}
}

func (g gatherer) runDir() RunDir {
	r := RunDir{Path: g.RunDir}
	var st unix.Stat_t
	err := unix.Lstat(g.RunDir, &st)
	var fsys unix.Statfs_t
	if err == nil {
		err = unix.Statfs(g.RunDir, &fsys)
	}
	if err != nil {
		r.Fault = err.Error()
		return r
	}
	r.Mode, r.UID, r.Tmpfs = st.Mode&0o7777, int(st.Uid), fsys.Type == unix.TMPFS_MAGIC
	b, err := os.ReadFile(filepath.Join(g.Proc, "self/mountinfo"))
	r.Shared = err == nil && shared(b, g.RunDir)
	return r
}

// shared reports whether the mount that holds path passes on what is mounted
// below it.
func shared(mountinfo []byte, path string) bool {
	longest, is := "", false
	for lines := bufio.NewScanner(bytes.NewReader(mountinfo)); lines.Scan(); {
		fields := strings.Fields(lines.Text())
		if len(fields) < 7 {
			continue
		}
		at := fields[4]
		if at != path && at != "/" && !strings.HasPrefix(path, at+"/") {
			continue
		}
		if len(at) < len(longest) {
			continue
		}
		longest, is = at, false
		for _, option := range fields[6:] {
			if option == "-" {
				break
			}
			is = is || strings.HasPrefix(option, "shared:")
		}
	}
	return is
}

func (g gatherer) kubelet() Kubelet {
	k := Kubelet{Dir: filepath.Join(g.KubeletDir, "device-plugins")}
	path := filepath.Join(k.Dir, "kubelet.sock")
	c, err := net.DialTimeout("unix", path, dialTimeout)
	switch {
	case err == nil:
		c.Close()
	case errors.Is(err, fs.ErrNotExist):
		k.Fault = "there is no " + path
	default:
		k.Fault = err.Error()
	}
	return k
}

func (g gatherer) journal() Journal {
	j := Journal{Dir: filepath.Join(g.StateDir, "journal")}
	entries, err := os.ReadDir(j.Dir)
	if errors.Is(err, fs.ErrNotExist) && g.Agent == nil {
		return j // no agent ever ran here
	}
	if err != nil {
		j.Fault = err.Error()
		return j
	}
	for _, e := range entries {
		switch {
		case strings.HasSuffix(e.Name(), ".damaged"):
			j.Damaged = append(j.Damaged, e.Name())
		case strings.HasSuffix(e.Name(), ".json"):
			j.Records++
			f, err := os.Open(filepath.Join(j.Dir, e.Name()))
			if errors.Is(err, fs.ErrNotExist) {
				j.Records-- // its pod ended meanwhile
			} else if err != nil {
				j.Fault = err.Error()
			} else {
				f.Close()
			}
		}
	}
	return j
}

func (g gatherer) clock() Clock {
	if g.APITime == nil {
		return Clock{Unknown: true}
	}
	before := time.Now()
	server, err := g.APITime()
	if err != nil {
		return Clock{Fault: fmt.Sprint(err)}
	}
	after := time.Now()
	// The server looked at its clock in between, and shows whole seconds.
	middle := before.Add(after.Sub(before) / 2)
	return Clock{Skew: middle.Sub(server.Add(500 * time.Millisecond))}
}
