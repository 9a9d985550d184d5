package bundle

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/carve-gpu/carve/vgpu/native"
)

// The folder that `make gpu-bundle` makes, unpacked where nothing else of the tree is
// in reach, and a software GPU's root on the machine's clock.
var made struct{ base, dir, root string }

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "carve-bundle-test-")
	if err == nil {
		err = makeBundle(dir)
	}
	code := 1
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
	} else {
		code = m.Run()
	}
	exec.Command("../soft/build/softgpu", "destroy", made.root).Run()
	os.RemoveAll(dir)
	os.Exit(code)
}

func makeBundle(dir string) error {
	made.base = dir
	made.dir, made.root = filepath.Join(dir, "unpacked/gpu-bundle"), filepath.Join(dir, "root")
	runner, packed := filepath.Join(dir, "carve-gputest"), filepath.Join(dir, "gpu-bundle")
	if err := os.Mkdir(filepath.Join(dir, "unpacked"), 0o755); err != nil {
		return err
	}
	if err := native.Make("../soft"); err != nil {
		return err
	}
	if err := native.Make("../lib", "all", "conformance"); err != nil {
		return err
	}
	// What the runner is compiled of, and the packer.
	if err := native.Sources("../../cmd/carve-gputest", "../../api", ".."); err != nil {
		return err
	}
	for _, command := range [][]string{
		{"go", "build", "-o", runner, "./cmd/carve-gputest"},
		{"vgpu/bundle/pack.sh", packed, runner},
		{"tar", "-C", filepath.Join(dir, "unpacked"), "-xzf", packed + ".tar.gz"},
		{"rm", "-r", packed, runner},
		{"vgpu/soft/build/softgpu", "init", made.root, "--card", "a100-80", "--card", "t4", "--seed", "1"},
	} {
		cmd := exec.Command(command[0], command[1:]...)
		cmd.Dir = "../.."
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%v: %w\n%s", command, err, out)
		}
	}
	return nil
}

// command is the bundle's one command, in an empty folder.
func command(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	dir := t.TempDir()
	cmd := exec.Command(filepath.Join(made.dir, "run"), append([]string{"-driver-root", made.root, "-o", filepath.Join(dir, "results")}, args...)...)
	cmd.Dir = dir
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return cmd
}

// leftovers are what runs that have ended left on this machine.
func leftovers(t *testing.T) []string {
	t.Helper()
	folders, err := filepath.Glob("/tmp/c???/pid")
	if err != nil {
		t.Fatal(err)
	}
	var out []string
	for _, f := range folders {
		b, err := os.ReadFile(f)
		if err != nil {
			continue // it is going away
		}
		pid, _, _ := strings.Cut(strings.TrimSpace(string(b)), " ")
		if _, err := os.Stat("/proc/" + pid); err != nil {
			out = append(out, f)
		}
	}
	// Another run may have it; the last one removes it.
	if dir, err := os.Open(carveDir); err == nil {
		if unix.Flock(int(dir.Fd()), unix.LOCK_EX|unix.LOCK_NB) == nil {
			out = append(out, carveDir)
		}
		dir.Close()
	}
	if b, err := exec.Command("pgrep", "-f", made.dir).Output(); err == nil {
		out = append(out, strings.Fields(string(b))...)
	}
	return out
}

func run(t *testing.T, cmd *exec.Cmd) (text string, code int, report Report) {
	t.Helper()
	before := leftovers(t)
	defer func() {
		if after := leftovers(t); !slices.Equal(before, after) {
			t.Errorf("it left something: %v, before %v", after, before)
		}
	}()
	return finish(t, cmd)
}

func finish(t *testing.T, cmd *exec.Cmd) (text string, code int, report Report) {
	t.Helper()
	out, err := cmd.CombinedOutput()
	text = string(out)
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	files, err := filepath.Glob(filepath.Join(cmd.Dir, "results/*.json"))
	if err != nil || len(files) != 1 {
		return text, cmd.ProcessState.ExitCode(), report
	}
	b, err := os.ReadFile(files[0])
	if err == nil {
		err = json.Unmarshal(b, &report)
	}
	if err == nil {
		_, err = os.Stat(strings.TrimSuffix(files[0], "json") + "md")
	}
	if err != nil {
		t.Error(err)
	}
	return text, cmd.ProcessState.ExitCode(), report
}

func TestQuickRunAsOnACard(t *testing.T) {
	text, code, report := run(t, command(t, "-quick", "-band", "30"))
	t.Log(text)
	if code != 0 || !report.Software || report.Count(Fails) != 0 || report.Count(Holds) < 25 {
		t.Errorf("exit %d, %d hold, %d fail", code, report.Count(Holds), report.Count(Fails))
	}
	if os.Geteuid() == 0 && report.Machine["way"] != string(WayNamespace) {
		t.Errorf("the library got in by %s", report.Machine["way"])
	}
	seen := map[string]int{}
	share := map[string]float64{}
	for _, row := range report.Rows {
		seen[row.Part]++
		if row.Part == "contention" && row.Values["got_percent"] > 0 {
			share[fmt.Sprint(row.Values["share_percent"])] = row.Values["got_percent"]
		}
		if strings.HasPrefix(row.What, "turns of program 2 of 2") {
			// The instrument measures what the software GPU does: turns of 2 ms, 20 us a change.
			if away, turn := row.Values["awayP50Microseconds"], row.Values["turnP50Microseconds"]; away < 2030 || away > 2050 || turn < 1950 || turn > 2100 {
				t.Errorf("turns of 2 ms look like %.0f us away and %.0f us of its own", away, turn)
			}
		}
	}
	for _, p := range Parts() {
		if seen[p] == 0 {
			t.Errorf("nothing was said of %s", p)
		}
	}
	if share["60"] <= share["30"] {
		t.Errorf("who has 60 %% got %.1f, who has 30 %% got %.1f", share["60"], share["30"])
	}
}

// Without any right to mount: as a user that isn't root and has no capability.
func TestQuickRunWithoutRights(t *testing.T) {
	cmd := command(t, "-quick", "-parts", "exports,memory")
	if os.Geteuid() == 0 {
		// Both folders are the test's own, and made for its user alone.
		if err := errors.Join(os.Chmod(made.base, 0o755), os.Chmod(filepath.Dir(cmd.Dir), 0o755), os.Chmod(cmd.Dir, 0o777)); err != nil {
			t.Fatal(err)
		}
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: 65534, Gid: 65534}
	}
	text, code, report := run(t, cmd)
	t.Log(text)
	if code != 0 || report.Count(Fails) != 0 || report.Count(Holds) < 20 || !strings.HasPrefix(report.Machine["way"], string(WayRelocated)) {
		t.Errorf("exit %d, %d hold, %d fail, by %s", code, report.Count(Holds), report.Count(Fails), report.Machine["way"])
	}
}

// The script for PyTorch and what is made of it, with a stand-in for PyTorch itself,
// whose memory is the driver's and whose rates are nobody's.
func TestPyTorchPart(t *testing.T) {
	if _, err := exec.LookPath("python3"); err != nil {
		t.Skip("no python3 here")
	}
	stand, err := filepath.Abs("testdata")
	if err != nil {
		t.Fatal(err)
	}
	cmd := command(t, "-quick", "-parts", "pytorch")
	cmd.Env = append(os.Environ(), "PYTHONPATH="+stand, "PYTHONDONTWRITEBYTECODE=1")
	text, _, report := run(t, cmd)
	t.Log(text)
	held := 0
	for _, row := range report.Rows {
		if strings.HasPrefix(row.What, "two PyTorch programs") {
			continue // no kernel runs here
		}
		if row.Verdict == Fails || row.Verdict == Skipped && row.What != "pynvml" {
			t.Errorf("%+v", row)
		}
		if row.Verdict == Holds {
			held++
		}
	}
	if held < 6 || report.Machine["python"] == "" || len(report.Rows) < 12 {
		t.Errorf("%d rows, %d hold, %q", len(report.Rows), held, report.Machine["python"])
	}
}

func TestNoCard(t *testing.T) {
	cmd := command(t, "-driver-root", t.TempDir())
	text, code, report := run(t, cmd)
	if code != 1 || len(report.Rows) != 0 || !strings.Contains(text, "no card that can be used") {
		t.Errorf("exit %d: %s", code, text)
	}
}

func TestWrongUse(t *testing.T) {
	for _, args := range [][]string{{"-parts", "nonsense"}, {"-way", "magic"}, {"more"}, {"-nonsense"}} {
		if text, code, _ := run(t, command(t, args...)); code != 2 {
			t.Errorf("%v: exit %d: %s", args, code, text)
		}
	}
}

// Programs that never answer don't hold a run up, and are ended with it.
func TestProgramsThatHang(t *testing.T) {
	probe := filepath.Join(made.dir, "bin/gpuprobe")
	if err := os.Rename(probe, probe+".real"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.Rename(probe+".real", probe) })
	// It works where the way is looked for, and hangs afterwards.
	script := "#!/bin/sh\ncase $1 in info | alloc | paths) exec " + probe + ".real \"$@\" ;; esac\nsleep 1000 & sleep 1000\n"
	if err := os.WriteFile(probe, []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	cmd := command(t, "-limit", "4s", "-way", string(WayNamespace))
	text, code, report := run(t, cmd)
	if code != 1 || report.Count(Skipped) < 3 || !strings.Contains(text, "not everything was tried") {
		t.Errorf("exit %d: %s", code, text)
	}
	if took := time.Since(began); took > time.Minute {
		t.Errorf("it took %v", took)
	}
}

// Ended in the middle, it says what it had and leaves nothing.
func TestEndedInTheMiddle(t *testing.T) {
	before := leftovers(t)
	cmd := command(t, "-quick", "-parts", "exports,compute")
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	text, b, ended := "", make([]byte, 4096), false
	for {
		n, err := out.Read(b)
		text += string(b[:n])
		if !ended && strings.Contains(text, "alone without the front") {
			ended = true
			cmd.Process.Signal(syscall.SIGTERM)
		}
		if err != nil {
			break
		}
	}
	cmd.Wait()
	if !ended || !strings.Contains(text, "was ended") || !strings.Contains(text, "written:") {
		t.Errorf("%v: %s", cmd.ProcessState, text)
	}
	if after := leftovers(t); !slices.Equal(before, after) {
		t.Errorf("it left something: %v", after)
	}
}

// What a run leaves that is killed goes with the next one, and nothing else.
func TestKilledInTheMiddle(t *testing.T) {
	before := leftovers(t)
	cmd := command(t, "-quick", "-parts", "compute")
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(out)
	for lines.Scan() && !strings.Contains(lines.Text(), "alone without the front") {
	}
	cmd.Process.Kill()
	cmd.Wait()
	left := leftovers(t)
	if len(left) <= len(before) {
		t.Fatalf("it left nothing: %v", left)
	}
	// One whose pid another process has by now, one of a run that lives, one of which nothing
	// is known, and a link to what isn't ours.
	self := os.Getpid()
	keep := t.TempDir()
	if err := os.WriteFile(filepath.Join(keep, "pid"), []byte("999999999 1\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	make := func(name, pid string) string {
		path := "/tmp/c" + name
		err := os.Mkdir(path, 0o755)
		if err == nil && pid != "" {
			err = os.WriteFile(filepath.Join(path, "pid"), []byte(pid), 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { os.RemoveAll(path) })
		return path
	}
	reused := make("~re", fmt.Sprintf("%d 1\n", self))
	earlier := make("~ea", fmt.Sprintf("%d\n", self))
	unknown := make("~un", "")
	living := make("~li", "999999999 1\n") // by a pid that isn't known here
	lock, err := lockFolder(living)
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close()
	link := "/tmp/c~sy"
	if err := os.Symlink(keep, link); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.Remove(link) })
	if text, code, _ := finish(t, command(t, "-quick", "-parts", "exports")); code != 0 {
		t.Fatal(text)
	}
	if after := leftovers(t); slices.ContainsFunc(after, func(s string) bool { return slices.Contains(left, s) && !slices.Contains(before, s) }) {
		t.Errorf("the next run left what was there: %v, before %v", after, before)
	}
	for path, stays := range map[string]bool{reused: false, earlier: true, unknown: true, living: true, link: true, filepath.Join(keep, "pid"): true} {
		if _, err := os.Lstat(path); (err == nil) != stays {
			t.Errorf("%s: %v, stays: %v", path, err, stays)
		}
	}
}

// A child that has ended isn't killed again: its group may be another's.
func TestEndedChildrenAreLeftAlone(t *testing.T) {
	r := &runner{ctx: t.Context(), children: map[*child]bool{}, report: &Report{}}
	c, err := r.launch("true", exec.Command("true"), time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.rest(); err != nil {
		t.Fatal(err)
	}
	// Another process gets its pid, and is the leader of its group.
	other := exec.Command("sleep", "1000")
	other.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := other.Start(); err != nil {
		t.Fatal(err)
	}
	c.pid = other.Process.Pid
	r.endAll()
	if err := other.Process.Signal(syscall.Signal(0)); err != nil {
		t.Error(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- other.Wait() }()
	other.Process.Signal(syscall.SIGTERM)
	if err := <-ended; !strings.Contains(fmt.Sprint(err), "terminated") {
		t.Errorf("the stranger ended by %v", err)
	}
}

func TestRowsOfCharges(t *testing.T) {
	equal := line{"ok": true, "askedBytes": 1.0, "processBytes": 2097152.0, "chargedBytes": 2097152.0}
	for name, c := range map[string]struct {
		call  string
		lines []line
		want  Verdict
	}{
		"equal":                      {"cuMemAlloc", []line{equal}, Holds},
		"charged too little":         {"cuMemAlloc", []line{equal, {"ok": true, "processBytes": 4096.0, "chargedBytes": 512.0}}, Fails},
		"charged too much":           {"cuMemAlloc", []line{{"ok": true, "processBytes": 512.0, "chargedBytes": 4096.0}}, Fails},
		"not given back":             {"cuMemAlloc", []line{{"ok": true, "chargedBytesAfter": 512.0}}, Fails},
		"only the card's is known":   {"cuMemAlloc", []line{{"ok": true, "cardBytes": 512.0, "chargedBytes": 512.0}}, Holds},
		"refused everywhere":         {"cuArray3DCreate", []line{{"ok": false, "errorName": "CUDA_ERROR_NOT_SUPPORTED"}}, Skipped},
		"managed memory on the host": {"cuMemAllocManaged", []line{{"ok": true, "chargedBytes": 512.0, "processBytes": 0.0}}, Noted},
	} {
		t.Run(name, func(t *testing.T) {
			r := &runner{report: &Report{}}
			r.chargesOf(c.call, c.lines)
			if got := r.report.Rows[0].Verdict; got != c.want {
				t.Errorf("%s: %+v", got, r.report.Rows[0])
			}
		})
	}
}

func TestTally(t *testing.T) {
	text := func(all ...string) (out []line) {
		for _, s := range all {
			out = append(out, line{"step": "text", "text": s})
		}
		return out
	}
	late := errors.New("took too long")
	for name, c := range map[string]struct {
		lines []line
		fault error
		want  Verdict
	}{
		"all pass":             {text("ok 1 - a", "1 passed, 0 failed"), nil, Holds},
		"one doesn't":          {text("ok 1 - a", "not ok 2 - b", "1 passed, 1 failed"), nil, Fails},
		"it says nothing":      {nil, nil, Fails},
		"it ends early":        {text("ok 1 - a"), nil, Fails},
		"its time was over":    {text("ok 1 - a"), late, Noted},
		"late, and one failed": {text("not ok 1 - a"), late, Fails},
	} {
		if row := tally("x", c.lines, c.fault); row.Verdict != c.want {
			t.Errorf("%s: %+v", name, row)
		}
	}
}

func TestRelocate(t *testing.T) {
	file := []byte("xx/usr/lib/carve/limits\x00yy/usr/lib/carve/driver/libcuda.so.1\x00")
	got, err := relocate(file, "/tmp/cabc/t1")
	if want := "xx/tmp/cabc/t1///limits\x00yy/tmp/cabc/t1///driver/libcuda.so.1\x00"; err != nil || string(got) != want {
		t.Errorf("%q, %v, want %q", got, err, want)
	}
	if _, err := relocate(file, "/tmp/cabcdefgh/t1"); err == nil {
		t.Error("a longer path was put in")
	}
	if _, err := relocate([]byte("nothing"), "/tmp/cabc/t1"); err == nil {
		t.Error("a file without the path was taken")
	}
}

func TestMarkdownKeepsTheTableWhole(t *testing.T) {
	r := Report{Machine: map[string]string{"card": "X"}, Rows: []Row{{Part: "p", What: "a|b", Observed: "c\nd", Verdict: Fails}}}
	var b strings.Builder
	r.Markdown(&b)
	if !strings.Contains(b.String(), `| p | a\|b | c d |  | FAILS |`) {
		t.Error(b.String())
	}
}
