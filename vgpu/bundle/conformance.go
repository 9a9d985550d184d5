package bundle

import (
	"fmt"
	"path/filepath"
	"regexp"
	"strings"
	"time"
)

// conformance runs the library's own test programs that should be true of any driver.
// They make their limits themselves, so they get in by a place of their own whatever
// the run's way is.
func (r *runner) conformance() error {
	if !r.selfVisible {
		r.skip("the library's test programs", "they compare with what the driver says of a process under its own pid")
		return nil
	}
	for _, name := range []string{"array_test", "shared_test", "graph_test", "pool_test"} {
		s, err := r.newShareBy(WayRelocated, terms{memory: 1000 * mib})
		if err != nil {
			return err
		}
		if err := r.placeProgram(s, name); err != nil {
			return err
		}
		var args []string
		if name == "pool_test" && r.Quick {
			args = []string{"at the limit"}
		}
		lines, err := r.lines(s, pick(r, 10*time.Second, 40*time.Second), filepath.Join(s.dir, name), args...)
		r.row(tally(name, lines, err))
	}
	return nil
}

var tapLine = regexp.MustCompile(`^(not )?ok \d+ - (.*)`)

// tally is the row of a program that prints a line for each thing that it checks.
func tally(name string, lines []line, fault error) Row {
	passed, total := 0, 0
	row := Row{What: "the library's " + name, Expected: "all of its checks pass", Verdict: Fails}
	ended := false
	for _, l := range lines {
		text := l.text("text")
		ended = ended || strings.Contains(text, " passed, ")
		if m := tapLine.FindStringSubmatch(text); m != nil {
			total++
			if m[1] == "" {
				passed++
			} else {
				row.Details = append(row.Details, m[2])
			}
		}
	}
	row.Observed = fmt.Sprintf("%d of %d", passed, total)
	row.Values = map[string]float64{"passed": float64(passed), "failed": float64(total - passed)}
	if len(row.Details) > 0 {
		row.Observed += "; not: " + strings.Join(row.Details[:min(2, len(row.Details))], "; ")
	}
	switch {
	case passed == total && total > 0 && ended:
		row.Verdict = Holds
	case passed == total && fault != nil:
		// A card that is asked ten thousand times what a process has takes its time.
		row.Verdict, row.Observed = Noted, row.Observed+", then its time was over"
	}
	return row
}
