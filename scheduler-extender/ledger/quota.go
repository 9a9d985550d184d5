package ledger

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/scheduler-extender/fit"
)

// maxGrown is how many pods that grew a refusal names.
const maxGrown = 3

// Quota is what a namespace's pods may hold of all cards together. A negative
// amount is no bound.
type Quota struct {
	Name          string
	MemMiB, Cores int64
}

// space is a namespace: its quotas, and what its shares hold. The sums are
// carried along, so that a decision doesn't add up all pods of the namespace.
type space struct {
	quotas []Quota // by name
	held   fit.Amount
	// grown are the pods that hold more than they asked for, grownMem and
	// grownCores how many do so of each resource.
	grown                map[*entry]struct{}
	grownMem, grownCores int
}

// QuotaRefusal is a pod that isn't placed because of its namespace's quota,
// though Kubernetes let it in: shares of the namespace have grown since they
// were made, and Kubernetes counts what they asked for then.
type QuotaRefusal struct {
	*fit.Refusal
	// Amount is what the pod would hold.
	Amount fit.Amount
}

func (r *QuotaRefusal) Error() string { return r.Detail }

// SetQuota takes in a bound of a namespace.
func (l *Ledger) SetQuota(namespace string, q Quota) {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.space(namespace)
	at, there := slices.BinarySearchFunc(s.quotas, q.Name, func(q Quota, name string) int { return strings.Compare(q.Name, name) })
	switch {
	case there && s.quotas[at] == q:
		return
	case there:
		s.quotas[at] = q
	default:
		s.quotas = slices.Insert(s.quotas, at, q)
	}
	l.relax(namespace, s)
}

// DropQuota takes in that a bound of a namespace is gone.
func (l *Ledger) DropQuota(namespace, name string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.spaces[namespace]
	if s == nil || !slices.ContainsFunc(s.quotas, func(q Quota) bool { return q.Name == name }) {
		return
	}
	l.relax(namespace, s)
	s.quotas = slices.DeleteFunc(s.quotas, func(q Quota) bool { return q.Name == name })
	l.tidy(namespace, s)
}

// space finds or makes a namespace. The lock is held.
func (l *Ledger) space(namespace string) *space {
	s := l.spaces[namespace]
	if s == nil {
		s = &space{grown: map[*entry]struct{}{}}
		l.spaces[namespace] = s
	}
	return s
}

// tidy forgets a namespace of which nothing is known any more. The lock is held.
func (l *Ledger) tidy(namespace string, s *space) {
	if s.held == (fit.Amount{}) && len(s.quotas) == 0 {
		delete(l.spaces, namespace)
	}
}

// relax notes that a namespace's quota may allow more than before. Where no
// share has grown it never refused anything. The lock is held.
func (l *Ledger) relax(namespace string, s *space) {
	if len(s.grown) > 0 && len(s.quotas) > 0 {
		l.relaxed[namespace] = struct{}{}
		l.tell()
	}
}

// TakeRelaxed returns the namespaces whose quota may allow more since the last
// call.
func (l *Ledger) TakeRelaxed() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var out []string
	for n := range l.relaxed {
		out = append(out, n)
	}
	clear(l.relaxed)
	slices.Sort(out)
	return out
}

// count brings the namespace's sums up to date with an entry. It is called when
// the entry comes or goes, and when its grant or state changes. The lock is held.
func (l *Ledger) count(e *entry) {
	var holds, asked fit.Amount
	if l.entries[e.ref.UID] == e && e.state != Releasing {
		holds = total(e.containers, e.grant)
		asked = holds
		if e.grant.Generation > 1 || e.before != nil {
			asked = e.asks()
			holds = holds.Max(e.had()).Max(e.inForce())
		}
	}
	if holds == e.holds && asked == e.asked {
		return
	}
	s := l.space(e.ref.Namespace)
	if holds.MemMiB < e.holds.MemMiB || holds.Cores < e.holds.Cores {
		l.relax(e.ref.Namespace, s)
	}
	s.add(e, -1)
	e.holds, e.asked = holds, asked
	s.add(e, 1)
	l.tidy(e.ref.Namespace, s)
}

// add takes an entry into the sums, or out of them.
func (s *space) add(e *entry, sign int) {
	s.held.MemMiB += int64(sign) * e.holds.MemMiB
	s.held.Cores += sign * e.holds.Cores
	s.held.Slots += sign * e.holds.Slots
	memory, cores := e.holds.MemMiB > e.asked.MemMiB, e.holds.Cores > e.asked.Cores
	if memory {
		s.grownMem += sign
	}
	if cores {
		s.grownCores += sign
	}
	delete(s.grown, e)
	if sign > 0 && (memory || cores) {
		s.grown[e] = struct{}{}
	}
}

// OverQuota says why a namespace may not hold so much more, nil if it may. The
// pod is left out of what the namespace holds.
func (l *Ledger) OverQuota(r Ref, more fit.Amount) *QuotaRefusal {
	l.mu.Lock()
	defer l.mu.Unlock()
	e := l.entries[r.UID]
	if e == nil {
		e = &entry{ref: r}
	}
	return l.overQuota(e, more)
}

// JudgeQuota is OverQuota for an ask at a place of a node.
func (l *Ledger) JudgeQuota(r Ref, ask *fit.Ask, n *fit.Node, p fit.Placement) *QuotaRefusal {
	cs := make([]Container, 0, len(ask.Containers))
	for i := range ask.Containers {
		cs = append(cs, containerOf(&ask.Containers[i]))
	}
	return l.OverQuota(r, total(cs, ask.Grant(n, p, r.UID)))
}

// overQuota checks what an entry shall hold against what its namespace may. As
// long as no share has grown, Kubernetes' own count at the pod's creation holds,
// and is all there is. The lock is held.
func (l *Ledger) overQuota(e *entry, more fit.Amount) *QuotaRefusal {
	s := l.spaces[e.ref.Namespace]
	if s == nil || len(s.grown) == 0 {
		return nil
	}
	for _, q := range s.quotas {
		for _, part := range [...]struct {
			resource          string
			bound, held, more int64
			grown             int
			of                func(fit.Amount) int64
		}{
			{api.ResourceMemory, q.MemMiB, s.held.MemMiB - e.holds.MemMiB, more.MemMiB, s.grownMem, func(a fit.Amount) int64 { return a.MemMiB }},
			{api.ResourceCores, q.Cores, int64(s.held.Cores - e.holds.Cores), int64(more.Cores), s.grownCores, func(a fit.Amount) int64 { return int64(a.Cores) }},
		} {
			if part.grown > 0 && part.bound >= 0 && part.more > 0 && part.held+part.more > part.bound {
				return &QuotaRefusal{Amount: more, Refusal: &fit.Refusal{Reason: fit.ReasonQuota, Card: -1,
					Detail: fmt.Sprintf("ResourceQuota %s/%s allows requests.%s of %d; the namespace's shares hold %d and the pod takes %d more; grown since they were made: %s",
						e.ref.Namespace, q.Name, part.resource, part.bound, part.held, part.more, s.names(part.of))}}
			}
		}
	}
	return nil
}

// names names the pods that grew in a resource, those that grew most first.
func (s *space) names(of func(fit.Amount) int64) string {
	var grown []*entry
	for e := range s.grown {
		if of(e.holds) > of(e.asked) {
			grown = append(grown, e)
		}
	}
	more := func(e *entry) int64 { return of(e.holds) - of(e.asked) }
	slices.SortFunc(grown, func(a, b *entry) int {
		return cmp.Or(cmp.Compare(more(b), more(a)), strings.Compare(a.ref.Name, b.ref.Name))
	})
	var b strings.Builder
	for i, e := range grown {
		if i == maxGrown {
			fmt.Fprintf(&b, " and %d more", len(grown)-i)
			break
		}
		if i > 0 {
			b.WriteString(", ")
		}
		fmt.Fprintf(&b, "%s (asked %d, holds %d)", e.ref.Name, of(e.asked), of(e.holds))
	}
	return b.String()
}

// quota checks a resized grant against what the namespace may hold. Kubernetes'
// own quota counts what pods asked for when they were made; here it is what
// grants hold, on each of their cards. The lock is held.
func (l *Ledger) quota(e *entry, next api.Grant) *ResizeRefusal {
	s := l.spaces[e.ref.Namespace]
	if s == nil {
		return nil
	}
	then := total(e.containers, next)
	for _, q := range s.quotas {
		for _, part := range [...]struct {
			resource               string
			bound, old, then, held int64
		}{
			{api.ResourceMemory, q.MemMiB, e.holds.MemMiB, then.MemMiB, s.held.MemMiB},
			{api.ResourceCores, q.Cores, int64(e.holds.Cores), int64(then.Cores), int64(s.held.Cores)},
		} {
			if more := part.then - part.old; part.bound >= 0 && more > 0 && part.held+more > part.bound {
				return refused(fit.ReasonQuota, "ResourceQuota %s/%s allows requests.%s of %d; the namespace's shares hold %d and the resize takes %d more",
					e.ref.Namespace, q.Name, part.resource, part.bound, part.held, more)
			}
		}
	}
	return nil
}

// had is what a grant that is being replaced holds.
func (e *entry) had() fit.Amount {
	if e.before == nil {
		return fit.Amount{}
	}
	return total(e.containers, *e.before)
}

// inForce is what the node still has in force of an earlier grant: should it be
// unable to take that away, the pod keeps it. A node changes all containers of a
// pod or none.
func (e *entry) inForce() fit.Amount {
	if !e.behind() {
		return fit.Amount{}
	}
	was := cloned(e.grant)
	for _, s := range e.node.report.slices[e.ref.UID] {
		cards := was.Containers[s.container]
		for i := range cards {
			if c := &cards[i]; c.Card == e.node.report.cards[s.card].uuid && s.generation < e.grant.Generation {
				c.MemMiB, c.Cores = s.amount.MemMiB, s.amount.Cores
			}
		}
	}
	return total(e.containers, was)
}

// asks is what the entry's shares would hold in the sizes that the pod's spec
// asks for. A size that can't be known, since no report shows the card, is taken
// to be what is granted.
func (e *entry) asks() fit.Amount {
	first := cloned(e.grant)
	for i := range e.containers {
		c := &e.containers[i]
		spec := fit.Container{MemMiB: c.MemMiB, MemPercent: c.MemPercent, Cores: c.Cores}
		for j := range first.Containers[c.Name] {
			card := &first.Containers[c.Name][j]
			if card.Mode != api.ModeVGPU {
				continue // these don't change their size
			}
			whole, known := e.cardMiB(card.Card)
			if known || c.MemMiB > 0 {
				a := spec.On(&fit.Card{MemMiB: whole})
				card.MemMiB, card.Cores = a.MemMiB, a.Cores
			}
		}
	}
	return total(e.containers, first)
}

// cardMiB is the memory of a card of the entry's node, as last reported.
func (e *entry) cardMiB(uuid string) (int64, bool) {
	if e.node.report == nil {
		return 0, false
	}
	at, ok := e.node.report.byUUID[uuid]
	if !ok {
		return 0, false
	}
	return e.node.report.cards[at].memMiB, true
}

// containerOf is a container of an ask.
func containerOf(c *fit.Container) Container {
	out := Container{Name: c.Name, Kind: c.Kind}
	if !c.Whole {
		out.MemMiB, out.MemPercent, out.Cores = c.MemMiB, c.MemPercent, c.Cores
	}
	return out
}

// total is the most that a pod's shares hold of all cards over the pod's life.
// Whole cards and replicas are not part of it: nothing of nvidia.com/gpumem asks for
// them.
func total(containers []Container, g api.Grant) fit.Amount {
	amount := func(of *Container, c *api.CardGrant) fit.Amount {
		a := fit.Amount{MemMiB: c.MemMiB, Cores: c.Cores, Slots: 1}
		if c.Mode != api.ModeVGPU && of.MemMiB == 0 && of.MemPercent == 0 {
			a.MemMiB = 0
		}
		if c.Mode != api.ModeVGPU && of.Cores == 0 {
			a.Cores = 0
		}
		return a
	}
	var sum fit.Amount
	if len(containers) == 1 { // nearly always, and without a map
		cards := g.Containers[containers[0].Name]
		for i := range cards {
			if cards[i].Mode.Share() {
				sum = sum.Plus(amount(&containers[0], &cards[i]))
			}
		}
		return sum
	}
	uses := map[string][]fit.Use{}
	for _, c := range containers {
		cards := g.Containers[c.Name]
		for i := range cards {
			if cards[i].Mode.Share() {
				uses[cards[i].Card] = append(uses[cards[i].Card], fit.Use{Kind: c.Kind, Amount: amount(&c, &cards[i])})
			}
		}
	}
	for _, u := range uses {
		sum = sum.Plus(fit.Peak(u))
	}
	return sum
}
