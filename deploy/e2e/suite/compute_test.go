package suite

import (
	"fmt"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
)

// computing lets a program in each of the pods want the card for so long, at the
// same time, and returns what part of it each got, in percent of the time.
func computing(t *testing.T, time string, pods ...string) []float64 {
	t.Helper()
	got := make([]float64, len(pods))
	faults := make([]string, len(pods))
	var all sync.WaitGroup
	for i, pod := range pods {
		all.Go(func() {
			lines, r := probe(t, pod, "app", "load", "--for", time, "--kernels", "1ms,4ms")
			for _, m := range lines {
				if m["step"] == "load" && m["ok"] == true {
					got[i], _ = m["percent"].(float64)
					return
				}
			}
			faults[i] = fmt.Sprintf("gpuprobe load in %s: exit %d: %s%s", pod, r.code, r.stdout, r.stderr)
		})
	}
	all.Wait()
	for _, f := range faults {
		if f != "" {
			t.Fatal(f)
		}
	}
	return got
}

// Compute is divided between containers on one card. In real time, and on a machine
// that is busy with a whole cluster, only the order and a wide band can be asked
// for; the exact figures are vgpu/compute/loop's.
func TestComputeIsDivided(t *testing.T) {
	sharing := func(name, compute string, cores string) *corev1.Pod {
		p := pod(name, container("app", share{"gpu": "1", "gpumem": "4000", "gpucores": cores}))
		p.Annotations = map[string]string{"carve.dev/compute": compute}
		return p
	}
	create(t, sharing("few", "fixed", "20"))
	create(t, sharing("many", "fixed", "60"))
	few, many := grant(t, running(t, "few")).Containers["app"][0], grant(t, running(t, "many")).Containers["app"][0]
	if few.Card != many.Card || !few.Fixed || few.Cores != 20 || many.Cores != 60 {
		t.Fatalf("granted %+v and %+v: want two fixed shares of one card", few, many)
	}
	alone := computing(t, "4s", "few")[0]
	t.Logf("alone on the card with 20 %%: %.1f", alone)
	if alone < 10 || alone > 30 {
		t.Errorf("alone on the card a fixed share of 20 %% got %.1f", alone)
	}
	got := computing(t, "10s", "few", "many")
	t.Logf("together, 20 and 60 %%: %.1f and %.1f", got[0], got[1])
	if got[0] < 8 || got[0] > 32 || got[1] < 1.5*got[0] || got[1] > 75 {
		t.Errorf("shares of 20 and 60 %% got %.1f and %.1f", got[0], got[1])
	}

	// Two containers without a share, which would have a third of the card each, leave it
	// what it was promised.
	for _, name := range []string{"one", "other"} {
		create(t, pod(name, container("app", share{"gpu": "1", "gpumem": "4000"})))
		if c := grant(t, running(t, name)).Containers["app"][0]; c.Card != many.Card || c.Cores != 0 {
			t.Fatalf("%s was granted %+v: want a share of %s without compute", name, c, many.Card)
		}
	}
	beside := computing(t, "10s", "many", "one", "other")
	t.Logf("60 %% beside two without a share: %.1f; they have %.1f and %.1f", beside[0], beside[1], beside[2])
	if beside[0] < 45 || beside[1] < 4 || beside[2] < 4 {
		t.Errorf("beside two without a share 60 %% came to %.1f; they have %.1f and %.1f", beside[0], beside[1], beside[2])
	}
	remove(t, "one")
	remove(t, "other")

	// While it runs a share can grow.
	wantResized(t, "few", "--gpucores", "40")
	after := computing(t, "4s", "few")[0]
	t.Logf("alone, grown to 40 %%: %.1f", after)
	if after < 28 || after > 52 {
		t.Errorf("a share grown to 40 %% got %.1f", after)
	}
	remove(t, "few")
	remove(t, "many")

	create(t, sharing("lender", "elastic", "50"))
	running(t, "lender")
	if whole := computing(t, "4s", "lender")[0]; whole < 75 {
		t.Errorf("an elastic share of 50 %% that is alone got %.1f", whole)
	} else {
		t.Logf("alone on the card with an elastic 50 %%: %.1f", whole)
	}
	remove(t, "lender")
}
