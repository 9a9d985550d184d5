package nvml

import (
	"fmt"
	"maps"
	"math/bits"
	"sort"
	"strconv"
	"strings"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/carve-gpu/carve/vgpu/gpu"
)

// Inventory reads all cards. A card that fails or hangs is returned as it was
// last known, with a Fault; only a driver that doesn't answer at all is an
// error.
func (d *Driver) Inventory() (gpu.Inventory, error) {
	inv := gpu.Inventory{DriverVersion: d.version}
	count, err := bounded(d, "driver", func() (int, error) {
		n, r := d.lib.DeviceGetCount()
		if r != nvml.SUCCESS {
			return 0, fault("count cards", r)
		}
		return n, nil
	})
	if err != nil {
		return inv, fmt.Errorf("read cards: %w", err)
	}
	d.mu.Lock()
	known := maps.Clone(d.known)
	d.mu.Unlock()
	failed := map[int]error{}
	for i := range count {
		c, err := bounded(d, strconv.Itoa(i), func() (gpu.Card, error) { return d.card(i) })
		if err != nil {
			failed[i] = err
			continue
		}
		delete(known, c.UUID)
		inv.Cards = append(inv.Cards, c)
	}
	// What is left of known was there before. Where an index fails, it is most
	// likely the card that had it; a card that the driver doesn't list any more
	// fell off the bus.
	for i, err := range failed {
		found := false
		for uuid, c := range known {
			if c.Index == i {
				c.Fault, c.Lost = err.Error(), lost(err)
				inv.Cards = append(inv.Cards, c)
				delete(known, uuid)
				found = true
				break
			}
		}
		if !found {
			inv.Faults = append(inv.Faults, fmt.Sprintf("card %d: %v", i, err))
		}
	}
	for _, c := range known {
		c.Fault, c.Lost = "the driver doesn't list the card any more", true
		inv.Cards = append(inv.Cards, c)
	}
	sort.Slice(inv.Cards, func(a, b int) bool {
		x, y := inv.Cards[a], inv.Cards[b]
		return x.Index < y.Index || x.Index == y.Index && x.UUID < y.UUID
	})
	sort.Strings(inv.Faults)
	d.connect(inv.Cards)
	d.mu.Lock()
	for _, c := range inv.Cards {
		c.Fault, c.Lost = "", false
		d.known[c.UUID] = c
	}
	d.mu.Unlock()
	return inv, nil
}

// card reads one card.
func (d *Driver) card(index int) (gpu.Card, error) {
	c := gpu.Card{Index: index, NUMANode: -1}
	dev, r := d.lib.DeviceGetHandleByIndex(index)
	if r != nvml.SUCCESS {
		return c, fault("open", r)
	}
	if c.UUID, r = dev.GetUUID(); r != nvml.SUCCESS {
		return c, fault("read UUID", r)
	}
	if c.Model, r = dev.GetName(); r != nvml.SUCCESS {
		return c, fault("read name", r)
	}
	if c.Minor, r = dev.GetMinorNumber(); r != nvml.SUCCESS {
		return c, fault("read minor number", r)
	}
	pci, r := dev.GetPciInfo()
	if r != nvml.SUCCESS {
		return c, fault("read PCI address", r)
	}
	c.PCIBusID = busID(pci)
	c.Multiprocessors = d.multiprocessors(dev)
	if major, _, r := dev.GetCudaComputeCapability(); r == nvml.SUCCESS {
		c.ComputeMajor = major
	}
	m, err := d.memory(dev)
	if err != nil {
		return c, err
	}
	c.MemoryBytes, c.ReservedBytes = m.Total, m.Reserved
	if mode, r := dev.GetPersistenceMode(); r == nvml.SUCCESS {
		c.Persistence = "disabled"
		if mode == nvml.FEATURE_ENABLED {
			c.Persistence = "enabled"
		}
	}
	if mode, r := dev.GetComputeMode(); r == nvml.SUCCESS {
		c.ComputeMode = computeMode(mode)
	}
	if d.has("nvmlDeviceGetMigMode") {
		if current, _, r := dev.GetMigMode(); r == nvml.SUCCESS {
			c.MIGMode = "disabled"
			if current == nvml.DEVICE_MIG_ENABLE {
				c.MIGMode = "enabled"
			}
		}
	}
	if d.has("nvmlDeviceGetMemoryAffinity") {
		const nodes = 64 // one word of the answer
		if set, r := dev.GetMemoryAffinity(nodes, nvml.AFFINITY_SCOPE_NODE); r == nvml.SUCCESS && len(set) > 0 && set[0] != 0 {
			c.NUMANode = bits.TrailingZeros64(uint64(set[0]))
		}
	}
	return c, nil
}

// memory reads a card's memory. The second version tells the driver's own
// share apart; the first counts it as used.
func (d *Driver) memory(dev nvml.Device) (nvml.Memory_v2, error) {
	if d.has("nvmlDeviceGetMemoryInfo_v2") {
		if m, r := dev.GetMemoryInfo_v2(); r == nvml.SUCCESS {
			return m, nil
		}
	}
	m, r := dev.GetMemoryInfo()
	if r != nvml.SUCCESS {
		return nvml.Memory_v2{}, fault("read memory", r)
	}
	return nvml.Memory_v2{Total: m.Total, Free: m.Free, Used: m.Used}, nil
}

// Sample reads what a card holds now, and how hard it works.
func (d *Driver) Sample(uuid string) (gpu.Sample, error) {
	return d.sample(uuid, true)
}

// Occupancy reads what a card holds now and leaves out how hard it works, which
// takes several calls more.
func (d *Driver) Occupancy(uuid string) (gpu.Sample, error) {
	return d.sample(uuid, false)
}

func (d *Driver) sample(uuid string, load bool) (gpu.Sample, error) {
	s, err := bounded(d, uuid, func() (gpu.Sample, error) {
		s := gpu.Sample{At: time.Now()}
		dev, r := d.lib.DeviceGetHandleByUUID(uuid)
		if r != nvml.SUCCESS {
			return s, fault("open", r)
		}
		m, err := d.memory(dev)
		if err != nil {
			return s, err
		}
		s.UsedBytes, s.ReservedBytes = m.Used, m.Reserved
		if s.Processes, err = d.processes(dev); err != nil {
			return s, err
		}
		if load {
			s.Load = d.load(dev)
			return s, nil
		}
		// Before and after, so that the processes' sum isn't more than the card's
		// just because memory was taken in between.
		if m, err = d.memory(dev); err != nil {
			return s, err
		}
		s.UsedBytes = max(s.UsedBytes, m.Used)
		return s, nil
	})
	if err != nil {
		return s, fmt.Errorf("sample card %s: %w", uuid, err)
	}
	return s, nil
}

// processes lists those that compute on a card, and those that draw: a program
// that does both may be on both lists, each time with all of its memory.
func (d *Driver) processes(dev nvml.Device) ([]gpu.Process, error) {
	listed, r := dev.GetComputeRunningProcesses()
	if r != nvml.SUCCESS {
		return nil, fault("list processes", r)
	}
	// Clients of an MPS server have a list of their own; the server is on the one above.
	if d.has("nvmlDeviceGetMPSComputeRunningProcesses") {
		if clients, r := dev.GetMPSComputeRunningProcesses(); r == nvml.SUCCESS {
			listed = append(listed, clients...)
		}
	}
	// A card that can't draw, or a container's view of one, may say so.
	if drawing, r := dev.GetGraphicsRunningProcesses(); r == nvml.SUCCESS {
		listed = append(listed, drawing...)
	}
	var out []gpu.Process
	at := map[int]int{}
	for _, p := range listed {
		used := p.UsedGpuMemory
		if used == ^uint64(0) { // the driver's "not available"
			used = 0
		}
		i, known := at[int(p.Pid)]
		if !known {
			i = len(out)
			at[int(p.Pid)] = i
			out = append(out, gpu.Process{PID: int(p.Pid)})
		}
		out[i].UsedBytes = max(out[i].UsedBytes, used)
	}
	return out, nil
}

// Utilization reads how much of a card's time each process had in the period after
// since, an earlier answer's At; without one that ended after it the answer has that At
// and no process. Drivers sample a few times a second.
func (d *Driver) Utilization(uuid string, since uint64) (gpu.Utilization, error) {
	u, err := bounded(d, uuid, func() (gpu.Utilization, error) {
		u := gpu.Utilization{At: since, Percent: map[int]int{}}
		dev, r := d.lib.DeviceGetHandleByUUID(uuid)
		if r != nvml.SUCCESS {
			return u, fault("open", r)
		}
		rows, r := dev.GetProcessUtilization(since)
		switch r {
		case nvml.SUCCESS:
		case nvml.ERROR_NOT_FOUND:
			return u, nil
		case nvml.ERROR_NOT_SUPPORTED:
			return u, fmt.Errorf("read utilization of processes: %w", gpu.ErrNotSupported)
		default:
			return u, fault("read utilization of processes", r)
		}
		newest := map[int]uint64{}
		for _, row := range rows {
			// Unused rows are zero; what a driver doesn't know is above 100.
			pid := int(row.Pid)
			if pid == 0 || row.TimeStamp <= since || row.SmUtil > 100 || row.TimeStamp < newest[pid] {
				continue
			}
			newest[pid] = row.TimeStamp
			u.Percent[pid] = int(row.SmUtil)
			u.At = max(u.At, row.TimeStamp)
		}
		return u, nil
	})
	if err != nil {
		return u, fmt.Errorf("card %s: %w", uuid, err)
	}
	return u, nil
}

// load reads how hard a card works. What can't be read is left out: cards differ
// in what they tell (a card in MIG mode has no utilisation, some have no power).
func (d *Driver) load(dev nvml.Device) gpu.Load {
	var l gpu.Load
	value := func(v float64) *float64 { return &v }
	if d.has("nvmlDeviceGetUtilizationRates") {
		if u, r := dev.GetUtilizationRates(); r == nvml.SUCCESS && u.Gpu <= 100 {
			l.UtilizationRatio = value(float64(u.Gpu) / 100)
		}
	}
	if d.has("nvmlDeviceGetPowerUsage") {
		if mw, r := dev.GetPowerUsage(); r == nvml.SUCCESS {
			l.PowerWatts = value(float64(mw) / 1000)
		}
	}
	if d.has("nvmlDeviceGetTemperature") {
		if c, r := dev.GetTemperature(nvml.TEMPERATURE_GPU); r == nvml.SUCCESS {
			l.TemperatureCelsius = value(float64(c))
		}
	}
	return l
}

// busID reads the address out of NVML's struct, as "00000000:07:00.0".
func busID(p nvml.PciInfo) string {
	b := make([]byte, 0, len(p.BusId))
	for _, c := range p.BusId {
		if c == 0 {
			break
		}
		b = append(b, byte(c))
	}
	return strings.ToUpper(string(b))
}

// connect fills in the links between the cards. They are read once for a set
// of healthy cards: a link that goes down makes NVML slow, not different.
func (d *Driver) connect(cards []gpu.Card) {
	var names []string
	for _, c := range cards {
		if c.Fault == "" {
			names = append(names, c.UUID)
		}
	}
	key := strings.Join(names, " ")
	d.mu.Lock()
	links, same := d.links, d.linked == key
	d.mu.Unlock()
	if !same {
		var err error
		links, err = bounded(d, "links", func() (map[string][]gpu.Link, error) { return d.readLinks(names) })
		if err != nil {
			d.log.Warn("links between cards are unknown", "error", err)
			return
		}
		d.mu.Lock()
		d.links, d.linked = links, key
		d.mu.Unlock()
	}
	for i := range cards {
		cards[i].Links = links[cards[i].UUID]
	}
}

// nvlinks are one card's active NVLinks.
type nvlinks struct {
	toCard   map[string]int // by PCI address
	toSwitch int
}

func (d *Driver) readLinks(uuids []string) (map[string][]gpu.Link, error) {
	devices := make([]nvml.Device, len(uuids))
	addresses := make([]string, len(uuids))
	nv := make([]nvlinks, len(uuids))
	for i, uuid := range uuids {
		dev, r := d.lib.DeviceGetHandleByUUID(uuid)
		if r != nvml.SUCCESS {
			return nil, fault("open "+uuid, r)
		}
		pci, r := dev.GetPciInfo()
		if r != nvml.SUCCESS {
			return nil, fault("read PCI address of "+uuid, r)
		}
		devices[i], addresses[i] = dev, busID(pci)
		nv[i] = d.nvlinks(dev)
	}
	links := map[string][]gpu.Link{}
	for a := range uuids {
		for b := range uuids {
			if a == b {
				continue
			}
			l := gpu.Link{UUID: uuids[b]}
			if n := nv[a].toCard[addresses[b]]; n > 0 {
				l.Class, l.Lanes = gpu.LinkNVLink, n
			} else if n := min(nv[a].toSwitch, nv[b].toSwitch); n > 0 {
				l.Class, l.Lanes = gpu.LinkNVSwitch, n
			} else {
				l.Class = d.ancestor(devices[a], devices[b])
			}
			if l.Class != "" {
				links[uuids[a]] = append(links[uuids[a]], l)
			}
		}
	}
	return links, nil
}

func (d *Driver) nvlinks(dev nvml.Device) nvlinks {
	n := nvlinks{toCard: map[string]int{}}
	if !d.has("nvmlDeviceGetNvLinkState") || !d.has("nvmlDeviceGetNvLinkRemotePciInfo") && !d.has("nvmlDeviceGetNvLinkRemotePciInfo_v2") {
		return n
	}
	typed := d.has("nvmlDeviceGetNvLinkRemoteDeviceType") // R470
	for link := range nvml.NVLINK_MAX_LINKS {
		state, r := dev.GetNvLinkState(link)
		if r == nvml.ERROR_NOT_SUPPORTED || r == nvml.ERROR_INVALID_ARGUMENT {
			break // the card has fewer links, or none
		}
		if r != nvml.SUCCESS || state != nvml.FEATURE_ENABLED {
			continue
		}
		if typed {
			if kind, r := dev.GetNvLinkRemoteDeviceType(link); r == nvml.SUCCESS && kind == nvml.NVLINK_DEVICE_TYPE_SWITCH {
				n.toSwitch++
				continue
			}
		}
		if pci, r := dev.GetNvLinkRemotePciInfo(link); r == nvml.SUCCESS {
			n.toCard[busID(pci)]++
		}
	}
	return n
}

// ancestor is the class of the path over PCIe; empty if the driver won't say.
func (d *Driver) ancestor(a, b nvml.Device) string {
	if !d.has("nvmlDeviceGetTopologyCommonAncestor") {
		return ""
	}
	level, r := d.lib.DeviceGetTopologyCommonAncestor(a, b)
	if r != nvml.SUCCESS {
		return ""
	}
	switch level {
	case nvml.TOPOLOGY_INTERNAL, nvml.TOPOLOGY_SINGLE, nvml.TOPOLOGY_MULTIPLE:
		return gpu.LinkPCIeSwitch
	case nvml.TOPOLOGY_HOSTBRIDGE:
		return gpu.LinkPCIeHost
	case nvml.TOPOLOGY_NODE:
		return gpu.LinkNUMA
	}
	return gpu.LinkSystem
}
