package schedconfig_test

import (
	"os"
	"testing"

	"github.com/carve-gpu/carve/scheduler-extender/schedconfig"
)

// The configuration of the second install is what `carve extender scheduler-config`
// writes for it, so that one can't change without the other.
func TestSecondInstall(t *testing.T) {
	const file = "../../deploy/scheduler/second/kube-scheduler.yaml"
	got, err := schedconfig.Merge([]byte(`
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
leaderElection: {leaderElect: true, resourceNamespace: carve-system}
`), schedconfig.Options{URL: "https://carve-extender.carve-system.svc:443", TLSDir: "/etc/kubernetes/carve", SchedulerName: "carve-scheduler"})
	if err != nil {
		t.Fatal(err)
	}
	if *update {
		if err := os.WriteFile(file, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if string(got) != string(want) {
		t.Errorf("differs from %s:\n%s", file, got)
	}
}
