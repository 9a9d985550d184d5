package bundle

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/carve-gpu/carve/vgpu/region"
	"github.com/carve-gpu/carve/vgpu/twin"
)

// exports compares what the front shows with what the driver does.
func (r *runner) exports() error {
	s, err := r.newShare(terms{memory: 3000 * mib})
	if err != nil {
		return err
	}
	for _, name := range []string{cudaName, nvmlName} {
		front, err := os.ReadFile(filepath.Join(r.Dir, "lib", fronts[name]))
		if err != nil {
			return err
		}
		t, driver, err := makeTwin(front, r.driver[name])
		if err != nil {
			r.must(false, "front made for "+name, "it is made", err.Error(), nil)
			continue
		}
		shown := append(slices.Clone(t.Hooks), t.Behind...)
		slices.Sort(shown)
		var there []string
		for _, e := range driver.Exports {
			there = append(there, e.Name)
		}
		slices.Sort(there)
		row := Row{
			What: "exports of " + name, Expected: "those of the driver", Verdict: Fails,
			Observed: fmt.Sprintf("%d of %d; %d hooked, %d hooks that this driver lacks", len(shown), len(there), len(t.Hooks), len(t.Absent)),
			Values:   map[string]float64{"exports": float64(len(there)), "hooks": float64(len(t.Hooks)), "absent": float64(len(t.Absent))},
			Details:  t.Absent,
		}
		if slices.Equal(shown, there) {
			row.Verdict = Holds
		}
		r.row(row)
		if name == cudaName {
			if err := r.symbols(s, driver); err != nil {
				return err
			}
		}
	}
	return r.paths(s)
}

// symbols looks every name up as programs do.
func (r *runner) symbols(s *share, driver *twin.Library) error {
	file := filepath.Join(s.dir, "names")
	var names strings.Builder
	for _, e := range driver.Exports {
		// Not data, nor what only the driver's own libraries call.
		if strings.HasPrefix(e.Name, "cu") {
			fmt.Fprintln(&names, e.Name)
		}
	}
	if err := os.WriteFile(file, []byte(names.String()), 0o644); err != nil {
		return err
	}
	lines, err := r.lines(s, 30*time.Second, probe, "symbols", file)
	if err != nil {
		return err
	}
	bare, err := r.lines(nil, 30*time.Second, probe, "symbols", file)
	if err != nil {
		return err
	}
	answers := map[string]line{}
	for _, l := range bare {
		answers[l.text("name")] = l
	}
	missing, differ := []string{}, []string{}
	for _, l := range lines {
		name := l.text("name")
		if !l.bool("ok") {
			missing = append(missing, name)
		}
		b := answers[name]
		if l.number("procResult") != b.number("procResult") || l.number("procStatus") != b.number("procStatus") || l.has("procFile") != b.has("procFile") {
			differ = append(differ, name)
		}
	}
	r.must(len(missing) == 0 && len(lines) > 100, "every function of the driver is found by dlsym", "all", fmt.Sprintf("%d of %d", len(lines)-len(missing), len(lines)), nil)
	row := Row{What: "cuGetProcAddress answers for each as the driver's", Expected: "all", Observed: fmt.Sprintf("%d of %d", len(lines)-len(differ), len(lines)), Verdict: Holds, Details: differ}
	if len(differ) > 0 {
		row.Verdict = Fails
	}
	r.row(row)
	return nil
}

// paths looks at which files the loader opens.
func (r *runner) paths(s *share) error {
	lines, err := r.lines(s, 30*time.Second, probe, "paths")
	if err != nil {
		return err
	}
	past := []string{}
	for _, l := range lines {
		if l.text("step") != "path" || !l.bool("ok") {
			continue
		}
		file := l.text("file")
		name := cudaName
		if l.text("library") != "libcuda" {
			name = nvmlName
		}
		good := file == r.driver[name] // what stands there in the namespace is the front
		if r.way == WayRelocated {
			good = file == s.fronts[name]
		}
		if !good {
			past = append(past, fmt.Sprintf("%s %s: %s", l.text("library"), l.text("way"), file))
		}
	}
	if r.way == WayRelocated {
		r.row(Row{What: "ways to open the libraries that reach the front", Observed: fmt.Sprintf("%d of %d; with LD_LIBRARY_PATH only, so a path or a cleared environment leads past it", len(lines)-len(past), len(lines)), Verdict: Noted, Details: past})
		return nil
	}
	row := Row{What: "ways to open the libraries that reach the front", Expected: "all", Observed: fmt.Sprintf("%d of %d", len(lines)-len(past), len(lines)), Verdict: Holds, Details: past}
	if len(past) > 0 || len(lines) == 0 {
		row.Verdict = Fails
	}
	r.row(row)
	return nil
}

// memory tries limits and charges.
func (r *runner) memory() error {
	listed := "by its own pid"
	switch {
	case r.blind:
		listed = "not at all: figures are the card's, and compute is divided by turns"
	case !r.selfVisible:
		listed = "by another pid than its own"
	}
	r.note("the driver lists a process", listed, nil)
	for _, step := range []func() error{r.contexts, r.queries, r.charges, r.refusals, r.race} {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

// contexts looks at what contexts cost, and whether the library knows.
func (r *runner) contexts() error {
	r.note("a context costs, bare", bytesText(r.contextBytes), map[string]float64{"bytes": float64(r.contextBytes)})
	for _, say := range []struct {
		what    string
		context uint64
	}{{"nobody says what a context costs", 0}, {"the limits say what a context costs", r.contextBytes}} {
		if say.context == 0 && !r.selfVisible {
			r.skip(say.what, "the driver doesn't list the process under its own pid, so the library can't learn it")
			continue
		}
		s, err := r.newShare(terms{memory: 6000 * mib, context: say.context})
		if err != nil {
			return err
		}
		c, err := r.start(s, 30*time.Second, probe, "serve", "256MiB")
		if err != nil {
			return err
		}
		err = r.residual(s, c, say.what)
		c.kill()
		if err != nil {
			return err
		}
	}
	return nil
}

// residual compares a process' slot with the driver's figure, before and after it
// launches a kernel.
func (r *runner) residual(s *share, c *child, what string) error {
	for _, when := range []string{"with 256 MiB", "with a module and a kernel launched"} {
		if when != "with 256 MiB" {
			fmt.Fprintln(c.in, "launch 1ms")
			if _, err := c.next("launch"); err != nil {
				return err
			}
		} else if _, err := c.next("memory"); err != nil {
			return err
		}
		slot, driver, ok := r.usageOf(s, c.pid)
		if !ok {
			r.skip(what+", "+when, "the driver doesn't tell what the process has")
			return nil
		}
		residual := int64(driver) - int64(slot.UsedBytes)
		values := map[string]float64{"driver_bytes": float64(driver), "charged_bytes": float64(slot.UsedBytes), "context_bytes": float64(slot.ContextBytes), "residual_bytes": float64(residual)}
		observed := fmt.Sprintf("%d B (driver %s, charged %s, of it the context %s)", residual, bytesText(driver), bytesText(slot.UsedBytes), bytesText(slot.ContextBytes))
		if when == "with 256 MiB" {
			// A page or two is the driver's own, of which it tells nobody.
			r.must(residual >= -2*mib && residual <= 4*mib, "residual where "+what+", "+when, "about 0 B", observed, values)
		} else {
			r.note("residual where "+what+", "+when, observed, values)
		}
	}
	return nil
}

// queries looks at what a program is shown.
func (r *runner) queries() error {
	const limit = 5000 * mib
	s, err := r.newShare(terms{memory: limit, context: r.contextBytes})
	if err != nil {
		return err
	}
	lines, err := r.lines(s, 30*time.Second, probe, "info")
	if err != nil {
		return err
	}
	for _, l := range lines {
		if l.text("step") != "card" {
			continue
		}
		var wrong []string
		for _, f := range []string{"cudaTotalBytes", "deviceTotalBytes", "nvmlTotalBytes", "nvml2TotalBytes"} {
			if l.has(f) && l.int(f) != limit {
				wrong = append(wrong, fmt.Sprintf("%s %d", f, l.int(f)))
			}
		}
		if used := l.int("nvmlUsedBytes"); used+l.int("cudaFreeBytes") != limit {
			wrong = append(wrong, fmt.Sprintf("NVML's used %d and CUDA's free %d don't add up", used, l.int("cudaFreeBytes")))
		}
		r.must(len(wrong) == 0, "CUDA and NVML show the share", bytesText(limit), strings.Join(append(wrong, fmt.Sprintf("%s free at first", bytesText(uint64(l.int("cudaFreeBytes"))))), "; "), nil)
	}
	return nil
}

// figureOf is what the driver says in a line: of the process where it can, else of the
// card.
func figureOf(l line, suffix string) (int64, string) {
	if l.has("processBytes" + suffix) {
		return l.int("processBytes" + suffix), "process"
	}
	return l.int("cardBytes" + suffix), "card"
}

// charges compares ledger and driver for each way to get memory.
func (r *runner) charges() error {
	limit := max(r.contextBytes, 600*mib) + 4000*mib
	s, err := r.newShare(terms{memory: limit, context: r.contextBytes})
	if err != nil {
		return err
	}
	lines, err := r.lines(s, 60*time.Second, probe, "charges")
	if err != nil {
		return err
	}
	var order []string
	byCall := map[string][]line{}
	for _, l := range lines {
		if l.text("step") == "charge" {
			if byCall[l.text("call")] == nil {
				order = append(order, l.text("call"))
			}
			byCall[l.text("call")] = append(byCall[l.text("call")], l)
		}
	}
	if len(order) == 0 {
		return fmt.Errorf("gpuprobe charges: %v", lines)
	}
	for _, call := range order {
		r.chargesOf(call, byCall[call])
	}
	lines, err = r.lines(s, 60*time.Second, probe, "charges", "--random", pick(r, "1s", "6s"), "--seed", "7")
	if err != nil {
		return err
	}
	for _, l := range lines {
		if l.text("step") != "random" {
			continue
		}
		r.must(l.bool("ok") && l.bool("chargedKnown") && l.int("disagreements") == 0 && l.int("calls") > 20,
			"ledger and driver agree after each of many random calls", "always",
			fmt.Sprintf("%d of %d times not (the first at call %d); charged at most %d B too much, %d B too little; %d refusals, %d strange answers",
				l.int("disagreements"), l.int("calls"), l.int("firstDisagreement"), l.int("chargedOverBytes"), l.int("chargedUnderBytes"), l.int("refusals"), l.int("strangeAnswers")),
			map[string]float64{"calls": l.number("calls"), "disagreements": l.number("disagreements"), "over_bytes": l.number("chargedOverBytes"), "under_bytes": l.number("chargedUnderBytes")})
	}
	return nil
}

func (r *runner) chargesOf(call string, lines []line) {
	var details, wrong []string
	under := int64(0)
	tried, source := 0, ""
	for _, l := range lines {
		driver, of := figureOf(l, "")
		after, _ := figureOf(l, "After")
		charged, left := l.int("chargedBytes"), l.int("chargedBytesAfter")
		details = append(details, fmt.Sprintf("asked %d: charged %d, driver %d (%s), card %d; given back: charged %d, driver %d %s",
			l.int("askedBytes"), charged, driver, of, l.int("cardBytes"), left, after, l.fault()))
		if !l.bool("ok") {
			continue
		}
		tried, source = tried+1, of
		if charged != driver || left != after {
			wrong = append(wrong, fmt.Sprintf("asked %d: charged %d, driver %d, then %d and %d", l.int("askedBytes"), charged, driver, left, after))
		}
		under = max(under, driver-charged)
	}
	row := Row{
		What: "charged for " + call, Expected: "what the driver takes", Details: details, Verdict: Holds,
		Observed: fmt.Sprintf("equal for %d of %d sizes (by the driver's figure of the %s)", tried-len(wrong), tried, source),
		Values:   map[string]float64{"sizes": float64(tried), "different": float64(len(wrong)), "under_bytes": float64(under)},
	}
	if len(wrong) > 0 {
		row.Observed += "; " + strings.Join(wrong[:min(3, len(wrong))], "; ")
	}
	switch {
	case tried == 0:
		row.Verdict, row.Observed = Skipped, "refused: "+lines[0].fault()
	case call == "cuMemAllocManaged":
		// Charged in full by policy, wherever its pages are.
		row.Verdict, row.Expected = Noted, ""
	case len(wrong) > 0:
		row.Verdict = Fails
	}
	r.row(row)
}

// refusals tries the limit in each way.
func (r *runner) refusals() error {
	limit := max(r.contextBytes, 100*mib) + 2500*mib
	s, err := r.newShare(terms{memory: limit, context: r.contextBytes})
	if err != nil {
		return err
	}
	lines, err := r.lines(s, 60*time.Second, probe, "refusals")
	if err != nil {
		return err
	}
	seen := 0
	for _, l := range lines {
		if l.text("step") != "refusal" {
			continue
		}
		seen++
		driver, _ := figureOf(l, "")
		values := map[string]float64{"free_bytes": l.number("freeBytes"), "free_bytes_full": l.number("freeBytesFull")}
		var wrong []string
		if l.int("error") != 2 {
			wrong = append(wrong, "one page more than is free: "+orNone(l.fault()))
		}
		if !l.bool("outputsUntouched") || l.int("freeChangedBytes") != 0 || driver != 0 || l.int("chargedBytes") != 0 {
			wrong = append(wrong, fmt.Sprintf("refusing changed free by %d, the driver's figure by %d, the charge by %d", l.int("freeChangedBytes"), driver, l.int("chargedBytes")))
		}
		if l.int("grantResult") != 0 {
			wrong = append(wrong, fmt.Sprintf("%d of %d free refused with error %d", l.int("askedOfFreeBytes"), l.int("freeBytes"), l.int("grantResult")))
		}
		if l.has("processBytesFull") && l.int("processBytesFull") > int64(limit) {
			wrong = append(wrong, fmt.Sprintf("the process had %d, its limit is %d", l.int("processBytesFull"), limit))
		}
		if l.int("freeChangedBytesLast") != 0 {
			wrong = append(wrong, fmt.Sprintf("given back, free is %d off", l.int("freeChangedBytesLast")))
		}
		observed := fmt.Sprintf("one page over %s refused, nothing changed; %s had", bytesText(uint64(l.int("freeBytes"))), bytesText(uint64(l.int("askedOfFreeBytes"))))
		if len(wrong) > 0 {
			observed = strings.Join(wrong, "; ")
		}
		r.must(len(wrong) == 0, "the limit, by "+l.text("call"), "exact", observed, values)
	}
	if seen == 0 {
		return fmt.Errorf("gpuprobe refusals: %v", lines)
	}
	s, err = r.newShare(terms{memory: limit, context: r.contextBytes, policy: region.ManagedForbid})
	if err != nil {
		return err
	}
	lines, err = r.lines(s, 30*time.Second, probe, "alloc", "16MiB", "--managed")
	if err != nil {
		return err
	}
	for _, l := range lines {
		if l.text("step") == "alloc" {
			r.must(l.int("error") == 801, "managed memory where it is forbidden", "error 801", orNone(l.fault()), nil)
		}
	}
	return nil
}

// race lets four processes fight for one limit, and looks at the driver meanwhile.
func (r *runner) race() error {
	const procs = 4
	limit := procs*max(r.contextBytes, 100*mib) + 1500*mib
	s, err := r.newShare(terms{memory: limit, context: r.contextBytes})
	if err != nil {
		return err
	}
	before, err := r.door.Occupancy(r.card.UUID)
	if err != nil {
		return err
	}
	c, err := r.start(s, 40*time.Second, probe, "race", "--procs", fmt.Sprint(procs), "--size", "700MiB", "--seconds", pick(r, "1", "3"))
	if err != nil {
		return err
	}
	result := make(chan line, 1)
	fault := make(chan error, 1)
	go func() {
		l, err := c.next("race")
		if err != nil {
			fault <- err
			return
		}
		result <- l
	}()
	most, looks := uint64(0), 0
	for {
		select {
		case l := <-result:
			c.kill()
			r.must(l.bool("ok") && l.int("grants") > 0 && most <= limit, "four processes allocate and free at one limit", "never beyond "+bytesText(limit),
				fmt.Sprintf("at most %s on the card in %d looks; %d grants, %d refusals, %d other errors, %d processes failed",
					bytesText(most), looks, l.int("grants"), l.int("refusals"), l.int("otherErrors"), l.int("failedProcesses")),
				map[string]float64{"most_bytes": float64(most), "limit_bytes": float64(limit), "grants": l.number("grants"), "refusals": l.number("refusals")})
			return nil
		case err := <-fault:
			c.kill()
			return err
		case <-time.After(2 * time.Millisecond):
			if now, err := r.door.Occupancy(r.card.UUID); err == nil && now.UsedBytes > before.UsedBytes {
				most = max(most, now.UsedBytes-before.UsedBytes)
				looks++
			}
		}
	}
}
