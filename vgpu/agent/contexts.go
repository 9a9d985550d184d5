package agent

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"

	"github.com/carve-gpu/carve/vgpu/region"
)

const (
	// contextGuess is what the library takes for a context where nobody has told
	// (CARVE_CONTEXT_GUESS_BYTES in vgpu/lib/src/contexts.h).
	contextGuess = 512 << 20
	// contextMost is more than any driver takes.
	contextMost = 4 << 30
	// contextKinds bounds the table: drivers come and go on a node.
	contextKinds = 64

	contextsVersion = 1
)

// contextCosts is what a context costs, by driver version and model of card: the
// least that was seen of a process that had nothing else. No process can make the
// driver say less than a context costs. More, it can: by memory that it took past
// its library. So what is more than the library's own guess, and would keep others
// from starting, is believed once two namespaces have shown it.
type contextCosts struct {
	path string

	mu    sync.Mutex
	costs map[string]uint64
	// claims are figures above the guess that one namespace alone has shown.
	claims map[string]claim
}

type claim struct {
	namespace string
	bytes     uint64
}

// contextFile is how the table is kept.
type contextFile struct {
	Version int               `json:"v"`
	Costs   map[string]uint64 `json:"costs"`
}

func contextKind(driver, model string) string { return driver + "|" + model }

// recallContexts reads the table of the process before. One that is damaged is
// forgotten: it is learnt again within seconds.
func recallContexts(path string) (*contextCosts, error) {
	c := &contextCosts{path: path, costs: map[string]uint64{}, claims: map[string]claim{}}
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return c, nil
	}
	var f contextFile
	if err == nil {
		err = json.Unmarshal(b, &f)
	}
	if err == nil && f.Version != contextsVersion {
		err = fmt.Errorf("version %d, want %d", f.Version, contextsVersion)
	}
	if err == nil && len(f.Costs) > contextKinds {
		err = fmt.Errorf("%d entries, want at most %d", len(f.Costs), contextKinds)
	}
	if err != nil {
		return c, fmt.Errorf("read %s: %w", path, err)
	}
	for kind, bytes := range f.Costs {
		if bytes == 0 || bytes > contextMost {
			c.costs = map[string]uint64{}
			return c, fmt.Errorf("read %s: %d bytes for %q: want 1 to %d", path, bytes, kind, uint64(contextMost))
		}
		c.costs[kind] = bytes
	}
	return c, nil
}

// of is what a context costs, 0 where it isn't known.
func (c *contextCosts) of(driver, model string) uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.costs[contextKind(driver, model)]
}

// learn takes in what a process of a namespace has shown, and reports whether the
// table changed.
func (c *contextCosts) learn(driver, model, namespace string, bytes uint64) bool {
	if bytes == 0 || bytes > contextMost {
		return false
	}
	kind := contextKind(driver, model)
	c.mu.Lock()
	defer c.mu.Unlock()
	have, known := c.costs[kind]
	if known && bytes >= have {
		return false
	}
	if bytes > contextGuess {
		was, claimed := c.claims[kind]
		if !claimed || was.namespace == namespace {
			if !claimed || bytes < was.bytes {
				c.claims[kind] = claim{namespace, bytes}
			}
			return false
		}
		// The smaller of what two have shown is no less than a context costs.
		bytes = min(bytes, was.bytes)
		delete(c.claims, kind)
	}
	if !known && len(c.costs) >= contextKinds {
		// Of drivers that this node had once.
		c.costs = map[string]uint64{}
	}
	c.costs[kind] = bytes
	return true
}

// file is the table as it is kept.
func (c *contextCosts) file() contextFile {
	c.mu.Lock()
	defer c.mu.Unlock()
	f := contextFile{contextsVersion, make(map[string]uint64, len(c.costs))}
	for k, v := range c.costs {
		f.Costs[k] = v
	}
	return f
}

// contextsFile is where the table is kept for the next start.
func contextsFile(stateDir string) string { return filepath.Join(stateDir, "contexts.json") }

// factsOf is what is known of a card of this node.
func (a *Agent) factsOf(card string) cardFacts {
	a.mu.Lock()
	driver := a.hardware.inventory.DriverVersion
	c := a.hardware.cards()[card]
	a.mu.Unlock()
	return cardFacts{a.contexts.of(driver, c.Model), c.Multiprocessors}
}

// learnContexts looks for processes that have nothing but their context on a card.
// One is believed if it has stood still since the sample before: a context that is
// being made costs less for a moment.
func (r *reaper) learnContexts(s share, card int, before, after region.Usage, holders []holder, seen map[owner]uint64) {
	if s.mps {
		return // part of what a context costs is the server's
	}
	was := map[slotKey]region.CardUsage{}
	for _, slot := range before.Slots {
		was[keyOf(slot)] = slot.Cards[card]
	}
	for _, h := range holders {
		slots := owned(after.Slots, []holder{h})
		if len(slots) != 1 || slots[0].State != region.SlotLive {
			continue
		}
		c := slots[0].Cards[card]
		if c.ContextBytes == 0 || c.UsedBytes != c.ContextBytes || c.PendingBytes != 0 || c.Allocations != 0 || !still(was[keyOf(slots[0])], c) {
			continue
		}
		o := s.owner(slots[0])
		seen[o] = h.bytes
		if r.samples.contexts[o] == h.bytes {
			r.learnContext(s, s.cards[card], h.bytes)
		}
	}
}

// learnContext takes in what one process has shown, and has it published.
func (a *Agent) learnContext(s share, card string, bytes uint64) {
	a.mu.Lock()
	driver := a.hardware.inventory.DriverVersion
	model := a.hardware.cards()[card].Model
	namespace := ""
	if h := a.held[s.uid]; h != nil {
		namespace = h.Namespace
	}
	a.mu.Unlock()
	if driver == "" || model == "" || namespace == "" || !a.contexts.learn(driver, model, namespace, bytes) {
		return
	}
	a.Log.Info("learnt what a context costs", "driver", driver, "model", model, "bytes", bytes)
	a.remember(contextsFile(a.StateDir), a.contexts.file())
	a.renewLimits()
}

// renewLimits has all limits files written anew, where what stands in them isn't
// what should. Each pod's are written by who works on that pod, so that a resize
// isn't undone.
func (a *Agent) renewLimits() {
	a.mu.Lock()
	defer a.mu.Unlock()
	for uid, h := range a.held {
		h.renew = true
		a.queue.Add(uid)
	}
}

// renew writes a pod's limits files anew.
func (a *Agent) renew(h *holding, r record) error {
	a.mu.Lock()
	h.renew = false // what is learnt from here on comes again
	a.mu.Unlock()
	err := a.prepareFiles(r)
	if err != nil {
		a.mu.Lock()
		h.renew = true
		a.mu.Unlock()
	}
	return err
}
