package lab

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// labNamespaces are the kinds of namespaces that a lab has of its own.
const labNamespaces = unix.CLONE_NEWNS | unix.CLONE_NEWNET | unix.CLONE_NEWPID | unix.CLONE_NEWUTS

// labVariable is set in the environment of the holder, and so names the lab of
// a holder whose state file was never written.
const labVariable = "CARVE_LAB_DIR"

// startHolder starts process 1 of a new set of namespaces.
func startHolder(c Config) (process, error) {
	cmd := exec.Command(c.program("pause"))
	cmd.Env = []string{labVariable + "=" + c.Dir}
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWPID,
		// As Unshareflags rather than Cloneflags: for these the mounts are made
		// private too, so that the machine's and the lab's never mix.
		Unshareflags: unix.CLONE_NEWNS | unix.CLONE_NEWNET | unix.CLONE_NEWUTS,
		Setsid:       true, // Ctrl-C at the terminal is not for the lab
	}
	if err := cmd.Start(); err != nil {
		return process{}, fmt.Errorf("start the process that holds the lab's namespaces: %w", err)
	}
	go cmd.Wait() // reaps it, should it die before this process
	return identify(cmd.Process.Pid)
}

// inside runs f on a thread that is a member of these namespaces; a process
// that f starts is born in all of them, the PID namespace included, while its
// number is that of the caller's PID namespace.
//
// f must do its work on its own goroutine. The thread ends with f.
func inside(holder process, namespaces int, f func() error) error {
	done := make(chan error, 1)
	go func() {
		// Never unlocked: Go then ends the thread instead of reusing it.
		runtime.LockOSThread()
		if unix.Gettid() == unix.Getpid() {
			// What /proc/self shows is this thread's view: keep it unchanged. While
			// it is locked here, another goroutine gets another thread.
			done <- inside(holder, namespaces, f)
			runtime.UnlockOSThread()
			return
		}
		if err := enter(holder, namespaces); err != nil {
			done <- err
			return
		}
		done <- f()
	}()
	return <-done
}

func enter(holder process, namespaces int) error {
	fd, alive, err := holder.open()
	if err != nil {
		return err
	}
	if !alive {
		return ErrNotRunning
	}
	defer unix.Close(fd)
	if namespaces&unix.CLONE_NEWNS != 0 {
		// Threads share root and working directory; a thread that does can't
		// change its mount namespace.
		if err := unix.Unshare(unix.CLONE_FS); err != nil {
			return fmt.Errorf("unshare the working directory: %w", err)
		}
	}
	if err := unix.Setns(fd, namespaces); err != nil {
		return fmt.Errorf("enter the namespaces of process %d: %w", holder.PID, err)
	}
	return nil
}

// ErrNotRunning says that the lab's holder process has ended.
var ErrNotRunning = errors.New("the lab is not running")

// environment of every program in the lab: the caller's variables (proxies,
// KUBECONFIG and the like) must not reach it.
func (c Config) environment() []string {
	return []string{
		"PATH=" + c.Programs + ":/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
		"HOME=/root", "LANG=C.UTF-8", "KUBECONFIG=/etc/kubernetes/admin.conf",
		"CONTAINERD_ADDRESS=/run/containerd/containerd.sock",
	}
}

// Command prepares a program to be run in the lab by Start, Run or Output. Its
// name is looked up in the lab's programs, then in PATH. Environment and working
// directory are the lab's; set Env, Dir, Stdin, Stdout and Stderr as needed.
func (l *Lab) Command(ctx context.Context, name string, args ...string) *exec.Cmd {
	path := name
	if !strings.Contains(name, "/") {
		for _, dir := range append([]string{l.config.Programs}, filepath.SplitList(os.Getenv("PATH"))...) {
			if info, err := os.Stat(filepath.Join(dir, name)); err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0 {
				path = filepath.Join(dir, name)
				break
			}
		}
	}
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Env = l.config.environment()
	cmd.Dir = "/"
	return cmd
}

// Start starts cmd inside the lab. cmd.Process.Pid is the number outside.
func (l *Lab) Start(cmd *exec.Cmd) error {
	return inside(l.state.Holder, labNamespaces, cmd.Start)
}

// Run starts cmd inside the lab and waits for its end.
func (l *Lab) Run(cmd *exec.Cmd) error {
	if err := l.Start(cmd); err != nil {
		return fmt.Errorf("start %s in lab %s: %w", filepath.Base(cmd.Path), l.config.Name, err)
	}
	return cmd.Wait()
}

// Output runs a program inside the lab and returns what it wrote to stdout. The
// error holds what it wrote to stderr.
func (l *Lab) Output(ctx context.Context, name string, args ...string) ([]byte, error) {
	return l.output(l.Command(ctx, name, args...))
}

func (l *Lab) output(cmd *exec.Cmd) ([]byte, error) {
	var stdout, stderr strings.Builder
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := l.Run(cmd); err != nil {
		return []byte(stdout.String()), fmt.Errorf("%s: %w: %s", strings.Join(cmd.Args, " "), err, strings.TrimSpace(stderr.String()))
	}
	return []byte(stdout.String()), nil
}

// Kubectl runs kubectl as the cluster's administrator; see Output.
func (l *Lab) Kubectl(ctx context.Context, args ...string) ([]byte, error) {
	return l.Output(ctx, "kubectl", args...)
}

// Apply gives manifests, as YAML or JSON, to `kubectl apply`.
func (l *Lab) Apply(ctx context.Context, manifests string) error {
	cmd := l.Command(ctx, "kubectl", "apply", "-f", "-")
	cmd.Stdin = strings.NewReader(manifests)
	_, err := l.output(cmd)
	return err
}

// Path returns where a path of the lab can be opened from outside of it.
func (l *Lab) Path(inLab string) string {
	return filepath.Join("/proc", fmt.Sprint(l.state.Holder.PID), "root", inLab)
}

// DialContext connects to an address in the lab's network: IP and port of the
// node, of a pod or of a Service. Names are not resolved. The connection belongs
// to the calling process; nothing of the machine's network is involved.
func (l *Lab) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	if _, err := netip.ParseAddrPort(address); err != nil {
		return nil, fmt.Errorf("dial %s in lab %s: want IP:PORT: %w", address, l.config.Name, err)
	}
	var conn net.Conn
	err := inside(l.state.Holder, unix.CLONE_NEWNET, func() (err error) {
		// A socket belongs to the namespace of the thread that makes it. With an
		// address that needs no resolution net.Dialer makes it right here.
		conn, err = (&net.Dialer{Timeout: 10 * time.Second}).DialContext(ctx, network, address)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("dial in lab %s: %w", l.config.Name, err)
	}
	return conn, nil
}

// Forward listens on listen, an address of the machine, and carries each
// connection to target, an address in the lab, until ctx ends. ready is called
// with the address once it listens.
func (l *Lab) Forward(ctx context.Context, listen, target string, ready func(net.Addr)) error {
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", listen)
	if err != nil {
		return fmt.Errorf("forward to %s in lab %s: %w", target, l.config.Name, err)
	}
	stop := context.AfterFunc(ctx, func() { listener.Close() })
	defer stop()
	defer listener.Close()
	ready(listener.Addr())
	for {
		near, err := listener.Accept()
		if ctx.Err() != nil {
			return nil
		} else if err != nil {
			return fmt.Errorf("forward to %s in lab %s: %w", target, l.config.Name, err)
		}
		go func() {
			defer near.Close()
			far, err := l.DialContext(ctx, "tcp", target)
			if err != nil {
				return // the client sees its connection closed
			}
			defer far.Close()
			go func() {
				io.Copy(far, near)
				far.(*net.TCPConn).CloseWrite()
			}()
			io.Copy(near, far)
		}()
	}
}
