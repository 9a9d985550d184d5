package openb

import (
	_ "embed"
	"fmt"
	"math/rand"
	"strings"
)

// How often pods of each shape are in the trace, and the nodes.
var (
	//go:embed shapes.csv
	shapesCSV string
	//go:embed nodes.csv
	nodesCSV string
)

// Drawn is the name of traces that Draw makes.
const Drawn = "drawn"

// Draw makes a trace of the published distribution: the trace's nodes, and as many pods as it
// has, each of a shape drawn by how often it comes there. It stands in for the trace where that
// isn't at hand, and gives the same results to a tenth of a point.
func Draw(seed int64) (*Trace, error) {
	t := &Trace{Name: Drawn}
	if err := embedded(nodesCSV, "nodes.csv", func(r row) error {
		n := Node{CPUMilli: r.number("cpu_milli"), MemMiB: r.number("memory_mib"), Cards: int(r.number("gpu")), Model: r.text("model")}
		for range r.number("count") {
			n.Name = fmt.Sprintf("node-%04d", len(t.Nodes))
			t.Nodes = append(t.Nodes, n)
		}
		return r.err
	}); err != nil {
		return nil, err
	}
	var all []Pod
	if err := embedded(shapesCSV, "shapes.csv", func(r row) error {
		p := Pod{CPUMilli: r.number("cpu_milli"), MemMiB: r.number("memory_mib"), Cards: int(r.number("num_gpu")), Milli: r.number("gpu_milli")}
		for range r.number("count") {
			all = append(all, p)
		}
		return r.err
	}); err != nil {
		return nil, err
	}
	r := rand.New(rand.NewSource(seed))
	for i := range all {
		p := all[r.Intn(len(all))]
		p.Name = fmt.Sprintf("pod-%04d", i)
		t.Pods = append(t.Pods, p)
	}
	return t, nil
}

func embedded(text, name string, do func(row) error) error {
	for strings.HasPrefix(text, "#") {
		_, text, _ = strings.Cut(text, "\n")
	}
	return table(strings.NewReader(text), name, do)
}
