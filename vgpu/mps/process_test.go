package mps

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// headless, in the environment, makes this process one whose first thread has ended.
const headless = "CARVE_TEST_HEADLESS"

func init() {
	if os.Getenv(headless) != "" {
		for range 20 {
			go func() {
				runtime.LockOSThread()
				select {}
			}()
		}
		// Initialization is on the first thread.
		_, _, _ = unix.Syscall(unix.SYS_EXIT, 0, 0, 0)
	}
}

func TestProcessLivesWhileAnyThreadDoes(t *testing.T) {
	cmd, started := startHeadless(t)
	if now, err := ProcessOf(started.PID); err != nil || now != started || !started.Lives() {
		t.Errorf("%v is %v, %v", started, now, err)
	}
	if !started.hasMark("GPU-headless") || started.hasMark("GPU-other") {
		t.Error("its card isn't known")
	}
	if err := started.kill(); err != nil {
		t.Fatal(err)
	}
	if left := gone(t.Context(), []Process{started}); len(left) > 0 { // not waited for yet: a zombie of one thread
		t.Errorf("%v", left)
	}
	_ = cmd.Wait()
}

// Threads end one after the other. Who looks meanwhile isn't told that all have.
func TestProcessThatEndsHasEndedOnce(t *testing.T) {
	for range 30 {
		cmd, started := startHeadless(t)
		if err := started.kill(); err != nil {
			t.Fatal(err)
		}
		for deadline := time.Now().Add(30 * time.Second); started.Lives(); {
			if time.Now().After(deadline) {
				t.Fatal("it doesn't end")
			}
		}
		if p, err := ProcessOf(started.PID); !errors.Is(err, os.ErrNotExist) {
			t.Fatalf("one that had ended is %v, %v", p, err)
		}
		_ = cmd.Wait()
	}
}

// startHeadless starts a process of many threads, without its first.
func startHeadless(t *testing.T) (*exec.Cmd, Process) {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = []string{headless + "=1", cardMark + "=GPU-headless"}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill() })
	started, err := ProcessOf(cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(30 * time.Second); firstState(t, cmd.Process.Pid) != 'Z'; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the first thread doesn't end")
		}
	}
	return cmd, started
}

func firstState(t *testing.T, pid int) byte {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("%s/%d/stat", procDir, pid))
	if err != nil {
		t.Fatal(err)
	}
	for i := len(b) - 1; i >= 0; i-- {
		if b[i] == ')' && i+2 < len(b) {
			return b[i+2]
		}
	}
	t.Fatalf("%q", b)
	return 0
}

// A process that can't be looked at hasn't ended for that.
func TestProcessThatCannotBeReadLives(t *testing.T) {
	p, err := ProcessOf(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	var was unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &was); err != nil {
		t.Fatal(err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 0, Max: was.Max}); err != nil {
		t.Fatal(err)
	}
	_, read := ProcessOf(p.PID)
	lives := p.Lives()
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &was); err != nil {
		t.Fatal(err)
	}
	if !errors.Is(read, unix.EMFILE) || !lives {
		t.Errorf("lives: %v (%v)", lives, read)
	}
	p.Start++
	if p.Lives() {
		t.Error("another process of that pid is taken for it")
	}
}

func TestThreadEndsWithWhatRanOnIt(t *testing.T) {
	for range 200 {
		tid := 0
		onThread(func() { tid = unix.Gettid() })
		if tid == 0 || tid == os.Getpid() {
			t.Fatalf("it ran on thread %d of process %d", tid, os.Getpid())
		}
		path := fmt.Sprintf("%s/self/task/%d", procDir, tid)
		for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(time.Millisecond) {
			if _, err := os.Stat(path); errors.Is(err, os.ErrNotExist) {
				break
			}
			if time.Now().After(deadline) {
				t.Fatalf("thread %d stays", tid)
			}
		}
	}
}

func TestLogsLeaveRoomForTheNextDaemon(t *testing.T) {
	r := newRig(t)
	if err := r.dir.makeDirs(card0); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(r.dir.log(card0), daemonOut)
	for range 3 {
		if err := os.WriteFile(path, make([]byte, 2*logBytes), 0o644); !errors.Is(err, unix.ENOSPC) {
			t.Fatalf("a log without end: %v", err)
		}
		if err := r.dir.makeDirs(card0); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, make([]byte, logBytes/2), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}
