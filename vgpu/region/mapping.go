package region

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ErrNoMemory is wrapped by the errors of Mapping.In and ReadImage where a process has no memory to look at: it
// is ending, or one of the kernel's.
var ErrNoMemory = errors.New("no memory of its own")

// Mapping is a file as the kernel names it among the mappings of processes. That may be by another device and
// inode than stat tells (overlay and btrfs have such).
type Mapping struct{ device, inode string }

// MappingOf finds out how the file at path is named. It maps the file for a moment and never touches its pages.
func MappingOf(path string) (Mapping, error) {
	f, err := openRegular(path, unix.O_RDONLY, 0)
	if err != nil {
		return Mapping{}, fmt.Errorf("mapping: %w", err)
	}
	defer f.Close()
	page, err := unix.Mmap(int(f.Fd()), 0, os.Getpagesize(), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return Mapping{}, fmt.Errorf("mapping of %s: %w", path, err)
	}
	defer unix.Munmap(page)
	at := uint64(uintptr(unsafe.Pointer(unsafe.SliceData(page))))
	var m Mapping
	_, err = eachMapping("/proc/self/maps", func(from, to uint64, device, inode []byte) bool {
		if at < from || at >= to {
			return false
		}
		m = Mapping{string(device), string(inode)}
		return true
	})
	if err == nil && m.inode == "" {
		err = errors.New("not among the own ones")
	}
	if err != nil {
		return Mapping{}, fmt.Errorf("mapping of %s: %w", path, err)
	}
	return m, nil
}

// In says whether a process has the file mapped. It reads what the kernel lets nobody read while the process
// changes its mappings, so it can take as long as the process, or a driver that works for it, holds that up. A
// process that ends or runs another program meanwhile may look as one without the file: see ReadProcess.
func (m Mapping) In(procRoot string, hostPID int) (bool, error) {
	dir := filepath.Join(procRoot, strconv.Itoa(hostPID))
	has := func(path string) (found bool, lines int, err error) {
		lines, err = eachMapping(path, func(_, _ uint64, device, inode []byte) bool {
			found = string(device) == m.device && string(inode) == m.inode
			return found
		})
		return found, lines, err
	}
	found, lines, err := has(filepath.Join(dir, "maps"))
	if err == nil && lines == 0 {
		// Its first thread has left. The others have the memory still.
		var tasks []os.DirEntry
		tasks, err = os.ReadDir(filepath.Join(dir, "task"))
		for _, task := range tasks {
			var one error
			if found, lines, one = has(filepath.Join(dir, "task", task.Name(), "maps")); one == nil && lines > 0 {
				break
			}
		}
		if err == nil && lines == 0 {
			err = ErrNoMemory
		}
	}
	if err != nil {
		return false, fmt.Errorf("mappings of process %d: %w", hostPID, goneIs(err))
	}
	return found, nil
}

// eachMapping goes through a maps file until visit says that it is enough, and counts the lines.
func eachMapping(path string, visit func(from, to uint64, device, inode []byte) bool) (lines int, err error) {
	f, err := os.Open(path)
	if err != nil {
		return 0, err
	}
	defer f.Close()
	r := bufio.NewReaderSize(f, 64<<10)
	for {
		// What counts stands before the file's name, which may be longer than the buffer.
		line, err := r.ReadSlice('\n')
		if errors.Is(err, bufio.ErrBufferFull) {
			line = bytes.Clone(line[:256])
		}
		for errors.Is(err, bufio.ErrBufferFull) {
			_, err = r.ReadSlice('\n')
		}
		if errors.Is(err, io.EOF) {
			return lines, nil
		}
		if err != nil {
			return lines, err
		}
		lines++
		fields := bytes.Fields(line) // from-to, rights, offset, device, inode, name
		if len(fields) < 5 {
			return lines, fmt.Errorf("%d fields in a line of maps", len(fields))
		}
		low, high, _ := bytes.Cut(fields[0], []byte("-"))
		from, err1 := strconv.ParseUint(string(low), 16, 64)
		to, err2 := strconv.ParseUint(string(high), 16, 64)
		if err := errors.Join(err1, err2); err != nil {
			return lines, err
		}
		if visit(from, to, fields[3], fields[4]) {
			return lines, nil
		}
	}
}

// ReadImage gives Slot.Image as the program has it that a process runs now. Like Mapping.In it may take as long
// as the process makes it.
func ReadImage(procRoot string, hostPID int) (uint64, error) {
	dir := filepath.Join(procRoot, strconv.Itoa(hostPID))
	vector, err := os.ReadFile(filepath.Join(dir, "auxv"))
	if err != nil {
		return 0, fmt.Errorf("image of process %d: %w", hostPID, goneIs(err))
	}
	const random = 25 // AT_RANDOM
	for ; len(vector) >= 16; vector = vector[16:] {
		if binary.NativeEndian.Uint64(vector) != random {
			continue
		}
		memory, err := os.Open(filepath.Join(dir, "mem"))
		if err != nil {
			return 0, fmt.Errorf("image of process %d: %w", hostPID, goneIs(err))
		}
		defer memory.Close()
		var bytes [16]byte
		if _, err := memory.ReadAt(bytes[:], int64(binary.NativeEndian.Uint64(vector[8:]))); err != nil {
			return 0, fmt.Errorf("image of process %d: %w", hostPID, goneIs(err))
		}
		a, b := binary.NativeEndian.Uint64(bytes[:8]), binary.NativeEndian.Uint64(bytes[8:])
		return mix(mix(a)^b)>>32 | 1<<31, nil
	}
	return 0, fmt.Errorf("image of process %d: %w", hostPID, ErrNoMemory)
}

// mix is as in vgpu/lib/src/sys.c.
func mix(x uint64) uint64 {
	x = (x ^ x>>32) * 0xd6e8feb86659fd93
	x = (x ^ x>>32) * 0xd6e8feb86659fd93
	return x ^ x>>32
}
