package bundle

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// carveDir is where the front libraries look for everything.
const carveDir = "/usr/lib/carve"

// scene is what a program is to find in a mount namespace of its own.
type scene struct {
	// Driver are the driver's own files by name ("libcuda.so.1"); Fronts what
	// stands over each of them.
	Driver, Fronts map[string]string
	// Limits and Usage are the share's files.
	Limits, Usage string
	// Root is a software GPU's root; empty for a driver's.
	Root string
}

// Inside is the part of a run that is a process in a mount namespace of its own: it
// puts things in place and becomes the program. args are what Run handed over. It
// returns only if that failed.
func Inside(args, env []string) error {
	if len(args) < 2 {
		return errors.New("inside is for this program's own use")
	}
	var s scene
	if err := json.Unmarshal([]byte(args[0]), &s); err != nil {
		return fmt.Errorf("read the scene: %w", err)
	}
	if err := s.build(); err != nil {
		return fmt.Errorf("put the front in the driver's place: %w", err)
	}
	return fmt.Errorf("run %s: %w", args[1], unix.Exec(args[1], args[1:], env))
}

func (s scene) build() error {
	if err := unix.Mount("carve-gputest", carveDir, "tmpfs", 0, "mode=755"); err != nil {
		return fmt.Errorf("mount on %s: %w", carveDir, err)
	}
	if err := os.Mkdir(carveDir+"/driver", 0o755); err != nil {
		return err
	}
	if s.Root != "" {
		// Its library finds its state by its own place, so the whole root comes along.
		root := carveDir + "/root"
		if err := os.Mkdir(root, 0o755); err != nil {
			return err
		}
		if err := unix.Mount(s.Root, root, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
			return fmt.Errorf("mount %s: %w", s.Root, err)
		}
		for name, file := range s.Driver {
			inside, err := filepath.Rel(s.Root, file)
			if err == nil {
				err = os.Symlink(filepath.Join(root, inside), filepath.Join(carveDir, "driver", name))
			}
			if err != nil {
				return err
			}
		}
	} else {
		for name, file := range s.Driver {
			if err := bind(file, filepath.Join(carveDir, "driver", name), true); err != nil {
				return err
			}
		}
	}
	if err := bind(s.Limits, carveDir+"/limits", true); err != nil {
		return err
	}
	if err := bind(s.Usage, carveDir+"/usage", false); err != nil {
		return err
	}
	for name, front := range s.Fronts {
		// Over the file that all the library's names lead to.
		if err := unix.Mount(front, s.Driver[name], "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("mount %s over %s: %w", front, s.Driver[name], err)
		}
	}
	return nil
}

// bind makes a file at path and binds another one over it.
func bind(from, path string, readOnly bool) error {
	if err := os.WriteFile(path, nil, 0o644); err != nil {
		return err
	}
	if err := unix.Mount(from, path, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("mount %s on %s: %w", from, path, err)
	}
	if readOnly {
		if err := unix.Mount("", path, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
			return fmt.Errorf("make %s read-only: %w", path, err)
		}
	}
	return nil
}
