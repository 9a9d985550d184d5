package loop

import (
	"context"
	"time"

	"golang.org/x/sys/unix"
)

// Monotonic is the machine's CLOCK_MONOTONIC, by which the library reckons too.
type Monotonic struct{}

// Now is in nanoseconds.
func (Monotonic) Now() int64 {
	var t unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &t) // it can't fail
	return t.Nano()
}

// Sleep returns at the given time, or sooner when ctx ends.
func (m Monotonic) Sleep(ctx context.Context, until int64) {
	timer := time.NewTimer(time.Duration(until - m.Now()))
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
}
