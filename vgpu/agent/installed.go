package agent

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
)

// CheckInstalled compares what containers get with what the agent came with and
// made of it, and returns the directory on the node. An error says what differs.
func (a *Agent) CheckInstalled() (dir string, err error) {
	dir = filepath.Dir(a.installed.FrontCUDA)
	for _, name := range installedNames {
		want, err := os.ReadFile(filepath.Join(a.LibDir, name))
		if err != nil {
			return dir, fmt.Errorf("compare libraries: %w", err)
		}
		have, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			return dir, fmt.Errorf("compare libraries: %w", err)
		}
		if !bytes.Equal(want, have) {
			return dir, fmt.Errorf("compare libraries: %s differs (%d bytes, %d expected)", name, len(have), len(want))
		}
	}
	a.mu.Lock()
	made := a.twins.sums
	a.mu.Unlock()
	for _, path := range slices.Sorted(maps.Keys(made)) {
		have, err := os.ReadFile(path)
		if err != nil {
			return dir, fmt.Errorf("compare libraries: %w", err)
		}
		if sha256.Sum256(have) != made[path] {
			return dir, fmt.Errorf("compare libraries: %s differs from what was made for the driver", filepath.Base(path))
		}
	}
	return dir, nil
}
