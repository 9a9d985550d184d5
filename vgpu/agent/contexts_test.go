package agent

import (
	"os"
	"path/filepath"
	"testing"
)

func TestWhatAContextCostsIsLearnt(t *testing.T) {
	path := filepath.Join(t.TempDir(), "contexts.json")
	c, err := recallContexts(path)
	if err != nil {
		t.Fatal(err)
	}
	for i, s := range []struct {
		namespace string
		bytes     uint64
		changed   bool
		known     uint64
	}{
		{"a", 0, false, 0},
		{"a", contextMost + 1, false, 0},
		// More than the library's own guess would keep others from starting, and
		// anybody can make the driver say more.
		{"a", 900 << 20, false, 0},
		{"a", 800 << 20, false, 0},
		{"b", 850 << 20, true, 800 << 20},
		{"a", 810 << 20, false, 800 << 20},
		{"a", 400 << 20, true, 400 << 20}, // nobody can make it say less
		{"b", 500 << 20, false, 400 << 20},
		{"b", 399 << 20, true, 399 << 20},
	} {
		changed := c.learn("550", "A100", s.namespace, s.bytes)
		if known := c.of("550", "A100"); changed != s.changed || known != s.known {
			t.Errorf("step %d: changed %v to %d, want %v, %d", i, changed, known, s.changed, s.known)
		}
	}
	if c.of("570", "A100") != 0 || c.of("550", "T4") != 0 {
		t.Error("another driver or card is said to cost the same")
	}
	for i := range 2 * contextKinds {
		c.learn("driver", string(rune('A'+i)), "a", 100<<20)
	}
	if n := len(c.file().Costs); n > contextKinds || n == 0 {
		t.Errorf("%d entries", n)
	}
}

func TestContextCostsOutliveTheAgentUnlessDamaged(t *testing.T) {
	for name, s := range map[string]struct {
		content string
		known   uint64
		fault   bool
	}{
		"as it was written":    {`{"v":1,"costs":{"550|A100":1048576}}`, 1 << 20, false},
		"cut short":            {`{"v":1,"costs":{"550|A100":1048`, 0, true},
		"empty":                {``, 0, true},
		"of a later version":   {`{"v":2,"costs":{"550|A100":1048576}}`, 0, true},
		"an impossible figure": {`{"v":1,"costs":{"550|A100":1048576,"550|T4":0}}`, 0, true},
		"a negative one":       {`{"v":1,"costs":{"550|A100":-5}}`, 0, true},
		"more than any":        {`{"v":1,"costs":{"550|A100":5368709120}}`, 0, true},
	} {
		path := filepath.Join(t.TempDir(), "contexts.json")
		if err := os.WriteFile(path, []byte(s.content), 0o600); err != nil {
			t.Fatal(err)
		}
		c, err := recallContexts(path)
		if (err != nil) != s.fault || c.of("550", "A100") != s.known {
			t.Errorf("%s: %d, %v", name, c.of("550", "A100"), err)
		}
		// It is learnt again either way.
		if !s.fault {
			continue
		}
		if !c.learn("550", "A100", "a", 300<<20) || c.of("550", "A100") != 300<<20 {
			t.Errorf("%s: it can't be learnt again", name)
		}
	}
}
