// Package openb reads the GPU-sharing trace of Alibaba that the FGD paper (Weng et al.,
// "Beware of Fragmentation", USENIX ATC'23) is measured on, and makes arrivals of it as
// that experiment does. The trace isn't part of this repository; without it Draw makes
// arrivals of the same distribution.
//
// Start reading at Load and Arrivals.
package openb

import (
	"cmp"
	"compress/gzip"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
)

// Card is one whole card in the unit that the trace uses.
const Card = 1000

// Node is a node with cards of one model.
type Node struct {
	Name     string
	CPUMilli int64
	MemMiB   int64
	Cards    int
	Model    string
}

// Pod is a pod of the trace: some whole cards (Milli is 1000), a part of one card, or none.
type Pod struct {
	Name     string
	CPUMilli int64
	MemMiB   int64
	Cards    int
	Milli    int64  // of each card
	Models   string // allowed ones, joined by "|"; empty allows all
}

// Total is what the pod asks of all its cards.
func (p *Pod) Total() int64 { return int64(p.Cards) * p.Milli }

// Trace is a cluster and the pods of one workload.
type Trace struct {
	Name  string
	Nodes []Node
	Pods  []Pod
}

// Capacity is that of all cards.
func (t *Trace) Capacity() int64 {
	var total int64
	for i := range t.Nodes {
		total += int64(t.Nodes[i].Cards) * Card
	}
	return total
}

// Load reads the nodes and the pods of a workload ("default", "gpushare60", …) from a folder
// with the trace's files, packed by gzip or not. Both are sorted by name.
func Load(dir, workload string) (*Trace, error) {
	t := &Trace{Name: workload}
	if err := read(dir, "openb_node_list_gpu_node.csv", func(r row) error {
		n := Node{Name: r.text("sn"), CPUMilli: r.number("cpu_milli"), MemMiB: r.number("memory_mib"), Cards: int(r.number("gpu")), Model: r.text("model")}
		t.Nodes = append(t.Nodes, n)
		return r.err
	}); err != nil {
		return nil, err
	}
	if err := read(dir, "openb_pod_list_"+workload+".csv", func(r row) error {
		p := Pod{Name: r.text("name"), CPUMilli: r.number("cpu_milli"), MemMiB: r.number("memory_mib"),
			Cards: int(r.number("num_gpu")), Milli: r.number("gpu_milli"), Models: r.optional("gpu_spec")}
		if r.err == nil && (p.Cards < 0 || p.Milli < 0 || p.Milli > Card || p.Cards > 1 && p.Milli != Card) {
			return fmt.Errorf("%d cards of %d thousandths each", p.Cards, p.Milli)
		}
		t.Pods = append(t.Pods, p)
		return r.err
	}); err != nil {
		return nil, err
	}
	slices.SortStableFunc(t.Nodes, func(a, b Node) int { return cmp.Compare(a.Name, b.Name) })
	slices.SortStableFunc(t.Pods, func(a, b Pod) int { return cmp.Compare(a.Name, b.Name) })
	if t.Capacity() == 0 || len(t.Pods) == 0 {
		return nil, fmt.Errorf("%s: no cards or no pods", dir)
	}
	return t, nil
}

// row is a line of a CSV file by the names of its columns. It keeps the first error.
type row struct {
	columns map[string]int
	fields  []string
	err     error
}

func (r *row) optional(column string) string {
	if at, ok := r.columns[column]; ok && at < len(r.fields) {
		return r.fields[at]
	}
	return ""
}

func (r *row) text(column string) string {
	if _, ok := r.columns[column]; !ok {
		r.err = cmp.Or(r.err, fmt.Errorf("no column %s", column))
	}
	return r.optional(column)
}

func (r *row) number(column string) int64 {
	n, err := strconv.ParseInt(r.text(column), 10, 64)
	if err != nil {
		r.err = cmp.Or(r.err, fmt.Errorf("column %s: %w", column, err))
	}
	return n
}

// read gives each line of the file, or of the same packed by gzip, to do.
func read(dir, name string, do func(row) error) error {
	f, err := os.Open(filepath.Join(dir, name))
	packed := errors.Is(err, fs.ErrNotExist)
	if packed {
		f, err = os.Open(filepath.Join(dir, name+".gz"))
	}
	if err != nil {
		return fmt.Errorf("read trace: %w", err)
	}
	defer f.Close()
	var in io.Reader = f
	if packed {
		if in, err = gzip.NewReader(f); err != nil {
			return fmt.Errorf("read %s: %w", f.Name(), err)
		}
	}
	return table(in, f.Name(), do)
}

func table(in io.Reader, name string, do func(row) error) error {
	lines := csv.NewReader(in)
	head, err := lines.Read()
	if err != nil {
		return fmt.Errorf("read %s: %w", name, err)
	}
	columns := make(map[string]int, len(head))
	for i, c := range head {
		columns[c] = i
	}
	for {
		fields, err := lines.Read()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err == nil {
			err = do(row{columns: columns, fields: fields})
		}
		if err != nil {
			line, _ := lines.FieldPos(0)
			return fmt.Errorf("read %s, line %d: %w", name, line, err)
		}
	}
}
