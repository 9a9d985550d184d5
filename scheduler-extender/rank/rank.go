// Package rank finds the cheapest node for a kind of pod, again and again, while nodes
// change. For each kind it keeps what every node costs, in a tournament tree; a decision asks
// anew only those nodes that changed since that kind was last asked for. It is pure, and
// serves one goroutine at a time.
package rank

import "math"

// None is the cost of a node that doesn't take the pod.
const None int64 = math.MaxInt64

// maxClasses bounds the memory: a kind takes 16 bytes a node.
const maxClasses = 256

// Index ranks nodes 0 to n-1. Of nodes that cost the same the lowest number is first.
type Index struct {
	n, size int // nodes, leaves of a tree

	log   []int32 // nodes that changed, oldest first
	gone  int     // how many were cut off the log's beginning
	round int     // grows whenever all costs are out of date

	states []uint64         // by node, 0 where nobody said
	memo   map[uint64]int64 // by state, while a class is filled

	classes map[string]*class
	clock   int
	mark    []int // by node, for taking each once
	marks   int

	// Judged counts how often a cost was asked for.
	Judged int64
}

type class struct {
	tree  []int64 // tree[1] is the root; leaves from tree[size]
	seen  int     // up to where the log is taken in
	round int
	used  int
}

// New makes an index of n nodes.
func New(n int) *Index {
	size := 1
	for size < n {
		size *= 2
	}
	return &Index{n: n, size: size, round: 1, classes: map[string]*class{}, mark: make([]int, n),
		states: make([]uint64, n), memo: map[uint64]int64{}}
}

// Touch says that a node changed. Nodes of the same state, unless it is 0, cost the same for
// every kind of pod: an empty cluster is asked about one node of each sort.
func (x *Index) Touch(node int, state uint64) {
	x.states[node] = state
	// A class that has to take in more than all nodes asks all of them instead.
	if len(x.log) >= 4*x.n+1024 {
		cut := len(x.log) - x.n
		x.log = append(x.log[:0], x.log[cut:]...)
		x.gone += cut
	}
	x.log = append(x.log, int32(node))
}

// Reset says that every cost is out of date, whatever the kind.
func (x *Index) Reset() { x.round++ }

// Best is the cheapest node for the kind of pod that key stands for, and its cost. cost says
// what a node costs, None where it can't take the pod.
func (x *Index) Best(key string, cost func(node int) int64) (int, int64) {
	c := x.class(key, cost)
	least := c.tree[1]
	if least == None {
		return -1, None
	}
	at := 1
	for at < x.size {
		if at *= 2; c.tree[at] != least {
			at++
		}
	}
	return at - x.size, least
}

// Any is one of the nodes that cost as little as the best, by the bits of choice: the same
// choice takes the same of the same nodes. Not all are taken as often as others.
func (x *Index) Any(key string, cost func(node int) int64, choice uint64) (int, int64) {
	c := x.class(key, cost)
	least := c.tree[1]
	if least == None {
		return -1, None
	}
	at := 1
	for ; at < x.size; choice >>= 1 {
		left, right := 2*at, 2*at+1
		switch {
		case c.tree[right] != least:
			at = left
		case c.tree[left] != least:
			at = right
		default:
			at = left + int(choice&1)
		}
	}
	return at - x.size, least
}

// Ties are all nodes that cost as little as the best, in ascending order, appended to out.
func (x *Index) Ties(key string, cost func(node int) int64, out []int) []int {
	c := x.class(key, cost)
	if c.tree[1] == None {
		return out
	}
	return x.equal(c, 1, out)
}

func (x *Index) equal(c *class, at int, out []int) []int {
	if c.tree[at] != c.tree[1] {
		return out
	}
	if at >= x.size {
		return append(out, at-x.size)
	}
	return x.equal(c, 2*at+1, x.equal(c, 2*at, out))
}

// class is the kind's tree, up to date.
func (x *Index) class(key string, cost func(node int) int64) *class {
	c := x.classes[key]
	if c == nil {
		x.evict()
		c = &class{tree: make([]int64, 2*x.size)}
		for i := range c.tree {
			c.tree[i] = None
		}
		x.classes[key] = c
	}
	x.clock++
	c.used = x.clock
	end := x.gone + len(x.log)
	if c.round != x.round || c.seen < x.gone || end-c.seen > x.n {
		x.fill(c, cost)
	} else {
		x.marks++
		for _, node := range x.log[c.seen-x.gone:] {
			if x.mark[node] != x.marks {
				x.mark[node] = x.marks
				x.set(c, int(node), cost(int(node)))
			}
		}
	}
	c.seen, c.round = end, x.round
	return c
}

func (x *Index) fill(c *class, cost func(node int) int64) {
	clear(x.memo)
	for i := range x.n {
		is, known := x.memo[x.states[i]]
		if !known || x.states[i] == 0 {
			is = cost(i)
			x.memo[x.states[i]] = is
			x.Judged++
		}
		c.tree[x.size+i] = is
	}
	for at := x.size - 1; at > 0; at-- {
		c.tree[at] = min(c.tree[2*at], c.tree[2*at+1])
	}
}

func (x *Index) set(c *class, node int, cost int64) {
	x.Judged++
	at := x.size + node
	if c.tree[at] == cost {
		return
	}
	c.tree[at] = cost
	for at /= 2; at > 0; at /= 2 {
		least := min(c.tree[2*at], c.tree[2*at+1])
		if c.tree[at] == least {
			return
		}
		c.tree[at] = least
	}
}

// evict makes room for one more class by forgetting the one that was asked for longest ago.
func (x *Index) evict() {
	if len(x.classes) < maxClasses {
		return
	}
	oldest, used := "", math.MaxInt
	for key, c := range x.classes {
		if c.used < used {
			oldest, used = key, c.used
		}
	}
	delete(x.classes, oldest)
}
