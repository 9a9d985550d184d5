package schedconfig_test

import (
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/carve-gpu/carve/scheduler-extender/schedconfig"
)

var update = flag.Bool("update", false, "rewrite the golden files")

var options = schedconfig.Options{URL: "https://10.96.0.20:443", TLSDir: "/etc/kubernetes/carve"}

func golden(t *testing.T, name string, got []byte) {
	t.Helper()
	file := filepath.Join("testdata", name)
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
		t.Fatalf("differs from %s:\n%s", file, got)
	}
}

func TestMerge(t *testing.T) {
	for name, c := range map[string]struct{ base, file string }{
		"nothing before": {"", "alone.yaml"},
		"what the operator has": {`
apiVersion: kubescheduler.config.k8s.io/v1
kind: KubeSchedulerConfiguration
clientConnection: {kubeconfig: /etc/kubernetes/scheduler.conf}
leaderElection: {leaderElect: true}
profiles:
- schedulerName: default-scheduler
  percentageOfNodesToScore: 20
extenders:
- {urlPrefix: "http://127.0.0.1:9000", filterVerb: filter, nodeCacheCapable: true}
`, "merged.yaml"},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := schedconfig.Merge([]byte(c.base), options)
			if err != nil {
				t.Fatal(err)
			}
			golden(t, c.file, got)
			// Again, at another address: the entry is replaced.
			moved := options
			moved.URL = "https://10.96.0.21:443"
			again, err := schedconfig.Merge(got, moved)
			if err != nil {
				t.Fatal(err)
			}
			if want := strings.ReplaceAll(string(got), options.URL, moved.URL); string(again) != want {
				t.Fatalf("merged again:\n%s", again)
			}
		})
	}
}

func TestMergeRefuses(t *testing.T) {
	const head = "apiVersion: kubescheduler.config.k8s.io/v1\nkind: KubeSchedulerConfiguration\n"
	for name, c := range map[string]struct {
		base    string
		options schedconfig.Options
		want    string
	}{
		"another binder":           {head + "extenders: [{urlPrefix: 'https://hami:443', bindVerb: bind}]", options, "https://hami:443 binds pods as well"},
		"another kind":             {"apiVersion: v1\nkind: Pod", options, "expected is kubescheduler.config.k8s.io/v1"},
		"not YAML":                 {"\t{", options, "read the scheduler's configuration"},
		"a list as extenders":      {head + "extenders: 3", options, "extenders is not a list"},
		"a bare extender":          {head + "extenders: [x]", options, "not an object"},
		"plain HTTP":               {"", schedconfig.Options{URL: "http://10.0.0.1", TLSDir: "/x"}, "is not https"},
		"a folder that is not":     {"", schedconfig.Options{URL: "https://10.0.0.1", TLSDir: "x"}, "not an absolute path"},
		"a URL without an address": {"", schedconfig.Options{URL: "https://:443", TLSDir: "/x"}, "is not https://ADDRESS:PORT"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := schedconfig.Merge([]byte(c.base), c.options)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Fatalf("error %v, want %q", err, c.want)
			}
		})
	}
}

func TestASchedulerOfItsOwn(t *testing.T) {
	const head = "apiVersion: kubescheduler.config.k8s.io/v1\nkind: KubeSchedulerConfiguration\n"
	o := options
	o.SchedulerName = "carve-scheduler"
	for name, c := range map[string]struct{ base, want string }{
		"from nothing":       {"", "profiles:\n- schedulerName: carve-scheduler\n"},
		"from the cluster's": {head + "profiles: [{schedulerName: default-scheduler, percentageOfNodesToScore: 7}]", "profiles:\n- percentageOfNodesToScore: 7\n  schedulerName: carve-scheduler\n"},
	} {
		out, err := schedconfig.Merge([]byte(c.base), o)
		if err != nil || !strings.Contains(string(out), c.want) || !strings.Contains(string(out), "leaderElection:\n  resourceName: carve-scheduler\n") {
			t.Errorf("%s: %v\n%s", name, err, out)
		}
	}
	if _, err := schedconfig.Merge([]byte(head+"profiles: [{}, {}]"), o); err == nil || !strings.Contains(err.Error(), "2 profiles") {
		t.Errorf("two profiles: %v", err)
	}
}
