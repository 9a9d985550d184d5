package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/monitor"
	"github.com/carve-gpu/carve/monitor/page"
)

func agentPod(node string) *corev1.Pod {
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: api.Namespace, Name: "carve-node-" + node, Labels: map[string]string{api.LabelName: api.AgentName}},
		Spec: corev1.PodSpec{NodeName: node}}
}

func managedNode(name string, taints ...corev1.Taint) *corev1.Node {
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{api.LabelManaged: "true"}}, Spec: corev1.NodeSpec{Taints: taints}}
}

// agentState is what the agent of n1 answers: the cards of gpuNodes with use.
func agentState() page.State {
	managed, beside := uint64(512<<20), uint64(5<<30)
	used, past, peak, refusals, processes, busy, share, watts, warm := uint64(3<<30+1), uint64(100<<20), uint64(4<<30), uint64(7), 2, 0.424, 0.29, 211.4, 54.0
	return page.State{Version: page.StateVersion, Scope: page.ScopeNode, Nodes: []page.Node{{Name: "n1", HookUp: true, Cards: []page.Card{
		{Index: 0, UUID: "GPU-a", Model: "NVIDIA A100-SXM4-80GB", Health: "healthy", MemoryBytes: 81050 << 20, GrantedBytes: 24000 << 20, GrantedPercent: 30,
			UsedBytes: &used, UtilizationRatio: &busy, PowerWatts: &watts, TemperatureCelsius: &warm, Processes: &processes, Holders: []page.Holder{
				{Namespace: "default", Pod: "infer-a", Container: "app", State: "active", Mode: "vgpu", LimitBytes: 8000 << 20, Percent: 30, ComputeRatio: &share, UsedBytes: &used, ManagedBytes: &managed, UnchargedBytes: &beside, ResidualBytes: &past, PeakBytes: &peak, Refusals: &refusals, Processes: &processes},
				{Namespace: "team-b", Pod: "infer-b", Container: "app", State: "prepared", Mode: "vgpu", LimitBytes: 16000 << 20, UsedBytes: new(uint64), PeakBytes: new(uint64), Refusals: new(uint64), Processes: new(int)},
			}},
		{Index: 1, UUID: "GPU-b", Model: "NVIDIA A100-SXM4-80GB", Health: "healthy", MemoryBytes: 81050 << 20, GrantedBytes: 81050 << 20, GrantedPercent: 100, Holders: []page.Holder{
			{Namespace: "default", Pod: "train", Container: "app", State: "active", Whole: true, Mode: "exclusive", LimitBytes: 81050 << 20, Percent: 100}}},
	}}}}
}

// liveRig has n1 with an agent that answers, and n2 with one that is asked in
// vain.
func liveRig(t *testing.T) (*live, *gpuNodeServer, *fake.Clientset) {
	t.Helper()
	server, nodes := cordonRig(t)
	kube := fake.NewClientset(agentPod("n1"), agentPod("n2"),
		managedNode("n1"), managedNode("n2", corev1.Taint{Key: api.TaintHookDown, Effect: corev1.TaintEffectNoSchedule}))
	l := newLive(kube, nodes)
	l.ask = func(_ context.Context, p corev1.Pod) (page.State, error) {
		if p.Spec.NodeName == "n1" {
			return agentState(), nil
		}
		return page.State{}, errors.New("dial tcp 10.0.0.2:9410: connection refused")
	}
	return l, server, kube
}

func forbid(kube *fake.Clientset, namespace string) {
	kube.PrependReactor("list", "pods", func(a clienttesting.Action) (bool, runtime.Object, error) {
		if a.GetNamespace() != namespace {
			return false, nil, nil
		}
		return true, nil, apierrors.NewForbidden(schema.GroupResource{Resource: "pods"}, "", fmt.Errorf("user tenant can't list pods in namespace %q", namespace))
	})
}

func TestTopTexts(t *testing.T) {
	var out bytes.Buffer
	cmd := newTopCommand()
	show := func(what string, l *live, pods bool, o topOptions, namespace string) {
		t.Helper()
		if o.format == "" {
			o.format = "table"
		}
		out.WriteString("# " + what + "\n")
		var data, talk bytes.Buffer
		var err error
		if pods {
			err = l.topPods(t.Context(), cmd, &o, namespace, &data, &talk)
		} else {
			err = l.topCards(t.Context(), cmd, &o, &data, &talk)
		}
		out.Write(data.Bytes())
		for line := range strings.Lines(talk.String()) {
			out.WriteString("(stderr) " + line)
		}
		if err != nil {
			out.WriteString("error: " + err.Error() + "\n")
		}
		out.WriteString("\n")
	}
	l, server, _ := liveRig(t)
	show("cards, one agent doesn't answer", l, false, topOptions{}, "")
	show("cards, the busiest first", l, false, topOptions{sortBy: "free"}, "")
	show("pods of all namespaces", l, true, topOptions{}, "")
	show("pods of one namespace, by use", l, true, topOptions{sortBy: "used"}, "default")
	show("pods, with managed memory", l, true, topOptions{wide: true}, "")
	show("a namespace without any", l, true, topOptions{}, "empty")
	show("one node", l, true, topOptions{node: "n1"}, "")
	show("a node that isn't there", l, false, topOptions{node: "n9"}, "")
	server.forbidden = "user tenant can't"
	show("who may not read reports", l, false, topOptions{}, "")
	server.forbidden = ""

	l, _, kube := liveRig(t)
	forbid(kube, api.Namespace)
	show("who may not see the agents", l, true, topOptions{}, "default")

	l, server, kube = liveRig(t)
	forbid(kube, api.Namespace)
	server.forbidden = "user tenant can't"
	show("cards, for a tenant", l, false, topOptions{}, "")
	g, err := (api.Grant{Version: 1, UID: "u1", Node: "n1", Generation: 1, Containers: map[string][]api.CardGrant{"app": {{Card: "GPU-a", MemMiB: 8000, Cores: 30, Mode: api.ModeVGPU}}}}).Encode()
	if err != nil {
		t.Fatal(err)
	}
	for _, uid := range []string{"u1", "copied"} {
		if err := kube.Tracker().Add(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "mine-" + uid, UID: "u1", Annotations: map[string]string{api.AnnotationGrant: strings.Replace(g, "u1", uid, 1)}},
			Spec: corev1.PodSpec{NodeName: "n1"}}); err != nil {
			t.Fatal(err)
		}
	}
	show("pods, for a tenant", l, true, topOptions{}, "team")
	wantGolden(t, "top.txt", out.Bytes())

	out.Reset()
	l, _, _ = liveRig(t)
	show("json", l, false, topOptions{format: "json", node: "n1"}, "")
	show("yaml", l, true, topOptions{format: "yaml", node: "n1"}, "default")
	wantGolden(t, "top.data.txt", out.Bytes())
}

// A node that hangs holds up nobody, and a thousand nodes aren't asked at once.
func TestAgentsAreAskedInParallelAndBounded(t *testing.T) {
	_, nodes := cordonRig(t)
	var objects []runtime.Object
	for i := range 100 {
		objects = append(objects, agentPod(fmt.Sprint("m", i)))
	}
	l := newLive(fake.NewClientset(objects...), nodes)
	var now, most atomic.Int32
	l.ask = func(_ context.Context, p corev1.Pod) (page.State, error) {
		n := now.Add(1)
		defer now.Add(-1)
		for m := most.Load(); n > m && !most.CompareAndSwap(m, n); m = most.Load() {
		}
		time.Sleep(time.Millisecond)
		return page.State{Nodes: []page.Node{{Name: p.Spec.NodeName}}}, nil
	}
	u, err := l.read(t.Context(), "")
	if err != nil || len(u.nodes) != 102 {
		t.Fatalf("%d nodes, %v", len(u.nodes), err)
	}
	if m := most.Load(); m < 2 || m > agentsAtOnce {
		t.Errorf("%d were asked at once", m)
	}
}

// An agent's word is taken for its own node only.
func TestAnAgentSpeaksForItsOwnNode(t *testing.T) {
	l, _, _ := liveRig(t)
	l.ask = func(context.Context, corev1.Pod) (page.State, error) { return agentState(), nil } // n2 says that it is n1
	u, err := l.read(t.Context(), "")
	if err != nil || len(u.nodes) != 2 || u.nodes[1].Name != "n2" || u.nodes[1].Cards[0].UsedBytes != nil || !strings.Contains(strings.Join(u.notes, "\n"), "another node") {
		t.Errorf("%+v, %v", u, err)
	}
}

func TestWatchShowsAgainAndOutlivesAFault(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var out bytes.Buffer
	views := 0
	err := watch(ctx, &out, time.Millisecond, func(_ context.Context, w, _ io.Writer) error {
		switch views++; views {
		case 2:
			return errors.New("the API server is away")
		case 4:
			cancel()
		}
		fmt.Fprintln(w, "view", views)
		return nil
	})
	if got := out.String(); err != nil || !strings.Contains(got, "view 1\n") || !strings.Contains(got, "error: the API server is away; trying again\n") || !strings.Contains(got, "view 3\n") || strings.Contains(got, "\x1b") {
		t.Errorf("%v, %q", err, got)
	}
}

func TestTopRefusesWhatMakesNoSense(t *testing.T) {
	for _, args := range [][]string{
		{"top", "nodes"}, {"top", "cards", "pods"}, {"top", "--sort-by", "luck"}, {"top", "pods", "--sort-by", "power"}, {"top", "-w", "-o", "json"},
		{"top", "--interval", "1ms"}, {"top", "cards", "-A"}, {"top", "-n", "x"}, {"top", "pods", "-A", "-n", "x"}, {"top", "-o", "wide"},
	} {
		if code := run(t.Context(), append(args, "--kubeconfig", "testdata/none")); code != exitUsage {
			t.Errorf("carve %s exits with %d", strings.Join(args, " "), code)
		}
	}
}

// A report outlives its agent and its label: top says so, as cards does.
func TestTopTellsWhoseAgentIsAway(t *testing.T) {
	l, server, kube := liveRig(t)
	since := metav1.NewTime(time.Unix(1_790_000_000, 0))
	server.nodes["n2"].Status.HookConnectedSince = &since
	show := func() string {
		var out, talk bytes.Buffer
		if err := l.topCards(t.Context(), newTopCommand(), &topOptions{format: "table"}, &out, &talk); err != nil {
			t.Fatal(err)
		}
		return out.String()
	}
	if text := show(); strings.Count(text, "agent down") != 2 || strings.Contains(text, "not managed") {
		t.Errorf("n2's agent is away, n1's has answered:\n%s", text)
	}
	if err := kube.Tracker().Delete(schema.GroupVersionResource{Version: "v1", Resource: "nodes"}, "", "n2"); err != nil {
		t.Fatal(err)
	}
	if text := show(); strings.Count(text, "not managed") != 2 || strings.Contains(text, "agent down") {
		t.Errorf("n2 isn't managed any more:\n%s", text)
	}
}

func TestHints(t *testing.T) {
	resource := schema.GroupResource{Group: "carve.dev", Resource: "gpunodes"}
	for want, err := range map[string]error{
		"is carve installed": apierrors.NewNotFound(resource, ""),
		"carve-viewer":       apierrors.NewForbidden(resource, "", errors.New("not you")),
		"":                   context.DeadlineExceeded,
	} {
		got := hinted(err).Error()
		if want == "" && got != err.Error() || !strings.Contains(got, want) || !errors.Is(hinted(err), err) {
			t.Errorf("%v becomes %q, want %q in it", err, got, want)
		}
	}
}

// A wrong argument says what was meant.
func TestWrongArgumentsAreHelped(t *testing.T) {
	for line, want := range map[string]string{
		"explain pod/infer-b":            "explain pod infer-b?",
		"explain infer-b":                "explain pod infer-b?",
		"explain deploy/x":               "explain pod NAME?",
		"resize pod infer-a --gpumem 10": "resize pod/infer-a?",
		"cards node1":                    "cards --node node1?",
		"slices node1":                   "slices --node node1?",
		"top node1":                      `"node1": allowed are cards and pods`,
		"slices -n team -A":              "-n and -A exclude each other",
	} {
		root := newRootCommand()
		root.SetArgs(strings.Fields(line))
		err := root.ExecuteContext(t.Context())
		var usage usageError
		if !errors.As(err, &usage) || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", line, err)
		}
	}
}

// What nothing holds doesn't look as if it were: in mode timeslice the amount is counted,
// and what is in use is the driver's figure.
func TestTopPodsOfACardInModeTimeslice(t *testing.T) {
	card := monitor.Card{}
	card.UUID = "GPU-a"
	c := pageCard(card, []monitor.Slice{{Namespace: "team", Pod: "time", Container: "app", Card: "GPU-a", Mode: "timeslice", Active: true, LimitBytes: 8000 << 20, UsedBytes: 3 << 30, Processes: 2}})
	var b strings.Builder
	if err := printTopPods(&b, []topPod{{"n1", "GPU-a", new(int), c.Holders[0]}}, "team", false); err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(b.String()), "\n")
	if want := "team time app n1 0 3072 - - 8000 counted - - - 2 timeslice active"; len(lines) != 2 || strings.Join(strings.Fields(lines[1]), " ") != want {
		t.Errorf("%s\nwant %s", b.String(), want)
	}
}
