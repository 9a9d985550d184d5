package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

const inNamespace = "CARVE_TEST_MOUNT_NAMESPACE"

// TestMain runs the tests in a mount namespace of their own.
func TestMain(m *testing.M) {
	if os.Getenv(inNamespace) != "" {
		os.Exit(m.Run())
	}
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.Env = append(os.Environ(), inNamespace+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		fmt.Fprintln(os.Stderr, "these tests mount, and need root for it:", err)
		os.Exit(1)
	}
	os.Exit(cmd.ProcessState.ExitCode())
}

const libDir = "/usr/lib/x86_64-linux-gnu"

// image is a container that the runtime has made: a bundle, a root file system
// that is a mount, and the libraries mounted in it.
type image struct {
	t            *testing.T
	bundle, root string
	host         string // what lies outside the root
}

// newImage makes a root with the given files and links (those whose content
// starts with "->"), and mounts the libraries as the agent's edits ask.
func newImage(t *testing.T, files map[string]string) *image {
	t.Helper()
	bundle := t.TempDir()
	i := &image{t: t, bundle: bundle, root: filepath.Join(bundle, "rootfs"), host: filepath.Join(bundle, "host")}
	for _, d := range []string{i.root, i.host} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := unix.Mount(i.root, i.root, "", unix.MS_BIND, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for unix.Unmount(i.root, unix.MNT_DETACH) == nil {
		}
	})
	for name, content := range files {
		i.put(name, content)
	}
	for name, source := range map[string]string{
		"libcuda.so.1": "front-cuda", "libcuda.so.550.90.07": "front-cuda",
		"libnvidia-ml.so.1": "front-nvml", "libnvidia-ptxjitcompiler.so.1": "driver-ptx",
	} {
		i.mount(source, filepath.Join(libDir, name))
	}
	return i
}

func (i *image) put(name, content string) {
	i.t.Helper()
	p := filepath.Join(i.root, name)
	if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
		i.t.Fatal(err)
	}
	var err error
	if target, ok := strings.CutPrefix(content, "->"); ok {
		err = os.Symlink(target, p)
	} else {
		err = os.WriteFile(p, []byte(content), 0o644)
	}
	if err != nil {
		i.t.Fatal(err)
	}
}

// mount binds a file of the node read-only into the root, as runc does.
func (i *image) mount(source, at string) {
	i.t.Helper()
	host := filepath.Join(i.host, source)
	if err := os.WriteFile(host, []byte(source), 0o644); err != nil {
		i.t.Fatal(err)
	}
	p := filepath.Join(i.root, at)
	if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
		i.t.Fatal(err)
	}
	f, err := os.OpenFile(p, os.O_CREATE, 0o644)
	if err != nil {
		i.t.Fatal(err)
	}
	f.Close()
	err = unix.Mount(host, p, "", unix.MS_BIND, "")
	if err == nil {
		err = unix.Mount("", p, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, "")
	}
	if err != nil {
		i.t.Fatal(err)
	}
}

// hook runs the hook as the runtime would.
func (i *image) hook(args []string, env ...string) error {
	i.t.Helper()
	config, err := json.Marshal(map[string]any{
		"root": map[string]any{"path": "rootfs"}, "process": map[string]any{"env": env},
	})
	if err != nil {
		i.t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(i.bundle, "config.json"), config, 0o644); err != nil {
		i.t.Fatal(err)
	}
	state := fmt.Sprintf(`{"ociVersion":"1.2.0","id":"c1","status":"creating","pid":1,"bundle":%q}`, i.bundle)
	return run(args, strings.NewReader(state))
}

var shareArgs = []string{"-dir", libDir,
	"-libraries", "libcuda.so.1,libcuda.so.550.90.07,libnvidia-ml.so.1,libnvidia-ptxjitcompiler.so.1",
	"-fronts", "libcuda.so,libnvidia-ml.so"}

// read reads a file as the container sees it: below its root, also by absolute
// links.
func (i *image) read(p string) string {
	i.t.Helper()
	r, err := openRoot(i.root)
	if err != nil {
		i.t.Fatal(err)
	}
	defer r.close()
	return string(r.read(p, 1<<20))
}

func (i *image) want(files map[string]string) {
	i.t.Helper()
	for p, want := range files {
		if got := i.read(p); got != want {
			i.t.Errorf("%s holds %q, want %q", p, got, want)
		}
	}
}

// writable reports whether the container could write to what is at a path.
func (i *image) writable(p string) bool {
	f, err := os.OpenFile(filepath.Join(i.root, p), os.O_WRONLY, 0)
	if err == nil {
		f.Close()
	}
	return err == nil
}

func TestEveryCopyThatALoaderCouldFindIsCovered(t *testing.T) {
	i := newImage(t, map[string]string{
		libDir + "/libc.so.6":                              "libc",
		"/usr/local/cuda-12.4/compat/libcuda.so.550.54.15": "compat",
		"/usr/local/cuda-12.4/compat/libcuda.so.1":         "->libcuda.so.550.54.15",
		"/usr/local/cuda":                                  "->cuda-12.4",
		"/usr/local/cuda-12.4/compat/libnvidia-nvvm.so.4":  "compat nvvm",
		"/usr/local/cuda-12.4/lib64/stubs/libcuda.so":      "stub",
		"/opt/conda/envs/x/lib/libcuda.so.1":               "conda",
		"/opt/app/libnvidia-ml.so.1":                       "app nvml",
		"/etc/ld.so.conf":                                  "include ld.so.conf.d/*.conf\n# /not/this\n",
		"/etc/ld.so.conf.d/a.conf":                         "/srv/conf # comment\n",
		"/srv/conf/libcuda.so.1":                           "by ld.so.conf",
		"/etc/ld.so.cache":                                 "ld.so-1.7.0\x00junk\x00/srv/cache/libcuda.so.1\x00more\x00",
		"/srv/cache/libcuda.so.1":                          "by ld.so.cache",
		"/srv/env/libcuda.so":                              "by LD_LIBRARY_PATH",
		"/srv/env/libcudart.so.12":                         "not the driver's",
		"/srv/elsewhere/libcuda.so.1":                      "nobody looks here",
		"/usr/lib64/libcuda.so.1":                          "by default",
	})
	if err := i.hook(shareArgs, "PATH=/bin", "LD_LIBRARY_PATH=/srv/none:/srv/env/"); err != nil {
		t.Fatal(err)
	}
	i.want(map[string]string{
		libDir + "/libcuda.so.1":                          "front-cuda",
		libDir + "/libcuda.so":                            "front-cuda",
		"/usr/local/cuda-12.4/compat/libcuda.so.1":        "front-cuda",
		"/usr/local/cuda/compat/libcuda.so.550.54.15":     "front-cuda",
		"/usr/local/cuda-12.4/compat/libnvidia-nvvm.so.4": "compat nvvm",
		"/usr/local/cuda-12.4/lib64/stubs/libcuda.so":     "stub",
		"/opt/conda/envs/x/lib/libcuda.so.1":              "front-cuda",
		"/opt/app/libnvidia-ml.so.1":                      "front-nvml",
		"/srv/conf/libcuda.so.1":                          "front-cuda",
		"/srv/cache/libcuda.so.1":                         "front-cuda",
		"/srv/env/libcuda.so":                             "front-cuda",
		"/srv/env/libcudart.so.12":                        "not the driver's",
		"/srv/elsewhere/libcuda.so.1":                     "nobody looks here",
		"/usr/lib64/libcuda.so.1":                         "front-cuda",
	})
	for _, p := range []string{"/opt/conda/envs/x/lib/libcuda.so.1", "/srv/env/libcuda.so", libDir + "/libcuda.so.1"} {
		if i.writable(p) {
			t.Errorf("%s is writable: the container could change the node's file", p)
		}
	}
}

func TestAWholeCardKeepsWhatItsImageBrings(t *testing.T) {
	i := newImage(t, map[string]string{
		libDir + "/libc.so.6":                 "libc",
		"/usr/local/cuda/compat/libcuda.so.1": "compat",
	})
	if err := i.hook(shareArgs[:4]); err != nil {
		t.Fatal(err)
	}
	i.want(map[string]string{"/usr/local/cuda/compat/libcuda.so.1": "compat"})
}

// An image of another distribution than the node's driver packages.
func TestLibrariesAreFoundBesideTheImagesLibc(t *testing.T) {
	for name, c := range map[string]struct {
		files map[string]string
		at    string // where the loader looks
	}{
		"Fedora":          {map[string]string{"/usr/lib64/libc.so.6": "libc", "/lib64": "->usr/lib64"}, "/lib64"},
		"old, not merged": {map[string]string{"/lib64/libc.so.6": "libc", "/usr/lib64/x": ""}, "/lib64"},
		"Arch":            {map[string]string{"/usr/lib/libc.so.6": "->libc-2.40.so", "/usr/lib/libc-2.40.so": "libc", "/lib": "->usr/lib"}, "/lib"},
		"absolute links":  {map[string]string{"/usr/lib64/libc.so.6": "libc", "/lib64": "->/usr/lib64"}, "/lib64"},
	} {
		t.Run(name, func(t *testing.T) {
			i := newImage(t, c.files)
			if err := i.hook(shareArgs); err != nil {
				t.Fatal(err)
			}
			i.want(map[string]string{
				c.at + "/libcuda.so.1":                  "front-cuda",
				c.at + "/libcuda.so":                    "front-cuda",
				c.at + "/libcuda.so.550.90.07":          "front-cuda",
				c.at + "/libnvidia-ml.so.1":             "front-nvml",
				c.at + "/libnvidia-ptxjitcompiler.so.1": "driver-ptx",
			})
			if i.writable(c.at + "/libcuda.so.1") {
				t.Error("the front is writable")
			}
		})
	}
}

func TestAnImageWithoutALibcGetsNothingMore(t *testing.T) {
	i := newImage(t, map[string]string{"/bin/static": "program", "/lib/ld-musl-x86_64.so.1": "musl"})
	if err := i.hook(shareArgs); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(filepath.Join(i.root, "lib", "libcuda.so.1")); !os.IsNotExist(err) {
		t.Errorf("lib/libcuda.so.1: %v", err)
	}
}

// The image is hostile: its links must not lead out of its root.
func TestLinksOfTheImageStayInItsRoot(t *testing.T) {
	i := newImage(t, map[string]string{libDir + "/libc.so.6": "libc"})
	victim := filepath.Join(i.host, "victim")
	if err := os.WriteFile(victim, []byte("the node's own"), 0o644); err != nil {
		t.Fatal(err)
	}
	up := strings.Repeat("../", 40)
	i.put("/usr/local/lib/libcuda.so.1", "->"+victim)
	i.put("/usr/local/lib64/libcuda.so.1", "->"+up+strings.TrimPrefix(victim, "/"))
	i.put("/opt/a/libcuda.so.1", "->/proc/self/root"+victim)
	i.put("/opt/b", "->"+i.host)
	i.put("/opt/loop/libcuda.so.1", "->libcuda.so.1")
	i.put("/opt/pipe/x", "")
	if err := unix.Mkfifo(filepath.Join(i.root, "opt/pipe/libcuda.so.1"), 0o666); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(i.root, "opt/dir/libcuda.so.1"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mkfifo(filepath.Join(i.root, "etc-fifo"), 0o666); err != nil {
		t.Fatal(err)
	}
	i.put("/etc/ld.so.conf", "->/etc-fifo")
	done := make(chan error, 1)
	go func() { done <- i.hook(shareArgs) }()
	select {
	case err := <-done:
		if err != nil {
			t.Fatal(err)
		}
	case <-time.After(30 * time.Second):
		t.Fatal("the hook hangs on a pipe of the image")
	}
	if b, err := os.ReadFile(victim); err != nil || string(b) != "the node's own" {
		t.Errorf("the node's file is %q now, %v", b, err)
	}
}

func TestFailuresAreSentences(t *testing.T) {
	missing := newImage(t, map[string]string{libDir + "/libc.so.6": "libc"})
	if err := unix.Unmount(filepath.Join(missing.root, libDir, "libcuda.so.1"), 0); err != nil {
		t.Fatal(err)
	}
	if err := missing.hook(shareArgs); err == nil || !strings.Contains(err.Error(), "libcuda.so.1 is mounted writable") {
		t.Errorf("the front isn't there: %v", err)
	}
	for name, c := range map[string]struct {
		args  []string
		stdin string
		want  string
	}{
		"no arguments":              {nil, "{}", "usage"},
		"unknown flag":              {[]string{"-x"}, "{}", "-x"},
		"no state":                  {shareArgs, "", "read the container's state"},
		"no bundle":                 {shareArgs, "{}", "isn't an absolute path"},
		"a bundle that isn't there": {shareArgs, `{"bundle":"/nonexistent"}`, "configuration"},
	} {
		if err := run(c.args, strings.NewReader(c.stdin)); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
}

func TestTheSearchEndsInTime(t *testing.T) {
	files := map[string]string{libDir + "/libc.so.6": "libc", "/usr/local/lib/libcuda.so.1": "copy"}
	for d := range 40 {
		for e := range 40 {
			files[fmt.Sprintf("/opt/%d/%d/x", d, e)] = ""
		}
	}
	i := newImage(t, files)
	r, err := openRoot(i.root)
	if err != nil {
		t.Fatal(err)
	}
	defer r.close()
	// A clock that is past the end at the second look: only the walk stops.
	looks := 0
	dirs := searchDirs(r, nil, func() time.Time {
		looks++
		return time.Unix(int64(looks), 0)
	})
	if looks > 20 {
		t.Errorf("%d looks at the clock after time was up", looks)
	}
	if !strings.Contains(strings.Join(dirs, " "), "/usr/local/lib") {
		t.Errorf("the standard directories are missing: %v", dirs)
	}
}

func FuzzCachePaths(f *testing.F) {
	f.Add([]byte("x\x00/a/libcuda.so.1\x00"))
	f.Add([]byte("/libcuda.so"))
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, p := range cachePaths(b) {
			if !strings.HasPrefix(p, "/") || bytes.IndexByte([]byte(p), 0) >= 0 {
				t.Fatalf("%q", p)
			}
		}
	})
}
