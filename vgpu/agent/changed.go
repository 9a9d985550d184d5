package agent

import "sync"

// changes lets any number of readers wait for the next change of what is
// reported. The zero value is ready.
type changes struct {
	mu   sync.Mutex
	next chan struct{}
}

// Changed is closed at the next change of what the report says. Ask for it
// before looking, so that no change is missed in between.
func (a *Agent) Changed() <-chan struct{} {
	a.reported.mu.Lock()
	defer a.reported.mu.Unlock()
	if a.reported.next == nil {
		a.reported.next = make(chan struct{})
	}
	return a.reported.next
}

// tell ends the wait of all readers.
func (c *changes) tell() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.next != nil {
		close(c.next)
		c.next = nil
	}
}
