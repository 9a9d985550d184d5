// Command carve-gputest tries carve's shares on a machine with a card, out of the
// folder that `make gpu-bundle` makes, where it is called run.
//
//	./run                  everything, in less than nine minutes
//	./run -parts memory,costs -o /tmp/results
//
// It prints a table, and writes it as JSON and as Markdown. It exits 0 where all that
// must hold does, 1 where something doesn't or there is no card, 2 if it was called
// wrongly.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/carve-gpu/carve/vgpu/bundle"
	"github.com/carve-gpu/carve/vgpu/gpu"
)

func main() {
	if len(os.Args) > 1 && os.Args[1] == "inside" {
		fmt.Fprintln(os.Stderr, "carve-gputest:", bundle.Inside(os.Args[2:], os.Environ()))
		os.Exit(127)
	}
	os.Exit(run())
}

func run() int {
	self, err := os.Executable()
	if err != nil {
		fmt.Fprintln(os.Stderr, "carve-gputest:", err)
		return 1
	}
	dir := filepath.Dir(self)
	flags := flag.NewFlagSet("run", flag.ContinueOnError)
	root := flags.String("driver-root", "/", "where the driver is installed; a software GPU's root to try this program itself")
	card := flags.Int("card", 0, "the driver's `index` of the card to use")
	way := flags.String("way", "", "how the library gets in: namespace or relocated; tried in turn by default")
	list := flags.String("parts", "", "only these, with commas between: "+strings.Join(bundle.Parts(), ", "))
	quick := flags.Bool("quick", false, "less of each, in less than a minute")
	band := flags.Float64("band", 2, "how many `points` of a card a share of compute may be off")
	python := flags.String("python", "python3", "the interpreter that has PyTorch, if any does")
	out := flags.String("o", filepath.Join(dir, "results"), "the `folder` to write to")
	limit := flags.Duration("limit", 0, "end after so long (default 8m30s)")
	verbose := flags.Bool("v", false, "say what the parts underneath say")
	if err := flags.Parse(os.Args[1:]); errors.Is(err, flag.ErrHelp) {
		return 0
	} else if err != nil {
		return 2
	}
	var parts []string
	if *list != "" {
		parts = strings.Split(*list, ",")
	}
	for _, p := range parts {
		if !slices.Contains(bundle.Parts(), p) {
			fmt.Fprintf(os.Stderr, "run: no part %q; there are %s\n", p, strings.Join(bundle.Parts(), ", "))
			return 2
		}
	}
	if flags.NArg() > 0 || *way != "" && *way != string(bundle.WayNamespace) && *way != string(bundle.WayRelocated) {
		flags.Usage()
		return 2
	}
	path, err := filepath.EvalSymlinks(*root)
	if err == nil {
		path, err = filepath.Abs(path)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "run: driver root:", err)
		return 1
	}
	level := slog.LevelError
	if *verbose {
		level = slog.LevelDebug
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	report, err := bundle.Run(ctx, bundle.Config{
		Dir: dir, Root: gpu.Root{Path: path}, Card: *card, Self: self, Env: os.Environ(), Way: bundle.Way(*way), Parts: parts,
		Quick: *quick, Band: *band, Python: *python, Limit: *limit, Progress: os.Stdout,
		Log: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level})),
	})
	if errors.Is(err, bundle.ErrNoCard) {
		fmt.Fprintf(os.Stderr, "run: %v\nThis needs a machine with an NVIDIA driver and a card (nvidia-smi lists it).\n", err)
		return 1
	}
	if len(report.Rows) > 0 {
		report.Summary(os.Stdout)
		files, werr := report.Write(*out)
		if werr != nil {
			// A folder that can't be written to must not cost the figures.
			fmt.Fprintln(os.Stderr, "run:", werr)
			files, werr = report.Write(filepath.Join(os.TempDir(), "carve-gputest-"+time.Now().Format("20060102T150405")))
		}
		err = errors.Join(err, werr)
		for _, f := range files {
			fmt.Println("written:", f)
		}
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "run:", err)
		return 1
	}
	if n := report.Count(bundle.Fails); n > 0 {
		return 1
	}
	return 0
}
