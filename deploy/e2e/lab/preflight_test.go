package lab

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// only makes PATH one folder with links to these programs of the machine.
func only(t *testing.T, names ...string) string {
	t.Helper()
	dir := t.TempDir()
	for _, name := range names {
		path, err := exec.LookPath(name)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(path, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", dir)
	return dir
}

func faultsByPackage(faults []Fault) map[string]Fault {
	found := map[string]Fault{}
	for _, f := range faults {
		found[f.Package] = f
	}
	return found
}

func module(t *testing.T) string {
	t.Helper()
	dir, err := FindModule(".")
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

func TestPreflightFindsNothingMissingHere(t *testing.T) {
	if err := Preflight(t.Context(), PreflightConfig{Module: module(t), Dir: t.TempDir()}, nil); err != nil {
		t.Fatal(err)
	}
}

func TestPreflightNamesEveryMissingProgramAndItsPackage(t *testing.T) {
	t.Setenv(cacheVariable, t.TempDir()) // nothing is built: the compilers are needed too
	config := PreflightConfig{Module: module(t), Dir: t.TempDir()}
	only(t)
	found := faultsByPackage(check(t.Context(), config))
	for _, pkg := range []string{"iptables", "busybox-static", "gcc", "pkg-config", "libseccomp-dev", "mount"} {
		f, ok := found[pkg]
		if !ok {
			t.Errorf("package %s is not asked for", pkg)
			continue
		}
		if f.What == "" || f.Why == "" || !strings.Contains(f.Fix, pkg) {
			t.Errorf("package %s: incomplete advice %+v", pkg, f)
		}
	}
	err := Preflight(t.Context(), config, nil)
	for _, want := range []string{"program iptables in PATH", "kube-proxy programs Services", "apt-get install", "program go in PATH"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("the message lacks %q:\n%v", want, err)
		}
	}
	var fault Fault
	if !errors.As(err, &fault) {
		t.Errorf("%v holds no Fault", err)
	}
}

func TestPreflightAsksForNoCompilerWhenProgramsAreBuilt(t *testing.T) {
	t.Setenv(cacheVariable, t.TempDir())
	dir, err := ProgramsDir(module(t))
	if err != nil {
		t.Fatal(err)
	}
	fakePrograms(t, dir)
	config := PreflightConfig{Module: module(t), Dir: t.TempDir()}
	only(t)
	found := faultsByPackage(check(t.Context(), config))
	if _, ok := found["gcc"]; ok {
		t.Error("gcc is asked for though there is nothing to build")
	}
	if _, ok := found["iptables"]; !ok {
		t.Error("iptables is not asked for")
	}
}

func TestPreflightInstallsWhatItNames(t *testing.T) {
	dir := only(t, "mount", "busybox")
	// An apt-get that "installs" every package as a program of the same name.
	script := "#!/bin/sh\necho \"$@\" >>" + dir + "/calls\n[ \"$1\" = install ] || exit 0\nshift\nfor p; do case $p in -*) ;; *) echo '#!/bin/sh' >" + dir + "/$p; /bin/chmod +x " + dir + "/$p ;; esac; done\n"
	if err := os.WriteFile(filepath.Join(dir, "apt-get"), []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	programs := t.TempDir()
	t.Setenv(cacheVariable, programs)
	built, err := ProgramsDir(module(t))
	if err != nil {
		t.Fatal(err)
	}
	fakePrograms(t, built)
	if err := Preflight(t.Context(), PreflightConfig{Module: module(t), Dir: t.TempDir(), Install: true}, nil); err != nil {
		t.Fatal(err)
	}
	calls, err := os.ReadFile(filepath.Join(dir, "calls"))
	if err != nil {
		t.Fatal(err)
	}
	if want := "update\ninstall -y --no-install-recommends iptables\n"; string(calls) != want {
		t.Errorf("apt-get was called with\n%swant\n%s", calls, want)
	}
}

func TestPreflightSaysWhyAnInstallFailed(t *testing.T) {
	dir := only(t, "mount", "busybox")
	if err := os.WriteFile(filepath.Join(dir, "apt-get"), []byte("#!/bin/sh\necho no network >&2; exit 100\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	err := Preflight(t.Context(), PreflightConfig{Module: module(t), Dir: t.TempDir(), Install: true}, nil)
	if err == nil || !strings.Contains(err.Error(), "no network") || !strings.Contains(err.Error(), "apt-get update") {
		t.Errorf("error %v, want the command and what it said", err)
	}
}

func TestDiskAndMemoryThresholds(t *testing.T) {
	const unreachable = 1 << 60
	for name, r := range map[string]func(uint64) requirement{
		"disk": func(n uint64) requirement {
			return disk(filepath.Join(t.TempDir(), "not", "there", "yet"), n, "a test")
		},
		"memory": func(n uint64) requirement { return memory(n, "a test") },
	} {
		t.Run(name, func(t *testing.T) {
			if f := r(1)(context.Background()); f != nil {
				t.Errorf("one byte: %v", f)
			}
			f := r(unreachable)(context.Background())
			if f == nil {
				t.Fatal("a quintillion bytes: no fault")
			}
			if !strings.Contains(f.What, "1073741824 GiB") || f.Fix == "" {
				t.Errorf("what was wanted is not said: %v", f)
			}
		})
	}
}

func TestDynamicBusyboxIsRefused(t *testing.T) {
	shell, err := exec.LookPath("bash") // dynamic on every Debian
	if err != nil {
		t.Fatal(err)
	}
	dir := only(t)
	if err := os.Symlink(shell, filepath.Join(dir, "busybox")); err != nil {
		t.Fatal(err)
	}
	if f := staticBusybox(t.Context()); f == nil || f.Package != "busybox-static" {
		t.Errorf("got %v, want a fault that names busybox-static", f)
	}
}
