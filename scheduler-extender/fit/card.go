package fit

import "github.com/carve-gpu/carve/api"

// allCores is the compute of one card in percent.
const allCores = 100

// Amount is a part of one card.
type Amount struct {
	MemMiB int64
	Cores  int // percent of the card's compute
	Slots  int // containers
}

// Plus adds two amounts that are held at the same time.
func (a Amount) Plus(b Amount) Amount {
	return Amount{a.MemMiB + b.MemMiB, a.Cores + b.Cores, a.Slots + b.Slots}
}

// Max joins two amounts that are held one after the other.
func (a Amount) Max(b Amount) Amount {
	return Amount{max(a.MemMiB, b.MemMiB), max(a.Cores, b.Cores), max(a.Slots, b.Slots)}
}

// Card is one card as the ledger sees it at one moment.
type Card struct {
	UUID, Model string
	Index       int   // the driver's index, for people
	MemMiB      int64 // what can be handed out
	Slots       int   // how many containers may share the card
	// Used is what others hold. It may exceed the capacity: a node that
	// shrank owes the difference.
	Used Amount
	// Touched is true while anything at all is on the card, Whole while one
	// pod holds it exclusively.
	Touched, Whole bool
	// Mode is that of the pods that share it, empty while none does.
	Mode api.Mode
	// Modes says in which further ones it can be given, nil: in none.
	Modes *Modes
	// Blocked says why the card takes nothing new; empty if it does.
	Blocked Reason
}

// Free is what can still be taken; no part of it is negative.
func (c *Card) Free() Amount {
	if c.Whole {
		return Amount{}
	}
	return Amount{
		max(0, c.MemMiB-c.Used.MemMiB),
		max(0, allCores-c.Used.Cores),
		max(0, c.Slots-c.Used.Slots),
	}
}

// Node is the cards of one node at one moment.
type Node struct {
	Name  string
	Cards []Card
	// Host is what the node has free beside cards, where HostKnown says so; otherwise
	// kube-scheduler alone looks at that.
	Host      Host
	HostKnown bool
	// Blocked says why the node takes nothing new; empty if it does. Why is
	// the sentence for people where the reason's own would say too little.
	Blocked Reason
	Why     string
}

// Use is what one container holds of one card.
type Use struct {
	Kind api.ContainerKind
	Amount
}

// Peak is the most that a pod holds of one card over its life. Uses are in the
// order of the pod, init containers and sidecars first; a container that isn't
// on the card has no use in the list.
//
// Init containers run one after another, beside the sidecars that started
// before them; app containers run together, beside all sidecars. Each of
// memory, compute and slots has its own peak.
func Peak(uses []Use) Amount {
	var sidecars, apps, peak Amount
	for _, u := range uses {
		switch u.Kind {
		case api.Init:
			peak = peak.Max(sidecars.Plus(u.Amount))
		case api.Sidecar:
			sidecars = sidecars.Plus(u.Amount)
		default:
			apps = apps.Plus(u.Amount)
		}
	}
	return peak.Max(sidecars.Plus(apps))
}
