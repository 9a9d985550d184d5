// Command lab starts and ends a real Kubernetes cluster on this machine, in
// namespaces of its own; see package lab.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"syscall"

	"github.com/carve-gpu/carve/deploy/e2e/lab"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	err := newCommand(lab.NewProgress(os.Stderr)).ExecuteContext(ctx)
	var exit *exec.ExitError
	switch {
	case err == nil:
	case errors.As(err, &exit) && exit.ExitCode() > 0:
		// A program in the lab failed and has said why.
		os.Exit(exit.ExitCode())
	case errors.As(err, new(usageError)):
		fmt.Fprintln(os.Stderr, "lab:", err)
		os.Exit(2)
	default:
		fmt.Fprintln(os.Stderr, "lab:", err)
		os.Exit(1)
	}
}

// usageError is a mistake in the command line.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }
