package loop_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"testing"
	"time"

	"github.com/carve-gpu/carve/vgpu/compute/loop"
	"github.com/carve-gpu/carve/vgpu/compute/sim"
	"github.com/carve-gpu/carve/vgpu/region"
)

// A container that runs short processes one after another, or several at a time, has its
// share, not that for each: with an agent and without, however they end. Beside others the
// driver's word on what such a process used comes too late to settle its account, and what
// it pays by the pace is some points off.
func TestShortProcesses(t *testing.T) {
	const beside = 6
	for name, c := range map[string]struct {
		args           string
		agent, elastic bool
		beside         bool
	}{
		"of 5 ms, no agent":                         {args: "--kernel 1ms --launches 5"},
		"of 4 kernels of 5 ms, 8 at once, no agent": {args: "--kernel 5ms --launches 4 --at-once 8"},
		"killed after 30 ms, no agent":              {args: "--kernel 1ms --kill-after 30ms"},
		"of 1 s":                                    {args: "--kernel 20ms --launches 10", agent: true},
		"killed after 200 ms, 4 at once":            {args: "--kernel 3ms --kill-after 200ms --at-once 4", agent: true},
		"of 100 ms, elastic":                        {args: "--kernel 5ms --launches 20", agent: true, elastic: true},
		"of 20 ms, beside another":                  {args: "--kernel 1ms --launches 20", agent: true, beside: true},
		"of 20 ms, 8 at once, beside another":       {args: "--kernel 5ms --launches 4 --at-once 8", agent: true, beside: true},
		"of 100 ms, elastic, beside another":        {args: "--kernel 100ms --launches 1", agent: true, elastic: true, beside: true},
	} {
		t.Run(name, func(t *testing.T) {
			var other *sim.Member
			within := float64(sim.Goal)
			if c.beside {
				other = &sim.Member{SharePPM: 780_000, Program: sim.Program{Means: []int64{sim.Millisecond}, Streams: 1}}
				within = beside
			}
			got, others := chain(t, c.args, sim.Member{SharePPM: 200_000, Elastic: c.elastic}, other, c.agent)
			// An elastic share that is alone on the card may have all of it.
			if got < 20-sim.Goal || got > 20+within && (!c.elastic || c.beside) {
				t.Errorf("the processes have %.1f of 20 points", got)
			}
			if c.beside && others < 78-within {
				t.Errorf("the one beside them has %.1f of 78 points", others)
			}
			t.Logf("%.1f and %.1f points", got, others)
		})
	}
}

// chain runs a chain of processes, beside a steady tenant or alone, and returns what each
// had of the card in points.
func chain(t *testing.T, args string, m sim.Member, beside *sim.Member, agent bool) (got, other float64) {
	t.Helper()
	p := plan{2 * time.Second, 4 * time.Second, 1}
	tenants := []*tenant{start(t, 0, m, 1, p, "chain "+args)}
	if beside != nil {
		b := *beside
		b.Elastic = m.Elastic
		tenants = append(tenants, start(t, 1, b, 1, p, ""))
	}
	begin := soft.clock.Now() + int64(100*time.Millisecond)
	var shares []loop.Share
	for _, one := range tenants {
		shares = append(shares, one.share)
		fmt.Fprintln(one.in, begin)
	}
	if !agent {
		f, err := region.OpenCompute(tenants[0].share.Limits, 1)
		if err == nil {
			err = errors.Join(f.Divide(true), f.Close())
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	clock := &stopClock{Clock: soft.clock}
	var card, steady []int64
	measure := func() {
		card = append(card, cardBusy(t))
		if beside != nil {
			ns, err := soft.clock.Busy(0, tenants[1].pid)
			if err != nil {
				t.Error(err)
			}
			steady = append(steady, ns)
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	for at := time.Duration(0); at < p.length(); at += 100 * time.Millisecond {
		if at == p.from {
			clock.stops = append(clock.stops, stop{begin + int64(at), measure})
		}
		// As the agent does, which looks less often, in time that passes.
		clock.stops = append(clock.stops, stop{begin + int64(at), func() { reclaim(t, tenants[0].share.Usage) }})
	}
	clock.stops = append(clock.stops, stop{begin + int64(p.length()), func() { measure(); cancel() }})
	if agent {
		loop.New(loop.Config{
			Clock: clock, Seed: 1, Log: slog.New(slog.NewTextHandler(t.Output(), nil)),
			Shares: func() []loop.Share { return shares },
			Driver: func() loop.Driver { return soft.door },
			Process: func(pid int) (region.Process, loop.Key, bool) {
				process, err := region.ReadProcess("/proc", pid)
				for _, one := range tenants {
					if err == nil && (pid == one.pid || parent(pid) == one.pid) {
						return process, one.share.Key, true
					}
				}
				return process, loop.Key{}, false
			},
		}).Run(ctx)
	} else {
		clock.Sleep(ctx, begin+int64(p.length()))
	}
	cancel()
	if err := soft.clock.Leave(); err != nil {
		t.Fatal(err)
	}
	if beside != nil {
		tenants[1].read(t, "window")
	}
	for _, one := range tenants {
		if l := one.read(t, "load"); !l.OK {
			t.Errorf("%s: %s", one.share.UID, l.ErrorName)
		}
		if err := one.cmd.Wait(); err != nil {
			t.Errorf("%s: %v", one.share.UID, err)
		}
	}
	if err := soft.clock.Join(); err != nil {
		t.Fatal(err)
	}
	window := float64(p.window)
	if beside != nil {
		other = 100 * float64(steady[1]-steady[0]) / window
	}
	return 100*float64(card[1]-card[0])/window - other, other
}

// cardBusy is how long the card has worked for anybody.
func cardBusy(t *testing.T) int64 {
	t.Helper()
	var said struct {
		Cards []struct{ BusyNanoseconds int64 }
	}
	out, err := exec.Command(filepath.Join(softDir, "build/softgpu"), "show", soft.root, "-o", "json").Output()
	if err == nil {
		err = json.Unmarshal(out, &said)
	}
	if err != nil || len(said.Cards) == 0 {
		t.Fatal(err)
	}
	return said.Cards[0].BusyNanoseconds
}

var parentLine = regexp.MustCompile(`(?m)^PPid:\s*(\d+)`)

func parent(pid int) int {
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if found := parentLine.FindSubmatch(text); found != nil {
		n, _ := strconv.Atoi(string(found[1]))
		return n
	}
	return 0
}

// reclaim takes the charges off slots whose processes are gone.
func reclaim(t *testing.T, usage string) {
	t.Helper()
	u, err := region.ReadUsage(usage, 1)
	if err != nil {
		t.Error(err)
	}
	for _, s := range u.Slots {
		if s.State != region.SlotLive && s.State != region.SlotDying {
			continue
		}
		if _, err := region.ReadProcess("/proc", int(s.PID)); err == nil {
			continue
		}
		if err := region.ReclaimSlot(usage, s); err != nil && !errors.Is(err, region.ErrSlotChanged) {
			t.Error(err)
		}
	}
}
