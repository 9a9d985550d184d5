package suite

import (
	"bytes"
	"path/filepath"
	"strings"
	"testing"
)

// TestExamplesAreTaken: each example is one that the API server, the webhook and the
// policies take as it is, without a warning but that which its comment gives.
func TestExamplesAreTaken(t *testing.T) {
	files, err := filepath.Glob(filepath.Join(cluster.Repo, "deploy/examples/*.yaml"))
	if err != nil || len(files) < 6 {
		t.Fatalf("%d examples, %v", len(files), err)
	}
	for _, file := range files {
		name := filepath.Base(file)
		t.Run(name, func(t *testing.T) {
			cmd := cluster.Lab.Command(t.Context(), "kubectl", "--kubeconfig=/etc/kubernetes/admin.conf", "apply", "--dry-run=server", "-f", file)
			var out bytes.Buffer
			cmd.Stdout, cmd.Stderr = &out, &out
			if err := cluster.Lab.Run(cmd); err != nil {
				t.Fatalf("%v: %s", err, out.String())
			}
			for _, line := range strings.Split(out.String(), "\n") {
				if strings.HasPrefix(line, "Warning:") && !strings.Contains(line, "isolation timeslice holds no program") {
					t.Error(line)
				}
			}
		})
	}
}
