package mps

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/carve-gpu/carve/vgpu/gpu"
)

// ComputeModes is what the keeper needs of the driver; nvml.Driver has it.
type ComputeModes interface {
	ComputeMode(uuid string) (gpu.ComputeMode, error)
	SetComputeMode(uuid string, mode gpu.ComputeMode) error
}

// Config is what a Keeper is made of.
type Config struct {
	Dir Dir
	// Root is the driver's, with the programs of MPS in it.
	Root gpu.Root
	// OpenModes loads the driver. It is tried again until it works.
	OpenModes func() (ComputeModes, error)
	Log       *slog.Logger

	// Pace is how long things take; the zero value is Usual.
	Pace Pace
	// step, in tests, is called at each step of a card's life.
	step func(name string)
}

// Pace is how often the keeper looks, and how long it waits.
type Pace struct {
	// Look is between two looks at files and processes, Probe between two questions to
	// a daemon, Answer how long one may take.
	Look, Probe, Answer time.Duration
	// Sweep is between two looks at what tenants left in /dev/shm.
	Sweep time.Duration
	// Begin is how long a daemon may take until its server is there, Quit until it has
	// ended by itself.
	Begin, Quit time.Duration
	// Fault is how long a server may be in fault before it is ended: it comes out of it
	// by itself once the clients concerned have ended.
	Fault time.Duration
	// Again is the pause before the second try to start, doubled up to AgainMost. A
	// daemon that served for AgainMost begins anew.
	Again, AgainMost time.Duration
}

// Usual is the pace on a node.
var Usual = Pace{
	Look: 500 * time.Millisecond, Probe: 5 * time.Second, Answer: 10 * time.Second,
	Sweep: 10 * time.Second,
	Begin: time.Minute, Quit: 10 * time.Second, Fault: 30 * time.Second,
	Again: time.Second, AgainMost: 15 * time.Second,
}

// Keeper supervises the daemons of all cards of a node.
type Keeper struct {
	Config
	mu    sync.Mutex
	modes ComputeModes
}

// New makes a keeper.
func New(c Config) *Keeper {
	if c.Pace == (Pace{}) {
		c.Pace = Usual
	}
	return &Keeper{Config: c}
}

// Run keeps the daemons until ctx ends. They go on without it: the next keeper adopts
// them. A second one on the node waits here for the first to end.
func (k *Keeper) Run(ctx context.Context) error {
	if err := os.MkdirAll(string(k.Dir), 0o755); err != nil {
		return fmt.Errorf("keep MPS daemons: %w", err)
	}
	lock, err := k.lock(ctx)
	if err != nil {
		return err
	}
	defer lock.Close()
	if err := k.Root.MPSPrograms(); err != nil {
		k.Log.Error("MPS can't be served", "error", err)
	}
	k.Log.Info("keeping MPS daemons", "dir", string(k.Dir), "driver-root", k.Root.Path)
	var cards sync.WaitGroup
	defer cards.Wait()
	known := map[string]bool{}
	for {
		uuids, err := k.Dir.Cards()
		if err != nil {
			k.Log.Error("cards can't be listed", "error", err)
		}
		for _, uuid := range uuids {
			if !known[uuid] {
				known[uuid] = true
				cards.Go(func() { k.card(uuid).run(ctx) })
			}
		}
		if !pause(ctx, k.Pace.Look) {
			return nil
		}
	}
}

// lock makes sure that one keeper at a time starts and ends daemons.
func (k *Keeper) lock(ctx context.Context) (*os.File, error) {
	f, err := os.OpenFile(k.Dir.lockFile(), os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, fmt.Errorf("keep MPS daemons: %w", err)
	}
	for said := false; ; said = true {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			// For people, who find its process by that.
			if err = f.Truncate(0); err == nil {
				_, err = fmt.Fprintln(f, os.Getpid())
			}
			if err != nil {
				f.Close()
				return nil, fmt.Errorf("lock %s: %w", f.Name(), err)
			}
			return f, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) {
			f.Close()
			return nil, fmt.Errorf("lock %s: %w", f.Name(), err)
		}
		if !said {
			k.Log.Info("another keeper of this node still runs; waiting for it to end")
		}
		if !pause(ctx, k.Pace.Look) {
			f.Close()
			return nil, fmt.Errorf("lock %s, which another keeper holds: %w", f.Name(), ctx.Err())
		}
	}
}

// driver opens the driver if it isn't open.
func (k *Keeper) driver() (ComputeModes, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.modes == nil {
		m, err := k.OpenModes()
		if err != nil {
			return nil, err
		}
		k.modes = m
	}
	return k.modes, nil
}

func (k *Keeper) card(uuid string) *card {
	return &card{Keeper: k, uuid: uuid, log: k.Log.With("card", uuid)}
}
