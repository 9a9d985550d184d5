package nvidiaconfig_test

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/carve-gpu/carve/api/v1alpha1"
	"github.com/carve-gpu/carve/deviceplugin/nvidiaconfig"
)

func node(cards int) []nvidiaconfig.Card {
	var out []nvidiaconfig.Card
	for i := range cards {
		out = append(out, nvidiaconfig.Card{Index: i, UUID: fmt.Sprintf("GPU-%d", i), Model: "NVIDIA A100", Major: 8})
	}
	return out
}

// words puts sharing on one line: "0=4×timeslice".
func words(sharing map[string]v1alpha1.Sharing) string {
	var out []string
	for _, uuid := range slices.Sorted(maps.Keys(sharing)) {
		s := sharing[uuid]
		one := ""
		if s.FailRequestsGreaterThanOne {
			one = "!"
		}
		out = append(out, fmt.Sprintf("%s=%d×%s%s", strings.TrimPrefix(uuid, "GPU-"), s.Replicas, s.Mode, one))
	}
	return strings.Join(out, " ")
}

const slicing = "version: v1\nsharing:\n  timeSlicing:\n    resources:\n"

// node-20, node-23 and what NVIDIA's documentation shows.
func TestWhatAFileSays(t *testing.T) {
	for name, c := range map[string]struct {
		file     string
		cards    []nvidiaconfig.Card
		want     string
		warnings []string // parts of each, in order
		fault    string   // a part of the error
	}{
		"the plainest": {file: slicing + "    - {name: nvidia.com/gpu, replicas: 4}\n", want: "0=4×timeslice 1=4×timeslice 2=4×timeslice 3=4×timeslice"},
		"in full": {file: `
version: v1
flags:
  migStrategy: none
  failOnInitError: true
  plugin: {passDeviceSpecs: false, deviceIDStrategy: uuid}
sharing:
  timeSlicing:
    renameByDefault: false
    failRequestsGreaterThanOne: true
    resources:
    - name: gpu
      devices: all
      replicas: 10
`, want: "0=10×timeslice! 1=10×timeslice! 2=10×timeslice! 3=10×timeslice!"},
		"MPS":                  {file: "sharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}", cards: node(1), want: "0=2×mps"},
		"replicas by card":     {file: slicing + "    - {name: nvidia.com/gpu, devices: [0], replicas: 4}\n    - {name: nvidia.com/gpu, devices: [\"GPU-1\"], replicas: 2}\n", want: "0=4×timeslice 1=2×timeslice"},
		"indexes as texts":     {file: slicing + "    - {name: nvidia.com/gpu, devices: [\"3\", \"1\"], replicas: 2}\n", want: "1=2×timeslice 3=2×timeslice"},
		"the first cards":      {file: slicing + "    - {name: nvidia.com/gpu, devices: 2, replicas: 4}\n", want: "0=4×timeslice 1=4×timeslice"},
		"both modes on a node": {file: slicing + "    - {name: nvidia.com/gpu, devices: [0], replicas: 4}\n  mps:\n    resources: [{name: nvidia.com/gpu, devices: [1], replicas: 3}]\n", want: "0=4×timeslice 1=3×mps"},
		"an empty file":        {file: "# nothing\n", fault: "it is empty"},
		"nothing shared":       {file: "version: v1\n"},
		"more than there are":  {file: slicing + "    - {name: nvidia.com/gpu, devices: 8, replicas: 4}\n", cards: node(1), want: "0=4×timeslice", warnings: []string{"the first 8 cards are meant, and the node has 1"}},
		"cards of other nodes": {file: slicing + "    - {name: nvidia.com/gpu, devices: [0, GPU-x], replicas: 4}\n", cards: node(1), want: "0=4×timeslice", warnings: []string{"the node has no card GPU-x"}},
		"a card by both names": {file: slicing + "    - {name: nvidia.com/gpu, devices: [0, GPU-0], replicas: 4}\n", cards: node(1), want: "0=4×timeslice", warnings: []string{"a card that the list names before"}},
		"instances":            {file: slicing + "    - {name: nvidia.com/mig-1g.10gb, replicas: 4}\n    - {name: nvidia.com/gpu, devices: [\"0:1\", MIG-x, 1], replicas: 4}\n", want: "1=4×timeslice", warnings: []string{"instances aren't served", "0:1: instances", "MIG-x: instances"}},
		"a card in MIG mode":   {file: slicing + "    - {name: nvidia.com/gpu, replicas: 4}\n", cards: []nvidiaconfig.Card{{UUID: "GPU-0", MIG: true}}, warnings: []string{"in MIG mode"}},
		"another resource":     {file: slicing + "    - {name: nvidia.com/gpu-a100, replicas: 4}\n", warnings: []string{"carve.dev/card-models"}},
		"what isn't honoured":  {file: "flags: {migStrategy: mixed, gdsEnabled: true, nvidiaDriverRoot: /run/nvidia/driver, plugin: {deviceListStrategy: [envvar]}, gfd: {oneshot: true}}\nresources: {gpus: [{pattern: '*', name: gpu}]}\nimex: {required: true}", warnings: []string{"flags.gdsEnabled: true", "flags.gfd", "flags.migStrategy: mixed: MIG isn't served", "CARVE_NODE_DRIVER_ROOT", "flags.plugin.deviceListStrategy", "resources.gpus", "imex"}},
		"keys nobody knows":    {file: "colour: red\nflags: {speed: 1}\nsharing: {timeSlicing: {resource: []}, mig: {}}", warnings: []string{"colour: nothing is known", "flags.speed: nothing", "sharing.mig: nothing", "sharing.timeSlicing.resource: nothing"}},
		"the same name":        {file: slicing + "    - {name: nvidia.com/gpu, rename: gpu, replicas: 4}\n", cards: node(1), want: "0=4×timeslice"},
		"too many under MPS":   {file: "sharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 49}]}}", fault: "sharing.mps.resources[0].replicas: 49, and an MPS server takes 48 clients at most"},
		"48 are not":           {file: "sharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 48}]}}", cards: node(1), want: "0=48×mps"},
		"40 on a T4": {file: "sharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 40}]}}", cards: []nvidiaconfig.Card{{UUID: "GPU-0", Model: "Tesla T4", Major: 7, MemoryMiB: 15000}},
			want: "0=40×mps", warnings: []string{"a replica of card 0 (GPU-0), a Tesla T4, has 375 MiB, which may not hold the context of one process"}},
		"17 on Pascal are":       {file: "sharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 17}]}}", cards: []nvidiaconfig.Card{{UUID: "GPU-0", Model: "Tesla P40", Major: 6}}, fault: "17, and an MPS server on card 0 (GPU-0), a Tesla P40, takes 16 clients at most"},
		"a card twice":           {file: slicing + "    - {name: nvidia.com/gpu, replicas: 4}\n    - {name: nvidia.com/gpu, devices: [0], replicas: 2}\n", fault: "card 0 (GPU-0) has replicas by sharing.timeSlicing.resources[0] already"},
		"in both modes":          {file: slicing + "    - {name: nvidia.com/gpu, replicas: 4}\n  mps: {resources: [{name: nvidia.com/gpu, replicas: 2}]}\n", fault: "sharing.mps.resources[0]: card 0 (GPU-0) has replicas by sharing.timeSlicing.resources[0] already"},
		"one replica":            {file: slicing + "    - {name: nvidia.com/gpu, replicas: 1}\n", fault: "1 isn't allowed; allowed are 2 to 256 (leave the cards out"},
		"no replicas":            {file: slicing + "    - {name: nvidia.com/gpu}\n", fault: "replicas: it is missing"},
		"half a replica":         {file: slicing + "    - {name: nvidia.com/gpu, replicas: 2.5}\n", fault: "2.5 isn't allowed"},
		"replicas as a text":     {file: slicing + "    - {name: nvidia.com/gpu, replicas: \"4\"}\n", fault: "replicas: 4 isn't allowed"},
		"no name":                {file: slicing + "    - {replicas: 4}\n", fault: "name: it is missing: write nvidia.com/gpu"},
		"devices of no kind":     {file: slicing + "    - {name: nvidia.com/gpu, devices: some, replicas: 4}\n", fault: `some isn't allowed; allowed is "all"`},
		"no devices":             {file: slicing + "    - {name: nvidia.com/gpu, devices: 0, replicas: 4}\n", fault: `0 isn't allowed; allowed is "all"`},
		"a device of no kind":    {file: slicing + "    - {name: nvidia.com/gpu, devices: [first], replicas: 4}\n", fault: "first is neither the index of a card nor its UUID"},
		"another name by rule":   {file: "sharing: {timeSlicing: {renameByDefault: true, resources: [{name: nvidia.com/gpu, replicas: 4}]}}", fault: "renameByDefault: true, and replicas have one name with carve, nvidia.com/gpu: write false"},
		"another name":           {file: slicing + "    - {name: nvidia.com/gpu, rename: nvidia.com/gpu.shared, replicas: 4}\n", fault: "rename: nvidia.com/gpu.shared, and replicas have one name"},
		"another version":        {file: "version: v2\n", fault: `version: "v2", and v1`},
		"no YAML":                {file: "sharing: [", fault: "YAML"},
		"a list":                 {file: "- a\n", fault: "YAML"},
		"a key twice":            {file: "version: v1\nversion: v1\n", fault: "already"},
		"a text for an object":   {file: "sharing: yes please\n", fault: "sharing: a text stands where keys belong"},
		"several faults at once": {file: "version: v3\n" + strings.TrimPrefix(slicing, "version: v1\n") + "    - {name: nvidia.com/gpu, replicas: 0}\n", fault: "replicas: 0"},
	} {
		t.Run(name, func(t *testing.T) {
			if c.cards == nil {
				c.cards = node(4)
			}
			config, err := nvidiaconfig.Parse([]byte(c.file))
			warnings := config.Warnings
			var sharing map[string]v1alpha1.Sharing
			if err == nil {
				var more []string
				sharing, more, err = config.Apply(c.cards)
				warnings = append(warnings, more...)
			}
			if (err != nil) != (c.fault != "") || err != nil && !strings.Contains(err.Error(), c.fault) {
				t.Fatalf("error %v, want %q", err, c.fault)
			}
			if err != nil {
				return
			}
			if got := words(sharing); got != c.want {
				t.Errorf("%q, want %q", got, c.want)
			}
			if len(warnings) != len(c.warnings) {
				t.Fatalf("warnings %q, want %q", warnings, c.warnings)
			}
			for i := range warnings {
				if !strings.Contains(warnings[i], c.warnings[i]) {
					t.Errorf("warning %q, want %q", warnings[i], c.warnings[i])
				}
			}
		})
	}
}

// A file of 1 MiB took half a minute to read, and what was wrong with it megabytes to say.
func TestLongLists(t *testing.T) {
	list := func(n int, of func(int) string) string {
		var b strings.Builder
		b.WriteString(slicing + "    - {name: nvidia.com/gpu, replicas: 4, devices: [")
		for i := range n {
			b.WriteString(of(i) + ",")
		}
		return b.String() + "]}\n"
	}
	c, err := nvidiaconfig.Parse([]byte(list(5000, func(i int) string { return fmt.Sprintf("GPU-%d", i) })))
	if err != nil {
		t.Fatal(err)
	}
	if sharing, warnings, err := c.Apply(node(2)); words(sharing) != "0=4×timeslice 1=4×timeslice" || len(warnings) != 4998 || err != nil {
		t.Errorf("%s, %d warnings, %v", words(sharing), len(warnings), err)
	}
	if _, err := nvidiaconfig.Parse([]byte(list(5000, func(int) string { return "GPU-0" }))); err == nil || len(err.Error()) > 8<<10 || !strings.Contains(err.Error(), "and 4979 faults more") {
		t.Errorf("faults by the thousand: %.200v", err)
	}
	if _, err := nvidiaconfig.Parse([]byte(list(10000, func(i int) string { return fmt.Sprintf("GPU-%d", i) }))); err == nil || !strings.Contains(err.Error(), "it has more than 65536 bytes") {
		t.Errorf("a file that is too large: %.200v", err)
	}
}

// Whatever a file says, what comes out of it can be reported.
func FuzzParse(f *testing.F) {
	f.Add(slicing + "    - {name: nvidia.com/gpu, devices: [0, GPU-1], replicas: 4}\n")
	f.Add("sharing: {mps: {failRequestsGreaterThanOne: true, resources: [{name: gpu, devices: 3, replicas: 48}]}}")
	f.Add("flags: {plugin: [], gfd: {a: [1]}}\nresources: {gpus: 1}")
	f.Add("sharing: {timeSlicing: {resources: [1, {devices: [{}]}]}}")
	f.Fuzz(func(t *testing.T, s string) {
		c, err := nvidiaconfig.Parse([]byte(s))
		if err != nil {
			return
		}
		sharing, _, err := c.Apply(node(3))
		if err != nil {
			return
		}
		for uuid, s := range sharing {
			if s.Replicas < 2 || s.Replicas > 256 || s.Mode != "mps" && s.Mode != "timeslice" || s.Mode == "mps" && s.Replicas > 48 || !strings.HasPrefix(uuid, "GPU-") {
				t.Fatalf("%s: %+v", uuid, s)
			}
		}
	})
}
