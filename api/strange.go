package api

import (
	"fmt"
	"slices"
	"strings"
)

// vendor is the prefix of the resources that carve and others hand out.
const vendor = "nvidia.com/"

// resourceSharedGPU is what NVIDIA's device plugin calls replicas with renameByDefault.
const resourceSharedGPU = "nvidia.com/gpu.shared"

// StrangeResources says, in a sentence each, which of the containers' limits look as if
// they were meant for carve and aren't read by it: a name that is almost one of ours,
// NVIDIA's name for replicas, memory of zero. Resources of other plugins are no matter
// of ours.
func StrangeResources(containers []ContainerSpec) []string {
	var out []string
	for _, c := range containers {
		var names []string
		for name := range c.Resources {
			names = append(names, name)
		}
		slices.Sort(names)
		for _, name := range names {
			switch {
			case name == resourceSharedGPU:
				out = append(out, field(c, name)+": carve gives replicas of a card as "+ResourceGPU+", and nothing under this name")
			case (name == ResourceMemory || name == ResourceMemoryPercent) && zero(c.Resources[name]) && zero(c.Resources[ResourceGPU]) && zero(c.Resources[ResourceCores]):
				out = append(out, field(c, name)+": "+c.Resources[name]+" asks for nothing, so the container gets no card")
			case strings.HasPrefix(name, vendor) && !ours(name):
				if meant := nearest(name); meant != "" {
					out = append(out, fmt.Sprintf("%s: carve hands out nothing of this name (did you mean %s?)", field(c, name), meant))
				}
			}
		}
	}
	return out
}

// zero reports whether a quantity is left out or nothing. One that can't be read is
// refused elsewhere.
func zero(quantity string) bool {
	q, err := parseQuantity(quantity)
	return quantity == "" || err == nil && q.value == 0
}

// nearest is the resource of ours that a name differs from by two characters at most.
func nearest(name string) string {
	best, least := "", 3
	for _, known := range []string{ResourceCores, ResourceGPU, ResourceMemory, ResourceMemoryPercent, ResourcePriority} {
		if d := changes(strings.ToLower(name), known); d < least {
			best, least = known, d
		}
	}
	return best
}

// changes is how many characters have to be put in, taken out or replaced to make one
// word the other.
func changes(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		before := row[0]
		row[0] = i + 1
		for j := range len(b) {
			same := before
			if a[i] != b[j] {
				same++
			}
			before = row[j+1]
			row[j+1] = min(same, row[j]+1, before+1)
		}
	}
	return row[len(b)]
}
