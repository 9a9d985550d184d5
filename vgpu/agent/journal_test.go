package agent

import (
	"encoding/json"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/carve-gpu/carve/api"
)

func testRecord(uid string) record {
	return record{Version: recordVersion, State: stateHeld, Namespace: "default", Pod: "p",
		Grant: grantOf(uid, 2, map[string][]api.CardGrant{"app": shareOf(cardA, 100, 5)}),
		Order: []podContainer{{"app", api.Sidecar}}}
}

func TestJournalGivesBackWhatWasWritten(t *testing.T) {
	j, err := openJournal(filepath.Join(t.TempDir(), "journal"))
	if err != nil {
		t.Fatal(err)
	}
	a, b := testRecord("a"), testRecord("b")
	b.State = stateReleasing
	for _, r := range []record{testRecord("gone"), a, b, a} {
		if err := j.write(r); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 {
		if err := j.remove("gone"); err != nil {
			t.Fatal(err)
		}
	}
	got, faults, err := j.read()
	if err != nil || len(faults) != 0 || !reflect.DeepEqual(got, []record{a, b}) {
		t.Errorf("got %+v, %v, %v", got, faults, err)
	}
}

func TestADamagedRecordIsSetAsideAndTheOthersAreRead(t *testing.T) {
	dir := t.TempDir()
	j, err := openJournal(dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := j.write(testRecord("good")); err != nil {
		t.Fatal(err)
	}
	moved, err := encodeRecord(testRecord("elsewhere"))
	if err != nil {
		t.Fatal(err)
	}
	changed, err := encodeRecord(testRecord("changed"))
	if err != nil {
		t.Fatal(err)
	}
	more := strings.Replace(string(changed), `"memMiB":100`, `"memMiB":900`, 1)
	if more == string(changed) {
		t.Fatalf("%s", changed)
	}
	unsigned, err := json.Marshal(testRecord("unsigned"))
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		"cut.json": `{"v":1,"state":"he`, "empty.json": "", "moved.json": string(moved), ".new-123": "half",
		"changed.json": more, "unsigned.json": string(unsigned),
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for round, wantFaults := range []int{5, 0} {
		got, faults, err := j.read()
		if err != nil || len(got) != 1 || got[0].Grant.UID != "good" || len(faults) != wantFaults {
			t.Errorf("read %d: %d records, faults %v, %v", round, len(got), faults, err)
		}
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	if got := strings.Join(names, " "); got != "changed.json.damaged cut.json.damaged empty.json.damaged good.json moved.json.damaged unsigned.json.damaged" {
		t.Errorf("the directory holds %s", got)
	}
}

// FuzzDecodeRecord: whatever is read either is an error, or a record whose
// names stay inside the directory of slices and which reads back the same.
func FuzzDecodeRecord(f *testing.F) {
	b, err := json.Marshal(testRecord("uid"))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Add([]byte(strings.Replace(string(b), `"uid":"uid"`, `"uid":"../x"`, 1)))
	f.Add([]byte(strings.Replace(string(b), `"app":[`, `"../../x":[`, 1)))
	f.Add([]byte(`{"v":1,"state":"held","grant":{"v":1,"uid":"a","node":"b","gen":1,"containers":{"/etc":[{"card":"x","mode":"exclusive"}]}}}`))
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := decodeRecord(b)
		if err != nil {
			// The same with the right checksum, which no mutation finds.
			if json.Unmarshal(b, &r) != nil {
				return
			}
			if b, err = encodeRecord(r); err != nil {
				return
			}
			if r, err = decodeRecord(b); err != nil {
				return
			}
		}
		root := "/slices"
		names := []string{}
		for name := range r.Grant.Containers {
			names = append(names, name)
		}
		for _, name := range names {
			p := files{dir: root}.usage(r.Grant.UID, name)
			if rel, err := filepath.Rel(root, p); err != nil || strings.Count(rel, "/") != 3 || strings.Contains(rel, "..") {
				t.Fatalf("the usage file of %q/%q would be %s", r.Grant.UID, name, p)
			}
		}
		again, err := encodeRecord(r)
		if err != nil {
			t.Fatal(err)
		}
		back, err := decodeRecord(again)
		if err != nil || !reflect.DeepEqual(r, back) {
			t.Fatalf("%+v read back as %+v, %v", r, back, err)
		}
	})
}
