package region

import (
	"bytes"
	"errors"
	"fmt"
	"hash/fnv"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Process is a process as the node sees it, with the names by which it knows itself.
type Process struct {
	// HostPID is the pid in the namespace of the proc file system that was read.
	HostPID int
	// PID is the pid in the process' own, innermost PID namespace.
	PID uint32
	// StartTicks is field 22 of its stat file.
	StartTicks uint64
	// PIDNamespace is the inode of its PID namespace; 0 where the link couldn't be read.
	PIDNamespace uint64
	// Program changes, but by an unlucky chance, when the process runs another program by exec. It is made of the
	// places of its code, data, stack and arguments, so it may stay the same where these aren't random.
	Program uint64
	// Ended says that it has no thread left and waits for its parent to be told. A process whose first thread alone
	// has ended hasn't.
	Ended bool
}

// ReadProcess reads one process from a proc file system, "/proc" as a rule. A process that is gone, or that
// goes while it is read, gives an error that is os.ErrNotExist; one that has ended and is still there is read as any
// other, but has no PIDNamespace.
func ReadProcess(procRoot string, hostPID int) (Process, error) {
	dir := filepath.Join(procRoot, strconv.Itoa(hostPID))
	p := Process{HostPID: hostPID}
	status, err := os.ReadFile(filepath.Join(dir, "status"))
	if err == nil {
		p.PID, err = innermostPID(status)
	}
	if err != nil {
		return p, fmt.Errorf("read process %d: %w", hostPID, goneIs(err))
	}
	stat, err := os.ReadFile(filepath.Join(dir, "stat"))
	if err == nil {
		err = p.readStat(stat)
	}
	if err != nil {
		return p, fmt.Errorf("read process %d: %w", hostPID, goneIs(err))
	}
	if link, err := os.Readlink(filepath.Join(dir, "ns", "pid")); err == nil {
		p.PIDNamespace = namespaceInode(link)
	}
	return p, nil
}

// Owns says whether p is the process that took the slot. What the slot or p doesn't know is not compared,
// except the pid.
func (p Process) Owns(s Slot) bool {
	return p.PID == s.PID &&
		(s.StartTicks == 0 || p.StartTicks == s.StartTicks) &&
		(s.PIDNamespace == 0 || p.PIDNamespace == 0 || p.PIDNamespace == s.PIDNamespace)
}

// innermostPID takes the last number of the NSpid line (Linux 4.1).
func innermostPID(status []byte) (uint32, error) {
	for line := range bytes.Lines(status) {
		rest, ok := bytes.CutPrefix(line, []byte("NSpid:"))
		if !ok {
			continue
		}
		fields := bytes.Fields(rest)
		if len(fields) == 0 {
			break
		}
		pid, err := strconv.ParseUint(string(fields[len(fields)-1]), 10, 32)
		return uint32(pid), err
	}
	return 0, errors.New("no NSpid in status")
}

// readStat takes from a stat file its fields 3, 20 and 22, and those that say where the program's parts are. Field 2 is
// the program's name in parentheses and may hold anything, parentheses and spaces included, so fields are counted from
// the last parenthesis.
func (p *Process) readStat(stat []byte) error {
	end := bytes.LastIndexByte(stat, ')')
	if end < 0 {
		return errors.New("no program name in stat")
	}
	fields := bytes.Fields(stat[end+1:])
	const first = 3 // the number of the first behind the name
	if len(fields) <= 22-first {
		return fmt.Errorf("%d fields in stat", len(fields)+first-1)
	}
	h := fnv.New64a()
	for _, part := range [][2]int{{26, 28}, {45, 51}} { // code and stack; data, brk, arguments, environment
		for n := part[0] - first; n <= part[1]-first && n < len(fields); n++ {
			h.Write(fields[n])
			h.Write([]byte{' '})
		}
	}
	p.Program = h.Sum64()
	// The state is the first thread's, which may end before the others. Their number is taken at one moment, and after
	// the state; a listing of the task folder stops short where a thread ends during it.
	threads, err := strconv.Atoi(string(fields[20-first]))
	if err != nil {
		return fmt.Errorf("number of threads in stat: %w", err)
	}
	state := fields[0][0]
	p.Ended = state == 'X' || state == 'Z' && threads <= 1
	p.StartTicks, err = strconv.ParseUint(string(fields[22-first]), 10, 64)
	return err
}

// namespaceInode reads "pid:[4026531836]".
func namespaceInode(link string) uint64 {
	digits := strings.TrimSuffix(strings.TrimPrefix(link, "pid:["), "]")
	n, err := strconv.ParseUint(digits, 10, 64)
	if err != nil {
		return 0
	}
	return n
}

// goneIs makes the error of a process that died between open and read one that is os.ErrNotExist.
func goneIs(err error) error {
	if errors.Is(err, unix.ESRCH) {
		return errors.Join(os.ErrNotExist, err)
	}
	return err
}
