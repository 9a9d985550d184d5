package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/carve-gpu/carve/vgpu/gpu"
)

func TestNodeFlagsComeFromTheEnvironmentUnlessGiven(t *testing.T) {
	cmd := newNodeCommand()
	if err := cmd.ParseFlags([]string{"--run-dir", "/given"}); err != nil {
		t.Fatal(err)
	}
	env := map[string]string{"CARVE_NODE_RUN_DIR": "/env", "CARVE_NODE_STATE_DIR": "/env", "CARVE_NODE_SOFTWARE_GPU": "true", "RUN_DIR": "/not/this"}
	lookup := func(name string) (string, bool) { v, ok := env[name]; return v, ok }
	if err := flagsFromEnvironment(cmd.Flags(), nodeEnvPrefix, lookup); err != nil {
		t.Fatal(err)
	}
	for flag, want := range map[string]string{"run-dir": "/given", "state-dir": "/env", "software-gpu": "true", "lib-dir": "/usr/lib/carve/node"} {
		if got := cmd.Flags().Lookup(flag).Value.String(); got != want {
			t.Errorf("--%s is %q, want %q", flag, got, want)
		}
	}
	env = map[string]string{"CARVE_NODE_SLOTS_PER_CARD": "many"}
	if err := flagsFromEnvironment(newNodeCommand().Flags(), nodeEnvPrefix, lookup); err == nil || !strings.Contains(err.Error(), "CARVE_NODE_SLOTS_PER_CARD") {
		t.Errorf("a value that can't be read: %v", err)
	}
}

func TestNodeRefusesToGuess(t *testing.T) {
	t.Setenv("NODE_NAME", "")
	for name, c := range map[string]struct {
		args []string
		want string
	}{
		"no name":           {nil, "--node-name is missing"},
		"no slots":          {[]string{"--node-name", "n", "--slots-per-card", "0"}, "allowed are 1 to 256"},
		"a policy":          {[]string{"--node-name", "n", "--pods-past-extender", "allow"}, "allowed are refuse, local"},
		"a log format":      {[]string{"--node-name", "n", "--log-format", "xml"}, "allowed are text, json"},
		"words after flags": {[]string{"--node-name", "n", "now"}, "unknown command"},
	} {
		cmd := newNodeCommand()
		cmd.SetArgs(c.args)
		cmd.SetOut(&bytes.Buffer{})
		cmd.SetErr(&bytes.Buffer{})
		if err := cmd.Execute(); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
}

func TestTheSoftwareGPUIsUsedWhenToldAndNeverElse(t *testing.T) {
	driver, software := t.TempDir(), t.TempDir()
	if err := os.Mkdir(filepath.Join(software, "softgpu"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(software, "softgpu", "config.json"), []byte(`{"software":true}`), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		root string
		flag bool
		ok   bool
	}{{driver, false, true}, {driver, true, false}, {software, false, false}, {software, true, true}} {
		if err := checkRoot(gpu.Root{Path: c.root}, c.flag); (err == nil) != c.ok {
			t.Errorf("software root %v, flag %v: %v", c.root == software, c.flag, err)
		}
	}
}
