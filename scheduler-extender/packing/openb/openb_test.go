package openb_test

import (
	"compress/gzip"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/carve-gpu/carve/scheduler-extender/packing/openb"
)

const (
	nodes = "sn,cpu_milli,memory_mib,gpu,model\nb,64000,262144,2,P100\na,96000,393216,8,G2\n"
	pods  = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec\np1,4000,1024,1,470,G2|P100\np0,8000,2048,2,1000,\np2,1000,512,0,0,\n"
)

func folder(t *testing.T, nodes, pods string) string {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "openb_node_list_gpu_node.csv"), []byte(nodes), 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.Create(filepath.Join(dir, "openb_pod_list_w.csv.gz"))
	if err != nil {
		t.Fatal(err)
	}
	z := gzip.NewWriter(f)
	_, err = z.Write([]byte(pods))
	for _, e := range []error{err, z.Close(), f.Close()} {
		if e != nil {
			t.Fatal(e)
		}
	}
	return dir
}

func TestATraceIsReadPlainAndPacked(t *testing.T) {
	got, err := openb.Load(folder(t, nodes, pods), "w")
	if err != nil {
		t.Fatal(err)
	}
	want := &openb.Trace{Name: "w",
		Nodes: []openb.Node{{Name: "a", CPUMilli: 96000, MemMiB: 393216, Cards: 8, Model: "G2"},
			{Name: "b", CPUMilli: 64000, MemMiB: 262144, Cards: 2, Model: "P100"}},
		Pods: []openb.Pod{{Name: "p0", CPUMilli: 8000, MemMiB: 2048, Cards: 2, Milli: 1000},
			{Name: "p1", CPUMilli: 4000, MemMiB: 1024, Cards: 1, Milli: 470, Models: "G2|P100"}, {Name: "p2", CPUMilli: 1000, MemMiB: 512}}}
	if !reflect.DeepEqual(got, want) {
		t.Fatalf("got %+v", got)
	}
}

func TestATraceThatCantBeMeantIsRefused(t *testing.T) {
	for name, c := range map[string]struct{ nodes, pods, says string }{
		"a number that isn't one":    {nodes, strings.Replace(pods, "4000", "many", 1), "line 2: column cpu_milli"},
		"a column that isn't there":  {strings.Replace(nodes, "gpu,model", "gpu,mode", 1), pods, "no column model"},
		"shares of several cards":    {nodes, strings.Replace(pods, "2,1000", "2,500", 1), "line 3: 2 cards of 500"},
		"more than a card of a card": {nodes, strings.Replace(pods, "470", "1470", 1), "line 2: 1 cards of 1470"},
		"no cards":                   {"sn,cpu_milli,memory_mib,gpu,model\na,1,1,0,\n", pods, "no cards"},
		"a line that is too short":   {nodes, pods + "p9,1\n", "line 5"},
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := openb.Load(folder(t, c.nodes, c.pods), "w"); err == nil || !strings.Contains(err.Error(), c.says) {
				t.Fatalf("%v, should say %q", err, c.says)
			}
		})
	}
	if _, err := openb.Load(t.TempDir(), "w"); err == nil {
		t.Fatal("an empty folder was read")
	}
}

func TestArrivalsAreTheTraceAndCopiesUpToTheRatio(t *testing.T) {
	trace, err := openb.Load(folder(t, nodes, pods), "w")
	if err != nil {
		t.Fatal(err)
	}
	for _, ratio := range []float64{0.1, 0.5, 1.3} {
		for seed := range int64(20) {
			o := openb.Arrivals(trace, ratio, seed)
			if !reflect.DeepEqual(o, openb.Arrivals(trace, ratio, seed)) {
				t.Fatal("the same seed gave other arrivals")
			}
			var total int64
			for i := range o.Pods {
				total += o.Pods[i].Total()
			}
			// One card of the last pod is looked at, so it may pass by the rest of it.
			if most := int64(ratio*10000) + openb.Card; total > most || ratio > 1 && total < most-2*openb.Card {
				t.Fatalf("ratio %v, seed %d: %d of 10000 arrive", ratio, seed, total)
			}
			if len(o.Nodes) != 2 || o.Nodes[0].Name == o.Nodes[1].Name {
				t.Fatalf("nodes %+v", o.Nodes)
			}
		}
	}
}
