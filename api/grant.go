package api

import (
	"encoding/json"
	"errors"
	"fmt"
)

// GrantVersion is the version of the grant's format. It grows when a field is
// added that an older agent must not overlook; other fields may be added
// freely, since readers ignore what they don't know. (An agent that overlooks managed
// and oversell charges managed memory in full and refuses what is beyond the share, so
// that nobody gets more than was granted; its report lacks them, which
// `carve explain pod` shows.)
const GrantVersion = 1

// maxGrantBytes bounds what is read: the API server allows 256 KiB for all
// annotations of an object, and the largest sensible grant is far below this.
const maxGrantBytes = 64 << 10

// Grant is what a pod was given, by container name. It is written by the
// extender only, in the same API write that binds the pod to its node.
type Grant struct {
	Version int    `json:"v"`
	UID     string `json:"uid"`  // the pod's UID
	Node    string `json:"node"` // the node that the cards are on
	// Generation starts at 1 and grows by one with each resize.
	Generation int `json:"gen"`
	// Containers maps a container's name to its cards, in the order in which
	// the container sees them.
	Containers map[string][]CardGrant `json:"containers"`
}

// CardGrant is one card, or one MIG instance on it, for one container.
type CardGrant struct {
	Card string `json:"card"` // UUID of the card (of the parent for MIG)
	// MemMiB and Cores are the share; both 0 for a whole card. MemMiB is above 0 in
	// the modes that have shares. In mode mps Cores is a cap, 0 for none; in mode
	// timeslice both are counted only.
	MemMiB int64 `json:"memMiB,omitempty"`
	Cores  int   `json:"cores,omitempty"`
	Mode   Mode  `json:"mode"`
	// Fixed is true for a hard compute cap, Low for low compute priority.
	Fixed bool `json:"fixed,omitempty"`
	Low   bool `json:"low,omitempty"`
	// Managed and Oversell are the pod's policies on memory that needn't be on the
	// card; empty is ManagedCharge, and no overselling. Of shares only.
	Managed  ManagedMemory `json:"managed,omitempty"`
	Oversell Oversell      `json:"oversell,omitempty"`
	// Profile and Start describe a MIG instance and its first memory unit.
	Profile string `json:"profile,omitempty"`
	Start   *int   `json:"start,omitempty"`
}

// ErrNoGrant says that a pod carries no grant.
var ErrNoGrant = errors.New("the pod carries no grant")

// Encode writes the grant as the annotation's value. The result is the same
// for equal grants. It is an error to encode what Validate refuses.
func (g Grant) Encode() (string, error) {
	if err := g.Validate(); err != nil {
		return "", fmt.Errorf("encode grant: %w", err)
	}
	b, err := json.Marshal(g)
	if err != nil {
		return "", fmt.Errorf("encode grant: %w", err)
	}
	return string(b), nil
}

// DecodeGrant reads an annotation's value. An empty string is ErrNoGrant. It
// checks form and ranges; whether the grant is meant for this pod and node and
// was written by the extender is for the caller to check.
func DecodeGrant(s string) (Grant, error) {
	var g Grant
	if s == "" {
		return g, ErrNoGrant
	}
	if len(s) > maxGrantBytes {
		return g, fmt.Errorf("decode grant: %d bytes, allowed are %d", len(s), maxGrantBytes)
	}
	if err := json.Unmarshal([]byte(s), &g); err != nil {
		return Grant{}, fmt.Errorf("decode grant: %w", err)
	}
	if err := g.Validate(); err != nil {
		return Grant{}, fmt.Errorf("decode grant: %w", err)
	}
	return g, nil
}

// Validate checks form and ranges.
func (g Grant) Validate() error {
	switch {
	case g.Version != GrantVersion:
		return fmt.Errorf("version %d, this build reads %d", g.Version, GrantVersion)
	case g.UID == "":
		return errors.New("no pod UID")
	case g.Node == "":
		return errors.New("no node")
	case g.Generation < 1:
		return fmt.Errorf("generation %d, allowed is 1 and up", g.Generation)
	case len(g.Containers) == 0:
		return errors.New("no containers")
	}
	for name, cards := range g.Containers {
		if name == "" {
			return errors.New("a container without a name")
		}
		if len(cards) == 0 || len(cards) > MaxCardsPerContainer {
			return fmt.Errorf("container %s: %d cards, allowed are 1 to %d", clip(name), len(cards), MaxCardsPerContainer)
		}
		seen := map[string]bool{}
		for _, c := range cards {
			if c.Mode == ModeMPS && len(cards) > 1 {
				return fmt.Errorf("container %s: %d cards, one of them in mode mps: a process reaches one MPS daemon, and with it one card", clip(name), len(cards))
			}
			if err := c.validate(); err != nil {
				return fmt.Errorf("container %s: %w", clip(name), err)
			}
			if c.Mode != ModeMIG && seen[c.Card] {
				return fmt.Errorf("container %s: card %s twice", clip(name), clip(c.Card))
			}
			seen[c.Card] = true
		}
	}
	return nil
}

func (c CardGrant) validate() error {
	switch {
	case c.Card == "" || len(c.Card) > 80:
		return fmt.Errorf("card %q is not a UUID", clip(c.Card))
	case !c.Mode.valid():
		return fmt.Errorf("card %s: unknown mode %q", c.Card, clip(string(c.Mode)))
	case c.MemMiB < 0 || c.MemMiB > MaxMemoryMiB:
		return fmt.Errorf("card %s: memory of %d MiB", c.Card, c.MemMiB)
	case c.Cores < 0 || c.Cores > 100:
		return fmt.Errorf("card %s: %d percent of compute", c.Card, c.Cores)
	case c.Mode.Share() && c.MemMiB == 0:
		return fmt.Errorf("card %s: a share of mode %s without memory", c.Card, c.Mode)
	case c.Managed != "" && c.Managed != ManagedCount && c.Managed != ManagedForbid:
		return fmt.Errorf("card %s: unknown policy %q on managed memory", c.Card, clip(string(c.Managed)))
	case c.Oversell != "" && c.Oversell != OversellHost:
		return fmt.Errorf("card %s: unknown way %q to oversell memory", c.Card, clip(string(c.Oversell)))
	case c.Oversell != "" && c.Managed == ManagedForbid:
		return fmt.Errorf("card %s: oversold, which takes managed memory, and managed memory is forbidden", c.Card)
	case c.Mode != ModeVGPU && c.Mode != ModeMPS && (c.Managed != "" || c.Oversell != ""):
		return fmt.Errorf("card %s: a policy on memory beyond the share in mode %s, which holds no program to a share", c.Card, c.Mode)
	case c.Mode == ModeMIG && (c.Profile == "" || c.Start == nil || *c.Start < 0 || *c.Start > 64):
		return fmt.Errorf("card %s: an instance needs a profile and a start", c.Card)
	}
	return nil
}
