package suite

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/carve-gpu/carve/api"
)

// CUDA's results that matter here.
const (
	deviceUnavailable   = 46
	mpsConnectionFailed = 805
	mpsRPCFailure       = 806
)

// keeperState is what matters of the keeper's state of a card.
type keeperState struct {
	Epoch     uint64
	Ready     bool
	Exclusive bool
	Error     string
	Daemon    *struct{ PID int }
	Servers   []struct{ PID int }
}

func keeperOf(ctx context.Context, t *testing.T, card string) keeperState {
	t.Helper()
	out, err := cluster.Lab.Output(ctx, "cat", "/run/carve/mps/"+card+"/state.json")
	if err != nil {
		return keeperState{}
	}
	var s keeperState
	if err := json.Unmarshal(out, &s); err != nil {
		t.Fatalf("the keeper's state: %v: %s", err, out)
	}
	return s
}

// withMPS installs the keeper for the test's time.
func withMPS(t *testing.T) {
	t.Helper()
	if out, err := cluster.Lab.Kubectl(t.Context(), "apply", "-k", "/opt/carve-deploy/manifests/mps"); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	t.Cleanup(func() {
		if t.Failed() {
			out, err := cluster.Lab.Kubectl(context.Background(), "-n", api.Namespace, "logs", "-l", "app.kubernetes.io/name=carve-mps", "--tail=60")
			t.Logf("the keeper (%v):\n%s", err, out)
		}
		if _, err := cluster.Lab.Kubectl(context.Background(), "delete", "-k", "/opt/carve-deploy/manifests/mps", "--wait=true", "--ignore-not-found"); err != nil {
			t.Error(err)
		}
		eventually(t, "the node to serve no MPS any more", func(ctx context.Context) string {
			for _, c := range cards(ctx, t) {
				if slices.Contains(c.Modes, string(api.ModeMPS)) {
					return "it says that it does"
				}
			}
			pods, err := cluster.Client.CoreV1().Pods(api.Namespace).List(ctx, metav1.ListOptions{LabelSelector: "app.kubernetes.io/name=carve-mps"})
			if err != nil || len(pods.Items) > 0 {
				return fmt.Sprintf("%d of its pods are there (%v)", len(pods.Items), err)
			}
			return ""
		})
	})
	eventually(t, "the cards to take mode mps", func(ctx context.Context) string {
		for _, c := range cards(ctx, t) {
			if !slices.Contains(c.Modes, string(api.ModeMPS)) {
				return fmt.Sprintf("card %s has modes %v", c.UUID, c.Modes)
			}
		}
		return ""
	})
}

// modePod is a pod whose shares have a mode.
func modePod(name string, mode api.Mode, s share) *corev1.Pod {
	p := pod(name, container("app", s))
	p.Annotations = map[string]string{api.AnnotationIsolation: string(mode)}
	return p
}

// firstError is CUDA's first refusal among gpuprobe's lines, 0 for none.
func firstError(lines []map[string]any) int {
	for _, m := range lines {
		if code, ok := m["error"].(float64); ok && m["ok"] == false {
			return int(code)
		}
	}
	return 0
}

func multiprocessors(t *testing.T, pod string) int {
	t.Helper()
	lines, _ := probe(t, pod, "app", "info")
	for _, m := range lines {
		if n, ok := m["multiprocessors"].(float64); ok {
			return int(n)
		}
	}
	t.Fatalf("gpuprobe info in %s: %v", pod, lines)
	return 0
}

// programIn runs gpuprobe in an environment that is made by env.
func programIn(t *testing.T, pod string, env ...string) int {
	t.Helper()
	r := shell(t, pod, "app", append(append([]string{"env"}, env...), "/usr/bin/gpuprobe", "info")...)
	var lines []map[string]any
	for _, l := range strings.Split(strings.TrimSpace(r.stdout), "\n") {
		var m map[string]any
		if json.Unmarshal([]byte(l), &m) == nil {
			lines = append(lines, m)
		}
	}
	if lines == nil {
		t.Fatalf("gpuprobe in %s with %v: exit %d: %s%s", pod, env, r.code, r.stdout, r.stderr)
	}
	return firstError(lines)
}

// toldOf counts the events with a reason on a pod.
func toldOf(ctx context.Context, t *testing.T, pod, reason string) (n int, message string) {
	t.Helper()
	l, err := cluster.Client.CoreV1().Events(ns).List(ctx, metav1.ListOptions{FieldSelector: "involvedObject.name=" + pod + ",reason=" + reason})
	if err != nil && !apierrors.IsNotFound(err) {
		t.Fatal(err)
	}
	for _, e := range l.Items {
		n += int(max(e.Count, 1))
		message = e.Message
	}
	return n, message
}

// refusal waits for the next line of the session that tells of one.
func (s *session) refusal() map[string]any {
	s.t.Helper()
	limit := time.After(patience)
	for {
		select {
		case m, open := <-s.lines:
			if !open {
				s.t.Fatalf("%s: the process ended", s.where)
			}
			if m["ok"] == false {
				return m
			}
		case <-limit:
			s.t.Fatalf("%s: nothing was refused", s.where)
		}
	}
}

// TestCardInModeMPS gives a card to two pods as clients of MPS. node-21: whatever ends
// is told and started again, and meanwhile nothing runs without its limits.
func TestCardInModeMPS(t *testing.T) {
	create(t, pod("first", container("app", share{"gpumem": "1000"}))) // the node takes pods
	running(t, "first")
	remove(t, "first")
	early := modePod("early", api.ModeMPS, share{"gpumem": "1000"})
	create(t, early)
	wantPending(t, "early", "mps")
	remove(t, "early")

	withMPS(t)
	create(t, modePod("a", api.ModeMPS, share{"gpumem": "8000", "gpucores": "30"}))
	create(t, modePod("b", api.ModeMPS, share{"gpumem": "16000", "gpucores": "50"}))
	ga, gb := grant(t, running(t, "a")).Containers["app"][0], grant(t, running(t, "b")).Containers["app"][0]
	if ga.Mode != api.ModeMPS || gb.Mode != api.ModeMPS || ga.Card != gb.Card {
		t.Fatalf("granted %+v and %+v", ga, gb)
	}
	card := ga.Card

	t.Run("each sees its share and is held to it", func(t *testing.T) {
		wantShare(t, "a", "app", 8000)
		wantShare(t, "b", "app", 16000)
		// Of an A100's 108.
		if n := multiprocessors(t, "a"); n < 30 || n > 34 {
			t.Errorf("30 percent are %d multiprocessors", n)
		}
		if n := multiprocessors(t, "b"); n < 52 || n > 56 {
			t.Errorf("50 percent are %d multiprocessors", n)
		}
		s := keeperOf(t.Context(), t, card)
		if !s.Ready || !s.Exclusive || len(s.Servers) != 1 {
			t.Errorf("the keeper says %+v", s)
		}
	})
	t.Run("who leaves MPS ends early", func(t *testing.T) {
		for what, env := range map[string][]string{
			"all of the environment":   {"-i"},
			"the way to the daemon":    {"-u", "CUDA_MPS_PIPE_DIRECTORY"},
			"the percentage":           {"-u", "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"},
			"the percentage, by a 100": {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=100"},
		} {
			if code := programIn(t, "a", env...); code != mpsConnectionFailed {
				t.Errorf("a program without %s ends with CUDA error %d, want %d", what, code, mpsConnectionFailed)
			}
		}
		// Past the library the card itself refuses.
		if code := programIn(t, "a", "-i", "LD_LIBRARY_PATH=/usr/lib/carve/driver"); code != deviceUnavailable {
			t.Errorf("past the library and MPS: CUDA error %d, want %d", code, deviceUnavailable)
		}
		if code := programIn(t, "a"); code != 0 {
			t.Errorf("a program that leaves all as it is: CUDA error %d", code)
		}
	})
	t.Run("the other card isn't touched", func(t *testing.T) {
		for _, c := range cards(t.Context(), t) {
			if c.UUID != card && c.MPS != nil {
				t.Errorf("card %s has an MPS daemon: %+v", c.UUID, *c.MPS)
			}
		}
		whole := modePod("time", api.ModeTimeslice, share{"gpumem": "10000"})
		create(t, whole)
		g := grant(t, running(t, "time")).Containers["app"][0]
		if g.Card == card || g.Mode != api.ModeTimeslice {
			t.Errorf("granted %+v", g)
		}
		if m := memory(t, "time", "app"); len(m) != 1 || m[0].Total < 79<<30 {
			t.Errorf("a slice of time sees %+v, want the whole card", m)
		}
		remove(t, "time")
	})
	t.Run("a restart of the agent leaves the server alone", func(t *testing.T) {
		before := keeperOf(t.Context(), t, card)
		s := allocateAndHold(t, "a", "app", 500*mib)
		defer s.end()
		restartAgent(t)
		if free := s.info(); free == 0 || free > 8000*mib {
			t.Errorf("%d bytes are free", free)
		}
		if m := s.say("launch 1ms", "launch"); m["ok"] != true {
			t.Errorf("a launch: %v", m)
		}
		if after := keeperOf(t.Context(), t, card); after.Epoch != before.Epoch || after.Servers[0] != before.Servers[0] {
			t.Errorf("%+v became %+v", before, after)
		}
	})
	for _, victim := range []string{"server", "daemon", "keeper"} {
		t.Run("the "+victim+" is killed under load", func(t *testing.T) {
			before := keeperOf(t.Context(), t, card)
			downA, _ := toldOf(t.Context(), t, "a", "MPSDown")
			downB, _ := toldOf(t.Context(), t, "b", "MPSDown")
			up, _ := toldOf(t.Context(), t, "a", "MPSRestarted")
			a, b := allocateAndHold(t, "a", "app", 500*mib), allocateAndHold(t, "b", "app", 500*mib)
			for _, s := range []*session{a, b} {
				s.say("launch 1ms", "launch")
				if _, err := io.WriteString(s.stdin, "launch 10m\n"); err != nil {
					t.Fatal(err)
				}
			}
			pid := before.Daemon.PID
			switch victim {
			case "server":
				pid = before.Servers[0].PID
			case "keeper":
				// The daemon is in its container's cgroup, and ends with it.
				out, err := cluster.Lab.Output(t.Context(), "cat", "/run/carve/mps/keeper.lock")
				if err == nil {
					pid, err = strconv.Atoi(strings.TrimSpace(string(out)))
				}
				if err != nil {
					t.Fatal(err)
				}
			}
			if _, err := cluster.Lab.Output(t.Context(), "kill", "-9", strconv.Itoa(pid)); err != nil {
				t.Fatal(err)
			}
			eventually(t, "both pods to be told", func(ctx context.Context) string {
				na, text := toldOf(ctx, t, "a", "MPSDown")
				nb, _ := toldOf(ctx, t, "b", "MPSDown")
				if na <= downA || nb <= downB || !strings.Contains(text, card) {
					return fmt.Sprintf("%d and %d events: %s", na, nb, text)
				}
				return ""
			})
			for _, s := range []*session{a, b} {
				if m := s.refusal(); m["error"] != float64(mpsRPCFailure) {
					t.Errorf("%s had a kernel on the card, or was about to: %v", s.where, m)
				}
				if code := s.alloc(mib); code != mpsRPCFailure {
					t.Errorf("%s allocates after its server ended: CUDA error %d, want %d", s.where, code, mpsRPCFailure)
				}
				s.end()
			}
			eventually(t, "MPS to serve again", func(ctx context.Context) string {
				if s := keeperOf(ctx, t, card); !s.Ready || s.Epoch <= before.Epoch {
					return fmt.Sprintf("%+v", s)
				}
				if n, _ := toldOf(ctx, t, "a", "MPSRestarted"); n <= up {
					return fmt.Sprintf("a was told %d times", n)
				}
				for _, c := range cards(ctx, t) {
					if c.UUID == card && (c.MPS == nil || !c.MPS.Ready) {
						return fmt.Sprintf("the report says %+v", c.MPS)
					}
				}
				return ""
			})
			if code := programIn(t, "a", "-i", "LD_LIBRARY_PATH=/usr/lib/carve/driver"); code != deviceUnavailable {
				t.Errorf("past the library and MPS: CUDA error %d, want %d", code, deviceUnavailable)
			}
			wantShare(t, "a", "app", 8000)
			if n := multiprocessors(t, "b"); n < 52 || n > 56 {
				t.Errorf("50 percent are %d multiprocessors", n)
			}
		})
	}
	t.Run("a program that outlives its server is stopped", func(t *testing.T) {
		p := modePod("c", api.ModeMPS, share{"gpumem": "4000"})
		p.Spec.RestartPolicy = corev1.RestartPolicyAlways
		create(t, p)
		if g := grant(t, running(t, "c")).Containers["app"][0]; g.Card != card {
			t.Fatalf("granted %+v", g)
		}
		before := keeperOf(t.Context(), t, card)
		idle := allocateAndHold(t, "c", "app", 500*mib)
		if _, err := cluster.Lab.Output(t.Context(), "kill", "-9", strconv.Itoa(before.Servers[0].PID)); err != nil {
			t.Fatal(err)
		}
		killed := time.Now()
		eventually(t, "its container to start again, and MPS to serve", func(ctx context.Context) string {
			s, n := keeperOf(ctx, t, card), get(ctx, t, "c").Status.ContainerStatuses[0].RestartCount
			if told, _ := toldOf(ctx, t, "c", "MPSContextLost"); n == 0 || !s.Ready || s.Epoch <= before.Epoch || told == 0 {
				return fmt.Sprintf("%d restarts, told %d times, the keeper says %+v", n, told, s)
			}
			return ""
		})
		t.Logf("served again after %.0f s", time.Since(killed).Seconds())
		_ = idle.stdin.Close()
		_ = idle.cmd.Wait()
		running(t, "c")
		wantShare(t, "c", "app", 4000)
		if s := get(t.Context(), t, "b").Status.ContainerStatuses[0].State; s.Running == nil {
			t.Errorf("its neighbour, which had nothing on the card, was stopped, too: %+v", s)
		}
		if _, text := toldOf(t.Context(), t, "c", "MPSRestarted"); !strings.Contains(text, "serves") {
			t.Errorf("told: %s", text)
		}
		remove(t, "c")
	})
	t.Run("a share waits until MPS has let go of the card", func(t *testing.T) {
		remove(t, "a")
		remove(t, "b")
		create(t, pod("fill", container("app", share{"gpumem": "70000"})))
		create(t, pod("after", container("app", share{"gpumem": "70000"})))
		running(t, "fill")
		running(t, "after")
		wantShare(t, "fill", "app", 70000)
		wantShare(t, "after", "app", 70000)
		eventually(t, "the report to say nothing of MPS", func(ctx context.Context) string {
			for _, c := range cards(ctx, t) {
				if c.MPS != nil {
					return fmt.Sprintf("card %s: %+v", c.UUID, *c.MPS)
				}
			}
			return ""
		})
		if s := keeperOf(t.Context(), t, card); s.Exclusive || s.Daemon != nil {
			t.Errorf("the keeper says %+v", s)
		}
		// Two processes at once, which the card wouldn't take as it was.
		for range 2 {
			for _, name := range []string{"fill", "after"} {
				s := start(t, name, "app")
				defer s.end()
				if code := s.alloc(mib); code != 0 {
					t.Errorf("%s: CUDA error %d", s.where, code)
				}
			}
		}
	})
}

// TestKeeperIsTakenOffUnderATenant removes the keeper for good: the card is nobody's
// while its tenant is there, and everybody's after that.
func TestKeeperIsTakenOffUnderATenant(t *testing.T) {
	withMPS(t)
	create(t, modePod("tenant", api.ModeMPS, share{"gpumem": "8000"}))
	card := grant(t, running(t, "tenant")).Containers["app"][0].Card
	if out, err := cluster.Lab.Kubectl(t.Context(), "delete", "-k", "/opt/carve-deploy/manifests/mps", "--wait=true"); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	mpsOf := func(ctx context.Context) string {
		for _, c := range cards(ctx, t) {
			if c.UUID == card && c.MPS != nil {
				return fmt.Sprintf("%+v", *c.MPS)
			}
		}
		return ""
	}
	eventually(t, "the report to say that nobody keeps the card's daemon", func(ctx context.Context) string {
		if is := mpsOf(ctx); !strings.Contains(is, "no `carve mps` runs") {
			return "it says " + is
		}
		return ""
	})
	for _, args := range [][]string{{"doctor"}, {"doctor", "--node"}} {
		r := carve(t, args...)
		if r.code == 0 || !strings.Contains(r.stdout, "no `carve mps` runs") || !strings.Contains(r.stdout, "its MPS daemon doesn't serve since ") {
			t.Errorf("carve %v exits %d: %s%s", args, r.code, r.stdout, r.stderr)
		}
	}
	if text := metrics(t); !strings.Contains(text, `carve_card_mps_ready{card_index`) {
		t.Error("no metric of the card's MPS daemon")
	}
	if s := keeperOf(t.Context(), t, card); !s.Exclusive {
		t.Errorf("the card is everybody's though its tenant is there: %+v", s)
	}
	remove(t, "tenant")
	eventually(t, "the card to be everybody's", func(ctx context.Context) string {
		if s, is := keeperOf(ctx, t, card), mpsOf(ctx); s.Exclusive || s.Daemon != nil || is != "" {
			return fmt.Sprintf("%+v, %s", s, is)
		}
		return ""
	})
	for _, name := range []string{"one", "two"} { // both cards
		create(t, pod(name, container("app", share{"gpumem": "70000"})))
		running(t, name)
		wantShare(t, name, "app", 70000)
	}
}
