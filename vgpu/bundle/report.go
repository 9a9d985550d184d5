package bundle

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"
	"unicode/utf8"
)

// Verdict is what became of a row.
type Verdict string

// The verdicts.
const (
	Holds   Verdict = "holds"   // it was as it must be
	Fails   Verdict = "FAILS"   // it wasn't
	Noted   Verdict = "noted"   // a figure of which nothing is expected
	Skipped Verdict = "skipped" // it couldn't be tried; Observed says why
)

// Row is one thing that was looked at.
type Row struct {
	Part     string  `json:"part"`
	What     string  `json:"what"`
	Expected string  `json:"expected,omitempty"`
	Observed string  `json:"observed"`
	Verdict  Verdict `json:"verdict"`
	// Values are the figures behind Observed, for programs; the unit is in the name.
	Values map[string]float64 `json:"values,omitempty"`
	// Details are lines that are too many for a table.
	Details []string `json:"details,omitempty"`
}

// Report is a whole run.
type Report struct {
	Date     time.Time         `json:"date"`
	Software bool              `json:"softwareGPU"`
	Machine  map[string]string `json:"machine"`
	Seconds  float64           `json:"seconds"`
	Rows     []Row             `json:"rows"`
}

// Count is the number of rows with a verdict.
func (r *Report) Count(v Verdict) int {
	n := 0
	for _, row := range r.Rows {
		if row.Verdict == v {
			n++
		}
	}
	return n
}

// machineFacts is the order in which facts are shown.
var machineFacts = []string{"card", "driver", "memory", "kernel", "glibc", "processors", "library", "beside", "way", "python"}

// Summary writes what a reader of the rows wants to know at last: on what it was,
// which rows fail, and how many there are of each.
func (r *Report) Summary(w io.Writer) {
	fmt.Fprintln(w)
	for _, f := range machineFacts {
		if v := r.Machine[f]; v != "" {
			fmt.Fprintf(w, "%-11s %s\n", f, v)
		}
	}
	part := ""
	for _, row := range r.Rows {
		if row.Verdict != Fails {
			continue
		}
		if row.Part != part {
			part = row.Part
			fmt.Fprintf(w, "\n%s\n", part)
		}
		row.print(w)
	}
	fmt.Fprintf(w, "\n%d hold, %d fail, %d noted, %d skipped; %.0f s\n",
		r.Count(Holds), r.Count(Fails), r.Count(Noted), r.Count(Skipped), r.Seconds)
}

func (row Row) print(w io.Writer) {
	what := row.What + strings.Repeat(" ", max(0, 66-utf8.RuneCountInString(row.What)))
	expected := ""
	if row.Expected != "" {
		expected = "  (expected: " + row.Expected + ")"
	}
	fmt.Fprintf(w, "  %-7s %s %s%s\n", row.Verdict, what, row.Observed, expected)
}

// Markdown writes the rows as docs/measurements.md has them.
func (r *Report) Markdown(w io.Writer) {
	fmt.Fprintf(w, "## %s, %s, driver %s\n\n", r.Date.Format("2006-01-02"), r.Machine["card"], r.Machine["driver"])
	fmt.Fprintf(w, "`make gpu-bundle`, run in %.0f s: %d hold, %d fail, %d noted, %d skipped.", r.Seconds, r.Count(Holds), r.Count(Fails), r.Count(Noted), r.Count(Skipped))
	for _, f := range machineFacts[2:] {
		if v := r.Machine[f]; v != "" {
			fmt.Fprintf(w, " %s: %s.", strings.ToUpper(f[:1])+f[1:], v)
		}
	}
	fmt.Fprint(w, "\n\n| part | what | observed | expected | |\n| --- | --- | --- | --- | --- |\n")
	cell := strings.NewReplacer("|", "\\|", "\n", " ")
	for _, row := range r.Rows {
		fmt.Fprintf(w, "| %s | %s | %s | %s | %s |\n", row.Part, cell.Replace(row.What), cell.Replace(row.Observed), cell.Replace(row.Expected), row.Verdict)
	}
}

// Write writes the report into a folder, as JSON and as Markdown, under names with
// the date, and returns their paths.
func (r *Report) Write(folder string) ([]string, error) {
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return nil, fmt.Errorf("write the report: %w", err)
	}
	base := filepath.Join(folder, "gputest-"+r.Date.UTC().Format("20060102T150405Z"))
	b, err := json.MarshalIndent(r, "", "  ")
	if err == nil {
		err = os.WriteFile(base+".json", append(b, '\n'), 0o644)
	}
	if err != nil {
		return nil, fmt.Errorf("write the report: %w", err)
	}
	var text strings.Builder
	r.Markdown(&text)
	if err := os.WriteFile(base+".md", []byte(text.String()), 0o644); err != nil {
		return nil, fmt.Errorf("write the report: %w", err)
	}
	return []string{base + ".json", base + ".md"}, nil
}
