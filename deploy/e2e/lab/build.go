package lab

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/mod/modfile"
)

// cacheVariable names a folder for the programs, instead of the user's cache.
const cacheVariable = "CARVE_E2E_CACHE"

// modulePath is the module that the programs are built from.
const modulePath = "github.com/carve-gpu/carve/deploy/e2e"

// recipe builds one or more programs by one call of `go build`.
type recipe struct {
	// label is what a person reads.
	label    string
	packages []string
	// output names the file if packages is one package; otherwise each program is
	// named after its package.
	output string
	cgo    bool
	tags   string
	// ldflags may refer to the version of a module as {module/path}, with its v,
	// or {-module/path}, without.
	ldflags string
	// links are further names of the program.
	links []string
}

// The flags are part of what Go caches by: -trimpath is in all of them, so
// `go test -trimpath` finds these packages built.
var recipes = []recipe{
	{
		label: "Kubernetes and etcd", packages: []string{modulePath + "/cmd/kube"}, output: "kube", tags: "kube",
		ldflags: "-X k8s.io/component-base/version.gitVersion={k8s.io/kubernetes} -X k8s.io/component-base/version.gitMajor=1 -X k8s.io/component-base/version.gitMinor={minor}" +
			" -X k8s.io/client-go/pkg/version.gitVersion={k8s.io/kubernetes} -X k8s.io/client-go/pkg/version.gitMajor=1 -X k8s.io/client-go/pkg/version.gitMinor={minor}",
		links: []string{"etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kube-proxy", "kubelet", "kubectl"},
	},
	{
		label: "containerd",
		packages: []string{
			"github.com/containerd/containerd/v2/cmd/containerd",
			"github.com/containerd/containerd/v2/cmd/containerd-shim-runc-v2",
			"github.com/containerd/containerd/v2/cmd/ctr",
		},
		tags:    "no_btrfs no_devmapper no_zfs",
		ldflags: "-X github.com/containerd/containerd/v2/version.Version={-github.com/containerd/containerd/v2}",
	},
	{
		label: "runc", packages: []string{"github.com/opencontainers/runc"}, output: "runc",
		// runc enters namespaces in C, and its seccomp support is libseccomp.
		cgo: true, tags: "seccomp", ldflags: "-X main.version={-github.com/opencontainers/runc}",
	},
	{
		label: "CNI plugins and pause",
		packages: []string{
			"github.com/containernetworking/plugins/plugins/main/bridge",
			"github.com/containernetworking/plugins/plugins/main/loopback",
			"github.com/containernetworking/plugins/plugins/ipam/host-local",
			modulePath + "/cmd/pause",
		},
	},
}

// ownSources are the packages of this module among the programs: the rest is
// pinned by go.sum.
var ownSources = []string{"cmd/kube", "cmd/pause"}

func programNames() []string {
	var names []string
	for _, r := range recipes {
		if r.output != "" {
			names = append(names, r.output)
		} else {
			for _, p := range r.packages {
				names = append(names, filepath.Base(p))
			}
		}
		names = append(names, r.links...)
	}
	return names
}

func checkPrograms(dir string) error {
	for _, name := range programNames() {
		if info, err := os.Stat(filepath.Join(dir, name)); err != nil {
			return fmt.Errorf("programs in %s: %w (Build makes them)", dir, err)
		} else if info.Size() == 0 {
			return fmt.Errorf("programs in %s: %s is empty", dir, name)
		}
	}
	return nil
}

// Build returns a folder with all programs of a lab, and builds them if no
// earlier call did: from nothing that takes about 15 minutes on two cores and a
// gigabyte of downloads. The folder's name tells the versions, flags and sources
// that it was built from, and it appears only when it is whole.
//
// module is the folder of deploy/e2e's go.mod; see FindModule.
func Build(ctx context.Context, module string, progress *Progress) (string, error) {
	dir, err := ProgramsDir(module)
	if err != nil {
		return "", err
	}
	if checkPrograms(dir) == nil {
		markUsed(dir)
		return dir, nil
	}
	unlock, err := lockDir(ctx, dir+".lock", func() { progress.Note("waiting for another process that builds %s", dir) })
	if err != nil {
		return "", fmt.Errorf("build the lab's programs: %w", err)
	}
	defer unlock()
	if checkPrograms(dir) == nil {
		return dir, nil // the other process did it
	}
	if err := build(ctx, module, dir, progress); err != nil {
		return "", fmt.Errorf("build the lab's programs: %w", err)
	}
	removeUnused(filepath.Dir(dir), time.Now())
	return dir, nil
}

// unusedAfter is how long a build is kept that no call of Build returned: each
// is 300 MiB.
const unusedAfter = 30 * 24 * time.Hour

// markUsed notes the time of use as the folder's modification time. That it is
// not noted, in a cache that can't be written, harms nobody.
func markUsed(dir string) { _ = os.Chtimes(dir, time.Time{}, time.Now()) }

var buildName = regexp.MustCompile(`^[0-9a-f]{16}$`)

// removeUnused removes builds of other versions. It is a courtesy: what can't
// be removed stays.
func removeUnused(root string, now time.Time) {
	entries, err := os.ReadDir(root)
	if err != nil {
		return
	}
	for _, e := range entries {
		info, err := e.Info()
		if err != nil || !e.IsDir() || !buildName.MatchString(e.Name()) || now.Sub(info.ModTime()) < unusedAfter {
			continue
		}
		_ = os.RemoveAll(filepath.Join(root, e.Name()))
		_ = os.RemoveAll(filepath.Join(root, e.Name()+".lock"))
	}
}

// ProgramsDir returns where Build puts the programs.
func ProgramsDir(module string) (string, error) {
	root := os.Getenv(cacheVariable)
	if root == "" {
		cache, err := os.UserCacheDir()
		if err != nil {
			return "", fmt.Errorf("folder for the lab's programs: %w (name one in %s)", err, cacheVariable)
		}
		root = filepath.Join(cache, "carve", "e2e")
	}
	root, err := filepath.Abs(root)
	if err != nil {
		return "", err
	}
	sum := sha256.New()
	fmt.Fprintf(sum, "%s %s %+v\n", runtime.GOARCH, runtime.Version(), recipes)
	sources := []string{"go.mod", "go.sum"}
	for _, dir := range ownSources {
		matches, err := filepath.Glob(filepath.Join(module, dir, "*.go"))
		if err != nil {
			return "", err
		}
		for _, match := range matches {
			sources = append(sources, filepath.Join(dir, filepath.Base(match)))
		}
	}
	for _, name := range sources {
		data, err := os.ReadFile(filepath.Join(module, name))
		if err != nil {
			return "", fmt.Errorf("name the folder of the lab's programs: %w", err)
		}
		fmt.Fprintf(sum, "%s %d\n", name, len(data))
		sum.Write(data)
	}
	return filepath.Join(root, hex.EncodeToString(sum.Sum(nil))[:16]), nil
}

// FindModule returns the folder of deploy/e2e: from or a folder above it, or
// deploy/e2e in one of these.
func FindModule(from string) (string, error) {
	from, err := filepath.Abs(from)
	if err != nil {
		return "", err
	}
	for dir := from; ; dir = filepath.Dir(dir) {
		for _, candidate := range []string{dir, filepath.Join(dir, "deploy", "e2e")} {
			data, err := os.ReadFile(filepath.Join(candidate, "go.mod"))
			if err == nil && modfile.ModulePath(data) == modulePath {
				return candidate, nil
			}
		}
		if dir == filepath.Dir(dir) {
			return "", fmt.Errorf("find module %s: in no folder above %s", modulePath, from)
		}
	}
}

func build(ctx context.Context, module, dir string, progress *Progress) error {
	data, err := os.ReadFile(filepath.Join(module, "go.mod"))
	if err != nil {
		return err
	}
	mod, err := modfile.Parse("go.mod", data, nil)
	if err != nil {
		return err
	}
	versions := map[string]string{}
	for _, r := range mod.Require {
		versions[r.Mod.Path] = r.Mod.Version
	}
	// On the same file system as dir, so that it can be renamed; what an
	// interrupted build left goes first.
	half := dir + ".half"
	if err := os.RemoveAll(half); err != nil {
		return err
	}
	if err := os.RemoveAll(dir); err != nil {
		return err
	}
	if err := os.MkdirAll(half, 0o755); err != nil {
		return err
	}
	progress.Note("building the lab's programs into %s; once: about 15 minutes on two cores if nothing is cached", dir)
	for _, r := range recipes {
		if err := r.build(ctx, module, half, versions, progress); err != nil {
			return err
		}
		for _, link := range r.links {
			if err := os.Symlink(r.output, filepath.Join(half, link)); err != nil {
				return err
			}
		}
	}
	return os.Rename(half, dir)
}

var moduleReference = regexp.MustCompile(`\{(-?)([^}]+)\}`)

func (r recipe) linkerFlags(versions map[string]string) (string, error) {
	var missing error
	flags := moduleReference.ReplaceAllStringFunc(r.ldflags, func(reference string) string {
		m := moduleReference.FindStringSubmatch(reference)
		if m[2] == "minor" {
			parts := strings.Split(versions["k8s.io/kubernetes"], ".")
			return parts[min(1, len(parts)-1)]
		}
		version, ok := versions[m[2]]
		if !ok {
			missing = errors.Join(missing, fmt.Errorf("go.mod does not require %s", m[2]))
		}
		if m[1] != "" {
			version = strings.TrimPrefix(version, "v")
		}
		return version
	})
	return strings.TrimSpace("-s -w " + flags), missing
}

func (r recipe) build(ctx context.Context, module, out string, versions map[string]string, progress *Progress) error {
	ldflags, err := r.linkerFlags(versions)
	if err != nil {
		return err
	}
	args := []string{"build", "-v", "-trimpath", "-ldflags=" + ldflags, "-o", filepath.Join(out, r.output)}
	if r.output == "" {
		args[len(args)-1] += "/"
	}
	if r.tags != "" {
		args = append(args, "-tags="+r.tags)
	}
	cmd := exec.CommandContext(ctx, "go", append(args, r.packages...)...)
	cmd.Dir = module
	cgo := "CGO_ENABLED=0"
	if r.cgo {
		cgo = "CGO_ENABLED=1"
	}
	cmd.Env = append(os.Environ(), cgo, "GOWORK=off")
	stderr, err := cmd.StderrPipe()
	if err != nil {
		return err
	}
	var compiled, downloaded atomic.Int64
	detail := func() string {
		return fmt.Sprintf("%d modules downloaded, %d packages compiled", downloaded.Load(), compiled.Load())
	}
	return progress.step("build "+r.label, detail, func() error {
		if err := cmd.Start(); err != nil {
			return fmt.Errorf("start the Go compiler: %w", err)
		}
		said := follow(stderr, &compiled, &downloaded)
		if err := cmd.Wait(); err != nil {
			return fmt.Errorf("%s: go %s: %w\n%s", r.label, strings.Join(cmd.Args[1:], " "), err, said)
		}
		return nil
	})
}

// packageLine is what `go build -v` prints for each package that it compiles.
var packageLine = regexp.MustCompile(`^[\w.~/-]+$`)

// follow counts what `go build -v` tells and returns the rest, which are its
// complaints.
func follow(stderr io.Reader, compiled, downloaded *atomic.Int64) string {
	var said strings.Builder
	lines := bufio.NewScanner(stderr)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		switch line := lines.Text(); {
		case packageLine.MatchString(line):
			compiled.Add(1)
		case strings.HasPrefix(line, "go: downloading "):
			downloaded.Add(1)
		case said.Len() < 16<<10:
			fmt.Fprintln(&said, "  | "+line)
		}
	}
	return said.String()
}
