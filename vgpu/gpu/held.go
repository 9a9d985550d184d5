package gpu

import "errors"

// ErrNotSupported is wrapped by errors about what this driver or card doesn't tell at
// all.
var ErrNotSupported = errors.New("not supported")

// Errors of what holds containers to their memory.
var (
	// ErrEnded is wrapped by errors about a container that has no process or cgroup
	// any more.
	ErrEnded = errors.New("the container has ended")
	// ErrInUse is wrapped by errors about a limit that isn't taken because more is in
	// use.
	ErrInUse = errors.New("more is in use")
)
