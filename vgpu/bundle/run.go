package bundle

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/carve-gpu/carve/vgpu/compute/loop"
	"github.com/carve-gpu/carve/vgpu/gpu"
	"github.com/carve-gpu/carve/vgpu/gpu/nvml"
	"github.com/carve-gpu/carve/vgpu/region"
)

// Config says what is run, and on what.
type Config struct {
	// Dir is the bundle's folder: bin/gpuprobe, lib and python are in it.
	Dir string
	// Root is the driver's root.
	Root gpu.Root
	// Card is the driver's index of the card that is used; programs see that one only.
	Card int
	// Self is this program's file, which must hand "inside" to Inside.
	Self string
	// Env is the environment that programs get.
	Env []string
	// Way is how the front gets in; "" tries each.
	Way Way
	// Parts are those that run, by name; all if there are none.
	Parts []string
	// Quick runs less of each, and shorter.
	Quick bool
	// Band is how many points of the card a share of compute may be off; 0: 2.
	Band float64
	// Python is the interpreter for PyTorch; "" is python3.
	Python string
	// Limit bounds the whole run; 0: 8 minutes and 30 seconds.
	Limit time.Duration
	// Progress gets each row as it is there.
	Progress io.Writer
	Log      *slog.Logger
}

const usualLimit = 8*time.Minute + 30*time.Second

// ErrNoCard says that there is nothing to run on.
var ErrNoCard = errors.New("no card that can be used")

// part is what a Config's Parts name.
type part struct {
	name string
	run  func(*runner) error
	// limit bounds it; parts behind it are still to have their time.
	limit time.Duration
}

// parts in the order in which they run: what later ones build on first, what takes
// longest last.
var parts = []part{
	{"exports", (*runner).exports, time.Minute},
	{"memory", (*runner).memory, 100 * time.Second},
	{"costs", (*runner).costs, 45 * time.Second},
	{"compute", (*runner).computeAlone, 150 * time.Second},
	{"contention", (*runner).contention, 90 * time.Second},
	{"driver's word", (*runner).driversWord, time.Minute},
	{"slices", (*runner).slices, 20 * time.Second},
	{"mps", (*runner).mps, time.Minute},
	{"death", (*runner).death, 20 * time.Second},
	{"pytorch", (*runner).pytorch, 210 * time.Second},
	{"conformance", (*runner).conformance, 100 * time.Second},
}

// Parts are the names of all parts.
func Parts() []string {
	var names []string
	for _, p := range parts {
		names = append(names, p.name)
	}
	return names
}

// runner is one run.
type runner struct {
	Config
	ctx      context.Context
	whole    context.Context
	work     string
	door     *nvml.Driver
	card     gpu.Card
	software bool
	libDir   string
	// driver are the driver's own files by the names that programs open.
	driver map[string]string
	way    Way
	shares int
	report *Report
	part   string

	// selfVisible says that the driver lists our processes under our pids; blind that it
	// doesn't list them at all.
	selfVisible, blind bool
	// contextBytes is what a bare context costs, by the driver's figure; 0: not known.
	contextBytes uint64
	// iterationPS is how long an iteration of the spin kernel lasts on the whole card,
	// full what a program that has the card alone gets by that measure, in percent.
	iterationPS int64
	full        float64

	mu       sync.Mutex
	children map[*child]bool
	aliases  map[int]int
	divided  []loop.Share
	owners   map[int]loop.Key // by our pid
}

// Run tries all that cfg says. The report is there, as far as it came, also with an
// error. Rows that fail are no error.
func Run(ctx context.Context, cfg Config) (*Report, error) {
	if cfg.Limit == 0 {
		cfg.Limit = usualLimit
	}
	if cfg.Band == 0 {
		cfg.Band = 2
	}
	if cfg.Python == "" {
		cfg.Python = "python3"
	}
	ctx, cancel := context.WithTimeout(ctx, cfg.Limit)
	defer cancel()
	began := time.Now()
	r := &runner{
		Config: cfg, ctx: ctx, whole: ctx, children: map[*child]bool{}, aliases: map[int]int{}, owners: map[int]loop.Key{},
		driver: map[string]string{}, report: &Report{Date: began, Machine: map[string]string{}},
	}
	err := r.open()
	if err == nil {
		var clean func() error
		clean, err = r.prepare()
		if err == nil {
			r.runParts()
		}
		if err == nil && r.whole.Err() != nil {
			err = fmt.Errorf("not everything was tried: %s", r.whyOver())
		}
		r.endAll()
		err = errors.Join(err, clean())
	}
	r.report.Seconds = time.Since(began).Seconds()
	return r.report, err
}

// open finds driver and card.
func (r *runner) open() error {
	var err error
	if r.software, err = r.Root.Software(); err != nil {
		return err
	}
	r.report.Software = r.software
	files, err := r.Root.DriverFiles()
	if err != nil {
		return fmt.Errorf("%w: %w", ErrNoCard, err)
	}
	r.libDir = files.LibDir
	for name, of := range map[string]string{cudaName: gpu.LibraryCUDA, nvmlName: gpu.LibraryNVML} {
		l, _ := files.Library(of)
		if r.driver[name], err = filepath.EvalSymlinks(l.Source); err != nil {
			return err
		}
	}
	if r.door, err = nvml.Open(r.Root, r.Log); err != nil {
		return fmt.Errorf("%w: %w", ErrNoCard, err)
	}
	inventory, err := r.door.Inventory()
	if err != nil {
		return fmt.Errorf("%w: %w", ErrNoCard, err)
	}
	i := slices.IndexFunc(inventory.Cards, func(c gpu.Card) bool { return c.Index == r.Card })
	if i < 0 {
		return fmt.Errorf("%w: the driver lists %d cards and no card %d", ErrNoCard, len(inventory.Cards), r.Card)
	}
	r.card = inventory.Cards[i]
	if r.card.Fault != "" {
		return fmt.Errorf("%w: card %d: %s", ErrNoCard, r.Card, r.card.Fault)
	}
	if r.card.MIGMode == "enabled" {
		return fmt.Errorf("%w: card %d is in MIG mode, in which its parts are shared, not the card", ErrNoCard, r.Card)
	}
	r.facts(inventory)
	return nil
}

func (r *runner) facts(inventory gpu.Inventory) {
	m := r.report.Machine
	m["card"] = r.card.Model
	if r.software {
		m["card"] += ", software GPU"
	}
	m["driver"] = inventory.DriverVersion
	m["memory"] = fmt.Sprintf("%s, of them %s the driver's; MIG %s, persistence %s",
		bytesText(r.card.MemoryBytes), bytesText(r.card.ReservedBytes), orNone(r.card.MIGMode), orNone(r.card.Persistence))
	m["processors"] = fmt.Sprint(runtime.NumCPU())
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		m["kernel"] = unix.ByteSliceToString(u.Release[:])
	}
	if out, err := exec.CommandContext(r.ctx, "getconf", "GNU_LIBC_VERSION").Output(); err == nil {
		m["glibc"] = strings.TrimPrefix(strings.TrimSpace(string(out)), "glibc ")
	}
}

func orNone(s string) string {
	if s == "" {
		return "not told"
	}
	return s
}

// prepare makes the place to work in and finds the way to put the front in. clean
// undoes it, and is never nil.
func (r *runner) prepare() (clean func() error, err error) {
	undo := []func() error{}
	clean = func() error {
		var all error
		for _, u := range slices.Backward(undo) {
			all = errors.Join(all, u())
		}
		return all
	}
	if removed := sweep(); len(removed) > 0 {
		r.Log.Info("folders of runs that were killed are removed", "folders", removed)
	}
	work, err := newWorkspace()
	if err != nil {
		return clean, err
	}
	r.work = work.path
	undo = append(undo, work.remove)
	r.askLoader()
	r.lookAtVisibility()
	var faults []string
	for _, way := range []Way{WayNamespace, WayRelocated} {
		if r.Way != "" && r.Way != way {
			continue
		}
		r.way = way
		if way == WayNamespace {
			leave, err := holdCarveDir()
			if err != nil {
				faults = append(faults, fmt.Sprintf("%s: %v", way, err))
				continue
			}
			undo = append(undo, leave)
		}
		if err := r.tryWay(); err != nil {
			faults = append(faults, fmt.Sprintf("%s: %v", way, err))
			continue
		}
		said := string(way)
		if len(faults) > 0 {
			said += " (" + strings.Join(faults, "; ") + ")"
		}
		r.report.Machine["way"] = said
		return clean, nil
	}
	return clean, fmt.Errorf("the front can't be put in the driver's place: %s", strings.Join(faults, "; "))
}

// askLoader takes the files that programs really open for the driver's: images bring
// newer ones along, which come first.
func (r *runner) askLoader() {
	lines, err := r.lines(nil, 30*time.Second, probe, "paths")
	if err != nil {
		return
	}
	for _, l := range lines {
		if l.text("step") != "path" || l.text("way") != "name" || !l.bool("ok") {
			continue
		}
		name := cudaName
		if l.text("library") != "libcuda" {
			name = nvmlName
		}
		file, err := filepath.EvalSymlinks(l.text("file"))
		if err != nil || file == r.driver[name] {
			continue
		}
		r.driver[name] = file
		r.report.Machine["library"] = strings.TrimSpace(r.report.Machine["library"] + " programs open " + file)
	}
}

// lookAtVisibility finds out what the driver tells of processes, and what a context
// costs.
func (r *runner) lookAtVisibility() {
	before := r.listedPIDs()
	s, err := r.door.Occupancy(r.card.UUID)
	if err != nil {
		return
	}
	r.report.Machine["beside"] = fmt.Sprintf("%d other programs on the card, %s in use", len(before), bytesText(s.UsedBytes))
	c, err := r.start(nil, 30*time.Second, probe, "alloc", "2MiB", "--hold")
	if err != nil {
		return
	}
	defer c.kill()
	if _, err := c.next("hold"); err != nil {
		r.Log.Warn("a program without the front can't use the card", "error", err)
		return
	}
	r.learnPID(before, c.pid)
	if used, ok := r.processBytes(c.pid); ok {
		r.selfVisible = len(r.aliases) == 0
		r.contextBytes = used - 2<<20
		return
	}
	r.blind = true
	if now, err := r.door.Occupancy(r.card.UUID); err == nil && now.UsedBytes > s.UsedBytes+2<<20 {
		r.contextBytes = now.UsedBytes - s.UsedBytes - 2<<20
	}
}

// tryWay sees whether a program has a share in the way that is set.
func (r *runner) tryWay() error {
	s, err := r.newShare(terms{memory: 3000 * mib})
	if err != nil {
		return err
	}
	lines, err := r.lines(s, 30*time.Second, probe, "info")
	if err != nil {
		return err
	}
	for _, l := range lines {
		switch {
		case l.text("step") == "card" && l.bool("ok"):
			if total := l.int("cudaTotalBytes"); total != 3000*mib {
				return fmt.Errorf("a program sees %s instead of its share", bytesText(uint64(total)))
			}
			return nil
		case l.has("ok") && !l.bool("ok"):
			return fmt.Errorf("%s: %s", l.text("step"), l.fault())
		case l.text("step") == "text":
			return errors.New(l.text("text"))
		}
	}
	return errors.New("a program saw no card")
}

// holdCarveDir makes sure that carveDir is there to be mounted on. The last of
// several runs removes it if it wasn't there.
func holdCarveDir() (leave func() error, err error) {
	var dir *os.File
	var made error
	for try := 0; ; try++ {
		if made = os.Mkdir(carveDir, 0o755); made != nil && !errors.Is(made, os.ErrExist) {
			return nil, made
		}
		dir, err = shareCarveDir()
		if err == nil {
			break
		}
		// Another run that ends is removing it just now.
		if try == 100 || !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.EWOULDBLOCK) {
			return nil, err
		}
		time.Sleep(10 * time.Millisecond)
	}
	return func() error {
		defer dir.Close()
		if unix.Flock(int(dir.Fd()), unix.LOCK_EX|unix.LOCK_NB) != nil {
			return nil // another run has it
		}
		// Only an empty one goes: on a node of carve's there are files in it.
		if err := unix.Rmdir(carveDir); err != nil && made == nil {
			return fmt.Errorf("remove %s: %w", carveDir, err)
		}
		return nil
	}, nil
}

// shareCarveDir holds carveDir as one of several runs that use it.
func shareCarveDir() (*os.File, error) {
	dir, err := os.Open(carveDir)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(dir.Fd()), unix.LOCK_SH|unix.LOCK_NB); err != nil {
		dir.Close()
		return nil, fmt.Errorf("lock %s: %w", carveDir, err)
	}
	// It may have been removed before it was locked.
	mine, err := dir.Stat()
	if err == nil {
		var now os.FileInfo
		if now, err = os.Stat(carveDir); err == nil && !os.SameFile(mine, now) {
			err = fmt.Errorf("%s: %w", carveDir, fs.ErrNotExist)
		}
	}
	if err != nil {
		dir.Close()
		return nil, err
	}
	return dir, nil
}

func (r *runner) runParts() {
	for _, p := range parts {
		if len(r.Parts) > 0 && !slices.Contains(r.Parts, p.name) {
			continue
		}
		r.part = p.name
		if r.Progress != nil {
			fmt.Fprintf(r.Progress, "\n%s\n", p.name)
		}
		if r.whole.Err() != nil {
			r.skip("everything", r.whyOver())
			continue
		}
		ctx, cancel := context.WithTimeout(r.whole, p.limit)
		r.ctx = ctx
		err := p.run(r)
		late := ctx.Err() != nil
		cancel()
		r.endAll()
		r.ctx = r.whole
		switch {
		case late && r.whole.Err() != nil:
			r.skip("what is left of this part", r.whyOver())
		case late:
			// Something hangs, or is far slower than anybody thought.
			r.row(Row{What: "ran to its end", Expected: fmt.Sprintf("within %v", p.limit), Observed: "it took longer", Verdict: Fails})
		case err != nil:
			// A program that doesn't run is no skipped row: nothing is known then.
			r.row(Row{What: "ran to its end", Expected: "yes", Observed: err.Error(), Verdict: Fails})
		}
	}
}

// whyOver says why a run has ended.
func (r *runner) whyOver() string {
	if errors.Is(r.whole.Err(), context.DeadlineExceeded) {
		return fmt.Sprintf("the run's time of %v was over", r.Limit)
	}
	return "the run was ended"
}

// row adds a row of the part that runs.
func (r *runner) row(row Row) {
	row.Part = r.part
	r.report.Rows = append(r.report.Rows, row)
	if r.Progress != nil {
		row.print(r.Progress)
	}
}

func (r *runner) skip(what, why string) { r.row(Row{What: what, Observed: why, Verdict: Skipped}) }

func (r *runner) note(what, observed string, values map[string]float64) {
	r.row(Row{What: what, Observed: observed, Verdict: Noted, Values: values})
}

// must adds a row that holds or fails.
func (r *runner) must(good bool, what, expected, observed string, values map[string]float64) {
	v := Fails
	if good {
		v = Holds
	}
	r.row(Row{What: what, Expected: expected, Observed: observed, Verdict: v, Values: values})
}

// pick is the first in a quick run and the second in a whole one.
func pick[T any](r *runner, quick, whole T) T {
	if r.Quick {
		return quick
	}
	return whole
}

const mib = 1 << 20

func bytesText(b uint64) string {
	if b%mib == 0 || b > 100*mib {
		return fmt.Sprintf("%d MiB", b/mib)
	}
	return fmt.Sprintf("%d B", b)
}

// divide runs the agent's loop over the shares that are added to it, until stop.
func (r *runner) divide() (stop func()) {
	ctx, cancel := context.WithCancel(r.ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		loop.New(loop.Config{
			Clock: loop.Monotonic{}, Log: r.Log,
			Shares: func() []loop.Share {
				r.mu.Lock()
				defer r.mu.Unlock()
				return slices.Clone(r.divided)
			},
			Driver: func() loop.Driver {
				if r.blind {
					return blindDriver{}
				}
				return r.door
			},
			Process: func(pid int) (region.Process, loop.Key, bool) {
				own := r.own(pid)
				r.mu.Lock()
				key, known := r.owners[own]
				r.mu.Unlock()
				if !known {
					return region.Process{}, key, false
				}
				p, err := region.ReadProcess("/proc", own)
				return p, key, err == nil
			},
		}).Run(ctx)
	}()
	return func() {
		cancel()
		<-done
		r.mu.Lock()
		r.divided = nil
		clear(r.owners)
		r.mu.Unlock()
	}
}

// join lets a share be divided; owner tells whose a process of it is.
func (r *runner) join(s *share) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.divided = append(r.divided, loop.Share{
		Key: s.key(), Limits: s.limits, Usage: s.usage,
		Cards: []loop.CardShare{{UUID: r.card.UUID, SharePPM: s.terms.ppm, Elastic: s.terms.elastic}},
	})
}

func (r *runner) leave(s *share) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.divided = slices.DeleteFunc(r.divided, func(d loop.Share) bool { return d.Key == s.key() })
}

func (r *runner) owner(pid int, s *share) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.owners[pid] = s.key()
}

func (s *share) key() loop.Key { return loop.Key{UID: s.name, Container: "app"} }

// blindDriver says nothing, since what the driver says can't be told apart: figures of
// nobody would be taken for idle programs.
type blindDriver struct{}

func (blindDriver) Utilization(string, uint64) (gpu.Utilization, error) {
	return gpu.Utilization{}, fmt.Errorf("the driver doesn't list our processes: %w", gpu.ErrNotSupported)
}
