package mps

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/carve-gpu/carve/vgpu/gpu"
)

// Where daemon, servers and clients find each other, as each of them sees it. One path
// for all: what a daemon tells its clients may name it.
const (
	ContainerPipe = "/usr/lib/carve/mps"
	daemonLog     = "/usr/lib/carve/mps-log"
)

// daemonOut is the file in log/ that has what a daemon of now writes to its output.
const daemonOut = "daemon.log"

// shmBytes bounds the tmpfs of one card. What is written there counts against the
// memory of the container that writes it.
const shmBytes = 1 << 30

// logBytes bounds the tmpfs of what daemon and servers have to say, of now and of the
// time before. It goes when MPS ends on the card without a fault.
const logBytes = 16 << 20

// pipeBytes and pipeInodes bound the tmpfs of the pipe folder, in which tenants that are
// root may write what they like. A daemon has a handful of small files there.
const (
	pipeBytes  = 1 << 20
	pipeInodes = 512
)

// daemonFiles are the names that a daemon gives its files in the pipe folder. With
// another's file in the place of one of them it isn't started.
var daemonFiles = []string{"control", "control_lock", "control_privileged", "log", "nvidia-cuda-mps-control.pid"}

// mounts are the file systems of a card, by folder. Each has a bound of its own, so that
// no tenant fills the node's /run.
func (d Dir) mounts(uuid string) []mount {
	const flags = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	return []mount{
		// The daemon, root on the node, must follow no link that a tenant put there.
		// Kernels before 5.10 take no notice of that flag.
		{d.Pipe(uuid), flags | unix.MS_NOSYMFOLLOW, fmt.Sprintf("size=%d,nr_inodes=%d,mode=0755", pipeBytes, pipeInodes)},
		{d.log(uuid), flags, fmt.Sprintf("size=%d,nr_inodes=%d,mode=0755", logBytes, pipeInodes)},
		{d.Shm(uuid), flags, fmt.Sprintf("size=%d,nr_inodes=%d,mode=1777", shmBytes, shmInodes)},
	}
}

type mount struct {
	dir     string
	flags   uintptr
	options string
}

// makeDirs makes what daemon and clients share. What an earlier daemon left in the pipe
// folder goes; the folder stays, containers have it mounted.
func (d Dir) makeDirs(uuid string) error {
	for _, m := range d.mounts(uuid) {
		if err := os.MkdirAll(m.dir, 0o755); err != nil {
			return err
		}
		mounted, err := IsMountPoint(m.dir)
		if err == nil && !mounted {
			err = unix.Mount("carve-mps", m.dir, "tmpfs", m.flags, m.options)
		}
		if err != nil {
			return fmt.Errorf("mount tmpfs on %s: %w", m.dir, err)
		}
	}
	if err := d.clearPipe(uuid); err != nil {
		return err
	}
	return d.turnLogs(uuid)
}

// turnLogs puts what an earlier daemon had to say aside, and makes room for the next.
func (d Dir) turnLogs(uuid string) error {
	logs, err := filepath.Glob(filepath.Join(d.log(uuid), "*.log"))
	if err != nil {
		return err
	}
	for _, path := range logs {
		// How it began says more than how it went on.
		if st, err := os.Lstat(path); err == nil && st.Mode().IsRegular() && st.Size() > logBytes/8 {
			if err := os.Truncate(path, logBytes/8); err != nil {
				return err
			}
		}
		if err := os.Rename(path, path+".old"); err != nil {
			return err
		}
	}
	return nil
}

// clearPipe removes what is in the pipe folder. Tenants may write there meanwhile, so
// only what stands in the daemon's way is an error.
func (d Dir) clearPipe(uuid string) error {
	// Below a descriptor of the folder, and through no link: os.Root.
	pipe, err := os.OpenRoot(d.Pipe(uuid))
	if err != nil {
		return err
	}
	defer pipe.Close()
	entries, err := fs.ReadDir(pipe.FS(), ".")
	if err != nil {
		return err
	}
	for _, e := range entries {
		if err := pipe.RemoveAll(e.Name()); err != nil && slices.Contains(daemonFiles, e.Name()) {
			return err
		}
	}
	return nil
}

// clearDirs gives back what they hold. Containers that have them mounted keep them.
func (d Dir) clearDirs(uuid string) error {
	var failed error
	for _, m := range d.mounts(uuid) {
		for {
			err := unix.Unmount(m.dir, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
			if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) {
				break
			}
			if err != nil {
				failed = errors.Join(failed, fmt.Errorf("unmount %s: %w", m.dir, err))
				break
			}
		}
	}
	return failed
}

// IsMountPoint reports whether another file system is mounted on a directory.
func IsMountPoint(dir string) (bool, error) {
	var own, parent unix.Stat_t
	if err := unix.Stat(dir, &own); err != nil {
		return false, err
	}
	if err := unix.Stat(filepath.Dir(dir), &parent); err != nil {
		return false, err
	}
	return own.Dev != parent.Dev, nil
}

// start starts a card's daemon in the driver's root, in a mount namespace of its own in
// which the card's folders lie where clients have them. It outlives this process.
func start(d Dir, root gpu.Root, uuid string, options ...string) (*exec.Cmd, error) {
	out, err := os.OpenFile(filepath.Join(d.log(uuid), daemonOut), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o644)
	if err != nil {
		return nil, err
	}
	defer out.Close()
	cmd := exec.Command(gpu.MPSControl, append([]string{"-f"}, options...)...)
	cmd.Env = append(environment(), "CUDA_VISIBLE_DEVICES="+uuid, cardMark+"="+uuid)
	cmd.Dir, cmd.Stdout, cmd.Stderr = "/", out, out
	cmd.SysProcAttr = &unix.SysProcAttr{Chroot: root.Directory(), Setsid: true}
	// The thread has the namespace, and the daemon is born of it.
	onThread(func() {
		if err = enter(d, root, uuid); err == nil {
			err = cmd.Start()
		}
	})
	if err != nil {
		return nil, err
	}
	return cmd, nil
}

// onThread calls f on a thread that ends with it.
func onThread(f func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // never unlocked, so the runtime ends the thread, but
		if unix.Gettid() == unix.Getpid() {
			// it can't end the first one. With that kept here, f gets another.
			onThread(f)
			runtime.UnlockOSThread()
			return
		}
		f()
	}()
	<-done
}

func environment() []string {
	return []string{
		"PATH=/usr/sbin:/usr/bin:/sbin:/bin",
		"CUDA_MPS_PIPE_DIRECTORY=" + ContainerPipe, "CUDA_MPS_LOG_DIRECTORY=" + daemonLog,
	}
}

// enter gives the calling thread a mount namespace that is laid out for a daemon.
func enter(d Dir, root gpu.Root, uuid string) error {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("make a mount namespace: %w", err)
	}
	// A slave: nothing that is mounted here shows elsewhere, and what the node unmounts
	// isn't kept busy by a daemon.
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""); err != nil {
		return fmt.Errorf("keep mounts to ourselves: %w", err)
	}
	at := func(path string) string { return filepath.Join(root.Directory(), path) }
	// The driver's root has no folder for us, and may be read-only.
	extra := filepath.Join(d.Card(uuid), "root")
	for _, dir := range []string{ContainerPipe, daemonLog} {
		if err := os.MkdirAll(filepath.Join(extra, strings.TrimPrefix(dir, "/usr/lib")), 0o755); err != nil {
			return err
		}
	}
	if err := unix.Mount("carve-mps", at("/usr/lib"), "overlay", unix.MS_RDONLY, "lowerdir="+extra+":"+at("/usr/lib")); err != nil {
		return fmt.Errorf("lay a folder over %s: %w", at("/usr/lib"), err)
	}
	type place struct{ from, to string }
	binds := []place{{d.Pipe(uuid), ContainerPipe}, {d.log(uuid), daemonLog}}
	if dev := root.DeviceDirectory(); dev != "" {
		binds = append(binds, place{dev, "/dev"})
	}
	if _, err := os.Stat(at("/dev/shm")); errors.Is(err, fs.ErrNotExist) {
		if err := os.MkdirAll(at("/dev/shm"), 0o755); err != nil {
			return err
		}
	}
	binds = append(binds, place{d.Shm(uuid), "/dev/shm"})
	for _, b := range binds {
		if err := unix.Mount(b.from, at(b.to), "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
			return fmt.Errorf("bind %s to %s: %w", b.from, at(b.to), err)
		}
	}
	return nil
}

// answer keeps the first answerBytes of what is written to it. Whoever answers may be a
// tenant, who can put a socket in the place of the daemon's.
type answer []byte

const answerBytes = 4 << 10

func (a *answer) Write(b []byte) (int, error) {
	*a = append(*a, b[:min(len(b), answerBytes-len(*a))]...)
	return len(b), nil
}

// manyUsers is the option by which one server serves all user ids.
const manyUsers = "-multiuser-server"

// refusesOption reports whether what a daemon that ended has said is about its options.
func (d Dir) refusesOption(uuid string) bool {
	f, err := os.OpenFile(filepath.Join(d.log(uuid), daemonOut), os.O_RDONLY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return false
	}
	defer f.Close()
	said, err := io.ReadAll(io.LimitReader(f, maxFileBytes))
	said = bytes.ToLower(said)
	return err == nil && (bytes.Contains(said, []byte("usage")) || bytes.Contains(said, []byte("multiuser")))
}

// control gives a daemon one command, and returns what it answers.
func control(ctx context.Context, daemon Process, command string) (string, error) {
	// The process is asked for after its root is in our hands: it is that process's, or
	// there is none.
	root, err := os.OpenFile(fmt.Sprintf("%s/%d/root", procDir, daemon.PID), unix.O_PATH|unix.O_DIRECTORY, 0)
	if err == nil {
		defer root.Close()
	}
	if !daemon.Lives() {
		return "", fmt.Errorf("%s: the daemon (process %d) has ended", command, daemon.PID)
	}
	if err != nil {
		return "", fmt.Errorf("%s: %w", command, err)
	}
	var out answer
	cmd := exec.CommandContext(ctx, gpu.MPSControl)
	cmd.Env, cmd.Dir = environment(), "/"
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(command+"\n"), &out, &out
	cmd.WaitDelay = time.Second
	// The daemon's root in the daemon's own mount namespace. The child has the descriptor
	// until it becomes the program.
	cmd.SysProcAttr = &unix.SysProcAttr{Chroot: fmt.Sprintf("%s/self/fd/%d", procDir, root.Fd())}
	err = cmd.Run()
	text := strings.TrimSpace(string(out))
	switch {
	case ctx.Err() != nil:
		return text, fmt.Errorf("%s: the daemon doesn't answer", command)
	case err != nil:
		return text, fmt.Errorf("%s: %w: %.200q", command, err, text)
	}
	return text, nil
}

// servers asks a daemon of a card for its servers. Others' processes in the answer are
// left out: the keeper ends what it takes for a server.
func servers(ctx context.Context, daemon Process, uuid string) ([]Process, error) {
	text, err := control(ctx, daemon, "get_server_list")
	if err != nil {
		return nil, err
	}
	var out []Process
	for line := range strings.Lines(text) {
		fields := strings.Fields(line)
		if len(fields) == 0 {
			continue
		}
		pid, err := strconv.Atoi(fields[0])
		if err != nil {
			continue // a heading
		}
		if p, err := ProcessOf(pid); err == nil && p.isOurs() && (p.hasMark(uuid) || p.isChildOf(daemon)) {
			out = append(out, p)
		}
	}
	return out, nil
}

// status is a server's state in the daemon's words: ACTIVE, INITIALIZING, FAULT.
func status(ctx context.Context, daemon Process, server Process) (string, error) {
	text, err := control(ctx, daemon, "get_server_status "+strconv.Itoa(server.PID))
	if err != nil {
		return "", err
	}
	return strings.ToUpper(strings.TrimSpace(text)), nil
}
