package region

import (
	"bufio"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// publishEnv has the test binary publish into the file of that name until it is killed.
const publishEnv = "CARVE_TEST_PUBLISH"

// Two processes that had a slot one after the other, and what each may find in its
// terms: the second's corrections are positive and its shares above 300,000.
var (
	publishFirst  = Owner{Index: 3, PID: 7, StartTicks: 100, Image: 1 << 31}
	publishSecond = Owner{Index: 3, PID: 8, StartTicks: 200, Image: 1<<31 + 1}
)

func publishUntilKilled(path string) error {
	f, err := OpenCompute(path, 2)
	if err != nil {
		return err
	}
	for n := int64(1); ; n++ {
		// Several updates for each, as an agent makes.
		for k := range int64(3) {
			err = f.SetTerms(0, publishFirst, Terms{CorrectionNS: -n - k, SharePPM: uint32(100_000 + n%1000), Gate: GateTurn})
			if err != nil {
				return err
			}
		}
		if err = f.SetTerms(0, publishSecond, Terms{CorrectionNS: n, SharePPM: uint32(300_000 + n%1000), Borrow: true}); err != nil {
			return err
		}
		now := time.Now().UnixNano()
		if err = f.Look(0, now, 1, 1, Pace{At: now, Value: now / 2, Contexts: 2, Most: 2}); err != nil {
			return err
		}
		if n == 10 {
			os.Stdout.WriteString("publishing\n")
		}
	}
}

// The agent is killed at whatever store of an update: what it leaves is one process'
// terms, or nobody's, and a pace of whole points. The next one goes on from there.
func TestAnAgentKilledWhileItPublishes(t *testing.T) {
	if path := os.Getenv(publishEnv); path != "" {
		if err := publishUntilKilled(path); err != nil {
			t.Fatal(err)
		}
	}
	path := filepath.Join(t.TempDir(), "limits")
	if err := CreateLimits(path, twoCards()); err != nil {
		t.Fatal(err)
	}
	nobody, points := 0, uint64(0)
	for round := range 100 {
		cmd := exec.Command("/proc/self/exe", "-test.run", "^"+t.Name()+"$")
		cmd.Env = append(os.Environ(), publishEnv+"="+path)
		cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		lines := bufio.NewScanner(out)
		if !lines.Scan() || lines.Text() != "publishing" {
			cmd.Process.Kill()
			t.Fatalf("it said %q", lines.Text())
		}
		time.Sleep(time.Duration(rand.Int64N(int64(2 * time.Millisecond))))
		cmd.Process.Kill()
		cmd.Wait()

		f, err := OpenCompute(path, 2)
		if err != nil {
			t.Fatal(err)
		}
		first, isFirst, err1 := f.Terms(0, publishFirst)
		second, isSecond, err2 := f.Terms(0, publishSecond)
		switch {
		case err1 != nil || err2 != nil:
			t.Fatal(err1, err2)
		case isFirst && isSecond:
			t.Fatalf("round %d: the terms are two processes'", round)
		case isFirst && (first.CorrectionNS >= 0 || first.SharePPM >= 101_000 || first.SharePPM < 100_000 || first.Borrow || first.Gate != GateTurn):
			t.Fatalf("round %d: the first finds %+v", round, first)
		case isSecond && (second.CorrectionNS <= 0 || second.SharePPM < 300_000 || second.SharePPM >= 301_000 || !second.Borrow || second.Gate != GateCredit):
			t.Fatalf("round %d: the second finds %+v", round, second)
		case !isFirst && !isSecond:
			nobody++
		}
		at, _ := f.card(0)
		count := atomic.LoadUint64(f.word64(at + computePaceAt + paceCountAt))
		if count <= points {
			t.Fatalf("round %d: %d points after %d", round, count, points)
		}
		points = count
		var before uint64
		for back := min(count, pacePoints-1); back > 0; back-- {
			point := at + computePaceAt + pacePointsAt + int((count-back)%pacePoints)*pacePointBytes
			when, value := atomic.LoadUint64(f.word64(point)), atomic.LoadUint64(f.word64(point+8))
			if value != when/2 || when < before {
				t.Fatalf("round %d: point %d of %d is %d at %d, after one at %d", round, count-back, count, value, when, before)
			}
			before = when
		}
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("%d points; %d times the terms were nobody's", points, nobody)
}
