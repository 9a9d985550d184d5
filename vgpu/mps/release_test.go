package mps

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/carve-gpu/carve/vgpu/gpu"
)

// Release does what a keeper would, and nothing where there is one or the card is wanted.
func TestReleaseWithoutAKeeper(t *testing.T) {
	r := newRig(t)
	release := func() error { return Release(t.Context(), configOf(r.base), card0) }
	r.want(true)
	stop := r.keeper()
	s := r.ready(0)
	if err := release(); !errors.Is(err, ErrKept) {
		t.Errorf("beside a keeper: %v, want %v", err, ErrKept)
	}
	stop()
	if err := release(); err != nil || !s.Daemon.Lives() {
		t.Errorf("the daemon of a card that is wanted was ended (%v)", err)
	}
	r.want(false)
	if err := release(); err != nil {
		t.Fatal(err)
	}
	mode, err := r.mode.ComputeMode(card0)
	if is := r.state(); err != nil || mode != gpu.ComputeDefault || !is.Idle() || is.Epoch != s.Epoch || s.Daemon.Lives() || len(marked(card0)) > 0 {
		t.Errorf("compute mode %s (%v), state %+v, processes %v", mode, err, is, marked(card0))
	}
	if err := release(); err != nil {
		t.Error(err)
	}
	r.want(true)
	r.keeper()
	r.ready(s.Epoch)
}

// Who prohibits a card means it: no daemon is started there, and the mode stays.
func TestACardThatSomebodyElseProhibits(t *testing.T) {
	r := newRig(t)
	if err := r.mode.SetComputeMode(card0, gpu.ComputeProhibited); err != nil {
		t.Fatal(err)
	}
	prohibited := func() {
		t.Helper()
		if mode, err := r.mode.ComputeMode(card0); err != nil || mode != gpu.ComputeProhibited || len(marked(card0)) > 0 {
			t.Errorf("compute mode %s (%v), processes %v", mode, err, marked(card0))
		}
	}
	r.keeper()
	r.want(true)
	r.until("a refusal", func(s State) bool {
		return strings.Contains(s.Error, "compute mode is PROHIBITED, which carve hasn't set")
	})
	prohibited()
	r.want(false)
	r.until("its end", func(s State) bool { return s.Error == "" && s.Idle() })
	prohibited()
	r.want(true)
	r.until("a refusal", func(s State) bool { return s.Error != "" })
	if err := r.mode.SetComputeMode(card0, gpu.ComputeDefault); err != nil {
		t.Fatal(err)
	}
	r.ready(0)
	r.want(false)
	r.idle()
}

// stuckModes is a driver that doesn't come back from a card.
type stuckModes struct {
	modeFile
	asked, goOn chan struct{}
}

func (m stuckModes) ComputeMode(uuid string) (gpu.ComputeMode, error) {
	close(m.asked)
	<-m.goOn
	return m.modeFile.ComputeMode(uuid)
}

// node-21: a card that can't be given back for a while is no keeper, and keeps none from
// the other cards; one that begins meanwhile leaves that card alone.
func TestAKeeperWaitsForACardThatIsBeingGivenBack(t *testing.T) {
	r := newRig(t)
	r.want(true)
	stop := r.keeper()
	s := r.ready(0)
	stop()
	r.want(false)
	m := stuckModes{r.mode, make(chan struct{}), make(chan struct{})}
	goOn := sync.OnceFunc(func() { close(m.goOn) })
	defer goOn()
	c := configOf(r.base)
	c.OpenModes = func() (ComputeModes, error) { return m, nil }
	released := make(chan error, 1)
	go func() { released <- Release(t.Context(), c, card0) }()
	<-m.asked
	if r.dir.KeeperRuns() {
		t.Error("whoever gives a card back is taken for a keeper")
	}
	if err := Release(t.Context(), configOf(r.base), card0); !errors.Is(err, ErrKept) {
		t.Errorf("given back twice at once: %v", err)
	}
	r.want(true)
	var looked atomic.Int64
	k := New(configOf(r.base))
	k.Log = slog.New(slog.NewTextHandler(writer(func(b []byte) {
		if strings.Contains(string(b), errBusy.Error()) {
			looked.Add(1)
		}
	}), nil))
	ctx, cancel := context.WithCancel(t.Context())
	var done sync.WaitGroup
	done.Go(func() { _ = k.Run(ctx) })
	defer func() { cancel(); done.Wait() }()
	r.until("a keeper that waits", func(is State) bool {
		if is.Ready {
			t.Fatal("it began on a card that is being given back")
		}
		return r.dir.KeeperRuns() && looked.Load() > 0
	})
	goOn()
	if err := <-released; err != nil {
		t.Error(err)
	}
	r.ready(s.Epoch)
}

// writer is a function as a place to write to.
type writer func([]byte)

func (w writer) Write(b []byte) (int, error) { w(b); return len(b), nil }
