package agent

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/vgpu/gpu"
	"github.com/carve-gpu/carve/vgpu/region"
)

// A resize changes the limits of a pod's running containers, all of them or
// none. The journal holds what is in force, before and after; start-up makes the
// files what the journal says, so a crash at any step leaves one or the other:
//
//  0. files that others wrote to are put right (amiss.go);
//  1. limits that shrink are lowered in the files. Where a running container
//     doesn't have the file that the node keeps, the grant is refused: nothing can
//     be put in force for it;
//  2. usage is read. A request that was let in under the old limit is seen here,
//     or sees the new one (vgpu/lib/src/ledger.c, carve_try), so what is found
//     to fit stays so. Then the other layers are lowered (Layer), which say by
//     themselves if more is in use. Where it doesn't fit, the old limits are put
//     back and the grant is refused;
//  3. the journal takes the new grant: from here on it is in force;
//  4. limits that grow are raised, in the other layers first, and the node reports.
//
// Until 4 is done the old amounts are reported; the extender counts the larger
// of grant and report, so nobody is given room that is still in use.

const (
	// A request that is being admitted while limits shrink is waited for: it may
	// well be refused.
	pendingLooks = 20
	pendingPause = 5 * time.Millisecond

	// maxRefusal bounds the reason in the report.
	maxRefusal = 512
)

// booked is what room is kept for: the record, and where a resize is under way
// the larger of the two grants.
func (h *holding) booked() record {
	if h.next == nil {
		return h.record
	}
	r := *h.next
	r.Grant = merged(h.Grant, h.next.Grant, func(old, new int64) int64 { return max(old, new) })
	return r
}

// merged is the grant new with each amount chosen from those of old and new,
// which differ in nothing else.
func merged(old, new api.Grant, choose func(old, new int64) int64) api.Grant {
	out := new
	out.Containers = make(map[string][]api.CardGrant, len(new.Containers))
	for name, cards := range new.Containers {
		cards = slices.Clone(cards)
		before := old.Containers[name]
		for i := range cards {
			if i < len(before) {
				cards[i].MemMiB = choose(before[i].MemMiB, cards[i].MemMiB)
				cards[i].Cores = int(choose(int64(before[i].Cores), int64(cards[i].Cores)))
			}
		}
		out.Containers[name] = cards
	}
	return out
}

// resizeAndUnlock puts a later grant of a pod, which was checked, in the place of
// the one in force. a.mu is held and is released here. Nobody else works on this
// pod meanwhile.
func (a *Agent) resizeAndUnlock(r record, h *holding) error {
	begin := time.Now()
	old := h.record
	r.Local = old.Local
	again := h.next != nil
	h.next, h.granted = &r, nil
	a.mu.Unlock()

	var err error
	if !again {
		// Later the files say what is being put in force.
		err = a.mend(h)
	}
	if err == nil {
		err = a.lower(old, r)
	}
	if err == nil {
		var refusal string
		if refusal, err = a.cutOff(old, r); err == nil && refusal == "" {
			refusal, err = a.overuse(old, r)
		}
		if err == nil && refusal == "" {
			// A layer that isn't in force can't keep a resize from the library.
			if fault := a.holdAll(r.Grant.UID); errors.Is(fault, gpu.ErrInUse) {
				refusal = "more is in use than the resize would leave: " + fault.Error()
			}
		}
		if err == nil && refusal != "" {
			// The journal first: an earlier try may have got as far as writing it.
			if err = errors.Join(a.journal.write(old), a.prepareFiles(old)); err == nil {
				a.mu.Lock()
				h.next = nil
				a.mu.Unlock()
				_ = a.holdAll(old.Grant.UID) // what it was; noted where it can't be
				a.refuseResize(h, r.Grant.Generation, refusal)
				return nil
			}
		}
	}
	if err == nil {
		a.stepped("journal-hold")
		err = a.journal.write(r)
		a.stepped("journal-held")
	}
	if err == nil {
		a.mu.Lock()
		h.granted = &r
		a.mu.Unlock()
		// Layers before the library, so that it lets nothing in that they refuse.
		_ = a.holdAll(r.Grant.UID) // noted where it can't be
		err = a.prepareFiles(r)
	}
	if err != nil {
		// It is tried again, from the start. Until then the limits stay as low as
		// they are: raising them could let in what no longer fits.
		return fmt.Errorf("resize to generation %d: %w", r.Grant.Generation, err)
	}
	a.mu.Lock()
	if !h.prepared {
		h.preparedAt = time.Now()
	}
	h.record, h.next, h.granted, h.prepared = r, nil, nil, true
	h.refusedGeneration, h.refusal = 0, ""
	delete(a.refused, r.Grant.UID)
	a.wake()
	a.mu.Unlock()
	a.Log.Info("slices resized", "pod", r.Namespace+"/"+r.Pod, "uid", r.Grant.UID, "generation", r.Grant.Generation, "took", time.Since(begin))
	a.report()
	return nil
}

// leastOf has the smaller of each amount.
func leastOf(old, new record) api.Grant {
	return merged(old.Grant, new.Grant, func(old, new int64) int64 { return min(old, new) })
}

// lower lowers the limits that shrink.
func (a *Agent) lower(old, new record) error {
	least := leastOf(old, new)
	for _, name := range slices.Sorted(maps.Keys(least.Containers)) {
		cards := least.Containers[name]
		if !fronted(cards[0].Mode) || slices.Equal(cards, old.Grant.Containers[name]) {
			continue
		}
		want, err := limitsOf(cards, a.factsOf)
		if err != nil {
			return fmt.Errorf("lower the limits of container %s: %w", name, err)
		}
		path := a.files.limits(new.Grant.UID, name)
		if _, err := os.Stat(path); errors.Is(err, os.ErrNotExist) {
			continue // nobody runs with it yet
		}
		a.stepped("limits-lower")
		if err := putLimits(path, want); err != nil {
			return fmt.Errorf("lower the limits of container %s: %w", name, err)
		}
		a.stepped("limits-lowered")
	}
	return nil
}

// overuse says what of a shrinking pod is in use beyond its new limits; empty if
// nothing is.
func (a *Agent) overuse(old, new record) (string, error) {
	for _, name := range slices.Sorted(maps.Keys(new.Grant.Containers)) {
		before, cards := old.Grant.Containers[name], new.Grant.Containers[name]
		for i, c := range cards {
			if c.MemMiB >= before[i].MemMiB {
				continue
			}
			used, err := a.usedBytes(new.Grant.UID, name, i, len(cards), uint64(c.MemMiB)<<20)
			if err != nil {
				return "", err
			}
			// The container may say what it likes; the driver knows better.
			used = max(used, a.drivenBytes(new.Grant.UID, name, c.Card))
			if used > uint64(c.MemMiB)<<20 {
				return fmt.Sprintf("container %s uses %d MiB of card %s, and the resize would leave it %d MiB", name, (used+api.MiB-1)/api.MiB, c.Card, c.MemMiB), nil
			}
		}
	}
	return "", nil
}

// usedBytes is what a container says that it uses of its card i. Requests that
// are being admitted count, but are waited for where they make the difference.
func (a *Agent) usedBytes(uid, container string, i, cards int, limit uint64) (uint64, error) {
	for look := 0; ; look++ {
		u, err := region.ReadUsage(a.files.usage(uid, container), cards)
		if errors.Is(err, os.ErrNotExist) {
			return 0, nil
		}
		if err != nil {
			return 0, fmt.Errorf("read what container %s uses: %w", container, err)
		}
		t := u.Total(i)
		if t.UsedBytes > limit || t.UsedBytes+t.PendingBytes <= limit || look == pendingLooks {
			return t.UsedBytes + t.PendingBytes, nil
		}
		time.Sleep(pendingPause)
	}
}

// drivenBytes is what the driver says that the processes of a container use of a
// card; 0 where it can't tell.
func (a *Agent) drivenBytes(uid, container, card string) uint64 {
	a.mu.Lock()
	door := a.hardware.door
	var ids []string
	for id, u := range a.containers {
		if u.uid == uid && u.container == container {
			ids = append(ids, id)
		}
	}
	a.mu.Unlock()
	if used, counted := a.usedByLayer(share{ids: ids}, card); counted {
		return used
	}
	if door == nil || len(ids) == 0 {
		return 0
	}
	s, err := door.Occupancy(card)
	if err != nil {
		return 0
	}
	var sum uint64
	for _, p := range s.Processes {
		groups, err := os.ReadFile(filepath.Join(procRoot, strconv.Itoa(p.PID), "cgroup"))
		if err == nil && slices.ContainsFunc(ids, func(id string) bool { return id != "" && strings.Contains(string(groups), id) }) {
			sum += p.UsedBytes
		}
	}
	return sum
}

// refuseResize notes that a later grant of a pod can't be put in force. The
// report tells the extender, which takes the grant back, and an event the user.
func (a *Agent) refuseResize(h *holding, generation int, reason string) {
	if len(reason) > maxRefusal {
		reason = strings.ToValidUTF8(reason[:maxRefusal-3], "") + "…"
	}
	a.mu.Lock()
	h.refusedGeneration, h.refusal = generation, reason
	p := a.pods[h.Grant.UID]
	a.mu.Unlock()
	a.Log.Warn("resize refused", "pod", h.Namespace+"/"+h.Pod, "uid", h.Grant.UID, "generation", generation, "reason", reason)
	a.event(p, corev1.EventTypeWarning, reasonResizeRefused, reason)
	a.report()
}
