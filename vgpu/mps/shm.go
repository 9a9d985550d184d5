package mps

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"regexp"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// All pods of a card have one /dev/shm, as MPS has it. What one of them leaves there would
// take room from those that come after it, who could read it, too, for as long as the card
// stays in mode mps. So the keeper removes, every so often, what can be nobody's any more:
// a file may belong to each tenant that is there when it is first seen, or seen changed,
// and that has a process of the file's owner or of root; it goes when the last of those
// has gone. A tenant is a pod, and is there while any process of it lives.
//
// What is the server's stays while that lives: what it has open or mapped, what has a pid
// of it in its name, and what came while it started. To remove a file takes its name only;
// whoever has it open keeps it.

// shmInodes bounds the files and folders in one card's /dev/shm.
const shmInodes = 1 << 16

// shmDepth is how deep folders are looked into; what lies deeper stays until MPS ends on
// the card.
const shmDepth = 32

// leftovers is what is known of the files in one card's /dev/shm, by inode.
type leftovers struct {
	files map[uint64]*shmFile
	// epoch is that of the servers whose files are known, known whether any are.
	epoch uint64
	known bool
	// before are the files that were there when a daemon or server was about to start.
	before map[uint64]bool
}

// shmFile is one that a tenant made, or the server.
type shmFile struct {
	shmEntry
	// fresh says that it has come or changed since its owners were noted: the tenants
	// that it may belong to.
	fresh  bool
	owners map[string]bool
	// served says that it is the server's while that lives, idle that it was nobody's
	// at the last look.
	served, idle bool
}

// shmEntry is a file or folder as it is seen.
type shmEntry struct {
	inode   uint64
	uid     uint32
	changed unix.Timespec
	name    string
	folder  bool
}

// starting notes what is there before a daemon or server starts.
func (l *leftovers) starting(dir string) {
	l.before = map[uint64]bool{}
	if walk(dir, func(_ int, e shmEntry) { l.before[e.inode] = true }) != nil {
		l.before = nil
	}
}

// started takes what has come since for the server's.
func (l *leftovers) started(dir string, epoch uint64) {
	if l.before == nil {
		return
	}
	l.anew(epoch)
	l.known = walk(dir, func(_ int, e shmEntry) {
		if !l.before[e.inode] {
			l.files[e.inode] = &shmFile{shmEntry: e, served: true, fresh: true, owners: map[string]bool{}}
		}
	}) == nil
	l.before = nil
}

// anew is for other servers: what was those before is nobody's.
func (l *leftovers) anew(epoch uint64) {
	if l.files == nil {
		l.files = map[uint64]*shmFile{}
	}
	for _, f := range l.files {
		f.served = false
	}
	l.epoch = epoch
}

// sweep removes what is nobody's any more, and returns how many files and folders that
// was.
func (l *leftovers) sweep(dir, uuid string, epoch uint64) (int, error) {
	adopted := !l.known || l.epoch != epoch
	if adopted {
		l.anew(epoch)
		l.known = false
	}
	now, unsure := map[uint64]*shmFile{}, false
	err := walk(dir, func(_ int, e shmEntry) {
		f := l.files[e.inode]
		if f == nil {
			f = &shmFile{fresh: true, owners: map[string]bool{}}
		}
		f.fresh = f.fresh || f.changed != e.changed || f.uid != e.uid
		f.shmEntry, now[e.inode] = e, f
		unsure = unsure || !f.served
	})
	if err != nil {
		return 0, err
	}
	l.files = now
	if !unsure {
		l.known = true
		return 0, nil
	}
	// Asked after the files: whoever made one of them is there, or has gone.
	who, err := shmUsers(dir, uuid)
	if err != nil {
		return 0, err
	}
	gone := map[uint64]*shmFile{}
	for inode, f := range now {
		// Of what another keeper saw start it isn't known what came with that.
		if adopted && who.serverUIDs[f.uid] || who.names(f.name) {
			f.served = true
		}
		if f.fresh {
			for key, t := range who.tenants {
				if t.mayOwn(f.uid) {
					f.owners[key] = true
				}
			}
			f.fresh = false
		}
		used := f.served || who.has[inode]
		for key := range f.owners {
			used = used || who.there[key]
		}
		if !used && f.idle {
			gone[inode] = f
		}
		f.idle = !used
	}
	l.known = true
	if len(gone) == 0 {
		return 0, nil
	}
	removed, failed := 0, error(nil)
	err = walk(dir, func(at int, e shmEntry) {
		f := gone[e.inode]
		// A folder has changed by what was removed from it.
		if f == nil || f.uid != e.uid || f.folder != e.folder || !e.folder && f.changed != e.changed {
			return
		}
		flags := 0
		if e.folder {
			flags = unix.AT_REMOVEDIR
		}
		switch err := unix.Unlinkat(at, e.name, flags); {
		case err == nil:
			removed++
		case !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ENOTEMPTY):
			failed = fmt.Errorf("remove what ended tenants left in %s: %w", dir, err)
		}
	})
	return removed, errors.Join(failed, err)
}

// walk visits all files below a folder, what is in a folder before that itself. at is a
// descriptor of the folder that an entry is in. Tenants may change all of it meanwhile;
// no link is followed.
func walk(dir string, visit func(at int, e shmEntry)) error {
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("look into %s: %w", dir, err)
	}
	if err := walkAt(fd, dir, 0, visit); err != nil {
		return fmt.Errorf("look into %s: %w", dir, err)
	}
	return nil
}

func walkAt(fd int, name string, depth int, visit func(at int, e shmEntry)) error {
	d := os.NewFile(uintptr(fd), name)
	defer d.Close()
	names, err := d.Readdirnames(-1)
	if err != nil {
		return err
	}
	for _, name := range names {
		var st unix.Stat_t
		if err := unix.Fstatat(fd, name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
			continue // it has just gone
		}
		e := shmEntry{inode: st.Ino, uid: st.Uid, changed: st.Ctim, name: name, folder: st.Mode&unix.S_IFMT == unix.S_IFDIR}
		if e.folder && depth < shmDepth {
			sub, err := unix.Openat(fd, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
			if err == nil {
				err = walkAt(sub, name, depth+1, visit)
			}
			if err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.ENOTDIR) && !errors.Is(err, unix.ELOOP) {
				return err
			}
		}
		visit(fd, e)
	}
	return nil
}

// tenant is a pod whose containers have a card's /dev/shm, or where there are no pods the
// processes of one mount namespace.
type tenant struct {
	uids map[uint32]bool
	// oldest is when the first of its processes that live began.
	oldest uint64
}

// mayOwn reports whether a file of a user can be of a tenant, as far as its processes of
// now say: root may have been any user.
func (t *tenant) mayOwn(uid uint32) bool {
	if uid == 0 {
		return true
	}
	for u := range t.uids {
		// In a user namespace root is the first of a range of users.
		const span = 1 << 16
		if u == uid || u == 0 || u/span == uid/span && (u%span == 0 || uid%span == 0) {
			return true
		}
	}
	return false
}

// users are those who use one card's /dev/shm.
type users struct {
	tenants map[string]*tenant
	// there are the keys of all tenants that live, of this card or not.
	there map[string]bool
	// servers are the processes of MPS on the card, serverUIDs their users, has the
	// inodes that they have open or mapped.
	servers    []Process
	serverUIDs map[uint32]bool
	has        map[uint64]bool
}

// names reports whether a file's name has the pid of one of the servers in it.
func (u *users) names(file string) bool {
	words := strings.FieldsFunc(file, func(r rune) bool { return !strings.ContainsRune("0123456789abcdefABCDEF", r) })
	for _, w := range words {
		for _, p := range u.servers {
			if w == strconv.Itoa(p.PID) || strings.EqualFold(w, strconv.FormatInt(int64(p.PID), 16)) {
				return true
			}
		}
	}
	return false
}

// shmUsers looks through the node's processes. An error says that one couldn't be looked
// at, so that nothing is known.
func shmUsers(dir, uuid string) (*users, error) {
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil {
		return nil, err
	}
	entries, err := os.ReadDir(procDir)
	if err != nil {
		return nil, err
	}
	s := shmScan{
		users: users{map[string]*tenant{}, map[string]bool{}, nil, map[uint32]bool{}, map[uint64]bool{}},
		dev:   st.Dev, own: "/" + uuid + "/shm", mounts: map[string]bool{}, spaces: map[string]*tenant{},
	}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		p, err := ProcessOf(pid)
		if err == nil {
			if p.isOurs() && p.hasMark(uuid) {
				err = s.server(p)
			} else {
				err = s.process(p)
			}
		}
		if err != nil && !errors.Is(err, os.ErrNotExist) && !errors.Is(err, unix.ESRCH) && p.Lives() {
			return nil, fmt.Errorf("look at process %d: %w", pid, err)
		}
	}
	for space, t := range s.spaces {
		// The number may be another's later.
		key := fmt.Sprintf("%s since %d", space, t.oldest)
		s.tenants[key], s.there[key] = t, true
	}
	return &s.users, nil
}

// shmScan gathers users.
type shmScan struct {
	users
	dev uint64
	// own ends the name of the folder on the node, which isn't a tenant's.
	own string
	// mounts says of namespaces and roots whether the file system is mounted there,
	// spaces are the tenants without a pod.
	mounts map[string]bool
	spaces map[string]*tenant
}

func (s *shmScan) server(p Process) error {
	s.servers = append(s.servers, p)
	if err := addUIDs(p, s.serverUIDs); err != nil {
		return err
	}
	maps, err := readOf(p, "maps")
	if err != nil {
		return err
	}
	for line := range strings.Lines(maps) {
		f := strings.Fields(line) // range, rights, offset, device, inode, path
		if len(f) > 5 && f[3] == fmt.Sprintf("%02x:%02x", unix.Major(s.dev), unix.Minor(s.dev)) {
			if inode, err := strconv.ParseUint(f[4], 10, 64); err == nil {
				s.has[inode] = true
			}
		}
	}
	fds := fmt.Sprintf("%s/%d/fd", procDir, p.PID)
	entries, err := os.ReadDir(fds)
	if err != nil {
		return err
	}
	for _, e := range entries {
		var st unix.Stat_t
		if unix.Stat(fds+"/"+e.Name(), &st) == nil && st.Dev == s.dev {
			s.has[st.Ino] = true
		}
	}
	return nil
}

func (s *shmScan) process(p Process) error {
	cgroup, err := readOf(p, "cgroup")
	if err != nil {
		return err
	}
	pod := podOf(cgroup)
	if pod != "" {
		s.there[pod] = true
	}
	space, has, err := s.sees(p)
	if errors.Is(err, fs.ErrPermission) {
		// What is in a pod may be a tenant. Of the node's own processes none is, and some
		// may be looked into by nobody, root with most capabilities among them.
		has, err = pod != "", nil
	}
	if err != nil {
		return err
	}
	if !has {
		return nil
	}
	all, key := s.tenants, pod
	if pod == "" {
		all, key = s.spaces, space
	}
	t := all[key]
	if t == nil {
		t = &tenant{uids: map[uint32]bool{}, oldest: p.Start}
		all[key] = t
	}
	t.oldest = min(t.oldest, p.Start)
	return addUIDs(p, t.uids)
}

// sees names a process's mount namespace, and reports whether it sees the file system in
// another place than the node has it.
func (s *shmScan) sees(p Process) (space string, has bool, err error) {
	if space, err = linkOf(p, "ns/mnt"); err != nil {
		return "", false, err
	}
	root, err := linkOf(p, "root")
	if err != nil {
		return "", false, err
	}
	has, known := s.mounts[space+" "+root]
	if !known {
		if has, err = s.mounted(p); err != nil {
			return "", false, err
		}
		s.mounts[space+" "+root] = has
	}
	return space, has, nil
}

// mounted reports whether a process sees the file system in another place than the node
// has it.
func (s *shmScan) mounted(p Process) (bool, error) {
	text, err := readOf(p, "mountinfo")
	if err != nil {
		return false, err
	}
	dev := fmt.Sprintf("%d:%d", unix.Major(s.dev), unix.Minor(s.dev))
	for line := range strings.Lines(text) {
		f := strings.Fields(line) // id, parent, device, root, mount point
		if len(f) > 4 && f[2] == dev && !strings.HasSuffix(f[4], s.own) {
			return true, nil
		}
	}
	return false, nil
}

// podForm is how a pod's UID stands in the name of its cgroup; a static pod's is a hash.
var podForm = regexp.MustCompile(`pod([0-9a-f]{8}(?:[-_][0-9a-f]{4}){3}[-_][0-9a-f]{12}|[0-9a-f]{32})\b`)

// podOf is the pod that a process is of by its cgroups, "" for none. The kubelet names
// their cgroups by the pods' UIDs.
func podOf(cgroups string) string {
	if m := podForm.FindStringSubmatch(cgroups); m != nil {
		return "pod " + strings.ReplaceAll(m[1], "_", "-")
	}
	return ""
}

// addUIDs adds the users that a process may be taken for.
func addUIDs(p Process, to map[uint32]bool) error {
	text, err := readOf(p, "status")
	if err != nil {
		return err
	}
	for line := range strings.Lines(text) {
		if rest, is := strings.CutPrefix(line, "Uid:"); is {
			for _, f := range strings.Fields(rest) {
				if n, err := strconv.ParseUint(f, 10, 32); err == nil {
					to[uint32(n)] = true
				}
			}
			return nil
		}
	}
	return fmt.Errorf("the status of process %d names no user", p.PID)
}

// readOf reads a file of /proc about a process, linkOf a link.
func readOf(p Process, name string) (string, error) { return ofThreads(p, name, readText) }
func linkOf(p Process, name string) (string, error) { return ofThreads(p, name, os.Readlink) }

func readText(path string) (string, error) {
	b, err := os.ReadFile(path)
	return string(b), err
}

// ofThreads asks the first thread, and where that has ended the others.
func ofThreads(p Process, name string, ask func(string) (string, error)) (string, error) {
	text, err := ask(fmt.Sprintf("%s/%d/%s", procDir, p.PID, name))
	if err == nil {
		return text, nil
	}
	all, listErr := threads(p.PID)
	if listErr != nil {
		return "", listErr
	}
	for _, t := range all {
		if text, err := ask(fmt.Sprintf("%s/%d/task/%s/%s", procDir, p.PID, t.Name(), name)); err == nil {
			return text, nil
		}
	}
	return "", err
}
