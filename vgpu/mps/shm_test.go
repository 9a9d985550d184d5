package mps

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// In the environment it makes this process a tenant: the folder that it has as /dev/shm.
const tenantOf = "CARVE_TEST_TENANT"

// beTenant does what it reads: "user N", "write NAME", "folder NAME"; it ends when there
// is no more.
func beTenant(dir string) {
	var err error
	if dir != "there" {
		// A namespace is of the thread that makes it, until that runs a program.
		runtime.LockOSThread()
		err = unix.Unshare(unix.CLONE_NEWNS)
		if err == nil {
			err = unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, "")
		}
		if err == nil {
			err = unix.Mount(dir, "/dev/shm", "", unix.MS_BIND, "")
		}
		if err == nil {
			// Of a variable that is there twice the first would count.
			if err = os.Setenv(tenantOf, "there"); err == nil {
				err = unix.Exec("/proc/self/exe", os.Args, os.Environ())
			}
		}
	}
	in := bufio.NewScanner(os.Stdin)
	for {
		if err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		fmt.Println("done")
		if !in.Scan() {
			return
		}
		what, arg, _ := strings.Cut(in.Text(), " ")
		path := filepath.Join("/dev/shm", arg)
		switch what {
		case "user":
			n, _ := strconv.Atoi(arg)
			err = unix.Setresuid(n, n, n)
		case "write":
			err = os.WriteFile(path, []byte("secret"), 0o600)
		case "folder":
			err = os.Mkdir(path, 0o700)
		}
	}
}

type testTenant struct {
	t   *testing.T
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
}

func (r *rig) tenant() *testTenant {
	r.t.Helper()
	c := &testTenant{t: r.t, cmd: exec.Command("/proc/self/exe")}
	c.cmd.Env = append(os.Environ(), tenantOf+"="+r.dir.Shm(card0))
	var err error
	if c.in, err = c.cmd.StdinPipe(); err != nil {
		r.t.Fatal(err)
	}
	out, err := c.cmd.StdoutPipe()
	if err == nil {
		err = c.cmd.Start()
	}
	if err != nil {
		r.t.Fatal(err)
	}
	c.out = bufio.NewReader(out)
	r.t.Cleanup(c.end)
	c.done()
	return c
}

func (c *testTenant) done() {
	c.t.Helper()
	// One that hangs fails its test, and doesn't hold up the others.
	hangs := time.AfterFunc(30*time.Second, func() { c.cmd.Process.Kill() })
	defer hangs.Stop()
	if line, err := c.out.ReadString('\n'); line != "done\n" {
		c.t.Fatalf("a tenant said %q, %v", line, err)
	}
}

func (c *testTenant) do(what string) {
	c.t.Helper()
	fmt.Fprintln(c.in, what)
	c.done()
}

func (c *testTenant) end() {
	c.in.Close()
	c.cmd.Process.Kill()
	_ = c.cmd.Wait()
}

// left are the files in the card's /dev/shm.
func (r *rig) left() string {
	r.t.Helper()
	var all []string
	err := filepath.WalkDir(r.dir.Shm(card0), func(path string, _ fs.DirEntry, err error) error {
		if err == nil && path != r.dir.Shm(card0) {
			rel, _ := filepath.Rel(r.dir.Shm(card0), path)
			all = append(all, rel)
		}
		return nil
	})
	if err != nil {
		r.t.Fatal(err)
	}
	return strings.Join(all, " ")
}

func (r *rig) leaves(what, want string) {
	r.t.Helper()
	is := ""
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); time.Sleep(2 * time.Millisecond) {
		if is = r.left(); is == want {
			return
		}
	}
	r.t.Fatalf("%s: in /dev/shm is %q, want %q", what, is, want)
}

// stays waits for sweeps, after which it is still so. It could only be too fast.
func (r *rig) stays(what, want string) {
	r.t.Helper()
	time.Sleep(10 * quick.Sweep)
	if is := r.left(); is != want {
		r.t.Fatalf("%s: in /dev/shm is %q, want %q", what, is, want)
	}
}

// node-21: what a tenant leaves in the /dev/shm of its card goes with it. Nobody else's
// does, and nothing of the server's.
func TestWhatTenantsLeaveGoesWithThem(t *testing.T) {
	r := newRig(t)
	r.wrongable()
	r.wrong("shm", true, "cuda.server")
	r.keeper()
	r.want(true)
	s := r.ready(0)
	servers := "cuda.server"
	r.leaves("before anybody came", servers)

	one, two := r.tenant(), r.tenant()
	one.do("write 1root")
	one.do("user 1001")
	one.do("write 1")
	one.do("folder 1f")
	one.do("write 1f/x")
	two.do("user 1002")
	two.do("write 2")
	two.do("folder 2f")
	two.do("write 2f/x")
	r.stays("both are there", "1 1f 1f/x 1root 2 2f 2f/x "+servers)
	two.end()
	// Files of root may be of the other one: it may have been root.
	r.leaves("the second has gone", "1 1f 1f/x 1root "+servers)
	r.stays("the first is there", "1 1f 1f/x 1root "+servers)
	one.end()
	r.leaves("the first has gone", servers)

	// One that is root may have been anybody.
	long := r.tenant()
	short := r.tenant()
	short.do("user 1003")
	short.do("write 3")
	r.stays("both are there", "3 "+servers)
	short.end()
	r.stays("one that is root is there", "3 "+servers)
	// A tenant that comes later has no part in what was there before.
	later := r.tenant()
	r.stays("one has come", "3 "+servers)
	long.end()
	r.leaves("the one has gone", servers)
	// But what it writes to is its own.
	long = r.tenant()
	long.do("write shared")
	r.stays("the first writes", servers+" shared")
	later.do("write shared")
	r.stays("the other writes", servers+" shared")
	long.end()
	r.stays("the first has gone", servers+" shared")
	later.end()
	r.leaves("the other has gone", servers)

	// A server that has ended has no files; with those of the next it is as before.
	if err := os.WriteFile(filepath.Join(r.base, "root/standin/shm"), []byte("cuda.next"), 0o600); err != nil {
		t.Fatal(err)
	}
	r.signal(*s.Daemon, unix.SIGKILL)
	r.ready(s.Epoch)
	r.leaves("another server", "cuda.next")
	r.stays("another server", "cuda.next")
}

// The next keeper doesn't know what came with the server, and leaves it alone.
func TestTheNextKeeperLeavesTheServersFiles(t *testing.T) {
	r := newRig(t)
	r.wrongable()
	r.wrong("shm", true, "cuda.server")
	stop := r.keeper()
	r.want(true)
	r.ready(0)
	one := r.tenant()
	one.do("user 1001")
	one.do("write 1")
	stop()
	r.keeper()
	r.stays("they are there", "1 cuda.server")
	one.end()
	r.leaves("the tenant has gone", "cuda.server")
	r.stays("the tenant has gone", "cuda.server")
}

func TestTenantsCanNotFillTheNodeThroughShm(t *testing.T) {
	r := newRig(t)
	if err := r.dir.makeDirs(card0); err != nil {
		t.Fatal(err)
	}
	var fill error
	for i := 0; i < 2*shmInodes && fill == nil; i++ {
		fill = unix.Mknod(filepath.Join(r.dir.Shm(card0), strconv.Itoa(i)), unix.S_IFREG|0o600, 0)
	}
	if !errors.Is(fill, unix.ENOSPC) {
		t.Errorf("files without end: %v", fill)
	}
}

func TestWhoMayOwnAFile(t *testing.T) {
	for _, c := range []struct {
		tenant, file uint32
		want         bool
	}{
		{0, 7, true}, {7, 0, true}, {7, 7, true}, {7, 8, false},
		{65536, 65543, true}, {65543, 65536, true}, {65543, 65544, false}, {131072, 65543, false},
	} {
		if got := (&tenant{uids: map[uint32]bool{c.tenant: true}}).mayOwn(c.file); got != c.want {
			t.Errorf("%+v: %v", c, got)
		}
	}
	for text, want := range map[string]string{
		"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod0a1b2c3d_1111_2222_3333_0123456789ab.slice/cri-containerd-f00.scope\n": "pod 0a1b2c3d-1111-2222-3333-0123456789ab",
		"12:cpu:/kubepods/besteffort/pod0a1b2c3d-1111-2222-3333-0123456789ab/f00\n":                                                               "pod 0a1b2c3d-1111-2222-3333-0123456789ab",
		"0::/kubepods/pod0123456789abcdef0123456789abcdef/f00\n":                                                                                  "pod 0123456789abcdef0123456789abcdef",
		"0::/user.slice/podman.slice\n": "",
	} {
		if got := podOf(text); got != want {
			t.Errorf("%q: %q, want %q", text, got, want)
		}
	}
	u := users{servers: []Process{{PID: 4711}}}
	for name, want := range map[string]bool{"cuda.shm.0.1267.1": true, "mps-4711": true, "x47111": false, "4712": false} {
		if u.names(name) != want {
			t.Errorf("%q: %v", name, !want)
		}
	}
}
