package agent

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/carve-gpu/carve/vgpu/gpu/inroot"
	"github.com/carve-gpu/carve/vgpu/region"
)

// Where a container has its two files.
const (
	limitsInside = "/usr/lib/carve/limits"
	usageInside  = "/usr/lib/carve/usage"
)

// sightWait is how long somebody waits for a look into a container. It takes
// microseconds, unless the tenant has mounted something there that doesn't answer:
// then the look stays behind, and the container is one that can't be told.
const sightWait = time.Second

// fileID tells a file from all others that exist at the same time. The zero value
// is that of none.
type fileID struct{ device, inode uint64 }

// idOf is the identity of the regular file at path, links not followed. Where
// something else stands there, it is none.
func idOf(path string) (fileID, error) {
	var st unix.Stat_t
	err := unix.Lstat(path, &st)
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR):
		return fileID{}, nil
	case err != nil:
		return fileID{}, &os.PathError{Op: "lstat", Path: path, Err: err}
	case st.Mode&unix.S_IFMT != unix.S_IFREG:
		return fileID{}, nil
	}
	return fileID{uint64(st.Dev), st.Ino}, nil
}

// sight is what was seen of the files of a container that hasn't exited. The fields
// are guarded by the agent's mu.
type sight struct {
	// known says that the files that it has are known; a mount never changes, so
	// they are looked for once.
	known, looking bool
	limits, usage  fileID
	// lost is the one that is no longer the node's.
	lost lostFile
	// settled says that what follows from it was done.
	settled bool
}

// lostFile names a file of a running container that is no longer the node's: "" is
// none.
type lostFile string

const (
	lostLimits lostFile = "limits"
	lostUsage  lostFile = "usage"
)

// of says it in a sentence.
func (f lostFile) of(container string) string {
	if f == "" {
		return ""
	}
	return fmt.Sprintf("container %s runs with a %s file that is no longer the node's: it was removed from the node, or replaced there; until the container starts anew (delete its pod), its share can't be changed", container, f)
}

// inside is what a look into a container found.
type inside struct {
	limits, usage fileID
	// page is the content of its limits file.
	page []byte
}

// lookInto looks at the files that the first process of a container sees. The pid
// may be another's by now, so the process must be in the container's cgroup. The
// path may lie on anything that the tenant has mounted, so the call may never
// return; it is resolved by the kernel within the container's root.
func lookInto(proc string, pid int, id string) (inside, error) {
	var in inside
	fail := func(err error) (inside, error) {
		return inside{}, fmt.Errorf("look into container %s: %w", id, err)
	}
	// The descriptor stays that of this process.
	dir, err := unix.Open(filepath.Join(proc, strconv.Itoa(pid)), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fail(err)
	}
	defer unix.Close(dir)
	own := fmt.Sprintf("/proc/self/fd/%d", dir)
	groups, err := os.ReadFile(own + "/cgroup")
	if err != nil {
		return fail(err)
	}
	if id == "" || !strings.Contains(string(groups), id) {
		return fail(fmt.Errorf("process %d is not in its cgroup", pid))
	}
	root, err := unix.Openat(dir, "root", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fail(err)
	}
	defer unix.Close(root)
	for _, f := range []struct {
		path string
		id   *fileID
		page *[]byte
	}{{limitsInside, &in.limits, &in.page}, {usageInside, &in.usage, nil}} {
		fd, err := inroot.Open(root, f.path[1:], unix.O_PATH|unix.O_NOFOLLOW, 0)
		if err != nil {
			return fail(err)
		}
		var st unix.Stat_t
		err = unix.Fstat(fd, &st)
		switch {
		case err != nil:
		case st.Mode&unix.S_IFMT != unix.S_IFREG:
			err = fmt.Errorf("%s is no file there", f.path)
		default:
			*f.id = fileID{uint64(st.Dev), st.Ino}
			if f.page != nil {
				*f.page = firstPage(fd)
			}
		}
		unix.Close(fd)
		if err != nil {
			return fail(err)
		}
	}
	return in, nil
}

// firstPage reads the first page of a regular file that was opened as a path.
func firstPage(fd int) []byte {
	f, err := os.Open(fmt.Sprintf("/proc/self/fd/%d", fd))
	if err != nil {
		return nil
	}
	defer f.Close()
	page := make([]byte, region.LimitsBytes)
	n, _ := f.ReadAt(page, 0)
	return page[:n]
}

// look looks into a container, for as long as it takes but with the caller for
// sightWait only; nil where nothing was seen. One look at a time is under way in a
// container, and for another one nobody waits.
func (a *Agent) look(id string, u use) *inside {
	a.mu.Lock()
	s := a.sightOf(id)
	if s.looking || u.hostPID == 0 {
		a.mu.Unlock()
		return nil
	}
	s.looking = true
	a.mu.Unlock()
	found := make(chan *inside, 1)
	go func() {
		in, err := lookInto(procRoot, u.hostPID, id)
		a.mu.Lock()
		s.looking = false
		if err == nil {
			s.known, s.limits, s.usage = true, in.limits, in.usage
		}
		a.mu.Unlock()
		if err != nil {
			found <- nil
			return
		}
		found <- &in
	}()
	late := time.NewTimer(sightWait)
	defer late.Stop()
	select {
	case in := <-found:
		return in
	case <-late.C:
		return nil
	}
}

// sightOf is what was seen of a container. a.mu is held.
func (a *Agent) sightOf(id string) *sight {
	s := a.sights[id]
	if s == nil {
		if a.sights == nil {
			a.sights = map[string]*sight{}
		}
		s = &sight{}
		a.sights[id] = s
	}
	return s
}

// lostOf says what a container of a share has that is no longer the node's. a.mu
// is held.
func (a *Agent) lostOf(uid, container string) string {
	for id, s := range a.sights {
		if u := a.containers[id]; s.lost != "" && u.uid == uid && u.container == container {
			return s.lost.of(container)
		}
	}
	return ""
}

// cutOffs counts the running containers with a file that is no longer the node's.
// a.mu is held.
func (a *Agent) cutOffs() int {
	n := 0
	for id, s := range a.sights {
		if _, ok := a.containers[id]; ok && s.lost != "" {
			n++
		}
	}
	return n
}
