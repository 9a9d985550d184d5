package suite

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os/exec"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/deploy/e2e/install"
	"github.com/carve-gpu/carve/vgpu/region"
)

// resized is what `carve resize -o json` prints.
type resized struct {
	Outcome    string  `json:"outcome"`
	Message    string  `json:"message"`
	Generation int     `json:"generation"`
	InForce    bool    `json:"inForce"`
	Seconds    float64 `json:"seconds"`
}

// resize runs carve resize on the node and returns what it printed, what it said
// and its exit code.
func resize(t *testing.T, pod string, args ...string) (resized, string, int) {
	t.Helper()
	command := append([]string{"KUBECONFIG=/etc/kubernetes/admin.conf", install.Programs + "/carve", "resize", "pod/" + pod, "-n", ns, "-o", "json", "--timeout", patience.String()}, args...)
	cmd := cluster.Lab.Command(t.Context(), "env", command...)
	var out, talk bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &talk
	err := cluster.Lab.Run(cmd)
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatalf("carve resize: %v: %s", err, talk.String())
	}
	var r resized
	if out.Len() > 0 {
		if err := json.Unmarshal(out.Bytes(), &r); err != nil {
			t.Fatalf("carve resize printed %q: %v", out.String(), err)
		}
	}
	if exit != nil {
		return r, talk.String(), exit.ExitCode()
	}
	return r, talk.String(), 0
}

// wantResized resizes a pod and wants it in force.
func wantResized(t *testing.T, pod string, args ...string) resized {
	t.Helper()
	r, said, code := resize(t, pod, args...)
	if code != 0 || r.Outcome != api.ResizeGranted || !r.InForce {
		t.Fatalf("carve resize %s %v: exit %d, %+v; %s", pod, args, code, r, said)
	}
	t.Logf("%s %v: in force after %.3f s", pod, args, r.Seconds)
	return r
}

// wantRefused resizes a pod and wants that refused with a sentence, and nothing
// changed: the grant's amounts, and what the container may use.
func wantRefused(t *testing.T, pod string, still func(), args []string, sentence ...string) {
	t.Helper()
	before := grant(t, get(t.Context(), t, pod))
	r, said, code := resize(t, pod, args...)
	if code != 1 || r.Outcome != api.ResizeRefused {
		t.Fatalf("carve resize %s %v: exit %d, %+v; %s", pod, args, code, r, said)
	}
	for _, s := range sentence {
		if !strings.Contains(said, s) || !strings.Contains(r.Message, s) {
			t.Errorf("carve resize %s %v says %q and %q, without %q", pod, args, said, r.Message, s)
		}
	}
	eventually(t, "an event that says why", func(ctx context.Context) string {
		said := strings.Join(events(ctx, t, pod, "ResizeRefused"), "; ")
		for _, s := range sentence {
			if !strings.Contains(said, s) {
				return fmt.Sprintf("%q without %q", said, s)
			}
		}
		return ""
	})
	after := grant(t, get(t.Context(), t, pod))
	if fmt.Sprint(before.Containers) != fmt.Sprint(after.Containers) {
		t.Errorf("a refused resize changed %+v to %+v", before.Containers, after.Containers)
	}
	agree(t)
	still()
}

// wantTotal checks the card's memory as a process that holds some of it sees it.
func wantTotal(t *testing.T, s *session, limitMiB int64) {
	t.Helper()
	if m := s.say("info", "memory"); m["totalBytes"] != float64(limitMiB<<20) {
		t.Errorf("%s sees %v, want %d MiB in all", s.where, m, limitMiB)
	}
}

// TestLiveResize grows and shrinks the share of a process that runs all the while.
func TestLiveResize(t *testing.T) {
	create(t, pod("grows", container("app", share{"gpumem": "4000", "gpucores": "20"})))
	running(t, "grows")
	s := allocateAndHold(t, "grows", "app", 3000<<20)
	defer s.end()
	if code := s.alloc(4000 << 20); code != 2 {
		t.Errorf("beyond the share: CUDA error %d, want 2", code)
	}
	wantResized(t, "grows", "--gpumem", "8000", "--gpucores", "50")
	if code := s.alloc(4000 << 20); code != 0 {
		t.Errorf("after growth: CUDA error %d", code)
	}
	if code := s.alloc(4000 << 20); code != 2 {
		t.Errorf("beyond the grown share: CUDA error %d, want 2", code)
	}
	wantTotal(t, s, 8000)
	agree(t)

	// Below what is in use: refused, and nothing changes.
	wantRefused(t, "grows", func() { wantTotal(t, s, 8000) }, []string{"--gpumem", "5000"}, "container app uses ", " MiB of card ", "would leave it 5000 MiB")
	g := grant(t, get(t.Context(), t, "grows"))
	if c := g.Containers["app"][0]; c.MemMiB != 8000 || c.Cores != 50 || g.Generation != 4 {
		t.Errorf("granted %+v in generation %d", c, g.Generation)
	}

	s.free() // 3,000 MiB
	wantResized(t, "grows", "--gpumem=-3000")
	if code := s.alloc(2000 << 20); code != 2 {
		t.Errorf("beyond the shrunk share: CUDA error %d, want 2", code)
	}
	wantTotal(t, s, 5000)
	if r := wantResized(t, "grows", "--gpucores", "0"); r.Generation != 6 {
		t.Errorf("generation %d", r.Generation)
	}
	agree(t)
}

// TestResizeThatTheCardCanNotTake says who holds the rest, and frees what shrinks
// for a pod that waits for it.
func TestResizeThatTheCardCanNotTake(t *testing.T) {
	create(t, pod("first", container("app", share{"gpumem": "50000"})))
	running(t, "first")
	other := pod("other", container("app", share{"gpumem": "20000", "gpucores": "60"}))
	other.Annotations = map[string]string{api.AnnotationCardUUIDs: grant(t, get(t.Context(), t, "first")).Containers["app"][0].Card}
	create(t, other)
	running(t, "other")
	first := func() { wantShare(t, "first", "app", 50000) }
	wantRefused(t, "first", first, []string{"--gpumem", "70000"}, "asked 70000 MiB", "held by default/other (20000 MiB)")
	wantRefused(t, "first", first, []string{"--gpumem", "90000"}, "asked 90000 MiB, the card has ")
	wantRefused(t, "first", first, []string{"--gpucores", "41"}, "asked 41 % of compute, free 40 %")

	create(t, pod("fills", container("app", share{"gpumem": "70000"}))) // the other card
	running(t, "fills")
	create(t, pod("waits", container("app", share{"gpumem": "30000"})))
	wantPending(t, "waits", "30000", "default/first", "50000")
	freed := time.Now()
	wantResized(t, "first", "--gpumem", "-20000")
	running(t, "waits")
	t.Logf("the pod that waited runs %s after the resize was asked for", time.Since(freed).Round(time.Millisecond))
	wantShare(t, "waits", "app", 30000)
	agree(t)
}

// TestResizeOfSeveralContainers changes one of two containers, the other card of
// both, and no whole card.
func TestResizeOfSeveralContainers(t *testing.T) {
	create(t, pod("several", container("app", share{"gpu": "2", "gpumem": "3000"}), container("side", share{"gpumem": "2000"})))
	running(t, "several")
	if _, said, code := resize(t, "several", "--gpumem", "4000"); code != 1 || !strings.Contains(said, "choose one with --container (app, side)") {
		t.Errorf("exit %d: %s", code, said)
	}
	wantResized(t, "several", "-c", "app", "--gpumem", "4000")
	g := grant(t, get(t.Context(), t, "several"))
	if c := g.Containers["app"]; len(c) != 2 || c[0].MemMiB != 4000 || c[1].MemMiB != 4000 || g.Containers["side"][0].MemMiB != 2000 {
		t.Errorf("granted %+v", g.Containers)
	}
	wantShare(t, "several", "side", 2000)
	agree(t)
	remove(t, "several")
	create(t, pod("whole", container("app", share{"gpu": "1"})))
	running(t, "whole")
	if _, said, code := resize(t, "whole", "--gpumem", "4000"); code != 1 || !strings.Contains(said, "mode exclusive") {
		t.Errorf("exit %d: %s", code, said)
	}
	if _, _, code := resize(t, "whole"); code != 2 {
		t.Errorf("without an amount: exit %d, want 2", code)
	}
}

// TestResizeAboveTheQuota counts what the namespace's grants hold, which
// Kubernetes' own quota can't see.
func TestResizeAboveTheQuota(t *testing.T) {
	setQuota(t, corev1.ResourceList{"requests.nvidia.com/gpumem": resource.MustParse("10k"), "requests.nvidia.com/gpucores": resource.MustParse("50")})
	create(t, pod("one", container("app", share{"gpumem": "4000", "gpucores": "10"})))
	create(t, pod("two", container("app", share{"gpumem": "3000", "gpucores": "10"})))
	running(t, "one")
	running(t, "two")
	one := func() { wantShare(t, "one", "app", 4000) }
	wantRefused(t, "one", one, []string{"--gpumem", "7001"}, "ResourceQuota default/gpus allows requests.nvidia.com/gpumem of 10000; the namespace's shares hold 7000 and the resize takes 3001 more")
	wantRefused(t, "one", one, []string{"--gpucores", "41"}, "requests.nvidia.com/gpucores of 50")
	wantResized(t, "one", "--gpumem", "7000", "--gpucores", "40")
	wantShare(t, "one", "app", 7000)
}

// TestResizeOutlivesRestarts restarts the container, the extender and the agent
// around resizes.
func TestResizeOutlivesRestarts(t *testing.T) {
	p := pod("stays", container("app", share{"gpumem": "4000"}))
	p.Spec.RestartPolicy = corev1.RestartPolicyAlways
	create(t, p)
	running(t, "stays")
	wantResized(t, "stays", "--gpumem", "6000")

	// A container that is started again gets today's grant, though the
	// annotations of its sandbox are yesterday's.
	if err := restartContainer(t, "stays"); err != nil {
		t.Fatal(err)
	}
	limited(t, "stays", 6000)
	agree(t)

	// The extender dies while it answers.
	request := func(id string, mib int64) {
		t.Helper()
		text, err := api.Resize{Version: api.ResizeVersion, ID: id, Containers: map[string]api.ResizeAmounts{"app": {MemMiB: &mib}}}.Encode()
		if err != nil {
			t.Fatal(err)
		}
		body := fmt.Appendf(nil, `{"metadata":{"annotations":{%q:%q}}}`, api.AnnotationResize, text)
		if _, err := cluster.Client.CoreV1().Pods(ns).Patch(t.Context(), "stays", types.MergePatchType, body, metav1.PatchOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	answered := func(id string, mib int64) {
		t.Helper()
		eventually(t, "the resize "+id+" to be in force", func(ctx context.Context) string {
			p := get(ctx, t, "stays")
			r, err := api.DecodeResizeResult(p.Annotations[api.AnnotationResizeResult])
			if err != nil || r.ID != id || r.Outcome != api.ResizeGranted || p.Annotations[api.AnnotationResize] != "" {
				return fmt.Sprintf("%+v, %v", r, err)
			}
			for _, c := range cards(ctx, t) {
				for _, s := range c.Slices {
					if s.PodUID == string(p.UID) && s.MemMiB == mib && int(s.Generation) == r.Generation {
						return ""
					}
				}
			}
			return "the node doesn't report it"
		})
	}
	generation := grant(t, get(t.Context(), t, "stays")).Generation
	for i := range 3 {
		request(fmt.Sprint("x", i), int64(7000+2*i))
		time.Sleep(time.Duration(i) * 5 * time.Millisecond) // before, while and after it answers
		zero := int64(0)
		if err := cluster.Client.CoreV1().Pods(api.Namespace).DeleteCollection(t.Context(), metav1.DeleteOptions{GracePeriodSeconds: &zero},
			metav1.ListOptions{LabelSelector: "app.kubernetes.io/name=carve-extender"}); err != nil {
			t.Fatal(err)
		}
		answered(fmt.Sprint("x", i), int64(7000+2*i))
	}
	if g := grant(t, get(t.Context(), t, "stays")); g.Generation != generation+3 {
		t.Errorf("three resizes led from generation %d to %d", generation, g.Generation)
	}
	agree(t)

	// With the agent away a resize is granted, and applied when it is back.
	up := agentDown(t)
	request("y", 5000)
	eventually(t, "the resize to be granted", func(ctx context.Context) string {
		if g := grant(t, get(ctx, t, "stays")); g.Containers["app"][0].MemMiB != 5000 {
			return fmt.Sprintf("%+v", g)
		}
		return ""
	})
	// Nobody takes dead processes off meanwhile, so the file itself is looked at.
	l, err := region.ReadLimits(onNode("/run/carve/slices", string(get(t.Context(), t, "stays").UID), "app", "limits"))
	if err != nil || l.Cards[0].LimitBytes != 7004<<20 {
		t.Errorf("while the agent is away the limits are %+v (%v)", l.Cards, err)
	}
	up()
	answered("y", 5000)
	wantShare(t, "stays", "app", 5000)
	agree(t)
}

// restartContainer stops the pod's container by the runtime, and waits until
// another one runs.
func restartContainer(t *testing.T, name string) error {
	t.Helper()
	before := get(t.Context(), t, name).Status.ContainerStatuses[0].RestartCount
	containers, err := unfinished(t.Context())
	if err != nil {
		return err
	}
	uid := string(get(t.Context(), t, name).UID)
	for _, c := range containers {
		if c.Labels["io.kubernetes.pod.uid"] != uid {
			continue
		}
		if err := signalContainer(t.Context(), c.Id, unix.SIGKILL); err != nil {
			return err
		}
	}
	eventually(t, "the container to be started again", func(ctx context.Context) string {
		s := get(ctx, t, name).Status.ContainerStatuses[0]
		if s.RestartCount > before && s.State.Running != nil {
			return ""
		}
		return fmt.Sprintf("%d restarts, %+v", s.RestartCount, s.State)
	})
	return nil
}

// TestResizeTakesTheRight tries, as a user who may change pods and nothing else,
// every path on which an annotation reaches a pod, and the extender's answer as
// cluster administrator.
func TestResizeTakesTheRight(t *testing.T) {
	ctx := t.Context()
	admin := cluster.Client.CoreV1().Pods(ns)
	create(t, pod("mine", container("app", share{"gpumem": "4000"})))
	running(t, "mine")
	request := `{"v":1,"id":"r","containers":{"app":{"memMiB":4002}}}`
	patch := func(key, value string) []byte {
		return fmt.Appendf(nil, `{"metadata":{"annotations":{%q:%q}}}`, key, value)
	}
	denied := func(what string, err error, key string) {
		t.Helper()
		if !apierrors.IsForbidden(err) || !strings.Contains(fmt.Sprint(err), key) {
			t.Errorf("%s: %v", what, err)
		}
	}

	// The answer is the extender's, also for administrators.
	result := `{"v":1,"id":"r","outcome":"granted","gen":9}`
	for _, sub := range [][]string{nil, {"status"}} {
		_, err := admin.Patch(ctx, "mine", types.MergePatchType, patch(api.AnnotationResizeResult, result), metav1.PatchOptions{}, sub...)
		denied(fmt.Sprint("the answer by patch of ", sub), err, api.AnnotationResizeResult)
	}
	unbound := pod("unbound", container("app", nil))
	unbound.Spec.SchedulerName = "nobody"
	create(t, unbound)
	for key, value := range map[string]string{api.AnnotationResize: request, api.AnnotationResizeResult: result} {
		binding := &corev1.Binding{
			ObjectMeta: metav1.ObjectMeta{Name: "unbound", Namespace: ns, Annotations: map[string]string{key: value}},
			Target:     corev1.ObjectReference{Kind: "Node", Name: cluster.Lab.Config().Node.Name},
		}
		denied(key+" by binding", admin.Bind(ctx, binding, metav1.CreateOptions{}), key)
		denied(key+" by legacy binding", cluster.Client.CoreV1().RESTClient().Post().Namespace(ns).Resource("bindings").Body(binding).Do(ctx).Error(), key)
		p := pod("copy", container("app", nil))
		p.Annotations = map[string]string{key: value}
		if made, err := admin.Create(ctx, p, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}}); err == nil && made.Annotations[key] != "" {
			t.Errorf("a new pod carries %s", key)
		} else if err != nil {
			denied(key+" by create", err, key)
		}
	}

	// A user who may patch pods in every way, but not resize them.
	role := &rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Name: "patcher", Namespace: ns}, Rules: []rbacv1.PolicyRule{
		{APIGroups: []string{""}, Resources: []string{"pods", "pods/status", "pods/ephemeralcontainers"}, Verbs: []string{"get", "patch", "update"}}}}
	roles := cluster.Client.RbacV1()
	if _, err := roles.Roles(ns).Create(ctx, role, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	bind := func(name, kind, to string) {
		t.Helper()
		b := &rbacv1.RoleBinding{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: ns}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: kind, Name: to},
			Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: "tenant"}}}
		if _, err := roles.RoleBindings(ns).Create(ctx, b, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = roles.RoleBindings(ns).Delete(context.Background(), name, metav1.DeleteOptions{}) })
	}
	t.Cleanup(func() { _ = roles.Roles(ns).Delete(context.Background(), "patcher", metav1.DeleteOptions{}) })
	bind("patcher", "Role", "patcher")
	config, err := cluster.Lab.RESTConfig()
	if err != nil {
		t.Fatal(err)
	}
	as := rest.CopyConfig(config)
	as.Impersonate = rest.ImpersonationConfig{UserName: "tenant"}
	tenant, err := kubernetes.NewForConfig(as)
	if err != nil {
		t.Fatal(err)
	}
	pods := tenant.CoreV1().Pods(ns)
	eventually(t, "the tenant to have its role", func(ctx context.Context) string {
		_, err := pods.Patch(ctx, "mine", types.MergePatchType, patch("example.com/x", "y"), metav1.PatchOptions{})
		return strings.TrimPrefix(fmt.Sprint(err), "<nil>")
	})
	for _, sub := range [][]string{nil, {"status"}} {
		_, err := pods.Patch(ctx, "mine", types.MergePatchType, patch(api.AnnotationResize, request), metav1.PatchOptions{}, sub...)
		denied(fmt.Sprint("a request by patch of ", sub), err, api.AnnotationResize)
	}
	q := get(ctx, t, "mine")
	q.Annotations[api.AnnotationResize] = request
	_, err = pods.Update(ctx, q, metav1.UpdateOptions{})
	denied("a request by update", err, api.AnnotationResize)
	body := fmt.Appendf(nil, `{"metadata":{"annotations":{%q:%q}},"spec":{"ephemeralContainers":[{"name":"debug","image":%q}]}}`, api.AnnotationResize, request, probeImage)
	if _, err := pods.Patch(ctx, "unbound", types.StrategicMergePatchType, body, metav1.PatchOptions{}, "ephemeralcontainers"); err != nil {
		denied("a request by ephemeralcontainers", err, api.AnnotationResize)
	}
	if p := get(ctx, t, "unbound"); p.Annotations[api.AnnotationResize] != "" {
		t.Errorf("the pod carries %q", p.Annotations[api.AnnotationResize])
	}
	if _, said, code := resize(t, "mine", "--as", "tenant", "--gpumem", "4002"); code != 1 || !strings.Contains(said, "ClusterRole carve-resize") {
		t.Errorf("exit %d: %s", code, said)
	}
	wantShare(t, "mine", "app", 4000)

	// And one who may.
	bind("resizer", "ClusterRole", "carve-resize")
	eventually(t, "the tenant to have the right", func(ctx context.Context) string {
		_, err := pods.Patch(ctx, "mine", types.MergePatchType, patch(api.AnnotationResize, request), metav1.PatchOptions{DryRun: []string{metav1.DryRunAll}})
		return strings.TrimPrefix(fmt.Sprint(err), "<nil>")
	})
	if r, said, code := resize(t, "mine", "--as", "tenant", "--gpumem", "4002"); code != 0 || r.Outcome != api.ResizeGranted || !strings.Contains(said, "may not read GPUNodes") {
		t.Errorf("exit %d, %+v: %s", code, r, said)
	}
	eventually(t, "the node to have it in force", func(ctx context.Context) string {
		for _, c := range cards(ctx, t) {
			for _, s := range c.Slices {
				if s.Pod == "mine" && s.MemMiB == 4002 {
					return ""
				}
			}
		}
		return "it doesn't report it"
	})
	wantShare(t, "mine", "app", 4002)
}
