package suite

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os/exec"
	"strings"
	"testing"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/deploy/e2e/install"
)

// carve runs the binary on the node as an administrator.
func carve(t *testing.T, args ...string) result {
	t.Helper()
	cmd := cluster.Lab.Command(t.Context(), "env", append([]string{"KUBECONFIG=/etc/kubernetes/admin.conf", install.Programs + "/carve"}, args...)...)
	var out, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &stderr
	err := cluster.Lab.Run(cmd)
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatalf("carve %s: %v: %s", strings.Join(args, " "), err, stderr.String())
	}
	r := result{out.String(), stderr.String(), 0}
	if exit != nil {
		r.code = exit.ExitCode()
	}
	return r
}

// diagnose runs doctor and checks that its exit code goes with what it found.
func diagnose(t *testing.T, args []string) []api.Finding {
	t.Helper()
	r := carve(t, append([]string{"doctor", "-o", "json"}, args...)...)
	var findings []api.Finding
	if err := json.Unmarshal([]byte(r.stdout), &findings); err != nil {
		t.Fatalf("carve doctor %v: %v: %s%s", args, err, r.stdout, r.stderr)
	}
	if want := map[bool]int{true: 1}[api.Worst(findings) == api.LevelFail]; r.code != want {
		t.Errorf("carve doctor %v ended with %d, want %d: %s", args, r.code, want, r.stderr)
	}
	return findings
}

// TestLocalAPI reads the node without the API server, over an agent's death.
func TestLocalAPI(t *testing.T) {
	create(t, pod("seen", container("app", share{"gpu": "1", "gpumem": "4000", "gpucores": "30"})))
	running(t, "seen")
	s := allocateAndHold(t, "seen", "app", 1000*mib)
	defer s.end()
	look := func(ctx context.Context) string {
		// Without a kubeconfig, so that nothing else can answer.
		out, err := cluster.Lab.Output(ctx, install.Programs+"/carve", "slices", "--local", "-o", "json")
		if err != nil {
			return err.Error()
		}
		var list []struct {
			Node, Namespace, Pod, Container, State string
			MemMiB, UsedMiB, Cores                 int64
		}
		if err := json.Unmarshal(out, &list); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		for _, v := range list {
			if v.Pod == "seen" {
				if v.Node != "node1" || v.Namespace != ns || v.Container != "app" || v.MemMiB != 4000 || v.Cores != 30 || v.UsedMiB < 1000 || v.UsedMiB > 4000 || v.State != "active" {
					return string(out)
				}
				return ""
			}
		}
		return "the slice isn't there: " + string(out)
	}
	eventually(t, "the slice to be seen on the node", look)
	out, err := cluster.Lab.Output(t.Context(), install.Programs+"/carve", "cards", "--local")
	if err != nil || strings.Count(string(out), "A100") != 2 || !strings.Contains(string(out), "default/seen app") {
		t.Errorf("cards --local: %v: %s", err, out)
	}
	// Only root and the group may look.
	if out, err := cluster.Lab.Output(t.Context(), "stat", "-c", "%a %U", "/run/carve/carve.sock"); err != nil || strings.TrimSpace(string(out)) != "660 root" {
		t.Errorf("the socket is %s, %v", out, err)
	}
	// Killed, it leaves its socket behind; ended, it takes it along.
	agent := partByName("agent")
	if err := agent.kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := agent.back(t.Context()); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the agent after a kill to serve the socket", look)
	up := agentDown(t)
	if out, err := cluster.Lab.Output(t.Context(), install.Programs+"/carve", "slices", "--local"); err == nil || !strings.Contains(err.Error(), "no agent serves this socket") {
		t.Errorf("without an agent: %v: %s", err, out)
	}
	up()
	eventually(t, "the next agent to serve the socket", look)
	if err := serving(t.Context()); err != nil {
		t.Fatal(err)
	}
	agree(t)
}
