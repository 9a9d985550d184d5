package agent

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
)

// CheckInstalled compares what containers get with what the agent came with,
// and returns the directory on the node. An error says what differs.
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
	return dir, nil
}
