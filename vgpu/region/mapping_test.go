package region

import (
	"bufio"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

func mapOf(t *testing.T, path string) []byte {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	pages, err := unix.Mmap(int(f.Fd()), 0, 4096, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	return pages
}

func TestWhoHasAFileMapped(t *testing.T) {
	dir := t.TempDir()
	// A name that the kernel has to escape, and as long as names can be.
	path := filepath.Join(dir, "a\nb "+strings.Repeat("c", 200))
	for _, p := range []string{path, path + "2"} {
		if err := CreateUsage(p); err != nil {
			t.Fatal(err)
		}
	}
	m, err := MappingOf(path)
	if err != nil {
		t.Fatal(err)
	}
	other := mapOf(t, path+"2")
	defer unix.Munmap(other)
	if has, err := m.In("/proc", os.Getpid()); err != nil || has {
		t.Errorf("before it is mapped: %v, %v", has, err)
	}
	pages := mapOf(t, path)
	if has, err := m.In("/proc", os.Getpid()); err != nil || !has {
		t.Errorf("mapped: %v, %v", has, err)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if has, err := m.In("/proc", os.Getpid()); err != nil || !has {
		t.Errorf("mapped, and its name gone: %v, %v", has, err)
	}
	if err := unix.Munmap(pages); err != nil {
		t.Fatal(err)
	}
	if has, err := m.In("/proc", os.Getpid()); err != nil || has {
		t.Errorf("unmapped again: %v, %v", has, err)
	}
	if m, err := MappingOf(path + "2"); err != nil {
		t.Error(err)
	} else if has, err := m.In("/proc", os.Getpid()); err != nil || !has {
		t.Errorf("the other: %v, %v", has, err)
	}
	if err := os.Truncate(path+"2", 0); err != nil {
		t.Fatal(err)
	}
	if _, err := MappingOf(path + "2"); err != nil {
		t.Errorf("cut short by its container: %v", err)
	}
}

// Nobody without memory is taken for one that hasn't the file.
func TestWhoHasNoMemoryToLookAt(t *testing.T) {
	path := filepath.Join(t.TempDir(), "usage")
	if err := CreateUsage(path); err != nil {
		t.Fatal(err)
	}
	m, err := MappingOf(path)
	if err != nil {
		t.Fatal(err)
	}
	dead := exec.Command("true")
	if err := dead.Start(); err != nil {
		t.Fatal(err)
	}
	var info unix.Siginfo
	if err := unix.Waitid(unix.P_PID, dead.Process.Pid, &info, unix.WEXITED|unix.WNOWAIT, nil); err != nil {
		t.Fatal(err)
	}
	if has, err := m.In("/proc", dead.Process.Pid); err == nil {
		t.Errorf("a zombie: %v", has)
	}
	dead.Wait()
	if has, err := m.In("/proc", dead.Process.Pid); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("one that is gone: %v, %v", has, err)
	}
	if b, err := os.ReadFile("/proc/2/maps"); err == nil && len(b) == 0 { // a thread of the kernel's, where it is seen
		if has, err := m.In("/proc", 2); !errors.Is(err, ErrNoMemory) {
			t.Errorf("the kernel's: %v, %v", has, err)
		}
	}
}

const withoutFirstThread = "CARVE_TEST_WITHOUT_FIRST_THREAD"

// This test's program again, as a process whose first thread has left, with a file mapped.
func init() {
	path := os.Getenv(withoutFirstThread)
	if path == "" {
		return
	}
	runtime.LockOSThread() // init runs on the first
	f, err := os.Open(path)
	if err != nil {
		os.Exit(3)
	}
	if _, err := unix.Mmap(int(f.Fd()), 0, 4096, unix.PROT_READ, unix.MAP_SHARED); err != nil {
		os.Exit(4)
	}
	go func() {
		runtime.LockOSThread()
		os.Stdout.WriteString("mapped\n")
		os.Stdin.Read(make([]byte, 1))
		os.Exit(0)
	}()
	unix.RawSyscall(unix.SYS_EXIT, 0, 0, 0)
}

func TestAProcessWithoutItsFirstThreadHasItsFiles(t *testing.T) {
	path := filepath.Join(t.TempDir(), "usage")
	if err := CreateUsage(path); err != nil {
		t.Fatal(err)
	}
	m, err := MappingOf(path)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), withoutFirstThread+"="+path)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { in.Close(); cmd.Wait() }()
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		t.Fatalf("%q, %v", line, err)
	}
	if has, err := m.In("/proc", cmd.Process.Pid); err != nil || !has {
		t.Errorf("%v, %v", has, err)
	}
}

// A process is another program after exec, and the same otherwise.
func TestAnotherProgramIsSeen(t *testing.T) {
	cmd := exec.Command("sh", "-c", "echo shell; read line; exec cat")
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { in.Close(); cmd.Wait() }()
	lines := bufio.NewReader(out)
	say := func(what, want string) (Process, uint64) {
		t.Helper()
		if _, err := in.Write([]byte(what)); err != nil {
			t.Fatal(err)
		}
		if got, err := lines.ReadString('\n'); err != nil || got != want {
			t.Fatalf("%q, %v", got, err)
		}
		p, err := ReadProcess("/proc", cmd.Process.Pid)
		if err != nil {
			t.Fatal(err)
		}
		image, err := ReadImage("/proc", cmd.Process.Pid)
		if err != nil || image == 0 {
			t.Fatalf("image %d, %v", image, err)
		}
		return p, image
	}
	shell, image := say("", "shell\n")
	if again, image2 := say("\nhere\n", "here\n"); again.Program == shell.Program || again.StartTicks != shell.StartTicks || image2 == image {
		t.Errorf("before exec %+v (%d), after it %+v (%d)", shell, image, again, image2)
	} else if third, image3 := say("here\n", "here\n"); third != again || image3 != image2 {
		t.Errorf("%+v and %+v without exec", again, third)
	}
}
