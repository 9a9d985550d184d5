// Package audit compares all that says who has which part of which card: the
// grants on pods, the node's report, the files and the journal on the node,
// what really runs and maps them, what the driver holds, and the extender's
// sums. It does no I/O: it compares a Snapshot that somebody gathered.
package audit

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/v1alpha1"
)

// Snapshot is one node at one moment, as each of those who know of it says.
type Snapshot struct {
	// Pods are those bound to the node, as the API server has them.
	Pods []Pod
	// Cards is the node's report.
	Cards []v1alpha1.Card
	// Hook says that the report shows the hook linked, Unadjusted is its count
	// of containers that started without it.
	Hook       bool
	Unadjusted int
	// Files are the slices under /run/carve, Journal the agent's records.
	Files   []Files
	Journal []Record
	// Containers are those that the runtime has and that haven't exited.
	Containers []Container
	// Driver is what the driver holds.
	Driver []DriverCard
	// Ledger is the extender's word, AgentMiB what the agent's metrics say is
	// granted, by card.
	Ledger   Ledger
	AgentMiB map[string]int64
}

// Pod is a pod of the node.
type Pod struct {
	UID, Name string
	// Over is true once no container of it will run again.
	Over bool
	// Grant is nil where there is none; GrantFault says that it can't be read.
	Grant      *api.Grant
	GrantFault string
	// Containers are the pod's, in its order. Done are init containers that
	// ended well: the report need not show their slices any more.
	Containers []PodContainer
	Done       map[string]bool
}

// PodContainer is a container of a pod's spec.
type PodContainer struct {
	Name string
	Kind api.ContainerKind
}

// Limits are what a limits file says, by card.
type Limits map[string]Share

// Share is a part of a card.
type Share struct {
	MemMiB int64
	Cores  int
}

// Files is one container's folder on the node.
type Files struct {
	UID, Container string
	Limits         Limits
	// Fault says why the files can't be read.
	Fault string
	// Inode is the limits file's.
	Inode uint64
	// ChargedBytes is what the container's processes say they hold, by card.
	ChargedBytes map[string]uint64
}

// Record is one of the agent's journal.
type Record struct {
	UID   string
	State string
	Grant api.Grant
	// Fault says why it can't be read.
	Fault string
}

// Container is one that hasn't exited.
type Container struct {
	ID, UID, Pod, Name string
	// Running is false for one that was created and not started.
	Running bool
	// Limits and Inode are of the limits file that it maps; nil and 0: none.
	Limits Limits
	Inode  uint64
	// Fault says why they can't be read.
	Fault string
	// Cards are those whose device nodes it has.
	Cards []string
}

// DriverCard is a card as the driver has it.
type DriverCard struct {
	UUID      string
	UsedBytes uint64
	Processes []Process
}

// Process is one that holds something of a card.
type Process struct {
	PID   int
	Ended bool
	Bytes uint64
	// Container is the ID of its container, "" for none.
	Container string
}

// Ledger is what the extender's metrics say.
type Ledger struct {
	UsedMiB, DebtMiB, Offers, Bound, Releasing int64
}

// Findings is what doesn't agree.
type Findings struct {
	// LeakedSlices are shares that somebody counts and nobody has, WrongLimits
	// containers with other limits or cards than granted, DoubleBookings cards
	// of which more is given than they have.
	LeakedSlices, WrongLimits, DoubleBookings int
	// Lines has a sentence for each of these, and for all else that differs.
	Lines []string
}

// OK reports whether all agree.
func (f Findings) OK() bool { return len(f.Lines) == 0 }

func (f *Findings) leaked(format string, a ...any) {
	f.LeakedSlices++
	f.Lines = append(f.Lines, "leaked slice: "+fmt.Sprintf(format, a...))
}

func (f *Findings) wrong(format string, a ...any) {
	f.WrongLimits++
	f.Lines = append(f.Lines, "wrong limits: "+fmt.Sprintf(format, a...))
}

func (f *Findings) double(format string, a ...any) {
	f.DoubleBookings++
	f.Lines = append(f.Lines, "double booking: "+fmt.Sprintf(format, a...))
}

func (f *Findings) differs(format string, a ...any) {
	f.Lines = append(f.Lines, "differs: "+fmt.Sprintf(format, a...))
}

// Compare says what doesn't agree in a snapshot of a node on which nothing
// happens. On a busy node the parts of a snapshot are of different moments, so
// a caller looks again before it believes what it says.
func Compare(s Snapshot) Findings {
	c := comparison{Snapshot: s, pods: map[string]Pod{}, running: map[string]bool{}}
	for _, p := range s.Pods {
		c.pods[p.UID] = p
	}
	for _, k := range s.Containers {
		c.running[k.UID] = true
	}
	if !s.Hook {
		c.differs("the report says that the hook isn't linked")
	}
	if s.Unadjusted != 0 {
		c.differs("%d containers started without the hook", s.Unadjusted)
	}
	c.grants()
	c.report()
	c.files()
	c.journal()
	c.containers()
	c.driver()
	c.sums()
	return c.Findings
}

type comparison struct {
	Snapshot
	Findings
	pods    map[string]Pod
	running map[string]bool // pod UIDs with containers that haven't exited
}

// live reports whether a pod holds what it was granted.
func (p Pod) live() bool { return !p.Over && p.Grant != nil }

// holds reports whether a pod's slices must be in place. Those of a pod that is
// gone, or over, stay for as long as containers of it run.
func (c *comparison) holds(uid string) bool { return c.pods[uid].live() || c.running[uid] }

// what a pod is called in a sentence.
func (c *comparison) name(uid string) string {
	if p, ok := c.pods[uid]; ok {
		return "pod " + p.Name + " (" + uid + ")"
	}
	return "pod " + uid + ", which is gone,"
}

// grant is what a pod was granted: by its annotation, or where the pod is gone
// and still runs, by the journal.
func (c *comparison) grant(uid string) *api.Grant {
	if p, ok := c.pods[uid]; ok {
		return p.Grant
	}
	for _, r := range c.Journal {
		if r.UID == uid && r.Fault == "" {
			return &r.Grant
		}
	}
	return nil
}

func (c *comparison) grants() {
	for _, p := range c.Pods {
		switch {
		case p.GrantFault != "":
			c.differs("pod %s: its grant: %s", p.Name, p.GrantFault)
		case p.Grant != nil && p.Grant.UID != p.UID:
			c.differs("pod %s carries a grant for pod %s", p.Name, p.Grant.UID)
		}
	}
}

// report compares the node's report with the grants.
func (c *comparison) report() {
	seen := map[[3]string]bool{}
	for _, card := range c.Cards {
		for _, s := range card.Slices {
			key := [3]string{s.PodUID, s.Container, card.UUID}
			if seen[key] {
				c.differs("the report has the slice of %s container %s on card %s twice", c.name(s.PodUID), s.Container, card.UUID)
			}
			seen[key] = true
			if !c.holds(s.PodUID) {
				c.leaked("the report has one of %s container %s on card %s", c.name(s.PodUID), s.Container, card.UUID)
				continue
			}
			g := c.grant(s.PodUID)
			cg, ok := cardGrant(g, s.Container, card.UUID)
			if !ok {
				c.leaked("the report has one of %s container %s on card %s, which it wasn't granted", c.name(s.PodUID), s.Container, card.UUID)
				continue
			}
			if cg.MemMiB != s.MemMiB || cg.Cores != int(s.Cores) || string(cg.Mode) != s.Mode || g.Generation != int(s.Generation) {
				c.wrong("%s container %s on card %s was granted %d MiB, %d %%, %s, generation %d; the report has %d, %d, %s, %d", c.name(s.PodUID), s.Container, card.UUID,
					cg.MemMiB, cg.Cores, cg.Mode, g.Generation, s.MemMiB, s.Cores, s.Mode, s.Generation)
			}
			if active := c.hasContainer(s.PodUID, s.Container); active != (s.State == v1alpha1.Active) {
				c.differs("the slice of %s container %s is reported %s, and that it has a container is %v", c.name(s.PodUID), s.Container, s.State, active)
			}
		}
	}
	for _, uid := range c.holders() {
		g := c.grant(uid)
		for _, name := range slices.Sorted(maps.Keys(g.Containers)) {
			for _, cg := range g.Containers[name] {
				if !seen[[3]string{uid, name, cg.Card}] && !c.pods[uid].Done[name] {
					c.differs("the report lacks the slice of %s container %s on card %s", c.name(uid), name, cg.Card)
				}
			}
		}
	}
}

// holders are the UIDs of pods whose slices must be in place, and whose grant
// is known.
func (c *comparison) holders() []string {
	var uids []string
	for _, p := range c.Pods {
		if p.live() {
			uids = append(uids, p.UID)
		}
	}
	for uid := range c.running {
		if !c.pods[uid].live() && c.grant(uid) != nil {
			uids = append(uids, uid)
		}
	}
	slices.Sort(uids)
	return uids
}

func (c *comparison) hasContainer(uid, name string) bool {
	return slices.ContainsFunc(c.Containers, func(k Container) bool { return k.UID == uid && k.Name == name })
}

func (c *comparison) files() {
	have := map[[2]string]Files{}
	for _, f := range c.Files {
		have[[2]string{f.UID, f.Container}] = f
		switch {
		case !c.holds(f.UID):
			c.leaked("files of %s container %s", c.name(f.UID), f.Container)
		case wantLimits(c.grant(f.UID), f.Container) == nil:
			c.leaked("files of %s container %s, which has no share", c.name(f.UID), f.Container)
		}
	}
	for _, uid := range c.holders() {
		g := c.grant(uid)
		for _, name := range slices.Sorted(maps.Keys(g.Containers)) {
			want := wantLimits(g, name)
			if want == nil {
				continue
			}
			f, ok := have[[2]string{uid, name}]
			switch {
			case !ok:
				c.differs("%s container %s has no files on the node", c.name(uid), name)
			case f.Fault != "":
				c.differs("the files of %s container %s: %s", c.name(uid), name, f.Fault)
			case !maps.Equal(want, f.Limits):
				c.wrong("%s container %s was granted %v, its limits file has %v", c.name(uid), name, want, f.Limits)
			}
		}
	}
}

func (c *comparison) journal() {
	have := map[string]bool{}
	for _, r := range c.Journal {
		have[r.UID] = true
		switch {
		case r.Fault != "":
			c.differs("journal record %s: %s", r.UID, r.Fault)
		case !c.holds(r.UID):
			c.leaked("a journal record of %s", c.name(r.UID))
		case r.State != "held":
			c.differs("the journal record of %s is %s", c.name(r.UID), r.State)
		case c.pods[r.UID].Grant != nil && !sameGrant(*c.pods[r.UID].Grant, r.Grant):
			c.wrong("%s was granted %+v, the journal has %+v", c.name(r.UID), *c.pods[r.UID].Grant, r.Grant)
		}
	}
	for _, uid := range c.holders() {
		if !have[uid] {
			c.differs("%s has no journal record", c.name(uid))
		}
	}
}

// containers compares what runs with what was granted to it.
func (c *comparison) containers() {
	inode := map[[2]string]uint64{}
	for _, f := range c.Files {
		inode[[2]string{f.UID, f.Container}] = f.Inode
	}
	for _, k := range c.Containers {
		if !k.Running {
			continue
		}
		where := fmt.Sprintf("%s container %s", c.name(k.UID), k.Name)
		g := c.grant(k.UID)
		var granted []string
		if g != nil {
			for _, cg := range g.Containers[k.Name] {
				granted = append(granted, cg.Card)
			}
		}
		slices.Sort(granted)
		cards := slices.Sorted(slices.Values(k.Cards))
		want := wantLimits(g, k.Name)
		switch {
		case k.Fault != "":
			c.differs("%s: %s", where, k.Fault)
			continue
		case !slices.Equal(granted, cards):
			c.wrong("%s was granted cards %v and has the device nodes of %v", where, granted, cards)
		}
		switch {
		case !maps.Equal(want, k.Limits):
			c.wrong("%s was granted %v and maps %v", where, want, k.Limits)
		case want != nil && k.Inode != inode[[2]string{k.UID, k.Name}]:
			c.wrong("%s maps another limits file than the one that the node keeps for it", where)
		}
	}
}

// keeper is how the pods are named that run the MPS daemons.
const keeper = api.Namespace + "/carve-mps-"

// shared is the mode in which a card is given.
func (c *comparison) shared(card string) api.Mode {
	var all string
	for _, uid := range c.holders() {
		all = modes(all, Peak(*c.grant(uid), c.pods[uid].Containers, card).Mode)
	}
	return api.Mode(all)
}

// driver compares what is held of the cards with who may hold it.
func (c *comparison) driver() {
	byID := map[string]Container{}
	for _, k := range c.Containers {
		byID[k.ID] = k
	}
	held := map[[3]string]uint64{} // UID, container, card
	for _, card := range c.Driver {
		var sum uint64
		for _, p := range card.Processes {
			sum += p.Bytes
			k, known := byID[p.Container]
			_, granted := cardGrant(c.grant(k.UID), k.Name, card.UUID)
			switch {
			case p.Ended:
				c.leaked("card %s: process %d ended and still holds %d bytes", card.UUID, p.PID, p.Bytes)
			case !known:
				c.leaked("card %s: process %d holds %d bytes and is in no container (%q)", card.UUID, p.PID, p.Bytes, p.Container)
			case !granted && strings.HasPrefix(c.pods[k.UID].Name, keeper) && c.shared(card.UUID) == api.ModeMPS:
				// A server's own context; what it has for its clients is theirs.
			case !granted:
				c.wrong("card %s: process %d of %s container %s, which wasn't granted it, holds %d bytes", card.UUID, p.PID, c.name(k.UID), k.Name, p.Bytes)
			default:
				held[[3]string{k.UID, k.Name, card.UUID}] += p.Bytes
			}
		}
		if sum != card.UsedBytes {
			c.leaked("card %s: %d bytes are in use, its processes hold %d", card.UUID, card.UsedBytes, sum)
		}
	}
	for key, bytes := range held {
		if cg, _ := cardGrant(c.grant(key[0]), key[1], key[2]); (cg.Mode == api.ModeVGPU || cg.Mode == api.ModeMPS) && bytes > uint64(cg.MemMiB)<<20 {
			c.wrong("%s container %s holds %d bytes of card %s, its share is %d MiB", c.name(key[0]), key[1], bytes, key[2], cg.MemMiB)
		}
	}
	for _, f := range c.Files {
		for card, charged := range f.ChargedBytes {
			bytes := held[[3]string{f.UID, f.Container, card}]
			switch {
			case charged < bytes:
				c.wrong("%s container %s holds %d bytes of card %s and is charged for %d", c.name(f.UID), f.Container, bytes, card, charged)
			case bytes == 0 && charged != 0:
				c.leaked("%s container %s holds nothing of card %s and is charged for %d bytes", c.name(f.UID), f.Container, card, charged)
			}
		}
	}
}

// sums compares the cards' memory with what is given of it, and that with what
// extender and agent say.
func (c *comparison) sums() {
	var used int64
	for _, card := range c.Cards {
		var total Amount
		for _, uid := range c.holders() {
			total = total.plus(Peak(*c.grant(uid), c.pods[uid].Containers, card.UUID))
		}
		if fault := total.over(card.MemoryMiB); fault != "" {
			c.double("card %s: %s", card.UUID, fault)
		}
		mem := total.MemMiB
		if total.Whole > 0 {
			mem = card.MemoryMiB
		}
		used += mem
		if says := c.AgentMiB[card.UUID]; says != mem {
			c.differs("card %s: %d MiB are granted, the agent's metrics say %d", card.UUID, mem, says)
		}
	}
	var bound, releasing int64
	for _, uid := range c.holders() {
		if c.pods[uid].live() {
			bound++
		} else if _, ok := c.pods[uid]; ok {
			releasing++
		}
	}
	l := c.Ledger
	if l.UsedMiB != used {
		c.differs("%d MiB are granted, the extender's ledger has %d in use", used, l.UsedMiB)
	}
	if l.DebtMiB != 0 {
		c.double("the extender's ledger has a debt of %d MiB", l.DebtMiB)
	}
	if l.Bound != bound || l.Offers != 0 {
		c.differs("%d pods hold a grant, the extender's ledger has %d bound and %d offers", bound, l.Bound, l.Offers)
	}
	// A pod that is gone is in the ledger, or only in the report that it read.
	if l.Releasing < releasing || l.Releasing > releasing+int64(len(c.running)) {
		c.differs("%d pods are over and still run, the extender's ledger has %d releasing", releasing, l.Releasing)
	}
}

// sameGrant compares two grants by what they encode to.
func sameGrant(a, b api.Grant) bool {
	x, errX := a.Encode()
	y, errY := b.Encode()
	return errX == nil && errY == nil && x == y
}

func cardGrant(g *api.Grant, container, card string) (api.CardGrant, bool) {
	if g == nil {
		return api.CardGrant{}, false
	}
	for _, cg := range g.Containers[container] {
		if cg.Card == card {
			return cg, true
		}
	}
	return api.CardGrant{}, false
}

// wantLimits is what a container's limits file must say, nil where it must have
// none.
func wantLimits(g *api.Grant, container string) Limits {
	var l Limits
	if g == nil {
		return nil
	}
	for _, cg := range g.Containers[container] {
		if cg.Mode != api.ModeVGPU && cg.Mode != api.ModeMPS {
			continue
		}
		if l == nil {
			l = Limits{}
		}
		cores := cg.Cores
		if cg.Mode == api.ModeMPS && cores == 0 {
			cores = 100 // of the multiprocessors, in terms of MPS
		}
		l[cg.Card] = Share{cg.MemMiB, cores}
	}
	return l
}
