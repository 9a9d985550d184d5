package suite

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/deploy/e2e/install"
)

// TestSimulateSaysWhatThenHappens: pods go where carve simulate said that they would, and the one
// that it found no place for waits.
func TestSimulateSaysWhatThenHappens(t *testing.T) {
	create(t, pod("there", container("app", share{"gpumem": "30000"})))
	running(t, "there")
	sizes := []string{"20000", "40000", "30000", "70000"}
	var file strings.Builder
	for i, mib := range sizes {
		p := pod(fmt.Sprint("simulated-", i), container("app", share{"gpumem": mib}))
		p.APIVersion, p.Kind = "v1", "Pod"
		text, err := json.Marshal(p)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(&file, "---\n%s\n", text)
	}
	// It ends with 1, since one has no place.
	out, err := cluster.Lab.Output(t.Context(), "sh", "-c", `printf '%s' "$1" | KUBECONFIG=/etc/kubernetes/admin.conf "$2"/carve simulate -f - -o json; test $? = 1`, "sh", file.String(), install.Programs)
	if err != nil {
		t.Fatal(err)
	}
	var r struct {
		Placed, Refused int
		Placements      []struct {
			Pod, Node, Why string
			Cards          []struct{ Card string }
		}
	}
	if err := json.Unmarshal(out, &r); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if r.Placed != 3 || r.Refused != 1 {
		t.Fatalf("%s", out)
	}
	for i, mib := range sizes {
		said := r.Placements[i]
		create(t, pod(said.Pod, container("app", share{"gpumem": mib})))
		if said.Node == "" {
			wantPending(t, said.Pod, mib)
			continue
		}
		g, err := api.DecodeGrant(running(t, said.Pod).Annotations[api.AnnotationGrant])
		if err != nil {
			t.Fatal(err)
		}
		if g.Node != said.Node || g.Containers["app"][0].Card != said.Cards[0].Card {
			t.Errorf("%s: said %+v, granted %+v", said.Pod, said, g)
		}
	}
}
