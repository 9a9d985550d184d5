package bundle

import (
	"errors"
	"fmt"
	"math"
	"os"
	"strings"
	"time"

	"github.com/carve-gpu/carve/vgpu/gpu"
)

// tenant is a program that wants the card all the time, or as its arguments say.
type tenant struct {
	name    string
	percent int // of the card; 0: without the front
	elastic bool
	args    []string
}

// got is what became of a tenant.
type got struct {
	tenant
	// percent is its part of the card by the work that it did, in a window, as a part
	// of what one gets that has the card alone.
	percent float64
	// driver is the mean of what the driver said of it in that window, with samples the
	// number of its figures; account what the driver wrote down at the end, -1: nothing.
	driver  float64
	samples int
	account int
	// residual is the most that the driver said that it has beyond its slot.
	residual int64
	// thought is the part of the window in which it wanted nothing.
	thought float64
}

// workloads are those of the library's own test of shares.
var workloads = []struct {
	name string
	args []string
}{
	{"kernels of 20 us", []string{"--kernels", "20us"}},
	{"kernels of 200 and 30 us", []string{"--kernels", "200us,30us"}},
	{"kernels of 1 ms, each waited for", []string{"--kernels", "1ms", "--sync"}},
	{"kernels of 20 ms", []string{"--kernels", "20ms"}},
	{"kernels of 0.1, 1 and 5 ms on four streams", []string{"--kernels", "100us,1ms,5ms", "--streams", "4"}},
}

// calibrate finds out how long an iteration lasts on the whole card, and what a
// program gets by that measure that has it alone.
func (r *runner) calibrate() error {
	if r.full != 0 {
		return nil
	}
	// The first one wakes the card up.
	for range 2 {
		lines, err := r.lines(nil, 30*time.Second, probe, "load", "--for", pick(r, "300ms", "1s"), "--kernels", "200us")
		if err != nil {
			return err
		}
		for _, l := range lines {
			switch {
			case l.text("step") == "ready":
				r.iterationPS = l.int("iterationPicoseconds")
			case l.text("step") == "load" && l.bool("ok") && l.number("drainedNanoseconds") > 0:
				r.full = 100 * l.number("workNanoseconds") / l.number("drainedNanoseconds")
			}
		}
	}
	if r.full < 50 || r.full > 150 || r.iterationPS <= 0 {
		full := r.full
		r.full = 0
		return fmt.Errorf("a program that has the card alone gets %.1f %% by its own calibration", full)
	}
	return nil
}

func (r *runner) noteCalibration() {
	r.note("alone without the front, kernels of 200 us back to back", fmt.Sprintf("%.1f %% by their calibrated length; shares below are of this", r.full),
		map[string]float64{"percent": r.full, "iteration_ps": float64(r.iterationPS)})
}

// contend runs tenants beside one another.
func (r *runner) contend(skip, window time.Duration, tenants ...tenant) ([]got, error) {
	type seat struct {
		got
		child *child
		share *share
	}
	var seats []*seat
	defer func() {
		for _, s := range seats {
			s.child.kill()
			if s.share != nil {
				r.leave(s.share)
			}
		}
	}()
	for i, t := range tenants {
		one := &seat{got: got{tenant: t, account: -1}}
		if t.percent > 0 {
			s, err := r.newShare(terms{memory: max(r.contextBytes, 100*mib) + 1000*mib, context: r.contextBytes, ppm: uint32(t.percent) * 10_000, elastic: t.elastic})
			if err != nil {
				return nil, err
			}
			one.share = s
			r.join(s)
		}
		before := r.listedPIDs()
		args := append([]string{"load", "--wait", "--for", (skip + window).String(), "--skip", skip.String(), "--window", window.String(),
			"--seed", fmt.Sprint(i + 1), "--iteration-ps", fmt.Sprint(r.iterationPS)}, t.args...)
		for i := range args {
			args[i] = goDuration(args[i])
		}
		c, err := r.start(one.share, skip+window+30*time.Second, probe, args...)
		if err != nil {
			return nil, err
		}
		one.child = c
		seats = append(seats, one)
		if _, err := c.next("ready"); err != nil {
			return nil, err
		}
		r.learnPID(before, c.pid)
		if one.share != nil {
			r.owner(c.pid, one.share)
		}
	}
	for _, s := range seats {
		fmt.Fprintln(s.child.in, 0)
	}
	// The driver's word on the window, beside the programs' own.
	began := time.Now()
	var at uint64
	for time.Since(began) < skip+window && r.ctx.Err() == nil {
		u, err := r.door.Utilization(r.card.UUID, at)
		if err == nil && u.At > at {
			at = u.At
			if time.Since(began) > skip+200*time.Millisecond {
				for _, s := range seats {
					s.samples++
					for pid, percent := range u.Percent {
						if r.own(pid) == s.child.pid {
							s.driver += float64(percent)
						}
					}
				}
			}
		}
		for _, s := range seats {
			if s.share == nil {
				continue
			}
			if slot, driver, ok := r.usageOf(s.share, s.child.pid); ok {
				s.residual = max(s.residual, int64(driver)-int64(slot.UsedBytes))
			}
		}
		time.Sleep(20 * time.Millisecond)
	}
	var out []got
	for _, s := range seats {
		l, err := s.child.next("window")
		if err != nil {
			return nil, err
		}
		s.percent = 100 * l.number("workNanoseconds") / float64(window) * 100 / r.full
		s.thought = l.number("thoughtNanoseconds") / float64(window)
		if a, err := r.door.Accounting(r.card.UUID, s.child.pid); err == nil {
			s.account = a.Percent
		}
		if l, err = s.child.next("load"); err != nil {
			return nil, err
		}
		if !l.bool("ok") {
			return nil, fmt.Errorf("%s: %s", s.name, l.fault())
		}
		if s.samples > 0 {
			s.driver = s.driver / float64(s.samples)
		}
		out = append(out, s.got)
	}
	return out, nil
}

// goDuration writes what time.Duration prints as gpuprobe reads it: "1.5s" is 1500ms.
func goDuration(s string) string {
	if d, err := time.ParseDuration(s); err == nil && strings.Contains(s, ".") {
		return fmt.Sprintf("%dus", d.Microseconds())
	}
	return s
}

func (g got) beside() string {
	text := ""
	if g.samples > 0 {
		text = fmt.Sprintf("; driver says %.1f", g.driver)
	}
	if g.account >= 0 {
		text += fmt.Sprintf(", its accounting %d", g.account)
	}
	return text
}

func (g got) values() map[string]float64 {
	v := map[string]float64{"share_percent": float64(g.tenant.percent), "got_percent": g.percent, "driver_percent": g.driver, "driver_samples": float64(g.samples), "residual_bytes": float64(g.residual)}
	if g.account >= 0 {
		v["account_percent"] = float64(g.account)
	}
	return v
}

// computeAlone gives programs shares of a card that they have for themselves.
func (r *runner) computeAlone() error {
	if err := r.calibrate(); err != nil {
		return err
	}
	r.noteCalibration()
	defer r.divide()()
	skip, window := pick(r, 500*time.Millisecond, 1500*time.Millisecond), pick(r, 1500*time.Millisecond, 3500*time.Millisecond)
	sum, worst, count, residual := 0.0, 0.0, 0, int64(0)
	for i, w := range workloads {
		for _, percent := range []int{30, 50, 80} {
			if r.Quick && (i < 3 || percent == 50) {
				continue
			}
			out, err := r.contend(skip, window, tenant{name: w.name, percent: percent, args: w.args})
			if err != nil {
				return err
			}
			g := out[0]
			off := math.Abs(g.percent - float64(percent))
			sum, worst, count, residual = sum+off, max(worst, off), count+1, max(residual, g.residual)
			r.must(off <= r.Band, fmt.Sprintf("alone with %d %%, %s", percent, w.name), fmt.Sprintf("%d ± %g %%", percent, r.Band), fmt.Sprintf("%.2f %%%s", g.percent, g.beside()), g.values())
		}
	}
	r.note("share error, alone", fmt.Sprintf("mean %.2f, most %.2f points over %d cases", sum/float64(count), worst, count), map[string]float64{"share_error_mean_points": sum / float64(count), "share_error_max_points": worst})
	r.note("residual of a process that launches kernels, at most", fmt.Sprintf("%d B", residual), map[string]float64{"residual_bytes": float64(residual)})
	if r.Quick {
		return nil
	}
	out, err := r.contend(skip, window, tenant{name: "elastic", percent: 30, elastic: true, args: []string{"--kernels", "1ms"}})
	if err != nil {
		return err
	}
	r.must(out[0].percent >= 90, "an elastic share of 30 % alone borrows", "at least 90 %", fmt.Sprintf("%.2f %%%s", out[0].percent, out[0].beside()), out[0].values())
	return nil
}

// contention lets programs share one card.
func (r *runner) contention() error {
	if err := r.calibrate(); err != nil {
		return err
	}
	defer r.divide()()
	skip, window := pick(r, 2*time.Second, 3*time.Second), pick(r, 3*time.Second, 5*time.Second)
	mixed := []string{"--kernels", "200us,2ms"}
	type set struct {
		what    string
		tenants []tenant
	}
	sets := []set{
		{"two at 30 and 60 %", []tenant{{name: "a", percent: 30, args: mixed}, {name: "b", percent: 60, args: mixed}}},
		{"three at 20, 20 and 50 %", []tenant{{name: "a", percent: 20, args: mixed}, {name: "b", percent: 20, args: []string{"--kernels", "5ms"}}, {name: "c", percent: 50, args: mixed}}},
		{"30 and 60 %, the first with bursts", []tenant{{name: "a", percent: 30, args: append([]string{"--burst", "60ms", "--think", "60ms"}, mixed...)}, {name: "b", percent: 60, args: mixed}}},
		{"30 % elastic beside 40 % fixed", []tenant{{name: "a", percent: 30, elastic: true, args: mixed}, {name: "b", percent: 40, args: mixed}}},
		{"kernels of 20 ms at 30 % beside 20 us at 60 %", []tenant{{name: "a", percent: 30, args: []string{"--kernels", "20ms"}}, {name: "b", percent: 60, args: []string{"--kernels", "20us"}}}},
	}
	if r.Quick {
		sets = sets[:1]
	}
	for _, s := range sets {
		out, err := r.contend(skip, window, s.tenants...)
		if err != nil {
			return err
		}
		total := 0.0
		for _, g := range out {
			total += g.percent
			what := fmt.Sprintf("%s: the one with %d %%", s.what, g.tenant.percent)
			observed := fmt.Sprintf("%.2f %%%s", g.percent, g.beside())
			low, high := float64(g.tenant.percent)-r.Band, float64(g.tenant.percent)+r.Band
			switch {
			case g.thought > 0: // it didn't want all that it has
				r.note(what, fmt.Sprintf("%s, away %.0f %% of the time", observed, 100*g.thought), g.values())
			case g.elastic:
				r.must(g.percent >= low, what, fmt.Sprintf("at least %.0f %%", low), observed, g.values())
			default:
				r.must(g.percent >= low && g.percent <= high, what, fmt.Sprintf("%d ± %g %%", g.tenant.percent, r.Band), observed, g.values())
			}
		}
		r.note(s.what+": together", fmt.Sprintf("%.1f %% of the card", total), map[string]float64{"together_percent": total})
	}
	return nil
}

// costs is what the library adds to calls.
func (r *runner) costs() error {
	for _, quota := range []bool{false, true} {
		t := terms{memory: max(r.contextBytes, 100*mib) + 1000*mib, context: r.contextBytes}
		args := []string{"costs"}
		if quota {
			t.ppm = 1_000_000
			args = append(args, "--launches")
		}
		s, err := r.newShare(t)
		if err != nil {
			return err
		}
		stop := func() {}
		if quota {
			stop = r.divide()
			r.join(s)
		}
		lines, err := r.lines(s, 40*time.Second, probe, args...)
		stop()
		if err != nil {
			return err
		}
		seen := 0
		for _, l := range lines {
			if l.text("step") != "cost" {
				continue
			}
			seen++
			what := "added to " + l.text("what")
			if quota {
				what += ", compute divided"
			}
			if !l.bool("ok") {
				r.skip(what, "refused: "+l.fault())
				continue
			}
			added, driver := l.number("addedNanoseconds"), l.number("driverNanoseconds")
			r.note(what, fmt.Sprintf("%.1f ns (quartiles %.1f and %.1f), the driver's own %.0f ns: %+.2f %%", added, l.number("addedLowNanoseconds"), l.number("addedHighNanoseconds"), driver, 100*added/max(driver, 1)),
				map[string]float64{"added_ns": added, "driver_ns": driver})
		}
		if seen == 0 {
			return fmt.Errorf("gpuprobe costs: %v", lines)
		}
	}
	return nil
}

// accounting is whether the driver writes down what processes use.
func (r *runner) accounting() string {
	_, err := r.door.Accounting(r.card.UUID, os.Getpid())
	switch {
	case errors.Is(err, gpu.ErrNotSupported):
		return "off (nvidia-smi -am 1, by root, turns it on)"
	case err != nil:
		return "on" // this process has no account
	}
	return "on"
}
