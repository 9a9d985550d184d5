package native_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/carve-gpu/carve/vgpu/native"
)

// TestCacheAsksForSources: a test that says what it is made of runs again once that changed,
// and not before.
func TestCacheAsksForSources(t *testing.T) {
	here, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	write := func(name, text string) {
		t.Helper()
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
		// The cache takes no file that is younger than two seconds.
		old := time.Now().Add(-time.Hour)
		if err := os.Chtimes(path, old, old); err != nil {
			t.Fatal(err)
		}
	}
	write("go.mod", "module example.test/m\n\ngo 1.26\n\nrequire github.com/carve-gpu/carve v0.0.0\n\nreplace github.com/carve-gpu/carve => "+here+"\n")
	write("m_test.go", `package m

import (
	"os/exec"
	"testing"

	"github.com/carve-gpu/carve/vgpu/native"
)

func TestIt(t *testing.T) {
	if err := native.Make("c"); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("c/build/it").CombinedOutput(); err != nil {
		t.Fatalf("%v %s", err, out)
	}
}
`)
	write("c/Makefile", "all: build/it\nbuild/it: src/it.sh\n\tmkdir -p build && cp -p src/it.sh build/it\n")
	write("c/src/it.sh", "#!/bin/sh\nexit 0\n")
	run := func() string {
		t.Helper()
		cmd := exec.Command("go", "test", "-mod=mod", ".")
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "GOFLAGS=", "GOPROXY=off", "GOSUMDB=off")
		out, err := cmd.CombinedOutput()
		if err != nil {
			return "failed: " + string(out)
		}
		return string(out)
	}
	if out := run(); !strings.HasPrefix(out, "ok") {
		t.Fatal(out)
	}
	if out := run(); !strings.Contains(out, "(cached)") {
		t.Fatalf("nothing changed, and it isn't taken from the cache: %s", out)
	}
	write("c/src/it.sh", "#!/bin/sh\necho the new one; exit 1\n")
	now := time.Now()
	if err := os.Chtimes(filepath.Join(dir, "c/src/it.sh"), now, now); err != nil {
		t.Fatal(err)
	}
	if out := run(); !strings.Contains(out, "the new one") {
		t.Fatalf("the sources changed, and: %s", out)
	}
}

func TestWhatIsNotThere(t *testing.T) {
	if err := native.Sources(filepath.Join(t.TempDir(), "none")); err == nil {
		t.Error("a folder that isn't there")
	}
	if err := native.Sources(t.TempDir()); err == nil {
		t.Error("a folder without files")
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "Makefile"), []byte("all:\n\t@echo broken; exit 3\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := native.Make(dir); err == nil || !strings.Contains(err.Error(), "broken") {
		t.Errorf("a make that fails: %v", err)
	}
}
