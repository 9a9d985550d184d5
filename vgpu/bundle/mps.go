package bundle

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/carve-gpu/carve/vgpu/gpu"
)

// clientPercent is the part of the card's multiprocessors that each client gets.
const clientPercent = 50

// mps runs programs as clients of an MPS daemon that is this run's own. The card's
// compute mode stays what it is, as everything that others would notice.
func (r *runner) mps() error {
	if err := r.Root.MPSPrograms(); err != nil {
		r.skip("clients of MPS", err.Error())
		return nil
	}
	daemon, err := r.startMPS()
	if err != nil {
		r.skip("clients of MPS", err.Error())
		return nil
	}
	defer daemon.end()
	t := terms{memory: max(r.contextBytes, 600*mib) + 2000*mib, context: r.contextBytes, mpsPercent: clientPercent}
	for _, step := range []func(*mpsDaemon, terms) error{r.mpsClient, r.mpsOutsider, r.mpsAtOnce, r.mpsServerLost} {
		if err := step(daemon, t); err != nil {
			return err
		}
	}
	return nil
}

// mpsDaemon is a control daemon with its folders.
type mpsDaemon struct {
	r     *runner
	dir   string
	child *child
}

func (m *mpsDaemon) pipe() string { return "CUDA_MPS_PIPE_DIRECTORY=" + filepath.Join(m.dir, "pipe") }

// command is the control program, set up to find this daemon.
func (m *mpsDaemon) command(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, filepath.Join(m.r.Root.Path, gpu.MPSControl), args...)
	cmd.Env = append(m.r.environment(nil), m.pipe(), "CUDA_MPS_LOG_DIRECTORY="+filepath.Join(m.dir, "log"))
	return cmd
}

// say gives the daemon one command.
func (m *mpsDaemon) say(what string) (string, error) {
	ctx, cancel := context.WithTimeout(m.r.ctx, 10*time.Second)
	defer cancel()
	cmd := m.command(ctx)
	cmd.Stdin = strings.NewReader(what + "\n")
	cmd.WaitDelay = time.Second
	out, err := cmd.CombinedOutput()
	return strings.TrimSpace(string(out)), err
}

// servers are the pids of its servers.
func (m *mpsDaemon) servers() []int {
	out, err := m.say("get_server_list")
	if err != nil {
		return nil
	}
	var pids []int
	for _, word := range strings.Fields(out) {
		if pid, err := strconv.Atoi(word); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids
}

// end ends the daemon and its servers, clients or not.
func (m *mpsDaemon) end() {
	left := m.servers()
	m.say("quit -t 1")
	for _, pid := range left {
		m.killServer(pid)
	}
	m.child.kill()
}

// killServer kills a process if it is a server of MPS.
func (m *mpsDaemon) killServer(pid int) bool {
	name, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
	// The kernel keeps 15 characters of a name.
	return err == nil && strings.HasPrefix(strings.TrimSpace(string(name)), filepath.Base(gpu.MPSServer)[:15]) && syscall.Kill(pid, syscall.SIGKILL) == nil
}

func (r *runner) startMPS() (*mpsDaemon, error) {
	m := &mpsDaemon{r: r, dir: filepath.Join(r.work, "mps")}
	for _, dir := range []string{"pipe", "log"} {
		if err := os.MkdirAll(filepath.Join(m.dir, dir), 0o755); err != nil {
			return nil, err
		}
	}
	cmd := m.command(context.Background(), "-f")
	c, err := r.launch(filepath.Base(gpu.MPSControl), cmd, 2*time.Minute)
	if err != nil {
		return nil, err
	}
	m.child = c
	for began := time.Now(); time.Since(began) < 10*time.Second && r.ctx.Err() == nil; time.Sleep(50 * time.Millisecond) {
		if _, err = m.say("get_default_active_thread_percentage"); err == nil {
			return m, nil
		}
	}
	c.killGroup()
	return nil, fmt.Errorf("the daemon doesn't answer: %v; %w", err, c.complaint())
}

// newClient makes a share whose programs find the daemon.
func (r *runner) newClient(m *mpsDaemon, t terms) (*share, error) {
	s, err := r.newShare(t)
	if err == nil {
		s.env = []string{m.pipe(), fmt.Sprintf("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=%d", t.mpsPercent)}
	}
	return s, err
}

// mpsClient looks at what a client sees, and at its limit of memory.
func (r *runner) mpsClient(m *mpsDaemon, t terms) error {
	processors := 0
	if lines, err := r.lines(nil, 20*time.Second, probe, "info"); err != nil {
		return err
	} else if card, ok := stepOf(lines, "card"); ok {
		processors = int(card.int("multiprocessors"))
	}
	s, err := r.newClient(m, t)
	if err != nil {
		return err
	}
	lines, err := r.lines(s, 30*time.Second, probe, "info")
	if err != nil {
		return err
	}
	card, ok := stepOf(lines, "card")
	if !ok || !card.bool("ok") {
		r.must(false, "a client of MPS begins", "a context", faultOf(lines), nil)
		return nil
	}
	sees := int(card.int("multiprocessors"))
	r.must(sees > 0 && sees <= processors*clientPercent/100+8, fmt.Sprintf("a client with %d %% sees its part of the multiprocessors", clientPercent),
		fmt.Sprintf("about %d of %d", processors*clientPercent/100, processors), fmt.Sprint(sees), map[string]float64{"multiprocessors": float64(sees)})
	r.must(uint64(card.int("cudaTotalBytes")) == t.memory, "a client sees its share of memory", bytesText(t.memory), bytesText(uint64(card.int("cudaTotalBytes"))), nil)
	for _, try := range []struct {
		what string
		size uint64
		want bool
	}{
		{"less than its share", t.memory - max(r.contextBytes, 600*mib) - 64*mib, true},
		{"its whole share beside its context", t.memory, false},
	} {
		s, err := r.newClient(m, t)
		if err != nil {
			return err
		}
		lines, err := r.lines(s, 30*time.Second, probe, "alloc", strconv.FormatUint(try.size, 10))
		if err != nil {
			return err
		}
		alloc, ok := stepOf(lines, "alloc")
		observed := "granted"
		if !alloc.bool("ok") {
			observed = faultOf(lines)
		}
		r.must(ok && alloc.bool("ok") == try.want && (try.want || strings.Contains(observed, "OUT_OF_MEMORY")), "a client asks for "+try.what,
			map[bool]string{true: "granted", false: "CUDA_ERROR_OUT_OF_MEMORY"}[try.want], observed, nil)
	}
	return nil
}

// mpsOutsider is a program that has lost the variables by which clients find the daemon.
func (r *runner) mpsOutsider(_ *mpsDaemon, t terms) error {
	s, err := r.newShare(t)
	if err != nil {
		return err
	}
	lines, err := r.lines(s, 30*time.Second, probe, "info")
	if err != nil {
		return err
	}
	observed := faultOf(lines)
	r.must(strings.Contains(observed, "MPS_CONNECTION_FAILED"), "a program that should be a client and isn't one", "ends with CUDA_ERROR_MPS_CONNECTION_FAILED", observed, nil)
	return nil
}

// mpsAtOnce has two clients want their parts of the card all the time. Kernels are as
// wide as what each sees, so with both at once each is as fast as alone.
func (r *runner) mpsAtOnce(m *mpsDaemon, t terms) error {
	if err := r.calibrate(); err != nil {
		return err
	}
	skip, window := pick(r, 300*time.Millisecond, time.Second), pick(r, time.Second, 3*time.Second)
	var children []*child
	defer func() {
		for _, c := range children {
			c.kill()
		}
	}()
	for range 2 {
		s, err := r.newClient(m, t)
		if err != nil {
			return err
		}
		c, err := r.start(s, skip+window+30*time.Second, probe, "load", "--wait", "--for", goDuration((skip + window).String()), "--skip", goDuration(skip.String()),
			"--window", goDuration(window.String()), "--iteration-ps", fmt.Sprint(r.iterationPS), "--kernels", "200us")
		if err != nil {
			return err
		}
		children = append(children, c)
		if _, err := c.next("ready"); err != nil {
			return err
		}
	}
	for _, c := range children {
		fmt.Fprintln(c.in, 0)
	}
	var each [2]float64
	for i, c := range children {
		l, err := c.next("window")
		if err != nil {
			return err
		}
		each[i] = 100 * l.number("workNanoseconds") / float64(window) * 100 / r.full
	}
	r.must(each[0]+each[1] > 150, fmt.Sprintf("two clients with %d %% of the multiprocessors each run at once", clientPercent), "each as if alone there, 200 % together; in turns it would be 100",
		fmt.Sprintf("%.1f and %.1f %%", each[0], each[1]), map[string]float64{"first_percent": each[0], "second_percent": each[1]})
	return nil
}

// mpsServerLost kills the server below a client: it must hear of it.
func (r *runner) mpsServerLost(m *mpsDaemon, t terms) error {
	s, err := r.newClient(m, t)
	if err != nil {
		return err
	}
	c, err := r.start(s, 30*time.Second, probe, "load", "--wait", "--for", "10s", "--iteration-ps", fmt.Sprint(r.iterationPS), "--kernels", "1ms")
	if err != nil {
		return err
	}
	defer c.kill()
	if _, err := c.next("ready"); err != nil {
		return err
	}
	fmt.Fprintln(c.in, 0)
	time.Sleep(500 * time.Millisecond)
	killed := 0
	for _, pid := range m.servers() {
		if m.killServer(pid) {
			killed++
		}
	}
	if killed == 0 {
		r.skip("a client whose server is killed", "the daemon lists no server that can be killed from here")
		return nil
	}
	began := time.Now()
	lines, err := c.rest()
	load, _ := stepOf(lines, "load")
	observed := load.fault()
	if err != nil {
		observed = err.Error()
	}
	r.must(observed != "" && !load.bool("ok"), "a client whose server is killed", "hears of it, and doesn't run on", fmt.Sprintf("%s after %.1f s", observed, time.Since(began).Seconds()), nil)
	again, err := r.newClient(m, t)
	if err != nil {
		return err
	}
	if lines, err = r.lines(again, 30*time.Second, probe, "info"); err != nil {
		return err
	}
	card, _ := stepOf(lines, "card")
	r.note("the next client after that", map[bool]string{true: "has a server again", false: faultOf(lines)}[card.bool("ok")], nil)
	return nil
}

// stepOf is the last line of a step.
func stepOf(lines []line, step string) (found line, ok bool) {
	for _, l := range lines {
		if l.text("step") == step {
			found, ok = l, true
		}
	}
	return found, ok
}

// faultOf is the first error in the lines.
func faultOf(lines []line) string {
	for _, l := range lines {
		if l.has("ok") && !l.bool("ok") {
			return l.fault()
		}
	}
	return "no error"
}
