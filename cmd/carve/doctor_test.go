package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/carve-gpu/carve/api"
)

func TestPrintFindings(t *testing.T) {
	findings := []api.Finding{
		{Check: "a", Level: api.LevelOK, Where: "node n1", What: "all is well"},
		{Check: "b", Level: api.LevelWarn, Where: "/etc/x", What: "odd", Why: "somebody may wonder", Do: "look"},
		{Check: "c", Level: api.LevelFail, Where: "node n1", What: "broken", Why: "nothing works", Do: "in /etc/x:\n[a]\n  b = 1"},
	}
	const text = `fail  c                 node n1
      broken
      why: nothing works
      do:  in /etc/x:
           [a]
             b = 1
warn  b                 /etc/x
      odd
      why: somebody may wonder
      do:  look
`
	for all, want := range map[bool]string{
		false: text + "1 fail, 1 warn, 1 ok (--all prints them)\n",
		true:  text + "ok    a                 node n1\n      all is well\n1 fail, 1 warn, 1 ok\n",
	} {
		var b bytes.Buffer
		if err := printFindings(&b, findings, all); err != nil {
			t.Fatal(err)
		}
		if b.String() != want {
			t.Errorf("all %v:\n%s\nwant\n%s", all, b.String(), want)
		}
	}
	if w := api.Worst(findings); w != api.LevelFail {
		t.Errorf("worst is %s", w)
	}
	if w := api.Worst(findings[:2]); w != api.LevelWarn {
		t.Errorf("worst of the first two is %s", w)
	}
	if w := api.Worst(nil); w != api.LevelOK {
		t.Errorf("worst of none is %s", w)
	}
}

// TestDoctorWithoutAnAgent looks at a node on which nothing is: it says so, as
// data too, and exits with 1.
func TestDoctorWithoutAnAgent(t *testing.T) {
	dir := t.TempDir()
	root := newRootCommand()
	var out, said bytes.Buffer
	root.SetOut(&out)
	root.SetErr(&said)
	root.SetArgs([]string{"doctor", "--node", "-o", "json", "--host-root", dir, "--socket", filepath.Join(dir, "s"),
		"--run-dir", filepath.Join(dir, "run"), "--state-dir", filepath.Join(dir, "state"), "--kubelet-dir", filepath.Join(dir, "kubelet"), "--nri-socket", filepath.Join(dir, "nri"), "--runtime-config", "/none.toml"})
	if err := root.ExecuteContext(t.Context()); err != errUnwell {
		t.Errorf("error %v, want %v", err, errUnwell)
	}
	for _, want := range []string{`"check": "agent"`, `"level": "fail"`, "there is no such socket", "no driver was found"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %s in\n%s", want, out.String())
		}
	}
	if !strings.Contains(said.String(), "looking without it") {
		t.Errorf("stderr: %q", said.String())
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 0 {
		t.Errorf("doctor changed the node: %v, %v", entries, err)
	}
}
