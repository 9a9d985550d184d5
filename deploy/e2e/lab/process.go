package lab

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// process is a process of the lab by its number outside of it. The start time
// tells it from a later process with the same number.
type process struct {
	PID int `json:"pid"`
	// StartTicks is field 22 of /proc/PID/stat: clock ticks since boot.
	StartTicks uint64 `json:"startTicks"`
}

func identify(pid int) (process, error) {
	ticks, _, err := stat(pid)
	if err != nil {
		return process{}, fmt.Errorf("identify process %d: %w", pid, err)
	}
	return process{PID: pid, StartTicks: ticks}, nil
}

func stat(pid int) (startTicks uint64, state byte, err error) {
	data, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return 0, 0, err
	}
	// The command, field 2, is in parentheses and may itself contain any byte.
	end := strings.LastIndexByte(string(data), ')')
	fields := strings.Fields(string(data[end+1:]))
	if end < 0 || len(fields) < 20 {
		return 0, 0, fmt.Errorf("unexpected form %q", data)
	}
	startTicks, err = strconv.ParseUint(fields[19], 10, 64)
	return startTicks, fields[0][0], err
}

// open returns a pidfd of the process, or false when it has ended (a zombie
// that nobody has reaped yet counts as ended).
func (p process) open() (pidfd int, alive bool, err error) {
	if p.PID == 0 {
		return -1, false, nil
	}
	fd, err := unix.PidfdOpen(p.PID, 0)
	if errors.Is(err, unix.ESRCH) {
		return -1, false, nil
	} else if err != nil {
		return -1, false, fmt.Errorf("open process %d: %w", p.PID, err)
	}
	// Looked at only now: what the fd stands for can't be replaced any more.
	ticks, state, err := stat(p.PID)
	if err != nil || ticks != p.StartTicks || state == 'Z' || state == 'X' {
		unix.Close(fd)
		return -1, false, nil
	}
	return fd, true, nil
}

func (p process) alive() bool {
	fd, alive, err := p.open()
	if alive {
		unix.Close(fd)
	}
	return alive && err == nil
}

// end sends the signal and waits until the process is gone. It is no error when
// it was gone before.
func (p process) end(ctx context.Context, signal unix.Signal) error {
	fd, alive, err := p.open()
	if err != nil || !alive {
		return err
	}
	defer unix.Close(fd)
	if err := unix.PidfdSendSignal(fd, signal, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("send %s to process %d: %w", unix.SignalName(signal), p.PID, err)
	}
	for {
		// A pidfd is readable once its process has ended.
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 50)
		if n > 0 {
			return nil
		}
		if err != nil && !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("wait for process %d: %w", p.PID, err)
		}
		if ctx.Err() != nil {
			return fmt.Errorf("process %d still runs after %s: %w", p.PID, unix.SignalName(signal), context.Cause(ctx))
		}
	}
}

// within is context.WithTimeout with a cause that says how long was waited.
func within(ctx context.Context, d time.Duration) (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(ctx, d, fmt.Errorf("not within %s", d))
}
