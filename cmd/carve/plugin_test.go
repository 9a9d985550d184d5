package main

import (
	"bytes"
	"os"
	"strings"
	"testing"
)

func TestKubectlCallsThePlugin(t *testing.T) {
	for _, c := range []struct {
		program string
		plugin  bool
		first   string
	}{
		{"/usr/bin/carve", false, "cards"},
		{"/usr/bin/kubectl-carve", true, "cards"},
		{"kubectl_complete-carve", true, "__complete"},
	} {
		if asPlugin(c.program) != c.plugin {
			t.Errorf("%s: plugin is %v", c.program, !c.plugin)
		}
		if got := pluginArgs([]string{c.program, "cards", ""}); got[0] != c.first || got[len(got)-1] != "" {
			t.Errorf("%s: arguments are %q", c.program, got)
		}
	}
	args := os.Args
	defer func() { os.Args = args }()
	os.Args = []string{"/usr/local/bin/kubectl-carve"}
	root := newRootCommand()
	var out bytes.Buffer
	root.SetOut(&out)
	root.SetArgs([]string{"cordon", "--help"})
	if err := root.Execute(); err != nil || !strings.Contains(out.String(), "kubectl carve cordon NODE [CARD...]") {
		t.Errorf("help of the plugin (%v):\n%s", err, out.String())
	}
}

// Every command for people reaches the cluster with kubectl's flags, and those
// that read print in the same formats.
func TestPeoplesCommandsTakeKubectlsFlags(t *testing.T) {
	root := newRootCommand()
	reading := map[string]bool{"cards": true, "top": true, "explain": true, "pod": true}
	seen := 0
	for _, c := range root.Commands() {
		if c.GroupID != "people" {
			continue
		}
		leaves := c.Commands()
		if len(leaves) == 0 {
			leaves = append(leaves, c)
		}
		for _, l := range leaves {
			seen++
			for _, flag := range []string{"kubeconfig", "context", "cluster", "user", "server", "token", "as", "request-timeout"} {
				if l.Flags().Lookup(flag) == nil {
					t.Errorf("%s has no --%s", l.CommandPath(), flag)
				}
			}
			if o := l.Flags().ShorthandLookup("o"); reading[l.Name()] && (o == nil || o.Name != "output") {
				t.Errorf("%s has no -o", l.CommandPath())
			}
			if n := l.Flags().Lookup("namespace"); n != nil && n.Shorthand != "n" {
				t.Errorf("%s: --namespace has no -n", l.CommandPath())
			}
		}
	}
	if seen < 3 {
		t.Errorf("only %d commands were looked at", seen)
	}
}
