package main

import (
	"bytes"
	"path"
	"strings"
	"time"
)

const (
	// maxDirs bounds the directories that are looked at, maxConfBytes and
	// maxCacheBytes what is read of the loader's files.
	maxDirs       = 4096
	maxConfBytes  = 64 << 10
	maxCacheBytes = 8 << 20
	// walkFor and walkDeep bound the search below directories where software is
	// put by hand.
	walkFor  = 200 * time.Millisecond
	walkDeep = 6
)

// standardDirs are where loaders look without being told: Debian's and its
// kin's, Fedora's and its kin's, and NVIDIA's own for old container runtimes.
var standardDirs = []string{
	"/usr/lib/x86_64-linux-gnu", "/lib/x86_64-linux-gnu",
	"/usr/lib/aarch64-linux-gnu", "/lib/aarch64-linux-gnu",
	"/usr/lib64", "/lib64", "/usr/lib", "/lib",
	"/usr/local/lib", "/usr/local/lib64",
	"/usr/local/nvidia/lib", "/usr/local/nvidia/lib64",
}

// treesByHand are where images carry CUDA, its forward-compatibility package
// and conda environments.
var treesByHand = []string{"/usr/local", "/opt", "/usr/lib/nvidia", "/usr/lib/x86_64-linux-gnu/nvidia"}

// searchDirs lists the directories in which the image could hold a libcuda or
// NVML that a loader would find: the standard ones, those named by its
// LD_LIBRARY_PATH, ld.so.conf and ld.so.cache, and those found below the trees
// where software is put by hand.
func searchDirs(r root, libraryPath []string, now func() time.Time) []string {
	var dirs []string
	seen := map[string]bool{}
	add := func(d string) {
		d = path.Clean("/" + d)
		if !seen[d] && len(dirs) < maxDirs {
			seen[d] = true
			dirs = append(dirs, d)
		}
	}
	for _, d := range standardDirs {
		add(d)
	}
	for _, d := range libraryPath {
		add(d)
	}
	confDirs(r, "/etc/ld.so.conf", 4, add)
	for _, p := range cachePaths(r.read("/etc/ld.so.cache", maxCacheBytes)) {
		add(path.Dir(p))
	}
	until := now().Add(walkFor)
	for _, tree := range treesByHand {
		walk(r, tree, walkDeep, func() bool { return now().After(until) }, add)
	}
	return dirs
}

// confDirs reads a file of ld.so.conf's form.
func confDirs(r root, file string, deep int, add func(string)) {
	if deep == 0 {
		return
	}
	for line := range strings.Lines(string(r.read(file, maxConfBytes))) {
		line, _, _ = strings.Cut(line, "#")
		fields := strings.FieldsFunc(line, func(c rune) bool { return strings.ContainsRune(" \t\r\n,:", c) })
		if len(fields) == 0 {
			continue
		}
		if fields[0] != "include" {
			for _, f := range fields {
				add(f)
			}
			continue
		}
		for _, pattern := range fields[1:] {
			if !path.IsAbs(pattern) {
				pattern = path.Join(path.Dir(file), pattern)
			}
			entries, _ := r.entries(path.Dir(pattern))
			for _, e := range entries {
				if ok, err := path.Match(path.Base(pattern), e.Name()); err == nil && ok {
					confDirs(r, path.Join(path.Dir(pattern), e.Name()), deep-1, add)
				}
			}
		}
	}
}

// cachePaths finds the paths of libcuda and NVML in an ld.so.cache, whatever
// its version: they stand in it as plain strings.
func cachePaths(cache []byte) []string {
	var found []string
	for _, name := range []string{"/libcuda.so", "/libnvidia-ml.so"} {
		rest := cache
		for {
			i := bytes.Index(rest, []byte(name))
			if i < 0 {
				break
			}
			start := bytes.LastIndexByte(rest[:i], 0) + 1
			end := bytes.IndexByte(rest[i:], 0)
			if end < 0 {
				break
			}
			if p := string(rest[start : i+end]); path.IsAbs(p) && len(p) < 4096 {
				found = append(found, p)
			}
			rest = rest[i+end:]
		}
	}
	return found
}

// walk adds a tree's directories that hold a libcuda or NVML. Links to
// directories aren't followed: what they lead to is reached otherwise, or is
// not below the tree.
func walk(r root, dir string, deep int, late func() bool, add func(string)) {
	if deep == 0 || late() {
		return
	}
	entries, _ := r.entries(dir)
	var below []string
	for _, e := range entries {
		if e.IsDir() {
			below = append(below, path.Join(dir, e.Name()))
		} else if _, ok := libraryOf(e.Name()); ok {
			add(dir)
		}
	}
	for _, d := range below {
		walk(r, d, deep-1, late, add)
	}
}

// libraryOf tells which of the two libraries a file name stands for.
func libraryOf(name string) (string, bool) {
	for _, l := range []string{"libcuda.so", "libnvidia-ml.so"} {
		if name == l || strings.HasPrefix(name, l+".") {
			return l, true
		}
	}
	return "", false
}
