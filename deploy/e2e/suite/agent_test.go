package suite

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/carve-gpu/carve/api"
)

// restartAgent replaces the agent's pod, as a node's crash of it does, and waits
// for the next one to serve.
func restartAgent(t *testing.T) {
	t.Helper()
	pods, err := cluster.AgentPods(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	zero := int64(0)
	for _, p := range pods {
		err := cluster.Client.CoreV1().Pods(api.Namespace).Delete(context.Background(), p.Name, metav1.DeleteOptions{GracePeriodSeconds: &zero})
		if err != nil && !apierrors.IsNotFound(err) {
			t.Fatal(err)
		}
	}
	eventually(t, "a new agent to be ready", func(ctx context.Context) string {
		now, err := cluster.AgentPods(ctx)
		if err != nil {
			return err.Error()
		}
		for _, p := range now {
			for _, old := range pods {
				if p.UID == old.UID {
					return "the old pod is there"
				}
			}
			for _, c := range p.Status.Conditions {
				if c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue {
					return ""
				}
			}
		}
		return "no pod is ready"
	})
	if err := cluster.WaitReady(context.Background()); err != nil {
		t.Fatal(err)
	}
}

// settings changes the agent's settings and restarts it, until the test's end.
func settings(t *testing.T, name, value string) {
	t.Helper()
	patch := func(value string) {
		body := fmt.Appendf(nil, `{"data":{%q:%s}}`, name, value)
		if _, err := cluster.Client.CoreV1().ConfigMaps(api.Namespace).Patch(context.Background(), "carve-node", types.MergePatchType, body, metav1.PatchOptions{}); err != nil {
			t.Fatalf("patch the agent's settings: %v", err)
		}
		restartAgent(t)
	}
	t.Cleanup(func() { patch("null") })
	patch(`"` + value + `"`)
}

// events are the messages of one reason on a pod of the tests.
func events(ctx context.Context, t *testing.T, pod, reason string) []string {
	t.Helper()
	l, err := cluster.Client.CoreV1().Events(ns).List(ctx, metav1.ListOptions{FieldSelector: "involvedObject.name=" + pod + ",reason=" + reason})
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, e := range l.Items {
		out = append(out, e.Message)
	}
	return out
}

// bindPast binds a pod to the node without a grant, as a scheduler does that
// doesn't know of carve.
func bindPast(t *testing.T, p *corev1.Pod) {
	t.Helper()
	p.Spec.SchedulerName = "another-scheduler"
	create(t, p)
	err := cluster.Client.CoreV1().Pods(ns).Bind(t.Context(), &corev1.Binding{
		ObjectMeta: metav1.ObjectMeta{Name: p.Name, Namespace: ns},
		Target:     corev1.ObjectReference{Kind: "Node", Name: cluster.Lab.Config().Node.Name},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatalf("bind %s: %v", p.Name, err)
	}
}

// TestPodsPastTheExtender binds pods without a grant: by default they get no
// card and a reason; where the node may choose, it does, keeps its choice, and
// the extender counts it. share-10.
func TestPodsPastTheExtender(t *testing.T) {
	bindPast(t, pod("past-refused", container("app", share{"gpu": "1", "gpumem": "3000"})))
	bindPast(t, pod("past-refused-share", container("app", share{"gpumem": "3000"})))
	for _, name := range []string{"past-refused", "past-refused-share"} {
		eventually(t, name+" to be refused with a sentence", func(ctx context.Context) string {
			for _, s := range get(ctx, t, name).Status.ContainerStatuses {
				if s.State.Running != nil {
					t.Fatalf("%s runs without a grant", name)
				}
				if w := s.State.Waiting; w != nil && strings.Contains(w.Message, "came past carve's scheduler extender") {
					return ""
				}
			}
			return fmt.Sprintf("%+v", get(ctx, t, name).Status.ContainerStatuses)
		})
	}
	remove(t, "past-refused")
	remove(t, "past-refused-share")

	settings(t, "CARVE_NODE_PODS_PAST_EXTENDER", "local")
	bindPast(t, pod("past", container("app", share{"gpu": "1", "gpumem": "60000"})))
	running(t, "past")
	wantShare(t, "past", "app", 60000)
	bindPast(t, pod("past-bare", container("app", share{"gpumem": "3000"})))
	running(t, "past-bare")
	wantShare(t, "past-bare", "app", 3000)
	// The extender counts what the node reports: one more of this size fits on
	// the other card, and no third.
	create(t, pod("second", container("app", share{"gpumem": "60000"})))
	running(t, "second")
	create(t, pod("third", container("app", share{"gpumem": "60000"})))
	wantPending(t, "third", "60000")
	// And the node gives nothing that is taken.
	bindPast(t, pod("past-full", container("app", share{"gpumem": "60000"})))
	eventually(t, "the node to refuse what doesn't fit", func(ctx context.Context) string {
		if e := events(ctx, t, "past-full", "GrantRefused"); len(e) == 0 || !strings.Contains(e[0], "asked 60000 MiB") {
			return fmt.Sprintf("events %q", e)
		}
		return ""
	})
	before := onCard(t, "past")
	restartAgent(t)
	wantShare(t, "past", "app", 60000)
	if after := onCard(t, "past"); after != before || after == "" {
		t.Errorf("after a restart of the agent the slice is on %q, before on %q", after, before)
	}
	remove(t, "past")
	// Whoever of the two is first gets the room; the other one waits on.
	eventually(t, "the room to be used again", func(ctx context.Context) string {
		n := 0
		for _, name := range []string{"third", "past-full"} {
			for _, s := range get(ctx, t, name).Status.ContainerStatuses {
				if s.State.Running != nil {
					n++
				}
			}
		}
		if n != 1 {
			return fmt.Sprintf("%d of two run", n)
		}
		return ""
	})
}

// onCard is the card that the report shows a pod on.
func onCard(t *testing.T, name string) string {
	t.Helper()
	for _, c := range cards(t.Context(), t) {
		for _, s := range c.Slices {
			if s.Pod == name {
				return c.UUID
			}
		}
	}
	return ""
}

// TestLostDeviceAccessIsRepaired takes the card from a running container's
// device rules, as a reload of systemd does.
func TestLostDeviceAccessIsRepaired(t *testing.T) {
	create(t, pod("cut-off", container("app", share{"gpu": "1", "gpumem": "2000"})))
	p := running(t, "cut-off")
	_, id, _ := strings.Cut(p.Status.ContainerStatuses[0].ContainerID, "://")
	if _, err := os.Stat("/sys/fs/cgroup/devices"); os.IsNotExist(err) {
		t.Skip("cgroup v2: what a container may open is a program there, which the agent doesn't repair (README, limits)")
	}
	out, err := cluster.Lab.Output(t.Context(), "find", "/sys/fs/cgroup/devices", "-type", "d", "-name", id)
	dir := strings.TrimSpace(string(out))
	if err != nil || dir == "" || strings.Contains(dir, "\n") {
		t.Fatalf("the device rules of the container: %q, %v", dir, err)
	}
	opens := func() string {
		return shell(t, "cut-off", "app", "sh", "-c", ": </dev/nvidia0 || : </dev/nvidia1").stderr
	}
	if text := opens(); strings.Contains(text, "not permitted") {
		t.Fatalf("the card can't be opened to begin with: %s", text)
	}
	repairs := sample(metrics(t), "carve_device_access_repairs_total", "")
	list := func() string {
		out, err := cluster.Lab.Output(t.Context(), "cat", dir+"/devices.list")
		if err != nil {
			t.Fatal(err)
		}
		return string(out)
	}
	before := list()
	denied := false
	for range 5 { // a look of the agent may come between the two
		r := shell(t, "cut-off", "app", "sh", "-c", `for d in /dev/nvidia[0-9]*; do stat -c '%t %T' $d; done`)
		var major, minor int
		if _, err := fmt.Sscanf(r.stdout, "%x %x", &major, &minor); err != nil {
			t.Fatalf("the card's numbers: %q: %v", r.stdout, err)
		}
		rule := fmt.Sprintf("c %d:%d rw", major, minor)
		if !strings.Contains(before, rule) {
			t.Fatalf("the rules don't hold %q: %s", rule, before)
		}
		if _, err := cluster.Lab.Output(t.Context(), "sh", "-c", fmt.Sprintf("echo '%s' >%s/devices.deny", rule, dir)); err != nil {
			t.Fatal(err)
		}
		if denied = strings.Contains(opens(), "not permitted"); denied {
			break
		}
	}
	if !denied {
		t.Fatal("a denied card can be opened")
	}
	eventually(t, "the card to be opened again", func(context.Context) string {
		if text := opens(); strings.Contains(text, "not permitted") {
			return text
		}
		return ""
	})
	if now := list(); len(strings.Fields(now)) != len(strings.Fields(before)) {
		t.Errorf("the rules were\n%s and are now\n%s", before, now)
	}
	wantShare(t, "cut-off", "app", 2000)
	eventually(t, "an event and the metric", func(ctx context.Context) string {
		if e := events(ctx, t, "cut-off", "DeviceAccessRepaired"); len(e) == 0 || !strings.Contains(e[0], "/dev/nvidia") {
			return fmt.Sprintf("events %q", e)
		}
		if now := sample(metrics(t), "carve_device_access_repairs_total", ""); now <= repairs {
			return fmt.Sprintf("%v repairs, before %v", now, repairs)
		}
		return ""
	})
}

// withValidator switches the runtime's default validator on, until the test's
// end.
func withValidator(t *testing.T) {
	t.Helper()
	file := filepath.Join(cluster.Lab.Config().Dir, "kubernetes", "containerd.toml")
	before, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	use := func(text []byte) {
		if err := os.WriteFile(file, text, 0o644); err != nil {
			t.Fatal(err)
		}
		if err := cluster.Lab.Restart(context.Background(), "containerd"); err != nil {
			t.Fatal(err)
		}
		if err := cluster.WaitReady(context.Background()); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() { use(before) })
	use(append(before, "\n  [plugins.\"io.containerd.nri.v1.nri\".default_validator]\n    enable = true\n"...))
}

// gated makes a pod that doesn't restart, whose app container starts when the
// returned function is called.
func gated(t *testing.T, name string, s share) (open func()) {
	t.Helper()
	p := pod(name, container("app", s))
	gate := container("gate", nil)
	gate.Command = []string{"sh", "-c", "until [ -e /gate/open ]; do sleep 0.1; done"}
	gate.VolumeMounts = []corev1.VolumeMount{{Name: "gate", MountPath: "/gate"}}
	p.Spec.InitContainers = []corev1.Container{gate}
	p.Spec.Volumes = []corev1.Volume{{Name: "gate", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}}}
	create(t, p)
	eventually(t, name+" to stand at its gate", func(ctx context.Context) string {
		for _, s := range get(ctx, t, name).Status.InitContainerStatuses {
			if s.State.Running != nil {
				return ""
			}
		}
		return "it isn't there; " + unscheduled(get(ctx, t, name))
	})
	return func() {
		if r := shell(t, name, "gate", "touch", "/gate/open"); r.code != 0 {
			t.Fatalf("open the gate of %s: %s", name, r.stderr)
		}
	}
}

// TestNothingStartsUnadjustedWhereTheRuntimeValidates has containers created
// while the agent is away that never meet the device plugin and whose pod
// doesn't restart them: with the validator they wait for the hook.
func TestNothingStartsUnadjustedWhereTheRuntimeValidates(t *testing.T) {
	withValidator(t)
	withoutWebhook(t) // it would have the pod ask for a slot, and so meet the plugin
	open := gated(t, "waits", share{"gpumem": "3000"})
	create(t, pod("plain", container("app", nil)))
	running(t, "plain")
	up := agentDown(t)
	open()
	eventually(t, "the runtime to refuse the container", func(ctx context.Context) string {
		p := get(ctx, t, "waits")
		for _, s := range p.Status.ContainerStatuses {
			if s.State.Running != nil || s.State.Terminated != nil {
				t.Fatalf("it started while the hook was away: %+v", s.State)
			}
			if w := s.State.Waiting; w != nil && strings.Contains(w.Message, `required plugin "carve"`) {
				return ""
			}
		}
		return fmt.Sprintf("%+v", p.Status.ContainerStatuses)
	})
	// Pods that ask for nothing aren't held, once they are on the node.
	plain := pod("plain-2", container("app", nil))
	plain.Spec.Tolerations = []corev1.Toleration{{Key: api.TaintHookDown, Operator: corev1.TolerationOpExists}}
	create(t, plain)
	running(t, "plain-2")
	up()
	running(t, "waits")
	wantShare(t, "waits", "app", 3000)
	if e := events(t.Context(), t, "waits", "StartedWithoutCard"); len(e) != 0 {
		t.Errorf("it was started without a card: %q", e)
	}
}

// TestWhatStartedUnadjustedIsStopped is the same without the validator: nothing
// keeps such a container from starting, so it is stopped, and its pod says why
// it failed. A job on the CPU by mistake would be worse.
func TestWhatStartedUnadjustedIsStopped(t *testing.T) {
	withoutWebhook(t)
	open := gated(t, "too-early", share{"gpumem": "3000"})
	up := agentDown(t)
	open()
	running(t, "too-early")
	if n := devices(t, "too-early", "app"); n != "0" {
		t.Errorf("it has %s device nodes", n)
	}
	up()
	eventually(t, "it to be stopped, with the reason on its pod", func(ctx context.Context) string {
		if p := get(ctx, t, "too-early"); p.Status.Phase != corev1.PodFailed {
			return "its phase is " + string(p.Status.Phase)
		}
		if e := events(ctx, t, "too-early", "StartedWithoutCard"); len(e) == 0 || !strings.Contains(e[0], "doesn't restart") {
			return fmt.Sprintf("events %q", e)
		}
		return ""
	})
}

// TestRollingTheAgent replaces the agent while pods start: the next one stands
// by before the old one ends, so no container starts without its card, none is
// refused for good, and what runs is left alone.
func TestRollingTheAgent(t *testing.T) {
	create(t, pod("stays", container("app", share{"gpu": "1", "gpumem": "4000"})))
	stays := running(t, "stays")
	stop, done := make(chan struct{}), make(chan int)
	go func() {
		n := 0
		defer func() { done <- n }()
		for {
			select {
			case <-stop:
				return
			case <-time.After(300 * time.Millisecond):
			}
			if n == 50 { // the node has 64 slots
				continue
			}
			s := share{"gpumem": "1200"}
			if n%2 == 0 {
				s["gpu"] = "1"
			}
			p := pod(fmt.Sprintf("rolled-%d", n), container("app", s))
			if _, err := cluster.Client.CoreV1().Pods(ns).Create(context.Background(), p, metav1.CreateOptions{}); err != nil {
				t.Errorf("create %s: %v", p.Name, err)
				return
			}
			n++
			// One after the other, so that they are spread over the whole roll.
			for bound := false; !bound; {
				select {
				case <-stop:
					return
				case <-time.After(50 * time.Millisecond):
				}
				q, err := cluster.Client.CoreV1().Pods(ns).Get(context.Background(), p.Name, metav1.GetOptions{})
				bound = err == nil && q.Spec.NodeName != ""
			}
		}
	}()
	for round := range 3 {
		roll(t, fmt.Sprint(round))
	}
	close(stop)
	n := <-done
	t.Logf("%d pods were created while the agent was replaced 3 times", n)
	t.Cleanup(func() {
		for i := range n {
			remove(t, fmt.Sprintf("rolled-%d", i))
		}
	})
	for i := range n {
		name := fmt.Sprintf("rolled-%d", i)
		p := running(t, name)
		if p.Status.ContainerStatuses[0].RestartCount != 0 {
			t.Errorf("%s was started more than once", name)
		}
		for _, reason := range []string{"StartedWithoutCard", "UnexpectedAdmissionError"} {
			if e := events(t.Context(), t, name, reason); len(e) != 0 {
				t.Errorf("%s: %s: %q", name, reason, e)
			}
		}
		if i < 4 || i >= n-4 { // each probe takes a while
			wantShare(t, name, "app", 1200)
		}
	}
	if p := running(t, "stays"); p.UID != stays.UID || p.Status.ContainerStatuses[0].RestartCount != 0 {
		t.Error("the pod that ran before was disturbed")
	}
	wantShare(t, "stays", "app", 4000)
}

// roll changes the DaemonSet's template and waits until only the new agent is
// there.
func roll(t *testing.T, to string) {
	t.Helper()
	body := fmt.Appendf(nil, `{"spec":{"template":{"metadata":{"annotations":{"test/roll":%q}}}}}`, to)
	if _, err := cluster.Client.AppsV1().DaemonSets(api.Namespace).Patch(t.Context(), "carve-node", types.MergePatchType, body, metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the roll to end", func(ctx context.Context) string {
		pods, err := cluster.AgentPods(ctx)
		if err != nil {
			return err.Error()
		}
		if len(pods) != 1 || pods[0].Annotations["test/roll"] != to {
			return fmt.Sprintf("%d agents", len(pods))
		}
		for _, c := range pods[0].Status.Conditions {
			if c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue {
				return ""
			}
		}
		return "the new agent isn't ready"
	})
}
