package ledger

import (
	"time"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/scheduler-extender/fit"
)

// State of an entry.
type State uint8

// States of an entry.
const (
	// Offered is decided, not written yet; it ends by itself.
	Offered State = iota
	// Bound is written to the API, or is being read from there.
	Bound
	// Releasing is a pod that ended or is gone while its node may still hold
	// its share.
	Releasing
)

func (s State) String() string {
	switch s {
	case Offered:
		return "offered"
	case Bound:
		return "bound"
	}
	return "releasing"
}

// Ref names a pod.
type Ref struct {
	UID, Namespace, Name string
}

// Container is a container of a pod in the pod's order, init containers and
// sidecars first.
type Container struct {
	Name string
	Kind api.ContainerKind
	// What the pod's spec asks for on each card: memory in MiB or in percent of
	// the card's, all of it where both are zero, and compute in percent.
	MemMiB            int64
	MemPercent, Cores int
}

// entry is what one pod holds on one node.
type entry struct {
	ref        Ref
	node       *Node
	state      State
	grant      api.Grant
	containers []Container

	// owner is the UID of the object that the pod is a replica of, or empty.
	owner string

	// before is the grant that a resize follows, from the decision until an
	// event shows the new one; meanwhile the larger of both counts. writing says
	// that the write is in flight.
	before  *api.Grant
	writing bool

	// holds and asked are what the namespace's sums have of the entry.
	holds, asked fit.Amount

	// host is what the pod takes of the node beside cards, which counts until the API
	// shows the pod there. It isn't known of entries that were read from the API.
	host fit.Host

	// Offers only.
	key     string // of the ask that was placed
	ask     *fit.Ask
	prefer  fit.Prefer
	seen    *report       // the node's, when the offer was last found to stand
	allowed []*Node       // other nodes that the scheduler may choose
	stays   time.Duration // for how long it waits for its bind
	binding bool          // a write is in flight; the offer doesn't end meanwhile
	gone    bool          // the pod vanished while a write was in flight
	open    bool          // a write of it may have had an effect

	// until is the end of an offer, of waiting for the API to show a bound
	// pod, or of the grace for a pod that left before any report showed it.
	until     time.Time
	confirmed bool // the API showed the pod bound
	started   bool // a container of it ran
	reported  bool // a report showed a slice of it
}

// use calls take for each card that the entry holds something of, with the mode of
// its shares there, which is empty where it has none. Entries hold each card once,
// whatever the number of containers on it.
func (e *entry) use(r *report, take func(card int, a fit.Amount, whole bool, mode api.Mode)) {
	slices := r.slices[e.ref.UID]
	granted := e.state != Releasing || !e.until.IsZero()
	// Cards in the order of the node; a card is looked at once.
	for card := range r.cards {
		var room [8]fit.Use
		uses, whole := room[:0], false
		var mode api.Mode
		uuid := r.cards[card].uuid
		for _, c := range e.containers {
			var amount fit.Amount
			on := false
			count := func(grants []api.CardGrant) {
				for i := range grants {
					g := &grants[i]
					if g.Card != uuid {
						continue
					}
					on = true
					if g.Mode.Share() {
						mode = fit.JoinModes(mode, g.Mode)
						amount = amount.Max(fit.Amount{MemMiB: g.MemMiB, Cores: g.Cores, Slots: 1})
						continue
					}
					whole = true
					amount = fit.Amount{MemMiB: r.cards[card].memMiB, Cores: 100, Slots: 1}
				}
			}
			if granted {
				count(e.grant.Containers[c.Name])
				if e.before != nil {
					count(e.before.Containers[c.Name])
				}
			}
			for i := range slices {
				if s := &slices[i]; s.card == card && s.container == c.Name {
					on, whole = true, whole || s.whole
					mode = fit.JoinModes(mode, s.mode)
					amount = amount.Max(s.amount)
				}
			}
			if on {
				uses = append(uses, fit.Use{Kind: c.Kind, Amount: amount})
			}
		}
		// Containers that the pod's spec doesn't have, for the sake of truth.
		for i := range slices {
			if s := &slices[i]; s.card == card && !e.has(s.container) {
				uses = append(uses, fit.Use{Kind: api.App, Amount: s.amount})
				whole = whole || s.whole
				mode = fit.JoinModes(mode, s.mode)
			}
		}
		if len(uses) > 0 {
			take(card, fit.Peak(uses), whole, mode)
		}
	}
}

// behind reports whether the node still has an earlier grant of the pod in force.
func (e *entry) behind() bool {
	if e.node.report == nil {
		return false
	}
	for _, s := range e.node.report.slices[e.ref.UID] {
		if s.generation < e.grant.Generation {
			return true
		}
	}
	return false
}

func (e *entry) has(container string) bool {
	for _, c := range e.containers {
		if c.Name == container {
			return true
		}
	}
	return false
}

// over reports whether nothing is left of an entry that is releasing.
func (e *entry) over(now time.Time) bool {
	if e.state != Releasing {
		return false
	}
	if e.node.info.OutOfService {
		return true
	}
	if r := e.node.report; r != nil && e.node.known && len(r.slices[e.ref.UID]) > 0 {
		return false
	}
	return e.until.IsZero() || !now.Before(e.until)
}
