package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

const privateDir = "/usr/lib/carve"

// own mounts a file system of the container's own at a path, as the agent's edits
// ask; volume mounts a directory that others have as well.
func (i *image) own(at string) { i.fileSystem("carve", "tmpfs", 0, at) }

func (i *image) volume(at string) {
	v := i.t.TempDir()
	i.fileSystem(v, "", unix.MS_BIND, at)
}

func (i *image) fileSystem(source, kind string, flags uintptr, at string) {
	i.t.Helper()
	// Where the container's own links lead, as runc resolves them.
	r, err := openRoot(i.root)
	if err != nil {
		i.t.Fatal(err)
	}
	defer r.close()
	if err := os.MkdirAll(filepath.Join(i.root, at), 0o755); err != nil && r.read(at, 0) == nil {
		if f, _, err := r.look(at); err != nil || f == nil {
			i.t.Fatal(err)
		}
	}
	f, err := r.open(at, unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		i.t.Fatal(err)
	}
	defer f.Close()
	target, err := os.Readlink(descriptor(f))
	if err != nil {
		i.t.Fatal(err)
	}
	if err := unix.Mount(source, target, kind, flags, ""); err != nil {
		i.t.Fatal(err)
	}
	i.t.Cleanup(func() { unix.Unmount(target, unix.MNT_DETACH) })
}

// In a volume, whoever shares it could move the mount points of a share's files
// away, and make files of its own by their names.
func TestAVolumeAroundTheSharesFilesIsRefused(t *testing.T) {
	const volume = "a volume of the container is mounted at or above /usr/lib"
	for name, c := range map[string]struct {
		files map[string]string
		make  func(i *image)
		want  string
	}{
		"none":                {nil, func(i *image) { i.own(privateDir) }, ""},
		"a volume under ours": {nil, func(i *image) { i.volume(privateDir); i.own(privateDir) }, ""},
		"a volume beside":     {nil, func(i *image) { i.own(privateDir); i.volume("/usr/lib/carve2"); i.volume("/data") }, ""},
		"a volume above": {nil, func(i *image) {
			i.volume("/usr/lib")
			os.Mkdir(filepath.Join(i.root, privateDir), 0o755)
			i.own(privateDir)
		}, volume},
		"a volume far above": {nil, func(i *image) {
			i.volume("/usr")
			os.MkdirAll(filepath.Join(i.root, privateDir), 0o755)
			i.own(privateDir)
		}, volume},
		"the image leads it into a volume": {map[string]string{"/data/x/y": "", privateDir: "->/data/x"}, func(i *image) {
			i.volume("/data")
			os.Mkdir(filepath.Join(i.root, "/data/x"), 0o755)
			i.own(privateDir)
		}, volume},
		"the image leads it elsewhere":       {map[string]string{"/opt/x/y": "", privateDir: "->/opt/x"}, func(i *image) { i.own(privateDir) }, ""},
		"nothing of its own":                 {map[string]string{privateDir + "/x": ""}, func(*image) {}, "the file system that was made"},
		"a volume in the place of ours":      {nil, func(i *image) { i.own(privateDir); i.volume(privateDir) }, "the file system that was made"},
		"the directory isn't there":          {nil, func(*image) {}, "look at where the share's files are"},
		"the image leads it out of its root": {map[string]string{"/tmp/y": "", privateDir: "->../../../../../../tmp"}, func(i *image) { i.own(privateDir) }, ""},
	} {
		t.Run(name, func(t *testing.T) {
			i := newImage(t, c.files)
			c.make(i)
			// A volume hides the libraries that newImage mounted; runc mounts them
			// after it.
			r, err := openRoot(i.root)
			if err != nil {
				t.Fatal(err)
			}
			defer r.close()
			err = r.guarded(privateDir)
			if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)) {
				t.Errorf("%v, want %q", err, c.want)
			}
		})
	}
	// And the hook asks.
	i := newImage(t, nil)
	if err := i.hook(slices.Concat(shareArgs, []string{"-private", privateDir})); err == nil || !strings.Contains(err.Error(), "share's files") {
		t.Errorf("the hook: %v", err)
	}
	i.own(privateDir)
	if err := i.hook(slices.Concat(shareArgs, []string{"-private", privateDir})); err != nil {
		t.Errorf("the hook: %v", err)
	}
}
