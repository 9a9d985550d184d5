// Package native makes, for tests, what other compilers and other commands of this
// repository make of it. It belongs to no program.
//
// go test takes a result from its cache where the test binary, the environment that it asked
// for and the files that it opened are as they were. It knows nothing of what make compiled,
// nor of what a child process opened. So a test that runs such things says of which sources
// they are made, and a change there makes it run again.
package native

import (
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
)

// Make runs `make -s` in a folder of C sources, as often as there are targets to name, and
// makes the test's result depend on these sources. Several test binaries may do so at once.
func Make(dir string, targets ...string) error {
	if err := Sources(dir); err != nil {
		return err
	}
	// Two of them at once would write the same files.
	lock, err := os.OpenFile(filepath.Join(os.TempDir(), fmt.Sprintf("carve-make-%d.lock", os.Getuid())), os.O_CREATE|os.O_RDWR|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return err
	}
	defer lock.Close()
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		return fmt.Errorf("wait for another make: %w", err)
	}
	if out, err := exec.Command("make", append([]string{"-s", "-C", dir}, targets...)...).CombinedOutput(); err != nil {
		return fmt.Errorf("make -C %s %v: %w\n%s", dir, targets, err, out)
	}
	return nil
}

// Sources makes the test's result depend on all files below these folders: on their names,
// sizes and times, which is what the cache looks at. What make builds there isn't one.
func Sources(dirs ...string) error {
	for _, dir := range dirs {
		found := 0
		err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			switch {
			case err != nil:
				return err
			case d.IsDir() && d.Name() == "build":
				return fs.SkipDir
			case d.IsDir():
				return nil
			}
			found++
			_, err = os.Stat(path) // the cache hears of it
			return err
		})
		if err == nil && found == 0 {
			err = fmt.Errorf("no sources")
		}
		if err != nil {
			return fmt.Errorf("%s: %w", dir, err)
		}
	}
	return nil
}
