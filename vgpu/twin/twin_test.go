package twin

import (
	"bytes"
	"debug/elf"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
)

// built is a file of this repository that `make native` makes.
func built(t testing.TB, path string) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("..", path))
	if err != nil {
		t.Fatalf("%v (run make native)", err)
	}
	return b
}

func read(t testing.TB, file []byte) *Library {
	t.Helper()
	l, err := Read(bytes.NewReader(file))
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// listed is what another reader than ours says of a file's symbol table: kind,
// binding and, of variables, size, by name.
func listed(t testing.TB, file []byte) map[string]string {
	t.Helper()
	f, err := elf.NewFile(bytes.NewReader(file))
	if err != nil {
		t.Fatal(err)
	}
	symbols, err := f.DynamicSymbols()
	if err != nil {
		t.Fatal(err)
	}
	m := map[string]string{}
	for _, s := range symbols {
		if s.Section == elf.SHN_UNDEF || elf.ST_BIND(s.Info) == elf.STB_LOCAL {
			continue
		}
		text := elf.ST_TYPE(s.Info).String() + " " + elf.ST_BIND(s.Info).String() + " " + elf.ST_VISIBILITY(s.Other).String()
		if elf.ST_TYPE(s.Info) == elf.STT_OBJECT {
			text += fmt.Sprint(" ", s.Size)
		}
		m[s.Name] = text
	}
	return m
}

// TestTwinListsWhatTheDriverDoes holds vgpu-10 and vgpu-18 for every branch:
// a function that is new, or gone, is so in the container.
func TestTwinListsWhatTheDriverDoes(t *testing.T) {
	for _, branch := range []string{"535", "550", "570", "580"} {
		for front, driver := range map[string]string{"libcarve-cuda.so": "libcuda-", "libcarve-nvml.so": "libnvidia-ml-"} {
			t.Run(driver+branch, func(t *testing.T) {
				frontFile, driverFile := built(t, "lib/build/"+front), built(t, "soft/build/"+driver+branch+".so")
				made, err := Make(frontFile, read(t, driverFile))
				if err != nil {
					t.Fatal(err)
				}
				got, want := listed(t, made.File), listed(t, driverFile)
				if !maps.Equal(got, want) || len(want) < 300 {
					t.Errorf("it lists %d names, the driver %d", len(got), len(want))
				}
				twin := read(t, made.File)
				found := []string{}
				for _, e := range twin.Exports {
					found = append(found, e.Name)
				}
				if !slices.Equal(found, made.Hooks) || len(found) < 10 {
					t.Errorf("the loader finds %v in it, hooked are %v", found, made.Hooks)
				}
				unchanged(t, frontFile, made.File)
			})
		}
	}
}

// unchanged makes sure that code, data and what is imported are the front's.
func unchanged(t *testing.T, front, made []byte) {
	t.Helper()
	a, errA := elf.NewFile(bytes.NewReader(front))
	b, errB := elf.NewFile(bytes.NewReader(made))
	if errA != nil || errB != nil {
		t.Fatal(errA, errB)
	}
	if len(front) != len(made) || len(a.Progs) != len(b.Progs) {
		t.Errorf("%d bytes in %d segments, the front has %d in %d", len(made), len(b.Progs), len(front), len(a.Progs))
	}
	for i := range a.Progs {
		if a.Progs[i].ProgHeader != b.Progs[i].ProgHeader {
			t.Errorf("segment %d is %+v, the front's %+v", i, b.Progs[i].ProgHeader, a.Progs[i].ProgHeader)
		}
	}
	for _, name := range []string{".text", ".plt", ".rodata", ".eh_frame", ".got", ".gnu.version_r", ".rela.plt", ".carve.behind"} {
		x, y := a.Section(name), b.Section(name)
		if x == nil {
			continue
		}
		p, errA := x.Data()
		q, errB := y.Data()
		if errA != nil || errB != nil || !bytes.Equal(p, q) || x.Addr != y.Addr {
			t.Errorf("%s differs (%v, %v)", name, errA, errB)
		}
	}
	p, _ := a.ImportedSymbols()
	q, _ := b.ImportedSymbols()
	if fmt.Sprint(p) != fmt.Sprint(q) || len(p) == 0 {
		t.Errorf("it imports %v, the front %v", q, p)
	}
	idA, _ := a.Section(".note.gnu.build-id").Data()
	idB, _ := b.Section(".note.gnu.build-id").Data()
	if len(idA) != len(idB) || bytes.Equal(idA, idB) {
		t.Errorf("its build id is %x, the front's %x", idB, idA)
	}
}

func TestMadeTwiceItIsTheSame(t *testing.T) {
	front, driver := built(t, "lib/build/libcarve-cuda.so"), built(t, "soft/build/libcuda-550.so")
	a, errA := Make(front, read(t, driver))
	b, errB := Make(front, read(t, driver))
	if errA != nil || errB != nil || !bytes.Equal(a.File, b.File) {
		t.Error("two twins of one driver differ", errA, errB)
	}
	if _, err := Make(a.File, read(t, driver)); err == nil || !strings.Contains(err.Error(), "twin already") {
		t.Errorf("a twin of a twin: %v", err)
	}
}

// TestDrivers makes twins of drivers that don't exist.
func TestDrivers(t *testing.T) {
	front := built(t, "lib/build/libcarve-cuda.so")
	function := func(name string) export { return export{name, elf.STT_FUNC, elf.STB_GLOBAL, 0x2000, 64} }
	variable := func(name string, address, size uint64) export {
		return export{name, elf.STT_OBJECT, elf.STB_GLOBAL, address, size}
	}
	hook, plain := function("cuMemAlloc_v2"), function("cuDriverGetVersion")
	many := func(n int) []export {
		list := []export{hook}
		for i := range n {
			list = append(list, function(fmt.Sprintf("cuSomethingQuiteLongThatNobodyKnowsYet%05d", i)))
		}
		return list
	}
	for _, c := range []struct {
		name   string
		driver fakeDriver
		fault  string // "" means that there is a twin
	}{
		{"as they are today", fakeDriver{exports: []export{hook, plain}}, ""},
		{"only the old hash table", fakeDriver{exports: []export{hook, plain}, sysv: true}, ""},
		{"weak functions", fakeDriver{exports: []export{hook, {"cuDriverGetVersion", elf.STT_FUNC, elf.STB_WEAK, 0x2000, 8}}}, ""},
		{"functions without a type", fakeDriver{exports: []export{hook, {"cuDriverGetVersion", elf.STT_NOTYPE, elf.STB_GLOBAL, 0x2000, 0}}}, ""},
		{"functions chosen when they are bound", fakeDriver{exports: []export{hook, {"cuDriverGetVersion", elf.STT_GNU_IFUNC, elf.STB_GLOBAL, 0x2000, 8}}}, ""},
		{"variables", fakeDriver{exports: []export{hook, variable("a", 0x3001, 1), variable("b", 0x3040, 4096), variable("c", 0x3008, 8), variable("d", 0x3008, 0)}}, ""},
		{"many functions", fakeDriver{exports: many(2500)}, ""},
		{"more functions than there is room for", fakeDriver{exports: many(6000)}, "no room left"},
		{"a variable larger than the room", fakeDriver{exports: []export{hook, variable("a", 0x3000, 1<<40)}}, "no room left in .carve.data"},
		{"variables that take more than the room together", fakeDriver{exports: []export{hook, variable("a", 0x3000, 60000), variable("b", 0x3000, 60000)}}, "no room left in .carve.data"},
		{"variables of threads", fakeDriver{exports: []export{hook, {"cuThread", elf.STT_TLS, elf.STB_GLOBAL, 0, 8}}}, "STT_TLS"},
		{"a hook that is a variable", fakeDriver{exports: []export{variable("cuMemAlloc_v2", 0x3000, 8)}}, "cuMemAlloc_v2 is a STT_OBJECT"},
		{"versions", fakeDriver{exports: []export{hook, plain}, version: 2}, "has a version"},
		{"no versions by a table of them", fakeDriver{exports: []export{hook, plain}, version: 1}, ""},
		{"nothing", fakeDriver{}, "exports nothing"},
		{"none of the hooks", fakeDriver{exports: []export{plain}}, "none of the functions"},
		{"another library", fakeDriver{exports: []export{hook}, soname: "libcudart.so.12"}, "libcudart.so.12"},
		{"another machine", fakeDriver{exports: []export{hook}, machine: elf.EM_PPC64}, "EM_PPC64"},
	} {
		t.Run(c.name, func(t *testing.T) {
			file := c.driver.file()
			driver, err := Read(bytes.NewReader(file))
			var made *Twin
			if err == nil {
				made, err = Make(front, driver)
			}
			if c.fault != "" {
				if err == nil || !strings.Contains(err.Error(), c.fault) {
					t.Errorf("%v, %q expected", err, c.fault)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if len(driver.Exports) != len(c.driver.exports) {
				t.Errorf("%d exports were read, %d are there", len(driver.Exports), len(c.driver.exports))
			}
			got := listed(t, made.File)
			for _, e := range c.driver.exports {
				want := e.kind.String() + " " + e.bind.String() + " STV_DEFAULT"
				if e.kind == elf.STT_OBJECT {
					want += fmt.Sprint(" ", e.size)
				}
				if got[e.name] != want {
					t.Errorf("%s is %q, %q expected", e.name, got[e.name], want)
				}
				delete(got, e.name)
			}
			if len(got) > 0 {
				t.Errorf("and there are %v", got)
			}
			aligned(t, made.File, c.driver.exports)
		})
	}
}

// aligned: the linker takes a variable's alignment from its address.
func aligned(t *testing.T, file []byte, exports []export) {
	f, err := elf.NewFile(bytes.NewReader(file))
	if err != nil {
		t.Fatal(err)
	}
	symbols, _ := f.DynamicSymbols()
	taken := map[uint64]string{}
	for _, s := range symbols {
		for _, e := range exports {
			if s.Name != e.name || elf.ST_TYPE(s.Info) != elf.STT_OBJECT {
				continue
			}
			section := f.Sections[s.Section]
			if s.Value%64 != e.address%64 || s.Value < section.Addr || s.Value+s.Size > section.Addr+section.Size || section.Flags&elf.SHF_WRITE == 0 {
				t.Errorf("%s is at %#x of %s, the driver's at %#x", s.Name, s.Value, section.Name, e.address)
			}
			if other, ok := taken[s.Value]; ok {
				t.Errorf("%s is where %s is", s.Name, other)
			}
			taken[s.Value] = s.Name
		}
	}
}

// TestStrangeFiles: whatever a file claims, it is refused in a sentence, soon,
// and without much memory.
func TestStrangeFiles(t *testing.T) {
	good := fakeDriver{exports: []export{{"cuDriverGetVersion", elf.STT_FUNC, elf.STB_GLOBAL, 0x2000, 8}, {"cuMemAlloc_v2", elf.STT_FUNC, elf.STB_GLOBAL, 0x2010, 8}}}
	sysv := good
	sysv.sysv = true
	var before, after runtime.MemStats
	for _, base := range [][]byte{good.file(), sysv.file()} {
		for at := 0; at < len(base); at += 2 {
			for _, value := range []uint64{0, 1, 0x7fff, 1 << 31, 1<<63 - 1, 1<<64 - 1} {
				b := slices.Clone(base)
				var word [8]byte
				order.PutUint64(word[:], value)
				copy(b[at:], word[:])
				runtime.ReadMemStats(&before)
				if l, err := Read(bytes.NewReader(b)); err == nil {
					l.find("cuDriverGetVersion")
				} else if err.Error() == "" {
					t.Error("a fault without a sentence")
				}
				runtime.ReadMemStats(&after)
				if used := after.TotalAlloc - before.TotalAlloc; used > 16<<20 {
					t.Errorf("with %#x at %d, reading took %d MiB", value, at, used>>20)
				}
			}
		}
		for n := range base {
			if _, err := Read(bytes.NewReader(base[:n])); err == nil && n < len(base)-64 {
				t.Fatalf("%d of %d bytes are taken for a library", n, len(base))
			}
		}
	}
}

// TestHashTables looks names up that are there, and others.
func TestHashTables(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for n := range 200 {
		var names []string
		for i := range n {
			names = append(names, fmt.Sprintf("cu%d_%x", i, random.Uint64()>>random.IntN(60)))
		}
		sortForGNU(names, func(s string) string { return s })
		f := fakeDriver{soname: "x"}
		for _, name := range names {
			f.exports = append(f.exports, export{name, elf.STT_FUNC, elf.STB_GLOBAL, 0x2000, 8})
		}
		for _, f.sysv = range []bool{false, true} {
			l := read(t, f.file())
			for i, name := range names {
				if at, ok := l.find(name); !ok || at != uint32(i)+1 {
					t.Fatalf("of %d names, %s is found: %v, at %d, expected at %d", n, name, ok, at, i+1)
				}
			}
			for i := range 200 {
				if _, ok := l.find(fmt.Sprintf("not%d", i)); ok {
					t.Fatalf("of %d names, one is found that isn't there", n)
				}
			}
		}
	}
}

// TestHashes holds the functions against values that other tools give.
func TestHashes(t *testing.T) {
	for name, want := range map[string][2]uint32{
		"":              {0x1505, 0},
		"printf":        {0x156b2bb8, 0x077905a6},
		"syscall":       {0xbac212a0, 0x0b09985c},
		"flapenguin.me": {0x8ae9f18e, 0x03987915},
	} {
		if g, v := hashGNU(name), hashSysV(name); g != want[0] || v != want[1] {
			t.Errorf("%q hashes to %#x and %#x, %#x expected", name, g, v, want)
		}
	}
}

// TestAListWithoutEnd: a table whose list leads back into itself.
func TestAListWithoutEnd(t *testing.T) {
	table := sysvTable{buckets: []uint32{1}, chain: []uint32{0, 2, 1}}
	asked := 0
	if _, ok := table.find("cuDriverGetVersion", func(uint32) bool { asked++; return asked > 1000 }); ok {
		t.Errorf("a list of two was asked %d times", asked)
	}
}

func FuzzRead(f *testing.F) {
	front := built(f, "lib/build/libcarve-nvml.so")
	hook := export{"nvmlDeviceGetMemoryInfo", elf.STT_FUNC, elf.STB_GLOBAL, 0x2000, 8}
	variable := export{"v", elf.STT_OBJECT, elf.STB_GLOBAL, 0x3000, 8}
	for _, sysv := range []bool{false, true} {
		f.Add(fakeDriver{exports: []export{hook, variable}, soname: "libnvidia-ml.so.1", sysv: sysv}.file())
		f.Add(fakeDriver{exports: []export{hook}, soname: "libnvidia-ml.so.1", sysv: sysv, version: 1}.file())
	}
	f.Fuzz(func(t *testing.T, file []byte) {
		l, err := Read(bytes.NewReader(file))
		if err != nil {
			return
		}
		if made, err := Make(front, l); err == nil && len(made.Hooks)+len(made.Behind) != len(l.Exports) {
			t.Errorf("of %d exports, %d and %d are there", len(l.Exports), len(made.Hooks), len(made.Behind))
		}
	})
}

// FuzzFront damages the front, which is ours, at places that the input names.
func FuzzFront(f *testing.F) {
	front := built(f, "lib/build/libcarve-nvml.so")
	driver := read(f, built(f, "soft/build/libnvidia-ml-535.so"))
	dynamic := bytes.Index(front, []byte(".dynamic\x00"))
	f.Add([]byte{0, 0, 0, 40, 255, 255})
	f.Add([]byte{0, byte(dynamic >> 16), byte(dynamic >> 8), byte(dynamic), 0, 0})
	f.Fuzz(func(t *testing.T, damage []byte) {
		b := slices.Clone(front)
		for ; len(damage) >= 6; damage = damage[6:] {
			at := int(damage[0])<<24 | int(damage[1])<<16 | int(damage[2])<<8 | int(damage[3])
			at %= len(b) - 1
			if damage[0]&1 != 0 { // most of what matters is at the ends
				at = len(b) - 2 - at%8192
			}
			b[at], b[at+1] = damage[4], damage[5]
		}
		Make(b, driver)
	})
}
