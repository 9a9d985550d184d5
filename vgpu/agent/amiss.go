package agent

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/vgpu/region"
)

// Nobody but the agent has any business in the files of shares, yet others can
// write there: an administrator, a cleaner of /run, a pod that mounts it. So the
// agent looks, at the pace of the reaper and before each resize, whether each file
// says what the record says, and whether a running container still has the file
// that the node keeps.
//
// What is found amiss is put right by whoever works on the pod (reconcile), so that
// nothing is put back under a resize, or after a release:
//
//   - content that differs, or is damaged, is written anew in place;
//   - a file that is missing, or isn't one, is made again, for the next container.
//     One that runs has the old file, which nobody can write to any more. Its
//     limits are those that it had, so it is let run, and its room stays booked; a
//     resize can't reach it and is refused. One that reads something there that
//     allows more than was granted, or nothing at all, is stopped like one that
//     started without the hook: it holds no limit, or can't use its card.

// Reasons of the events.
const (
	reasonLimitsRestored = "LimitsRestored"
	reasonLimitsLost     = "LimitsLost"
	reasonUsageLost      = "UsageLost"
)

// restoredApart is how long a container's pod isn't told again of what was put
// right: somebody may write there all the time. The metric counts each.
const restoredApart = time.Minute

// wrong says what is wrong with a limits file; the words are those of the event.
type wrong string

const (
	right    wrong = ""
	missing  wrong = "was missing"
	noFile   wrong = "had been replaced by something that is no file"
	damaged  wrong = "was damaged"
	differs  wrong = "said something else than was granted"
	unopened wrong = "had other permissions than it was made with"
)

// sameGranted compares what a grant says. What a context costs is learnt, and
// written by those who learn it; how large a card is, is the driver's word.
func sameGranted(a, b region.Limits) bool {
	if len(a.Cards) != len(b.Cards) || a.SelfVisible != b.SelfVisible {
		return false
	}
	for i, x := range a.Cards {
		y := b.Cards[i]
		x.ContextBytes, y.ContextBytes = 0, 0
		x.Multiprocessors, y.Multiprocessors = 0, 0
		if x != y {
			return false
		}
	}
	return true
}

// anyFacts is for limits that are only compared by what was granted.
func anyFacts(string) cardFacts { return cardFacts{} }

// withinGranted reports whether limits allow no more than others.
func withinGranted(have, want region.Limits) bool {
	if len(have.Cards) != len(want.Cards) {
		return false
	}
	for i, c := range have.Cards {
		w := want.Cards[i]
		switch {
		case c.UUID != w.UUID, c.LimitBytes > w.LimitBytes, c.Priority < w.Priority:
			return false
		case w.ComputePPM != 0 && (c.ComputePPM == 0 || c.ComputePPM > w.ComputePPM || w.ComputeFixed && !c.ComputeFixed):
			// 0 is no limit at all, and a guarantee is no cap.
			return false
		case w.MPSPercent != 0 && (c.MPSPercent == 0 || c.MPSPercent > w.MPSPercent):
			return false // or a program needn't be a client of MPS
		case c.Oversell && !w.Oversell, c.Managed != w.Managed && c.Managed != region.ManagedForbid:
			return false
		}
	}
	return true
}

// judge says what is wrong with a limits file that should say want and be of no
// earlier generation than it had been.
func judge(path string, want region.Limits, generation uint64) (wrong, region.Limits, error) {
	var st unix.Stat_t
	err := unix.Lstat(path, &st)
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR):
		return missing, region.Limits{}, nil
	case err != nil:
		return right, region.Limits{}, &os.PathError{Op: "lstat", Path: path, Err: err}
	case st.Mode&unix.S_IFMT != unix.S_IFREG:
		return noFile, region.Limits{}, nil
	}
	have, err := region.ReadLimits(path)
	switch {
	case errors.Is(err, region.ErrDamaged):
		return damaged, have, nil
	case errors.Is(err, fs.ErrNotExist):
		return missing, have, nil
	case err != nil:
		return right, have, err
	case !sameGranted(have, want) || have.Generation < generation:
		return differs, have, nil
	case st.Mode&0o7777 != 0o644:
		return unopened, have, nil
	}
	return right, have, nil
}

// watched is a share to look at.
type watched struct {
	uid, container string
	cards          []api.CardGrant
	// running are its containers that haven't exited, by ID.
	running map[string]use
}

// watchFiles looks at the files of all shares, and queues the pods of those where
// something is amiss.
func (r *reaper) watchFiles() {
	var all []watched
	a := r.Agent
	a.mu.Lock()
	for id := range a.sights {
		if _, ok := a.containers[id]; !ok {
			delete(a.sights, id)
		}
	}
	for _, h := range a.held {
		if h.prepared && h.State == stateHeld && h.next == nil && !h.amiss {
			all = append(all, a.watchedOf(h.record)...)
		}
	}
	a.mu.Unlock()
	for _, w := range all {
		have, amiss := a.amiss(w)
		if !amiss {
			r.republish(w, have)
			continue
		}
		a.mu.Lock()
		if h := a.held[w.uid]; h != nil {
			h.amiss = true
		}
		a.mu.Unlock()
		a.queue.Add(w.uid)
	}
}

// watchedOf lists the shares of a record. a.mu is held.
func (a *Agent) watchedOf(r record) []watched {
	var out []watched
	for _, name := range slices.Sorted(maps.Keys(r.Grant.Containers)) {
		cards := r.Grant.Containers[name]
		if !fronted(cards[0].Mode) {
			continue
		}
		w := watched{uid: r.Grant.UID, container: name, cards: cards, running: map[string]use{}}
		for id, u := range a.containers {
			if u.uid == w.uid && u.container == name && u.adjusted {
				w.running[id] = u
			}
		}
		out = append(out, w)
	}
	return out
}

// republish puts back what a limits file should say of memory that was taken past
// the library, where it says something else: it was written to, or made anew.
func (r *reaper) republish(w watched, have region.Limits) {
	for i, h := range r.samples.histories[shareKey{w.uid, w.container}] {
		if i >= len(have.Live) || have.Live[i].ResidualBytes == h.published {
			continue
		}
		f, err := region.OpenLimits(r.files.limits(w.uid, w.container))
		if err == nil {
			err = errors.Join(f.SetResidual(i, h.published), f.Close())
		}
		if err != nil {
			r.Log.Warn("what a container holds past its library can't be published again", "uid", w.uid, "container", w.container, "error", err)
			return
		}
		r.Log.Info("what a container holds past its library is published again", "uid", w.uid, "container", w.container, "found", have.Live[i].ResidualBytes, "is", h.published)
	}
}

// amiss reports whether somebody should look closer, and what the limits file says
// if not.
func (a *Agent) amiss(w watched) (region.Limits, bool) {
	want, err := limitsOf(w.cards, anyFacts)
	if err != nil {
		return region.Limits{}, false // it was said when it was to be made
	}
	kept, err := a.filesOf(w)
	if err != nil || kept[1] == (fileID{}) || a.exchanged(w, kept) != "" {
		return region.Limits{}, true
	}
	what, have, err := judge(a.files.limits(w.uid, w.container), want, a.generation(w))
	if err != nil {
		a.Log.Warn("a limits file can't be looked at", "uid", w.uid, "container", w.container, "error", err)
		return region.Limits{}, false
	}
	if what != right {
		return region.Limits{}, true
	}
	a.note(w, have.Generation, kept)
	for id, u := range w.running {
		if a.lost(id, u, kept) != a.saidLost(id) {
			return region.Limits{}, true
		}
	}
	return have, false
}

// generation is that of a share's limits file as last seen.
func (a *Agent) generation(w watched) uint64 {
	a.mu.Lock()
	defer a.mu.Unlock()
	if h := a.held[w.uid]; h != nil {
		return h.generations[w.container]
	}
	return 0
}

// note takes a share's files as they are for those to compare with.
func (a *Agent) note(w watched, generation uint64, kept [2]fileID) {
	a.mu.Lock()
	defer a.mu.Unlock()
	h := a.held[w.uid]
	if h == nil {
		return
	}
	if h.kept == nil {
		h.generations, h.kept = map[string]uint64{}, map[string][2]fileID{}
	}
	h.generations[w.container], h.kept[w.container] = generation, kept
}

// lost says which file of a running container is no longer one of those that the
// node keeps; none also where that can't be told.
func (a *Agent) lost(id string, u use, kept [2]fileID) lostFile {
	a.mu.Lock()
	s := *a.sightOf(id)
	a.mu.Unlock()
	if !s.known {
		if a.look(id, u) == nil {
			// Its root is another than the runtime gave it, or it has no process: what
			// was found of it before stands.
			return s.lost
		}
		a.mu.Lock()
		s = *a.sightOf(id)
		a.mu.Unlock()
	}
	switch {
	case kept[0] != s.limits:
		return lostLimits
	case kept[1] != s.usage:
		return lostUsage
	}
	return ""
}

// saidLost is what the report says of a container.
func (a *Agent) saidLost(id string) lostFile {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.sightOf(id).lost
}

// mend puts the files of a pod right, and says what follows. Only who works on the
// pod may call it.
func (a *Agent) mend(h *holding) error {
	a.mu.Lock()
	h.amiss = false
	all := a.watchedOf(h.record)
	found := h.found
	h.found = nil
	a.mu.Unlock()
	var faults []error
	for _, w := range all {
		if what := found[w.container]; what != right {
			a.restored(h, w, what)
		}
		faults = append(faults, a.mendShare(h, w))
	}
	return errors.Join(faults...)
}

func (a *Agent) mendShare(h *holding, w watched) error {
	want, err := limitsOf(w.cards, a.factsOf)
	if err != nil {
		return err
	}
	path := a.files.limits(w.uid, w.container)
	kept, err := a.filesOf(w)
	if err != nil {
		return err
	}
	generation := a.generation(w)
	// Whatever file a running container has, it isn't one that came after. That is
	// noted first: of a container into which one can't look there is no other trace.
	if file := a.exchanged(w, kept); file != "" {
		if file == lostLimits {
			generation = 0 // another file, another count
		}
		a.mu.Lock()
		for id := range w.running {
			if s := a.sightOf(id); !s.known && s.lost == "" {
				s.lost = file
			}
		}
		a.mu.Unlock()
	}
	what, have, err := judge(path, want, generation)
	if err != nil {
		return err
	}
	switch what {
	case damaged, differs, unopened:
		want.Live = have.Live
		a.stepped("limits-restore")
		if have.Generation, err = region.RestoreLimits(path, want, generation); err != nil {
			return err
		}
		a.stepped("limits-restored")
		a.restored(h, w, what)
	}
	if what == missing || what == noFile || kept[1] == (fileID{}) {
		a.stepped("files-remake")
		if err := a.files.prepare(w.uid, w.container, w.cards, a.factsOf); err != nil {
			return err
		}
		a.stepped("files-remade")
		if kept, err = a.filesOf(w); err != nil {
			return err
		}
		if what == missing || what == noFile {
			have.Generation = 1
		}
		a.Log.Warn("files of a share were gone and are made again", "uid", w.uid, "container", w.container, "limits", string(what), "running", len(w.running))
	}
	a.note(w, have.Generation, kept)
	for id, u := range w.running {
		a.settle(w, id, u, want, kept)
	}
	return nil
}

// filesOf are a share's files on the node as they are.
func (a *Agent) filesOf(w watched) (kept [2]fileID, err error) {
	for i, path := range []string{a.files.limits(w.uid, w.container), a.files.usage(w.uid, w.container)} {
		if kept[i], err = idOf(path); err != nil {
			return kept, err
		}
	}
	return kept, nil
}

// exchanged says which of a share's files is another than at the look before, ""
// if none is.
func (a *Agent) exchanged(w watched, now [2]fileID) lostFile {
	a.mu.Lock()
	defer a.mu.Unlock()
	h := a.held[w.uid]
	if h == nil {
		return ""
	}
	before, ok := h.kept[w.container]
	switch {
	case ok && before[0] != now[0]:
		return lostLimits
	case ok && before[1] != now[1]:
		return lostUsage
	}
	return ""
}

// foundAtStart says what is wrong with the files of a record that an earlier
// process left. Where that died in a resize they allow less than the record, and
// never more.
func (a *Agent) foundAtStart(r record) map[string]wrong {
	found := map[string]wrong{}
	for _, w := range a.watchedOf(r) {
		want, err := limitsOf(w.cards, anyFacts)
		if err != nil {
			continue
		}
		what, have, err := judge(a.files.limits(w.uid, w.container), want, 0)
		if err == nil && (what == damaged || what == differs && !withinGranted(have, want)) {
			found[w.container] = what
		}
	}
	return found
}

// restored counts and says that a limits file was put right.
func (a *Agent) restored(h *holding, w watched, what wrong) {
	a.mu.Lock()
	a.limitsRestored++
	key := w.container + "\x00" + string(what)
	again := time.Since(h.restoredSaid[key]) < restoredApart
	if !again {
		if h.restoredSaid == nil {
			h.restoredSaid = map[string]time.Time{}
		}
		h.restoredSaid[key] = time.Now()
	}
	p := a.named(w.uid)
	a.mu.Unlock()
	if again {
		return
	}
	message := fmt.Sprintf("the limits file of container %s on the node %s; it was put right in place. Only carve's agent has any business there: something on the node, or a pod that mounts /run/carve, writes to it", w.container, what)
	a.Log.Warn("a limits file was put right", "pod", p.namespace+"/"+p.name, "container", w.container, "found", string(what))
	a.event(p, corev1.EventTypeWarning, reasonLimitsRestored, message)
}

// settle notes whether a running container still has the node's files, says so
// once, and stops one that is not held to its share by what it has.
func (a *Agent) settle(w watched, id string, u use, want region.Limits, kept [2]fileID) {
	file := a.lost(id, u, kept)
	a.mu.Lock()
	s := a.sightOf(id)
	done := s.settled
	s.lost, s.settled = file, file != ""
	p := a.named(w.uid)
	a.mu.Unlock()
	if done || file != "" {
		a.report()
	}
	if file == "" || done {
		return
	}
	reason := reasonLimitsLost
	if file == lostUsage {
		reason = reasonUsageLost
	}
	unfit := ""
	if in := a.look(id, u); in != nil && file == lostLimits {
		have, err := region.DecodeLimits(in.page)
		switch {
		case err != nil:
			unfit = "what it has can't be read (" + err.Error() + "), so it can't use its cards"
		case !withinGranted(have, want):
			unfit = "what it has allows more than was granted"
		}
	}
	message := file.of(w.container)
	switch {
	case unfit == "":
		message += "; it keeps the limits that it has"
	case a.StopUnadjusted && p.never:
		message += "; " + unfit + ": it is stopped, and as its pod doesn't restart containers (restartPolicy Never), the pod fails"
	case a.StopUnadjusted:
		message += "; " + unfit + ": it is stopped, so that it starts again"
	default:
		message += "; " + unfit
	}
	a.Log.Warn("a container runs with files that aren't the node's", "pod", p.namespace+"/"+p.name, "container", w.container, "id", id, "file", string(file), "unfit", unfit)
	a.event(p, corev1.EventTypeWarning, reason, message)
	if unfit == "" || !a.StopUnadjusted {
		return
	}
	if err := killContainer(u.hostPID, id); err != nil {
		a.Log.Error("a container that isn't held to its share can't be stopped", "id", id, "error", err)
	}
}

// cutOff says of a pod whose limits were lowered for a resize whether a container
// of it doesn't see that, "" if all do.
func (a *Agent) cutOff(old, new record) (string, error) {
	least := leastOf(old, new)
	a.mu.Lock()
	all := a.watchedOf(new)
	a.mu.Unlock()
	for _, w := range all {
		if len(w.running) == 0 || slices.Equal(w.cards, old.Grant.Containers[w.container]) {
			continue
		}
		want, err := limitsOf(least.Containers[w.container], anyFacts)
		if err != nil {
			return "", err
		}
		// First what it says, then which file that was: one that came in between is
		// another than the container's.
		what, _, err := judge(a.files.limits(w.uid, w.container), want, 0)
		switch {
		case err != nil:
			return "", err
		case what == missing || what == noFile:
			return lostLimits.of(w.container), nil
		case what != right:
			return "", fmt.Errorf("the limits file of container %s %s while it was being resized", w.container, what)
		}
		kept, err := a.filesOf(w)
		if err != nil {
			return "", err
		}
		for id, u := range w.running {
			if file := a.lost(id, u, kept); file != "" {
				return file.of(w.container), nil
			}
		}
	}
	return "", nil
}
