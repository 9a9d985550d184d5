package bundle

import (
	"fmt"
	"math"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

// python runs a step of share.py and gives its line.
func (r *runner) python(s *share, env []string, args ...string) (line, error) {
	c, err := r.startPython(s, env, args...)
	if err != nil {
		return nil, err
	}
	defer c.kill()
	return c.next(args[0])
}

// startPython starts a step of share.py. Of env, "NAME=VALUE", programs get what the
// run's own environment doesn't have.
func (r *runner) startPython(s *share, env []string, args ...string) (*child, error) {
	interpreter, err := exec.LookPath(r.Python)
	if err != nil {
		return nil, err
	}
	args = append([]string{filepath.Join(r.Dir, "python/share.py")}, args...)
	if len(env) > 0 {
		args = append(append(append([]string{}, env...), interpreter), args...)
		if interpreter, err = exec.LookPath("env"); err != nil {
			return nil, err
		}
	}
	return r.start(s, 60*time.Second, interpreter, args...)
}

// pytorch drives PyTorch under the front, and without it for the ratio.
func (r *runner) pytorch() error {
	bare, err := r.python(nil, nil, "info")
	if err != nil || !bare.bool("ok") {
		why := ""
		if err != nil {
			why = err.Error()
		} else {
			why = bare.fault()
		}
		r.skip("PyTorch", r.Python+": "+why)
		return r.systemTools()
	}
	r.report.Machine["python"] = fmt.Sprintf("PyTorch %s, CUDA %s", bare.text("torch"), bare.text("cuda"))
	limit := max(r.contextBytes, 500*mib) + 6000*mib
	all := terms{memory: limit, context: r.contextBytes}
	for _, step := range []func(terms) error{r.torchMemory, r.torchAllocators, r.torchGraphs, r.torchLoad} {
		if err := step(all); err != nil {
			return err
		}
	}
	return r.systemTools()
}

func (r *runner) torchMemory(t terms) error {
	s, err := r.newShare(t)
	if err != nil {
		return err
	}
	l, err := r.python(s, nil, "info")
	if err != nil {
		return err
	}
	r.must(l.int("totalBytes") == int64(t.memory) && l.int("propertiesBytes") == int64(t.memory), "PyTorch sees the share (mem_get_info, get_device_properties)", bytesText(t.memory),
		fmt.Sprintf("%s and %s, %s free", bytesText(uint64(l.int("totalBytes"))), bytesText(uint64(l.int("propertiesBytes"))), bytesText(uint64(l.int("freeBytes")))), nil)
	for _, c := range []struct{ what, conf string }{
		{"PyTorch's allocator", ""},
		{"with expandable segments", "expandable_segments:True"},
		{"with cudaMallocAsync", "backend:cudaMallocAsync"},
	} {
		if s, err = r.newShare(t); err != nil {
			return err
		}
		l, err := r.python(s, conf(c.conf), "memory")
		if err != nil {
			r.must(false, "PyTorch up to the share and over it, "+c.what, "OutOfMemoryError at the limit", err.Error(), nil)
			continue
		}
		first, had := l.int("firstFreeBytes"), l.int("hadBytes")
		good := l.text("refused") == "OutOfMemoryError" && l.bool("good") && had <= first && first-had < 256*mib
		r.must(good, "PyTorch up to the share and over it, "+c.what, "OutOfMemoryError at the limit, and it goes on",
			fmt.Sprintf("%s had of %s free at first, then %s; afterwards %s free", bytesText(uint64(had)), bytesText(uint64(first)), orNone(l.text("refused")), bytesText(uint64(l.int("freeAfterBytes")))),
			map[string]float64{"had_bytes": float64(had), "first_free_bytes": float64(first)})
	}
	return nil
}

func conf(value string) []string {
	if value == "" {
		return nil
	}
	return []string{"PYTORCH_CUDA_ALLOC_CONF=" + value}
}

func (r *runner) torchAllocators(t terms) error {
	for _, c := range []string{"", "expandable_segments:True", "backend:cudaMallocAsync"} {
		var rate [2]float64
		for i := range rate {
			var s *share
			if i == 1 {
				var err error
				if s, err = r.newShare(t); err != nil {
					return err
				}
			}
			l, err := r.python(s, conf(c), "allocator", pick(r, "0.3", "1.5"))
			if err != nil {
				return err
			}
			rate[i] = l.number("callsPerSecond")
			if i == 1 {
				r.note("PyTorch blocks come and go, "+orDefault(c), fmt.Sprintf("%.0f a second, %.3f of bare; %d refused; %s in use at the end", rate[1], rate[1]/max(rate[0], 1), l.int("refused"), bytesText(uint64(l.int("usedBytes")))),
					map[string]float64{"ratio": rate[1] / max(rate[0], 1), "used_bytes": l.number("usedBytes")})
			}
		}
	}
	return nil
}

func orDefault(s string) string {
	if s == "" {
		return "default allocator"
	}
	return s
}

func (r *runner) torchGraphs(t terms) error {
	bare, err := r.python(nil, nil, "graphs")
	if err != nil {
		return err
	}
	s, err := r.newShare(t)
	if err != nil {
		return err
	}
	l, err := r.python(s, nil, "graphs")
	if err != nil {
		return err
	}
	r.must(l.bool("same") && l.int("freeChangedBytes") == 0, "PyTorch captures a graph and replays it 500 times", "same result, same memory",
		fmt.Sprintf("%.1f us a replay, %.3f of bare; memory changed by %d", l.number("replayMicroseconds"), l.number("replayMicroseconds")/max(bare.number("replayMicroseconds"), 1e-9), l.int("freeChangedBytes")),
		map[string]float64{"replay_us": l.number("replayMicroseconds"), "bare_replay_us": bare.number("replayMicroseconds")})
	return nil
}

// torchLoad compares rates of matrix products.
func (r *runner) torchLoad(t terms) error {
	seconds := pick(r, "0.6", "6")
	rates := func(shares ...*share) ([]float64, error) {
		var children []*child
		for _, s := range shares {
			before := r.listedPIDs()
			c, err := r.startPython(s, nil, "load", seconds)
			if err != nil {
				return nil, err
			}
			defer c.kill()
			if _, err := c.next("ready"); err != nil {
				return nil, err
			}
			r.learnPID(before, c.pid)
			if s != nil {
				r.owner(c.pid, s)
			}
			children = append(children, c)
		}
		var out []float64
		for _, c := range children {
			fmt.Fprintln(c.in)
		}
		for _, c := range children {
			l, err := c.next("load")
			if err != nil {
				return nil, err
			}
			out = append(out, l.number("productsPerSecond"))
		}
		return out, nil
	}
	bare, err := rates(nil)
	if err != nil {
		return err
	}
	s, err := r.newShare(t)
	if err != nil {
		return err
	}
	under, err := rates(s)
	if err != nil {
		return err
	}
	r.note("PyTorch matrix products under the library, no share of compute", fmt.Sprintf("%.0f a second, %.4f of bare", under[0], under[0]/max(bare[0], 1)), map[string]float64{"ratio": under[0] / max(bare[0], 1), "bare_per_second": bare[0]})
	defer r.divide()()
	var shares []*share
	for _, percent := range []uint32{30, 60} {
		own := t
		own.ppm = percent * 10_000
		s, err := r.newShare(own)
		if err != nil {
			return err
		}
		r.join(s)
		shares = append(shares, s)
	}
	both, err := rates(shares...)
	if err != nil {
		return err
	}
	for i, percent := range []float64{30, 60} {
		got := 100 * both[i] / max(bare[0], 1)
		// Two programs share caches and power as well as time, so less is to be
		// expected of each than its part of the time.
		r.must(math.Abs(got-percent) <= r.Band+3, fmt.Sprintf("two PyTorch programs: the one with %.0f %%", percent), fmt.Sprintf("%.0f ± %g %% of the bare rate", percent, r.Band+3), fmt.Sprintf("%.1f %%", got), map[string]float64{"got_percent": got})
	}
	return nil
}

// systemTools looks at what other programs show.
func (r *runner) systemTools() error {
	const limit = 5000 * mib
	s, err := r.newShare(terms{memory: limit, context: r.contextBytes})
	if err != nil {
		return err
	}
	if l, err := r.python(s, nil, "nvml"); err == nil && l.bool("ok") {
		r.must(strings.Contains(fmt.Sprint(l["cards"]), fmt.Sprint(float64(limit))), "pynvml shows the share", bytesText(limit), fmt.Sprint(l["cards"]), nil)
	} else {
		r.skip("pynvml", "it isn't there")
	}
	smi, err := exec.LookPath("nvidia-smi")
	if r.software {
		smi, err = filepath.Join(r.Root.Path, "usr/bin/nvidia-smi"), nil
	}
	if err != nil {
		r.skip("nvidia-smi", "it isn't there")
		return nil
	}
	lines, err := r.lines(s, 20*time.Second, smi, "--query-gpu=uuid,memory.total", "--format=csv,noheader")
	if err != nil {
		return err
	}
	var own string
	for _, l := range lines {
		if strings.Contains(l.text("text"), r.card.UUID) {
			own = l.text("text")
		}
	}
	r.must(strings.Contains(strings.TrimPrefix(own, r.card.UUID), fmt.Sprint(limit/mib)), "nvidia-smi shows the share", bytesText(limit), orNone(own), nil)
	return nil
}
