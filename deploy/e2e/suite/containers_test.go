package suite

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/carve-gpu/carve/api"
)

// hundred is a burst of containers on the real node: pods of an init container
// without a card (share-11), an init container, a sidecar (node-22) and two
// others with a share each (share-28), no two shares alike.
type hundred struct {
	*burst
	made []*corev1.Pod
}

// telling makes a container that tells what it sees of its card, and ends or
// stays.
func telling(name string, memMiB int, stays bool) corev1.Container {
	s := share(nil)
	command := "echo no card asked for"
	if memMiB > 0 {
		s = share{"gpu": "1", "gpumem": strconv.Itoa(memMiB)}
		command = "/usr/bin/gpuprobe info"
	}
	if stays {
		command += "; exec /usr/bin/sleep 1000000"
	}
	c := container(name, s)
	c.Command = []string{"/bin/sh", "-c", command}
	return c
}

// hundredContainers makes pods with four times as many containers that ask for
// a share, all at once.
func hundredContainers(t *testing.T, name string, pods int) *hundred {
	t.Helper()
	slots(t, 64)
	h := &hundred{burst: beginBurst(t, name)}
	always := corev1.ContainerRestartPolicyAlways
	for i := range pods {
		p := pod(fmt.Sprintf("%s-%d", name, i), telling("a", 700+i, true), telling("b", 800+i, true))
		side := telling("side", 600+i, true)
		side.RestartPolicy = &always
		p.Spec.InitContainers = []corev1.Container{telling("plain", 0, false), telling("load", 900+i, false), side}
		p.Spec.RestartPolicy = corev1.RestartPolicyAlways
		h.made = append(h.made, p)
	}
	h.create(on(cluster.Lab.Config().Node.Name, h.made...)...)
	return h
}

// slots sets how many containers may share a card of the real node, until the
// test's end.
func slots(t *testing.T, perCard int) {
	t.Helper()
	node := cluster.Lab.Config().Node.Name
	set := func(value string) {
		if _, err := cluster.Nodes.Patch(context.Background(), node, types.MergePatchType, []byte(`{"spec":{"slotsPerCard":`+value+`}}`)); err != nil {
			t.Fatalf("set the slots of %s: %v", node, err)
		}
	}
	offered := func(want int) {
		eventually(t, fmt.Sprintf("the node to offer %d slots", want), func(ctx context.Context) string {
			n, err := cluster.Client.CoreV1().Nodes().Get(ctx, node, metav1.GetOptions{})
			if err != nil {
				return err.Error()
			}
			if q := n.Status.Allocatable[api.ResourceGPU]; q.Value() != int64(want) {
				return "it offers " + q.String()
			}
			return ""
		})
	}
	number := len(cards(t.Context(), t))
	set(strconv.Itoa(perCard))
	t.Cleanup(func() { set("null"); offered(number * api.SlotsPerCard) })
	offered(number * perCard)
}

// allRight waits until every container runs, or has run, with its own card and
// under its own limit.
func (h *hundred) allRight() {
	h.t.Helper()
	right := map[string]bool{}
	eventually(h.t, "each container to run under its own limit", func(ctx context.Context) string {
		var mu sync.Mutex
		wrong, last := 0, ""
		var all sync.WaitGroup
		turn := make(chan struct{}, 8)
		for _, p := range h.pods(ctx) {
			all.Go(func() {
				turn <- struct{}{}
				defer func() { <-turn }()
				mu.Lock()
				done := right[p.Name]
				mu.Unlock()
				if done {
					return
				}
				m := h.wrong(ctx, &p)
				mu.Lock()
				defer mu.Unlock()
				if m == "" {
					right[p.Name] = true
				} else {
					wrong, last = wrong+1, p.Name+": "+m
				}
			})
		}
		all.Wait()
		if wrong > 0 || len(right) != len(h.made) {
			return fmt.Sprintf("%d of %d pods aren't right; %s", len(h.made)-len(right), len(h.made), last)
		}
		return ""
	})
}

// wrong says what isn't yet right with a pod, "" if nothing.
func (h *hundred) wrong(ctx context.Context, p *corev1.Pod) string {
	if p.Status.Phase == corev1.PodFailed {
		h.t.Errorf("pod %s failed: %s %s", p.Name, p.Status.Reason, p.Status.Message)
		return ""
	}
	if p.Status.Phase != corev1.PodRunning {
		for _, s := range append(p.Status.InitContainerStatuses, p.Status.ContainerStatuses...) {
			if w := s.State.Waiting; w != nil && w.Message != "" {
				return fmt.Sprintf("phase %s: %s: %s: %s", p.Status.Phase, s.Name, w.Reason, w.Message)
			}
		}
		return fmt.Sprintf("phase %s %s", p.Status.Phase, unscheduled(p))
	}
	for _, s := range append(p.Status.InitContainerStatuses, p.Status.ContainerStatuses...) {
		if s.State.Running == nil && (s.State.Terminated == nil || s.State.Terminated.ExitCode != 0) {
			return fmt.Sprintf("container %s: %+v", s.Name, s.State)
		}
	}
	g, err := api.DecodeGrant(p.Annotations[api.AnnotationGrant])
	if err != nil {
		return err.Error()
	}
	if _, has := g.Containers["plain"]; has {
		h.t.Errorf("pod %s: the container that asks for no card is in the grant: %v", p.Name, g.Containers)
	}
	for _, c := range append(append([]corev1.Container(nil), p.Spec.InitContainers...), p.Spec.Containers...) {
		want, asks := c.Resources.Limits[api.ResourceMemory]
		if !asks {
			continue
		}
		cards := g.Containers[c.Name]
		if len(cards) != 1 || cards[0].MemMiB != want.Value() {
			h.t.Errorf("pod %s: container %s asked for %s MiB and was granted %+v", p.Name, c.Name, want.String(), cards)
			continue
		}
		if m := sees(ctx, p.Name, c.Name, cards[0]); m != "" {
			return "container " + c.Name + " " + m
		}
	}
	return ""
}

// sees compares what a container told of its card with its grant.
func sees(ctx context.Context, pod, container string, want api.CardGrant) string {
	out, err := cluster.Client.CoreV1().Pods(ns).GetLogs(pod, &corev1.PodLogOptions{Container: container}).DoRaw(ctx)
	if err != nil {
		return err.Error()
	}
	found := 0
	for line := range strings.Lines(string(out)) {
		var m struct {
			Step, UUID     string
			OK             bool
			CUDATotalBytes uint64 `json:"cudaTotalBytes"`
			NVMLTotalBytes uint64 `json:"nvmlTotalBytes"`
		}
		if json.Unmarshal([]byte(line), &m) != nil || m.Step != "card" {
			continue
		}
		found++
		if limit := uint64(want.MemMiB) * mib; m.UUID != want.Card || m.CUDATotalBytes != limit || m.NVMLTotalBytes != limit {
			return fmt.Sprintf("sees %+v, granted is %+v", m, want)
		}
	}
	if found != 1 {
		return fmt.Sprintf("sees %d cards: %.300s", found, out)
	}
	return ""
}

// hookCount is how many requests the agent's hook answered with a result since
// it started.
func hookCount(t *testing.T, result string) float64 {
	t.Helper()
	return max(0, sample(metrics(t), "carve_hook_create_seconds_count", `result="`+result+`"`))
}

func TestHundredContainersAtOnce(t *testing.T) {
	adjusted, refused := hookCount(t, "adjusted"), hookCount(t, "refused")
	linked := sample(metrics(t), "carve_hook_connected_timestamp_seconds", "")
	restarts := agentRestarts(t)
	h := hundredContainers(t, "hundred", 25)
	h.allRight()
	t.Logf("100 containers with a share: all right after %s", time.Since(h.begin).Round(100*time.Millisecond))
	if n := hookCount(t, "adjusted") - adjusted; n != 100 {
		t.Errorf("the hook adjusted %v containers", n)
	}
	if n := hookCount(t, "refused") - refused; n != 0 {
		t.Errorf("the hook refused %v containers", n)
	}
	// A request that takes too long costs the hook its link.
	if now := sample(metrics(t), "carve_hook_connected_timestamp_seconds", ""); now != linked {
		t.Errorf("the hook's link is of %v, before the burst it was of %v", now, linked)
	}
	if n := agentRestarts(t); n != restarts {
		t.Errorf("the agent was restarted %d times", n-restarts)
	}
	for _, p := range h.pods(t.Context()) {
		for _, s := range append(p.Status.InitContainerStatuses, p.Status.ContainerStatuses...) {
			if s.RestartCount != 0 {
				t.Errorf("container %s of %s was restarted", s.Name, p.Name)
			}
		}
	}
	h.noBindErrors()
	h.noEvents("FailedScheduling")
	agree(t)
}

// agentProcess is the agent's first process, by its number in the lab.
func agentProcess(t *testing.T) int {
	t.Helper()
	var pid int
	eventually(t, "the agent's process", func(ctx context.Context) string {
		all, err := unfinished(ctx)
		if err != nil {
			return err.Error()
		}
		for _, c := range all {
			if strings.HasPrefix(c.Labels[labelPod], "carve-node-") {
				if pid, err = firstProcess(ctx, c.Id); err != nil {
					return err.Error()
				}
				return ""
			}
		}
		return "it isn't among the runtime's containers"
	})
	return pid
}

func signalAgent(t *testing.T, pid int, signal string) {
	t.Helper()
	if out, err := cluster.Lab.Output(t.Context(), "kill", "-"+signal, strconv.Itoa(pid)); err != nil {
		t.Fatalf("kill -%s %d: %v: %s", signal, pid, err, out)
	}
}

// awaitAdjusted waits until the hook has adjusted so many containers more.
func awaitAdjusted(t *testing.T, before float64, n int) {
	t.Helper()
	eventually(t, fmt.Sprintf("the hook to adjust %d containers", n), func(context.Context) string {
		if got := hookCount(t, "adjusted") - before; got < float64(n) {
			return fmt.Sprintf("%v so far", got)
		}
		return ""
	})
}

func TestHundredContainersWhileTheAgentIsKilled(t *testing.T) {
	before := hookCount(t, "adjusted")
	h := hundredContainers(t, "killed", 25)
	awaitAdjusted(t, before, 30)
	signalAgent(t, agentProcess(t), "KILL")
	h.allRight()
	t.Logf("100 containers with a share and an agent that was killed: all right after %s", time.Since(h.begin).Round(100*time.Millisecond))
	flagged(t, h)
	agree(t)
}

// node-29: the hook is frozen for longer than the runtime waits for an answer.
func TestFrozenHook(t *testing.T) {
	pid := agentProcess(t)
	h := hundredContainers(t, "frozen", 20)
	signalAgent(t, pid, "STOP")
	thaw := sync.OnceFunc(func() { signalAgent(t, pid, "CONT") })
	defer thaw()
	// The time is the case's own: the runtime gives up after two seconds.
	time.Sleep(5 * time.Second)
	thaw()
	h.allRight()
	t.Logf("80 containers and a hook that was frozen for 5 s: all right after %s", time.Since(h.begin).Round(100*time.Millisecond))
	flagged(t, h)
	agree(t)
}

// flagged checks that a container that ran without the hook's edits, and so
// without a card, and that somebody stopped for it, was said to have none. One
// that found no card and ended by itself before the agent was back can't be: its
// own exit code tells it from those. One that was held back before it started
// says so in its state.
func flagged(t *testing.T, h *hundred) {
	t.Helper()
	said := map[string]int32{}
	l, err := cluster.Client.CoreV1().Events(ns).List(t.Context(), metav1.ListOptions{FieldSelector: "reason=StartedWithoutCard"})
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range l.Items {
		said[string(e.InvolvedObject.UID)] += max(e.Count, 1)
	}
	var stopped, ended, held int32
	for _, p := range h.pods(t.Context()) {
		for _, s := range append(p.Status.InitContainerStatuses, p.Status.ContainerStatuses...) {
			last := s.LastTerminationState.Terminated
			switch {
			case s.RestartCount == 0:
			case last != nil && last.ExitCode < 128:
				ended++
			case last != nil && last.Reason == "StartError":
				// It was created without the hook, and the hook was back before it
				// started; or the hook died in the midst of holding it back.
				held++
			default:
				if stopped += s.RestartCount; said[string(p.UID)] == 0 {
					t.Errorf("container %s of %s was stopped and no event says why: %+v", s.Name, p.Name, last)
				}
			}
		}
	}
	t.Logf("%d containers ran without the hook and were stopped, %d found no card and ended, %d were held back; all ran again with it", stopped, ended, held)
}
