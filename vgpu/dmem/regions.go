package dmem

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/carve-gpu/carve/vgpu/gpu"
)

// region is a part of a device's memory as the kernel names it, for example
// "drm/0000:03:00.0/vram0".
type region struct {
	name  string
	bytes uint64
}

// noLimit is "max".
const noLimit = math.MaxUint64

// amount writes a number as the kernel does.
func amount(bytes uint64) string {
	if bytes == noLimit {
		return "max"
	}
	return strconv.FormatUint(bytes, 10)
}

// match finds a card's region. A driver may register several regions of a card
// (its memory, what it took of the host's); the memory is the one of that size.
func match(all []region, card gpu.Card) (string, error) {
	var named, sized []string
	for _, r := range all {
		if !of(r.name, card) {
			continue
		}
		named = append(named, r.name)
		// The driver's own part may be in the one figure and not in the other.
		if r.bytes >= card.MemoryBytes/2 && r.bytes <= card.MemoryBytes+card.MemoryBytes/16 {
			sized = append(sized, r.name)
		}
	}
	switch {
	case len(named) == 0:
		return "", errors.New("the kernel's dmem controller has no region of the card: the driver doesn't register it, or names it in a way that isn't known")
	case len(sized) == 0:
		return "", fmt.Errorf("no region of the card is as large as it is: %s", strings.Join(named, ", "))
	case len(sized) > 1:
		return "", fmt.Errorf("several regions could be the card's memory: %s", strings.Join(sized, ", "))
	}
	return sized[0], nil
}

// of reports whether a region's name has the address or the UUID of a card as one
// of its parts.
func of(name string, card gpu.Card) bool {
	for _, part := range strings.Split(name, "/") {
		if part == "" {
			continue
		}
		if strings.EqualFold(part, card.UUID) || sameAddress(part, card.PCIBusID) {
			return true
		}
	}
	return false
}

// sameAddress compares two PCI addresses. The driver writes the domain with eight
// digits, the kernel with four or more.
func sameAddress(a, b string) bool {
	x, okX := address(a)
	y, okY := address(b)
	return okX && okY && x == y
}

// address reads "0000:07:00.0".
func address(text string) (out [4]uint64, ok bool) {
	rest, function, ok := strings.Cut(text, ".")
	parts := append(strings.Split(rest, ":"), function)
	if !ok || len(parts) != len(out) {
		return out, false
	}
	for i, p := range parts {
		n, err := strconv.ParseUint(p, 16, 32)
		if err != nil {
			return out, false
		}
		out[i] = n
	}
	return out, true
}

// readAmounts reads a file with a region and a number, or "max", in each line.
func readAmounts(path string) (map[string]uint64, error) {
	b, err := read(path)
	if err != nil {
		return nil, err
	}
	return parseAmounts(b)
}

func parseAmounts(b []byte) (map[string]uint64, error) {
	out := map[string]uint64{}
	for line := range bytes.Lines(b) {
		f := strings.Fields(string(line))
		if len(f) == 0 {
			continue
		}
		if len(f) != 2 {
			return nil, fmt.Errorf("%q is not a region and a number", strings.TrimSpace(string(line)))
		}
		if f[1] == "max" {
			out[f[0]] = noLimit
			continue
		}
		n, err := strconv.ParseUint(f[1], 10, 64)
		if err != nil {
			return nil, fmt.Errorf("%q is not a region and a number", strings.TrimSpace(string(line)))
		}
		out[f[0]] = n
	}
	return out, nil
}

// read reads a small file.
func read(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, mostBytes))
	if err != nil {
		return nil, err
	}
	return b, nil
}

func sorted(m map[string]uint64) []string { return slices.Sorted(maps.Keys(m)) }
