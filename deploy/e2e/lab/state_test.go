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
	second := make(chan error, 1)
	go func() {
		unlock, err := lockDir(t.Context(), dir, func() { close(told) })
		if err == nil {
			// What it holds must be the folder that is there now.
			if _, err = os.Stat(dir); err == nil {
				unlock()
			}
		}
		second <- err
	}()
	<-told
	select {
	case <-second:
		t.Fatal("two hold the lock")
	case <-time.After(300 * time.Millisecond):
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := lockDir(ctx, dir, nil); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("error %v, want the deadline", err)
	}
	if err := os.Remove(dir); err != nil {
		t.Fatal(err)
	}
	unlock()
	if err := <-second; err != nil {
		t.Fatal(err)
	}
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

func TestTailShortensAndMarks(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	if err := os.WriteFile(path, []byte("a\nb\n"+strings.Repeat("c", 500)+"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if got, want := tail(path, 2), "  | b\n  | "+strings.Repeat("c", 400)+"…"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}
