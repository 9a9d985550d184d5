package main

import (
	"errors"
	"fmt"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/scheduler-extender/fit"
	"github.com/carve-gpu/carve/scheduler-extender/ledger"
	"github.com/carve-gpu/carve/vgpu/agent"
)

// What to do with pods that came past the extender.
const (
	pastRefuse = "refuse"
	pastLocal  = "local"
)

// pastExtender reads --pods-past-extender.
func pastExtender(value string) (func(agent.LocalPod) (api.Grant, error), error) {
	switch value {
	case pastRefuse:
		return nil, nil
	case pastLocal:
		return placeLocally, nil
	}
	return nil, fmt.Errorf("--pods-past-extender %q: allowed are %s, %s", value, pastRefuse, pastLocal)
}

// placeLocally is the extender's arithmetic on one node, with the first cards
// that fit.
func placeLocally(p agent.LocalPod) (api.Grant, error) {
	n := &fit.Node{Name: p.Node}
	ask, refusal := fit.NewAsk(p.Request)
	if refusal != nil {
		return api.Grant{}, errors.New(refusal.Message(n, nil, ""))
	}
	for _, r := range p.Cards {
		c := fit.Card{UUID: r.UUID, Model: r.Model, Index: r.Index, MemMiB: r.MemMiB, Slots: r.Slots,
			Used:    fit.Amount{MemMiB: r.UsedMiB, Cores: r.UsedCores, Slots: r.UsedSlots},
			Touched: r.Touched, Whole: r.Whole, Mode: r.Mode, Modes: ledger.Modes(r.Modes, r.MPSClients, r.Sharing, nil)}
		if r.Whole {
			c.Used.MemMiB, c.Used.Cores = c.MemMiB, 100
		}
		switch {
		case r.Unfit:
			c.Blocked = fit.ReasonUnhealthy
		case r.Cordoned:
			c.Blocked = fit.ReasonCordoned
		case r.MIG:
			c.Blocked = fit.ReasonMIGMode
		}
		n.Cards = append(n.Cards, c)
	}
	place, refusal := fit.Fit(n, ask, func(*fit.Card, fit.Amount) int64 { return 0 })
	if refusal != nil {
		return api.Grant{}, errors.New(refusal.Message(n, ask, ""))
	}
	return ask.Grant(n, place, p.UID), nil
}
