package ledger

import (
	"bytes"
	"sync/atomic"
)

// Among is nodes in the order in which they were named, as kube-scheduler names them: ten
// thousand at a time, pod after pod. Looking at one costs a few nanoseconds as long as nothing
// about it changed, since what tells that lies side by side.
type Among struct {
	// IDs are Node.ID by position, or -1 where the name isn't known.
	IDs   []int32
	table *table
	state []*stateChunk
}

// Len is how many nodes were named.
func (a *Among) Len() int { return len(a.IDs) }

// Node is the one at a position; nil where the name isn't known.
func (a *Among) Node(i int) *Node {
	if id := a.IDs[i]; id >= 0 {
		return a.table.nodes[id]
	}
	return nil
}

// Lot is a number of the node at a position that is spread evenly and that only its name
// decides.
func (a *Among) Lot(i int) uint64 { return a.table.lots[a.IDs[i]] }

// State is what Snapshot says at a position of a node that is known, without looking at it:
// the version, whether carve manages it, and whether it has cards that carve doesn't manage.
func (a *Among) State(i int) (version uint64, managed, others bool) {
	id := a.IDs[i]
	v := a.state[id>>chunkBits][id&(1<<chunkBits-1)].Load()
	return v >> 2, v&1 != 0, v&2 != 0
}

// Has reports whether a node is among them.
func (a *Among) Has(n *Node) bool {
	for _, id := range a.IDs {
		if int(id) == n.ID && a.table.nodes[id] == n {
			return true
		}
	}
	return false
}

// table is the nodes that there are at one moment.
type table struct {
	epoch uint64
	nodes []*Node // by ID; nil where none has it
	lots  []uint64
}

// Chunks stay where they are when nodes come, so that their owner may write there while
// others read.
const chunkBits = 10

type stateChunk [1 << chunkBits]atomic.Uint64

// order is a list of names as it was asked for last: the next one is nearly the same.
type order struct {
	epoch  uint64
	text   []byte // the names, one after the other
	starts []int32
	ids    []int32
	at     []int32 // position by ID, -1 where it isn't in the list
}

// Among finds nodes by their names.
func (l *Ledger) Among(names [][]byte) *Among {
	t, states := l.tableNow()
	a := &Among{IDs: make([]int32, len(names)), table: t, state: states}
	o := l.lastOrder.Load()
	if o != nil && o.epoch != t.epoch {
		o = nil
	}
	looked, next := 0, 0
	for i, name := range names {
		// As a rule the name is the one after the name before.
		if o != nil && next < len(o.ids) && bytes.Equal(name, o.text[o.starts[next]:o.starts[next+1]]) {
			a.IDs[i] = o.ids[next]
			next++
			continue
		}
		looked++
		a.IDs[i] = -1
		if n := l.nodeOf(name); n != nil && n.ID < len(t.nodes) && t.nodes[n.ID] == n {
			a.IDs[i] = int32(n.ID)
			if o != nil && o.at[n.ID] >= 0 {
				next = int(o.at[n.ID]) + 1
			}
		}
	}
	if looked > 16+len(names)/8 {
		l.lastOrder.Store(newOrder(t, names, a.IDs))
	}
	return a
}

func newOrder(t *table, names [][]byte, ids []int32) *order {
	o := &order{epoch: t.epoch, ids: ids, starts: make([]int32, 1, len(names)+1), at: make([]int32, len(t.nodes))}
	for i := range o.at {
		o.at[i] = -1
	}
	for i, name := range names {
		o.text = append(o.text, name...)
		o.starts = append(o.starts, int32(len(o.text)))
		if ids[i] >= 0 {
			o.at[ids[i]] = int32(i)
		}
	}
	return o
}

// nodeOf is Node for bytes.
func (l *Ledger) nodeOf(name []byte) *Node {
	l.names.RLock()
	defer l.names.RUnlock()
	return l.names.nodes[string(name)]
}

// tableNow is the table of the nodes that there are now.
func (l *Ledger) tableNow() (*table, []*stateChunk) {
	l.names.RLock()
	defer l.names.RUnlock()
	if t := l.lastTable.Load(); t != nil && t.epoch == l.names.epoch {
		return t, l.names.state
	}
	t := &table{epoch: l.names.epoch, nodes: make([]*Node, l.names.ids), lots: make([]uint64, l.names.ids)}
	for _, n := range l.names.nodes {
		t.nodes[n.ID], t.lots[n.ID] = n, n.lot
	}
	l.lastTable.Store(t)
	return t, l.names.state
}

// named enters a new node among the names. The ledger's lock is held.
func (l *Ledger) named(n *Node) {
	n.lot = LotOf(n.Name)
	l.names.Lock()
	defer l.names.Unlock()
	l.names.nodes[n.Name] = n
	l.names.epoch++
	l.names.ids = max(l.names.ids, n.ID+1)
}

// unnamed takes a node from the names. The ledger's lock is held.
func (l *Ledger) unnamed(n *Node) {
	l.names.Lock()
	defer l.names.Unlock()
	delete(l.names.nodes, n.Name)
	l.names.epoch++
}

// mirror writes the state of a node's snapshot where Among reads it. The ledger's lock is
// held.
func (l *Ledger) mirror(n *Node, s *Snapshot) {
	at := n.ID >> chunkBits
	if at >= len(l.names.state) {
		l.names.Lock()
		// Readers keep the slice that they have: it isn't changed but replaced.
		l.names.state = append(l.names.state[:len(l.names.state):len(l.names.state)], new(stateChunk))
		l.names.Unlock()
	}
	v := s.Version << 2
	if s.Managed {
		v |= 1
	}
	if s.Known && !s.Managed && s.Cards {
		v |= 2
	}
	l.names.state[at][n.ID&(1<<chunkBits-1)].Store(v)
}

// LotOf makes a number of a text that is spread evenly: FNV-1a, with a finish that lets each
// bit count, since names differ in the last letters.
func LotOf(s string) uint64 {
	h := uint64(14695981039346656037)
	for i := range len(s) {
		h = (h ^ uint64(s[i])) * 1099511628211
	}
	return Mix(h)
}

// Mix spreads a number over all bits.
func Mix(h uint64) uint64 {
	h ^= h >> 33
	h *= 0xff51afd7ed558ccd
	h ^= h >> 33
	h *= 0xc4ceb9fe1a85ec53
	return h ^ h>>33
}
