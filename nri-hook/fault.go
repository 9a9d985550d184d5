package nrihook

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"syscall"
	"time"
)

// linkFault turns what kept the hook from the runtime into a sentence that says
// how to mend it.
func linkFault(socket string, err error) error {
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("%s doesn't exist: NRI is off in the container runtime, or the runtime isn't running. "+
			"containerd 2 has NRI on; for containerd 1.7 put [plugins.\"io.containerd.nri.v1.nri\"] with disable = false and disable_connections = false into its config.toml and restart it; "+
			"for CRI-O set enable_nri = true in [crio.nri]", socket)
	case errors.Is(err, syscall.ECONNREFUSED):
		return fmt.Errorf("nobody listens on %s: the container runtime isn't running, or left the socket behind when NRI was switched off; restart it with NRI on", socket)
	case errors.Is(err, syscall.ENOTSOCK), errors.Is(err, syscall.EPROTOTYPE):
		return fmt.Errorf("%s is no NRI socket; --nri-socket must name the runtime's", socket)
	case errors.Is(err, os.ErrPermission):
		return fmt.Errorf("%s may not be opened: %w; the agent must run as root, without a profile that denies it", socket, err)
	}
	return fmt.Errorf("dial NRI: %w", err)
}

// registrationFault is linkFault for a connection that was made.
func registrationFault(socket string, limit time.Duration, err error) error {
	switch {
	case errors.Is(err, context.DeadlineExceeded), err != nil && strings.Contains(err.Error(), "deadline exceeded"):
		return fmt.Errorf("the runtime didn't complete the NRI registration within %v: it is stuck with its containers or other plugins, or %s isn't the runtime's NRI socket", limit, socket)
	case err == nil, errors.Is(err, errClosed), strings.HasSuffix(err.Error(), "ttrpc: closed"):
		return fmt.Errorf("the runtime closed the connection when the hook registered at %s: it speaks an NRI older than 0.2 (containerd before 1.7), or it was stopped; its log says more", socket)
	}
	return fmt.Errorf("the runtime refused the hook as NRI plugin %s-%s: %w; another plugin may have that name, and its log says more", pluginIndex, pluginName, err)
}

// errClosed is a connection that ended without a reason.
var errClosed = errors.New("connection closed")
