package suite

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/deploy/e2e/install"
)

// plugin runs `kubectl carve …` in the lab: the real kubectl finds the plugin in
// its PATH.
func plugin(t *testing.T, args ...string) result {
	t.Helper()
	// Clean-ups run it as well, and then the test's context has ended.
	cmd := cluster.Lab.Command(context.WithoutCancel(t.Context()), "kubectl", append([]string{"carve"}, args...)...)
	withPlugin(cmd)
	return runIt(t, cmd)
}

// withPlugin puts the repository's programs into a command's PATH.
func withPlugin(cmd *exec.Cmd) {
	for i, e := range cmd.Env {
		if path, ok := strings.CutPrefix(e, "PATH="); ok {
			cmd.Env[i] = "PATH=" + install.Programs + ":" + path
		}
	}
}

func runIt(t *testing.T, cmd *exec.Cmd) result {
	t.Helper()
	var out, talk bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &talk
	err := cluster.Lab.Run(cmd)
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatalf("%s: %v: %s", strings.Join(cmd.Args, " "), err, talk.String())
	}
	r := result{out.String(), talk.String(), 0}
	if exit != nil {
		r.code = exit.ExitCode()
	}
	return r
}

// decoded runs the plugin with -o json.
func decoded[T any](t *testing.T, args ...string) T {
	t.Helper()
	r := plugin(t, append(args, "-o", "json")...)
	var v T
	if err := json.Unmarshal([]byte(r.stdout), &v); r.code != 0 || err != nil {
		t.Fatalf("kubectl carve %s: exit %d, %v: %s%s", strings.Join(args, " "), r.code, err, r.stdout, r.stderr)
	}
	return v
}

func wantSaid(t *testing.T, what, text string, words ...string) {
	t.Helper()
	for _, w := range words {
		if !strings.Contains(text, w) {
			t.Errorf("%s doesn't say %q:\n%s", what, w, text)
		}
	}
}

type usedPart struct {
	Namespace, Pod, State            string
	LimitBytes, UsedBytes, PeakBytes uint64
	Refusals                         uint64
}

func TestTopShowsUseAgainstGrant(t *testing.T) {
	create(t, pod("top-a", container("app", share{"gpumem": "8000", "gpucores": "30"})))
	running(t, "top-a")
	const held = 3 << 30
	s := allocateAndHold(t, "top-a", "app", held)
	defer s.end()
	eventually(t, "top to show what top-a holds", func(context.Context) string {
		for _, p := range decoded[[]usedPart](t, "top", "pods", "-n", ns) {
			if p.Pod == "top-a" && p.LimitBytes == 8000*mib && p.UsedBytes >= held && p.UsedBytes <= p.LimitBytes {
				return ""
			}
		}
		return plugin(t, "top", "pods", "-n", ns).stdout
	})
	r := plugin(t, "top")
	wantSaid(t, "top", r.stdout, "NODE", "USED", "A100-SXM4-80GB", "default/top-a", " W ", "°C")
	if r.code != 0 || r.stderr != "" {
		t.Errorf("top: exit %d, talk %q", r.code, r.stderr)
	}
	wantSaid(t, "top pods", plugin(t, "top", "pods", "-A", "--sort-by", "used").stdout, "top-a", "8000", "30%")
	wantSaid(t, "slices by another's rights", plugin(t, "top", "pods", "-n", ns, "--as", "nobody").stderr, "list GPUNodes")

	// A viewer has what the roles give.
	grantRoles(t, "viewer")
	if r := plugin(t, "top", "pods", "-n", ns, "--as", "viewer"); r.code != 0 || r.stderr != "" || !strings.Contains(r.stdout, "top-a") {
		t.Errorf("top for a viewer: exit %d, %s%s", r.code, r.stdout, r.stderr)
	}
}

// grantRoles binds the viewer's roles to a user.
func grantRoles(t *testing.T, user string) {
	t.Helper()
	objects := fmt.Sprintf(`apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: test-%[1]s}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: carve-viewer}
subjects: [{apiGroup: rbac.authorization.k8s.io, kind: User, name: %[1]s}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: test-%[1]s, namespace: %[2]s}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: carve-viewer}
subjects: [{apiGroup: rbac.authorization.k8s.io, kind: User, name: %[1]s}]
`, user, api.Namespace)
	if err := cluster.Lab.Apply(t.Context(), objects); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_, err := cluster.Lab.Kubectl(context.Background(), "delete", "clusterrolebinding/test-"+user)
		_, also := cluster.Lab.Kubectl(context.Background(), "-n", api.Namespace, "delete", "rolebinding/test-"+user)
		if err != nil || also != nil {
			t.Error(err, also)
		}
	})
}

type explained struct {
	Verdict, Summary string
	Nodes            []struct {
		Message string
		Cards   []struct {
			Reason  string
			Missing int64
		}
	}
	Missing []string
}

func TestExplainAgreesWithTheExtender(t *testing.T) {
	for _, name := range []string{"ex-a", "ex-b"} {
		create(t, pod(name, container("app", share{"gpumem": "60000"})))
		running(t, name)
	}
	eventually(t, "both to be reported", func(ctx context.Context) string {
		active := 0
		for _, c := range cards(ctx, t) {
			for _, s := range c.Slices {
				if s.State == "active" {
					active++
				}
			}
		}
		if active < 2 {
			return fmt.Sprintf("%d slices are active", active)
		}
		return ""
	})
	create(t, pod("ex-c", container("app", share{"gpumem": "30000"})))
	eventually(t, "the scheduler and explain to give the same reason", func(ctx context.Context) string {
		e := decoded[explained](t, "explain", "pod", "ex-c", "-n", ns)
		said := unscheduled(get(ctx, t, "ex-c"))
		if e.Verdict != "no-room" || len(e.Nodes) != 1 || said == "" || !strings.Contains(said, e.Nodes[0].Message) {
			return fmt.Sprintf("explain: %+v; scheduler: %s", e, said)
		}
		for _, c := range e.Nodes[0].Cards {
			if c.Reason != "memory" || c.Missing <= 0 || c.Missing >= 30000 {
				t.Errorf("card by card: %+v", e.Nodes[0].Cards)
			}
		}
		return ""
	})
	r := plugin(t, "explain", "pod", "ex-c", "-n", ns)
	wantSaid(t, "explain", r.stdout, "Verdict:    no-room", "MiB are missing", "default/ex-a", "default-scheduler")
	if r.code != 0 || r.stderr != "" {
		t.Errorf("explain: exit %d, talk %q", r.code, r.stderr)
	}
	wantSaid(t, "explain of a running pod", plugin(t, "explain", "pod", "ex-a", "-n", ns).stdout, "Verdict:  running", "60000 MiB", "active, generation 1")
	if r := plugin(t, "explain", "pod", "nobody", "-n", ns); r.code != 1 || r.stdout != "" || !strings.Contains(r.stderr, "there is no pod nobody") {
		t.Errorf("explain of no pod: exit %d, %q, %q", r.code, r.stdout, r.stderr)
	}

	// A tenant may read its namespace and no more.
	if _, err := cluster.Lab.Kubectl(t.Context(), "-n", ns, "create", "rolebinding", "test-tenant", "--clusterrole=view", "--user=tenant"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_, _ = cluster.Lab.Kubectl(context.Background(), "-n", ns, "delete", "rolebinding", "test-tenant")
	})
	eventually(t, "the tenant's rights to be known", func(context.Context) string {
		r := plugin(t, "explain", "pod", "ex-c", "-n", ns, "--as", "tenant")
		if r.code != 0 || !strings.Contains(r.stdout, "Verdict:    unknown") || !strings.Contains(r.stdout, "Not shown: what each card says") || !strings.Contains(r.stdout, "asked 30000 MiB") {
			return fmt.Sprintf("exit %d: %s%s", r.code, r.stdout, r.stderr)
		}
		return ""
	})
}

func TestCordonedCardsTakeNothingNew(t *testing.T) {
	node := cluster.Lab.Config().Node.Name
	t.Cleanup(func() {
		if r := plugin(t, "uncordon", node); r.code != 0 {
			t.Errorf("uncordon: %s", r.stderr)
		}
	})
	for _, c := range []struct {
		args []string
		code int
		says string
	}{
		{[]string{"cordon"}, 2, "requires at least 1 arg"},
		{[]string{"cordon", "no-such-node"}, 1, "node no-such-node reports no cards"},
		{[]string{"cordon", node, "GPU-nonsense"}, 1, `has no card "GPU-nonsense"; it has 0 (GPU-`},
	} {
		if r := plugin(t, c.args...); r.code != c.code || r.stdout != "" || !strings.Contains(r.stderr, c.says) {
			t.Errorf("%v: exit %d, %q, %q", c.args, r.code, r.stdout, r.stderr)
		}
	}
	// What goes past the command is refused by the API server.
	for _, bad := range []string{`["nonsense"]`, `["GPU-x; rm"]`, `["GPU-a","GPU-a"]`} {
		if out, err := cluster.Lab.Kubectl(t.Context(), "patch", "gpunode", node, "--type=merge", "-p", `{"spec":{"cordonedCards":`+bad+`}}`); err == nil {
			t.Errorf("the API server took %s: %s", bad, out)
		}
	}
	create(t, pod("co-a", container("app", share{"gpumem": "8000"})))
	running(t, "co-a")
	var r result
	eventually(t, "cordon to name who stays", func(context.Context) string {
		if r = plugin(t, "cordon", node, "--reason", "a test"); r.code != 0 || !strings.Contains(r.stdout, "stays on it: default/co-a app (8000 MiB)") {
			return r.stdout + r.stderr
		}
		return ""
	})
	again := plugin(t, "cordon", node)
	wantSaid(t, "cordon again", again.stdout, "is cordoned already")
	create(t, pod("co-b", container("app", share{"gpumem": "8000"})))
	eventually(t, "co-b to be refused for the cordon", func(context.Context) string {
		e := plugin(t, "explain", "pod", "co-b", "-n", ns)
		if !strings.Contains(e.stdout, "the card is cordoned (a test)") || !strings.Contains(e.stdout, "Verdict:    cordoned") {
			return e.stdout + e.stderr
		}
		return ""
	})
	wantSaid(t, "cards", plugin(t, "cards").stdout, "cordoned (a test)")
	if r := plugin(t, "uncordon", node, "0"); r.code != 0 || !strings.Contains(r.stdout, "uncordoned") {
		t.Errorf("uncordon: %+v", r)
	}
	running(t, "co-b") // the waiting pod is woken
}

func TestKubectlCompletesThePlugin(t *testing.T) {
	create(t, pod("completed", container("app", share{"gpumem": "1000"})))
	node := cluster.Lab.Config().Node.Name
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"carve", "explain", "pod", "-n", ns, ""}, "completed"},
		{[]string{"carve", "cordon", ""}, node},
		{[]string{"carve", "cordon", node, ""}, "0"},
		{[]string{"carve", "cards", "-o", ""}, "yaml"},
		{[]string{"carve", "top", "--node", ""}, node},
		{[]string{"carve", "top", ""}, "pods"},
		{[]string{"carve", "top", "--context", ""}, ""},
	} {
		cmd := cluster.Lab.Command(t.Context(), "kubectl", append([]string{"__complete"}, c.args...)...)
		withPlugin(cmd)
		r := runIt(t, cmd)
		var words []string
		for _, l := range strings.Split(r.stdout, "\n") {
			word, _, _ := strings.Cut(l, "\t")
			words = append(words, word)
		}
		if r.code != 0 || c.want != "" && !slices.Contains(words, c.want) {
			t.Errorf("%v: exit %d, %q, want %q", c.args, r.code, words, c.want)
		}
	}
	help := plugin(t, "top", "--help")
	wantSaid(t, "help", help.stdout, "kubectl carve top [cards|pods]", "--namespace", "--kubeconfig")
	for _, shell := range []string{"bash", "zsh", "fish"} {
		if out, err := cluster.Carve(t.Context(), "completion", shell); err != nil || len(out) < 1000 {
			t.Errorf("completion %s: %d bytes, %v", shell, len(out), err)
		}
	}
}

func TestLivePages(t *testing.T) {
	create(t, pod("seen", container("app", share{"gpumem": "8000"})))
	running(t, "seen")
	client := cluster.Lab.HTTPClient()
	client.Timeout = 10 * time.Second
	defer client.CloseIdleConnections()
	read := func(url string) (string, http.Header) {
		r, err := client.Get(url)
		if err != nil {
			return err.Error(), nil
		}
		defer r.Body.Close()
		b, err := io.ReadAll(r.Body)
		if err != nil || r.StatusCode != http.StatusOK {
			return fmt.Sprint(r.Status, err), nil
		}
		return string(b), r.Header
	}
	agent := "http://" + cluster.Lab.Config().Node.IP() + ":9410"
	eventually(t, "the agent's page to show the pod", func(context.Context) string {
		text, _ := read(agent + "/api/v1/cards")
		if !strings.Contains(text, `"pod":"seen"`) || !strings.Contains(text, `"scope":"node"`) || !strings.Contains(text, `"powerWatts"`) {
			return text
		}
		return ""
	})
	text, header := read(agent + "/")
	if !strings.Contains(text, "<main id=\"nodes\"") || !strings.HasPrefix(header.Get("Content-Security-Policy"), "default-src 'self'") {
		t.Errorf("the agent's page: %v %s", header, text)
	}
	if text, _ := read(agent + "/metrics"); !strings.Contains(text, "carve_card_power_watts") {
		t.Error("the metrics are gone, or have no power")
	}

	pods, err := cluster.Client.CoreV1().Pods(api.Namespace).List(t.Context(), metav1.ListOptions{LabelSelector: "app.kubernetes.io/name=carve-extender"})
	if err != nil || len(pods.Items) != 1 {
		t.Fatalf("the extender's pods: %v, %v", pods, err)
	}
	// From the pod network no names, by port-forward all of them.
	eventually(t, "the extender's page to show the share", func(context.Context) string {
		text, _ := read("http://" + pods.Items[0].Status.PodIP + ":8080/api/v1/cards")
		if !strings.Contains(text, `"scope":"cluster"`) || !strings.Contains(text, fmt.Sprint(8000*mib)) || !strings.Contains(text, `"hidden":true`) {
			return text
		}
		if strings.Contains(text, "seen") {
			t.Fatalf("names are told in the pod network: %s", text)
		}
		return ""
	})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	forward := cluster.Lab.Command(ctx, "kubectl", "-n", api.Namespace, "port-forward", "deploy/carve-extender", "18080:8080")
	if err := cluster.Lab.Start(forward); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the extender's page by port-forward", func(context.Context) string {
		text, _ := read("http://127.0.0.1:18080/api/v1/cards")
		if !strings.Contains(text, `"pod":"seen"`) {
			return text
		}
		return ""
	})
	cancel()
	_ = forward.Wait() // it was killed
}
