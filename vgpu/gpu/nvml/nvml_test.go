package nvml

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/carve-gpu/carve/vgpu/gpu"
	"github.com/carve-gpu/carve/vgpu/native"
)

// rootOf, in the environment, makes this process answer questions about a
// driver root. A process can load one NVML only, so each root has its own.
const rootOf = "CARVE_TEST_DRIVER_ROOT"

func TestMain(m *testing.M) {
	if root := os.Getenv(rootOf); root != "" {
		answer(root)
		return
	}
	if err := native.Make(softDir); err != nil {
		fmt.Fprintln(os.Stderr, "build the software GPU:", err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

const softDir = "../../soft"

// reply is one answer, as a line of JSON.
type reply struct {
	Inventory gpu.Inventory
	Sample    gpu.Sample
	Mode      gpu.ComputeMode
	Error     string
	Took      time.Duration
}

func answer(root string) {
	out := json.NewEncoder(os.Stdout)
	d, err := Open(gpu.Root{Path: root}, slog.New(slog.DiscardHandler))
	if err != nil {
		out.Encode(reply{Error: err.Error()})
		return
	}
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		var r reply
		var err error
		start := time.Now()
		if uuid, ok := strings.CutPrefix(lines.Text(), "sample "); ok {
			r.Sample, err = d.Sample(uuid)
		} else if uuid, ok := strings.CutPrefix(lines.Text(), "mode "); ok {
			uuid, mode, set := strings.Cut(uuid, " ")
			if set {
				err = d.SetComputeMode(uuid, gpu.ComputeMode(mode))
			}
			if err == nil {
				r.Mode, err = d.ComputeMode(uuid)
			}
		} else {
			r.Inventory, err = d.Inventory()
		}
		r.Took = time.Since(start)
		if err != nil {
			r.Error = err.Error()
		}
		out.Encode(r)
	}
}

// softRoot is a software GPU's root with a process that has its NVML loaded.
type softRoot struct {
	t    *testing.T
	path string
	in   io.Writer
	out  *json.Decoder
}

func newSoftRoot(t *testing.T, args ...string) *softRoot {
	t.Helper()
	r := &softRoot{t: t, path: filepath.Join(t.TempDir(), "root")}
	r.softgpu(append([]string{"init", r.path}, args...)...)
	t.Cleanup(func() { r.softgpu("destroy", r.path) })
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), rootOf+"="+r.path)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { in.Close(); cmd.Wait() })
	r.in, r.out = in, json.NewDecoder(out)
	return r
}

func (r *softRoot) softgpu(args ...string) {
	r.t.Helper()
	if out, err := exec.Command(filepath.Join(softDir, "build", "softgpu"), args...).CombinedOutput(); err != nil {
		r.t.Fatalf("softgpu %v: %v\n%s", args, err, out)
	}
}

func (r *softRoot) ask(question string) reply {
	r.t.Helper()
	if _, err := fmt.Fprintln(r.in, question); err != nil {
		r.t.Fatal(err)
	}
	var a reply
	if err := r.out.Decode(&a); err != nil {
		r.t.Fatalf("the process that asks the driver is gone: %v", err)
	}
	return a
}

func (r *softRoot) cards() []gpu.Card {
	r.t.Helper()
	a := r.ask("inventory")
	if a.Error != "" || len(a.Inventory.Faults) != 0 {
		r.t.Fatalf("inventory: %s %v", a.Error, a.Inventory.Faults)
	}
	return a.Inventory.Cards
}

func TestInventoryOfEachDriverBranch(t *testing.T) {
	for _, version := range []string{"535.183.01", "550.90.07", "570.133.20", "580.65.06"} {
		t.Run(version, func(t *testing.T) {
			r := newSoftRoot(t, "--card", "a100-80", "--card", "t4", "--driver", version, "--seed", "7")
			a := r.ask("inventory")
			if a.Error != "" || a.Inventory.DriverVersion != version || len(a.Inventory.Cards) != 2 {
				t.Fatalf("%+v", a)
			}
			c := a.Inventory.Cards[0]
			if !strings.HasPrefix(c.UUID, "GPU-") || c.Model != "NVIDIA A100-SXM4-80GB" || c.Index != 0 || c.Minor != 0 ||
				c.MemoryBytes != 81920<<20 || c.MemoryMiB() > 81920 || c.MemoryMiB() < 80000 || c.Fault != "" || c.MIGMode != "disabled" {
				t.Errorf("card 0: %+v (%d MiB)", c, c.MemoryMiB())
			}
			if !strings.HasPrefix(c.PCIBusID, "00000000:") || len(c.PCIBusID) != len("00000000:07:00.0") {
				t.Errorf("PCI address %q", c.PCIBusID)
			}
			if t4 := a.Inventory.Cards[1]; t4.MIGMode != "" || t4.Minor != 1 || t4.UUID == c.UUID {
				t.Errorf("card 1: %+v", t4)
			}
			s := r.ask("sample " + c.UUID)
			if s.Error != "" || s.Sample.UsedBytes > 1<<30 || len(s.Sample.Processes) != 0 {
				t.Errorf("sample %+v", s)
			}
			if l := s.Sample.Load; l.UtilizationRatio == nil || *l.UtilizationRatio != 0 ||
				l.PowerWatts == nil || *l.PowerWatts < 10 || *l.PowerWatts > 500 ||
				l.TemperatureCelsius == nil || *l.TemperatureCelsius < 20 || *l.TemperatureCelsius > 100 {
				t.Errorf("an idle card's load: %+v", l)
			}
		})
	}
}

func TestComputeModeAndMultiprocessors(t *testing.T) {
	r := newSoftRoot(t, "--card", "a100-80", "--card", "t4", "--card", "h100")
	cards := r.cards()
	for i, want := range []int{108, 40, 132} {
		if got := cards[i].Multiprocessors; got != want {
			t.Errorf("%s has %d multiprocessors, want %d", cards[i].Model, got, want)
		}
		if got, want := cards[i].ComputeMajor, []int{8, 7, 9}[i]; got != want {
			t.Errorf("%s has compute capability %d, want %d", cards[i].Model, got, want)
		}
	}
	uuid := cards[0].UUID
	if a := r.ask("mode " + uuid); a.Error != "" || a.Mode != gpu.ComputeDefault {
		t.Errorf("at first: %+v", a)
	}
	for _, mode := range []gpu.ComputeMode{gpu.ComputeExclusiveProcess, gpu.ComputeProhibited, gpu.ComputeDefault} {
		if a := r.ask("mode " + uuid + " " + string(mode)); a.Error != "" || a.Mode != mode {
			t.Errorf("set to %s: %+v", mode, a)
		}
	}
	if a := r.ask("mode " + uuid + " other"); !strings.Contains(a.Error, "no such mode") {
		t.Errorf("an unknown mode: %+v", a)
	}
	if a := r.ask("mode GPU-none"); a.Error == "" {
		t.Errorf("of a card that isn't there: %+v", a)
	}
}

func TestLinksAndNUMA(t *testing.T) {
	for _, c := range []struct {
		links, class string
		all          bool
	}{{"switch", gpu.LinkNVSwitch, true}, {"pairs", gpu.LinkNVLink, false}} {
		t.Run(c.links, func(t *testing.T) {
			r := newSoftRoot(t, "--card", "a100-80x4", "--links", c.links, "--numa", "2")
			cards := r.cards()
			if len(cards) != 4 {
				t.Fatalf("%d cards", len(cards))
			}
			numa := map[int]int{}
			for _, card := range cards {
				numa[card.NUMANode]++
				if len(card.Links) != 3 {
					t.Fatalf("card %d has links %+v, want one to each other card", card.Index, card.Links)
				}
				fast := 0
				for _, l := range card.Links {
					if l.Class == c.class {
						fast++
						if l.Lanes < 1 {
							t.Errorf("card %d: %+v without lanes", card.Index, l)
						}
					} else if l.Class == "" || l.Lanes != 0 {
						t.Errorf("card %d: link %+v", card.Index, l)
					}
				}
				if c.all && fast != 3 || !c.all && fast != 1 {
					t.Errorf("card %d has %d fast links: %+v", card.Index, fast, card.Links)
				}
			}
			if numa[0] != 2 || numa[1] != 2 {
				t.Errorf("cards by NUMA node: %v", numa)
			}
		})
	}
}

// share-20, node-1: one card of eight fails.
func TestALostCardLeavesTheOthersServed(t *testing.T) {
	r := newSoftRoot(t, "--card", "a100-80x8")
	before := r.cards()
	r.softgpu("fault", r.path, "--card", "3", "lost")
	after := r.cards()
	if len(after) != 8 {
		t.Fatalf("%d cards, want all 8 with one of them lost", len(after))
	}
	for i, c := range after {
		if c.UUID != before[i].UUID {
			t.Errorf("card %d changed its identity", i)
		}
		if wantFault := i == 3; (c.Fault != "") != wantFault || c.Lost != wantFault {
			t.Errorf("card %d: fault %q, lost %v", i, c.Fault, c.Lost)
		}
	}
	if after[3].Minor != before[3].Minor || after[3].MemoryBytes != before[3].MemoryBytes {
		t.Errorf("what was known of the lost card is gone: %+v", after[3])
	}
	if s := r.ask("sample " + before[3].UUID); s.Error == "" {
		t.Error("a lost card has a sample")
	}
	if s := r.ask("sample " + before[4].UUID); s.Error != "" {
		t.Errorf("its neighbour has none: %s", s.Error)
	}
	r.softgpu("fault", r.path, "--card", "3", "restore")
	if c := r.cards()[3]; c.Fault != "" || c.Lost {
		t.Errorf("after it came back: %+v", c)
	}
}

func TestACardThatHangsIsNotWaitedForTwice(t *testing.T) {
	r := newSoftRoot(t, "--card", "a100-80x2")
	uuid := r.cards()[0].UUID
	r.softgpu("fault", r.path, "--card", "0", "nvml-delay", "20s")
	first := r.ask("inventory")
	if len(first.Inventory.Cards) != 2 || first.Inventory.Cards[0].Fault == "" || first.Inventory.Cards[1].Fault != "" {
		t.Fatalf("%+v", first)
	}
	if first.Took < callLimit || first.Took > 3*callLimit {
		t.Errorf("the first look took %v, want about %v", first.Took, callLimit)
	}
	if again := r.ask("inventory"); again.Took > callLimit/2 || again.Inventory.Cards[0].UUID != uuid || again.Inventory.Cards[0].Fault == "" {
		t.Errorf("the second look took %v: %+v", again.Took, again.Inventory.Cards[0])
	}
}

func TestOpenSaysWhatIsMissing(t *testing.T) {
	empty := t.TempDir()
	_, err := Open(gpu.Root{Path: empty}, slog.New(slog.DiscardHandler))
	if !errors.Is(err, gpu.ErrNoDriver) {
		t.Errorf("an empty root: %v", err)
	}
	lib := filepath.Join(empty, "usr/lib64")
	if err := os.MkdirAll(lib, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(lib, "libnvidia-ml.so.1"), []byte("no library"), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(gpu.Root{Path: empty}, slog.New(slog.DiscardHandler)); err == nil || !strings.Contains(err.Error(), "libnvidia-ml.so.1") {
		t.Errorf("a file that is no library: %v", err)
	}
}
