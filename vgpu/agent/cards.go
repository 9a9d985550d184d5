package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/carve-gpu/carve/api/v1alpha1"
	"github.com/carve-gpu/carve/vgpu/gpu"
)

// inventoryEvery is how often the cards are looked at. Their events are a
// later matter; this finds a lost card before the next pod is placed, mostly.
const inventoryEvery = 5 * time.Second

// hardwareState is what is known of the cards.
type hardwareState struct {
	door Hardware
	// known is true once the driver has listed the cards.
	known bool
	// asked is true once the driver has been asked, whatever it said.
	asked bool
	// fault says why the driver can't be read now.
	fault     string
	inventory gpu.Inventory
	// since is when a card's state last changed, by UUID.
	since map[string]cardState
	nodes map[string]gpu.DeviceNode
	// driver is what every container with a card gets; nil until it was found.
	driver *Driver
}

// Driver is the driver's part of what a container gets.
type Driver struct {
	Files   gpu.Files
	Control []gpu.DeviceNode
	Installed
	// SoftwareState is the software GPU's state directory, empty with a real
	// driver.
	SoftwareState string
}

// Driver gives what every container with a card gets. It is zero until Slice
// returns a slice for the first time.
func (a *Agent) Driver() Driver {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.hardware.driver == nil {
		return Driver{}
	}
	return *a.hardware.driver
}

// findDriver looks for the driver's files when the driver changed, and for its
// device nodes each time: some appear when a module is loaded on first use.
func (a *Agent) findDriver(version string) {
	a.mu.Lock()
	have := a.hardware.driver
	same := have != nil && a.hardware.inventory.DriverVersion == version
	a.mu.Unlock()
	var next Driver
	var err error
	if same {
		next.Files = have.Files
	} else {
		next.Files, err = a.Root.DriverFiles()
	}
	if err == nil {
		next.Control, err = a.Root.ControlNodes()
	}
	if err != nil {
		a.Log.Error("the driver's files can't be found", "error", err)
		return
	}
	next.Installed = a.twinned(next.Files, version)
	if err := a.linkDevices(next.Control); err != nil {
		a.Log.Warn("systemd may not find the driver's devices: their links in /dev/char can't be made", "error", err)
	}
	if a.Software {
		next.SoftwareState = a.Root.SoftwareState()
	}
	a.mu.Lock()
	a.hardware.driver = &next
	a.mu.Unlock()
}

type cardState struct {
	fault string
	at    time.Time
}

// cards are the known cards by UUID.
func (h hardwareState) cards() map[string]gpu.Card {
	m := make(map[string]gpu.Card, len(h.inventory.Cards))
	for _, c := range h.inventory.Cards {
		m[c.UUID] = c
	}
	return m
}

func (a *Agent) hardwareReady() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.hardware.known
}

// lastCards is where the inventory is kept for the next start. With it, an
// agent whose driver doesn't answer still counts the same slots and knows the
// same cards, so that nothing that runs is turned away.
func (a *Agent) lastCards() string { return filepath.Join(a.StateDir, "cards.json") }

// watchCards keeps the inventory until ctx ends.
func (a *Agent) watchCards(ctx context.Context) {
	tick := time.NewTicker(inventoryEvery)
	defer tick.Stop()
	for {
		a.readCards()
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

func (a *Agent) readCards() {
	held := a.heldByMPS()
	inventory, err := a.inventory()
	defer a.cardsAsked()
	if err != nil {
		a.mu.Lock()
		said := a.hardware.fault == err.Error()
		a.hardware.fault = err.Error()
		inventory = a.hardware.inventory
		a.mu.Unlock()
		if !said {
			a.Log.Error("the cards can't be read", "error", err)
		}
		// What is known stays, and none of it can be used.
		cards := append([]gpu.Card{}, inventory.Cards...)
		for i := range cards {
			cards[i].Fault = err.Error()
		}
		inventory.Cards = cards
		a.setCards(inventory, false)
		return
	}
	a.judgeModes(inventory.Cards, held)
	a.findDriver(inventory.DriverVersion)
	a.lookAtLayers(inventory.Cards)
	a.setCards(inventory, true)
}

// cardsAsked lets the report be written.
func (a *Agent) cardsAsked() {
	a.mu.Lock()
	first := !a.hardware.asked
	a.hardware.asked = true
	a.mu.Unlock()
	if first {
		a.report()
	}
}

// inventory opens the driver if it isn't open and reads the cards.
func (a *Agent) inventory() (gpu.Inventory, error) {
	a.mu.Lock()
	door := a.hardware.door
	a.mu.Unlock()
	if door == nil {
		var err error
		if door, err = a.OpenHardware(); err != nil {
			return gpu.Inventory{}, err
		}
		a.mu.Lock()
		a.hardware.door = door
		a.mu.Unlock()
	}
	return door.Inventory()
}

// setCards publishes an inventory.
func (a *Agent) setCards(inventory gpu.Inventory, fresh bool) {
	nodes := map[string]gpu.DeviceNode{}
	for i, c := range inventory.Cards {
		n, err := a.Root.CardNode(c.Minor)
		if err != nil {
			if c.Fault == "" {
				inventory.Cards[i].Fault = err.Error()
			}
			continue
		}
		nodes[c.UUID] = n
	}
	if fresh {
		if err := a.linkDevices(slices.Collect(maps.Values(nodes))); err != nil {
			a.Log.Warn("systemd may not find the cards' devices: their links in /dev/char can't be made", "error", err)
		}
	}
	a.mu.Lock()
	h := &a.hardware
	first := fresh && !h.known
	changed := !sameCards(h.inventory, inventory)
	was := map[string]cardState{}
	for uuid, s := range h.since {
		was[uuid] = s
	}
	h.since = map[string]cardState{}
	var turned []gpu.Card
	for _, c := range inventory.Cards {
		s, ok := was[c.UUID]
		if !ok || s.fault != c.Fault {
			s = cardState{c.Fault, time.Now()}
			if ok || c.Fault != "" {
				turned = append(turned, c)
			}
		}
		h.since[c.UUID] = s
	}
	h.inventory, h.nodes = inventory, nodes
	if fresh {
		h.known, h.fault = true, ""
	}
	a.wake()
	a.mu.Unlock()
	for _, c := range turned {
		a.Log.Warn("card changed state", "card", c.UUID, "index", c.Index, "fault", c.Fault)
	}
	if !changed && !first {
		return
	}
	for _, f := range inventory.Faults {
		a.Log.Error("a card can't be named", "fault", f)
	}
	a.Log.Info("cards", "count", len(inventory.Cards), "driver", inventory.DriverVersion)
	if fresh {
		a.rememberCards(inventory)
	}
	a.slotsChanged()
	a.renewLimits() // a context costs something else with another driver
	a.queueAll()
	a.report()
}

// slotsChanged tells the device plugin how many slots there are. Lost cards
// count: slots are card-neutral, and fewer of them would turn away pods that
// hold a grant for another card.
func (a *Agent) slotsChanged() {
	select {
	case a.resized <- struct{}{}:
	default:
	}
	a.tellSlots()
}

func sameCards(a, b gpu.Inventory) bool {
	x, errX := json.Marshal(a)
	y, errY := json.Marshal(b)
	return errX == nil && errY == nil && string(x) == string(y)
}

func (a *Agent) rememberCards(inventory gpu.Inventory) { a.remember(a.lastCards(), inventory) }

// remember writes what the next start should know. Losing it does no harm.
func (a *Agent) remember(path string, v any) {
	b, err := json.Marshal(v)
	if err == nil {
		tmp := path + ".new"
		if err = os.WriteFile(tmp, b, 0o600); err == nil {
			err = os.Rename(tmp, path)
		}
	}
	if err != nil {
		a.Log.Warn("something can't be remembered for the next start", "file", path, "error", err)
	}
}

// lastSlots is where the operator's number of slots is kept for the next start.
func (a *Agent) lastSlots() string { return filepath.Join(a.StateDir, "slots.json") }

// recallCards takes over what an earlier process knew. Nothing
// is reported of them until the driver has been asked.
func (a *Agent) recallCards() {
	if b, err := os.ReadFile(a.lastSlots()); err == nil {
		var slots int32
		if json.Unmarshal(b, &slots) == nil && slots > 0 {
			a.wishedSlots = slots
		}
	}
	b, err := os.ReadFile(a.lastCards())
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	var inventory gpu.Inventory
	if err == nil {
		err = json.Unmarshal(b, &inventory)
	}
	if err != nil {
		a.Log.Warn("the cards of the last start can't be recalled", "error", fmt.Errorf("read %s: %w", a.lastCards(), err))
		return
	}
	a.setCards(inventory, false)
}

// health is a card's state for the report.
func (h hardwareState) health(c gpu.Card) v1alpha1.Health {
	state := v1alpha1.Healthy
	switch {
	case c.Lost:
		state = v1alpha1.Lost
	case c.Fault != "":
		state = v1alpha1.Quarantined
	}
	out := v1alpha1.Health{State: state, Reason: c.Fault}
	if s := h.since[c.UUID]; state != v1alpha1.Healthy && !s.at.IsZero() {
		out.Since = seconds(s.at)
	}
	return out
}
