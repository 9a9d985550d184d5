package mps

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"time"

	"golang.org/x/sys/unix"
)

// Version is that of the files' format. A reader that finds another one takes the file
// as one that it can't read.
const Version = 1

// Dir is the folder in which the agent and the keeper meet, <run dir>/mps. Each card
// has a folder by its UUID in it:
//
//	wanted.json  by the agent: the card's daemon is wanted; gone: it isn't
//	state.json   by the keeper: what is
//	pipe/        where clients find the daemon, a small tmpfs
//	log/         what daemon and servers have to say, a tmpfs
//	shm/         a tmpfs, the /dev/shm of daemon, servers and clients
type Dir string

// Process is a process for as long as it lives: its pid may be another's later.
type Process struct {
	PID int `json:"pid"`
	// Start is when it began, in clock ticks since boot, as /proc says.
	Start uint64 `json:"start"`
}

// Wanted is the content of wanted.json.
type Wanted struct {
	Version int    `json:"v"`
	Card    string `json:"card"`
}

// State is the content of state.json: what the keeper has made of one card.
type State struct {
	Version int    `json:"v"`
	Card    string `json:"card"`
	// Epoch grows by one each time that what clients had is gone: with each start of a
	// daemon, and of a server in the place of one that ended.
	Epoch uint64 `json:"epoch"`
	// Ready says that clients are served.
	Ready bool `json:"ready"`
	// GoOn says, where Ready is false, that those who are clients are served all the
	// same: nothing of theirs is lost, and no more are let in.
	GoOn bool `json:"goOn,omitempty"`
	// Exclusive says that the card may be held to one process. It is written before
	// that is done, and taken back after it was undone.
	Exclusive bool `json:"exclusive"`
	// ManyUsers says that one server serves clients of all user ids; otherwise those
	// of another one wait until the clients of the first have ended.
	ManyUsers bool `json:"manyUsers,omitempty"`
	// Daemon is nil while none runs, as far as the keeper knows.
	Daemon  *Process  `json:"daemon,omitempty"`
	Servers []Process `json:"servers,omitempty"`
	// Error says in a sentence what is wrong, empty while nothing is.
	Error string `json:"error,omitempty"`
	// Since is when Ready, GoOn or Error last changed.
	Since time.Time `json:"since"`
}

// Idle reports whether the card is free of MPS: no daemon, and not held to one process.
func (s State) Idle() bool { return s.Daemon == nil && len(s.Servers) == 0 && !s.Exclusive }

// Serves reports whether those who are clients are served.
func (s State) Serves() bool { return s.Ready || s.GoOn }

// Card is a card's folder, Pipe and Shm are what clients mount.
func (d Dir) Card(uuid string) string { return filepath.Join(string(d), uuid) }

// Pipe is where clients find the daemon.
func (d Dir) Pipe(uuid string) string { return filepath.Join(d.Card(uuid), "pipe") }

// Shm is what daemon and clients have as /dev/shm.
func (d Dir) Shm(uuid string) string { return filepath.Join(d.Card(uuid), "shm") }

func (d Dir) log(uuid string) string    { return filepath.Join(d.Card(uuid), "log") }
func (d Dir) wanted(uuid string) string { return filepath.Join(d.Card(uuid), "wanted.json") }
func (d Dir) state(uuid string) string  { return filepath.Join(d.Card(uuid), "state.json") }

// uuidForm is what a card's UUID looks like. It becomes part of paths and of a
// daemon's environment.
var uuidForm = regexp.MustCompile(`^GPU-[0-9A-Za-z-]{1,76}$`)

// Cards lists the cards that have a folder.
func (d Dir) Cards() ([]string, error) {
	entries, err := os.ReadDir(string(d))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list MPS cards: %w", err)
	}
	var out []string
	for _, e := range entries {
		if e.IsDir() && uuidForm.MatchString(e.Name()) {
			out = append(out, e.Name())
		}
	}
	return out, nil
}

// Want asks for a card's daemon. It may be repeated.
func (d Dir) Want(uuid string) error {
	if !uuidForm.MatchString(uuid) {
		return fmt.Errorf("want an MPS daemon: %q is no card's UUID", uuid)
	}
	if err := os.MkdirAll(d.Card(uuid), 0o755); err != nil {
		return fmt.Errorf("want an MPS daemon: %w", err)
	}
	if is, err := d.IsWanted(uuid); err == nil && is {
		return nil
	}
	return put(d.wanted(uuid), Wanted{Version, uuid})
}

// Unwant takes that back. It may be repeated.
func (d Dir) Unwant(uuid string) error {
	if err := os.Remove(d.wanted(uuid)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("no longer want an MPS daemon: %w", err)
	}
	return nil
}

// IsWanted reports whether a card's daemon is wanted. A file that can't be read is an
// error: it asks for something, and nobody knows what.
func (d Dir) IsWanted(uuid string) (bool, error) {
	var w Wanted
	err := read(d.wanted(uuid), &w)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return false, nil
	case err != nil:
		return false, err
	case w.Version != Version || w.Card != uuid:
		return false, fmt.Errorf("read %s: version %d for card %q, want %d for this one", d.wanted(uuid), w.Version, w.Card, Version)
	}
	return true, nil
}

// State reads what the keeper has made of a card; a card that it hasn't touched has the
// zero State.
func (d Dir) State(uuid string) (State, error) {
	var s State
	err := read(d.state(uuid), &s)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return State{}, nil
	case err != nil:
		return State{}, err
	case s.Version != Version || s.Card != uuid:
		return State{}, fmt.Errorf("read %s: version %d for card %q, want %d for this one", d.state(uuid), s.Version, s.Card, Version)
	}
	return s, nil
}

// lockFile is locked by the keeper while it lives, and has its pid in it.
func (d Dir) lockFile() string { return filepath.Join(string(d), "keeper.lock") }

// errBusy says that somebody else works on a card.
var errBusy = errors.New("somebody else works on the card")

// lockCard makes sure that one process at a time starts and ends a card's daemon: the
// keeper while it lives, or whoever gives back what a keeper left. What is locked is the
// card's folder, so one card that hangs in the driver holds up no other.
func (d Dir) lockCard(uuid string) (*os.File, error) {
	f, err := os.OpenFile(d.Card(uuid), os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, errBusy
		}
		return nil, fmt.Errorf("lock %s: %w", f.Name(), err)
	}
	return f, nil
}

// KeeperRuns reports whether a keeper lives on this node. The kernel lets go of the lock
// of one that died.
func (d Dir) KeeperRuns() bool {
	f, err := os.OpenFile(d.lockFile(), os.O_RDWR|unix.O_NOFOLLOW, 0)
	if err != nil {
		return false
	}
	defer f.Close()
	return errors.Is(unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB), unix.EWOULDBLOCK)
}

// maxFileBytes bounds what is read of a file.
const maxFileBytes = 64 << 10

func read(path string, into any) error {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return err
	}
	if !st.Mode().IsRegular() || st.Size() > maxFileBytes {
		return fmt.Errorf("read %s: %d bytes, mode %v: want a file of at most %d", path, st.Size(), st.Mode(), maxFileBytes)
	}
	b := make([]byte, st.Size())
	if _, err := f.ReadAt(b, 0); err != nil {
		return fmt.Errorf("read %s: %w", path, err)
	}
	if err := json.Unmarshal(b, into); err != nil {
		return fmt.Errorf("read %s: %w", path, err)
	}
	return nil
}

// put writes a file whole or not at all. It isn't made durable: at a reboot nothing is
// left of what it tells.
func put(path string, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	next := path + ".new"
	if err := os.WriteFile(next, append(b, '\n'), 0o644); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	if err := os.Rename(next, path); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return nil
}
