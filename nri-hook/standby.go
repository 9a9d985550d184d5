package nrihook

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/carve-gpu/carve/api"
)

const (
	// standbyIndex puts the hook that stands by behind the one that serves: it
	// sees what that one did.
	standbyIndex = "46"
	// standbyWait is how long a container waits for its node's agent to change.
	// The runtime gives a plugin two seconds.
	standbyWait = time.Second
)

// Standby is the hook of an agent that waits for another one of its node to
// end, as while a DaemonSet rolls. It serves no container, and lets none start
// past both of them: one that should have a card and that the other hook didn't
// adjust waits for TakeOver, and fails, to be tried again, if that takes longer.
// After TakeOver it serves like a Link, until the Link is there.
type Standby struct {
	link     *Link
	linked   chan struct{}
	once     sync.Once
	inCharge chan struct{}
	state    State // once inCharge is closed
}

// NewStandby makes a standby; c.State isn't used.
func NewStandby(c Config) *Standby {
	s := &Standby{linked: make(chan struct{}), inCharge: make(chan struct{})}
	s.link = NewLink(Config{Socket: c.Socket, State: standbyState{s}, Log: c.Log})
	s.link.index = standbyIndex
	return s
}

// Run keeps the standby linked until ctx ends.
func (s *Standby) Run(ctx context.Context) error { return s.link.Run(ctx) }

// Linked is closed once the runtime has taken the standby in.
func (s *Standby) Linked() <-chan struct{} { return s.linked }

// TakeOver has containers served from state from now on. It is called once.
func (s *Standby) TakeOver(state State) {
	s.state = state
	close(s.inCharge)
}

// standbyState answers for an agent that may not be there yet. What it isn't
// told of exits and starts comes with the Link's own list.
type standbyState struct{ *Standby }

// agent is the state in charge, nil while there is none.
func (s standbyState) agent() State {
	select {
	case <-s.inCharge:
		return s.state
	default:
		return nil
	}
}

func (s standbyState) Slice(c Container) (*Slice, error) {
	if c.Mark() != "" {
		return nil, nil // the other hook has done it
	}
	if state := s.agent(); state != nil {
		return state.Slice(c)
	}
	if !c.AskedForCards() && !c.granted() {
		return nil, nil
	}
	limit := time.NewTimer(standbyWait)
	defer limit.Stop()
	select {
	case <-s.inCharge:
		return s.state.Slice(c)
	case <-limit.C:
		return nil, fmt.Errorf("container %s is to have a card, and carve's agent of this node is being replaced", c.Name)
	}
}

func (s standbyState) Driver() Driver {
	if state := s.agent(); state != nil {
		return state.Driver()
	}
	return Driver{}
}

func (s standbyState) Adjusted(c Container, slice Slice) {
	if state := s.agent(); state != nil {
		state.Adjusted(c, slice)
	}
}

func (s standbyState) Ungranted(c Container) {
	if state := s.agent(); state != nil {
		state.Ungranted(c)
	}
}

func (s standbyState) Starting(Container) error { return nil }
func (s standbyState) Started(Container)        {}
func (s standbyState) Updated(Container)        {}
func (s standbyState) Exited(Container)         {}
func (s standbyState) Synchronize([]Container)  {}
func (s standbyState) LinkFault(string)         {}

func (s standbyState) SandboxStarted(string, string, string, map[string]string) {}

func (s standbyState) LinkChanged(up bool) {
	if up {
		s.once.Do(func() { close(s.linked) })
	}
}

// granted reports whether the annotations of the container's pod, as they were
// when its sandbox was made, name the container in a grant, whatever it is worth.
func (c Container) granted() bool {
	text := c.SandboxAnnotations[api.AnnotationGrant]
	if text == "" {
		return false
	}
	g, err := api.DecodeGrant(text)
	return err != nil || g.Containers[c.Name] != nil
}
