package agent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// Each grant takes a record in the journal and files under the run directory.
// Where these can't be written (a full disk, a file system that turned read-only)
// no grant can be put in force, so the node isn't ready and gets no more pods
// until they can.

// storePace is how often it is tried whether they can be written again.
const storePace = 2 * time.Second

// tryBytes is what a try writes: on a full file system an empty file may succeed.
const tryBytes = 4096

// tryWrite makes and removes a file.
func tryWrite(path string) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	_, err = f.Write(make([]byte, tryBytes))
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close(), os.Remove(path))
}

// storable tries whether what a grant takes can be written.
func (a *Agent) storable() error {
	// By this name the journal clears it away should we die in between.
	return errors.Join(tryWrite(filepath.Join(a.journal.dir, ".new-try")), tryWrite(filepath.Join(a.RunDir, ".try")))
}

// stuck notes why a pod's slices aren't as they should be, and looks whether that
// would be so of any pod's.
func (a *Agent) stuck(uid string, why error) {
	fault := a.storable()
	a.mu.Lock()
	a.faults[uid] = why.Error()
	said := a.storeFault
	if fault != nil {
		a.storeFault = fault.Error()
	}
	a.wake()
	a.mu.Unlock()
	if fault != nil && said == "" {
		a.Log.Error("slices can't be kept", "error", fault)
		a.nodeEvent(corev1.EventTypeWarning, reasonUnwritable, fmt.Sprintf("carve's agent can't keep slices: %v; no card is handed out here until it can", fault))
	}
}

// unstuck notes that a pod's slices are as they should be.
func (a *Agent) unstuck(uid string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.faults, uid)
}

// watchStore sees when what couldn't be written can be.
func (a *Agent) watchStore(ctx context.Context) {
	for pause(ctx, storePace) {
		a.mu.Lock()
		fault := a.storeFault
		a.mu.Unlock()
		if fault == "" || a.storable() != nil {
			continue
		}
		a.mu.Lock()
		a.storeFault = ""
		a.wake()
		a.mu.Unlock()
		a.Log.Info("slices can be kept again")
		a.nodeEvent(corev1.EventTypeNormal, reasonWritable, "carve's agent can keep slices again")
		a.queueAll()
	}
}

// because is what is known of why a pod's slices aren't prepared, to follow a
// sentence; empty if nothing is. a.mu is held.
func (a *Agent) because(uid string) string {
	if why := a.faults[uid]; why != "" {
		return ": " + why
	}
	if a.storeFault != "" {
		return ": " + a.storeFault
	}
	return ""
}
