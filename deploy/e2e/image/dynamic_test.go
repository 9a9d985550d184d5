package image

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// compile builds C sources in dir; flags come last.
func compile(t *testing.T, dir, source, out string, flags ...string) {
	t.Helper()
	file := filepath.Join(dir, filepath.Base(out)+".c")
	if err := os.WriteFile(file, []byte(source), 0o644); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("gcc", append([]string{"-o", filepath.Join(dir, out), file}, flags...)...)
	if said, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, said)
	}
}

func TestNeededFollowsLibrariesOfLibraries(t *testing.T) {
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "lib"), 0o755); err != nil {
		t.Fatal(err)
	}
	compile(t, dir, "int two(void){return 2;}", "lib/libtwo.so", "-shared", "-fPIC")
	compile(t, dir, "int two(void); int one(void){return two();}", "lib/libone.so", "-shared", "-fPIC", "-L"+dir+"/lib", "-ltwo", "-Wl,-rpath,$ORIGIN")
	compile(t, dir, "int one(void); int main(void){return one();}", "program", "-L"+dir+"/lib", "-lone", "-Wl,-rpath,$ORIGIN/lib,-rpath-link,"+dir+"/lib")

	libraries, err := Needed(filepath.Join(dir, "program"), "libm.so.6")
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, l := range libraries {
		names = append(names, l.Name)
		if strings.HasPrefix(l.Name, "/lib") {
			t.Errorf("%s would replace the link /lib of the base layer", l.Name)
		}
	}
	for _, want := range []string{dir + "/lib/libone.so", dir + "/lib/libtwo.so"} {
		if !slices.Contains(names, want) {
			t.Errorf("%s is not in %v", want, names)
		}
	}
	for _, want := range []string{"libc.so.6", "libm.so.6"} {
		if !slices.ContainsFunc(names, func(n string) bool { return filepath.Base(n) == want }) {
			t.Errorf("%s is not in %v", want, names)
		}
	}
	interpreters := slices.DeleteFunc(slices.Clone(names), func(n string) bool { return !strings.HasPrefix(filepath.Base(n), "ld-linux") })
	if len(interpreters) != 1 {
		t.Errorf("interpreters %v, want one", interpreters)
	}
}

// The proof that the set is whole: the program runs with nothing else.
func TestDynamicProgramRunsFromItsLayerAlone(t *testing.T) {
	dir := t.TempDir()
	compile(t, dir, "#include <stdio.h>\n#include <math.h>\n#include <stdlib.h>\nint main(int c, char **v){printf(\"%.0f\\n\", sqrt(atof(v[1]))); return 0;}", "root", "-lm")
	l := BaseLayer(filepath.Join(dir, "root"), nil)
	if err := l.DynamicProgram("/bin/root", filepath.Join(dir, "root")); err != nil {
		t.Fatal(err)
	}
	tree := filepath.Join(dir, "tree")
	if err := os.Mkdir(tree, 0o755); err != nil {
		t.Fatal(err)
	}
	archive, err := os.Create(filepath.Join(dir, "layer.tar"))
	if err != nil {
		t.Fatal(err)
	}
	defer archive.Close()
	if err := l.write(archive); err != nil {
		t.Fatal(err)
	}
	if said, err := exec.Command("tar", "-C", tree, "-xf", archive.Name()).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, said)
	}
	out, err := exec.Command("chroot", tree, "/bin/root", "144").CombinedOutput()
	if err != nil || strings.TrimSpace(string(out)) != "12" {
		t.Errorf("in its own tree the program printed %q, %v; want 12", out, err)
	}
}

func TestStaticProgramNeedsNothing(t *testing.T) {
	dir := t.TempDir()
	compile(t, dir, "int main(void){return 0;}", "static", "-static")
	if libraries, err := Needed(filepath.Join(dir, "static")); err != nil || len(libraries) != 0 {
		t.Errorf("needed %v, %v; want nothing", libraries, err)
	}
}

func TestNeededNamesWhatIsMissing(t *testing.T) {
	dir := t.TempDir()
	compile(t, dir, "int gone(void){return 0;}", "libgone.so", "-shared", "-fPIC")
	compile(t, dir, "int gone(void); int main(void){return gone();}", "program", "-L"+dir, "-lgone")
	if err := os.Remove(filepath.Join(dir, "libgone.so")); err != nil {
		t.Fatal(err)
	}
	_, err := Needed(filepath.Join(dir, "program"))
	if err == nil || !strings.Contains(err.Error(), "libgone.so") || !strings.Contains(err.Error(), dir+"/program") {
		t.Errorf("error %v, want one that names libgone.so and who needs it", err)
	}
	text := filepath.Join(dir, "text")
	if err := os.WriteFile(text, []byte("not an ELF file"), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := Needed(text); err == nil {
		t.Error("no error for a text file")
	}
}
