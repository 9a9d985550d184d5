package suite

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/carve-gpu/carve/api"
)

// patchAgents changes the agents' DaemonSet.
func patchAgents(t *testing.T, body string, args ...any) {
	t.Helper()
	if _, err := cluster.Client.AppsV1().DaemonSets(api.Namespace).Patch(context.Background(), api.AgentName, types.StrategicMergePatchType,
		fmt.Appendf(nil, body, args...), metav1.PatchOptions{}); err != nil {
		t.Fatalf("patch the DaemonSet: %v", err)
	}
}

// agentAway takes the agent off the node, as a bad upgrade would, and returns
// at once what brings it back.
func agentAway(t *testing.T) (back func()) {
	t.Helper()
	selector := `{"spec":{"template":{"spec":{"nodeSelector":{%q:%q}}}}}`
	patchAgents(t, selector, api.LabelManaged, "nowhere")
	back = sync.OnceFunc(func() {
		patchAgents(t, selector, api.LabelManaged, "true")
		nodeServes(t)
	})
	t.Cleanup(back)
	return back
}

// agentDown takes the agent off the node, waits until its pod is gone, and
// returns what brings it back.
func agentDown(t *testing.T) (up func()) {
	t.Helper()
	up = agentAway(t)
	eventually(t, "the agent to be gone", func(ctx context.Context) string {
		pods, err := cluster.AgentPods(ctx)
		if err != nil {
			return err.Error()
		}
		if len(pods) > 0 {
			return "its pod is there"
		}
		return ""
	})
	return up
}

// devices counts the cards' device nodes in a container.
func devices(t *testing.T, pod, container string) string {
	t.Helper()
	return strings.TrimSpace(shell(t, pod, container, "sh", "-c", "ls /dev | grep -c nvidia").stdout)
}

// nodeServes waits until the node takes pods: its agent is ready and the taint off.
func nodeServes(t *testing.T) {
	t.Helper()
	eventually(t, "the node to serve", func(ctx context.Context) string {
		pods, err := cluster.AgentPods(ctx)
		if err != nil {
			return err.Error()
		}
		if len(pods) != 1 || !ready(&pods[0]) {
			return fmt.Sprintf("%d pods of the agent, one of them ready: %t", len(pods), len(pods) > 0 && ready(&pods[0]))
		}
		if tainted(ctx, t) {
			return "it is tainted"
		}
		return ""
	})
}

func ready(p *corev1.Pod) bool {
	return p.DeletionTimestamp == nil && slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
}

func tainted(ctx context.Context, t *testing.T) bool {
	t.Helper()
	n, err := cluster.Client.CoreV1().Nodes().Get(ctx, cluster.Lab.Config().Node.Name, metav1.GetOptions{})
	if err != nil {
		t.Fatalf("get the node: %v", err)
	}
	return slices.ContainsFunc(n.Spec.Taints, func(x corev1.Taint) bool {
		return x.Key == api.TaintHookDown && x.Effect == corev1.TaintEffectNoSchedule
	})
}

func wantTaint(t *testing.T, want bool) {
	t.Helper()
	eventually(t, fmt.Sprintf("the taint to be there: %t", want), func(ctx context.Context) string {
		if tainted(ctx, t) != want {
			return "it isn't so"
		}
		return ""
	})
}

// feed creates small pods all the while, as a busy cluster does. A pod that
// runs is deleted, so that there is room for the next. One that the kubelet
// rejects is Failed for good, whatever its restart policy.
type feed struct {
	t      *testing.T
	cancel func()
	done   sync.WaitGroup

	mu       sync.Mutex
	run      string               // tells the pods of one feed from another's
	open     map[string]time.Time // created, neither running nor failed yet
	made     int
	rejected []rejection
	slowest  time.Duration
}

// rejection is a pod that the kubelet turned away; created is just before it was
// asked for.
type rejection struct {
	pod     string
	created time.Time
	why     string
}

func (r rejection) String() string {
	return fmt.Sprintf("%s, created %s: %s", r.pod, r.created.UTC().Format("15:04:05.000"), r.why)
}

const feedLabel = "carve-e2e/feed"

func startFeed(t *testing.T) *feed {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	f := &feed{t: t, cancel: cancel, open: map[string]time.Time{}, run: strconv.FormatInt(time.Now().UnixMilli(), 36)}
	f.done.Go(func() { f.create(ctx) })
	watch, stop := context.WithCancel(context.Background())
	f.done.Go(func() { f.collect(watch) })
	t.Cleanup(func() {
		cancel()
		stop()
		f.done.Wait()
		if err := cluster.Client.CoreV1().Pods(ns).DeleteCollection(context.Background(), metav1.DeleteOptions{}, metav1.ListOptions{LabelSelector: feedLabel + "=" + f.run}); err != nil {
			t.Error(err)
		}
	})
	return f
}

func (f *feed) create(ctx context.Context) {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		f.mu.Lock()
		many := len(f.open) >= 30
		n := f.made
		f.mu.Unlock()
		if many {
			continue
		}
		p := pod(fmt.Sprintf("feed-%s-%04d", f.run, n), container("app", share{"gpu": "1", "gpumem": "1000"}))
		p.Labels = map[string]string{feedLabel: f.run}
		p.Spec.RestartPolicy = corev1.RestartPolicyAlways
		// The pod may have run before the reply is here.
		f.mu.Lock()
		f.made++
		f.open[p.Name] = time.Now()
		f.mu.Unlock()
		if _, err := cluster.Client.CoreV1().Pods(ns).Create(ctx, p, metav1.CreateOptions{}); err != nil {
			f.mu.Lock()
			delete(f.open, p.Name)
			f.mu.Unlock()
			if ctx.Err() == nil {
				f.t.Errorf("create pod %s: %v", p.Name, err)
			}
		}
	}
}

// collect looks at the pods and deletes those that have come to something.
func (f *feed) collect(ctx context.Context) {
	for ctx.Err() == nil {
		list, err := cluster.Client.CoreV1().Pods(ns).List(ctx, metav1.ListOptions{LabelSelector: feedLabel + "=" + f.run})
		if err == nil {
			for _, p := range list.Items {
				f.look(ctx, &p)
			}
		}
		select {
		case <-ctx.Done():
		case <-time.After(100 * time.Millisecond):
		}
	}
}

func (f *feed) look(ctx context.Context, p *corev1.Pod) {
	if p.DeletionTimestamp != nil || p.Status.Phase != corev1.PodRunning && p.Status.Phase != corev1.PodFailed {
		return
	}
	f.mu.Lock()
	if at, ok := f.open[p.Name]; ok {
		delete(f.open, p.Name)
		f.slowest = max(f.slowest, time.Since(at))
		if p.Status.Phase == corev1.PodFailed {
			f.rejected = append(f.rejected, rejection{p.Name, at, p.Status.Reason + ": " + p.Status.Message})
		}
	}
	f.mu.Unlock()
	if err := cluster.Client.CoreV1().Pods(ns).Delete(ctx, p.Name, metav1.DeleteOptions{}); err != nil && !apierrors.IsNotFound(err) && ctx.Err() == nil {
		f.t.Errorf("delete pod %s: %v", p.Name, err)
	}
}

// passed waits until so many more pods were created.
func (f *feed) passed(n int) {
	f.t.Helper()
	f.mu.Lock()
	from := f.made
	f.mu.Unlock()
	eventually(f.t, fmt.Sprintf("%d more pods to be created", n), func(context.Context) string {
		f.mu.Lock()
		defer f.mu.Unlock()
		if f.made < from+n {
			return fmt.Sprintf("%d were, %d of all wait", f.made-from, len(f.open))
		}
		return ""
	})
}

// end stops creating, waits until every pod ran or was rejected and is gone,
// and returns what was rejected.
func (f *feed) end() []rejection {
	f.t.Helper()
	f.cancel()
	eventually(f.t, "all pods of the feed to have run", func(ctx context.Context) string {
		list, err := cluster.Client.CoreV1().Pods(ns).List(ctx, metav1.ListOptions{LabelSelector: feedLabel + "=" + f.run})
		if err != nil {
			return err.Error()
		}
		f.mu.Lock()
		defer f.mu.Unlock()
		if len(f.open) > 0 || len(list.Items) > 0 {
			first := ""
			for _, p := range list.Items {
				if first = p.Name + ": " + string(p.Status.Phase) + " " + unscheduled(&p); p.DeletionTimestamp == nil {
					break
				}
			}
			return fmt.Sprintf("%d wait, %d are there, such as %s", len(f.open), len(list.Items), first)
		}
		return ""
	})
	f.mu.Lock()
	defer f.mu.Unlock()
	f.t.Logf("%d pods, %d rejected, the slowest took %v to run", f.made, len(f.rejected), f.slowest.Round(100*time.Millisecond))
	return f.rejected
}

// cardsTable is what `carve cards` prints.
func cardsTable(t *testing.T) string {
	t.Helper()
	out, err := cluster.Carve(t.Context(), "cards")
	if err != nil {
		t.Fatalf("carve cards: %v: %s", err, out)
	}
	return string(out)
}

// node-2: with the agent away pods wait and say why; none is sent to a kubelet
// that would reject it for good.
func TestAgentAway(t *testing.T) {
	create(t, pod("before", container("app", share{"gpu": "1", "gpumem": "4000"})))
	running(t, "before")
	f := startFeed(t)
	f.passed(5)
	back := agentAway(t)
	create(t, pod("waits", container("app", share{"gpumem": "5000"})))
	f.passed(15)
	// Or it was bound while the agent served, before the DaemonSet's controller
	// took it away.
	waitsForAgent(t, "waits")
	wantTaint(t, true)
	if table := cardsTable(t); strings.Count(table, "healthy, agent down") != 2 {
		t.Errorf("carve cards doesn't say that the agent is down:\n%s", table)
	}
	if p := get(t.Context(), t, "before"); p.Status.Phase != corev1.PodRunning || p.Status.ContainerStatuses[0].RestartCount != 0 {
		t.Errorf("the running pod: %s, %d restarts", p.Status.Phase, p.Status.ContainerStatuses[0].RestartCount)
	}
	if code := allocate(t, "before", "app", 1000*mib); code != 0 {
		t.Errorf("allocating within the share gave CUDA error %d while the agent is away", code)
	}
	back()
	running(t, "waits")
	wantShare(t, "waits", "app", 5000)
	for _, r := range f.end() {
		t.Errorf("rejected: %s", r)
	}
	if table := cardsTable(t); strings.Contains(table, "down") {
		t.Errorf("carve cards says that something is down:\n%s", table)
	}
	agree(t)
}

// An upgrade of the agents, with pods created all the while.
func TestAgentRoll(t *testing.T) {
	f := startFeed(t)
	f.passed(5)
	for round := range 3 {
		before, err := cluster.AgentPods(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		patchAgents(t, `{"spec":{"template":{"metadata":{"annotations":{"carve-e2e/round":"%d"}}}}}`, round)
		eventually(t, "the agent to be replaced", func(ctx context.Context) string {
			now, err := cluster.AgentPods(ctx)
			if err != nil {
				return err.Error()
			}
			if len(now) != 1 || now[0].UID == before[0].UID || !ready(&now[0]) {
				return fmt.Sprintf("%d pods, replaced: %t", len(now), len(now) > 0 && now[0].UID != before[0].UID)
			}
			return ""
		})
		f.passed(5)
	}
	for _, r := range f.end() {
		t.Errorf("rejected: %s", r)
	}
	agree(t)
}

// The agent's process is killed with pods created all the while. Those that
// were on their way between the extender and the kubelet at that moment can't
// be saved: the kubelet has lost the plugin and rejects them for good. But none
// that was created afterwards, when the kubelet has told nobody yet, is sent
// there.
func TestAgentKilledUnderLoad(t *testing.T) {
	agent := partByName("agent")
	for range 2 {
		f := startFeed(t)
		f.passed(5)
		if err := agent.kill(t.Context()); err != nil {
			t.Fatal(err)
		}
		killed := time.Now()
		f.passed(10)
		if err := agent.back(t.Context()); err != nil {
			t.Fatal(err)
		}
		nodeServes(t)
		t.Logf("killed at %s, served %v later", killed.UTC().Format("15:04:05.000"), time.Since(killed).Round(100*time.Millisecond))
		for _, r := range f.end() {
			if r.created.After(killed) {
				t.Errorf("rejected: %s", r)
			} else {
				t.Logf("under way when the agent was killed: %s", r)
			}
		}
	}
	agree(t)
}

// A runtime that stays away takes the hook's link along: the node is avoided
// until it is back, and says so.
func TestRuntimeAway(t *testing.T) {
	create(t, pod("before", container("app", share{"gpu": "1", "gpumem": "4000"})))
	running(t, "before")
	if err := cluster.Lab.Stop(t.Context(), "containerd"); err != nil {
		t.Fatal(err)
	}
	start := sync.OnceFunc(func() {
		if err := cluster.Lab.StartComponent(context.Background(), "containerd"); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(start)
	create(t, pod("waits", container("app", share{"gpu": "1", "gpumem": "5000"})))
	wantTaint(t, true)
	if table := cardsTable(t); strings.Count(table, "healthy, hook down") != 2 {
		t.Errorf("carve cards doesn't say that the hook is down:\n%s", table)
	}
	create(t, pod("waits-too", container("app", share{"gpu": "1", "gpumem": "6000"})))
	start()
	for name, limit := range map[string]int64{"before": 4000, "waits": 5000, "waits-too": 6000} {
		running(t, name)
		wantShare(t, name, "app", limit)
	}
	wantTaint(t, false)
	agree(t)
}

// Whoever takes the extender over gets no more of a Node than one taint.
func TestTheExtenderMayTaintAndNothingElse(t *testing.T) {
	config, err := cluster.Lab.RESTConfig()
	if err != nil {
		t.Fatal(err)
	}
	config.Impersonate = rest.ImpersonationConfig{UserName: "system:serviceaccount:" + api.Namespace + ":carve-extender",
		Groups: []string{"system:serviceaccounts", "system:serviceaccounts:" + api.Namespace, "system:authenticated"}}
	extender, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	ours := fmt.Sprintf(`{"key":%q,"effect":"NoSchedule"}`, api.TaintHookDown)
	for name, c := range map[string]struct {
		patch       string
		subresource []string
		denied      string // a part of what the refusal says; empty if allowed
	}{
		"its taint":                {`{"spec":{"taints":[` + ours + `]}}`, nil, ""},
		"nothing":                  {`{}`, nil, ""},
		"another taint":            {`{"spec":{"taints":[{"key":"example.com/tenant","effect":"NoSchedule"}]}}`, nil, "no other taint"},
		"its taint, with eviction": {fmt.Sprintf(`{"spec":{"taints":[{"key":%q,"effect":"NoExecute"}]}}`, api.TaintHookDown), nil, "no other taint"},
		"its taint and a cordon":   {`{"spec":{"unschedulable":true,"taints":[` + ours + `]}}`, nil, "nothing else of its spec"},
		"a label":                  {`{"metadata":{"labels":{"carve.dev/managed":"false"}}}`, nil, "nothing of its metadata"},
		"an annotation":            {`{"metadata":{"annotations":{"a":"b"}}}`, nil, "nothing of its metadata"},
		"a finalizer":              {`{"metadata":{"finalizers":["example.com/x"]}}`, nil, "nothing of its metadata"},
		"the status":               {`{"status":{"capacity":{"nvidia.com/gpu":"1000"}}}`, []string{"status"}, "forbidden"},
	} {
		_, err := extender.CoreV1().Nodes().Patch(t.Context(), cluster.Lab.Config().Node.Name, types.MergePatchType, []byte(c.patch),
			metav1.PatchOptions{DryRun: []string{metav1.DryRunAll}}, c.subresource...)
		switch {
		case c.denied == "" && err != nil:
			t.Errorf("%s: %v", name, err)
		case c.denied != "" && (err == nil || !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), c.denied)):
			t.Errorf("%s: %v", name, err)
		}
	}
}
