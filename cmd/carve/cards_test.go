package main

import (
	"bytes"
	"flag"
	"os"
	"strconv"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/carve-gpu/carve/api/v1alpha1"
)

var update = flag.Bool("update", false, "write the golden files anew")

// wantGolden compares with testdata/NAME.
func wantGolden(t *testing.T, name string, got []byte) {
	t.Helper()
	path := "testdata/" + name
	if *update {
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("%s differs (run with -update if this is right):\n%s", path, got)
	}
}

func gpuNodes() []v1alpha1.GPUNode {
	since := metav1.NewTime(time.Unix(1_790_000_000, 0))
	card := func(index int32, slices ...v1alpha1.Slice) v1alpha1.Card {
		return v1alpha1.Card{UUID: "GPU-" + string(rune('a'+index)), Index: index, Model: "NVIDIA A100-SXM4-80GB", MemoryMiB: 81050,
			PhysicalMiB: 81920, Health: v1alpha1.Health{State: v1alpha1.Healthy}, Slices: slices}
	}
	n2 := v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: "n2"}, Spec: v1alpha1.GPUNodeSpec{CordonedCards: []string{"GPU-b"}}}
	n2.Status.Cards = []v1alpha1.Card{card(1), card(0)}
	n2.Status.Cards[1].Health = v1alpha1.Health{State: v1alpha1.Lost, Reason: "it fell off the bus"}
	n1 := v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: "n1"}}
	n1.Status.HookConnectedSince, n1.Status.SoftwareGPU = &since, true
	n1.Status.Cards = []v1alpha1.Card{
		card(0,
			v1alpha1.Slice{Namespace: "default", Pod: "infer-a", Container: "app", MemMiB: 8000, Cores: 30, Mode: "vgpu", State: v1alpha1.Active},
			v1alpha1.Slice{Namespace: "team-b", Pod: "infer-b", Container: "app", MemMiB: 16000, Mode: "vgpu", State: v1alpha1.Prepared}),
		card(1, v1alpha1.Slice{Namespace: "default", Pod: "train", Container: "app", Mode: "exclusive", State: v1alpha1.Active}),
	}
	return []v1alpha1.GPUNode{n2, n1}
}

func TestCardsTable(t *testing.T) {
	var out bytes.Buffer
	if err := printCards(&out, viewCards(gpuNodes()), false); err != nil {
		t.Fatal(err)
	}
	wantGolden(t, "cards.txt", out.Bytes())
	out.Reset()
	if err := printCards(&out, viewCards(nil), false); err != nil || out.String() != "no node reports cards: label a GPU node with carve.dev/managed=true\n" {
		t.Errorf("without cards: %q, %v", out.String(), err)
	}
}

// What holds the limits, and what it means where only the library does.
func TestCardsWide(t *testing.T) {
	nodes := gpuNodes()
	for i := range nodes {
		s := &nodes[i].Status
		s.Enforcement, s.EnforcementReason = v1alpha1.EnforcementAdvisory, "dmem: the kernel has no dmem controller"
		for j := range s.Cards {
			s.Cards[j].Layers = []string{v1alpha1.LayerLibrary}
		}
	}
	held := &nodes[1].Status
	held.Enforcement, held.EnforcementReason = v1alpha1.EnforcementDmem, ""
	for j := range held.Cards {
		held.Cards[j].Layers = []string{v1alpha1.EnforcementDmem, v1alpha1.LayerLibrary}
	}
	held.Cards[0].Slices[0].ResidualMiB = 1200
	var out bytes.Buffer
	if err := printCards(&out, viewCards(nodes), true); err != nil {
		t.Fatal(err)
	}
	wantGolden(t, "cards.wide.txt", out.Bytes())
}

func TestCardsAdd(t *testing.T) {
	cards := viewCards(gpuNodes())
	if len(cards) != 4 || cards[0].Node != "n1" || cards[2].Index != 0 {
		t.Fatalf("%+v", cards)
	}
	if c := cards[0]; c.GrantedMiB != 24000 || c.FreeMiB != 57050 || c.Cores != 30 {
		t.Errorf("two shares: %+v", c)
	}
	if c := cards[1]; c.GrantedMiB != 81050 || c.FreeMiB != 0 || c.Cores != 100 {
		t.Errorf("a whole card: %+v", c)
	}
	for _, format := range []string{"json", "yaml"} {
		var out bytes.Buffer
		if err := writeOutput(&out, newCardsCommand(), format, cards, nil); err != nil {
			t.Fatal(err)
		}
		wantGolden(t, "cards."+format, out.Bytes())
	}
}

func TestExitCodes(t *testing.T) {
	for name, c := range map[string]struct {
		args []string
		want int
	}{
		"help":                       {[]string{"cards", "--help"}, 0},
		"an unknown flag":            {[]string{"cards", "--no-such"}, exitUsage},
		"an unknown format":          {[]string{"cards", "-o", "xml", "--kubeconfig", "testdata/none"}, exitUsage},
		"an argument too many":       {[]string{"cards", "x"}, exitUsage},
		"an unknown command":         {[]string{"no-such"}, exitUsage},
		"no cluster to be found":     {[]string{"cards", "--kubeconfig", "testdata/none"}, exitFailed},
		"completion for a shell":     {[]string{"completion", "bash"}, 0},
		"a shell nobody knows":       {[]string{"completion", "foo"}, exitUsage},
		"a reason of two lines":      {[]string{"cordon", "n1", "--reason", "a\nb", "--kubeconfig", "testdata/none"}, exitUsage},
		"a reason that steers":       {[]string{"cordon", "n1", "--reason", "a\x1b[2J", "--kubeconfig", "testdata/none"}, exitUsage},
		"a reason in Chinese":        {[]string{"cordon", "n1", "--reason", "维修 4711", "--kubeconfig", "testdata/none"}, exitFailed},
		"a simulation of nothing":    {[]string{"simulate", "--kubeconfig", "testdata/none"}, exitUsage},
		"a simulation of no file":    {[]string{"simulate", "-f", "testdata/none", "--kubeconfig", "testdata/none"}, exitFailed},
		"a policy that nobody knows": {[]string{"simulate", "-f", "x", "--policy", "best", "--kubeconfig", "testdata/none"}, exitUsage},
		"a node without its name":    {[]string{"node"}, exitUsage},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("NODE_NAME", "")
			stdout := os.Stdout
			null, err := os.OpenFile(os.DevNull, os.O_WRONLY, 0)
			if err != nil {
				t.Fatal(err)
			}
			os.Stdout = null
			defer func() { os.Stdout = stdout; null.Close() }()
			if code := run(t.Context(), c.args); code != c.want {
				t.Errorf("exit code %d, want %d", code, c.want)
			}
		})
	}
}

func TestHowACardIsShared(t *testing.T) {
	slices := func(modes ...string) (out []v1alpha1.Slice) {
		for _, m := range modes {
			mode, memory, named := strings.Cut(m, " ")
			s := v1alpha1.Slice{Mode: mode, MemMiB: 20000}
			if named {
				s.MemMiB, _ = strconv.ParseInt(memory, 10, 64)
			}
			out = append(out, s)
		}
		return out
	}
	four := &v1alpha1.Sharing{Mode: "timeslice", Replicas: 4}
	for want, c := range map[string]v1alpha1.Card{
		"-":                                  {},
		"vgpu":                               {Slices: slices("vgpu", "vgpu")},
		"mps+vgpu":                           {Slices: slices("vgpu", "mps")},
		"timeslice, 0 of 4 replicas":         {Sharing: four},
		"timeslice, 2 of 4 replicas":         {Sharing: four, Slices: slices("timeslice", "timeslice")},
		"vgpu, then timeslice in 4 replicas": {Sharing: four, Slices: slices("vgpu")},
		// Not each slice is a replica: pods name amounts of their own, or came when the
		// card was cut otherwise. They take a replica's place all the same.
		"timeslice, 1 replica and 2 shares of 4":       {Sharing: four, Slices: slices("timeslice", "timeslice 8000", "timeslice 40000")},
		"timeslice, 0 replicas and 1 share of 4":       {Sharing: four, Slices: slices("timeslice 8000")},
		"timeslice+vgpu, then timeslice in 4 replicas": {Sharing: four, Slices: slices("vgpu", "timeslice")},
	} {
		c.MemoryMiB = 80000
		cards := viewCards([]v1alpha1.GPUNode{{Status: v1alpha1.GPUNodeStatus{Cards: []v1alpha1.Card{c}}}})
		if got := cards[0].shared(); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
	down := cardView{Health: v1alpha1.Healthy, MPS: &v1alpha1.MPS{Reason: "it died"}}
	if got := state(down); got != "healthy, MPS down (it died)" {
		t.Errorf("%q", got)
	}
}
