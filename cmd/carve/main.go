// Command carve is the one Go binary of the product: the node agent, the
// scheduler extender and the user's commands. Linked under the name
// kubectl-carve it is a kubectl plugin.
//
// This package parses, builds, wires and runs; it is the only place that reads
// arguments and the environment.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"
)

// Exit codes of every command.
const (
	exitFailed = 1
	exitUsage  = 2
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := run(ctx, pluginArgs(os.Args))
	stop()
	os.Exit(code)
}

// run executes one command and turns its error into an exit code.
func run(ctx context.Context, args []string) int {
	root := newRootCommand()
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)
	if err == nil {
		return 0
	}
	fmt.Fprintln(os.Stderr, "error:", err)
	var usage usageError
	if errors.As(err, &usage) {
		fmt.Fprintf(os.Stderr, "see %q\n", usage.command+" --help")
		return exitUsage
	}
	return exitFailed
}
