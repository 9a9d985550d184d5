// Command carve-hook finishes what the node agent's edits of a container's
// specification can't do, since it takes a look at the image: it binds the
// front libraries over every further copy of libcuda and NVML that the image
// brings, puts the driver's libraries where the image's own loader looks, and
// refuses a container in which others could move the share's files away.
//
// It is an OCI createContainer hook: the runtime starts it in the container's
// namespaces, when its mounts are made and before its root is entered. The
// image is hostile as far as it is concerned, so every path of it is resolved
// by the kernel inside the container's root. A failure fails the container.
package main

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
)

// maxStateBytes and maxConfigBytes bound what is read from the runtime.
const (
	maxStateBytes  = 1 << 20
	maxConfigBytes = 8 << 20
)

func main() {
	if err := run(os.Args[1:], os.Stdin); err != nil {
		fmt.Fprintln(os.Stderr, "carve-hook:", err)
		os.Exit(1)
	}
}

func run(args []string, stdin io.Reader) error {
	flags := flag.NewFlagSet("carve-hook", flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	dir := flags.String("dir", "", "directory in the container that the driver's libraries are mounted in")
	libraries := flags.String("libraries", "", "names of the libraries there, separated by commas")
	fronts := flags.String("fronts", "", "names, without a version, of those that must win over the image's own copies")
	private := flags.String("private", "", "directory of a file system of its own that must not stand in a volume")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if *dir == "" || flags.NArg() != 0 {
		return errors.New("usage: carve-hook -dir DIR -libraries A,B [-fronts C,D] [-private DIR] < state.json")
	}
	container, err := readContainer(stdin)
	if err != nil {
		return err
	}
	root, err := openRoot(container.root)
	if err != nil {
		return err
	}
	defer root.close()
	if *private != "" {
		if err := root.guarded(*private); err != nil {
			return err
		}
	}
	m := mender{
		root:        root,
		dir:         *dir,
		libraries:   list(*libraries),
		fronts:      list(*fronts),
		libraryPath: container.libraryPath,
	}
	return m.mend()
}

func list(s string) []string {
	if s == "" {
		return nil
	}
	return strings.Split(s, ",")
}

// container is what matters of a container's state and configuration.
type container struct {
	root string
	// libraryPath is its LD_LIBRARY_PATH.
	libraryPath []string
}

// readContainer reads the state that the runtime hands to hooks, and the
// configuration beside it.
func readContainer(stdin io.Reader) (container, error) {
	var state struct {
		Bundle string `json:"bundle"`
	}
	if err := json.NewDecoder(io.LimitReader(stdin, maxStateBytes)).Decode(&state); err != nil {
		return container{}, fmt.Errorf("read the container's state: %w", err)
	}
	if !filepath.IsAbs(state.Bundle) {
		return container{}, fmt.Errorf("read the container's state: bundle %.100q isn't an absolute path", state.Bundle)
	}
	f, err := os.Open(filepath.Join(state.Bundle, "config.json"))
	if err != nil {
		return container{}, fmt.Errorf("read the container's configuration: %w", err)
	}
	defer f.Close()
	var config struct {
		Root struct {
			Path string `json:"path"`
		} `json:"root"`
		Process struct {
			Env []string `json:"env"`
		} `json:"process"`
	}
	if err := json.NewDecoder(io.LimitReader(f, maxConfigBytes)).Decode(&config); err != nil {
		return container{}, fmt.Errorf("read the container's configuration: %w", err)
	}
	if config.Root.Path == "" {
		return container{}, errors.New("read the container's configuration: it has no root")
	}
	c := container{root: config.Root.Path}
	if !filepath.IsAbs(c.root) {
		c.root = filepath.Join(state.Bundle, c.root)
	}
	for _, e := range config.Process.Env {
		if v, ok := strings.CutPrefix(e, "LD_LIBRARY_PATH="); ok {
			c.libraryPath = strings.FieldsFunc(v, func(r rune) bool { return r == ':' || r == ';' })
		}
	}
	return c, nil
}
