package lab

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestConfigIsChecked(t *testing.T) {
	dir := t.TempDir()
	for name, test := range map[string]struct {
		config Config
		want   string
	}{
		"no programs":             {Config{Dir: dir}, "programs"},
		"a name with a slash":     {Config{Dir: dir, Programs: dir, Name: "a/b"}, "a/b"},
		"a name that is too long": {Config{Dir: dir, Programs: dir, Name: strings.Repeat("a", 33)}, "32"},
		"a folder in /run":        {Config{Dir: "/run/lab", Programs: dir}, "private"},
		"programs in /var/lib":    {Config{Dir: dir, Programs: "/var/lib/x"}, "private"},
		"a folder with a comma":   {Config{Dir: dir + "/a,b", Programs: dir}, "comma"},
		"a bind that is missing":  {Config{Dir: dir, Programs: dir, Binds: []Bind{{Source: dir + "/none", Target: "/run/x"}}}, "none"},
		"pods outside the range":  {Config{Dir: dir, Programs: dir, Node: Node{Pods: netip.MustParsePrefix("10.1.0.0/24")}}, "10.1.0.0/24"},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := test.config.complete(); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v, want one with %q", err, test.want)
			}
		})
	}
	c, err := Config{Dir: dir, Programs: dir}.complete()
	if err != nil {
		t.Fatal(err)
	}
	if c.Name != "carve" || c.Node.Name != "node1" || c.Node.IP() != "10.88.0.1" || c.Node.Pods.String() != "10.89.0.0/24" {
		t.Errorf("defaults are %+v", c)
	}
}

func TestParseBind(t *testing.T) {
	b, err := ParseBind("/a/b:/run/c/")
	if want := (Bind{Source: "/a/b", Target: "/run/c"}); err != nil || b != want {
		t.Errorf("%+v, %v; want %+v", b, err, want)
	}
	for _, bad := range []string{"", "/a", ":/b", "/a:b", "/a:/b:ro"} {
		if _, err := ParseBind(bad); err == nil {
			t.Errorf("%q is accepted", bad)
		}
	}
}

func TestProcessIsKnownByItsStartTime(t *testing.T) {
	cmd := exec.Command("sleep", "1000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	waited := make(chan error, 1)
	go func() { waited <- cmd.Wait() }()
	t.Cleanup(func() { cmd.Process.Kill() })
	p, err := identify(cmd.Process.Pid)
	if err != nil || !p.alive() {
		t.Fatalf("%+v, %v: not alive", p, err)
	}
	// A later process with the same number.
	other := process{PID: p.PID, StartTicks: p.StartTicks + 1}
	if other.alive() {
		t.Error("a process with another start time passes for this one")
	}
	if err := other.end(t.Context(), unix.SIGKILL); err != nil || !p.alive() {
		t.Errorf("a stranger was killed (%v)", err)
	}
	if err := p.end(t.Context(), unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	<-waited
	if p.alive() {
		t.Error("alive after its end")
	}
	if err := p.end(t.Context(), unix.SIGTERM); err != nil {
		t.Errorf("ending it twice: %v", err)
	}
}

func TestEndGivesUpWithTheContext(t *testing.T) {
	cmd := exec.Command("sh", "-c", "trap '' TERM; echo ready; while :; do sleep 1; done")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer cmd.Wait()
	defer cmd.Process.Kill()
	if _, err := out.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	p, err := identify(cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := within(t.Context(), 200*time.Millisecond)
	defer cancel()
	if err := p.end(ctx, unix.SIGTERM); err == nil || !strings.Contains(err.Error(), "not within 200ms") {
		t.Errorf("error %v, want one that says how long was waited", err)
	}
}

func TestLockIsExclusiveAndSurvivesRemovalOfItsFolder(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "lab")
	unlock, err := lockDir(t.Context(), dir, nil)
	if err != nil {
		t.Fatal(err)
	}
	told := make(chan struct{})
	type result struct {
		unlock func()
		err    error
	}
	second := make(chan result, 1)
	go func() {
		unlock, err := lockDir(t.Context(), dir, func() { close(told) })
		second <- result{unlock, err}
	}()
	<-told
	refused := func() {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		if _, err := lockDir(ctx, dir, nil); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("locked by another, error %v, want the deadline", err)
		}
	}
	refused()
	select {
	case <-second:
		t.Fatal("two hold the lock")
	case <-time.After(300 * time.Millisecond):
	}
	// The folder is another one when the lock becomes free.
	if err := os.Remove(dir); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	unlock()
	r := <-second
	if r.err != nil {
		t.Fatal(r.err)
	}
	refused() // the second holds the folder that is there now
	r.unlock()
}

func TestOpenSaysThatThereIsNoLab(t *testing.T) {
	if _, err := Open(t.TempDir(), nil); !errors.Is(err, ErrNoLab) {
		t.Errorf("error %v, want ErrNoLab", err)
	}
}

func TestDownOfNothingIsNoError(t *testing.T) {
	if err := Down(t.Context(), filepath.Join(t.TempDir(), "none"), nil); err != nil {
		t.Error(err)
	}
}

func TestUpRefusesAFolderThatIsNotALabs(t *testing.T) {
	programs, dir := t.TempDir(), t.TempDir()
	fakePrograms(t, programs)
	precious := filepath.Join(dir, "log")
	if err := os.WriteFile(precious, []byte("x"), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := Up(t.Context(), Config{Dir: dir, Programs: programs}, nil); err == nil || !strings.Contains(err.Error(), "choose another") {
		t.Errorf("up: error %v, want a refusal", err)
	}
	if err := Down(t.Context(), dir, nil); err != nil {
		t.Errorf("down: %v", err)
	}
	if _, err := os.Stat(precious); err != nil {
		t.Errorf("somebody's file is gone: %v", err)
	}
}

// A start that fails, or is killed, at its first process.
func TestHalfAStartIsCleanedUp(t *testing.T) {
	programs, dir := t.TempDir(), filepath.Join(t.TempDir(), "lab")
	fakePrograms(t, programs)
	source, err := exec.LookPath("sleep")
	if err != nil {
		t.Fatal(err)
	}
	// A holder that never was written down: its folder is all that names it.
	config, err := Config{Dir: dir, Programs: programs}.complete()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(config.program("pause"), []byte("#!/bin/sh\nexec "+source+" 1000\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	holder, err := startHolder(config)
	if err != nil {
		t.Fatal(err)
	}
	if err := config.makeCgroups(); err != nil {
		t.Fatal(err)
	}
	if err := Down(t.Context(), dir, nil); err != nil {
		t.Fatal(err)
	}
	if holder.alive() {
		t.Error("the holder still runs")
	}
	if groups := cgroupsOf(t, config); len(groups) > 0 {
		t.Errorf("cgroups are left: %v", groups)
	}

	// Programs that are no programs: Up fails and ends what it began, and says of
	// which component.
	if err := os.WriteFile(config.program("etcd"), []byte("#!/bin/sh\necho out of order; exit 3\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(config.program("kube-apiserver"), []byte("#!/bin/sh\necho cannot work without etcd; exit 3\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(config.program("containerd"), []byte("#!/bin/sh\nexec sleep 1000\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	for range 2 { // the second clears away what the first left
		_, err = Up(t.Context(), Config{Dir: dir, Programs: programs}, nil)
		if err == nil || !strings.Contains(err.Error(), "apiserver") || !strings.Contains(err.Error(), "cannot work without etcd") {
			t.Fatalf("error %v, want the component and the end of its log", err)
		}
		l, err := Open(dir, nil)
		if err != nil {
			t.Fatal(err)
		}
		if s, err := l.Status(); err != nil || s.Running || s.Ready {
			t.Errorf("after a failed start: %+v, %v", s, err)
		}
		if _, err := os.Stat(l.LogFile("apiserver")); err != nil {
			t.Errorf("the log that the message names is gone: %v", err)
		}
	}
	if err := Down(t.Context(), dir, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the folder is left (%v)", err)
	}
}

// cgroupsOf returns the lab's cgroups that exist, in whatever hierarchy.
func cgroupsOf(t *testing.T, c Config) []string {
	t.Helper()
	var all []string
	for _, dir := range []string{cgroupMount, cgroupMount + "/*"} {
		groups, err := filepath.Glob(filepath.Join(dir, c.cgroup()))
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, groups...)
	}
	return all
}

func TestTailShortensAndMarks(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	if err := os.WriteFile(path, []byte("a\nb\n"+strings.Repeat("c", 500)+"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if got, want := tail(path, 2), "  | b\n  | "+strings.Repeat("c", 400)+"…"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}
