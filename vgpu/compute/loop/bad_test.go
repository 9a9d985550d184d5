package loop_test

import (
	"encoding/binary"
	"math/rand/v2"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/carve-gpu/carve/vgpu/compute/sim"
	"github.com/carve-gpu/carve/vgpu/region"
)

// What one tenant does to itself or its files leaves the others what is theirs.
func TestBadNeighbours(t *testing.T) {
	scribble := func(b byte) func(tenants []*tenant) {
		return func(tenants []*tenant) {
			bytes := make([]byte, 256<<10)
			for i := range bytes {
				bytes[i] = b
			}
			f, err := os.OpenFile(tenants[1].share.Usage, os.O_WRONLY, 0)
			if err == nil {
				_, err = f.WriteAt(bytes, 0)
				f.Close()
			}
			if err != nil {
				t.Error(err)
			}
		}
	}
	// Every few milliseconds its account says something else, or the same untruth.
	account := func(words func(n int, b []byte)) func(tenants []*tenant) {
		n := 0
		return func(tenants []*tenant) {
			b := make([]byte, 48)
			words(n, b)
			n++
			f, err := os.OpenFile(tenants[1].share.Usage, os.O_WRONLY, 0)
			if err != nil {
				t.Error(err)
				return
			}
			defer f.Close()
			// What struct carve_usage_line has of compute, of the first slot on the first card.
			if _, err := f.WriteAt(b, 4096+region.MaxSlots*128+80); err != nil {
				t.Error(err)
			}
		}
	}
	put := binary.LittleEndian.PutUint64
	noise := rand.New(rand.NewPCG(1, 2))
	type neighbour struct {
		do    func(tenants []*tenant)
		often bool
	}
	for name, bad := range map[string]neighbour{
		"killed":      {do: func(tenants []*tenant) { syscall.Kill(tenants[1].pid, syscall.SIGKILL) }},
		"file zeroed": {do: scribble(0)},
		"file of 255": {do: scribble(255)},
		"file short": {do: func(tenants []*tenant) {
			syscall.Kill(tenants[1].pid, syscall.SIGKILL) // it would be ended by its own access
			if err := os.Truncate(tenants[1].share.Usage, 0); err != nil {
				t.Error(err)
			}
		}},
		"account of noise": {often: true, do: account(func(_ int, b []byte) {
			for i := 0; i < len(b); i += 8 {
				put(b[i:], noise.Uint64())
			}
		})},
		"account that is always hungry": {often: true, do: account(func(n int, b []byte) {
			put(b, uint64(1000+2*n))
			put(b[16:], uint64(soft.clock.Now()))
			put(b[24:], 1<<63|1<<40)
			put(b[32:], 1<<50)
			put(b[40:], uint64(soft.clock.Now()))
		})},
		"account that is being written for ever": {often: true, do: account(func(n int, b []byte) { put(b, uint64(1001+2*n)) })},
	} {
		t.Run(name, func(t *testing.T) {
			members := two(false)
			events := map[time.Duration]func([]*tenant){2 * time.Second: bad.do}
			for at := 2 * time.Second; bad.often && at < 5*time.Second; at += 7 * time.Millisecond {
				events[at] = bad.do
			}
			events[5*time.Second] = func(tenants []*tenant) { syscall.Kill(tenants[1].pid, syscall.SIGKILL) }
			r := run(t, members, 1, scene{plan: plan{3 * time.Second, 2 * time.Second, 1}, gone: map[int]bool{1: true}, events: events})
			if got := points(r.Windows[0][0]); got < 30-sim.Goal || got > 30+sim.Goal {
				t.Errorf("the neighbour has %.1f of 30 points", got)
			}
		})
	}
}
