package agent

import (
	"context"
	"debug/elf"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// built is a file of this repository that `make native` makes.
func built(t *testing.T, path string) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("../..", path))
	if err != nil {
		t.Fatalf("%v (run make native)", err)
	}
	return b
}

// replaceFile puts a new file in the place of another, as an installation does.
func replaceFile(t *testing.T, path string, content []byte) {
	t.Helper()
	if err := os.WriteFile(path+".new", content, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		t.Fatal(err)
	}
}

// installDriver puts the software GPU's libraries of a branch into a root.
func installDriver(t *testing.T, dir, branch string) {
	t.Helper()
	for name, file := range map[string]string{"libcuda.so.1": "libcuda-", "libnvidia-ml.so.1": "libnvidia-ml-"} {
		replaceFile(t, filepath.Join(dir, "driver/usr/lib/x86_64-linux-gnu", name), built(t, "vgpu/soft/build/"+file+branch+".so"))
	}
}

// exported lists what a library's file gives to others.
func exported(t *testing.T, path string) []string {
	t.Helper()
	f, err := elf.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	symbols, err := f.DynamicSymbols()
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, s := range symbols {
		if s.Section != elf.SHN_UNDEF && elf.ST_BIND(s.Info) != elf.STB_LOCAL {
			names = append(names, s.Name+" "+elf.ST_TYPE(s.Info).String())
		}
	}
	slices.Sort(names)
	return names
}

// twinNode is an agent on a node with the built fronts.
func twinNode(t *testing.T) (dir string, start func() *Agent) {
	t.Helper()
	dir = t.TempDir()
	makeRoot(t, dir)
	for _, name := range []string{"libcarve-cuda.so", "libcarve-nvml.so"} {
		replaceFile(t, filepath.Join(dir, "lib", name), built(t, "vgpu/lib/build/"+name))
	}
	server := newAPIServer(t)
	return dir, func() *Agent {
		a, err := New(context.Background(), testConfig(t, dir, server, &twoCards{}))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { a.queue.ShutDown(); a.lock.Close() })
		a.readCards()
		return a
	}
}

func TestFrontsAreMadeForTheDriver(t *testing.T) {
	dir, start := twinNode(t)
	installDriver(t, dir, "550")
	a := start()
	d := a.Driver()
	if fault := a.TwinFault(); fault != "" {
		t.Fatal(fault)
	}
	for path, of := range map[string]string{d.FrontCUDA: "libcuda.so.1", d.FrontNVML: "libnvidia-ml.so.1"} {
		if !strings.Contains(filepath.Base(path), "-550.90.07-") {
			t.Errorf("%s isn't named by the driver", path)
		}
		if got, want := exported(t, path), exported(t, filepath.Join(dir, "driver/usr/lib/x86_64-linux-gnu", of)); !slices.Equal(got, want) {
			t.Errorf("%s exports %d names, %s %d", path, len(got), of, len(want))
		}
	}
	if _, err := a.CheckInstalled(); err != nil {
		t.Error(err)
	}
	before, err := os.Stat(d.FrontCUDA)
	if err != nil {
		t.Fatal(err)
	}
	a.readCards()
	after, err := os.Stat(d.FrontCUDA)
	if err != nil || a.Driver().FrontCUDA != d.FrontCUDA || !os.SameFile(before, after) || !after.ModTime().Equal(before.ModTime()) {
		t.Errorf("with the same driver the front was made anew (%v)", err)
	}

	// The same version, installed anew with other libraries.
	installDriver(t, dir, "570")
	a.readCards()
	next := a.Driver()
	if next.FrontCUDA == d.FrontCUDA || next.FrontNVML != d.FrontNVML {
		// NVML of 550 and of 570 export the same, so its twin is the same file.
		t.Errorf("with another driver containers get %s and %s, before %s and %s", next.FrontCUDA, next.FrontNVML, d.FrontCUDA, d.FrontNVML)
	}
	if got, want := exported(t, next.FrontCUDA), exported(t, filepath.Join(dir, "driver/usr/lib/x86_64-linux-gnu/libcuda.so.1")); !slices.Equal(got, want) {
		t.Errorf("the next front exports %d names, the driver %d", len(got), len(want))
	}
	// share-23: what running containers have mapped stays as it is.
	if still, err := os.Stat(d.FrontCUDA); err != nil || !os.SameFile(before, still) || !still.ModTime().Equal(before.ModTime()) {
		t.Errorf("the front of the containers that run was touched (%v)", err)
	}
}

func TestADamagedFrontIsFoundAndReplaced(t *testing.T) {
	dir, start := twinNode(t)
	installDriver(t, dir, "550")
	a := start()
	path := a.Driver().FrontCUDA
	good, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	mapped, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer mapped.Close()
	if err := os.WriteFile(path, good[:len(good)-1], 0o755); err != nil {
		t.Fatal(err)
	}
	if _, err := a.CheckInstalled(); err == nil || !strings.Contains(err.Error(), filepath.Base(path)) {
		t.Errorf("a damaged front is called %v", err)
	}
	a.queue.ShutDown()
	a.lock.Close()
	a = start()
	if _, err := a.CheckInstalled(); err != nil || a.Driver().FrontCUDA != path {
		t.Errorf("after a restart: %v, %s", err, a.Driver().FrontCUDA)
	}
	was, _ := mapped.Stat()
	now, err := os.Stat(path)
	if err != nil || os.SameFile(was, now) {
		t.Errorf("the file was written over in place (%v)", err)
	}
}

func TestADriverThatIsStrangeGetsTheFrontAsBuilt(t *testing.T) {
	dir, start := twinNode(t)
	installDriver(t, dir, "550")
	replaceFile(t, filepath.Join(dir, "driver/usr/lib/x86_64-linux-gnu/libcuda.so.1"), []byte("not a library"))
	a := start()
	d := a.Driver()
	if d.FrontCUDA != a.installed.FrontCUDA || d.FrontNVML == a.installed.FrontNVML {
		t.Errorf("containers get %s and %s", d.FrontCUDA, d.FrontNVML)
	}
	if fault := a.TwinFault(); !strings.Contains(fault, "no twin of libcuda.so: read the driver's "+filepath.Join(dir, "driver/usr/lib/x86_64-linux-gnu/libcuda.so.1")) {
		t.Errorf("the reason is %q", fault)
	}
	if _, err := a.CheckInstalled(); err != nil {
		t.Error(err)
	}
	// It ends with the fault.
	installDriver(t, dir, "550")
	a.readCards()
	if fault := a.TwinFault(); fault != "" || a.Driver().FrontCUDA == a.installed.FrontCUDA {
		t.Errorf("%s, %q", a.Driver().FrontCUDA, fault)
	}
}

func TestAFullDiskIsTriedAgain(t *testing.T) {
	dir, start := twinNode(t)
	installDriver(t, dir, "550")
	a := start()
	made := a.Driver()
	if err := os.Remove(made.FrontCUDA); err != nil {
		t.Fatal(err)
	}
	// Something that no file can be put over.
	if err := os.MkdirAll(filepath.Join(made.FrontCUDA, "x"), 0o755); err != nil {
		t.Fatal(err)
	}
	a.queue.ShutDown()
	a.lock.Close()
	a = start()
	if a.TwinFault() == "" || a.Driver().FrontCUDA != a.installed.FrontCUDA {
		t.Errorf("%s, %q", a.Driver().FrontCUDA, a.TwinFault())
	}
	if err := os.RemoveAll(made.FrontCUDA); err != nil {
		t.Fatal(err)
	}
	a.readCards()
	if a.TwinFault() != "" || a.Driver().FrontCUDA != made.FrontCUDA {
		t.Errorf("%s, %q", a.Driver().FrontCUDA, a.TwinFault())
	}
	if left, _ := filepath.Glob(filepath.Join(filepath.Dir(made.FrontCUDA), ".new-*")); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}
