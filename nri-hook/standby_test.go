package nrihook

import (
	"context"
	"log/slog"
	"strings"
	"testing"
	"time"

	nri "github.com/containerd/nri/pkg/api"

	"github.com/carve-gpu/carve/api"
)

func startStandby(t *testing.T, socket string) *Standby {
	t.Helper()
	s := NewStandby(Config{Socket: socket, Log: slog.New(slog.DiscardHandler)})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-done })
	select {
	case <-s.Linked():
	case <-time.After(20 * time.Second):
		t.Fatal("the standby isn't linked")
	}
	return s
}

func plainContainer(id string) *nri.Container {
	c := nriContainer(id)
	c.Annotations = nil
	return c
}

// Both hooks are there: the first adjusts, the second sees its mark. Either one
// adjusting again would be refused by the runtime as a conflict.
func TestTheStandbyLeavesContainersToTheHookThatServes(t *testing.T) {
	socket := socketPath(t)
	r := startRuntime(t, socket, nil, nil)
	n := newNodeState()
	n.slice = testShare()
	startLink(t, socket, n)
	n.waitLink(t, true)
	startStandby(t, socket)
	r.settled()
	response, err := create(r, nriContainer("c1"))
	if err != nil {
		t.Fatal(err)
	}
	if got := len(response.Adjust.GetLinux().GetDevices()); got != 3 {
		t.Errorf("%d devices, want 3", got)
	}
	n.mu.Lock()
	n.slice = nil
	n.mu.Unlock()
	if _, err := create(r, plainContainer("c2")); err != nil {
		t.Errorf("a container that asks for nothing: %v", err)
	}
}

func TestNothingStartsPastBothHooks(t *testing.T) {
	socket := socketPath(t)
	r := startRuntime(t, socket, nil, nil)
	standby := startStandby(t, socket) // the other hook is gone already
	r.settled()
	if _, err := create(r, nriContainer("asked")); err == nil || !strings.Contains(err.Error(), "is being replaced") {
		t.Errorf("one that met the device plugin: %v", err)
	}
	text, err := api.Grant{Version: 1, UID: "uid-1", Node: "n1", Generation: 1,
		Containers: map[string][]api.CardGrant{"app": {{Card: "GPU-1", MemMiB: 1, Mode: api.ModeVGPU}}}}.Encode()
	if err != nil {
		t.Fatal(err)
	}
	pod := nriPod()
	pod.Annotations = map[string]string{api.AnnotationGrant: text}
	createIn := func(c *nri.Container) error {
		defer r.BlockPluginSync().Unblock()
		_, err := r.CreateContainer(context.Background(), &nri.CreateContainerRequest{Pod: pod, Container: c})
		return err
	}
	if err := createIn(plainContainer("granted")); err == nil || !strings.Contains(err.Error(), "is being replaced") {
		t.Errorf("one with a share alone: %v", err)
	}
	other := plainContainer("neighbour")
	other.Name = "sidecar"
	if err := createIn(other); err != nil {
		t.Errorf("its neighbour without a card: %v", err)
	}
	if _, err := create(r, plainContainer("plain")); err != nil {
		t.Errorf("one of another pod: %v", err)
	}

	// One that comes a moment before the agent is in charge waits for it.
	n := newNodeState()
	n.slice = testShare()
	waited := make(chan error, 1)
	go func() {
		response, err := create(r, nriContainer("c1"))
		if err == nil && len(response.Adjust.GetLinux().GetDevices()) != 3 {
			t.Errorf("adjusted with %v", response.Adjust)
		}
		waited <- err
	}()
	time.Sleep(50 * time.Millisecond) // less than the standby waits
	standby.TakeOver(n)
	if err := <-waited; err != nil {
		t.Errorf("it isn't served: %v", err)
	}
	if got := n.said(); got != "adjusted c1 uid-1/app@2" {
		t.Errorf("the agent heard %q", got)
	}
	// The hook's own link comes beside it, and both serve without a conflict.
	startLink(t, socket, n)
	n.waitLink(t, true)
	r.settled()
	if _, err := create(r, nriContainer("c2")); err != nil {
		t.Error(err)
	}
}
