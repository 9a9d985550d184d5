package agent

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/v1alpha1"
	"github.com/carve-gpu/carve/vgpu/region"
)

// testNode is a running agent with everything around it.
type testNode struct {
	*Agent
	t     *testing.T
	api   *apiServer
	cards *twoCards
	dir   string
	edit  []func(*Config)
	stop  func()
}

func startNode(t *testing.T, edit ...func(*Config)) *testNode {
	t.Helper()
	n := &testNode{t: t, dir: t.TempDir(), cards: &twoCards{}, api: newAPIServer(t), edit: edit}
	makeRoot(t, n.dir)
	n.start()
	// The directory can't be removed while file systems are mounted in it.
	t.Cleanup(func() {
		n.stop()
		uids, _ := n.files.pods()
		for _, uid := range uids {
			n.files.clear(uid)
		}
	})
	return n
}

// start starts an agent on the node's directories, as after a restart.
func (n *testNode) start() {
	n.t.Helper()
	c := testConfig(n.t, n.dir, n.api, n.cards)
	for _, edit := range n.edit {
		edit(&c)
	}
	a, err := New(n.t.Context(), c)
	if err != nil {
		n.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); a.Run(ctx) }()
	n.Agent = a
	n.stop = func() { cancel(); <-done }
}

// link plays the hook's link coming up with the containers that the runtime
// has.
func (n *testNode) link(containers ...RuntimeContainer) {
	n.Synchronize(containers)
	n.LinkChanged(true)
}

func (n *testNode) prepared(uid, container string) bool {
	p, err := n.Slice(RuntimeContainer{ID: "look", PodUID: uid, Name: container})
	return err == nil && p != nil
}

func (n *testNode) refusal(uid string) string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.refused[uid]
}

// leftovers are the slices' directories and records.
func (n *testNode) leftovers() []string {
	n.t.Helper()
	var out []string
	for _, dir := range []string{"run/slices", "state/journal"} {
		entries, err := os.ReadDir(filepath.Join(n.dir, dir))
		if err != nil {
			n.t.Fatal(err)
		}
		for _, e := range entries {
			out = append(out, dir+"/"+e.Name())
		}
	}
	return out
}

func slicesOf(s v1alpha1.GPUNodeStatus, card string) string {
	var out []string
	for _, c := range s.Cards {
		if c.UUID == card {
			for _, x := range c.Slices {
				out = append(out, x.PodUID+"/"+x.Container+"="+x.State)
			}
		}
	}
	return strings.Join(out, " ")
}

func TestLifeOfASlice(t *testing.T) {
	n := startNode(t)
	n.link()
	g := grantOf("uid-1", 1, map[string][]api.CardGrant{"app": shareOf(cardB, 8000, 30)})
	n.api.setPod(podWith(t, "uid-1", g))
	eventually(t, "the slice is prepared", func() bool { return n.prepared("uid-1", "app") })

	p, err := n.Slice(RuntimeContainer{ID: "c1", PodUID: "uid-1", Name: "app"})
	if err != nil {
		t.Fatal(err)
	}
	if len(p.Cards) != 1 || p.Cards[0].Path != "/dev/nvidia1" || p.Cards[0].Major != 195 || p.Cards[0].Minor != 2 {
		t.Errorf("cards %+v", p.Cards)
	}
	l, err := region.ReadLimits(p.LimitsPath)
	if err != nil {
		t.Fatal(err)
	}
	if len(l.Cards) != 1 || l.Cards[0].UUID.String() != cardB || l.Cards[0].LimitBytes != 8000<<20 || l.Cards[0].ComputePPM != 300000 {
		t.Errorf("limits %+v", l)
	}
	var fs unix.Statfs_t
	if err := unix.Statfs(filepath.Dir(p.UsagePath), &fs); err != nil {
		t.Fatal(err)
	}
	if fs.Type != unix.TMPFS_MAGIC || int64(fs.Blocks)*fs.Bsize > usageFSBytes+1<<16 || fs.Files > usageFSInodes {
		t.Errorf("usage lies on %+v, want a small tmpfs of its own", fs)
	}
	eventually(t, "the report shows it prepared", func() bool {
		s, _ := n.api.report()
		return slicesOf(s, cardB) == "uid-1/app=prepared" && s.Summary.GrantedMiB == 8000
	})
	n.Adjusted(RuntimeContainer{ID: "c1", PodUID: "uid-1", Name: "app"})
	eventually(t, "the report shows it active", func() bool {
		s, _ := n.api.report()
		return slicesOf(s, cardB) == "uid-1/app=active"
	})
	n.api.deletePod("uid-1")
	time.Sleep(100 * time.Millisecond)
	if !n.prepared("uid-1", "app") {
		t.Error("the slice is gone while its container runs")
	}
	n.Exited("c1")
	eventually(t, "the report shows none", func() bool { s, _ := n.api.report(); return slicesOf(s, cardB) == "" })
	if left := n.leftovers(); len(left) != 0 {
		t.Errorf("left behind: %v", left)
	}
}

// A slice is reported when its container runs, in one write, or a moment after it
// was prepared, if that takes longer.
func TestASliceWhoseContainerStartsSoonIsReportedOnce(t *testing.T) {
	n := startNode(t)
	n.link()
	eventually(t, "the node is reported", func() bool { s, _ := n.api.report(); return s.HookConnectedSince != nil })
	age := func(uid string, at time.Time) {
		n.mu.Lock()
		defer n.mu.Unlock()
		n.held[uid].preparedAt = at
	}
	n.api.setPod(podWith(t, "uid-1", grantOf("uid-1", 1, map[string][]api.CardGrant{"app": shareOf(cardA, 100, 0)})))
	eventually(t, "the slice is prepared", func() bool { return n.prepared("uid-1", "app") })
	age("uid-1", time.Now().Add(time.Hour)) // so that the test's own pace doesn't matter
	_, before := n.api.report()
	n.report()
	time.Sleep(5 * gatherAtMost)
	if s, writes := n.api.report(); writes != before || s.Summary.Slices != 0 {
		t.Fatalf("%d writes for a slice that was just prepared: %+v", writes-before, s.Summary)
	}
	n.Adjusted(RuntimeContainer{ID: "c1", PodUID: "uid-1", Name: "app"})
	eventually(t, "the slice is reported", func() bool { s, _ := n.api.report(); return s.Summary.Slices == 1 })
	if s, writes := n.api.report(); writes != before+1 || s.Cards[0].Slices[0].State != v1alpha1.Active {
		t.Errorf("%d writes, the slice is %+v", writes-before, s.Cards[0].Slices)
	}
	// One that waits for its image is reported all the same.
	n.api.setPod(podWith(t, "uid-2", grantOf("uid-2", 1, map[string][]api.CardGrant{"app": shareOf(cardA, 100, 0)})))
	eventually(t, "the second slice is reported", func() bool {
		s, _ := n.api.report()
		return s.Summary.Slices == 2 && s.Summary.GrantedMiB == 200
	})
}

func TestAnIdleNodeWritesNothing(t *testing.T) {
	n := startNode(t)
	n.link()
	n.api.setPod(podWith(t, "uid-1", grantOf("uid-1", 1, map[string][]api.CardGrant{"app": shareOf(cardA, 100, 0)})))
	eventually(t, "the slice is reported", func() bool { s, _ := n.api.report(); return slicesOf(s, cardA) != "" })
	_, before := n.api.report()
	// Looks at everything, and changes that don't matter to the report.
	for range 5 {
		n.readCards()
		n.queueAll()
		n.Agent.report()
		time.Sleep(100 * time.Millisecond)
	}
	if _, after := n.api.report(); after != before {
		t.Errorf("%d writes without a change", after-before)
	}
}

func TestASomeoneElsesReportIsPutRight(t *testing.T) {
	n := startNode(t)
	n.link()
	eventually(t, "a report", func() bool { s, _ := n.api.report(); return len(s.Cards) == 2 })
	n.api.mu.Lock()
	n.api.putStatus(v1alpha1.GPUNodeStatus{AgentVersion: "forged"})
	n.api.mu.Unlock()
	eventually(t, "it is put right", func() bool { s, _ := n.api.report(); return s.AgentVersion == "test" && len(s.Cards) == 2 })
}

// Attempt n+1 of a crash-looping container is created before n is removed.
func TestALateRemovalOfAnEarlierContainerChangesNothing(t *testing.T) {
	n := startNode(t)
	n.link()
	n.api.setPod(podWith(t, "uid-1", grantOf("uid-1", 1, map[string][]api.CardGrant{"app": shareOf(cardA, 100, 0)})))
	eventually(t, "the slice is prepared", func() bool { return n.prepared("uid-1", "app") })
	n.Adjusted(RuntimeContainer{ID: "first", PodUID: "uid-1", Name: "app"})
	n.Exited("first")
	n.Adjusted(RuntimeContainer{ID: "second", PodUID: "uid-1", Name: "app"})
	n.api.deletePod("uid-1")
	n.Exited("first")
	n.Exited("never seen")
	time.Sleep(100 * time.Millisecond)
	if !n.prepared("uid-1", "app") {
		t.Fatal("the slice went with a container that had ended long before")
	}
	n.Exited("second")
	eventually(t, "it is released", func() bool { return len(n.leftovers()) == 0 })
}

// A crash loop: attempt n+1 is there before anyone told of the end of n.
func TestAttemptsOfACrashLoopOverlap(t *testing.T) {
	n := startNode(t)
	n.link()
	n.api.setPod(podWith(t, "uid-1", grantOf("uid-1", 1, map[string][]api.CardGrant{"app": shareOf(cardA, 100, 0)})))
	eventually(t, "the slice is prepared", func() bool { return n.prepared("uid-1", "app") })
	for i := range 5 {
		n.Adjusted(RuntimeContainer{ID: fmt.Sprint("attempt-", i), PodUID: "uid-1", Name: "app"})
		n.Started(fmt.Sprint("attempt-", i), 0)
		if i > 0 {
			n.Exited(fmt.Sprint("attempt-", i-1))
		}
		eventually(t, "the report shows it active", func() bool { s, _ := n.api.report(); return slicesOf(s, cardA) == "uid-1/app=active" })
	}
	n.api.deletePod("uid-1")
	for i := range 4 { // removals come last, and twice
		n.Exited(fmt.Sprint("attempt-", i))
	}
	time.Sleep(100 * time.Millisecond)
	if !n.prepared("uid-1", "app") {
		t.Fatal("the slice went while the last attempt runs")
	}
	n.Exited("attempt-4")
	eventually(t, "it is released", func() bool { return len(n.leftovers()) == 0 })
}

// A finished pod keeps its dead container: RemoveContainer doesn't come.
func TestAFinishedPodGivesItsSliceBack(t *testing.T) {
	n := startNode(t)
	n.link()
	p := podWith(t, "uid-1", grantOf("uid-1", 1, map[string][]api.CardGrant{"app": shareOf(cardA, 100, 0)}))
	n.api.setPod(p)
	eventually(t, "the slice is prepared", func() bool { return n.prepared("uid-1", "app") })
	n.Adjusted(RuntimeContainer{ID: "c1", PodUID: "uid-1", Name: "app"})
	done := p.DeepCopy()
	done.Status.Phase = corev1.PodSucceeded
	n.api.setPod(done)
	n.Exited("c1")
	eventually(t, "it is released", func() bool { return len(n.leftovers()) == 0 })
}

func TestNothingIsReleasedBeforeTheRuntimeHasListedItsContainers(t *testing.T) {
	n := startNode(t)
	n.link()
	n.api.setPod(podWith(t, "uid-1", grantOf("uid-1", 1, map[string][]api.CardGrant{"app": shareOf(cardA, 100, 0)})))
	eventually(t, "the slice is prepared", func() bool { return n.prepared("uid-1", "app") })
	n.stop()
	n.api.deletePod("uid-1")
	n.start()
	eventually(t, "pods are known", func() bool { n.mu.Lock(); defer n.mu.Unlock(); return n.watched })
	time.Sleep(100 * time.Millisecond)
	if len(n.leftovers()) == 0 {
		t.Fatal("released without asking the runtime")
	}
	// It still runs, and ends later.
	n.link(RuntimeContainer{ID: "c1", PodUID: "uid-1", Name: "app", Adjusted: true})
	time.Sleep(100 * time.Millisecond)
	if len(n.leftovers()) == 0 {
		t.Fatal("released while a container runs")
	}
	n.Exited("c1")
	eventually(t, "it is released", func() bool { return len(n.leftovers()) == 0 })
}

// /run is gone after a reboot, the journal isn't.
func TestSlicesComeBackAfterAReboot(t *testing.T) {
	n := startNode(t)
	n.link()
	g := grantOf("uid-1", 3, map[string][]api.CardGrant{"app": shareOf(cardA, 4096, 50)})
	n.api.setPod(podWith(t, "uid-1", g))
	eventually(t, "the slice is prepared", func() bool { return n.prepared("uid-1", "app") })
	// Something was charged when the power went.
	u, err := os.OpenFile(n.files.usage("uid-1", "app"), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := u.WriteAt(bytes.Repeat([]byte{1}, 4096), 4096); err != nil {
		t.Fatal(err)
	}
	u.Close()
	n.stop()
	if err := n.files.clear("uid-1"); err != nil {
		t.Fatal(err)
	}
	n.api.setAway(true) // and the API server isn't up yet
	n.start()
	eventually(t, "the slice is prepared", func() bool { return n.prepared("uid-1", "app") })
	l, err := region.ReadLimits(n.files.limits("uid-1", "app"))
	if err != nil || l.Cards[0].LimitBytes != 4096<<20 {
		t.Errorf("%+v, %v", l, err)
	}
	// Usage lies on a tmpfs of its own, so a boot id needn't tell it from older
	// charges.
	if used, err := region.ReadUsage(n.files.usage("uid-1", "app"), 1); err != nil || used.Total(0).UsedBytes != 0 || used.Damage != 0 {
		t.Errorf("charged from before the reboot: %+v, %v", used.Total(0), err)
	}
	// The kubelet starts the pod's container again before the API server is back:
	// it gets what the journal says, and the report will say so.
	p, err := n.Slice(RuntimeContainer{ID: "c2", PodUID: "uid-1", Name: "app", Asked: true})
	if err != nil || p == nil || p.Generation != 3 {
		t.Errorf("the restarted container gets %+v, %v", p, err)
	}
}

func TestAResizeReachesTheFileInPlace(t *testing.T) {
	n := startNode(t)
	n.link()
	n.api.setPod(podWith(t, "uid-1", grantOf("uid-1", 1, map[string][]api.CardGrant{"app": shareOf(cardA, 1000, 0)})))
	eventually(t, "the slice is prepared", func() bool { return n.prepared("uid-1", "app") })
	path := n.files.limits("uid-1", "app")
	before, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	n.api.setPod(podWith(t, "uid-1", grantOf("uid-1", 2, map[string][]api.CardGrant{"app": shareOf(cardA, 2000, 0)})))
	eventually(t, "the limits grow", func() bool {
		l, err := region.ReadLimits(path)
		return err == nil && l.Cards[0].LimitBytes == 2000<<20
	})
	after, err := os.Stat(path)
	if err != nil || !os.SameFile(before, after) {
		t.Errorf("the file was replaced: running containers keep the old one (%v)", err)
	}
	// An older generation comes late, and a second grant of the same one.
	for _, g := range []api.Grant{
		grantOf("uid-1", 1, map[string][]api.CardGrant{"app": shareOf(cardA, 1000, 0)}),
		grantOf("uid-1", 2, map[string][]api.CardGrant{"app": shareOf(cardA, 3000, 0)}),
	} {
		n.api.setPod(podWith(t, "uid-1", g))
		eventually(t, "it is refused", func() bool { return n.refusal("uid-1") != "" })
		l, err := region.ReadLimits(path)
		if err != nil || l.Cards[0].LimitBytes != 2000<<20 {
			t.Errorf("after a grant of generation %d with %d MiB: %+v, %v", g.Generation, g.Containers["app"][0].MemMiB, l.Cards, err)
		}
		n.api.setPod(podWith(t, "uid-1", grantOf("uid-1", 2, map[string][]api.CardGrant{"app": shareOf(cardA, 2000, 0)})))
		eventually(t, "the refusal is forgotten", func() bool { return n.refusal("uid-1") == "" })
	}
	if !n.prepared("uid-1", "app") {
		t.Error("refused grants took the slice away")
	}
}

func TestARefusedGrantIsSaidOnThePodAndToTheContainer(t *testing.T) {
	n := startNode(t)
	n.link()
	g := grantOf("another-pod", 1, map[string][]api.CardGrant{"app": shareOf(cardA, 100, 0)})
	p := podWith(t, "uid-1", g)
	p.Spec.Containers[0].Resources.Limits = corev1.ResourceList{api.ResourceGPU: resource.MustParse("1")}
	n.api.setPod(p)
	eventually(t, "it is refused", func() bool { return n.refusal("uid-1") != "" })
	if _, err := n.Slice(RuntimeContainer{ID: "c1", PodUID: "uid-1", Name: "app", Asked: true}); err == nil || !strings.Contains(err.Error(), "copied or forged") {
		t.Errorf("the container is told %v", err)
	}
	if err := n.AwaitPrepared(t.Context(), "default", "pod-uid-1", "app"); err == nil || !strings.Contains(err.Error(), "copied or forged") {
		t.Errorf("the kubelet is told %v", err)
	}
	eventually(t, "an event", func() bool {
		return strings.Contains(n.api.said(), "pod-uid-1 GrantRefused: the grant is for pod another-pod")
	})
	if len(n.leftovers()) != 0 {
		t.Errorf("left behind: %v", n.leftovers())
	}
}

func TestContainersWithoutAGrant(t *testing.T) {
	n := startNode(t)
	n.link()
	asks := &corev1.Pod{}
	asks.Name, asks.Namespace, asks.UID = "asks", "default", "uid-asks"
	asks.Spec.NodeName = nodeName
	asks.Spec.Containers = []corev1.Container{
		{Name: "gpu", Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{api.ResourceMemory: resource.MustParse("8000")}}},
		{Name: "cpu"},
	}
	n.api.setPod(asks)
	eventually(t, "the pod is known", func() bool { n.mu.Lock(); defer n.mu.Unlock(); return len(n.pods) == 1 })
	for name, c := range map[string]struct {
		container RuntimeContainer
		want      string // "" for no refusal
	}{
		"asks for memory without a grant":     {RuntimeContainer{PodUID: "uid-asks", Name: "gpu"}, "carries no grant"},
		"its neighbour that asks for nothing": {RuntimeContainer{PodUID: "uid-asks", Name: "cpu"}, ""},
		"met the device plugin":               {RuntimeContainer{PodUID: "uid-asks", Name: "cpu", Asked: true}, "carries no grant"},
		"an unknown pod":                      {RuntimeContainer{PodUID: "uid-other", Name: "x"}, ""},
		"an unknown pod that met the plugin":  {RuntimeContainer{PodUID: "uid-other", Name: "x", Asked: true}, "doesn't know its pod yet"},
	} {
		p, err := n.Slice(c.container)
		if p != nil {
			t.Errorf("%s: gets %+v", name, p)
		}
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
	mirror := asks.DeepCopy()
	mirror.Name, mirror.UID = "static-n1", "uid-mirror"
	mirror.Annotations = map[string]string{mirrorOf: "uid-of-the-file"}
	n.api.setPod(mirror)
	eventually(t, "a static pod that asks is refused", func() bool {
		_, err := n.Slice(RuntimeContainer{PodUID: "uid-of-the-file", Name: "gpu"})
		return err != nil && strings.Contains(err.Error(), "carries no grant")
	})
	// Anybody can write that annotation, with any pod's UID in it.
	n.api.setPod(podWith(t, "uid-victim", grantOf("uid-victim", 1, map[string][]api.CardGrant{"app": shareOf(cardA, 100, 0)})))
	eventually(t, "the victim's slice is prepared", func() bool { return n.prepared("uid-victim", "app") })
	fake := asks.DeepCopy()
	fake.Name, fake.UID = "fake", "uid-fake"
	fake.Annotations = map[string]string{mirrorOf: "uid-victim"}
	n.api.setPod(fake)
	eventually(t, "the fake is known", func() bool { n.mu.Lock(); defer n.mu.Unlock(); return n.pods["uid-fake"].uid != "" })
	n.api.deletePod("uid-fake")
	eventually(t, "the fake is gone", func() bool { n.mu.Lock(); defer n.mu.Unlock(); return n.pods["uid-fake"].uid == "" })
	n.Exited("any")
	time.Sleep(100 * time.Millisecond)
	if p, err := n.Slice(RuntimeContainer{PodUID: "uid-victim", Name: "app"}); p == nil || err != nil {
		t.Errorf("after a fake came and went the victim's slice is %+v, %v", p, err)
	}
	if err := n.AwaitPrepared(t.Context(), "default", "asks", "gpu"); err == nil || !strings.Contains(err.Error(), "carries no grant") {
		t.Errorf("the kubelet is told %v", err)
	}
}

func TestPreStartWaitsForSliceAndLink(t *testing.T) {
	n := startNode(t)
	short, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := n.AwaitPrepared(short, "default", "pod-uid-1", "app"); err == nil || !strings.Contains(err.Error(), "no link to the container runtime") {
		t.Errorf("without a link: %v", err)
	}
	n.link()
	waited := make(chan error, 1)
	go func() { waited <- n.AwaitPrepared(t.Context(), "default", "pod-uid-1", "app") }()
	n.api.setPod(podWith(t, "uid-1", grantOf("uid-1", 1, map[string][]api.CardGrant{"app": shareOf(cardA, 100, 0)})))
	if err := <-waited; err != nil {
		t.Error(err)
	}
	n.LinkChanged(false)
	short, cancel = context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := n.AwaitPrepared(short, "default", "pod-uid-1", "app"); err == nil {
		t.Error("a prepared slice is enough while the link is down")
	}
}

func TestWithTheAPIServerAwayTheSandboxStandsForThePod(t *testing.T) {
	n := startNode(t)
	n.link()
	eventually(t, "pods are known", func() bool { n.mu.Lock(); defer n.mu.Unlock(); return n.watched && n.hardware.known })
	n.api.setAway(true)
	g := grantOf("uid-1", 1, map[string][]api.CardGrant{"app": shareOf(cardA, 100, 0)})
	text, err := g.Encode()
	if err != nil {
		t.Fatal(err)
	}
	annotations := map[string]string{api.AnnotationGrant: text, configSource: "api"}
	n.SandboxStarted("uid-1", "default", "pod-uid-1", annotations)
	eventually(t, "the slice is prepared", func() bool { return n.prepared("uid-1", "app") })
	if err := n.AwaitPrepared(t.Context(), "default", "pod-uid-1", "app"); err != nil {
		t.Error(err)
	}
	// A file on the node isn't checked by any API server.
	static := map[string]string{api.AnnotationGrant: strings.ReplaceAll(text, "uid-1", "uid-2"), configSource: "file"}
	n.SandboxStarted("uid-2", "default", "static", static)
	time.Sleep(100 * time.Millisecond)
	if p, err := n.Slice(RuntimeContainer{PodUID: "uid-2", Name: "app"}); err == nil || p != nil {
		t.Errorf("a static pod with a grant of its own gets %v, %v", p, err)
	}
	n.api.setAway(false)
	n.api.setPod(podWith(t, "uid-1", g))
	eventually(t, "the watch knows the pod", func() bool { n.mu.Lock(); defer n.mu.Unlock(); return n.pods["uid-1"].uid != "" })
	n.api.deletePod("uid-1")
	eventually(t, "it is released", func() bool { return len(n.leftovers()) == 0 })
}

// A sandbox outlives its pod. One that is listed while the API server gives no
// answer is served, and let go as soon as it answers, though no event of the pod
// ever comes; what does exist stays served, also when the runtime lists it again.
func TestASandboxWhosePodIsGoneIsLetGoWhenTheAPIServerIsBack(t *testing.T) {
	n := startNode(t)
	n.link()
	eventually(t, "pods are known", func() bool { n.mu.Lock(); defer n.mu.Unlock(); return n.watched && n.hardware.known })
	n.api.setAway(true)
	annotations := map[string]map[string]string{}
	for _, uid := range []string{"uid-1", "uid-2"} {
		text, err := grantOf(uid, 1, map[string][]api.CardGrant{"app": shareOf(cardA, 100, 0)}).Encode()
		if err != nil {
			t.Fatal(err)
		}
		annotations[uid] = map[string]string{api.AnnotationGrant: text, configSource: "api"}
		n.SandboxStarted(uid, "default", "pod-"+uid, annotations[uid])
		eventually(t, "the slice is prepared", func() bool { return n.prepared(uid, "app") })
	}
	n.link() // the runtime was restarted: everything is looked at again
	time.Sleep(100 * time.Millisecond)
	if !n.prepared("uid-1", "app") || !n.prepared("uid-2", "app") {
		t.Error("a slice went while nobody could say whether its pod exists")
	}
	n.api.setPod(podWith(t, "uid-2", grantOf("uid-2", 1, map[string][]api.CardGrant{"app": shareOf(cardA, 100, 0)})))
	n.api.setAway(false)
	eventually(t, "the slice of the pod that is gone is released", func() bool { return !n.prepared("uid-1", "app") })
	if !n.prepared("uid-2", "app") {
		t.Error("the slice of a pod that exists went")
	}
	n.api.deletePod("uid-2")
	eventually(t, "nothing is left", func() bool { return len(n.leftovers()) == 0 })
}

func TestAGrantInASandboxIsCheckedWithTheAPIServer(t *testing.T) {
	n := startNode(t)
	n.link()
	eventually(t, "pods are known", func() bool { n.mu.Lock(); defer n.mu.Unlock(); return n.watched })
	text, err := grantOf("uid-1", 1, map[string][]api.CardGrant{"app": shareOf(cardA, 100, 0)}).Encode()
	if err != nil {
		t.Fatal(err)
	}
	n.SandboxStarted("uid-1", "default", "nobody", map[string]string{api.AnnotationGrant: text, configSource: "api"})
	eventually(t, "the API server has denied the pod", func() bool { n.mu.Lock(); defer n.mu.Unlock(); return len(n.sandboxes) == 0 })
	if n.prepared("uid-1", "app") || len(n.leftovers()) != 0 {
		t.Error("a pod that doesn't exist has a slice")
	}
}

// After a start the runtime may tell of a container before the watch has shown
// its pod. The pod's owner is told all the same why it is stopped.
func TestAContainerOfAPodThatIsNotSeenYetIsStoppedWithAWord(t *testing.T) {
	n := startNode(t)
	n.api.setPod(podWith(t, "uid-1", grantOf("uid-1", 1, map[string][]api.CardGrant{"app": shareOf(cardA, 100, 0)})))
	eventually(t, "the slice is prepared", func() bool { return n.prepared("uid-1", "app") })
	n.mu.Lock()
	delete(n.pods, "uid-1")
	n.mu.Unlock()
	n.link(RuntimeContainer{ID: "gap", PodUID: "uid-1", Name: "app"})
	eventually(t, "an event", func() bool { return strings.Contains(n.api.said(), "pod-uid-1 StartedWithoutCard") })
}

// The runtime lists its containers before the API server shows the pods: the
// reason waits for the pod that it belongs on.
func TestTheReasonForAStopReachesThePod(t *testing.T) {
	n := startNode(t)
	p := podWith(t, "uid-1", grantOf("uid-1", 1, map[string][]api.CardGrant{"app": shareOf(cardA, 100, 0)}))
	p.Spec.RestartPolicy = corev1.RestartPolicyNever
	n.api.setPod(p)
	eventually(t, "the slice is prepared", func() bool { return n.prepared("uid-1", "app") })
	n.stop()
	n.api.setAway(true)
	n.start()
	n.link(RuntimeContainer{ID: "gap", PodUID: "uid-1", Name: "app"})
	time.Sleep(100 * time.Millisecond)
	n.mu.Lock()
	if n.containers["gap"].stopped {
		t.Error("acted before the pod was known")
	}
	n.mu.Unlock()
	n.api.setAway(false)
	eventually(t, "the event, with what becomes of the pod", func() bool {
		said := n.api.said()
		return strings.Contains(said, "pod-uid-1 StartedWithoutCard") && strings.Contains(said, "doesn't restart")
	})
}

func TestContainersThatStartedWithoutTheHookAreCountedAndStopped(t *testing.T) {
	n := startNode(t)
	n.api.setPod(podWith(t, "uid-1", grantOf("uid-1", 1, map[string][]api.CardGrant{"app": shareOf(cardA, 100, 0)})))
	eventually(t, "the slice is prepared", func() bool { return n.prepared("uid-1", "app") })
	n.link(
		RuntimeContainer{ID: "gap", PodUID: "uid-1", Name: "app"},
		RuntimeContainer{ID: "asked", PodUID: "uid-2", Name: "x", Asked: true},
		RuntimeContainer{ID: "plain", PodUID: "uid-3", Name: "x"},
	)
	eventually(t, "they are reported", func() bool { s, _ := n.api.report(); return s.UnadjustedContainers == 2 })
	eventually(t, "an event", func() bool { return strings.Contains(n.api.said(), "pod-uid-1 StartedWithoutCard") })
	if err := n.Starting("gap", 0); err == nil {
		t.Error("a container that was created without the hook may start")
	}
	for _, id := range []string{"plain", "unknown"} {
		if err := n.Starting(id, 0); err != nil {
			t.Errorf("%s: %v", id, err)
		}
	}
	n.Exited("gap")
	n.Exited("asked")
	eventually(t, "none is reported", func() bool { s, _ := n.api.report(); return s.UnadjustedContainers == 0 })
}

// A container whose start failed: the runtime tells of its creation and never of
// its end. The kubelet does. Of one that did start it is not believed.
func TestAContainerThatNeverStartedGivesItsSliceBack(t *testing.T) {
	n := startNode(t)
	n.link()
	failed := func(uid, id string) *corev1.Pod {
		p := podWith(t, uid, grantOf(uid, 1, map[string][]api.CardGrant{"app": shareOf(cardA, 100, 0)}))
		p.Status.Phase = corev1.PodFailed
		p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "app", State: corev1.ContainerState{
			Terminated: &corev1.ContainerStateTerminated{Reason: "StartError", ContainerID: "containerd://" + id}}}}
		return p
	}
	for _, uid := range []string{"uid-1", "uid-2"} {
		n.api.setPod(podWith(t, uid, grantOf(uid, 1, map[string][]api.CardGrant{"app": shareOf(cardA, 100, 0)})))
		eventually(t, "the slice is prepared", func() bool { return n.prepared(uid, "app") })
		n.Adjusted(RuntimeContainer{ID: "c-" + uid, PodUID: uid, Name: "app", Adjusted: true})
	}
	n.Started("c-uid-2", 0)
	n.api.setPod(failed("uid-2", "c-uid-2"))
	n.api.setPod(failed("uid-1", "c-uid-2")) // another pod's container: no word on its own
	eventually(t, "the watch knows both", func() bool {
		n.mu.Lock()
		defer n.mu.Unlock()
		return n.pods["uid-1"].over && n.pods["uid-2"].over
	})
	time.Sleep(100 * time.Millisecond)
	if !n.prepared("uid-1", "app") || !n.prepared("uid-2", "app") {
		t.Fatal("a slice was released while its container may run")
	}
	n.api.setPod(failed("uid-1", "c-uid-1"))
	eventually(t, "the slice is released", func() bool { return !n.prepared("uid-1", "app") })
	if !n.prepared("uid-2", "app") {
		t.Error("the slice of a container that runs was released")
	}
	n.Exited("c-uid-2")
	eventually(t, "the other is released too", func() bool { return len(n.leftovers()) == 0 })
}
