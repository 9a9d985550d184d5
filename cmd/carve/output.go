package main

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"sigs.k8s.io/yaml"
)

// outputFormats are the values of -o that every listing command takes.
var outputFormats = []string{"table", "json", "yaml"}

// addOutputFlag adds -o with its completion.
func addOutputFlag(cmd *cobra.Command, format *string) {
	cmd.Flags().StringVarP(format, "output", "o", "table", "output format: table, json or yaml")
	// The error is impossible: the flag was added above.
	_ = cmd.RegisterFlagCompletionFunc("output", cobra.FixedCompletions(completions(outputFormats), cobra.ShellCompDirectiveNoFileComp))
}

func completions(words []string) []cobra.Completion {
	out := make([]cobra.Completion, len(words))
	for i, w := range words {
		out[i] = cobra.Completion(w)
	}
	return out
}

// checkOutputFormat finds a wrong -o before any work is done.
func checkOutputFormat(cmd *cobra.Command, format string) error {
	if !slices.Contains(outputFormats, format) {
		return usagef(cmd, "--output %q: allowed are %s", format, strings.Join(outputFormats, ", "))
	}
	return nil
}

// writeOutput prints data in the asked format; table is called for the
// default one.
func writeOutput(w io.Writer, cmd *cobra.Command, format string, data any, table func(io.Writer) error) error {
	switch format {
	case "table":
		return table(w)
	case "json":
		e := json.NewEncoder(w)
		e.SetIndent("", "  ")
		return e.Encode(data)
	case "yaml":
		b, err := yaml.Marshal(data)
		if err != nil {
			return fmt.Errorf("write yaml: %w", err)
		}
		_, err = w.Write(b)
		return err
	}
	return checkOutputFormat(cmd, format)
}

// plural is a number of things: "1 share", "2 shares".
func plural(n int, thing string) string {
	if n == 1 {
		return "1 " + thing
	}
	return fmt.Sprintf("%d %ss", n, thing)
}
