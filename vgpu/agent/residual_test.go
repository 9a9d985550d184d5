package agent

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/carve-gpu/carve/vgpu/region"
)

// slotOf makes a slot of pid with a charge on one card.
func slotOf(pid uint32, used, sequence uint64) region.Slot {
	return region.Slot{Index: int(pid), State: region.SlotLive, PID: pid, StartTicks: 1, PIDNamespace: 2,
		Cards: []region.CardUsage{{UsedBytes: used, Sequence: sequence, PeakBytes: used}}}
}

func holderOf(pid uint32, bytes uint64) holder {
	return holder{region.Process{HostPID: int(pid) + 1000, PID: pid, StartTicks: 1, PIDNamespace: 2}, bytes}
}

func usageOf(slots ...region.Slot) region.Usage { return region.Usage{Slots: slots} }

func TestWhatIsHeldBeyondTheSlots(t *testing.T) {
	const limit = 1000
	managed := slotOf(1, 500, 0)
	managed.Cards[0].ManagedBytes = 300
	pending := slotOf(1, 100, 0)
	pending.Cards[0].PendingBytes = 50
	peaked := slotOf(1, 100, 4)
	peaked.Cards[0].PeakBytes = 600
	for name, c := range map[string]struct {
		before, after region.Usage
		holders       []holder
		doubled       uint64
		want          span
	}{
		"nothing":                         {usageOf(slotOf(1, 300, 0)), usageOf(slotOf(1, 300, 0)), []holder{holderOf(1, 300)}, 0, span{0, 0}},
		"past the library":                {usageOf(slotOf(1, 300, 0)), usageOf(slotOf(1, 300, 0)), []holder{holderOf(1, 700)}, 0, span{400, 400}},
		"a process without a slot":        {usageOf(slotOf(1, 300, 0)), usageOf(slotOf(1, 300, 0)), []holder{holderOf(1, 300), holderOf(9, 250)}, 0, span{250, 250}},
		"one that is charged more hides":  {usageOf(slotOf(1, 300, 0)), usageOf(slotOf(1, 300, 0)), []holder{holderOf(1, 200), holderOf(9, 250)}, 0, span{150, 150}},
		"the driver says less":            {usageOf(slotOf(1, 300, 0)), usageOf(slotOf(1, 300, 0)), []holder{holderOf(1, 200)}, 0, span{0, 0}},
		"one that it doesn't list":        {usageOf(slotOf(1, 300, 0), slotOf(2, 400, 0)), usageOf(slotOf(1, 300, 0), slotOf(2, 400, 0)), []holder{holderOf(1, 500)}, 0, span{200, 200}},
		"managed memory is in neither":    {usageOf(managed), usageOf(managed), []holder{holderOf(1, 250)}, 0, span{50, 50}},
		"what is asked for counts":        {usageOf(pending), usageOf(pending), []holder{holderOf(1, 150)}, 0, span{0, 0}},
		"freed and had again in between":  {usageOf(slotOf(1, 300, 2)), usageOf(slotOf(1, 300, 4)), []holder{holderOf(1, 700)}, 0, span{400, 700}},
		"taken in between":                {usageOf(slotOf(1, 100, 2)), usageOf(slotOf(1, 300, 2)), []holder{holderOf(1, 350)}, 0, span{50, 350}},
		"it had more once":                {usageOf(slotOf(1, 100, 2)), usageOf(peaked), []holder{holderOf(1, 650)}, 0, span{50, 650}},
		"no more than the limit, however": {usageOf(slotOf(1, 100, 2)), usageOf(slotOf(1, 1<<40, 4)), []holder{holderOf(1, 1600)}, 0, span{600, 1600}},
		"gone in between":                 {usageOf(slotOf(1, 300, 2)), usageOf(), []holder{holderOf(1, 300)}, 0, span{0, 300}},
		"come in between, with nothing":   {usageOf(), usageOf(slotOf(1, 0, 0)), []holder{holderOf(1, 80)}, 0, span{80, 80}},
		"come in between, with something": {usageOf(), usageOf(slotOf(1, 80, 0)), []holder{holderOf(1, 80)}, 0, span{0, 80}},
		"shared by two, counted twice":    {usageOf(slotOf(1, 500, 0), slotOf(2, 100, 0)), usageOf(slotOf(1, 500, 0), slotOf(2, 100, 0)), []holder{holderOf(1, 500), holderOf(2, 600)}, 500, span{0, 0}},
		"one process has nothing twice":   {usageOf(slotOf(1, 100, 0)), usageOf(slotOf(1, 100, 0)), []holder{holderOf(1, 700)}, 5000, span{600, 600}},
		"no process at all":               {usageOf(slotOf(1, 300, 0)), usageOf(slotOf(1, 300, 0)), nil, 0, span{0, 0}},
	} {
		if got := beyond(c.before, c.after, 0, c.holders, limit, c.doubled); got != c.want {
			t.Errorf("%s: %+v, want %+v", name, got, c.want)
		}
	}
}

func TestTheLeastOfThreeSamplesIsPublished(t *testing.T) {
	h := &history{}
	for i, c := range []struct {
		sample span
		want   uint64
	}{
		{span{500, 500}, 0}, {span{500, 500}, 0}, {span{400, 400}, 400}, // all three show it
		{span{900, 900}, 400},
		{span{0, 0}, 0}, // falls at once
		{span{700, 700}, 0}, {span{700, 700}, 0}, {span{700, 700}, 700},
		{span{0, 1 << 40}, 700},   // nobody could tell: it stays
		{span{800, 1 << 40}, 700}, // at least that, and two samples less
		{span{0, 300}, 300},       // at most that
	} {
		if h.published = h.add(c.sample); h.published != c.want {
			t.Errorf("sample %d: %d is published, want %d", i, h.published, c.want)
		}
	}
	// After a start of the agent, what was published holds until it is too much.
	h = &history{published: 600}
	for i, c := range []struct{ sample, want uint64 }{{900, 600}, {500, 500}, {900, 500}, {900, 500}, {900, 900}} {
		if h.published = h.add(span{c.sample, c.sample}); h.published != c.want {
			t.Errorf("after a start, sample %d: %d is published, want %d", i, h.published, c.want)
		}
	}
}

// share-19, vgpu-3: whatever a program does within its limit and however slots are
// looked at, a process that takes nothing past its library is never said to. The
// driver has at most what is charged at each moment.
func TestNoResidualOfAProgramThatTakesNone(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	const limit = 1 << 20
	for range 20000 {
		s := slotOf(1, 0, 0)
		step := func() uint64 {
			c := &s.Cards[0]
			if r.IntN(2) == 0 && c.UsedBytes > 0 {
				c.Sequence += 2
				c.UsedBytes -= r.Uint64N(c.UsedBytes + 1)
			} else if room := limit - c.UsedBytes; room > 0 {
				c.UsedBytes += r.Uint64N(room + 1)
			}
			c.PeakBytes = max(c.PeakBytes, c.UsedBytes)
			return c.UsedBytes
		}
		copied := func() region.Usage {
			x := s
			x.Cards = append([]region.CardUsage{}, s.Cards...)
			return usageOf(x)
		}
		for range r.IntN(6) {
			step()
		}
		before, driver := copied(), s.Cards[0].UsedBytes
		for range r.IntN(3) {
			if now := step(); r.IntN(2) == 0 {
				driver = now
			}
		}
		after := copied()
		if got := beyond(before, after, 0, []holder{holderOf(1, driver)}, limit, 0); got.low != 0 {
			t.Fatalf("%+v then %+v, the driver %d: %+v", before, after, driver, got)
		}
	}
}

// Figures of a tenant's are whatever it wrote.
func TestResidualOfWildFigures(t *testing.T) {
	wild := []uint64{0, 1, 512, 1 << 30, 1<<41 - 512, math.MaxUint64}
	r := rand.New(rand.NewPCG(3, 4))
	pick := func() uint64 { return wild[r.IntN(len(wild))] }
	for range 20000 {
		slots := func() region.Usage {
			var u region.Usage
			for range r.IntN(4) {
				s := slotOf(uint32(r.IntN(3)), min(pick(), 1<<41-512), pick())
				s.Cards[0].PendingBytes, s.Cards[0].PeakBytes = min(pick(), 1<<41-512), min(pick(), 1<<41-512)
				s.Cards[0].ManagedBytes = min(pick(), s.Cards[0].UsedBytes)
				u.Slots = append(u.Slots, s)
			}
			return u
		}
		bytes := r.Uint64N(1 << 40)
		got := beyond(slots(), slots(), 0, []holder{holderOf(1, bytes)}, pick(), pick())
		if got.low > got.high || got.high > bytes {
			t.Fatalf("%+v of a process with %d bytes", got, bytes)
		}
	}
}

func TestWhatTheReportTellsOfAResidual(t *testing.T) {
	for _, c := range []struct {
		was, now int64
		age      time.Duration
		want     int64
	}{
		{0, 63, time.Hour, 0}, {0, 64, 0, 64}, {64, 96, time.Hour, 64}, {64, 97, 0, 97}, {1000, 500, time.Hour, 1000},
		{1000, 499, 59 * time.Second, 1000}, {1000, 499, time.Minute, 499}, {1000, 0, time.Minute, 0}, {100, 63, time.Minute, 0}, {100, 20, time.Minute, 0},
	} {
		if got := told(c.was, c.now, c.age); got != c.want {
			t.Errorf("%d MiB, now %d after %v: %d is told, want %d", c.was, c.now, c.age, got, c.want)
		}
	}
}
