package nvidiaconfig

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/fsnotify/fsnotify"
	"golang.org/x/sys/unix"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/v1alpha1"
)

// lookEvery is how often the files are looked at without being told of a change: an
// event may be lost with the directory that it was of.
const lookEvery = 10 * time.Second

// goneGrace is how long a file that was in force may be away until it is forgotten. A
// ConfigMap that is made anew, a mount whose links are swapped and a network file system
// are back within that; un-sharing the cards for so long would have the pods of that
// moment placed on whole cards.
const goneGrace = 10 * time.Second

// maxWarnings bounds what is told of one file that has no effect.
const maxWarnings = 50

// Names of the file in a directory whose node has no label for it.
var defaultNames = []string{"default", "config.yaml"}

// FollowerConfig is what a Follower is made of.
type FollowerConfig struct {
	// Path is the file or the directory.
	Path string
	// Keep is a file of the follower's own, for the last good configuration.
	Keep string
	// Cards are the node's as far as they are known.
	Cards func() []Card
	// Set is told what is in force for these cards, once that is known and then with
	// each look.
	Set func(cards []Card, sharing map[string]v1alpha1.Sharing)
	// Changed is told of what people should know: what is in force now, or why a file
	// isn't taken (then fault is true).
	Changed func(fault bool, sentence string)
	Log     *slog.Logger
}

// Follower keeps to a file, or to that file of a directory which the node's label names,
// while both change. A file that can't be meant leaves what the last good one said in
// force, also over a restart. One that is gone is forgotten after a moment.
type Follower struct {
	FollowerConfig
	poke  chan struct{}
	grace time.Duration // goneGrace, but in tests

	mu     sync.Mutex
	label  *string
	status Status
}

// Status is how it stands.
type Status struct {
	// Source is the file in force, empty for none.
	Source string
	// Fault says why the file that should be in force isn't, Warnings what of the one
	// that is has no effect.
	Fault    string
	Warnings []string
}

// NewFollower makes a follower; it does nothing until Run is called.
func NewFollower(c FollowerConfig) *Follower {
	return &Follower{FollowerConfig: c, poke: make(chan struct{}, 1), grace: goneGrace}
}

// SetLabel takes in the node's label, empty where it has none.
func (f *Follower) SetLabel(value string) {
	f.mu.Lock()
	changed := f.label == nil || *f.label != value
	f.label = &value
	f.mu.Unlock()
	if changed {
		f.Look()
	}
}

// Look asks for a look: cards may have changed.
func (f *Follower) Look() {
	select {
	case f.poke <- struct{}{}:
	default:
	}
}

// Status says how it stands.
func (f *Follower) Status() Status {
	f.mu.Lock()
	defer f.mu.Unlock()
	s := f.status
	s.Warnings = slices.Clone(s.Warnings)
	return s
}

// newWatcher is a variable for tests: a node may have no inotify instances left.
var newWatcher = fsnotify.NewWatcher

// Run follows until ctx ends.
func (f *Follower) Run(ctx context.Context) error {
	// Without a watch changes are seen a little later, and all the rest works.
	var events <-chan fsnotify.Event
	var faults <-chan error
	watch := func(string) error { return nil }
	if watcher, err := newWatcher(); err != nil {
		f.Log.Warn("NVIDIA's configuration can't be watched; it is looked at every so often", "every", lookEvery, "error", err)
	} else {
		defer watcher.Close()
		events, faults, watch = watcher.Events, watcher.Errors, watcher.Add
	}
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	run := running{Follower: f}
	for {
		// Again each time: a directory may come later, and a watch is of an inode.
		for _, dir := range []string{f.Path, filepath.Dir(f.Path)} {
			if info, err := os.Stat(dir); err == nil && info.IsDir() {
				if err := watch(dir); err != nil {
					f.Log.Debug("a directory can't be watched; it is looked at all the same", "directory", dir, "error", err)
				}
			}
		}
		due := run.look()
		select {
		case <-ctx.Done():
			return nil
		case <-due:
		case <-f.poke:
		case <-tick.C:
		case <-events:
			settle(ctx, events)
		case err := <-faults:
			f.Log.Debug("watching NVIDIA's configuration", "error", err)
		}
	}
}

// settle waits until a moment passes without further events: a change has several, and a
// file that is being written isn't one yet. Where others write beside it all the time, it
// has an end.
func settle(ctx context.Context, events <-chan fsnotify.Event) {
	const moment, most = 50 * time.Millisecond, time.Second
	t, end := time.NewTimer(moment), time.NewTimer(most)
	defer t.Stop()
	defer end.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-events:
			t.Reset(moment)
		case <-t.C:
			return
		case <-end.C:
			return
		}
	}
}

// kept is what is remembered of the last good file.
type kept struct {
	Source string `json:"source"`
	File   string `json:"file"`
}

// running is what Run knows.
type running struct {
	*Follower
	good     *kept     // in force; nil while nothing is known, or there is none
	gone     time.Time // since when good has no file; zero while it has
	recalled bool
	said     string
	saidOf   map[string]bool // warnings that the log has
}

// look reads what is there and puts it in force, if it can be. Where that is to be looked
// at again at a certain time, due tells when it has come.
func (r *running) look() (due <-chan time.Time) {
	cards := r.Cards()
	if !r.recalled {
		r.recalled = true
		r.recall()
	}
	source, file, err := r.read()
	if errors.Is(err, errNotKnown) {
		// The label of the node isn't known yet: what was in force goes on.
		if r.good != nil {
			r.enforce(r.good, cards, false)
		}
		return nil
	}
	none := err == nil && source == ""
	if err == nil && !none {
		next := &kept{source, string(file)}
		if err = r.enforce(next, cards, true); err == nil {
			r.gone = time.Time{}
			return nil
		}
	}
	gone, left := r.away(none || errors.Is(err, fs.ErrNotExist))
	switch {
	case gone && left > 0:
		due = time.After(left)
		source, err = r.good.Source, errors.New("it is gone")
	case none:
		r.forget(cards)
		return nil
	case gone:
		r.drop()
	}
	fault := err.Error()
	if source != "" {
		fault = source + ": " + fault
	}
	fault = strings.ReplaceAll(fault, "\n", "; ")
	stays := "no card is given in replicas"
	if r.good != nil {
		if keptErr := r.enforce(r.good, cards, false); keptErr == nil {
			stays = "what it said before stays in force"
			if r.good.Source != source {
				stays = "what " + r.good.Source + " said stays in force"
			}
			if due != nil {
				stays += fmt.Sprintf(" for %v, should it come back", r.grace)
			}
		} else {
			r.Set(cards, nil)
		}
	} else {
		r.Set(cards, nil)
	}
	r.mu.Lock()
	r.status.Fault = fault
	r.mu.Unlock()
	r.say(true, fmt.Sprintf("NVIDIA's configuration isn't taken: %s; %s", fault, stays))
	return due
}

// away reports whether the file in force is gone, where the one that is meant isn't there,
// and for how long that is borne yet.
func (r *running) away(absent bool) (gone bool, left time.Duration) {
	if absent && r.good != nil {
		_, err := os.Stat(r.good.Source)
		gone = errors.Is(err, fs.ErrNotExist)
	}
	if !gone {
		r.gone = time.Time{}
		return false, 0
	}
	if r.gone.IsZero() {
		r.gone = time.Now()
	}
	return true, r.grace - time.Since(r.gone)
}

// enforce parses a file and puts it in force for the cards. A new one is remembered.
func (r *running) enforce(k *kept, cards []Card, fresh bool) error {
	c, err := Parse([]byte(k.File))
	if err != nil {
		return err
	}
	sharing, warnings, err := c.Apply(cards)
	if err != nil {
		return err
	}
	warnings = append(slices.Clone(c.Warnings), warnings...)
	if more := len(warnings) - maxWarnings; more > 0 {
		warnings = append(warnings[:maxWarnings], fmt.Sprintf("and %d more", more))
	}
	if len(cards) > 0 { // else nothing was tried on them: what was good stays so
		if fresh && (r.good == nil || *r.good != *k) {
			r.remember(k)
		}
		r.good = k
	}
	r.Set(cards, sharing)
	r.mu.Lock()
	r.status = Status{Source: k.Source, Warnings: warnings}
	r.mu.Unlock()
	if fresh && len(cards) > 0 {
		r.warn(k.Source, warnings)
		r.say(false, fmt.Sprintf("NVIDIA's configuration %s is in force: %s%s", k.Source, summary(sharing, cards), idle(warnings)))
	}
	return nil
}

// forget is for when there is no file, and none is asked for.
func (r *running) forget(cards []Card) {
	had := r.good != nil
	r.drop()
	r.Set(cards, nil)
	r.mu.Lock()
	r.status = Status{}
	r.mu.Unlock()
	if had {
		r.say(false, "NVIDIA's configuration is gone: no card is given in replicas")
	}
}

// drop forgets the last good file, for the next start, too.
func (r *running) drop() {
	r.good, r.gone = nil, time.Time{}
	if err := os.Remove(r.Keep); err != nil && !errors.Is(err, fs.ErrNotExist) {
		r.Log.Warn("the last configuration of NVIDIA's can't be forgotten", "error", err)
	}
}

func (r *running) say(fault bool, sentence string) {
	if r.said == sentence {
		return
	}
	r.said = sentence
	if fault {
		r.Log.Error(sentence)
	} else {
		r.Log.Info(sentence)
	}
	r.Changed(fault, sentence)
}

func (r *running) warn(source string, warnings []string) {
	if r.saidOf == nil {
		r.saidOf = map[string]bool{}
	}
	for _, w := range warnings {
		if w = source + ": " + w; !r.saidOf[w] {
			r.saidOf[w] = true
			r.Log.Warn("NVIDIA's configuration: "+w, "effect", "none")
		}
	}
}

// errNotKnown says that it isn't known yet which file is meant.
var errNotKnown = errors.New("the node's label isn't known yet")

// missing says in a sentence that the file that is meant isn't there.
type missing string

func (m missing) Error() string        { return string(m) }
func (m missing) Is(target error) bool { return target == fs.ErrNotExist }

// read finds the file that is meant and reads it. Source is empty where there is none
// and none has to be.
func (r *running) read() (source string, file []byte, err error) {
	info, err := os.Stat(r.Path)
	switch {
	case err != nil:
		return r.Path, nil, plain(err)
	case !info.IsDir():
		file, err = readFile(r.Path)
		return r.Path, file, err
	}
	r.mu.Lock()
	label := r.label
	r.mu.Unlock()
	if label == nil {
		return "", nil, errNotKnown
	}
	names, err := candidates(r.Path)
	if err != nil {
		return r.Path, nil, plain(err)
	}
	if name := *label; name != "" {
		source = filepath.Join(r.Path, filepath.Base(name))
		if !slices.Contains(names, name) {
			return source, nil, missing(fmt.Sprintf("label %s of the node says %q, and there is no such file; there are: %s", api.LabelNVIDIAConfig, name, orNone(names)))
		}
		file, err = readFile(source)
		return source, file, err
	}
	choice := slices.IndexFunc(names, func(n string) bool { return slices.Contains(defaultNames, n) })
	switch {
	case slices.Contains(names, defaultNames[0]):
		source = filepath.Join(r.Path, defaultNames[0])
	case choice >= 0:
		source = filepath.Join(r.Path, names[choice])
	case len(names) == 1:
		source = filepath.Join(r.Path, names[0])
	default:
		return "", nil, nil // several, for nodes that have a label, or none
	}
	file, err = readFile(source)
	return source, file, err
}

// candidates lists the files of a directory. Those of a mounted ConfigMap are links into
// a hidden one.
func candidates(dir string) ([]string, error) {
	all, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var out []string
	for _, e := range all {
		if info, err := os.Stat(filepath.Join(dir, e.Name())); err == nil && info.Mode().IsRegular() && !strings.HasPrefix(e.Name(), ".") {
			out = append(out, e.Name())
		}
	}
	return out, nil
}

// readFile reads a file of at most maxBytes, and nothing that isn't one: a pipe that
// nobody writes to would hold whoever opens it for ever.
func readFile(path string) ([]byte, error) {
	// Before it is opened, since that alone can do something to a device.
	info, err := os.Stat(path)
	if err == nil {
		err = regular(info)
	}
	if err != nil {
		return nil, plain(err)
	}
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, plain(err)
	}
	defer f.Close()
	if info, err = f.Stat(); err == nil {
		err = regular(info)
	}
	if err != nil {
		return nil, plain(err)
	}
	b, err := io.ReadAll(io.LimitReader(f, maxBytes+1))
	if err != nil {
		return nil, plain(err)
	}
	if len(b) > maxBytes {
		return nil, errTooLarge
	}
	return b, nil
}

// regular says what is wrong with something that isn't a file.
func regular(info fs.FileInfo) error {
	what := "a device"
	switch mode := info.Mode(); {
	case mode.IsRegular():
		return nil
	case mode.IsDir():
		what = "a directory"
	case mode&fs.ModeNamedPipe != 0:
		what = "a named pipe"
	case mode&fs.ModeSocket != 0:
		what = "a socket"
	}
	return fmt.Errorf("%s is in the file's place, and only a regular file is read: put one there, or name another path (--nvidia-config)", what)
}

// plain is an error without the path, which stands before it.
func plain(err error) error {
	if p := (*fs.PathError)(nil); errors.As(err, &p) {
		return p.Err
	}
	return err
}

func orNone(names []string) string {
	if len(names) == 0 {
		return "none"
	}
	return strings.Join(names, ", ")
}

// recall takes over the last good file of an earlier process.
func (r *running) recall() {
	b, err := os.ReadFile(r.Keep)
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	var k kept
	if err == nil {
		err = json.Unmarshal(b, &k)
	}
	if err == nil {
		_, err = Parse([]byte(k.File))
	}
	if err != nil {
		r.Log.Warn("the last configuration of NVIDIA's can't be recalled", "file", r.Keep, "error", err)
		return
	}
	r.good = &k
}

// remember keeps a good file for the next start. Losing it does no harm while the file
// itself is good.
func (r *running) remember(k *kept) {
	b, err := json.Marshal(k)
	if err == nil {
		tmp := r.Keep + ".new"
		if err = os.WriteFile(tmp, b, 0o600); err == nil {
			err = os.Rename(tmp, r.Keep)
		}
	}
	if err != nil {
		r.Log.Warn("NVIDIA's configuration can't be kept for the next start", "file", r.Keep, "error", err)
	}
}

// idle names what of a file has no effect: a misspelt key is seen where the outcome is.
func idle(warnings []string) string {
	const most = 3
	if len(warnings) == 0 {
		return ""
	}
	text := "; without effect: " + strings.Join(warnings[:min(most, len(warnings))], "; ")
	if more := len(warnings) - most; more > 0 {
		text += fmt.Sprintf(" (and %d more in the agent's log)", more)
	}
	return text
}

// summary names the cards by what they are given as.
func summary(sharing map[string]v1alpha1.Sharing, cards []Card) string {
	var parts []string
	for _, c := range cards {
		if s, ok := sharing[c.UUID]; ok {
			parts = append(parts, fmt.Sprintf("card %d in %d replicas of mode %s", c.Index, s.Replicas, s.Mode))
		}
	}
	if len(parts) == 0 {
		return "it gives no card in replicas"
	}
	return strings.Join(parts, ", ")
}
