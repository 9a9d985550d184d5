package agent

import (
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/carve-gpu/carve/api"
)

// Pods are sent to a node as soon as its agent says that it is ready. At its
// start the API still shows what the last one left, so nothing may count before
// the hook is linked and the report is this agent's own.
func TestReadyComesAfterTheLinkAndTheReport(t *testing.T) {
	n := startNode(t)
	n.stop()
	n.api.setAway(true)
	n.start()
	eventually(t, "the cards are known", func() bool { n.mu.Lock(); defer n.mu.Unlock(); return n.hardware.known })
	if err := n.Ready(); err == nil || !strings.Contains(err.Error(), "no link to the container runtime yet") || !strings.Contains(err.Error(), "report isn't written yet") {
		t.Errorf("ready: %v", err)
	}
	n.link()
	if err := n.Ready(); err == nil || strings.Contains(err.Error(), "link") || !strings.Contains(err.Error(), "report isn't written yet") {
		t.Errorf("ready: %v", err)
	}
	n.api.setAway(false)
	eventually(t, "the agent is ready", func() bool { return n.Ready() == nil })
	// A short break of the link is not the end of it.
	n.LinkChanged(false)
	if err := n.Ready(); err != nil {
		t.Errorf("ready: %v", err)
	}
}

// A link that is asked for while a container takes its time to stop would hold up
// everything on the node, so it isn't.
func TestTheLinkWaitsForContainersThatStopSlowly(t *testing.T) {
	n := startNode(t)
	eventually(t, "the pods are known", func() bool { return n.LinkWaits() == "" })
	p := podWith(t, "uid-1", grantOf("uid-1", 1, map[string][]api.CardGrant{"app": shareOf(cardA, 100, 0)}))
	p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "app", State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}}}
	stops := func(after time.Duration) {
		at, grace := metav1.NewTime(time.Now().Add(after)), int64(3700) // told before the agent's start
		p.DeletionTimestamp, p.DeletionGracePeriodSeconds = &at, &grace
		n.api.setPod(p.DeepCopy())
	}
	n.api.setPod(p.DeepCopy())
	eventually(t, "the pod is known", func() bool { n.mu.Lock(); defer n.mu.Unlock(); return n.pods["uid-1"].uid != "" })
	if why := n.LinkWaits(); why != "" {
		t.Errorf("for a pod that runs: %s", why)
	}
	stops(time.Hour)
	eventually(t, "the link waits and says for whom", func() bool { return strings.Contains(n.LinkWaits(), "pod default/pod-uid-1 is being stopped") })
	stops(stopsLong / 2)
	eventually(t, "the link may be made", func() bool { return n.LinkWaits() == "" })
	stops(time.Hour)
	eventually(t, "the link waits", func() bool { return n.LinkWaits() != "" })
	stops(2 * time.Hour) // told to go while the link waits
	eventually(t, "the link may be made", func() bool { return n.LinkWaits() == "" })
	stops(time.Hour)
	eventually(t, "the link waits", func() bool { return n.LinkWaits() != "" })
	p.Status.ContainerStatuses[0].State = corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{}}
	stops(time.Hour)
	eventually(t, "nothing of the pod runs any more", func() bool { return n.LinkWaits() == "" })
}
