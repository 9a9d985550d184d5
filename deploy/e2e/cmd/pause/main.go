// Command pause does nothing, as process 1: it reaps the orphans of its PID
// namespace and ends on SIGINT or SIGTERM.
//
// It is used twice: as the sandbox container of every pod, and as the process
// that holds a lab's namespaces (whose death ends everything in the lab).
package main

import (
	"os"
	"os/signal"
	"syscall"
)

func main() {
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM, syscall.SIGCHLD)
	for s := range signals {
		if s != syscall.SIGCHLD {
			return
		}
		// Signals coalesce: one SIGCHLD may stand for several dead children.
		for {
			pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil)
			if err == syscall.EINTR {
				continue
			}
			if pid <= 0 || err != nil {
				break
			}
		}
	}
}
