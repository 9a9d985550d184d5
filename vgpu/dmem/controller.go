package dmem

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/carve-gpu/carve/vgpu/gpu"
)

const (
	controller = "dmem"

	fileControllers = "cgroup.controllers"
	fileSubtree     = "cgroup.subtree_control"
	fileCapacity    = "dmem.capacity"
	fileMax         = "dmem.max"
	fileCurrent     = "dmem.current"

	// mostBytes bounds what is read of a file: a line for each region.
	mostBytes = 64 << 10
)

// Controller holds containers to their share of device memory. Its methods may be
// called concurrently.
type Controller struct {
	// proc and mount are where this process sees the node's processes and its
	// cgroup file systems.
	proc, mount string
	// write writes a file of the kernel's in one call.
	write func(path, text string) error

	mu sync.Mutex
	// regions are those of the cards that Look found, by UUID.
	regions map[string]string
}

// New makes a controller of the node whose processes and cgroups are seen in these
// directories, "/proc" and "/sys/fs/cgroup" as a rule.
func New(proc, mount string) *Controller {
	return &Controller{proc: proc, mount: mount, write: writeFile}
}

func writeFile(path, text string) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(text)
	return errors.Join(err, f.Close())
}

// Name is the layer's name in reports.
func (*Controller) Name() string { return controller }

// root is the directory of cgroup v2: the mount itself, or "unified" in it where v1
// is mounted beside it.
func (c *Controller) root() (string, error) {
	for _, dir := range []string{c.mount, filepath.Join(c.mount, "unified")} {
		_, err := os.Stat(filepath.Join(dir, fileControllers))
		if err == nil {
			return dir, nil
		}
		if !errors.Is(err, fs.ErrNotExist) {
			return "", fmt.Errorf("look for cgroup v2: %w", err)
		}
	}
	return "", errors.New("the node has no cgroup v2")
}

// Look says of each card, by UUID, why it can't be held here; nil for one that can.
// The sentences stay the same while nothing changes.
func (c *Controller) Look(cards []gpu.Card) map[string]error {
	out := make(map[string]error, len(cards))
	found := map[string]string{}
	regions, err := c.available()
	for _, card := range cards {
		switch region := ""; {
		case err != nil:
			out[card.UUID] = err
		case card.MIGMode == "enabled":
			out[card.UUID] = errors.New("the controller doesn't tell MIG instances apart")
		default:
			if region, out[card.UUID] = match(regions, card); out[card.UUID] == nil {
				found[card.UUID] = region
			}
		}
	}
	// Two cards in one region would share one limit.
	owners := map[string][]string{}
	for uuid, region := range found {
		owners[region] = append(owners[region], uuid)
	}
	for region, uuids := range owners {
		for _, uuid := range uuids {
			if len(uuids) > 1 {
				delete(found, uuid)
				out[uuid] = fmt.Errorf("region %s could be of %d cards", region, len(uuids))
			}
		}
	}
	c.mu.Lock()
	c.regions = found
	c.mu.Unlock()
	return out
}

// available lists the regions, if the controller is there.
func (c *Controller) available() ([]region, error) {
	root, err := c.root()
	if err != nil {
		return nil, err
	}
	has, err := lists(filepath.Join(root, fileControllers))
	if err != nil {
		return nil, fmt.Errorf("look for the dmem controller: %w", err)
	}
	if !has {
		return nil, errors.New("the kernel has no dmem controller in cgroup v2 (Linux 6.14 with CONFIG_CGROUP_DMEM)")
	}
	amounts, err := readAmounts(filepath.Join(root, fileCapacity))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, errors.New("the kernel's dmem controller shows no regions (no dmem.capacity)")
	}
	if err != nil {
		return nil, fmt.Errorf("list regions of device memory: %w", err)
	}
	if len(amounts) == 0 {
		return nil, errors.New("no driver has registered device memory with the kernel's dmem controller (NVIDIA's does from R615 on)")
	}
	var out []region
	for name, bytes := range amounts {
		out = append(out, region{name, bytes})
	}
	slices.SortFunc(out, func(a, b region) int { return strings.Compare(a.name, b.name) })
	return out, nil
}

// Hold puts limits in force for a container, in bytes by card. It writes only what
// isn't so. Cards that Look didn't find are left out. An error that is gpu.ErrEnded
// is no fault; one that is gpu.ErrInUse leaves the limit before in force.
func (c *Controller) Hold(pid int, id string, limits map[string]uint64) error {
	want := map[string]uint64{}
	c.mu.Lock()
	for uuid, bytes := range limits {
		if region, ok := c.regions[uuid]; ok {
			want[region] = bytes
		}
	}
	c.mu.Unlock()
	if len(want) == 0 {
		return nil
	}
	root, dir, err := c.group(pid, id)
	if err != nil {
		return fmt.Errorf("hold container %.12s by dmem: %w", id, err)
	}
	if err := c.hold(root, dir, want); err != nil {
		if _, gone := os.Stat(dir); errors.Is(gone, fs.ErrNotExist) {
			err = fmt.Errorf("%w (%w)", gpu.ErrEnded, err)
		}
		return fmt.Errorf("hold container %.12s by dmem: %w", id, err)
	}
	return nil
}

func (c *Controller) hold(root, dir string, want map[string]uint64) error {
	path := filepath.Join(dir, fileMax)
	have, err := readAmounts(path)
	if errors.Is(err, fs.ErrNotExist) {
		if err = c.enable(root, dir); err == nil {
			have, err = readAmounts(path)
		}
	}
	if err != nil {
		return err
	}
	var lines strings.Builder
	var changed []string
	for _, region := range sorted(want) {
		if now, ok := have[region]; !ok || now != pages(want[region]) {
			fmt.Fprintf(&lines, "%s %d\n", region, want[region])
			changed = append(changed, region)
		}
	}
	if changed == nil {
		return nil
	}
	// The kernel takes a line for each region.
	if err := c.write(path, lines.String()); err != nil {
		return err
	}
	// A limit below what is in use is not taken, without an error.
	if have, err = readAmounts(path); err != nil {
		return err
	}
	for _, region := range changed {
		if have[region] != pages(want[region]) {
			return fmt.Errorf("the limit of %s stays at %s, %d was written: %w", region, amount(have[region]), want[region], gpu.ErrInUse)
		}
	}
	return nil
}

// pages is an amount as the kernel keeps it: in whole pages.
func pages(bytes uint64) uint64 {
	page := uint64(os.Getpagesize())
	return bytes / page * page
}

// Used is what a container holds of each card, by UUID, as the kernel counts it.
// Cards that Look didn't find are left out.
func (c *Controller) Used(pid int, id string) (map[string]uint64, error) {
	c.mu.Lock()
	regions := make(map[string]string, len(c.regions))
	for uuid, region := range c.regions {
		regions[uuid] = region
	}
	c.mu.Unlock()
	if len(regions) == 0 {
		return nil, nil
	}
	_, dir, err := c.group(pid, id)
	if err != nil {
		return nil, fmt.Errorf("read device memory of container %.12s: %w", id, err)
	}
	now, err := readAmounts(filepath.Join(dir, fileCurrent))
	if err != nil {
		return nil, fmt.Errorf("read device memory of container %.12s: %w", id, err)
	}
	out := map[string]uint64{}
	for uuid, region := range regions {
		if bytes, ok := now[region]; ok {
			out[uuid] = bytes
		}
	}
	return out, nil
}

// group is the directory of a container's cgroup, and the one that all are in. The
// pid may be another's by now, so the cgroup must be named after the container.
func (c *Controller) group(pid int, id string) (root, dir string, err error) {
	if pid <= 0 || id == "" {
		return "", "", errors.New("its process isn't known")
	}
	if root, err = c.root(); err != nil {
		return "", "", err
	}
	b, err := os.ReadFile(filepath.Join(c.proc, strconv.Itoa(pid), "cgroup"))
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) {
		return "", "", gpu.ErrEnded
	}
	if err != nil {
		return "", "", err
	}
	for line := range strings.Lines(string(b)) {
		path, ok := strings.CutPrefix(strings.TrimSpace(line), "0::")
		if !ok {
			continue
		}
		// Programs may make cgroups below the container's own.
		for p := filepath.Clean("/" + path); p != "/"; p = filepath.Dir(p) {
			if strings.Contains(filepath.Base(p), id) {
				dir = filepath.Join(root, p) // the outermost one counts
			}
		}
		if dir == "" {
			return "", "", fmt.Errorf("process %d is not in its cgroup: %w", pid, gpu.ErrEnded)
		}
		if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
			return "", "", gpu.ErrEnded
		}
		return root, dir, nil
	}
	return "", "", errors.New("its process is in no cgroup of v2")
}

// enable hands the controller down from the root to a cgroup. Neither runc, which
// hands down what it knows of, nor systemd does that for it.
func (c *Controller) enable(root, dir string) error {
	inside, err := filepath.Rel(root, dir)
	if err != nil {
		return err
	}
	at := root
	for _, name := range strings.Split(inside, string(filepath.Separator)) {
		has, err := lists(filepath.Join(at, fileSubtree))
		if err != nil {
			return fmt.Errorf("hand the controller down: %w", err)
		}
		if !has {
			if err := c.write(filepath.Join(at, fileSubtree), "+"+controller); err != nil {
				return fmt.Errorf("hand the controller down: %w", err)
			}
		}
		at = filepath.Join(at, name)
	}
	return nil
}

// lists reports whether a list of controllers names this one.
func lists(path string) (bool, error) {
	b, err := read(path)
	return slices.Contains(strings.Fields(string(b)), controller), err
}
