// Command carve-twin makes the twin of a driver's library by hand, as the node
// agent does for its node: for tests of the front libraries, and to look at what
// an agent would make of a driver. It isn't installed anywhere.
//
//	carve-twin -front vgpu/lib/build/libcarve-cuda.so -driver libcuda.so.550.90.07 -o twin.so
//
// It prints a line of what the twin has, and exits 0; 1 with a sentence if the
// twin can't be made, 2 if it was called wrongly.
package main

import (
	"flag"
	"fmt"
	"os"
	"strings"

	"github.com/carve-gpu/carve/vgpu/twin"
)

func main() {
	front := flag.String("front", "", "the front library, as vgpu/lib builds it")
	driver := flag.String("driver", "", "the driver's library")
	out := flag.String("o", "", "where to write the twin")
	flag.Parse()
	if *front == "" || *driver == "" || *out == "" || flag.NArg() != 0 {
		flag.Usage()
		os.Exit(2)
	}
	if err := run(*front, *driver, *out); err != nil {
		fmt.Fprintln(os.Stderr, "carve-twin:", err)
		os.Exit(1)
	}
}

func run(front, driver, out string) error {
	f, err := os.Open(driver)
	if err != nil {
		return err
	}
	defer f.Close()
	library, err := twin.Read(f)
	if err != nil {
		return fmt.Errorf("read %s: %w", driver, err)
	}
	b, err := os.ReadFile(front)
	if err != nil {
		return err
	}
	t, err := twin.Make(b, library)
	if err != nil {
		return err
	}
	if err := os.WriteFile(out, t.File, 0o755); err != nil {
		return err
	}
	absent := ""
	if len(t.Absent) > 0 {
		absent = ": " + strings.Join(t.Absent, " ")
	}
	fmt.Printf("%d exports: %d hooks, %d the driver's own; %d hooks absent%s\n",
		len(library.Exports), len(t.Hooks), len(t.Behind), len(t.Absent), absent)
	return nil
}
