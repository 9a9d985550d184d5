package ledger

import (
	"cmp"
	"errors"
	"maps"
	"reflect"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/v1alpha1"
	"github.com/carve-gpu/carve/scheduler-extender/fit"
)

// Config sets the ledger's times. Zero values mean the defaults.
type Config struct {
	// OfferTTL is how long an offer waits for its bind; default 15 s.
	OfferTTL time.Duration
	// ConfirmTTL is how long a written bind may stay unseen in the API's
	// events before the pod is looked up; default 30 s.
	ConfirmTTL time.Duration
	// LeaveGrace is how long a pod that may have run, and ended or vanished before
	// any report told of it, stays counted at most; default 10 s.
	LeaveGrace time.Duration
}

func (c Config) withDefaults() Config {
	c.OfferTTL = cmp.Or(c.OfferTTL, 15*time.Second)
	c.ConfirmTTL = cmp.Or(c.ConfirmTTL, 30*time.Second)
	c.LeaveGrace = cmp.Or(c.LeaveGrace, 10*time.Second)
	return c
}

// Ledger is the one place that knows what every card holds. It is safe for
// concurrent use.
type Ledger struct {
	config Config

	mu      sync.Mutex
	version uint64
	entries map[string]*entry // by pod UID
	timed   map[string]*entry // those with an end
	freed   map[*Node]struct{}
	spaces  map[string]*space   // by namespace
	relaxed map[string]struct{} // namespaces whose quota may allow more
	foreign map[string]*Node    // by UID of a pod that carve gave no card
	owners  map[string]map[*Node]int
	ids     []int // given back
	nextID  int

	freedSeq atomic.Uint64
	cards    atomic.Int64 // of managed nodes
	managed  atomic.Int64 // nodes
	signal   chan struct{}

	// names is written under both locks.
	names struct {
		sync.RWMutex
		nodes map[string]*Node
		epoch uint64        // grows with each node that comes or goes
		ids   int           // above all that were given
		state []*stateChunk // by Node.ID
	}
	lastTable atomic.Pointer[table]
	lastOrder atomic.Pointer[order]
}

// New makes an empty ledger.
func New(c Config) *Ledger {
	l := &Ledger{config: c.withDefaults(), entries: map[string]*entry{}, timed: map[string]*entry{},
		freed: map[*Node]struct{}{}, spaces: map[string]*space{}, relaxed: map[string]struct{}{}, foreign: map[string]*Node{}, owners: map[string]map[*Node]int{},
		signal: make(chan struct{}, 1)}
	l.names.nodes = map[string]*Node{}
	return l
}

// Node looks up one node; nil if it isn't known.
func (l *Ledger) Node(name string) *Node {
	l.names.RLock()
	defer l.names.RUnlock()
	return l.names.nodes[name]
}

// Nodes returns all nodes, in no particular order.
func (l *Ledger) Nodes() []*Node {
	l.names.RLock()
	defer l.names.RUnlock()
	out := make([]*Node, 0, len(l.names.nodes))
	for _, n := range l.names.nodes {
		out = append(out, n)
	}
	return out
}

// node finds or makes a node. The lock is held.
func (l *Ledger) node(name string) *Node {
	if n := l.Node(name); n != nil {
		return n
	}
	n := &Node{Name: name, ID: l.nextID, entries: map[string]*entry{}, foreign: map[string]string{}, hosted: map[string]fit.Host{}}
	if k := len(l.ids); k > 0 {
		n.ID, l.ids = l.ids[k-1], l.ids[:k-1]
	} else {
		l.nextID++
	}
	l.publish(n)
	l.named(n)
	return n
}

// publish recomputes a node's snapshot, and drops the node when nothing is
// known of it any more. The lock is held.
func (l *Ledger) publish(n *Node) {
	view, debt := n.view(nil)
	l.version++
	if old := n.snap.Load(); old != nil && old.View.Blocked != "" && view.Blocked == "" {
		n.served = l.version
	}
	now := &Snapshot{Version: l.version, Known: n.known, NodeInfo: n.info, View: view, DebtMiB: debt, Served: n.served}
	old := n.snap.Swap(now)
	l.mirror(n, now)
	l.cards.Add(int64(now.cards() - old.cards()))
	l.managed.Add(int64(now.managed() - old.managed()))
	if grew(old, now) {
		l.freed[n] = struct{}{}
		l.tell()
	}
	if old != nil && !n.known && n.report == nil && n.agent == (Agent{}) && len(n.entries) == 0 && len(n.foreign) == 0 && len(n.hosted) == 0 {
		l.unnamed(n)
		delete(l.freed, n)
		l.ids = append(l.ids, n.ID)
	}
}

// Cards is how many cards the managed nodes have. It takes no lock.
func (l *Ledger) Cards() int { return int(l.cards.Load()) }

// ManagedNodes is how many nodes carve manages. It takes no lock.
func (l *Ledger) ManagedNodes() int { return int(l.managed.Load()) }

// tell signals that there may be room for a pod that had none.
func (l *Ledger) tell() {
	l.freedSeq.Add(1)
	select {
	case l.signal <- struct{}{}:
	default:
	}
}

// Freed is signalled when a node gained room, or a namespace's quota. TakeFreed
// and TakeRelaxed then tell which.
func (l *Ledger) Freed() <-chan struct{} { return l.signal }

// FreedCount grows with each change that gave some node or namespace more room.
func (l *Ledger) FreedCount() uint64 { return l.freedSeq.Load() }

// TakeFreed returns the nodes that gained room since the last call.
func (l *Ledger) TakeFreed() []*Node {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := make([]*Node, 0, len(l.freed))
	for n := range l.freed {
		out = append(out, n)
	}
	clear(l.freed)
	slices.SortFunc(out, func(a, b *Node) int { return cmp.Compare(a.Name, b.Name) })
	return out
}

// SetNode takes in a Node object.
func (l *Ledger) SetNode(name string, info NodeInfo) {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := l.node(name)
	if n.known && n.info == info {
		return
	}
	n.known, n.info = true, info
	l.abandon(n)
	l.publish(n)
}

// DropNode takes in that a Node object is gone. What was leaving it is over.
func (l *Ledger) DropNode(name string, now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := l.Node(name)
	if n == nil {
		return
	}
	n.known, n.info = false, NodeInfo{}
	l.settle(n, now)
	l.publish(n)
}

// SetReport takes in a GPUNode object.
func (l *Ledger) SetReport(g *v1alpha1.GPUNode, now time.Time) {
	r := newReport(g)
	l.mu.Lock()
	defer l.mu.Unlock()
	n := l.node(g.Name)
	n.report = r
	l.settle(n, now)
	l.publish(n)
}

// DropReport takes in that a GPUNode object is gone.
func (l *Ledger) DropReport(name string, now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := l.Node(name)
	if n == nil {
		return
	}
	n.report = nil
	l.settle(n, now)
	l.publish(n)
}

// settle notes what the report shows of the entries and removes those that are
// over. The lock is held; the caller publishes.
func (l *Ledger) settle(n *Node, now time.Time) {
	for _, e := range n.entries {
		if n.report != nil && (len(n.report.slices[e.ref.UID]) > 0 || n.report.released[e.ref.UID]) {
			e.reported = true
			if e.state == Releasing && !e.behind() {
				l.ends(e, time.Time{}) // from here on the report decides
			}
		}
		if e.grant.Generation > 1 {
			l.count(e) // what is in force, and what a percentage of the card is
		}
		if e.over(now) {
			l.remove(e)
		}
	}
}

// ends sets or clears the end of an entry. The lock is held.
func (l *Ledger) ends(e *entry, until time.Time) {
	e.until = until
	if until.IsZero() {
		delete(l.timed, e.ref.UID)
	} else {
		l.timed[e.ref.UID] = e
	}
}

func (l *Ledger) add(e *entry) {
	l.entries[e.ref.UID] = e
	e.node.entries[e.ref.UID] = e
	l.owned(e, 1)
	l.count(e)
}

func (l *Ledger) remove(e *entry) {
	delete(l.entries, e.ref.UID)
	delete(l.timed, e.ref.UID)
	delete(e.node.entries, e.ref.UID)
	l.owned(e, -1)
	l.count(e)
}

// owned counts a replica on its node. The lock is held.
func (l *Ledger) owned(e *entry, by int) {
	if e.owner == "" {
		return
	}
	on := l.owners[e.owner]
	if on == nil {
		on = map[*Node]int{}
		l.owners[e.owner] = on
	}
	if on[e.node] += by; on[e.node] == 0 {
		if delete(on, e.node); len(on) == 0 {
			delete(l.owners, e.owner)
		}
	}
}

// Replicas counts an owner's pods by node: those that are offered, bound or leaving.
func (l *Ledger) Replicas(owner string) map[*Node]int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return maps.Clone(l.owners[owner])
}

// Pod is what the ledger needs of a Pod object.
type Pod struct {
	Ref
	Node string // spec.nodeName
	// Owner is the UID of the controller whose replica the pod is, or empty.
	Owner string
	// Grant is the pod's grant where it is valid for this pod and node.
	Grant      *api.Grant
	Containers []Container
	Ended      bool // phase Succeeded or Failed
	Started    bool // some container of it ran
	// OnCards is true while a container of it runs that asks for cards.
	OnCards bool
}

// SetPod takes in a Pod object. A pod without a node changes nothing: its
// offer, if it has one, stands or ends by itself.
func (l *Ledger) SetPod(p Pod, now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := l.entries[p.UID]
	l.setForeign(p)
	switch {
	case p.Ended:
		if e != nil {
			// What ran so shortly that no report shows it yet may still be at work by
			// the next one.
			e.started = e.started || p.Started
			l.part(e, e.started, now)
		}
		return
	case p.Node == "":
		return
	case p.Grant == nil:
		// Bound past us. What we had in mind for it is void; if a write of
		// ours is in flight it will fail and say so.
		if e != nil && !e.binding && !e.confirmed {
			l.remove(e)
			l.publish(e.node)
		}
		return
	}
	if e != nil && e.state == Bound && e.confirmed && e.node.Name == p.Node && l.knows(e, p.Grant) {
		e.started = e.started || p.Started
		return
	}
	n := l.node(p.Node)
	same := e != nil && e.node == n && e.before == nil && reflect.DeepEqual(e.grant, *p.Grant) && slices.Equal(e.containers, p.Containers)
	if e != nil && e.node != n {
		l.remove(e)
		l.publish(e.node)
		e = nil
	}
	if e == nil {
		e = &entry{ref: p.Ref, node: n, owner: p.Owner}
		l.add(e)
	}
	e.state, e.grant, e.containers = Bound, *p.Grant, p.Containers
	e.confirmed, e.binding, e.ask, e.allowed = true, false, nil, nil
	e.before, e.writing = nil, false
	l.count(e)
	e.started = e.started || p.Started
	e.reported = e.reported || n.report != nil && len(n.report.slices[p.UID]) > 0
	l.ends(e, time.Time{})
	if !same {
		l.publish(n)
	}
}

// DropPod takes in that a Pod object is gone.
func (l *Ledger) DropPod(uid string, now time.Time) {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := l.entries[uid]
	l.dropForeign(uid)
	if e != nil && e.binding {
		e.gone = true // the reply to the write decides
		return
	}
	if e != nil {
		// kubelet ends a pod before it lets it be deleted. This one it may not have
		// heard of yet: its containers may start a moment from now.
		l.part(e, e.confirmed, now)
	}
}

// part takes in that a pod has ended or is gone. Where its node may have its share, and
// the report that says so, or that says how large it has become, is still under way, it
// stays counted until that report, or until LeaveGrace has passed. The lock is held.
func (l *Ledger) part(e *entry, mayRun bool, now time.Time) {
	if e.state != Bound || e.binding || !mayRun || e.reported && !e.behind() || e.node.info.OutOfService {
		l.leave(e, now)
		return
	}
	e.state = Releasing
	l.count(e)
	l.ends(e, now.Add(l.config.LeaveGrace))
	l.publish(e.node) // it holds its cards, and nothing else of the node
}

// leave lets go of a pod that holds nothing any more but what its node's report
// shows. The lock is held.
func (l *Ledger) leave(e *entry, now time.Time) {
	switch {
	case e.binding:
		return
	case e.state == Releasing && !e.until.IsZero():
		return
	}
	e.state = Releasing
	l.count(e)
	l.ends(e, time.Time{})
	if e.over(now) {
		l.remove(e)
	}
	l.publish(e.node)
}

// Sweep ends what is due: offers nobody bound, graces that passed. It returns
// the pods whose bind was written long ago but that no event showed bound; the
// caller looks them up and calls SetPod or DropPod. They are returned again
// after another ConfirmTTL.
func (l *Ledger) Sweep(now time.Time) (ended int, unconfirmed []Ref) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, e := range l.timed {
		if now.Before(e.until) || e.binding {
			continue
		}
		if e.state == Bound {
			unconfirmed = append(unconfirmed, e.ref)
			e.until = now.Add(l.config.ConfirmTTL)
			continue
		}
		if e.state == Releasing && e.node.silent() {
			// Nobody is there to report what it still holds.
			e.until = now.Add(l.config.LeaveGrace)
			continue
		}
		ended++
		l.remove(e)
		l.publish(e.node)
	}
	return ended, unconfirmed
}

// Held is what an entry says of itself.
type Held struct {
	State   State
	Node    *Node
	Key     string // of the ask, for offers
	Binding bool
}

// Held reports what the pod holds.
func (l *Ledger) Held(uid string) (Held, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := l.entries[uid]
	if e == nil {
		return Held{}, false
	}
	return Held{e.state, e.node, e.key, e.binding}, true
}

// Without is a node as it would be if some pods, by UID, held nothing of its cards.
func (l *Ledger) Without(n *Node, gone map[string]bool) fit.Node {
	l.mu.Lock()
	defer l.mu.Unlock()
	v, _ := n.viewWithout(nil, gone)
	return v
}

// BoundPod is what the ledger has of a pod that the API showed bound.
type BoundPod struct {
	Ref
	Grant api.Grant
}

// BoundOn lists the pods of a node that the API showed bound, and that aren't being resized:
// what the ledger has of them is what the API shows, or differs by what is on its way.
func (l *Ledger) BoundOn(n *Node) []BoundPod {
	l.mu.Lock()
	defer l.mu.Unlock()
	var out []BoundPod
	for _, e := range n.entries {
		if e.state == Bound && e.confirmed && e.before == nil {
			out = append(out, BoundPod{e.ref, e.grant})
		}
	}
	return out
}

// Holder is one pod on a card.
type Holder struct {
	Pod    string // namespace/name
	MemMiB int64
	Whole  bool
	State  State
	Cores  int
	Mode   api.Mode // in which it shares the card; empty where it is whole
}

// Holders lists who is on the card with the given UUID, the largest first.
func (l *Ledger) Holders(n *Node, uuid string) []Holder {
	l.mu.Lock()
	defer l.mu.Unlock()
	return n.holders(uuid, "")
}

// holders lists who is on a card, save one pod. The lock is held.
func (n *Node) holders(uuid, except string) []Holder {
	if n.report == nil {
		return nil
	}
	at, ok := n.report.byUUID[uuid]
	if !ok {
		return nil
	}
	var out []Holder
	for _, e := range n.entries {
		if e.ref.UID == except {
			continue
		}
		e.use(n.report, func(card int, a fit.Amount, whole bool, mode api.Mode) {
			if card == at {
				out = append(out, Holder{e.ref.Namespace + "/" + e.ref.Name, a.MemMiB, whole, e.state, a.Cores, mode})
			}
		})
	}
	for uid, ss := range n.report.slices {
		if n.entries[uid] != nil {
			continue
		}
		h := Holder{State: Releasing}
		for _, s := range ss {
			if s.card == at {
				h.Pod, h.MemMiB, h.Whole = s.namespace+"/"+s.pod, h.MemMiB+s.amount.MemMiB, h.Whole || s.whole
				h.Cores += s.amount.Cores
				h.Mode = fit.JoinModes(h.Mode, s.mode)
			}
		}
		if h.Pod != "" {
			out = append(out, h)
		}
	}
	slices.SortFunc(out, func(a, b Holder) int {
		return cmp.Or(cmp.Compare(b.MemMiB, a.MemMiB), cmp.Compare(a.Pod, b.Pod))
	})
	return out
}

// Totals adds up the managed nodes.
type Totals struct {
	Nodes, Cards, Offers, Bound, Releasing int
	MemMiB, UsedMiB, FreeMiB, DebtMiB      int64
}

// Totals adds up the managed nodes and the entries.
func (l *Ledger) Totals() Totals {
	var t Totals
	for _, n := range l.Nodes() {
		s := n.Snapshot()
		if !s.Managed {
			continue
		}
		t.Nodes++
		t.DebtMiB += s.DebtMiB
		for i := range s.View.Cards {
			c := &s.View.Cards[i]
			t.Cards++
			t.MemMiB += c.MemMiB
			t.UsedMiB += min(c.Used.MemMiB, c.MemMiB)
			t.FreeMiB += c.Free().MemMiB
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, e := range l.entries {
		switch e.state {
		case Offered:
			t.Offers++
		case Bound:
			t.Bound++
		default:
			t.Releasing++
		}
	}
	return t
}

// Errors of Offer and BeginBind, beside *QuotaRefusal. They leave every entry as it
// is, but for ErrBlocked, ErrChanged and *QuotaRefusal of BeginBind, which end the offer.
var (
	// ErrNoRoom says that the room that was seen is taken.
	ErrNoRoom = errors.New("the room was taken by another pod")
	// ErrHeld says that the pod already holds something that stands.
	ErrHeld = errors.New("the pod is being bound or is bound already")
	// ErrNoOffer says that nothing was offered to this pod.
	ErrNoOffer = errors.New("no live offer for this pod")
	// ErrOtherNode says that the offer is for another node.
	ErrOtherNode = errors.New("the pod's offer is for another node")
	// ErrInFlight says that a bind of this pod is under way.
	ErrInFlight = errors.New("a bind of this pod is in flight")
	// ErrBlocked says that the node takes nothing new, since the offer was
	// made.
	ErrBlocked = errors.New("the node takes no pods now")
	// ErrChanged says that the node's cards are given otherwise than when the
	// offer was made, and that the pod fits on none of them as they are now.
	ErrChanged = errors.New("the card that was offered is given otherwise now, and the node has no other for the pod")
)

// Offer is a decision to be entered.
type Offer struct {
	Ref
	Node *Node
	// Version is the snapshot's that Place was computed from.
	Version uint64
	Ask     *fit.Ask
	Place   fit.Placement
	Prefer  fit.Prefer
	// Allowed are the nodes that the scheduler may choose instead.
	Allowed []*Node
	// Owner is the UID of the controller whose replica the pod is, or empty.
	Owner string
	// For is how long the offer waits for its bind; 0 is Config.OfferTTL.
	For time.Duration
}

// Offer books a decision. If the node changed since the decision was made it
// is made again, for that node, under the lock. ErrNoRoom means that the pod
// doesn't fit there any more, ErrHeld that it holds more than an offer, and a
// *QuotaRefusal that its namespace may not hold more.
func (l *Ledger) Offer(o Offer, now time.Time) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	old := l.entries[o.UID]
	if old != nil && (old.state != Offered || old.binding) {
		return ErrHeld
	}
	if old != nil {
		l.remove(old)
		l.publish(old.node)
	}
	e := &entry{ref: o.Ref, key: o.Ask.Key(), ask: o.Ask, host: o.Ask.Host, owner: o.Owner, prefer: o.Prefer, allowed: o.Allowed, stays: cmp.Or(o.For, l.config.OfferTTL)}
	for i := range o.Ask.Containers {
		c := &o.Ask.Containers[i]
		e.containers = append(e.containers, containerOf(c))
	}
	if err := l.place(e, o.Node, o.Version, o.Place); err != nil {
		return err
	}
	l.ends(e, now.Add(e.stays))
	return nil
}

// place enters an offer on a node, at the given places if the node is still as
// it was in that version. The lock is held.
func (l *Ledger) place(e *entry, n *Node, version uint64, p fit.Placement) error {
	s := n.Snapshot()
	if l.Node(n.Name) != n || !s.Known || !s.Managed {
		return ErrNoRoom
	}
	if s.Version != version {
		var refusal *fit.Refusal
		if p, refusal = fit.Fit(&s.View, e.ask, e.prefer); refusal != nil {
			return ErrNoRoom
		}
	}
	e.node, e.grant, e.seen = n, e.ask.Grant(&s.View, p, e.ref.UID), n.report
	if over := l.overQuota(e, total(e.containers, e.grant)); over != nil {
		return over
	}
	l.add(e)
	l.publish(n)
	return nil
}

// Renew lets an offer that isn't being bound, and that would be made the same way now,
// live on.
func (l *Ledger) Renew(uid string, now time.Time) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := l.entries[uid]
	if e == nil || e.state != Offered || e.binding || !e.stands() {
		return false
	}
	l.ends(e, now.Add(e.stays))
	return true
}

// Withdraw takes back an offer that isn't being bound.
func (l *Ledger) Withdraw(uid string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if e := l.entries[uid]; e != nil && e.state == Offered && !e.binding {
		l.remove(e)
		l.publish(e.node)
	}
}
