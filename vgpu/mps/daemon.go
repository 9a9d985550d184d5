package mps

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
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

// shmBytes bounds the tmpfs of one card. What is written there counts against the
// memory of the container that writes it.
const shmBytes = 1 << 30

// makeDirs makes what daemon and clients share. What an earlier daemon left in the pipe
// folder goes; the folder stays, containers have it mounted.
func (d Dir) makeDirs(uuid string) error {
	for _, dir := range []string{d.Pipe(uuid), d.log(uuid), d.Shm(uuid)} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	entries, err := os.ReadDir(d.Pipe(uuid))
	if err != nil {
		return err
	}
	for _, e := range entries {
		if err := os.RemoveAll(filepath.Join(d.Pipe(uuid), e.Name())); err != nil {
			return err
		}
	}
	logs, err := os.ReadDir(d.log(uuid))
	if err != nil {
		return err
	}
	for _, e := range logs {
		if strings.HasSuffix(e.Name(), ".log") {
			if err := os.Rename(filepath.Join(d.log(uuid), e.Name()), filepath.Join(d.log(uuid), e.Name()+".old")); err != nil {
				return err
			}
		}
	}
	mounted, err := isMountPoint(d.Shm(uuid))
	if err == nil && !mounted {
		err = unix.Mount("carve-mps", d.Shm(uuid), "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, fmt.Sprintf("size=%d,mode=1777", shmBytes))
	}
	if err != nil {
		return fmt.Errorf("mount tmpfs on %s: %w", d.Shm(uuid), err)
	}
	return nil
}

// clearDirs gives back what they hold. Containers that have them mounted keep them.
func (d Dir) clearDirs(uuid string) error {
	for {
		err := unix.Unmount(d.Shm(uuid), unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
		if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("unmount %s: %w", d.Shm(uuid), err)
		}
	}
}

func isMountPoint(dir string) (bool, error) {
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
	out, err := os.OpenFile(filepath.Join(d.log(uuid), "daemon.log"), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o644)
	if err != nil {
		return nil, err
	}
	defer out.Close()
	cmd := exec.Command(gpu.MPSControl, append([]string{"-f"}, options...)...)
	cmd.Env = append(environment(), "CUDA_VISIBLE_DEVICES="+uuid, cardMark+"="+uuid)
	cmd.Dir, cmd.Stdout, cmd.Stderr = "/", out, out
	cmd.SysProcAttr = &unix.SysProcAttr{Chroot: root.Directory(), Setsid: true}
	failed := make(chan error)
	go func() {
		// This thread has the namespace, the daemon is born of it, and both threads and
		// goroutine end here: a locked one is thrown away.
		runtime.LockOSThread()
		err := enter(d, root, uuid)
		if err == nil {
			err = cmd.Start()
		}
		failed <- err
	}()
	if err := <-failed; err != nil {
		return nil, err
	}
	return cmd, nil
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

// control gives a daemon one command, and returns what it answers.
func control(ctx context.Context, daemon Process, command string) (string, error) {
	var out bytes.Buffer
	cmd := exec.CommandContext(ctx, gpu.MPSControl)
	cmd.Env, cmd.Dir = environment(), "/"
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(command+"\n"), &out, &out
	cmd.WaitDelay = time.Second
	// The daemon's root in the daemon's own mount namespace.
	cmd.SysProcAttr = &unix.SysProcAttr{Chroot: fmt.Sprintf("%s/%d/root", procDir, daemon.PID)}
	if !daemon.Lives() {
		return "", fmt.Errorf("%s: the daemon (process %d) has ended", command, daemon.PID)
	}
	err := cmd.Run()
	text := strings.TrimSpace(out.String())
	switch {
	case ctx.Err() != nil:
		return text, fmt.Errorf("%s: the daemon doesn't answer", command)
	case err != nil:
		return text, fmt.Errorf("%s: %w: %.200s", command, err, text)
	}
	return text, nil
}

// servers asks a daemon for its servers.
func servers(ctx context.Context, daemon Process) ([]Process, error) {
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
		if p, err := ProcessOf(pid); err == nil {
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
