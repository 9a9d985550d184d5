package bundle

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"time"
)

// seen is one figure of the driver's as it was first seen.
type seen struct {
	at      uint64 // end of the period, microseconds of the driver's clock
	when    time.Time
	percent map[int]int // by our pid
}

// watch asks the driver every 5 ms until done.
func (r *runner) watch(until func() bool) ([]seen, error) {
	var out []seen
	var at uint64
	for !until() && r.ctx.Err() == nil {
		u, err := r.door.Utilization(r.card.UUID, at)
		if err != nil {
			return out, err
		}
		if u.At > at {
			s := seen{at: u.At, when: time.Now(), percent: map[int]int{}}
			for pid, p := range u.Percent {
				s.percent[r.own(pid)] = p
			}
			out = append(out, s)
			at = u.At
		}
		time.Sleep(5 * time.Millisecond)
	}
	return out, nil
}

// driversWord looks at what the driver says of processes' time: what the agent takes
// for the truth.
func (r *runner) driversWord() error {
	if err := r.calibrate(); err != nil {
		return err
	}
	r.note("accounting of processes", r.accounting(), nil)
	length := pick(r, 2*time.Second, 4*time.Second)
	cases := []struct {
		what  string
		loads [][]string
	}{
		{"one program, all the time", [][]string{{"--kernels", "1ms"}}},
		{"one program, bursts of 30 ms and 70 ms pause", [][]string{{"--kernels", "1ms", "--burst", "30ms", "--think", "70ms"}}},
		{"one program, one block of kernels waited for", [][]string{{"--kernels", "100us", "--sync"}}},
		{"two programs, all the time", [][]string{{"--kernels", "1ms"}, {"--kernels", "1ms"}}},
		{"two programs, all the time and half of it", [][]string{{"--kernels", "1ms"}, {"--kernels", "1ms", "--burst", "50ms", "--think", "50ms"}}},
	}
	if r.Quick {
		cases = []struct {
			what  string
			loads [][]string
		}{cases[3]}
	}
	for i, c := range cases {
		if err := r.observe(c.what, c.loads, length, i == 0); err != nil {
			return err
		}
	}
	return nil
}

// observe runs programs without the front, and notes what they did and what the
// driver said of it.
func (r *runner) observe(what string, loads [][]string, length time.Duration, first bool) error {
	var children []*child
	defer func() {
		for _, c := range children {
			c.kill()
		}
	}()
	for i, args := range loads {
		before := r.listedPIDs()
		c, err := r.start(nil, length+20*time.Second, probe, append([]string{"load", "--wait", "--for", goDuration(length.String()), "--seed", fmt.Sprint(i + 1), "--iteration-ps", fmt.Sprint(r.iterationPS)}, args...)...)
		if err != nil {
			return err
		}
		children = append(children, c)
		if _, err := c.next("ready"); err != nil {
			return err
		}
		r.learnPID(before, c.pid)
	}
	began := time.Now()
	for _, c := range children {
		fmt.Fprintln(c.in, 0)
	}
	all, err := r.watch(func() bool { return time.Since(began) > length+500*time.Millisecond })
	if err != nil {
		r.skip("the driver's word: "+what, err.Error())
		return nil
	}
	// Between the first half second and the end everybody is at work.
	inside := slices.DeleteFunc(slices.Clone(all), func(s seen) bool {
		since := s.when.Sub(began)
		return since < 500*time.Millisecond || since > length
	})
	var said, details []string
	values := map[string]float64{"samples": float64(len(inside))}
	for i, c := range children {
		l, err := c.next("load")
		if err != nil {
			return err
		}
		took := l.number("drainedNanoseconds")
		worked := 100 * l.number("workNanoseconds") / took * 100 / r.full
		busy := 100 * (1 - l.number("thoughtNanoseconds")/took)
		sum, low, high := 0, math.MaxInt, 0
		for _, s := range inside {
			p := s.percent[c.pid]
			sum, low, high = sum+p, min(low, p), max(high, p)
		}
		mean := float64(sum) / float64(max(len(inside), 1))
		said = append(said, fmt.Sprintf("program %d did %.1f %% (at it %.0f %% of the time): driver says %.1f (%d to %d)", i+1, worked, busy, mean, min(low, high), high))
		values[fmt.Sprintf("worked_percent_%d", i+1)], values[fmt.Sprintf("driver_percent_%d", i+1)] = worked, mean
	}
	for _, s := range all {
		details = append(details, fmt.Sprintf("seen %.3f s after the start, at %d: %v", s.when.Sub(began).Seconds(), s.at, s.percent))
	}
	r.row(Row{What: "the driver's word: " + what, Observed: strings.Join(said, "; "), Verdict: Noted, Values: values, Details: details})
	if !first && !r.Quick || len(inside) < 3 {
		return nil
	}
	var periods, late []float64
	for i, s := range inside {
		if i > 0 {
			periods = append(periods, float64(s.at-inside[i-1].at)/1000)
		}
		late = append(late, float64(s.when.UnixMicro()-int64(s.at))/1000)
	}
	slices.Sort(periods)
	slices.Sort(late)
	r.note("period of the driver's figures", fmt.Sprintf("%.1f ms (%.1f to %.1f)", periods[len(periods)/2], periods[0], periods[len(periods)-1]), map[string]float64{"period_ms": periods[len(periods)/2]})
	text := fmt.Sprintf("%.1f ms (%.1f to %.1f) behind the wall's clock", late[len(late)/2], late[0], late[len(late)-1])
	if math.Abs(late[0]) > 60_000 {
		text = "not known: the driver's clock isn't the wall's"
	}
	r.note("lateness of the driver's figures when first seen", text, map[string]float64{"late_ms": late[len(late)/2]})
	return nil
}

// slices looks at how the card changes between programs: the simulator and the
// software GPU assume turns of 2 ms and 20 us for a change.
func (r *runner) slices() error {
	length := pick(r, "500ms", "2s")
	for _, n := range []int{1, 2} {
		var children []*child
		for range n {
			c, err := r.start(nil, 20*time.Second, probe, "slices", "--wait", "--for", length, "--kernel", "50us")
			if err != nil {
				return err
			}
			defer c.kill()
			if _, err := c.next("ready"); err != nil {
				return err
			}
			children = append(children, c)
		}
		for _, c := range children {
			fmt.Fprintln(c.in)
		}
		together := 0.0
		for i, c := range children {
			l, err := c.next("slices")
			if err != nil {
				return err
			}
			together += l.number("gotPercent")
			values := map[string]float64{}
			for name := range l {
				if strings.HasSuffix(name, "Microseconds") {
					values[name] = l.number(name)
				}
			}
			values["interruptions"] = l.number("interruptions")
			r.note(fmt.Sprintf("turns of program %d of %d", i+1, n),
				fmt.Sprintf("kernels of %.1f us, %d times away in %d of them, for %.0f us (tenth %.0f, nine tenths %.0f, most %.0f); turns of its own %.0f us (%.0f to %.0f)",
					l.number("kernelMicroseconds"), l.int("interruptions"), l.int("kernels"), l.number("awayP50Microseconds"), l.number("awayP10Microseconds"), l.number("awayP90Microseconds"), l.number("awayMaxMicroseconds"),
					l.number("turnP50Microseconds"), l.number("turnP10Microseconds"), l.number("turnP90Microseconds")), values)
		}
		if n == 2 {
			r.note("two programs with kernels of 50 us together", fmt.Sprintf("%.1f %% of the card: what is missing went into changes and waiting for batches", together), map[string]float64{"together_percent": together})
		}
	}
	return nil
}

// death looks at how long a killed process' memory stays taken.
func (r *runner) death() error {
	var listed, freed []float64
	for range pick(r, 2, 5) {
		before, err := r.door.Occupancy(r.card.UUID)
		if err != nil {
			return err
		}
		pids := r.listedPIDs()
		c, err := r.start(nil, 20*time.Second, probe, "alloc", "2GiB", "--touch", "--hold")
		if err != nil {
			return err
		}
		defer c.kill()
		if _, err := c.next("hold"); err != nil {
			return err
		}
		r.learnPID(pids, c.pid)
		c.killGroup()
		killed := time.Now()
		isListed, isFreed := -1.0, -1.0
		for time.Since(killed) < 5*time.Second && r.ctx.Err() == nil && (isListed < 0 || isFreed < 0) {
			now, err := r.door.Occupancy(r.card.UUID)
			if err != nil {
				return err
			}
			ms := float64(time.Since(killed).Microseconds()) / 1000
			there := false
			for _, p := range now.Processes {
				there = there || r.own(p.PID) == c.pid
			}
			if !there && isListed < 0 {
				isListed = ms
			}
			if now.UsedBytes < before.UsedBytes+mib*64 && isFreed < 0 {
				isFreed = ms
			}
			time.Sleep(time.Millisecond)
		}
		if isFreed < 0 {
			r.must(false, "memory of a killed process is free again", "within 5 s", "it isn't", nil)
			return nil
		}
		listed, freed = append(listed, isListed), append(freed, isFreed)
		c.end()
	}
	slices.Sort(listed)
	slices.Sort(freed)
	r.note("a killed process with 2 GiB is off the driver's list", fmt.Sprintf("after %.1f ms (%.1f to %.1f)", listed[len(listed)/2], listed[0], listed[len(listed)-1]), map[string]float64{"ms": listed[len(listed)/2]})
	r.must(true, "memory of a killed process is free again", "within 5 s", fmt.Sprintf("after %.1f ms (%.1f to %.1f)", freed[len(freed)/2], freed[0], freed[len(freed)-1]), map[string]float64{"ms": freed[len(freed)/2]})
	return nil
}
