package agent

import (
	"strings"
	"testing"
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
