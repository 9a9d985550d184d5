package lab

import (
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// fakePrograms fills dir with files that look like a finished build.
func fakePrograms(t *testing.T, dir string) {
	t.Helper()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, name := range programNames() {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("x"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
}

// fakeModule is a copy of what a build's name depends on.
func fakeModule(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range map[string]string{"go.mod": "module " + modulePath + "\n", "go.sum": "", "cmd/kube/main.go": "package main", "cmd/pause/main.go": "package main"} {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestFolderOfProgramsFollowsWhatTheyAreBuiltFrom(t *testing.T) {
	t.Setenv(cacheVariable, t.TempDir())
	dir := fakeModule(t)
	name := func() string {
		t.Helper()
		n, err := ProgramsDir(dir)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	first := name()
	if name() != first {
		t.Fatal("two calls give two names")
	}
	if err := os.WriteFile(filepath.Join(dir, "README.md"), []byte("x"), 0o644); err != nil {
		t.Fatal(err)
	}
	if name() != first {
		t.Error("a file that is not built from changes the name")
	}
	for _, file := range []string{"go.mod", "go.sum", "cmd/kube/main.go", "cmd/pause/main.go"} {
		before := name()
		f, err := os.OpenFile(filepath.Join(dir, file), os.O_APPEND|os.O_WRONLY, 0)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.WriteString("\n// changed"); err != nil {
			t.Fatal(err)
		}
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
		if name() == before {
			t.Errorf("a change of %s doesn't change the name", file)
		}
	}
}

func TestFinishedBuildIsUsedAndHalfAOneIsNot(t *testing.T) {
	t.Setenv(cacheVariable, t.TempDir())
	source := fakeModule(t)
	dir, err := ProgramsDir(source)
	if err != nil {
		t.Fatal(err)
	}
	fakePrograms(t, dir)
	// The go command must not be needed.
	only(t)
	if got, err := Build(t.Context(), source, nil); err != nil || got != dir {
		t.Errorf("Build gives %q, %v; want %q", got, err, dir)
	}
	if err := os.Remove(filepath.Join(dir, "kubectl")); err != nil {
		t.Fatal(err)
	}
	if _, err := Build(t.Context(), source, nil); err == nil {
		t.Error("a build without kubectl passes for a whole one")
	}
	if _, err := os.Stat(dir); err == nil {
		t.Error("a failed build left a folder under the final name")
	}
}

func TestBuildShowsWhatTheCompilerSaid(t *testing.T) {
	t.Setenv(cacheVariable, t.TempDir())
	source := fakeModule(t)
	mod := "module " + modulePath + "\n\ngo 1.26.0\n\nrequire (\n\tk8s.io/kubernetes v1.37.2\n\tgithub.com/containerd/containerd/v2 v2.4.2\n\tgithub.com/opencontainers/runc v1.5.3\n)\n"
	if err := os.WriteFile(filepath.Join(source, "go.mod"), []byte(mod), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(source, "cmd/kube/main.go"), []byte("//go:build kube\n\npackage main\n\nfunc main() { undefinedThing() }\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	_, err := Build(t.Context(), source, nil)
	if err == nil || !strings.Contains(err.Error(), "undefinedThing") || !strings.Contains(err.Error(), "Kubernetes and etcd") {
		t.Errorf("error %v, want the part and the compiler's words", err)
	}
}

func TestVersionsComeFromGoMod(t *testing.T) {
	versions := map[string]string{"k8s.io/kubernetes": "v1.37.2", "example.org/x": "v2.4.2"}
	got, err := recipe{ldflags: "-X a={k8s.io/kubernetes} -X b={minor} -X c={-example.org/x}"}.linkerFlags(versions)
	if want := "-s -w -X a=v1.37.2 -X b=37 -X c=2.4.2"; err != nil || got != want {
		t.Errorf("%q, %v; want %q", got, err, want)
	}
	if _, err := (recipe{ldflags: "{example.org/y}"}).linkerFlags(versions); err == nil || !strings.Contains(err.Error(), "example.org/y") {
		t.Errorf("error %v, want one that names the module", err)
	}
}

func TestFollowSortsWhatTheCompilerSays(t *testing.T) {
	var compiled, downloaded atomic.Int64
	said := follow(strings.NewReader("go: downloading k8s.io/api v0.37.2\nk8s.io/api/core/v1\nruntime\n# k8s.io/api\nx.go:3:1: undefined: y\n"), &compiled, &downloaded)
	if compiled.Load() != 2 || downloaded.Load() != 1 {
		t.Errorf("%d compiled, %d downloaded; want 2 and 1", compiled.Load(), downloaded.Load())
	}
	if want := "  | # k8s.io/api\n  | x.go:3:1: undefined: y\n"; said != want {
		t.Errorf("rest %q, want %q", said, want)
	}
}

func TestFindModuleFromAboveAndBelow(t *testing.T) {
	want := module(t)
	for _, from := range []string{want, filepath.Join(want, "lab"), filepath.Join(want, "..", "..")} {
		if got, err := FindModule(from); err != nil || got != want {
			t.Errorf("from %s: %q, %v; want %q", from, got, err, want)
		}
	}
	if _, err := FindModule(t.TempDir()); err == nil {
		t.Error("found in an empty folder")
	}
}

func TestOnlyLongUnusedBuildsAreRemoved(t *testing.T) {
	root := t.TempDir()
	for name, age := range map[string]time.Duration{
		"0123456789abcdef": 31 * 24 * time.Hour, "fedcba9876543210": 29 * 24 * time.Hour, "somebody-elses": 400 * 24 * time.Hour,
	} {
		dir := filepath.Join(root, name)
		fakePrograms(t, dir)
		if err := os.Chtimes(dir, time.Time{}, time.Now().Add(-age)); err != nil {
			t.Fatal(err)
		}
	}
	removeUnused(root, time.Now())
	left, err := os.ReadDir(root)
	if err != nil {
		t.Fatal(err)
	}
	if len(left) != 2 || left[0].Name() != "fedcba9876543210" || left[1].Name() != "somebody-elses" {
		t.Errorf("left are %v", left)
	}
}
