package suite

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	coreinformers "k8s.io/client-go/informers/core/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/v1alpha1"
	"github.com/carve-gpu/carve/deploy/e2e/audit"
)

// checkEvery is how many kills pass between two comparisons.
const checkEvery = 25

// TestChaos kills parts at random moments while pods come and go in every way,
// and compares all that says who has what every 25 kills. CARVE_KILLS is how
// many (1,000 in `make test-long`), CARVE_SEED makes the choices of an earlier
// run again (their moments are the machine's).
func TestChaos(t *testing.T) {
	kills := 15
	if long() {
		kills = 1000
	}
	kills = int(setting(t, "CARVE_KILLS", int64(kills)))
	seed := setting(t, "CARVE_SEED", time.Now().UnixNano())
	t.Logf("CARVE_SEED=%d CARVE_KILLS=%d", seed, kills)

	h := watchHistory(t)
	c := &chaos{t: t, history: h, kills: map[string]int{}, ends: map[string]int{}, rest: onNode(chaosDir, "rest")}
	if err := os.MkdirAll(onNode(chaosDir), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(os.RemoveAll(c.rest), clearAll(context.Background())); err != nil {
			t.Error(err)
		}
	})
	// Without a slot: a kubelet that starts while the agent is away may turn a
	// running pod with slots away for good (seen with v1.37: no healthy devices
	// present), and here both are killed at once. The webhook would give it one.
	show, err := hideWebhook(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := show(); err != nil {
			t.Error(err)
		}
	})
	anchor := newAnchor(t, share{"gpumem": "4000", "gpucores": "10"})
	if err := show(); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for i := range 5 {
		wg.Go(func() { c.comeAndGo(ctx, i, rand.New(rand.NewPCG(uint64(seed), uint64(i)))) })
	}
	wg.Go(func() { c.watchContainers(ctx, h) })
	begin := time.Now()
	var sum audit.Findings
	for done := 0; done < kills; {
		n := min(checkEvery, kills-done)
		if err := c.round(ctx, n, rand.New(rand.NewPCG(uint64(seed), uint64(1000+done)))); err != nil {
			t.Errorf("after %d kills: %v", done, err)
		}
		done += n
		f := c.compare(ctx, anchor)
		for _, line := range f.Lines {
			t.Errorf("after %d kills: %s", done, line)
		}
		sum.LeakedSlices += f.LeakedSlices
		sum.WrongLimits += f.WrongLimits
		sum.DoubleBookings += f.DoubleBookings
		if t.Failed() {
			break // what is wrong now would be wrong after each further round
		}
	}
	took := time.Since(begin)
	stop()
	wg.Wait()
	for _, line := range h.DoubleBookings() {
		sum.DoubleBookings++
		t.Error(line)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, k := range c.suspects {
		// The agent may hear of a grant before this test does.
		if s := h.Strange(k); s != "" {
			sum.WrongLimits++
			t.Error(s)
		}
	}
	text := fmt.Sprintf("chaos: kills %v, pods %v, %d writes looked at, seed %d\nkills %d count\nseconds_per_kill %.2f s\nleaked_slices %d count\nwrong_limits %d count\ndouble_bookings %d count\n",
		c.kills, c.ends, h.Len(), seed, c.killed(), took.Seconds()/float64(max(1, c.killed())), sum.LeakedSlices, sum.WrongLimits, sum.DoubleBookings)
	t.Log("\n" + text)
	writeResult(t, "chaos.txt", text)
}

// setting is a number from the environment.
func setting(t *testing.T, name string, otherwise int64) int64 {
	t.Helper()
	text := os.Getenv(name)
	if text == "" {
		return otherwise
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return n
}

// watchHistory follows the node's pods and its report through restarts of the
// API server.
func watchHistory(t *testing.T) *audit.History {
	t.Helper()
	h := audit.NewHistory()
	node := cluster.Lab.Config().Node.Name
	version := func(o metav1.Object) uint64 {
		v, err := strconv.ParseUint(o.GetResourceVersion(), 10, 64)
		if err != nil {
			t.Errorf("resource version %q: %v", o.GetResourceVersion(), err)
		}
		return v
	}
	pods := coreinformers.NewFilteredPodInformer(cluster.Client, ns, 0, cache.Indexers{}, func(o *metav1.ListOptions) {
		o.FieldSelector = fields.OneTermEqualSelector("spec.nodeName", node).String()
	})
	reports := cluster.Nodes.Informer(0, func(o *metav1.ListOptions) {
		o.FieldSelector = fields.OneTermEqualSelector("metadata.name", node).String()
	})
	for _, f := range []struct {
		informer cache.SharedIndexInformer
		saw      func(any)
		gone     func(any)
	}{
		{pods, func(o any) { p := o.(*corev1.Pod); h.SawPod(version(p), seenPod(p)) }, func(o any) {
			// Of a deletion that happened behind the watch's back the moment isn't
			// known; the last one at which the pod was there is the earliest.
			if last, ok := o.(cache.DeletedFinalStateUnknown); ok {
				o = last.Obj
			}
			if p, ok := o.(*corev1.Pod); ok {
				h.SawNoPod(version(p), string(p.UID))
			}
		}},
		{reports, func(o any) { n := o.(*v1alpha1.GPUNode); h.SawReport(version(n), n.Status.Cards) }, func(any) {}},
	} {
		if _, err := f.informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
			AddFunc: f.saw, UpdateFunc: func(_, o any) { f.saw(o) }, DeleteFunc: f.gone,
		}); err != nil {
			t.Fatal(err)
		}
		go f.informer.RunWithContext(t.Context())
		if !cache.WaitForCacheSync(t.Context().Done(), f.informer.HasSynced) {
			t.Fatal("the watch didn't start")
		}
	}
	return h
}

const chaosDir = "/var/lib/carve-e2e/chaos"

type chaos struct {
	t       *testing.T
	history *audit.History
	// rest is the file whose presence makes the pods idle.
	rest string
	// busy is held for reading by those who make and remove pods, for writing
	// while all is compared.
	busy sync.RWMutex

	mu          sync.Mutex
	kills, ends map[string]int
	// suspects are containers that had what their pod wasn't known to have been
	// granted.
	suspects []audit.Container
}

func (c *chaos) count(m map[string]int, what string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	m[what]++
}

// killed is how many kills there were. c.mu is held.
func (c *chaos) killed() int {
	n := 0
	for _, k := range c.kills {
		n += k
	}
	return n
}

// round kills n times: the agent at random moments after it came back, and
// beside that each other part now and then.
func (c *chaos) round(ctx context.Context, n int, r *rand.Rand) error {
	// Two thirds are the agent's.
	others := n / 3
	seeds := [2]uint64{r.Uint64(), r.Uint64()}
	var wg sync.WaitGroup
	var errs [2]error
	wait(ctx, 2*time.Second) // for pods to come
	wg.Go(func() {
		r := rand.New(rand.NewPCG(seeds[0], 0))
		agent := partByName("agent")
		for range n - others {
			if errs[0] = c.kill(ctx, agent); errs[0] != nil {
				return
			}
			// As a rule the next one comes while it still takes over what there
			// is; now and then it has time to be ready, and pods to come.
			life := r.Float64() * 0.7
			if r.IntN(6) == 0 {
				if errs[0] = serving(ctx); errs[0] != nil {
					return
				}
				life = 1 + 2*r.Float64()
			}
			wait(ctx, time.Duration(life*float64(time.Second)))
		}
	})
	wg.Go(func() {
		r := rand.New(rand.NewPCG(seeds[1], 0))
		names := []string{"extender", "extender", "kubelet", "kubelet", "containerd", "containerd", "scheduler", "scheduler", "apiserver"}
		for range others {
			p := partByName(names[r.IntN(len(names))])
			if errs[1] = c.kill(ctx, p); errs[1] != nil {
				return
			}
			if p.name != "extender" {
				if errs[1] = p.back(ctx); errs[1] != nil {
					return
				}
				if p.name == "apiserver" {
					c.history.Break() // what was told meanwhile may be from before
				}
			}
			wait(ctx, time.Duration(r.Float64()*float64(3*time.Second)))
		}
	})
	wg.Wait()
	return errors.Join(errs[:]...)
}

// kill ends a part as soon as it runs.
func (c *chaos) kill(ctx context.Context, p part) error {
	if p.name == "apiserver" {
		c.history.Break()
	}
	err := await(ctx, p.name+" to be killed", func(ctx context.Context) error { return p.kill(ctx) })
	if err == nil {
		c.count(c.kills, p.name)
	}
	return err
}

func wait(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// compare lets all come to rest and looks.
func (c *chaos) compare(ctx context.Context, a *anchor) audit.Findings {
	c.busy.Lock()
	defer c.busy.Unlock()
	err := os.WriteFile(c.rest, nil, 0o644)
	defer os.Remove(c.rest)
	err = errors.Join(err, serving(ctx), a.same(ctx))
	f := settle(ctx)
	if err != nil {
		f.Lines = append(f.Lines, err.Error())
	}
	return f
}

// watchContainers looks at what runs all the time: a container that has what
// its pod was never granted is wrong, however short it lasts.
func (c *chaos) watchContainers(ctx context.Context, h *audit.History) {
	byNode := map[string]string{}
	said := map[string]bool{}
	for ctx.Err() == nil {
		if len(byNode) == 0 {
			if n, err := cluster.Nodes.Get(ctx, cluster.Lab.Config().Node.Name); err == nil {
				for _, card := range n.Status.Cards {
					byNode[fmt.Sprintf("nvidia%d", card.Index)] = card.UUID
				}
			}
		}
		// While the runtime is away nobody can be asked.
		all, err := seenContainers(ctx, byNode)
		for _, k := range all {
			if err != nil || !k.Running || k.Fault != "" {
				continue
			}
			if s := h.Strange(k); s != "" && !said[k.ID] {
				said[k.ID] = true
				c.mu.Lock()
				c.suspects = append(c.suspects, k)
				c.mu.Unlock()
			}
		}
		wait(ctx, 500*time.Millisecond)
	}
}

// shape is a kind of pod.
type shape struct {
	name string
	make func(name string, r *rand.Rand) *corev1.Pod
}

// busyLoop is what containers do: allocate, and lose processes that hold
// something, until they are told to rest.
const (
	restHere = `while [ -e /chaos/rest ]; do sleep 0.2; done; `
	busyLoop = `while :; do ` + restHere + `gpuprobe alloc 300MiB >/dev/null; gpuprobe serve 100MiB </dev/null >/dev/null & sleep 0.5; kill -9 $!; wait; done`
)

var shapes = []shape{
	{"idle", func(name string, r *rand.Rand) *corev1.Pod { return idle(name, someShare(r, true)) }},
	{"without slot", func(name string, r *rand.Rand) *corev1.Pod { return idle(name, someShare(r, false)) }},
	{"allocating", func(name string, r *rand.Rand) *corev1.Pod {
		return script(name, someShare(r, r.IntN(2) == 0), busyLoop)
	}},
	{"completing", func(name string, r *rand.Rand) *corev1.Pod {
		return script(name, someShare(r, r.IntN(2) == 0), "gpuprobe alloc 1GiB >/dev/null; sleep 0.3")
	}},
	{"crashing", func(name string, r *rand.Rand) *corev1.Pod {
		p := script(name, someShare(r, r.IntN(2) == 0), restHere+"gpuprobe alloc 500MiB >/dev/null; sleep 0.3; "+restHere+"exit 1")
		p.Spec.RestartPolicy = corev1.RestartPolicyAlways
		return p
	}},
	{"init", func(name string, r *rand.Rand) *corev1.Pod {
		p := idle(name, someShare(r, true))
		first := container("first", someShare(r, true))
		first.Command = []string{"/usr/bin/sh", "-c", "gpuprobe alloc 500MiB >/dev/null; sleep 0.3"}
		p.Spec.InitContainers = []corev1.Container{first}
		return p
	}},
	{"two containers", func(name string, r *rand.Rand) *corev1.Pod {
		return pod(name, container("app", someShare(r, true)), container("side", someShare(r, false)), container("plain", nil))
	}},
	{"two cards", func(name string, r *rand.Rand) *corev1.Pod {
		s := someShare(r, true)
		s["gpu"] = "2"
		return idle(name, s)
	}},
	{"whole card", func(name string, _ *rand.Rand) *corev1.Pod { return idle(name, share{"gpu": "1"}) }},
	{"no card", func(name string, _ *rand.Rand) *corev1.Pod { return idle(name, nil) }},
}

// someShare is small as a rule, and now and then so large that others wait.
func someShare(r *rand.Rand, slot bool) share {
	mem := 2000 + r.IntN(8000)
	if r.IntN(5) == 0 {
		mem = 30000 + r.IntN(40000)
	}
	s := share{"gpumem": strconv.Itoa(mem)}
	if slot {
		s["gpu"] = "1"
	}
	if r.IntN(3) == 0 {
		s["gpucores"] = strconv.Itoa(5 + r.IntN(30))
	}
	return s
}

// comeAndGo makes one pod after the other and ends each in some way.
func (c *chaos) comeAndGo(ctx context.Context, worker int, r *rand.Rand) {
	for n := 0; ctx.Err() == nil; n++ {
		s := shapes[r.IntN(len(shapes))]
		p := s.make(fmt.Sprintf("chaos-%d-%d", worker, n), r)
		grace := int64(r.IntN(3))
		p.Spec.TerminationGracePeriodSeconds = &grace
		kind := corev1.HostPathDirectoryOrCreate
		p.Spec.Volumes = append(p.Spec.Volumes, corev1.Volume{Name: "chaos", VolumeSource: corev1.VolumeSource{HostPath: &corev1.HostPathVolumeSource{Path: chaosDir, Type: &kind}}})
		for i := range p.Spec.Containers {
			p.Spec.Containers[i].VolumeMounts = append(p.Spec.Containers[i].VolumeMounts, corev1.VolumeMount{Name: "chaos", MountPath: "/chaos"})
		}
		life := time.Duration(r.ExpFloat64() * float64(5*time.Second))
		force := r.IntN(4) == 0
		c.step(func() {
			if _, err := post(ctx, p); err != nil && ctx.Err() == nil {
				c.t.Errorf("create %s: %v", p.Name, err)
			}
		})
		grow := r.IntN(3) == 0
		more := int64(1000 + r.IntN(4000))
		wait(ctx, min(life/2, 10*time.Second))
		if grow {
			c.step(func() { c.grow(ctx, p.Name, more) })
		}
		wait(ctx, min(life/2, 10*time.Second))
		c.step(func() { c.endOne(ctx, p.Name, s.name, force) })
	}
}

// grow asks for more memory for a pod's app container, if it has a share.
func (c *chaos) grow(ctx context.Context, name string, moreMiB int64) {
	p, err := cluster.Client.CoreV1().Pods(ns).Get(ctx, name, metav1.GetOptions{})
	if err != nil || p.Annotations[api.AnnotationGrant] == "" {
		return
	}
	g, err := api.DecodeGrant(p.Annotations[api.AnnotationGrant])
	if err != nil || len(g.Containers["app"]) == 0 || g.Containers["app"][0].Mode != api.ModeVGPU {
		return
	}
	if err := askResize(ctx, name, g.Containers["app"][0].MemMiB+moreMiB); err == nil {
		c.count(c.ends, "resized meanwhile")
	}
}

func (c *chaos) step(f func()) {
	c.busy.RLock()
	defer c.busy.RUnlock()
	f()
}

// endOne deletes a pod, politely or not, and notes what had become of it.
func (c *chaos) endOne(ctx context.Context, name, shape string, force bool) {
	if ctx.Err() != nil {
		return
	}
	phase := "unknown"
	if p, err := cluster.Client.CoreV1().Pods(ns).Get(ctx, name, metav1.GetOptions{}); err == nil {
		phase = strings.ToLower(string(p.Status.Phase))
		if p.Status.Phase == corev1.PodFailed && p.Status.Reason != "" {
			phase += " " + p.Status.Reason
		}
	}
	var grace *int64
	if force {
		grace = new(int64)
		phase += ", forced"
	}
	if err := erase(ctx, name, grace); err != nil && ctx.Err() == nil {
		c.t.Errorf("delete %s (%s): %v", name, shape, err)
		return
	}
	c.count(c.ends, phase)
}
