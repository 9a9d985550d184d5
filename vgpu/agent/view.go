package agent

import (
	"sort"
	"time"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/v1alpha1"
	"github.com/carve-gpu/carve/vgpu/compute/loop"
	"github.com/carve-gpu/carve/vgpu/gpu"
	"github.com/carve-gpu/carve/vgpu/region"
)

// View is the node at one moment, for metrics and people.
type View struct {
	Node          string
	DriverVersion string
	Software      bool
	// LinkedSince is zero while the hook's link is down.
	LinkedSince time.Time
	Unadjusted  int
	// Refused counts the pods whose grant isn't honoured.
	Refused int
	// Records is the length of the journal.
	Records int
	// SlotsPerCard is how many containers may share a card.
	SlotsPerCard int
	// Enforcement is the strongest layer that holds memory limits on all cards,
	// "advisory" for none but the library, and then EnforcementReason says why.
	Enforcement, EnforcementReason string
	// AccessRepairs counts the containers that had lost their devices and got
	// them back.
	AccessRepairs uint64
	// LimitsRestored counts the limits files that others had written to and that
	// were put right. CutOff are the running containers with a file that is no
	// longer the node's.
	LimitsRestored uint64
	CutOff         int
	Cards          []CardView
	Slices         []SliceView
}

// CardView is one card.
type CardView struct {
	gpu.Card
	// Sample is what is on the card; Fault says why there is none.
	Sample gpu.Sample
	Fault  string
	// GrantedMiB and GrantedCores are what slices hold; Whole is true for a
	// card that one pod holds.
	GrantedMiB   int64
	GrantedCores int
	Whole        bool
	// Layers hold memory limits on it, strongest first.
	Layers []string
	// Sharing and MPS are as in the report.
	Sharing *v1alpha1.Sharing
	MPS     *v1alpha1.MPS
	// ContextBytes is what a context costs, 0 where it isn't known.
	ContextBytes uint64
	// ComputeFault says why its compute is given in turns, without the driver's word on
	// what processes use.
	ComputeFault string
}

// SliceView is one container's share of one card.
type SliceView struct {
	PodUID, Namespace, Pod, Container string
	Card                              string
	Mode                              string
	LimitBytes                        uint64
	Cores                             int
	Active                            bool
	// Generation is the grant's that is in force.
	Generation int
	// Usage is what the container says of itself now, and in mode timeslice, where it says
	// nothing, what the driver says of its processes; Refusals and PeakBytes
	// are over the life of the slice, and since the agent started. PeakBytes is the largest
	// use of a process, or of all together at a look, of which there is one a second.
	Usage     region.CardUsage
	Refusals  uint64
	PeakBytes uint64
	// ResidualBytes is what the container's processes hold on the card beyond
	// what they say, as the driver says.
	ResidualBytes uint64
	Processes     int
	// Compute is what it used of the card's time, as the driver says; nil where that
	// isn't known.
	Compute *loop.Use
	// Fault says what is wrong with the files by which the node reaches its container.
	Fault string
	// Unread says that its usage file can't be read, so that what the container says of
	// itself isn't known.
	Unread bool
	// Damaged says that the container changed its usage file.
	Damaged bool
}

// View reads the node. It asks the driver and reads usage files, so it takes
// some milliseconds; callers keep it for a while.
func (a *Agent) View() View {
	status := a.status()
	a.mu.Lock()
	door := a.hardware.door
	v := View{
		Node: a.Node, DriverVersion: status.DriverVersion, Software: a.Software,
		LinkedSince: a.linkedSince, Unadjusted: int(status.UnadjustedContainers),
		Refused: len(a.refused), Records: len(a.held), SlotsPerCard: int(status.SlotsPerCard), AccessRepairs: a.accessRepairs,
		Enforcement: status.Enforcement, EnforcementReason: status.EnforcementReason,
		LimitsRestored: a.limitsRestored, CutOff: a.cutOffs(),
	}
	granted := map[string]amount{}
	for _, h := range a.held {
		for card, am := range peaks(h.Grant, h.Order) {
			granted[card] = granted[card].plus(am)
		}
	}
	cards := append([]gpu.Card{}, a.hardware.inventory.Cards...)
	positions := map[[2]string][]string{}
	for uid, h := range a.held {
		for name, cs := range h.Grant.Containers {
			for _, c := range cs {
				positions[[2]string{uid, name}] = append(positions[[2]string{uid, name}], c.Card)
			}
		}
	}
	a.mu.Unlock()
	reported := map[string]v1alpha1.Card{}
	for _, c := range status.Cards {
		reported[c.UUID] = c
	}

	samples := map[string]gpu.Sample{}
	for _, c := range cards {
		am := granted[c.UUID]
		cv := CardView{Card: c, GrantedMiB: am.memMiB, GrantedCores: am.cores, Whole: am.whole, Fault: c.Fault, ContextBytes: a.contexts.of(status.DriverVersion, c.Model), Layers: reported[c.UUID].Layers,
			Sharing: reported[c.UUID].Sharing, MPS: reported[c.UUID].MPS}
		if am.whole {
			cv.GrantedMiB, cv.GrantedCores = c.MemoryMiB(), 100
		}
		if l := a.compute.Load(); l != nil {
			cv.ComputeFault = l.Fault(c.UUID)
		}
		if cv.Fault == "" && door != nil {
			var err error
			if cv.Sample, err = door.Sample(c.UUID); err != nil {
				cv.Fault = err.Error()
			}
		}
		v.Cards, samples[c.UUID] = append(v.Cards, cv), cv.Sample
	}
	for _, c := range status.Cards {
		for _, s := range c.Slices {
			sv := SliceView{
				PodUID: s.PodUID, Namespace: s.Namespace, Pod: s.Pod, Container: s.Container,
				Card: c.UUID, Mode: s.Mode, LimitBytes: uint64(s.MemMiB) << 20, Cores: int(s.Cores),
				Active: s.State == "active", Generation: int(s.Generation), Fault: s.Fault,
			}
			if l := a.compute.Load(); l != nil {
				if u, known := l.Used(loop.Key{UID: s.PodUID, Container: s.Container}, c.UUID); known {
					sv.Compute = &u
				}
			}
			switch {
			case s.Mode == string(api.ModeTimeslice):
				sv.Usage.UsedBytes, sv.Processes = a.seenOf(s.PodUID, s.Container, samples[c.UUID].Processes)
			case s.MemMiB > 0:
				a.readUsage(&sv, positions[[2]string{s.PodUID, s.Container}])
			}
			v.Slices = append(v.Slices, sv)
		}
	}
	sort.Slice(v.Slices, func(i, j int) bool {
		x, y := v.Slices[i], v.Slices[j]
		if x.Card != y.Card {
			return x.Card < y.Card
		}
		return x.PodUID < y.PodUID || x.PodUID == y.PodUID && x.Container < y.Container
	})
	return v
}

// seenOf is what the driver says of a container's processes among those of a card.
func (a *Agent) seenOf(uid, container string, listed []gpu.Process) (bytes uint64, processes int) {
	var s share
	pids := map[int]bool{}
	a.mu.Lock()
	for id, u := range a.containers {
		if u.uid == uid && u.container == container {
			s.ids = append(s.ids, id)
			pids[u.hostPID] = u.hostPID != 0
		}
	}
	a.mu.Unlock()
	for _, p := range listed {
		if !pids[p.PID] {
			if groups, err := a.groupsOf(p.PID); err != nil || !s.names(groups) {
				continue
			}
		}
		bytes += p.UsedBytes
		processes++
	}
	return bytes, processes
}

// readUsage fills in what a container says of itself on one of its cards.
func (a *Agent) readUsage(s *SliceView, cards []string) {
	u, err := region.ReadUsage(a.files.usage(s.PodUID, s.Container), max(len(cards), 1))
	if err != nil {
		s.Unread = true
		return
	}
	s.Damaged = u.Damage != 0
	for i, c := range cards {
		if c != s.Card {
			continue
		}
		s.Usage = u.Total(i)
		for _, slot := range u.Slots {
			if slot.State == region.SlotLive {
				s.Processes++
			}
		}
		a.mu.Lock()
		if h := a.held[s.PodUID]; h != nil && i < len(h.tallies[s.Container]) {
			t := h.tallies[s.Container][i]
			s.Refusals, s.PeakBytes, s.ResidualBytes = t.refusals, t.peakBytes, t.residualBytes
		}
		a.mu.Unlock()
	}
}
