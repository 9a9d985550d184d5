package mps

import (
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/carve-gpu/carve/vgpu/gpu"
)

func TestManyUsersAreGivenUpForAReasonOnly(t *testing.T) {
	r := newRig(t)
	r.wrongable()
	r.wrong("once", true)
	r.keeper()
	r.want(true)
	s := r.ready(0)
	if _, err := os.Stat(filepath.Join(r.base, "root/standin/once")); err == nil || !s.ManyUsers {
		t.Errorf("it failed once for another reason: %+v", s)
	}
	// A daemon that says nothing of why is tried without the option, too.
	r.wrong("mute", true)
	r.signal(*s.Daemon, unix.SIGKILL)
	if s = r.ready(s.Epoch); s.ManyUsers {
		t.Errorf("%+v", s)
	}
	// What had been so needn't stay so.
	r.wrong("mute", false)
	r.signal(*s.Daemon, unix.SIGKILL)
	if s = r.ready(s.Epoch); !s.ManyUsers {
		t.Errorf("%+v", s)
	}
}

// node-21: a card that everybody may use isn't given out as one that is held.
func TestCardThatCannotBeHeldTakesNoClients(t *testing.T) {
	r := newRig(t)
	stop := r.keeper()
	r.want(true)
	before := r.ready(0)
	r.mode.deaf(t, true)
	closed := func(s State) bool {
		return !s.Ready && s.GoOn && s.Serves() && strings.Contains(s.Error, "can't be held to one process")
	}
	r.until("the reason", closed)
	// What clients have has stayed, also under the next keeper.
	stop()
	r.keeper()
	r.until("the next keeper", func(s State) bool { return r.dir.KeeperRuns() && closed(s) })
	r.mode.deaf(t, false)
	if after := r.ready(0); after.Epoch != before.Epoch || *after.Daemon != *before.Daemon || after.GoOn {
		t.Errorf("%+v, before %+v", after, before)
	}
	// Nor is an end of their server overlooked; another starts on a card that is held.
	r.mode.deaf(t, true)
	s := r.until("the reason again", closed)
	r.signal(s.Servers[0], unix.SIGKILL)
	r.until("the end of what they had", func(s State) bool { return !s.Serves() && s.Epoch > before.Epoch && s.Daemon == nil })
	r.mode.deaf(t, false)
	r.ready(before.Epoch)
}

// The agent takes the card for another mode between the keeper's look and its deed.
func TestCardThatIsNoLongerWantedIsLeftOpen(t *testing.T) {
	r := newRig(t)
	r.want(true)
	config := configOf(r.base)
	config.Log = slog.New(slog.NewTextHandler(t.Output(), nil))
	var c *card
	told := false
	config.step = func(name string) {
		switch {
		case name == "state-write" && c.state.Exclusive && !told:
			told = true
			r.want(false)
		case name == "mode-set" || name == "daemon-start":
			t.Errorf("%s, though the daemon was no longer wanted", name)
		}
	}
	c = New(config).card(card0)
	for range 2 { // on, and back
		if err := c.tick(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	mode, err := r.mode.ComputeMode(card0)
	if s := r.state(); err != nil || !told || !s.Idle() || s.Epoch != 0 || s.Error != "" || mode != gpu.ComputeDefault {
		t.Errorf("%+v, compute mode %s (%v)", s, mode, err)
	}
}
