package fit

// Miss says why the container at position ci, alone of its pod, doesn't fit on
// the card at position at; nil where it does. It is for explaining card by
// card what Fit says of the node.
func (a *Ask) Miss(n *Node, at, ci int) *Refusal {
	card, c := &n.Cards[at], &a.Containers[ci]
	if card.Blocked == "" && a.admits(card) == "" && fits(card, c, c.On(card)) {
		return nil
	}
	m := miss(card, at, c, a)
	m.Container = ci
	return m
}

// Missing is how much more would have to be free, in the unit of the reason; 0
// where that isn't what is wrong or would not help.
func (r *Refusal) Missing() int64 {
	if r.Never {
		return 0
	}
	switch r.Reason {
	case ReasonMemory, ReasonCores, ReasonSlots:
		return max(0, r.Asked-r.Free)
	}
	return 0
}

// OfTenants reports whether other pods leaving the card could help.
func (r *Refusal) OfTenants() bool {
	return r.Reason != ReasonIsolation && r.Reason != ReasonMPSDown
}

// Sentence is the refusal in words that name neither node nor card.
func (r *Refusal) Sentence() string {
	if r.Detail != "" {
		return r.Detail
	}
	return r.sentence(nil)
}
