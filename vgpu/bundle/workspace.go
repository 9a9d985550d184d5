package bundle

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/carve-gpu/carve/vgpu/region"
)

// workFolders are those of all runs. A name is short, so that what is below it can stand
// where carveDir stands in a file.
const workFolders = "/tmp/c"

// workspace is the folder that everything of a run is in.
type workspace struct {
	path string
	// lock is held as long as the run lives, by whatever pid others know it.
	lock *os.File
}

// newWorkspace makes one. Its file "pid" says whose it is, by pid and start time.
func newWorkspace() (*workspace, error) {
	const letters = "abcdefghijklmnopqrstuvwxyz0123456789"
	for try := range 1000 {
		seed := uint64(time.Now().UnixNano())*2654435761 + uint64(try)*40503 + uint64(os.Getpid())
		name := []byte(workFolders)
		for range 3 {
			seed = seed*6364136223846793005 + 1442695040888963407
			name = append(name, letters[(seed>>33)%uint64(len(letters))])
		}
		err := os.Mkdir(string(name), 0o755)
		if errors.Is(err, fs.ErrExist) {
			continue
		}
		w := &workspace{path: string(name)}
		if err == nil {
			err = w.claim()
		}
		if err != nil {
			return nil, fmt.Errorf("make a folder to work in: %w", err)
		}
		return w, nil
	}
	return nil, errors.New("make a folder to work in: /tmp is full of them")
}

func (w *workspace) claim() error {
	err := os.Chmod(w.path, 0o755)
	if err == nil {
		w.lock, err = lockFolder(w.path)
	}
	if err != nil {
		return errors.Join(err, os.RemoveAll(w.path))
	}
	self, err := region.ReadProcess("/proc", os.Getpid())
	if err == nil {
		err = os.WriteFile(filepath.Join(w.path, "pid"), fmt.Appendln(nil, self.HostPID, self.StartTicks), 0o644)
	}
	if err != nil {
		return errors.Join(err, w.remove())
	}
	return nil
}

func (w *workspace) remove() error {
	defer w.lock.Close()
	return os.RemoveAll(w.path)
}

// lockFolder locks a folder, and not what a link leads to; an error where another has it.
func lockFolder(path string) (*os.File, error) {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: path, Err: err}
	}
	dir := os.NewFile(uintptr(fd), path)
	if err := unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB); err != nil {
		dir.Close()
		return nil, &os.PathError{Op: "lock", Path: path, Err: err}
	}
	return dir, nil
}

// sweep removes the folders of runs that were killed, and says which.
func sweep() (removed []string) {
	folders, _ := filepath.Glob(workFolders + "???") // the pattern is a good one
	for _, path := range folders {
		dir, err := lockFolder(path)
		if err != nil {
			continue // a link, or somebody else's, or its run lives
		}
		if abandoned(dir) && os.RemoveAll(path) == nil {
			removed = append(removed, path)
		}
		dir.Close()
	}
	return removed
}

// abandoned says that a folder, which is locked, was a run's of this user that has ended.
func abandoned(dir *os.File) bool {
	info, err := dir.Stat()
	if err != nil {
		return false
	}
	if st, ok := info.Sys().(*syscall.Stat_t); !ok || int(st.Uid) != os.Geteuid() {
		return false
	}
	b, err := os.ReadFile(filepath.Join(dir.Name(), "pid"))
	if err != nil {
		return false // not a run's, or just being made
	}
	words := strings.Fields(string(b))
	if len(words) == 0 || len(words) > 2 {
		return false
	}
	pid, err := strconv.Atoi(words[0])
	if err != nil || pid <= 0 {
		return false
	}
	p, err := region.ReadProcess("/proc", pid)
	if errors.Is(err, os.ErrNotExist) {
		return true
	}
	// Earlier runners wrote no start time, and held no lock.
	return err == nil && len(words) == 2 && words[1] != strconv.FormatUint(p.StartTicks, 10)
}
