package bundle

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/carve-gpu/carve/vgpu/region"
	"github.com/carve-gpu/carve/vgpu/twin"
)

// Way is how the front comes to stand in the driver's place.
type Way string

// The ways.
const (
	// WayNamespace is as in a container: mounts, in a namespace of each program's own.
	WayNamespace Way = "namespace"
	// WayRelocated needs no right at all: a copy of the library in which carveDir is
	// another folder of the same length, and LD_LIBRARY_PATH. Each share has a copy of
	// its own, so that several can be tried at once. A program that opens the driver by
	// its path goes past it.
	WayRelocated Way = "relocated"
)

// The driver's libraries by the names that programs open.
const (
	cudaName = "libcuda.so.1"
	nvmlName = "libnvidia-ml.so.1"
)

// fronts are the front libraries as they are built.
var fronts = map[string]string{cudaName: "libcarve-cuda.so", nvmlName: "libcarve-nvml.so"}

// share is a place in which programs have a share of the card.
type share struct {
	name          string
	dir           string
	limits, usage string
	terms         terms
	way           Way
	// env is what the share's programs get in their environment beside the run's.
	env []string
	// fronts are the twins that this share's programs load.
	fronts map[string]string
}

// terms are what a share grants.
type terms struct {
	memory  uint64
	ppm     uint32 // of the card's compute; 0: none is divided
	elastic bool
	// context is what a context is said to cost; 0: the library is to learn it.
	context uint64
	// mpsPercent is the part of the multiprocessors that programs have as clients of
	// MPS, which they must be then; 0: they aren't.
	mpsPercent uint32
	// policy is what becomes of managed memory.
	policy region.ManagedPolicy
}

// relocate replaces carveDir by another folder in the bytes of a program or library.
// It is an error where it doesn't stand there at all.
func relocate(file []byte, dir string) ([]byte, error) {
	from := []byte(carveDir + "/")
	if len(dir) > len(carveDir) {
		return nil, fmt.Errorf("%s is longer than %s", dir, carveDir)
	}
	to := []byte(dir + strings.Repeat("/", len(from)-len(dir)))
	if !bytes.Contains(file, from) {
		return nil, fmt.Errorf("%s isn't in the file", carveDir)
	}
	return bytes.ReplaceAll(file, from, to), nil
}

// makeTwin makes the front for a driver's library.
func makeTwin(front []byte, driver string) (*twin.Twin, *twin.Library, error) {
	f, err := os.Open(driver)
	if err != nil {
		return nil, nil, err
	}
	defer f.Close()
	library, err := twin.Read(f)
	if err != nil {
		return nil, nil, fmt.Errorf("read the driver's %s: %w", driver, err)
	}
	t, err := twin.Make(front, library)
	if err != nil {
		return nil, library, fmt.Errorf("make the front for %s: %w", driver, err)
	}
	return t, library, nil
}

// newShare makes the files of a share.
func (r *runner) newShare(t terms) (*share, error) { return r.newShareBy(r.way, t) }

// newShareBy does so for a way that needn't be the run's.
func (r *runner) newShareBy(way Way, t terms) (*share, error) {
	r.shares++
	name := fmt.Sprintf("t%d", r.shares)
	s := &share{name: name, dir: filepath.Join(r.work, name), terms: t, way: way, fronts: map[string]string{}}
	s.limits, s.usage = filepath.Join(s.dir, "limits"), filepath.Join(s.dir, "usage")
	if err := os.MkdirAll(filepath.Join(s.dir, "driver"), 0o755); err != nil {
		return nil, err
	}
	uuid, err := region.ParseUUID(r.card.UUID)
	if err != nil {
		return nil, err
	}
	err = region.CreateLimits(s.limits, region.Limits{SelfVisible: r.selfVisible, Cards: []region.Card{{
		UUID: uuid, LimitBytes: t.memory, ContextBytes: t.context, ComputePPM: t.ppm, ComputeFixed: !t.elastic, Managed: t.policy, MPSPercent: t.mpsPercent,
	}}})
	if err == nil {
		err = region.CreateUsage(s.usage)
	}
	if err == nil && t.ppm > 0 {
		err = divideFromTheStart(s.limits)
	}
	if err != nil {
		return nil, err
	}
	return s, r.placeFronts(s)
}

// divideFromTheStart has launches wait for their share before the loop has seen the
// share: a program that begins sooner would fill its queue first, with up to a
// thousand launches that nobody can take back.
func divideFromTheStart(limits string) error {
	f, err := region.OpenCompute(limits, 1)
	if err != nil {
		return err
	}
	return errors.Join(f.Divide(true), f.Close())
}

// placeFronts makes what a share's programs load.
func (r *runner) placeFronts(s *share) error {
	if err := os.MkdirAll(filepath.Join(s.dir, "lib"), 0o755); err != nil {
		return err
	}
	for name, file := range fronts {
		front, err := os.ReadFile(filepath.Join(r.Dir, "lib", file))
		if err != nil {
			return err
		}
		if s.way == WayRelocated {
			if front, err = relocate(front, s.dir); err != nil {
				return fmt.Errorf("%s: %w", file, err)
			}
			if err := os.Symlink(r.driver[name], filepath.Join(s.dir, "driver", name)); err != nil {
				return err
			}
		}
		t, _, err := makeTwin(front, r.driver[name])
		if err != nil {
			return err
		}
		s.fronts[name] = filepath.Join(s.dir, "lib", name)
		if err := os.WriteFile(s.fronts[name], t.File, 0o755); err != nil {
			return err
		}
	}
	if s.way != WayRelocated {
		return nil
	}
	return r.placeProgram(s, probe)
}

// placeProgram makes a share's copy of a program of the bundle.
func (r *runner) placeProgram(s *share, name string) error {
	b, err := os.ReadFile(filepath.Join(r.Dir, "bin", name))
	if err == nil {
		b, err = relocate(b, s.dir)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return os.WriteFile(filepath.Join(s.dir, name), b, 0o755)
}

// environment is that of a program in a share, or of one without (nil).
func (r *runner) environment(s *share) []string {
	var env []string
	path := ""
	for _, v := range r.Env {
		name, value, _ := strings.Cut(v, "=")
		switch name {
		case "LD_LIBRARY_PATH":
			path = value
		case "CUDA_VISIBLE_DEVICES", "CUDA_CACHE_PATH", "CUDA_DEVICE_ORDER", "PYTORCH_CUDA_ALLOC_CONF", "CUDA_LAUNCH_BLOCKING":
		default:
			if !strings.HasPrefix(name, "CUDA_MPS_") {
				env = append(env, v)
			}
		}
	}
	var first []string
	if s != nil && s.way == WayRelocated {
		first = append(first, filepath.Join(s.dir, "lib"))
	}
	if r.Root.Path != "/" {
		first = append(first, filepath.Join(r.Root.Path, r.libDir))
	}
	if path != "" {
		first = append(first, path)
	}
	if len(first) > 0 {
		env = append(env, "LD_LIBRARY_PATH="+strings.Join(first, ":"))
	}
	if s != nil {
		env = append(env, s.env...)
	}
	return append(env, "CUDA_VISIBLE_DEVICES="+r.card.UUID, "CUDA_CACHE_PATH="+filepath.Join(r.work, "cache"))
}

// start starts a program in a share, or without one (nil). probe stands for gpuprobe.
func (r *runner) start(s *share, limit time.Duration, program string, args ...string) (*child, error) {
	name := strings.Join(append([]string{filepath.Base(program)}, args...), " ")
	if program == probe {
		program = filepath.Join(r.Dir, "bin/gpuprobe")
		if s != nil && s.way == WayRelocated {
			program = filepath.Join(s.dir, "gpuprobe")
		}
	}
	cmd := exec.Command(program, args...)
	if s != nil && s.way == WayNamespace {
		sc := scene{Driver: r.driver, Fronts: s.fronts, Limits: s.limits, Usage: s.usage}
		if r.software {
			sc.Root = r.Root.Path
		}
		b, err := json.Marshal(sc)
		if err != nil {
			return nil, err
		}
		cmd = exec.Command(r.Self, append([]string{"inside", string(b), program}, args...)...)
		cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: unix.CLONE_NEWNS}
	}
	cmd.Env = r.environment(s)
	return r.launch(name, cmd, limit)
}

// probe is the program that most is tried with.
const probe = "gpuprobe"

// lines runs a program to its end.
func (r *runner) lines(s *share, limit time.Duration, program string, args ...string) ([]line, error) {
	c, err := r.start(s, limit, program, args...)
	if err != nil {
		return nil, err
	}
	return c.rest()
}

// usageOf is the slot of a child in its share, and the driver's figure of it; false
// where either isn't known.
func (r *runner) usageOf(s *share, pid int) (slot region.CardUsage, driver uint64, ok bool) {
	u, err := region.ReadUsage(s.usage, 1)
	if err != nil {
		return slot, 0, false
	}
	for _, each := range u.Slots {
		if int(each.PID) == pid && each.State == region.SlotLive && len(each.Cards) == 1 {
			driver, ok = r.processBytes(pid)
			return each.Cards[0], driver, ok
		}
	}
	return slot, 0, false
}

// processBytes is what the driver says that a process has on the card.
func (r *runner) processBytes(pid int) (uint64, bool) {
	s, err := r.door.Occupancy(r.card.UUID)
	if err != nil {
		return 0, false
	}
	for _, p := range s.Processes {
		if r.own(p.PID) == pid && p.UsedBytes > 0 {
			return p.UsedBytes, true
		}
	}
	return 0, false
}

// own is our name for a pid of the driver's.
func (r *runner) own(pid int) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	if mine, ok := r.aliases[pid]; ok {
		return mine
	}
	return pid
}

// learnPID finds out by which pid the driver knows a child that has a context now: in
// a container, it may be the host's. before are the pids that it listed.
func (r *runner) learnPID(before map[int]bool, pid int) {
	s, err := r.door.Occupancy(r.card.UUID)
	if err != nil {
		return
	}
	var fresh []int
	for _, p := range s.Processes {
		if p.PID == pid {
			return
		}
		if !before[p.PID] {
			fresh = append(fresh, p.PID)
		}
	}
	if len(fresh) == 1 {
		r.mu.Lock()
		r.aliases[fresh[0]] = pid
		r.mu.Unlock()
	}
}

func (r *runner) listedPIDs() map[int]bool {
	out := map[int]bool{}
	if s, err := r.door.Occupancy(r.card.UUID); err == nil {
		for _, p := range s.Processes {
			out[p.PID] = true
		}
	}
	return out
}
