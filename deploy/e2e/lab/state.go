package lab

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// Lab is a handle on a lab, running or not. Its methods may be used by several
// goroutines and processes at once.
type Lab struct {
	config   Config
	state    state
	progress *Progress
}

// state is what lab.json holds.
type state struct {
	Version    int                `json:"version"`
	Config     Config             `json:"config"`
	Holder     process            `json:"holder"`
	Components map[string]process `json:"components"`
	Started    time.Time          `json:"started"`
	// Ready is when Up was done; zero: it is under way, or failed.
	Ready time.Time `json:"ready,omitzero"`
}

const (
	stateVersion = 1
	stateFile    = "lab.json"
)

// ErrNoLab says that there is no lab in the folder.
var ErrNoLab = errors.New("there is no lab here")

// Open attaches to the lab in dir. It does not check that the lab runs.
func Open(dir string, progress *Progress) (*Lab, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	l := &Lab{config: Config{Dir: dir}, progress: progress}
	if err := l.load(); err != nil {
		return nil, err
	}
	l.config = l.state.Config
	return l, nil
}

func (l *Lab) load() error {
	path := l.config.path(stateFile)
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("open lab %s: %w (`lab up` starts one)", l.config.Dir, ErrNoLab)
	} else if err != nil {
		return fmt.Errorf("open lab %s: %w", l.config.Dir, err)
	}
	var s state
	if err := json.Unmarshal(data, &s); err != nil {
		return fmt.Errorf("open lab %s: read %s: %w", l.config.Dir, path, err)
	}
	if s.Version != stateVersion || s.Config.Dir != l.config.Dir {
		return fmt.Errorf("open lab %s: %s was written by another version (%d) or for another folder (%s): end it with the program that started it", l.config.Dir, path, s.Version, s.Config.Dir)
	}
	l.state = s
	return nil
}

func (l *Lab) save() error {
	data, err := json.MarshalIndent(l.state, "", "  ")
	if err == nil {
		err = replaceFile(l.config.path(stateFile), data, 0o644)
	}
	if err != nil {
		return fmt.Errorf("save the state of lab %s: %w", l.config.Name, err)
	}
	return nil
}

// replaceFile writes a file so that a reader sees the old or the new one.
func replaceFile(path string, data []byte, mode fs.FileMode) error {
	if err := os.WriteFile(path+".new", data, mode); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// lockDir makes dir and takes the one lock on it. Two processes that change a
// lab, or build the same programs, take turns; waiting is called if this one
// has to wait. The lock ends with unlock, or with the process.
func lockDir(ctx context.Context, dir string, waiting func()) (unlock func(), err error) {
	for {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return nil, err
		}
		f, err := os.Open(dir)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		} else if err != nil {
			return nil, err
		}
		for unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) != nil {
			if waiting != nil {
				waiting()
				waiting = nil
			}
			select {
			case <-ctx.Done():
				f.Close()
				return nil, fmt.Errorf("lock %s: %w", dir, context.Cause(ctx))
			case <-time.After(100 * time.Millisecond):
			}
		}
		// The holder before us may have removed the folder.
		held, err1 := f.Stat()
		named, err2 := os.Stat(dir)
		if err1 == nil && err2 == nil && os.SameFile(held, named) {
			return func() { f.Close() }, nil
		}
		f.Close()
	}
}

// change locks the lab, reads its state anew, runs f and saves the state.
func (l *Lab) change(ctx context.Context, f func() error) error {
	unlock, err := lockDir(ctx, l.config.Dir, func() { l.progress.Note("waiting for another process that changes lab %s", l.config.Name) })
	if err != nil {
		return err
	}
	defer unlock()
	if err := l.load(); err != nil {
		return err
	}
	return errors.Join(f(), l.save())
}

// Config returns what the lab was started with, defaults filled in.
func (l *Lab) Config() Config { return l.config }
