package suite

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/v1alpha1"
)

const mib = 1 << 20

// oneContext is more than the cost of one context and less than that of two.
const oneContext = 700 * mib

// wantShare checks what a container sees and gets of a share on one card: its
// own total, free memory that is limit less context and to be had to the
// last MiB, and a clean refusal beyond.
func wantShare(t *testing.T, pod, container string, limitMiB int64) {
	t.Helper()
	limit := uint64(limitMiB) * mib
	eventually(t, fmt.Sprintf("%s/%s to see a share of %d MiB", pod, container, limitMiB), func(context.Context) string {
		seen := memory(t, pod, container)
		if len(seen) != 1 {
			return fmt.Sprintf("it sees %d cards: %+v", len(seen), seen)
		}
		m := seen[0]
		if m.Total != limit || m.NVMLTotal != limit || m.DeviceTotal != limit {
			t.Fatalf("%s/%s: total memory is %d (cuMemGetInfo), %d (cuDeviceTotalMem), %d (NVML), want %d for each", pod, container, m.Total, m.DeviceTotal, m.NVMLTotal, limit)
		}
		if m.Free >= limit {
			t.Fatalf("%s/%s: %d bytes are free of %d: the context isn't counted", pod, container, m.Free, limit)
		}
		if m.NVMLUsed != limit-m.Free {
			t.Errorf("%s/%s: NVML says %d used, cuMemGetInfo %d", pod, container, m.NVMLUsed, limit-m.Free)
		}
		// Processes that ended a moment ago stay charged until they are gone
		// for sure.
		if limit-m.Free > oneContext {
			// Asking takes a process, too: ask too often and there is always
			// one that ended a moment ago.
			time.Sleep(2 * time.Second)
			return fmt.Sprintf("%d bytes are used: more than one context", limit-m.Free)
		}
		return ""
	})
	s := start(t, pod, container)
	defer s.end()
	free := s.info()
	eventually(t, pod+"/"+container+" to be charged for one context", func(context.Context) string {
		if free = s.info(); limit-free > oneContext {
			return fmt.Sprintf("%d bytes are used", limit-free)
		}
		return ""
	})
	whole := free / mib * mib
	if code := s.alloc(whole); code != 0 {
		t.Errorf("%s/%s: allocating the %d bytes that are free gave CUDA error %d", pod, container, whole, code)
	} else if left := s.info(); left != free-whole {
		t.Errorf("%s/%s: %d bytes are left of %d after %d were allocated", pod, container, left, free, whole)
	} else if after := s.free(); after != free {
		t.Errorf("%s/%s: %d bytes are free after all was given back, before %d", pod, container, after, free)
	}
	if code := s.alloc(whole + mib); code != 2 {
		t.Errorf("%s/%s: allocating 1 MiB more than is free gave CUDA error %d, want 2 (out of memory)", pod, container, code)
	}
	if after := s.info(); after != free {
		t.Errorf("%s/%s: a refused allocation changed what is free from %d to %d", pod, container, free, after)
	}
}

func TestTwoPodsShareOneCard(t *testing.T) {
	// The first is written as for HAMi.
	create(t, pod("a", container("app", share{"gpu": "1", "gpumem": "8000", "gpucores": "30"})))
	create(t, pod("b", container("app", share{"gpumem": "16000"})))
	a, b := grant(t, running(t, "a")), grant(t, running(t, "b"))
	ca, cb := a.Containers["app"][0], b.Containers["app"][0]
	if ca.Card != cb.Card {
		t.Errorf("a is on card %s, b on %s: want one card for both", ca.Card, cb.Card)
	}
	if ca.MemMiB != 8000 || ca.Cores != 30 || cb.MemMiB != 16000 || cb.Cores != 0 {
		t.Errorf("granted %+v and %+v", ca, cb)
	}
	wantShare(t, "a", "app", 8000)
	wantShare(t, "b", "app", 16000)

	t.Run("the report and the table show who has what", func(t *testing.T) {
		eventually(t, "both slices to be reported active", func(ctx context.Context) string {
			seen := map[string]v1alpha1.Slice{}
			for _, c := range cards(ctx, t) {
				for _, s := range c.Slices {
					if c.UUID == ca.Card {
						seen[s.Pod] = s
					}
				}
			}
			if s := seen["a"]; s.MemMiB != 8000 || s.Cores != 30 || s.State != v1alpha1.Active {
				return fmt.Sprintf("a is reported as %+v", s)
			}
			if s := seen["b"]; s.MemMiB != 16000 || s.State != v1alpha1.Active {
				return fmt.Sprintf("b is reported as %+v", s)
			}
			return ""
		})
		out, err := cluster.Carve(t.Context(), "cards")
		if err != nil {
			t.Fatal(err)
		}
		for _, want := range []string{"default/a app", "default/b app", "8000", "16000", "30%", "software GPU"} {
			if !strings.Contains(string(out), want) {
				t.Errorf("carve cards doesn't say %q:\n%s", want, out)
			}
		}
	})
	t.Run("metrics show limits and use", func(t *testing.T) {
		defer allocateAndHold(t, "a", "app", 1000*mib).end()
		eventually(t, "the metrics", func(ctx context.Context) string {
			text := metrics(t)
			for _, want := range []string{
				`carve_slice_memory_limit_bytes{`, `pod="a"`, `carve_card_memory_used_bytes{`,
			} {
				if !strings.Contains(text, want) {
					return "no " + want
				}
			}
			if used := sample(text, "carve_slice_memory_used_bytes", `pod="a"`); used < 1000*mib {
				return fmt.Sprintf("used by a is %.0f bytes", used)
			}
			return ""
		})
	})
}

// A program that used its card goes on as one that doesn't, in the same process: what it
// had is its container's again.
func TestWhatAReplacedProgramHadIsBack(t *testing.T) {
	create(t, pod("follows", container("app", share{"gpumem": "8000"})))
	running(t, "follows")
	sibling := allocateAndHold(t, "follows", "app", 100*mib)
	defer sibling.end()
	before := sibling.info()
	replaced := allocateAndHold(t, "follows", "app", 5000*mib)
	defer replaced.end()
	if left := sibling.info(); left > before-5000*mib {
		t.Fatalf("%d bytes are left of %d with 5000 MiB in use", left, before)
	}
	fmt.Fprintln(replaced.stdin, "exec cat")
	eventually(t, "the room to be back", func(context.Context) string {
		if left := sibling.info(); left != before {
			return fmt.Sprintf("%d bytes are free of %d", left, before)
		}
		return ""
	})
	replaced.say(`{"step": "lives"}`, "lives")
	if code := sibling.alloc(5000 * mib); code != 0 {
		t.Errorf("refused though there is room: CUDA error %d", code)
	}
}

func TestBinaryQuantityIsBytes(t *testing.T) {
	create(t, pod("bytes", container("app", share{"gpu": "1", "gpumem": "8Gi"})))
	if g := grant(t, running(t, "bytes")); g.Containers["app"][0].MemMiB != 8192 {
		t.Errorf("8Gi was granted as %d MiB", g.Containers["app"][0].MemMiB)
	}
	wantShare(t, "bytes", "app", 8192)
}

func TestCardsAloneAreWholeAndBare(t *testing.T) {
	create(t, pod("whole", container("app", share{"gpu": "1"})))
	g := grant(t, running(t, "whole")).Containers["app"][0]
	if g.Mode != api.ModeExclusive {
		t.Errorf("granted %+v", g)
	}
	m := memory(t, "whole", "app")
	if len(m) != 1 || m[0].Total < 79<<30 {
		t.Errorf("the container sees %+v, want one whole card", m)
	}
	if r := shell(t, "whole", "app", "sh", "-c", "ls /usr/lib/carve; grep -c carve /proc/self/mountinfo"); strings.Contains(r.stdout, "limits") {
		t.Errorf("our files are in a container with a whole card: %s", r.stdout)
	}
	// Nobody else gets onto that card, and a second one takes the other.
	create(t, pod("beside", container("app", share{"gpumem": "1000"})))
	if other := grant(t, running(t, "beside")).Containers["app"][0]; other.Card == g.Card {
		t.Errorf("a share was put on the card that is held whole")
	}
	create(t, pod("whole-2", container("app", share{"gpu": "1"})))
	wantPending(t, "whole-2", "beside")
}

func TestPodWithoutRequestSeesNoCard(t *testing.T) {
	c := container("app", nil)
	c.Env = []corev1.EnvVar{{Name: "NVIDIA_VISIBLE_DEVICES", Value: "all"}}
	create(t, pod("plain", c))
	running(t, "plain")
	r := shell(t, "plain", "app", "sh", "-c", "ls /dev | grep -c nvidia; echo $NVIDIA_VISIBLE_DEVICES")
	if !strings.HasPrefix(r.stdout, "0\n") {
		t.Errorf("a pod that asked for nothing sees devices: %s", r.stdout)
	}
}

// wantPending waits until the pod is refused with a reason that names all of
// the given words.
func wantPending(t *testing.T, name string, words ...string) {
	t.Helper()
	eventually(t, "pod "+name+" to be refused with a reason", func(ctx context.Context) string {
		p := get(ctx, t, name)
		if p.Spec.NodeName != "" {
			t.Fatalf("pod %s was bound: %s", name, p.Annotations[api.AnnotationGrant])
		}
		m := unscheduled(p)
		for _, w := range words {
			if !strings.Contains(m, w) {
				return fmt.Sprintf("its message %q doesn't name %q", m, w)
			}
		}
		return ""
	})
}

func TestThirdPodWaitsForRoom(t *testing.T) {
	create(t, pod("first", container("app", share{"gpumem": "60000"})))
	running(t, "first")
	create(t, pod("second", container("app", share{"gpumem": "70000"})))
	running(t, "second")
	create(t, pod("third", container("app", share{"gpumem": "30000"})))
	// What was asked, what is free and who holds the rest.
	wantPending(t, "third", "30000", "default/first", "60000")

	// A quiet cluster: nothing but the freed share itself wakes the pod.
	time.Sleep(3 * time.Second)
	remove(t, "first")
	freed := time.Now()
	p := running(t, "third")
	t.Logf("running %s after the holder and its slice were gone", time.Since(freed).Round(10*time.Millisecond))
	if g := grant(t, p); g.Containers["app"][0].MemMiB != 30000 {
		t.Errorf("granted %+v", g)
	}
	wantShare(t, "third", "app", 30000)
}

func TestContainersOfOnePod(t *testing.T) {
	always := corev1.ContainerRestartPolicyAlways
	p := pod("four",
		container("left", share{"gpu": "1", "gpumem": "3000"}),
		container("right", share{"gpu": "1", "gpumem": "5000"}))
	first := container("prepare", nil)
	first.Command = []string{"/usr/bin/sh", "-c", "ls /dev | grep nvidia && exit 1 || exit 0"}
	sidecar := container("side", share{"gpu": "1", "gpumem": "2000"})
	sidecar.RestartPolicy = &always
	p.Spec.InitContainers = []corev1.Container{first, sidecar}
	create(t, p)
	g := grant(t, running(t, "four"))
	if len(g.Containers) != 3 {
		t.Errorf("grants for %d containers, want left, right and side: %+v", len(g.Containers), g.Containers)
	}
	for name, want := range map[string]int64{"left": 3000, "right": 5000, "side": 2000} {
		if cs := g.Containers[name]; len(cs) != 1 || cs[0].MemMiB != want {
			t.Errorf("%s was granted %+v, want %d MiB on one card", name, cs, want)
			continue
		}
		wantShare(t, "four", name, want)
	}
	// Sums are right: what is left is the rest, to the MiB.
	var rest int64
	eventually(t, "the sum of the slices", func(ctx context.Context) string {
		rest = 0
		var sum int64
		for _, c := range cards(ctx, t) {
			free := c.MemoryMiB
			for _, s := range c.Slices {
				sum += s.MemMiB
				free -= s.MemMiB
			}
			rest = max(rest, free)
		}
		if sum != 10000 {
			return fmt.Sprintf("%d MiB are reported, want 10000", sum)
		}
		return ""
	})
}

func TestInitContainersShareTheirPodsPeak(t *testing.T) {
	// One card is as good as full, so all that follows must fit on the other:
	// 50000 MiB while the pod starts and 30000 while it runs hold 50000, once,
	// and leave room for 30000 more. A sum would not.
	create(t, pod("filler", container("app", share{"gpumem": "75000"})))
	running(t, "filler")
	p := pod("peak", container("app", share{"gpumem": "30000"}))
	warm := container("warm", share{"gpumem": "50000"})
	warm.Command = []string{"/usr/bin/gpuprobe", "info"}
	p.Spec.InitContainers = []corev1.Container{warm}
	create(t, p)
	g := grant(t, running(t, "peak"))
	if g.Containers["warm"][0].Card != g.Containers["app"][0].Card {
		t.Errorf("the two containers were put on different cards: %+v", g.Containers)
	}
	create(t, pod("rest", container("app", share{"gpumem": "30000"})))
	running(t, "rest")
}

func TestLastShareGoesToOne(t *testing.T) {
	const contenders = 16
	create(t, pod("filler", container("app", share{"gpumem": "70000"})))
	running(t, "filler")
	create(t, pod("filler-2", container("app", share{"gpumem": "40000"})))
	running(t, "filler-2")
	// 40000 MiB are left on one card: room for one of these.
	var wg sync.WaitGroup
	for i := range contenders {
		p := pod(fmt.Sprintf("last-%02d", i), container("app", share{"gpumem": "30000"}))
		t.Cleanup(func() { remove(t, p.Name) })
		wg.Go(func() {
			if _, err := cluster.Client.CoreV1().Pods(ns).Create(t.Context(), p, metav1.CreateOptions{}); err != nil {
				t.Errorf("create %s: %v", p.Name, err)
			}
		})
	}
	wg.Wait()
	eventually(t, "one pod to be bound and all others refused", func(ctx context.Context) string {
		bound, refused := 0, 0
		for i := range contenders {
			p := get(ctx, t, fmt.Sprintf("last-%02d", i))
			switch {
			case p.Spec.NodeName != "":
				bound++
			case unscheduled(p) != "":
				refused++
			}
		}
		if bound > 1 {
			t.Fatalf("%d pods were bound for room for one", bound)
		}
		if bound+refused < contenders {
			return fmt.Sprintf("%d bound, %d refused", bound, refused)
		}
		return ""
	})
	for _, c := range cards(t.Context(), t) {
		var sum int64
		for _, s := range c.Slices {
			sum += s.MemMiB
		}
		if sum > c.MemoryMiB {
			t.Errorf("card %s: %d MiB of slices on %d MiB", c.UUID, sum, c.MemoryMiB)
		}
	}
}

func TestContainerThatNeverStarts(t *testing.T) {
	c := container("app", share{"gpu": "1", "gpumem": "3000"})
	c.Command = []string{"/nowhere/to/be/found"}
	create(t, pod("stillborn", c))
	eventually(t, "the pod to fail and its slice to be given back", func(ctx context.Context) string {
		if p := get(ctx, t, "stillborn"); p.Status.Phase != corev1.PodFailed {
			return "its phase is " + string(p.Status.Phase)
		}
		for _, c := range cards(ctx, t) {
			for _, s := range c.Slices {
				if s.Pod == "stillborn" {
					return fmt.Sprintf("its slice is there: %+v", s)
				}
			}
		}
		return ""
	})
}

func TestFinishedPodGivesItsShareBack(t *testing.T) {
	c := container("app", share{"gpumem": "3000"})
	c.Command = []string{"/usr/bin/gpuprobe", "alloc", "1GiB"}
	create(t, pod("done", c))
	eventually(t, "the pod to succeed and its slice to be given back", func(ctx context.Context) string {
		if p := get(ctx, t, "done"); p.Status.Phase != corev1.PodSucceeded {
			return fmt.Sprintf("its phase is %s %+v", p.Status.Phase, p.Status.ContainerStatuses)
		}
		for _, c := range cards(ctx, t) {
			for _, s := range c.Slices {
				if s.Pod == "done" {
					return fmt.Sprintf("its slice is there: %+v", s)
				}
			}
		}
		return ""
	})
}

// TestSchedulerOfItsOwn runs a second kube-scheduler, as where the cluster's own
// can't be configured, with the configuration that carve writes for it.
func TestSchedulerOfItsOwn(t *testing.T) {
	const name, file = "carve-scheduler", "/etc/kubernetes/carve-scheduler.yaml"
	service, err := cluster.Client.CoreV1().Services(api.Namespace).Get(t.Context(), "carve-extender", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	config, err := cluster.Carve(t.Context(), "extender", "scheduler-config", "--base", "/etc/kubernetes/scheduler.yaml", "--scheduler-name", name,
		"--url", "https://"+service.Spec.ClusterIP+":443", "--tls-dir", "/etc/kubernetes/carve")
	if err != nil {
		t.Fatal(err)
	}
	write := cluster.Lab.Command(t.Context(), "tee", file)
	write.Stdin = strings.NewReader(string(config))
	if err := cluster.Lab.Run(write); err != nil {
		t.Fatal(err)
	}
	scheduler := cluster.Lab.Command(t.Context(), "kube-scheduler", "--config="+file, "--bind-address=127.0.0.1", "--secure-port=10269", "--leader-elect=false")
	if err := cluster.Lab.Start(scheduler); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := scheduler.Process.Kill(); err != nil {
			t.Error(err)
		}
		_ = scheduler.Wait()
	}()
	p := pod("named", container("app", share{"gpumem": "4000"}))
	p.Spec.SchedulerName = name
	create(t, p)
	if g := grant(t, running(t, "named")); g.Containers["app"][0].MemMiB != 4000 {
		t.Errorf("granted %+v", g)
	}
	wantShare(t, "named", "app", 4000)
}
