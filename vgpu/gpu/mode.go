package gpu

import (
	"errors"
	"fmt"
	"path/filepath"
)

// ComputeMode says how many processes may have contexts on a card.
type ComputeMode string

// The modes. A card that is held to one process takes an MPS server as one, with all
// its clients, and refuses whoever isn't among them.
const (
	ComputeDefault          ComputeMode = "default"
	ComputeExclusiveProcess ComputeMode = "exclusive-process"
	ComputeProhibited       ComputeMode = "prohibited"
	// ComputeOther is one that this build doesn't know, and never sets.
	ComputeOther ComputeMode = "other"
)

// The programs of MPS, as drivers install them.
const (
	MPSControl = "/usr/bin/nvidia-cuda-mps-control"
	MPSServer  = "/usr/bin/nvidia-cuda-mps-server"
)

// MPSPrograms returns nil where the driver root has both programs of MPS; the error
// says in a sentence which it lacks. Packages of drivers often split them off.
func (r Root) MPSPrograms() error {
	for _, path := range []string{MPSControl, MPSServer} {
		if _, err := r.resolve(path); errors.Is(err, errNotFound) {
			return fmt.Errorf("driver root %s has no %s", r.Path, path)
		} else if err != nil {
			return err
		}
	}
	return nil
}

// Directory is the root as this process sees it, for whoever starts programs in it.
func (r Root) Directory() string { return r.see(r.Path) }

// DeviceDirectory is the directory with the device nodes as this process sees it,
// empty where it is the root's own.
func (r Root) DeviceDirectory() string {
	if filepath.Clean(r.devPath()) == filepath.Clean(r.Path) {
		return ""
	}
	return r.see(filepath.Join(r.devPath(), "dev"))
}
