package agent

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/carve-gpu/carve/api"
)

// recordVersion is the version of a record's format. A record of another one is
// set aside like a damaged one: the pod's own grant brings it back.
const recordVersion = 2

// maxRecordBytes bounds what is read: a grant of 64 KiB and a few names.
const maxRecordBytes = 256 << 10

// Record states.
const (
	stateHeld      = "held"      // the slices exist, or will in a moment
	stateReleasing = "releasing" // they are being cleared
)

// record is what the journal holds of one pod: what was granted and checked.
// It is written before the first file of its slices is made and removed after
// the last is gone, so whatever is found after a crash has an owner.
type record struct {
	Version   int            `json:"v"`
	State     string         `json:"state"`
	Namespace string         `json:"namespace"`
	Pod       string         `json:"pod"`
	Grant     api.Grant      `json:"grant"`
	Order     []podContainer `json:"order"`
	// Local says that this node chose the cards and not the extender.
	Local bool `json:"local,omitempty"`
	// Sum is the checksum of the rest, on disk only. What is in the journal is in
	// force, so an amount that a failing disk changed must not be believed.
	Sum string `json:"sum"`
}

// sum is the checksum of a record.
func (r record) sum() (string, error) {
	r.Sum = ""
	b, err := json.Marshal(r)
	if err != nil {
		return "", err
	}
	s := sha256.Sum256(b)
	return hex.EncodeToString(s[:16]), nil
}

// podContainer is a container of a pod, in the pod's order.
type podContainer struct {
	Name string            `json:"name"`
	Kind api.ContainerKind `json:"kind"`
}

// journal keeps the records in one file for each pod.
type journal struct{ dir string }

func openJournal(dir string) (journal, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return journal{}, fmt.Errorf("open journal: %w", err)
	}
	return journal{dir}, nil
}

func (j journal) path(uid string) string { return filepath.Join(j.dir, uid+".json") }

// write makes a record durable, replacing the pod's older one.
func (j journal) write(r record) error {
	b, err := encodeRecord(r)
	if err != nil {
		return fmt.Errorf("write journal: %w", err)
	}
	path := j.path(r.Grant.UID)
	f, err := os.CreateTemp(j.dir, ".new-")
	if err != nil {
		return fmt.Errorf("write journal: %w", err)
	}
	_, err = f.Write(b)
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		os.Remove(f.Name())
		return fmt.Errorf("write journal record %s: %w", path, err)
	}
	return j.sync()
}

// remove forgets a pod.
func (j journal) remove(uid string) error {
	if err := os.Remove(j.path(uid)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("write journal: %w", err)
	}
	return j.sync()
}

// sync makes names in the directory durable.
func (j journal) sync() error {
	d, err := os.Open(j.dir)
	if err != nil {
		return fmt.Errorf("write journal: %w", err)
	}
	if err := errors.Join(d.Sync(), d.Close()); err != nil {
		return fmt.Errorf("write journal: sync %s: %w", j.dir, err)
	}
	return nil
}

// read returns all records. One that can't be read is set aside under another
// name and reported as a fault: the pod's own grant brings it back.
func (j journal) read() (records []record, faults []error, err error) {
	entries, err := os.ReadDir(j.dir)
	if err != nil {
		return nil, nil, fmt.Errorf("read journal: %w", err)
	}
	for _, e := range entries {
		path := filepath.Join(j.dir, e.Name())
		uid, ok := strings.CutSuffix(e.Name(), ".json")
		if !ok {
			if strings.HasPrefix(e.Name(), ".new-") {
				os.Remove(path) // a write that was cut short
			}
			continue
		}
		r, err := readRecord(path)
		if err == nil && r.Grant.UID != uid {
			err = fmt.Errorf("it is of pod %s", r.Grant.UID)
		}
		if err != nil {
			err = fmt.Errorf("journal record %s: %w", path, err)
			faults = append(faults, errors.Join(err, os.Rename(path, path+".damaged")))
			continue
		}
		records = append(records, r)
	}
	return records, faults, nil
}

func readRecord(path string) (record, error) {
	f, err := os.Open(path)
	if err != nil {
		return record{}, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, maxRecordBytes+1))
	if err != nil {
		return record{}, err
	}
	return decodeRecord(b)
}

// encodeRecord writes a record with its checksum.
func encodeRecord(r record) ([]byte, error) {
	var err error
	if r.Sum, err = r.sum(); err != nil {
		return nil, err
	}
	return json.Marshal(r)
}

// decodeRecord reads and checks a record. Names in it become paths, so they
// are checked like those of a pod.
func decodeRecord(b []byte) (record, error) {
	var r record
	if len(b) > maxRecordBytes {
		return r, fmt.Errorf("%d bytes, allowed are %d", len(b), maxRecordBytes)
	}
	if err := json.Unmarshal(b, &r); err != nil {
		return record{}, err
	}
	if r.Version != recordVersion {
		return record{}, fmt.Errorf("version %d, this build reads %d", r.Version, recordVersion)
	}
	if sum, err := r.sum(); err != nil || sum != r.Sum {
		return record{}, errors.New("its checksum is wrong: it was damaged, or changed by hand")
	}
	r.Sum = ""
	if r.State != stateHeld && r.State != stateReleasing {
		return record{}, fmt.Errorf("unknown state %.40q", r.State)
	}
	if err := r.Grant.Validate(); err != nil {
		return record{}, err
	}
	if err := safeNames(r.Grant); err != nil {
		return record{}, err
	}
	return r, nil
}

// safeNames checks that a grant's names can be elements of a path. They can
// for every pod that the API server accepts; a grant comes from an annotation.
func safeNames(g api.Grant) error {
	if !pathElement(g.UID) {
		return fmt.Errorf("%.80q is no pod UID", g.UID)
	}
	for name := range g.Containers {
		if !pathElement(name) {
			return fmt.Errorf("%.80q is no container name", name)
		}
	}
	return nil
}

// pathElement admits letters, digits and inner hyphens, up to 63 of them: UIDs
// and DNS labels.
func pathElement(s string) bool {
	if s == "" || len(s) > 63 || s[0] == '-' || s[len(s)-1] == '-' {
		return false
	}
	for _, c := range []byte(s) {
		if (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (c < '0' || c > '9') && c != '-' {
			return false
		}
	}
	return true
}
