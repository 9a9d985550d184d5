package main

import (
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
)

const (
	// pluginName is the name under which kubectl finds the binary: what
	// follows "kubectl-" is the plugin's word on the command line.
	pluginName = "kubectl-carve"
	// pluginCompletion is the name under which kubectl asks a plugin to
	// complete (kubectl 1.26 and later): it is started with the words behind
	// "kubectl carve", the one to be completed last.
	pluginCompletion = "kubectl_complete-carve"
)

// asPlugin reports whether the binary was started by kubectl.
func asPlugin(program string) bool {
	name := filepath.Base(program)
	return strings.HasPrefix(name, pluginName) || strings.HasPrefix(name, pluginCompletion)
}

// pluginArgs are the arguments that the command line means.
func pluginArgs(args []string) []string {
	if strings.HasPrefix(filepath.Base(args[0]), pluginCompletion) {
		return append([]string{cobra.ShellCompRequestCmd}, args[1:]...)
	}
	return args[1:]
}
