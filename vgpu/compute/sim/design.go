package sim

import "github.com/carve-gpu/carve/vgpu/compute"

// Price is how a launch is charged.
type Price int

// Prices.
const (
	ByPace   Price = iota // the agent's integral of 1/n
	ByEvents              // the time between its events
	ByCount               // that, divided by the number of busy processes at its end
)

// Design is one way to divide a card, and what the card and the node are like.
type Design struct {
	Name  string
	Price Price
	Ahead int64
	Agent compute.Config

	TickLeast, TickMost    int64
	TruthEvery             int64
	TruthLate, TruthSpread int64
	TruthNoise             float64 // standard deviation, relative
	Quantum, Switch        int64
	Overshoot              int64
}

const unlimited = int64(1) << 50

// D5 is what is shipped: credit, pace and ledger.
func D5() Design {
	return Design{
		Name: "V + truth ledger, 0.17 s (D5)", Price: ByPace, Ahead: 8 * Millisecond,
		TickLeast: 2 * Millisecond, TickMost: 5 * Millisecond,
		TruthEvery: Second / 6, TruthLate: 15 * Millisecond, TruthSpread: 30 * Millisecond,
		Quantum: 2 * Millisecond, Switch: 20 * Microsecond, Overshoot: 40 * Microsecond,
	}
}

func with(name string, change func(*Design)) Design {
	d := D5()
	d.Name = name
	change(&d)
	return d
}

// D6 is the arbiter that is shipped, for strict elastic guarantees.
func D6() Design {
	return with("arbiter + V + ledger + scale, 0.17 s (D6)", func(d *Design) {
		d.Ahead, d.Agent.Mode = 2*Millisecond, compute.Turns
		d.TickLeast, d.TickMost = 2*Millisecond, 2*Millisecond
	})
}

// Drained is the arbiter for drivers that have no truth.
func Drained() Design {
	return with("arbiter, drained hand-over, no truth", func(d *Design) {
		d.Agent = compute.Config{Mode: compute.Drained, NoTruth: true}
		d.Ahead = 2 * Millisecond
		d.TickLeast, d.TickMost = 2*Millisecond, 2*Millisecond
		d.Price = ByEvents
	})
}

// Designs are the rows of the table.
func Designs() []Design {
	noTruth := func(d *Design) { d.Agent.NoTruth = true }
	return []Design{
		with("event credit, queue depth 1024", func(d *Design) { noTruth(d); d.Price, d.Ahead = ByEvents, unlimited }),
		with("event credit + run-ahead limited to 8 ms", func(d *Design) { noTruth(d); d.Price = ByEvents }),
		with("divided by the busy count at completion", func(d *Design) { noTruth(d); d.Price = ByCount }),
		with("divided by the integral V of 1/busy count", noTruth),
		with("arbiter with overlapping turns", func(d *Design) {
			noTruth(d)
			d.Price, d.Agent.Mode, d.Ahead = ByEvents, compute.Turns, 2*Millisecond
			d.TickLeast, d.TickMost = 2*Millisecond, 2*Millisecond
		}),
		with("arbiter + V", func(d *Design) {
			noTruth(d)
			d.Agent.Mode, d.Ahead = compute.Turns, 2*Millisecond
			d.TickLeast, d.TickMost = 2*Millisecond, 2*Millisecond
		}),
		Drained(),
		with("run-ahead + truth ledger, 0.17 s", func(d *Design) { d.Price = ByEvents }),
		D5(),
		with("D5, truth every 1 s", func(d *Design) { d.TruthEvery = Second }),
		D6(),
	}
}

// Sensitivities are D5 on other cards, with worse truth, and with other constants.
func Sensitivities() []Design {
	return []Design{
		with("truth with 10 % noise", func(d *Design) { d.TruthNoise = 0.1 }),
		with("truth 30 to 90 ms late", func(d *Design) { d.TruthLate, d.TruthSpread = 30*Millisecond, 60*Millisecond }),
		with("truth 50 to 150 ms late", func(d *Design) { d.TruthLate, d.TruthSpread = 50*Millisecond, 100*Millisecond }),
		with("agent every 5 to 10 ms", func(d *Design) { d.TickLeast, d.TickMost = 5*Millisecond, 10*Millisecond }),
		with("quantum 1 ms", func(d *Design) { d.Quantum = Millisecond }),
		with("quantum 5 ms", func(d *Design) { d.Quantum = 5 * Millisecond }),
		with("quantum 10 ms", func(d *Design) { d.Quantum = 10 * Millisecond }),
		with("switch 100 µs", func(d *Design) { d.Switch = 100 * Microsecond }),
		with("run-ahead 2 ms", func(d *Design) { d.Ahead = 2 * Millisecond }),
		with("run-ahead 16 ms", func(d *Design) { d.Ahead = 16 * Millisecond }),
		with("run-ahead not limited", func(d *Design) { d.Ahead = unlimited }),
		with("ledger gain 0.4", func(d *Design) { d.Agent.Gain = 0.4 }),
		with("ledger gain 1", func(d *Design) { d.Agent.Gain = 1 }),
	}
}
