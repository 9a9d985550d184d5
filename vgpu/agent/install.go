package agent

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
)

// Installed are the files that containers and the runtime need, as the node
// sees them.
type Installed struct {
	FrontCUDA, FrontNVML, Hook string
}

// installedNames are the files as they come with the agent.
var installedNames = []string{"libcarve-cuda.so", "libcarve-nvml.so", "carve-hook"}

// install copies the front libraries and carve-hook to a directory on the node
// whose name is made from their content: an upgrade never touches a file that
// a container has mapped. The directory isn't under RunDir, since /run is
// mounted without exec on many nodes, and a library can't be mapped from there.
func install(from, to string) (Installed, error) {
	sum := sha256.New()
	for _, name := range installedNames {
		f, err := os.Open(filepath.Join(from, name))
		if err != nil {
			return Installed{}, fmt.Errorf("install libraries: %w", err)
		}
		fmt.Fprintf(sum, "%s\n", name)
		_, err = io.Copy(sum, f)
		if err = errors.Join(err, f.Close()); err != nil {
			return Installed{}, fmt.Errorf("install libraries: %w", err)
		}
	}
	dir := filepath.Join(to, hex.EncodeToString(sum.Sum(nil))[:16])
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return Installed{}, fmt.Errorf("install libraries: %w", err)
	}
	for _, name := range installedNames {
		if err := copyOnce(filepath.Join(from, name), filepath.Join(dir, name)); err != nil {
			return Installed{}, fmt.Errorf("install libraries: %w", err)
		}
	}
	return Installed{
		FrontCUDA: filepath.Join(dir, installedNames[0]),
		FrontNVML: filepath.Join(dir, installedNames[1]),
		Hook:      filepath.Join(dir, installedNames[2]),
	}, nil
}

// copyOnce copies a file, whole or not at all, unless it is there.
func copyOnce(from, to string) error {
	if _, err := os.Lstat(to); err == nil || !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.CreateTemp(filepath.Dir(to), ".new-")
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	if err == nil {
		err = out.Chmod(0o755)
	}
	if err == nil {
		err = out.Sync()
	}
	if err = errors.Join(err, out.Close()); err == nil {
		err = os.Rename(out.Name(), to)
	}
	if err != nil {
		os.Remove(out.Name())
	}
	return err
}
