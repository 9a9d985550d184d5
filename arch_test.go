// Package carve is the root of the module: it holds the test of the
// architecture and nothing else.
package carve

import (
	"encoding/json"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

const module = "github.com/carve-gpu/carve"

// pkg is what `go list -json` says of a package that matters here.
type pkg struct {
	ImportPath   string
	Dir          string
	Imports      []string
	GoFiles      []string
	CgoFiles     []string
	Standard     bool
	TestImports  []string
	XTestImports []string
}

// room is the package's path inside the module ("api", "vgpu/gpu").
func (p pkg) room() string { return strings.TrimPrefix(strings.TrimPrefix(p.ImportPath, module), "/") }

func packages(t *testing.T) []pkg {
	t.Helper()
	cmd := exec.Command("go", "list", "-json", "./...")
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v", err)
	}
	var all []pkg
	d := json.NewDecoder(strings.NewReader(string(out)))
	for d.More() {
		var p pkg
		if err := d.Decode(&p); err != nil {
			t.Fatalf("go list: %v", err)
		}
		all = append(all, p)
	}
	if len(all) < 5 {
		t.Fatalf("go list found %d packages: the rules below would be empty", len(all))
	}
	return all
}

func within(room string, prefixes ...string) bool {
	for _, p := range prefixes {
		if room == p || strings.HasPrefix(room, p+"/") {
			return true
		}
	}
	return false
}

// standard reports whether an import path is of the standard library: its
// first element has no dot.
func standard(path string) bool {
	first, _, _ := strings.Cut(path, "/")
	return !strings.Contains(first, ".")
}

// TestArrows holds the direction of imports: cmd → rooms → vgpu/{gpu,region} →
// api → standard library.
func TestArrows(t *testing.T) {
	// A bench wires rooms together as a command does.
	bench := func(room string) bool { return strings.HasSuffix(room, "/bench") }
	rooms := []string{"deviceplugin", "nri-hook", "mig", "scheduler-extender", "monitor", "vgpu/agent", "vgpu/guard", "vgpu/dmem", "vgpu/bundle"}
	for _, p := range packages(t) {
		for _, imp := range p.Imports {
			own, inside := strings.CutPrefix(imp, module+"/")
			switch {
			case p.room() == "api" && !standard(imp):
				t.Errorf("%s imports %s: the nouns use the standard library only, so that every room can read them", p.room(), imp)
			case inside && within(own, "cmd"):
				t.Errorf("%s imports %s: nothing imports a command", p.room(), own)
			case inside && within(p.room(), "api") && !within(own, "api"):
				t.Errorf("%s imports %s: api is below all rooms", p.room(), own)
			case p.room() == "vgpu/twin" && !standard(imp):
				t.Errorf("%s imports %s: it turns bytes into bytes", p.room(), imp)
			case inside && within(p.room(), "vgpu/gpu", "vgpu/region") && !within(own, "api", "vgpu/gpu", "vgpu/region"):
				t.Errorf("%s imports %s: the hardware door and the files are below the rooms", p.room(), own)
			}
			if inside && within(own, "scheduler-extender/packing") && !within(p.room(), "scheduler-extender/packing") {
				t.Errorf("%s imports %s: the experiment measures the extender and is no part of it", p.room(), own)
			}
			if !inside || bench(p.room()) {
				continue
			}
			for _, r := range rooms {
				if within(p.room(), r) {
					for _, other := range rooms {
						if other != r && within(own, other) {
							t.Errorf("%s imports %s: rooms meet in cmd, through interfaces declared where they are used", p.room(), own)
						}
					}
				}
			}
		}
	}
}

// TestDoors holds who may import a dependency that has one door.
func TestDoors(t *testing.T) {
	doors := []struct {
		dependency string
		allowed    []string
		why        string
	}{
		{"github.com/NVIDIA/go-nvml", []string{"vgpu/gpu/nvml"}, "the driver is reached through one door, vgpu/gpu/nvml"},
		{"unsafe", []string{"vgpu/region", "api/node/v1"}, "unsafe stays where the mapped files are (the code that protoc-gen-go writes uses it too)"},
		{"github.com/spf13/cobra", []string{"cmd/carve"}, "only commands parse arguments"},
		{"github.com/containerd/nri", []string{"nri-hook"}, "the runtime's plugin protocol is a thin shell on the pure adjustment"},
		{"k8s.io/kubelet", []string{"deviceplugin"}, "the kubelet's protocol is spoken in one room"},
		{"google.golang.org/protobuf", []string{"api/node", "cmd/generate-nodeapi", "monitor/sock"}, "messages are spoken at the node's socket only; package api stays plain Go, so the local API has a package of its own"},
		{"google.golang.org/grpc", []string{"api/node", "monitor/sock", "deviceplugin"}, "gRPC is spoken at the node's socket and with the kubelet, nowhere else"},
		{"k8s.io/kube-scheduler", []string{"scheduler-extender"}, "the extender's wire types stay in its HTTP layer"},
	}
	pure := map[string]bool{"scheduler-extender/fit": true, "scheduler-extender/score": true, "scheduler-extender/price": true, "scheduler-extender/rank": true}
	for _, p := range packages(t) {
		for _, imp := range p.Imports {
			for _, d := range doors {
				if (imp == d.dependency || strings.HasPrefix(imp, d.dependency+"/")) && !within(p.room(), d.allowed...) && !strings.HasSuffix(p.room(), "/bench") {
					t.Errorf("%s imports %s: %s", p.room(), imp, d.why)
				}
			}
			if pure[p.room()] && (strings.HasPrefix(imp, "k8s.io/client-go") || imp == "net" || strings.HasPrefix(imp, "net/") || imp == "os") {
				t.Errorf("%s imports %s: a pure core does no I/O", p.room(), imp)
			}
		}
	}
}

// TestOnlyCommandsReadTheProcess forbids os.Args, the environment and os.Exit
// outside cmd: rooms are given what they need.
func TestOnlyCommandsReadTheProcess(t *testing.T) {
	forbidden := map[string]bool{"Args": true, "Getenv": true, "LookupEnv": true, "Environ": true, "Setenv": true, "Exit": true}
	for _, p := range packages(t) {
		if within(p.room(), "cmd") || strings.HasSuffix(p.room(), "/bench") {
			continue
		}
		for _, name := range append(p.GoFiles, p.CgoFiles...) {
			file := filepath.Join(p.Dir, name)
			fset := token.NewFileSet()
			f, err := parser.ParseFile(fset, file, nil, 0)
			if err != nil {
				t.Fatal(err)
			}
			ast.Inspect(f, func(n ast.Node) bool {
				if s, ok := n.(*ast.SelectorExpr); ok {
					if x, ok := s.X.(*ast.Ident); ok && x.Name == "os" && forbidden[s.Sel.Name] {
						t.Errorf("%s: os.%s: only cmd reads arguments and the environment, and only main ends the process", fset.Position(n.Pos()), s.Sel.Name)
					}
				}
				return true
			})
		}
	}
}

// TestSourceFilesStayReadable bounds the length of source files.
func TestSourceFilesStayReadable(t *testing.T) {
	const maxLines = 700
	out, err := exec.Command("git", "ls-files", "*.go", "*.c", "*.h").Output()
	if err != nil {
		t.Fatalf("git ls-files: %v", err)
	}
	for _, f := range strings.Fields(string(out)) {
		if strings.Contains(f, "zz_generated") || strings.HasSuffix(f, ".pb.go") {
			continue
		}
		b, err := os.ReadFile(f)
		if os.IsNotExist(err) {
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		if n := strings.Count(string(b), "\n"); n > maxLines {
			t.Errorf("%s has %d lines, allowed are %d: split it by concern", f, n, maxLines)
		}
	}
}
