package lab

import (
	"context"
	"maps"
	"sync"
)

// launches collects what several goroutines start while a lab comes up.
type launches struct {
	lab     *Lab
	mu      sync.Mutex
	started map[string]process
}

func newLaunches(l *Lab) *launches { return &launches{lab: l, started: map[string]process{}} }

// start starts a component and does not wait for it.
func (s *launches) start(name string) error {
	c, err := find(name)
	if err != nil {
		return err
	}
	p, err := s.lab.launch(c)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.started[name] = p
	return nil
}

// run starts a component and waits until it is ready.
func (s *launches) run(ctx context.Context, name string) error {
	if err := s.start(name); err != nil {
		return err
	}
	c, err := find(name)
	if err != nil {
		return err
	}
	s.mu.Lock()
	p := s.started[name]
	s.mu.Unlock()
	return s.lab.await(ctx, c, p)
}

func (s *launches) processes() map[string]process {
	s.mu.Lock()
	defer s.mu.Unlock()
	return maps.Clone(s.started)
}
