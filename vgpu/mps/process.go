package mps

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// procDir is where processes are listed, all of the node's.
const procDir = "/proc"

// ownName begins the names of MPS's programs, as /proc has them: 15 bytes at most.
const ownName = "nvidia-cuda-mps"

// cardMark names the card in the environment of its daemon, which the servers inherit.
// By it processes are found of which no file tells.
const cardMark = "CARVE_MPS_CARD"

// ProcessOf is the process that has a pid now; an error wraps os.ErrNotExist where none
// has, or one that is dead and not yet waited for.
func ProcessOf(pid int) (Process, error) {
	p, _, err := processOf(pid)
	return p, err
}

// processOf is that, with the pid of its parent.
func processOf(pid int) (p Process, parent int, err error) {
	b, err := os.ReadFile(fmt.Sprintf("%s/%d/stat", procDir, pid))
	if err != nil {
		return Process{}, 0, err
	}
	// The name stands in brackets and may have any byte in it.
	at := bytes.LastIndexByte(b, ')')
	fields := strings.Fields(string(b[at+1:]))
	const state, ppid, number, start = 0, 1, 17, 19 // fields 3, 4, 20 and 22 of the line
	if at < 0 || len(fields) <= start {
		return Process{}, 0, fmt.Errorf("read %s/%d/stat: %q", procDir, pid, b)
	}
	// The first thread may end before the others, which are the process then. A listing of
	// the task folder stops short where a thread ends during it; this number doesn't.
	left, err := strconv.Atoi(fields[number])
	if err != nil {
		return Process{}, 0, fmt.Errorf("read %s/%d/stat: %w", procDir, pid, err)
	}
	if fields[state] == "X" || fields[state] == "Z" && left <= 1 {
		return Process{}, 0, fmt.Errorf("process %d has ended: %w", pid, os.ErrNotExist)
	}
	n, err := strconv.ParseUint(fields[start], 10, 64)
	if err == nil {
		parent, err = strconv.Atoi(fields[ppid])
	}
	if err != nil {
		return Process{}, 0, fmt.Errorf("read %s/%d/stat: %w", procDir, pid, err)
	}
	return Process{pid, n}, parent, nil
}

// threads lists a process's threads.
func threads(pid int) ([]os.DirEntry, error) {
	return os.ReadDir(fmt.Sprintf("%s/%d/task", procDir, pid))
}

// Lives reports whether it hasn't ended. One that can't be looked at is taken to live:
// what follows from its end can't be undone.
func (p Process) Lives() bool {
	now, err := ProcessOf(p.PID)
	if err != nil {
		return !errors.Is(err, os.ErrNotExist) && !errors.Is(err, unix.ESRCH)
	}
	return now == p
}

// isChildOf reports whether another process started it and lives.
func (p Process) isChildOf(other Process) bool {
	now, parent, err := processOf(p.PID)
	return err == nil && now == p && parent == other.PID && other.Lives()
}

// isOurs reports whether a process is one of MPS's programs.
func (p Process) isOurs() bool {
	name, err := os.ReadFile(fmt.Sprintf("%s/%d/comm", procDir, p.PID))
	return err == nil && strings.HasPrefix(string(name), ownName) && p.Lives()
}

// kill ends a process for sure, and nobody else that has its pid by now.
func (p Process) kill() error {
	fd, err := unix.PidfdOpen(p.PID, 0)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("end process %d: %w", p.PID, err)
	}
	defer unix.Close(fd)
	if !p.Lives() { // asked after the descriptor is there: it is of this process or none
		return nil
	}
	if err := unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("end process %d: %w", p.PID, err)
	}
	return nil
}

// hasMark reports whether a process has the mark of a card's daemon.
func (p Process) hasMark(uuid string) bool {
	want := []byte(cardMark + "=" + uuid)
	// Of a first thread that ended nothing is to be read.
	all, err := threads(p.PID)
	if err != nil {
		return false
	}
	for _, t := range all {
		env, err := os.ReadFile(fmt.Sprintf("%s/%d/task/%s/environ", procDir, p.PID, t.Name()))
		if err != nil || len(env) == 0 {
			continue
		}
		for v := range bytes.SplitSeq(env, []byte{0}) {
			if bytes.Equal(v, want) {
				return p.Lives()
			}
		}
		return false
	}
	return false
}

// marked finds the processes of a card's daemon, the servers among them.
func marked(uuid string) []Process {
	entries, err := os.ReadDir(procDir)
	if err != nil {
		return nil
	}
	var out []Process
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		if p, err := ProcessOf(pid); err == nil && p.isOurs() && p.hasMark(uuid) {
			out = append(out, p)
		}
	}
	return out
}

// gone waits until none of the processes lives, and returns those that still do when
// ctx ends.
func gone(ctx context.Context, all []Process) []Process {
	for {
		var left []Process
		for _, p := range all {
			if p.Lives() {
				left = append(left, p)
			}
		}
		if len(left) == 0 || !pause(ctx, 10*time.Millisecond) {
			return left
		}
	}
}

func pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}
