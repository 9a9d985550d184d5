package loop

import (
	"encoding/binary"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/carve-gpu/carve/vgpu/compute"
	"github.com/carve-gpu/carve/vgpu/region"
)

// BenchmarkLookAt32 is one look at a card that 32 containers share, each with a process
// that works: some 285 of them are made in a second while anybody works.
func BenchmarkLookAt32(b *testing.B) {
	dir := b.TempDir()
	var shares []Share
	for i := range 32 {
		s := Share{
			Key: Key{fmt.Sprint(i), "app"}, Limits: filepath.Join(dir, fmt.Sprint("limits", i)), Usage: filepath.Join(dir, fmt.Sprint("usage", i)),
			Cards: []CardShare{{UUID: "GPU-1", SharePPM: 30_000}},
		}
		if err := region.CreateLimits(s.Limits, region.Limits{Cards: []region.Card{{UUID: region.UUID{1}, LimitBytes: 1 << 30, ComputePPM: 30_000}}}); err != nil {
			b.Fatal(err)
		}
		if err := region.CreateUsage(s.Usage); err != nil {
			b.Fatal(err)
		}
		file, err := os.OpenFile(s.Usage, os.O_WRONLY, 0)
		if err != nil {
			b.Fatal(err)
		}
		// carve_region.h: high water, the slot's state and pid, and that it waits.
		word := binary.LittleEndian.AppendUint64
		for at, bytes := range map[int64][]byte{24: {1}, 4096: word(nil, 2|7<<32), 4096 + 128*1024 + 104: word(nil, 1<<63)} {
			if _, err := file.WriteAt(bytes, at); err != nil {
				b.Fatal(err)
			}
		}
		file.Close()
		shares = append(shares, s)
	}
	l := New(Config{
		Mode: compute.Credit, Log: slog.New(slog.DiscardHandler), Shares: func() []Share { return shares },
		Driver: func() Driver { return nil },
	})
	l.refresh(0)
	defer l.close()
	now := int64(1)
	cpu := cpuTime()
	for b.Loop() {
		now += 3 * ms
		l.look(l.cards["GPU-1"], now)
	}
	if !l.cards["GPU-1"].active() {
		b.Error("nobody works")
	}
	b.ReportMetric(float64(cpuTime()-cpu)/float64(b.N)*285/1e6, "compute_look_ms_per_s")
}

func cpuTime() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		panic(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
