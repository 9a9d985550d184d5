package image

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
)

// layout is an image tar read back.
type layout map[string][]byte

func read(t *testing.T, data []byte) layout {
	t.Helper()
	files := layout{}
	for _, f := range readTar(t, data) {
		files[f.header.Name] = f.data
	}
	return files
}

type file struct {
	header *tar.Header
	data   []byte
}

func readTar(t *testing.T, data []byte) []file {
	t.Helper()
	var files []file
	in := tar.NewReader(bytes.NewReader(data))
	for {
		header, err := in.Next()
		if errors.Is(err, io.EOF) {
			return files
		} else if err != nil {
			t.Fatal(err)
		}
		content, err := io.ReadAll(in)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, file{header, content})
	}
}

func (l layout) blob(t *testing.T, d descriptor) []byte {
	t.Helper()
	data, ok := l["blobs/sha256/"+strings.TrimPrefix(d.Digest, "sha256:")]
	if !ok {
		t.Fatalf("blob %s is missing", d.Digest)
	}
	sum := sha256.Sum256(data)
	if got := "sha256:" + hex.EncodeToString(sum[:]); got != d.Digest || int64(len(data)) != d.Size {
		t.Fatalf("blob is %s of %d bytes, its descriptor says %s of %d", got, len(data), d.Digest, d.Size)
	}
	return data
}

func decode[T any](t *testing.T, data []byte) T {
	t.Helper()
	var v T
	if err := json.Unmarshal(data, &v); err != nil {
		t.Fatal(err)
	}
	return v
}

func sample(t *testing.T) Image {
	t.Helper()
	source := filepath.Join(t.TempDir(), "program")
	if err := os.WriteFile(source, []byte("#!"), 0o600); err != nil {
		t.Fatal(err)
	}
	base := new(Layer).Dir("/usr/bin", 0o755).Symlink("/bin", "usr/bin").Dir("/tmp", 0o777|os.ModeSticky)
	top := new(Layer).File("/usr/bin/program", source, 0o755).Bytes("/etc/secret/key", []byte("k"), 0o400)
	return Image{Ref: "localhost/sample:1", Layers: []*Layer{base, top}, Entrypoint: []string{"/usr/bin/program"}, Cmd: []string{"-v"}, Env: []string{"A=1"}, WorkingDir: "/tmp"}
}

func write(t *testing.T, m Image) []byte {
	t.Helper()
	var out bytes.Buffer
	if err := m.Write(&out); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

func TestLayoutNamesEveryBlobByItsDigest(t *testing.T) {
	files := read(t, write(t, sample(t)))
	if got := string(files["oci-layout"]); got != `{"imageLayoutVersion":"1.0.0"}` {
		t.Errorf("oci-layout: %s", got)
	}
	top := decode[index](t, files["index.json"])
	if len(top.Manifests) != 1 || top.Manifests[0].Annotations["io.containerd.image.name"] != "localhost/sample:1" {
		t.Fatalf("index: %+v", top)
	}
	man := decode[manifest](t, files.blob(t, top.Manifests[0]))
	conf := decode[config](t, files.blob(t, man.Config))
	if want := (runConfig{Entrypoint: []string{"/usr/bin/program"}, Cmd: []string{"-v"}, Env: []string{"A=1"}, WorkingDir: "/tmp"}); !reflect.DeepEqual(conf.Config, want) {
		t.Errorf("config is %+v, want %+v", conf.Config, want)
	}
	if len(man.Layers) != 2 || len(conf.RootFS.DiffIDs) != 2 {
		t.Fatalf("%d layers, %d diff ids, want 2 each", len(man.Layers), len(conf.RootFS.DiffIDs))
	}
	type entry struct {
		name, link string
		kind       byte
		mode       int64
		data       string
	}
	want := [][]entry{
		{
			{name: "bin", link: "usr/bin", kind: tar.TypeSymlink, mode: 0o777},
			{name: "tmp/", kind: tar.TypeDir, mode: 0o1777},
			{name: "usr/", kind: tar.TypeDir, mode: 0o755},
			{name: "usr/bin/", kind: tar.TypeDir, mode: 0o755},
		},
		{
			{name: "etc/", kind: tar.TypeDir, mode: 0o755},
			{name: "etc/secret/", kind: tar.TypeDir, mode: 0o755},
			{name: "etc/secret/key", kind: tar.TypeReg, mode: 0o400, data: "k"},
			{name: "usr/", kind: tar.TypeDir, mode: 0o755},
			{name: "usr/bin/", kind: tar.TypeDir, mode: 0o755},
			{name: "usr/bin/program", kind: tar.TypeReg, mode: 0o755, data: "#!"},
		},
	}
	for i, d := range man.Layers {
		if conf.RootFS.DiffIDs[i] != d.Digest {
			t.Errorf("layer %d: diff id %s, digest %s", i, conf.RootFS.DiffIDs[i], d.Digest)
		}
		var got []entry
		for _, f := range readTar(t, files.blob(t, d)) {
			if f.header.Uid != 0 || f.header.Gid != 0 || f.header.Uname != "" || f.header.ModTime.Unix() != 0 {
				t.Errorf("layer %d: %s has owner %d:%d %q and time %s", i, f.header.Name, f.header.Uid, f.header.Gid, f.header.Uname, f.header.ModTime)
			}
			got = append(got, entry{f.header.Name, f.header.Linkname, f.header.Typeflag, f.header.Mode, string(f.data)})
		}
		if !reflect.DeepEqual(got, want[i]) {
			t.Errorf("layer %d is\n%+v, want\n%+v", i, got, want[i])
		}
	}
}

func TestSameFilesGiveTheSameBytes(t *testing.T) {
	m := sample(t)
	if first, second := write(t, m), write(t, m); !bytes.Equal(first, second) {
		t.Error("two writes differ")
	}
	if first, second := write(t, m), write(t, sample(t)); !bytes.Equal(first, second) {
		t.Error("the folder or time of a source shows in the image")
	}
}

func TestWriteFileLeavesNothingBehindWhenItFails(t *testing.T) {
	dir := t.TempDir()
	m := Image{Ref: "localhost/x:1", Layers: []*Layer{new(Layer).File("/x", filepath.Join(dir, "missing"), 0o644)}}
	err := m.WriteFile(filepath.Join(dir, "x.tar"))
	if !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), "localhost/x:1") {
		t.Errorf("error %v, want one that names the image and the missing file", err)
	}
	if left, _ := os.ReadDir(dir); len(left) != 0 {
		t.Errorf("left behind: %v", left)
	}
}

func TestLayerRefuses(t *testing.T) {
	for name, l := range map[string]*Layer{
		"a relative path":               new(Layer).Bytes("etc/x", nil, 0o644),
		"a path that is not clean":      new(Layer).Bytes("/etc/../x", nil, 0o644),
		"a file below a link":           new(Layer).Symlink("/lib", "usr/lib").Bytes("/lib/x", nil, 0o644),
		"a file below a file":           new(Layer).Bytes("/x", nil, 0o644).Bytes("/x/y", nil, 0o644),
		"a directory given as a source": new(Layer).File("/x", t.TempDir(), 0o644),
	} {
		t.Run(name, func(t *testing.T) {
			if err := l.write(io.Discard); err == nil {
				t.Error("no error")
			}
		})
	}
}

func TestTwoEqualLayersAreOneBlob(t *testing.T) {
	x := func() *Layer { return new(Layer).Bytes("/x", []byte("x"), 0o644) }
	m := Image{Ref: "localhost/x:1", Layers: []*Layer{x(), new(Layer).Bytes("/y", nil, 0o644), x()}}
	seen := map[string]bool{}
	for _, f := range readTar(t, write(t, m)) {
		if seen[f.header.Name] {
			t.Errorf("%s is there twice", f.header.Name)
		}
		seen[f.header.Name] = true
	}
}

func TestCarveImageHasWhatTheAgentInstalls(t *testing.T) {
	dir := t.TempDir()
	files := CarveFiles{Carve: dir + "/carve", Hook: dir + "/hook", CUDA: dir + "/cuda.so", NVML: dir + "/nvml.so"}
	compile(t, dir, "int main(void){return 0;}", "carve")
	for _, f := range []string{files.Hook, files.CUDA, files.NVML} {
		if err := os.WriteFile(f, []byte(filepath.Base(f)), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	m, err := Carve(BaseLayer(files.Hook, []string{"sh"}), files)
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(m.Entrypoint, []string{"/usr/bin/carve"}) {
		t.Errorf("entrypoint %v", m.Entrypoint)
	}
	got := map[string]string{}
	written := read(t, write(t, m))
	man := decode[manifest](t, written.blob(t, decode[index](t, written["index.json"]).Manifests[0]))
	for _, d := range man.Layers {
		for _, f := range readTar(t, written.blob(t, d)) {
			got[f.header.Name] = string(f.data)
		}
	}
	for name, want := range map[string]string{
		"usr/lib/carve/node/carve-hook": "hook", "usr/lib/carve/node/libcarve-cuda.so": "cuda.so", "usr/lib/carve/node/libcarve-nvml.so": "nvml.so",
	} {
		if got[name] != want {
			t.Errorf("%s holds %q, want %q", name, got[name], want)
		}
	}
	if _, ok := got["usr/bin/carve"]; !ok {
		t.Error("there is no /usr/bin/carve")
	}
	libraries := map[string]bool{}
	for name := range got {
		libraries[filepath.Base(name)] = true
	}
	for _, want := range append([]string{"libc.so.6"}, libc...) {
		if !libraries[want] {
			t.Errorf("%s is missing", want)
		}
	}
}
