package doctor

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"sort"
	"strings"

	"github.com/BurntSushi/toml"
)

// maxImports bounds the files that a configuration may draw in.
const maxImports = 100

// reader reads a file of the node, glob lists files of a pattern.
type (
	reader func(path string) ([]byte, error)
	globs  func(pattern string) []string
)

// readContainerd fills in what containerd's configuration says. A missing file
// stands for containerd's own defaults.
func readContainerd(r *Runtime, read reader, glob globs) {
	config, err := load(r.ConfigPath, read, glob)
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	if err != nil {
		r.ConfigFault = err.Error()
		return
	}
	if v, ok := config["version"].(int64); ok {
		r.ConfigVersion = int(v)
	}
	plugins := table(config, "plugins")
	if nri := table(plugins, "io.containerd.nri.v1.nri"); nri != nil {
		if off, ok := nri["disable"].(bool); ok {
			r.NRI = map[bool]string{true: "off", false: "on"}[off]
		}
	}
	if off, ok := config["disabled_plugins"].([]any); ok {
		for _, p := range off {
			if p == "io.containerd.nri.v1.nri" {
				r.NRI = "off"
			}
		}
	}
	// Where the file says nothing of NRI, 1.7 has it off and 2.x on, and both
	// read files of version 2: the socket tells. Tables of 2.x, then of 1.x:
	for _, path := range [][]string{{"io.containerd.cri.v1.runtime", "containerd"}, {"io.containerd.grpc.v1.cri", "containerd"}} {
		c := table(plugins, path...)
		if c == nil {
			continue
		}
		if name, ok := c["default_runtime_name"].(string); ok {
			r.DefaultRuntime = name
		}
		runtimes := table(c, "runtimes")
		for name := range runtimes {
			one := table(runtimes, name)
			options := table(one, "options")
			binary, _ := options["BinaryName"].(string)
			if binary == "" {
				binary, _ = options["Runtime"].(string)
			}
			if name == r.DefaultRuntime {
				r.DefaultBinary = binary
			}
			if isNVIDIA(binary) || isNVIDIA(name) {
				r.NVIDIARuntimes = append(r.NVIDIARuntimes, name)
			}
		}
		break
	}
	sort.Strings(r.NVIDIARuntimes)
}

// readCRIO fills in what CRI-O's configuration says: its file, then those of
// its directory in the order of their names.
func readCRIO(r *Runtime, read reader, glob globs) {
	files := append([]string{r.ConfigPath}, glob("/etc/crio/crio.conf.d/*")...)
	config := map[string]any{}
	for _, f := range files {
		b, err := read(f)
		if errors.Is(err, fs.ErrNotExist) || strings.HasSuffix(f, ".d") {
			continue
		}
		one := map[string]any{}
		if err == nil {
			err = toml.Unmarshal(b, &one)
		}
		if err != nil {
			r.ConfigFault = fmt.Sprintf("read %s: %v", f, err)
			return
		}
		merge(config, one)
	}
	crio := table(config, "crio")
	if on, ok := table(crio, "nri")["enable_nri"].(bool); ok {
		r.NRI = map[bool]string{true: "on", false: "off"}[on]
	}
	c := table(crio, "runtime")
	r.DefaultRuntime, _ = c["default_runtime"].(string)
	runtimes := table(c, "runtimes")
	for name := range runtimes {
		binary, _ := table(runtimes, name)["runtime_path"].(string)
		if name == r.DefaultRuntime {
			r.DefaultBinary = binary
		}
		if isNVIDIA(binary) || isNVIDIA(name) {
			r.NVIDIARuntimes = append(r.NVIDIARuntimes, name)
		}
	}
	sort.Strings(r.NVIDIARuntimes)
}

// readToolkit fills in what NVIDIA's toolkit is set to.
func readToolkit(t *Toolkit, b []byte) error {
	config := struct {
		Env    *bool `toml:"accept-nvidia-visible-devices-envvar-when-unprivileged"`
		Mounts *bool `toml:"accept-nvidia-visible-devices-as-volume-mounts"`
	}{}
	if err := toml.Unmarshal(b, &config); err != nil {
		return err
	}
	t.AcceptEnv = config.Env == nil || *config.Env
	t.AcceptMounts = config.Mounts != nil && *config.Mounts
	return nil
}

// load reads a configuration with what it imports, as containerd does: later
// files win, tables are merged.
func load(path string, read reader, glob globs) (map[string]any, error) {
	out := map[string]any{}
	seen := map[string]bool{}
	todo := []string{path}
	for len(todo) > 0 && len(seen) < maxImports {
		file := todo[0]
		todo = todo[1:]
		if seen[file] {
			continue
		}
		seen[file] = true
		b, err := read(file)
		if err != nil {
			return nil, fmt.Errorf("read %s: %w", file, err)
		}
		one := map[string]any{}
		if err := toml.Unmarshal(b, &one); err != nil {
			return nil, fmt.Errorf("read %s: %w", file, err)
		}
		imports, _ := one["imports"].([]any)
		for _, i := range imports {
			pattern, ok := i.(string)
			if !ok {
				continue
			}
			if !filepath.IsAbs(pattern) {
				pattern = filepath.Join(filepath.Dir(file), pattern)
			}
			todo = append(todo, glob(pattern)...)
		}
		merge(out, one)
	}
	return out, nil
}

// merge puts the second table over the first.
func merge(into, from map[string]any) {
	for k, v := range from {
		sub, isTable := v.(map[string]any)
		have, wasTable := into[k].(map[string]any)
		if isTable && wasTable {
			merge(have, sub)
			continue
		}
		into[k] = v
	}
}

// table finds a table in tables, nil if it isn't there.
func table(in map[string]any, path ...string) map[string]any {
	for _, p := range path {
		next, _ := in[p].(map[string]any)
		if next == nil {
			return nil
		}
		in = next
	}
	return in
}
