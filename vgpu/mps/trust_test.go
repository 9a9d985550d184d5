package mps

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// Tenants that are root can write to their card's pipe folder, and answer in the place of
// its daemon. These tests are about what the keeper makes of that.

// other is a process with the name of MPS's, of another card.
func (r *rig) other() Process {
	r.t.Helper()
	path := filepath.Join(r.t.TempDir(), filepath.Base(serverName))
	if err := os.Symlink(standin, path); err != nil {
		r.t.Fatal(err)
	}
	cmd := exec.Command(path)
	cmd.Env = []string{cardMark + "=GPU-of-another"}
	if err := cmd.Start(); err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	p, err := ProcessOf(cmd.Process.Pid)
	if err != nil || !p.isOurs() {
		r.t.Fatalf("%v doesn't pass for one of MPS: %v", p, err)
	}
	return p
}

const serverName = "nvidia-cuda-mps-server"

func TestProcessesOfOtherCardsAreNotTakenForServers(t *testing.T) {
	r := newRig(t)
	r.wrongable()
	victim := r.other()
	r.wrong("others", true, strconv.Itoa(victim.PID), strconv.Itoa(os.Getpid()), "1", "-1", "")
	r.keeper()
	r.want(true)
	s := r.ready(0)
	if len(s.Servers) != 1 || !s.Servers[0].isChildOf(*s.Daemon) || !s.Servers[0].hasMark(card0) {
		t.Errorf("%+v", s)
	}
	// Each way in which what is taken for a server is ended.
	r.signal(*s.Daemon, unix.SIGKILL)
	r.ready(s.Epoch)
	r.want(false)
	r.idle()
	if !victim.Lives() {
		t.Error("a process of another card's daemon was ended")
	}
}

func TestLongAnswersAreCut(t *testing.T) {
	r := newRig(t)
	r.wrongable()
	r.keeper()
	r.want(true)
	is := r.ready(0)
	r.wrong("flood", true)
	if text, err := status(t.Context(), *is.Daemon, is.Servers[0]); err != nil || len(text) > answerBytes || len(text) < answerBytes/2 {
		t.Errorf("%d bytes of the answer are kept (%v)", len(text), err)
	}
	// state.json stays one that can be read: state fails otherwise.
	s := r.until("the fault to be told", func(s State) bool { return !s.Ready && strings.Contains(s.Error, "FAULT") })
	if len(s.Error) > 1000 {
		t.Errorf("%d bytes are told", len(s.Error))
	}
	r.wrong("flood", false)
	r.ready(0)
}

func TestPipeFolderIsBoundedAndFollowsNoLink(t *testing.T) {
	r := newRig(t)
	r.wrongable()
	r.keeper()
	r.want(true)
	before := r.ready(0)
	pipe := r.dir.Pipe(card0)
	var fill error
	for i := 0; i < 1<<20 && fill == nil; i++ {
		fill = os.Mkdir(filepath.Join(pipe, strconv.Itoa(i)), 0o755)
	}
	if !errors.Is(fill, unix.ENOSPC) {
		t.Errorf("folders without end: %v", fill)
	}
	if err := os.Remove(filepath.Join(pipe, "0")); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(pipe, "0"), make([]byte, 2*pipeBytes), 0o644); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("bytes without end: %v", err)
	}
	// Through the daemon's root, as the daemon goes.
	if err := os.Remove(filepath.Join(pipe, "0")); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/standin", filepath.Join(pipe, "0")); err != nil {
		t.Fatal(err)
	}
	at := fmt.Sprintf("/proc/%d/root%s/0/planted", before.Daemon.PID, ContainerPipe)
	if err := os.WriteFile(at, nil, 0o644); !errors.Is(err, unix.ELOOP) {
		t.Errorf("a tenant's link is followed: %v", err)
	}
	// The next daemon finds it empty, and in the same place.
	r.signal(*before.Daemon, unix.SIGKILL)
	r.ready(before.Epoch)
	entries, err := os.ReadDir(pipe)
	if err != nil || len(entries) != 1 || entries[0].Name() != "control" {
		t.Errorf("%v, %v", entries, err)
	}
	r.want(false)
	r.idle()
}

// What can't be removed keeps the daemon down only in a place that it needs.
func TestWhatStaysInThePipeFolder(t *testing.T) {
	r := newRig(t)
	if err := r.dir.makeDirs(card0); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"x", "control"} {
		// A mount of this namespace can't be removed.
		at := filepath.Join(r.dir.Pipe(card0), name)
		err := os.Mkdir(at, 0o755)
		if err == nil {
			err = unix.Mount("carve-test", at, "tmpfs", 0, "")
		}
		if err != nil {
			t.Fatal(err)
		}
		err = r.dir.makeDirs(card0)
		if needs := name == "control"; needs != (err != nil) {
			t.Errorf("%s stays: %v", name, err)
		}
		if err := unix.Unmount(at, unix.MNT_DETACH); err != nil {
			t.Fatal(err)
		}
	}
	if err := r.dir.makeDirs(card0); err != nil {
		t.Error(err)
	}
}

func TestOnlyTheDaemonThatWasMeantIsAsked(t *testing.T) {
	r := newRig(t)
	r.keeper()
	r.want(true)
	is := *r.ready(0).Daemon
	if text, err := control(t.Context(), is, "get_server_list"); err != nil || text == "" {
		t.Errorf("%q, %v", text, err)
	}
	// Its pid, of another process.
	is.Start++
	if text, err := control(t.Context(), is, "get_server_list"); err == nil || !strings.Contains(err.Error(), "has ended") {
		t.Errorf("another process answered %q (%v)", text, err)
	}
}
