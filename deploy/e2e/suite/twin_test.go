package suite

import (
	"debug/elf"
	"encoding/base64"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/carve-gpu/carve/deploy/e2e/install"
)

// exports lists what a library's file gives to others.
func exports(t *testing.T, path string) []string {
	t.Helper()
	f, err := elf.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	symbols, err := f.DynamicSymbols()
	if err != nil {
		t.Fatalf("%s: %v", path, err)
	}
	var names []string
	for _, s := range symbols {
		if s.Section != elf.SHN_UNDEF && elf.ST_BIND(s.Info) != elf.STB_LOCAL {
			names = append(names, s.Name)
		}
	}
	slices.Sort(names)
	return names
}

// TestContainerSeesWhatTheDriverExports asks for every function that any driver
// has, those that ours lacks among them (vgpu-10, vgpu-18), and links programs
// with what the container has of libcuda and NVML.
func TestContainerSeesWhatTheDriverExports(t *testing.T) {
	create(t, pod("twin", container("app", share{"gpumem": "4000"})))
	running(t, "twin")
	libraries := t.TempDir()
	for _, name := range []string{"libcuda.so", "libnvidia-ml.so"} {
		r := shell(t, "twin", "app", "sh", "-c", "base64 /usr/lib/x86_64-linux-gnu/"+name+".1")
		b, err := base64.StdEncoding.DecodeString(strings.ReplaceAll(r.stdout, "\n", ""))
		if err != nil {
			t.Fatalf("%s of the container: %v, %s", name, err, r.stderr)
		}
		if err := os.WriteFile(filepath.Join(libraries, name), b, 0o755); err != nil {
			t.Fatal(err)
		}
		driver := filepath.Join(install.SoftRoot(cluster.Lab.Config().Dir), "usr/lib/x86_64-linux-gnu", name+".1")
		if got, want := exports(t, filepath.Join(libraries, name)), exports(t, driver); !slices.Equal(got, want) || len(want) < 100 {
			t.Errorf("%s of the container exports %d names, the driver's %d", name, len(got), len(want))
		}
	}

	// What dlsym finds, of all that a later driver has and of all hooks.
	has := map[string]bool{}
	for _, name := range exports(t, filepath.Join(install.SoftRoot(cluster.Lab.Config().Dir), "usr/lib/x86_64-linux-gnu/libcuda.so.1")) {
		has[name] = true
	}
	names := append(exports(t, filepath.Join(cluster.Repo, "vgpu/soft/build/libcuda-580.so")), exports(t, filepath.Join(cluster.Repo, "vgpu/lib/build/libcarve-cuda.so"))...)
	slices.Sort(names)
	names = slices.Compact(names)
	r := shell(t, "twin", "app", "sh", "-c", "printf '%s\\n' "+strings.Join(names, " ")+" | gpuprobe symbols")
	asked, lacking := 0, 0
	for _, l := range strings.Split(strings.TrimSpace(r.stdout), "\n") {
		var m struct {
			Step, Name, File string
			OK               bool
		}
		if err := json.Unmarshal([]byte(l), &m); err != nil {
			t.Fatalf("gpuprobe symbols: %q: %v; stderr: %s", l, err, r.stderr)
		}
		if m.Step != "symbol" {
			continue
		}
		asked++
		if !has[m.Name] {
			lacking++
		}
		if m.OK != has[m.Name] {
			t.Errorf("dlsym finds %s: %v (in %s), the driver has it: %v", m.Name, m.OK, m.File, has[m.Name])
		}
	}
	if asked != len(names) || lacking < 5 || has["cuCtxCreate_v4"] {
		t.Errorf("of %d names, %d were asked for, %d of them the driver lacks; stderr: %s", len(names), asked, lacking, r.stderr)
	}

	gcc, err := exec.LookPath("gcc")
	if err != nil {
		t.Fatal("linking with -lcuda needs gcc, as the build does (Debian: apt-get install gcc libc6-dev)")
	}
	source := filepath.Join(libraries, "linked.c")
	if err := os.WriteFile(source, []byte(linkedProgram), 0o644); err != nil {
		t.Fatal(err)
	}
	link := func(flags ...string) (string, []byte, error) {
		program := filepath.Join(libraries, "linked")
		args := append(append([]string{"-O2", "-s"}, flags...), source, "-o", program, "-L"+libraries, "-lcuda", "-lnvidia-ml")
		out, err := exec.CommandContext(t.Context(), gcc, args...).CombinedOutput()
		return program, out, err
	}
	if _, out, err := link("-DLATER_DRIVER"); err == nil || !strings.Contains(string(out), "cuCtxCreate_v4") {
		t.Errorf("a program that needs a function which the driver lacks was linked (%v): %s", err, out)
	}
	program, out, err := link()
	if err != nil {
		t.Fatalf("link with -lcuda: %v\n%s", err, out)
	}
	b, err := os.ReadFile(program)
	if err != nil {
		t.Fatal(err)
	}
	r = shell(t, "twin", "app", "sh", "-c", "echo "+base64.StdEncoding.EncodeToString(b)+" | base64 -d >/tmp/linked && chmod +x /tmp/linked && env -i /tmp/linked")
	if r.code != 0 || strings.TrimSpace(r.stdout) != "total 4000 MiB, NVML 4000 MiB, too much 2" {
		t.Errorf("a linked program says %q and ends with %d; stderr: %s", r.stdout, r.code, r.stderr)
	}
}

// linkedProgram uses what is hooked and what isn't, of both libraries. Only
// names and types of the interface, declared here.
const linkedProgram = `
#include <stdio.h>
int cuInit(unsigned), cuDeviceGet(int *, int), cuCtxCreate_v2(void **, unsigned, int), cuMemGetInfo_v2(unsigned long *, unsigned long *),
    cuMemAlloc_v2(unsigned long *, unsigned long), cuCtxCreate_v4(void *, void *, unsigned, int);
int nvmlInit_v2(void), nvmlDeviceGetHandleByIndex_v2(unsigned, void **), nvmlDeviceGetMemoryInfo(void *, unsigned long long *);
int main(void) {
    int device;
    void *context, *card;
    unsigned long f, total, p;
    unsigned long long memory[3];
#ifdef LATER_DRIVER
    cuCtxCreate_v4(&context, 0, 0, 0);
#endif
    if (cuInit(0) || cuDeviceGet(&device, 0) || cuCtxCreate_v2(&context, 0, device) || cuMemGetInfo_v2(&f, &total)) return 1;
    if (nvmlInit_v2() || nvmlDeviceGetHandleByIndex_v2(0, &card) || nvmlDeviceGetMemoryInfo(card, memory)) return 2;
    printf("total %lu MiB, NVML %llu MiB, too much %d\n", total >> 20, memory[0] >> 20, cuMemAlloc_v2(&p, f + (1 << 20)));
    return 0;
}
`
