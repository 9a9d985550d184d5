package agent

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/vgpu/mps"
	"github.com/carve-gpu/carve/vgpu/region"
)

// usageFSBytes caps the tmpfs of one slice: the usage file, and a few pages for
// the file system itself. A container that grows its file gets ENOSPC here and
// takes nothing from others. usageFSInodes leaves room for the root directory,
// the file, and the name it is made under.
const (
	usageFSBytes  = region.UsageBytes + 64<<10
	usageFSInodes = 4
)

// files makes and removes what a container maps: one directory for each slice.
type files struct {
	dir string
	// divide says that compute is limited from a container's first launch on, before
	// anybody has looked at it.
	divide bool
}

func (f files) slice(uid, container string) string { return filepath.Join(f.dir, uid, container) }

func (f files) limits(uid, container string) string {
	return filepath.Join(f.slice(uid, container), "limits")
}

func (f files) usage(uid, container string) string {
	return filepath.Join(f.slice(uid, container), "usage.d", "usage")
}

// cardFacts is what limits say of a card beside what was granted.
type cardFacts struct {
	// contextBytes is what a context costs, 0 where it isn't known; multiprocessors
	// likewise.
	contextBytes    uint64
	multiprocessors int
}

// limitsOf turns the grant of one container into the content of its limits
// file.
func limitsOf(cards []api.CardGrant, facts func(card string) cardFacts) (region.Limits, error) {
	// NVIDIA's kernel modules (R515 and later; R535 is the oldest served) list
	// processes in the caller's PID namespace under the caller's pids, and leave
	// out others. So a container can measure its own context there.
	l := region.Limits{SelfVisible: true}
	for _, c := range cards {
		uuid, err := region.ParseUUID(c.Card)
		if err != nil {
			return l, err
		}
		f := facts(c.Card)
		card := region.Card{
			UUID:         uuid,
			LimitBytes:   uint64(c.MemMiB) << 20,
			ContextBytes: f.contextBytes,
			Oversell:     c.Oversell == api.OversellHost,
		}
		if c.Mode == api.ModeMPS {
			card.MPSPercent, card.Multiprocessors = uint32(mpsPercent(c)), uint32(f.multiprocessors)
		} else {
			card.ComputePPM, card.ComputeFixed = uint32(c.Cores)*10_000, c.Fixed
		}
		switch c.Managed {
		case api.ManagedCount:
			card.Managed = region.ManagedCount
		case api.ManagedForbid:
			card.Managed = region.ManagedForbid
		}
		if c.Low {
			card.Priority = 1
		}
		l.Cards = append(l.Cards, card)
	}
	return l, nil
}

// prepare brings the files of one share into the given state. It may be
// repeated, and changes limits in place under running containers.
func (f files) prepare(uid, container string, cards []api.CardGrant, facts func(card string) cardFacts) error {
	want, err := limitsOf(cards, facts)
	if err != nil {
		return fmt.Errorf("prepare slice %s/%s: %w", uid, container, err)
	}
	usageDir := filepath.Dir(f.usage(uid, container))
	if err := os.MkdirAll(usageDir, 0o755); err != nil {
		return fmt.Errorf("prepare slice %s/%s: %w", uid, container, err)
	}
	if err := putLimits(f.limits(uid, container), want); err != nil {
		return fmt.Errorf("prepare slice %s/%s: %w", uid, container, err)
	}
	if f.divide && cards[0].Mode == api.ModeVGPU {
		if err := divideCompute(f.limits(uid, container), len(cards)); err != nil {
			return fmt.Errorf("prepare slice %s/%s: %w", uid, container, err)
		}
	}
	mounted, err := mps.IsMountPoint(usageDir)
	if err == nil && !mounted {
		err = unix.Mount("carve", usageDir, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC,
			fmt.Sprintf("size=%d,nr_inodes=%d,mode=0755", usageFSBytes, usageFSInodes))
	}
	if err != nil {
		return fmt.Errorf("prepare slice %s/%s: mount tmpfs on %s: %w", uid, container, usageDir, err)
	}
	if id, err := idOf(f.usage(uid, container)); err == nil && id == (fileID{}) {
		// Something that is no file, if anything.
		if err := os.RemoveAll(f.usage(uid, container)); err != nil {
			return fmt.Errorf("prepare slice %s/%s: %w", uid, container, err)
		}
	}
	if err := region.CreateUsage(f.usage(uid, container)); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("prepare slice %s/%s: %w", uid, container, err)
	}
	return nil
}

// divideCompute has the library hold launches to the shares in the limits file.
func divideCompute(path string, cards int) error {
	c, err := region.OpenCompute(path, cards)
	if err != nil {
		return err
	}
	return errors.Join(c.Divide(true), c.Close())
}

// putLimits puts limits in force, in place where the file is there.
func putLimits(path string, want region.Limits) error {
	have, err := region.ReadLimits(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return region.CreateLimits(path, want)
	case errors.Is(err, region.ErrDamaged), errors.Is(err, unix.ELOOP):
		return restoreLimits(path, want)
	case err != nil:
		return err
	case sameLimits(have, want):
		return nil
	case !updates(have, want):
		return restoreLimits(path, want)
	}
	return region.UpdateLimits(path, want)
}

// restoreLimits puts limits in force whatever is there: in place, as a container
// may run with it, unless it is no file.
func restoreLimits(path string, want region.Limits) error {
	id, err := idOf(path)
	if err != nil {
		return err
	}
	if id != (fileID{}) {
		_, err = region.RestoreLimits(path, want, 0)
		return err
	}
	if err := os.RemoveAll(path); err != nil {
		return err
	}
	return region.CreateLimits(path, want)
}

// updates reports whether an update can turn limits into others.
func updates(have, want region.Limits) bool {
	if len(have.Cards) > len(want.Cards) {
		return false
	}
	for i, c := range have.Cards {
		if c.UUID != want.Cards[i].UUID {
			return false
		}
	}
	return true
}

func sameLimits(a, b region.Limits) bool {
	if len(a.Cards) != len(b.Cards) || a.SelfVisible != b.SelfVisible {
		return false
	}
	for i := range a.Cards {
		if a.Cards[i] != b.Cards[i] {
			return false
		}
	}
	return true
}

// pods lists the UIDs that have a directory.
func (f files) pods() ([]string, error) {
	entries, err := os.ReadDir(f.dir)
	if err != nil {
		return nil, fmt.Errorf("list slices: %w", err)
	}
	var uids []string
	for _, e := range entries {
		uids = append(uids, e.Name())
	}
	return uids, nil
}

// clear removes everything of a pod. It may be repeated.
func (f files) clear(uid string) error {
	dir := filepath.Join(f.dir, uid)
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("clear slices of %s: %w", uid, err)
	}
	for _, e := range entries {
		usageDir := filepath.Dir(f.usage(uid, e.Name()))
		// Detached, since a dying process may still hold the file. More than
		// one mount can lie here only after a crash between mounting and the
		// look at what is mounted.
		for {
			err := unix.Unmount(usageDir, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
			if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) {
				break
			}
			if err != nil {
				return fmt.Errorf("clear slices of %s: unmount %s: %w", uid, usageDir, err)
			}
		}
	}
	if err := os.RemoveAll(dir); err != nil {
		return fmt.Errorf("clear slices of %s: %w", uid, err)
	}
	return nil
}
