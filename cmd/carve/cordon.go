package main

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/spf13/cobra"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/retry"

	"github.com/carve-gpu/carve/api/gpunodes"
	"github.com/carve-gpu/carve/api/v1alpha1"
)

// maxReason is what the GPUNode takes of a reason.
const maxReason = 256

func newCordonCommand() *cobra.Command {
	var k kubeFlags
	var reason string
	cmd := &cobra.Command{
		Use:   "cordon NODE [CARD...]",
		Short: "Take cards out: they get no new slices",
		Long: `Take cards of a node out: they get no new slices, and what runs on them stays.

A card is named by its index, its UUID or the beginning of that; without any
all cards of the node are taken out. It is written to spec.cordonedCards of the
node's GPUNode. Cards that are out already stay so.`,
		Example: `  carve cordon n1 2 --reason "ECC errors, ticket 4711"
  carve cordon n1 GPU-2c6d1a90-7f51-4f0e-9d0b-5c1f5f0a1b2c
  carve cordon n1`,
		Args:              cobra.MinimumNArgs(1),
		ValidArgsFunction: k.completeCards(func(n v1alpha1.GPUNode, c v1alpha1.Card) bool { return !slices.Contains(n.Spec.CordonedCards, c.UUID) }),
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(reason) > maxReason {
				return usagef(cmd, "--reason has %d bytes, allowed are %d", len(reason), maxReason)
			}
			if !utf8.ValidString(reason) || strings.ContainsFunc(reason, unprintable) {
				return usagef(cmd, "--reason %q: allowed is one line without control characters", reason)
			}
			_, nodes, err := k.clients()
			if err != nil {
				return err
			}
			return changeCordon(cmd.Context(), cmd.OutOrStdout(), nodes, args[0], args[1:], func(n v1alpha1.GPUNode, cards []string) v1alpha1.GPUNodeSpec {
				return cordon(n, cards, reason)
			})
		},
	}
	cmd.Flags().StringVar(&reason, "reason", "", "why, for those who look later")
	addKubeFlags(cmd, &k, false)
	return cmd
}

// unprintable reports characters that would end a line or steer the terminal of
// those who look later.
func unprintable(r rune) bool {
	return unicode.IsControl(r) || unicode.In(r, unicode.Zl, unicode.Zp, unicode.Bidi_Control)
}

func newUncordonCommand() *cobra.Command {
	var k kubeFlags
	cmd := &cobra.Command{
		Use:   "uncordon NODE [CARD...]",
		Short: "Put cards back that were taken out",
		Long: `Put cards of a node back that "carve cordon" took out.

A card is named by its index, its UUID or the beginning of that; without any
all cards of the node are put back. Cards that aren't out stay as they are.`,
		Example: `  carve uncordon n1 2
  carve uncordon n1`,
		Args:              cobra.MinimumNArgs(1),
		ValidArgsFunction: k.completeCards(func(n v1alpha1.GPUNode, c v1alpha1.Card) bool { return slices.Contains(n.Spec.CordonedCards, c.UUID) }),
		RunE: func(cmd *cobra.Command, args []string) error {
			_, nodes, err := k.clients()
			if err != nil {
				return err
			}
			return changeCordon(cmd.Context(), cmd.OutOrStdout(), nodes, args[0], args[1:], uncordon)
		},
	}
	addKubeFlags(cmd, &k, false)
	return cmd
}

// changeCordon reads the node, changes its spec and writes it, again if somebody
// else wrote meanwhile, and says what became of each card.
func changeCordon(ctx context.Context, w io.Writer, nodes *gpunodes.Client, node string, words []string, change func(v1alpha1.GPUNode, []string) v1alpha1.GPUNodeSpec) error {
	var before, after v1alpha1.GPUNode
	var cards []string
	err := retry.RetryOnConflict(retry.DefaultRetry, func() error {
		n, err := nodes.Get(ctx, node)
		if apierrors.IsNotFound(err) {
			return errNoCards(node)
		}
		if err != nil {
			return fmt.Errorf("read GPUNode %s: %w", node, err)
		}
		before = *n
		if cards, err = findCards(*n, words); err != nil {
			return err
		}
		spec := change(*n, cards)
		after = *n
		after.Spec = spec
		patch, err := cordonPatch(before, spec)
		if err != nil || patch == nil {
			return err
		}
		if _, err = nodes.Patch(ctx, node, types.MergePatchType, patch); err != nil && !apierrors.IsConflict(err) {
			return fmt.Errorf("write GPUNode %s: %w", node, err)
		}
		return err
	})
	if err != nil {
		return err
	}
	return printCordon(w, before, after, cards)
}

// findCards resolves what the user calls cards: an index, a UUID, or the
// beginning of one. No words mean all cards, those included that are cordoned
// and not reported.
func findCards(n v1alpha1.GPUNode, words []string) ([]string, error) {
	known := map[string]string{} // UUID to itself
	var all []string
	add := func(uuid string) {
		if known[uuid] == "" {
			known[uuid] = uuid
			all = append(all, uuid)
		}
	}
	for _, c := range byIndex(n.Status.Cards) {
		add(c.UUID)
	}
	reported := len(all)
	for _, u := range n.Spec.CordonedCards {
		add(u)
	}
	if len(words) == 0 {
		if len(all) == 0 {
			return nil, fmt.Errorf("node %s reports no cards", n.Name)
		}
		return all, nil
	}
	var out []string
	for _, w := range words {
		var found []string
		index, err := strconv.ParseInt(w, 10, 32)
		switch {
		case err == nil:
			for _, c := range n.Status.Cards {
				if int64(c.Index) == index {
					found = append(found, c.UUID)
				}
			}
		case known[w] != "":
			found = []string{w}
		default:
			for _, u := range all {
				// With or without what all UUIDs begin with.
				if begins(u, w) || begins(strings.TrimPrefix(u, "GPU-"), w) {
					found = append(found, u)
				}
			}
		}
		switch {
		case len(found) == 0, len(found) == 1 && begins("GPU-", w):
			return nil, fmt.Errorf("node %s has no card %q; it has %s", n.Name, w, listCards(n, reported))
		case len(found) > 1:
			return nil, fmt.Errorf("%q is the beginning of %d UUIDs on node %s: %s; name one by its index or by more of it", w, len(found), n.Name, nameCards(n, found))
		}
		if !slices.Contains(out, found[0]) {
			out = append(out, found[0])
		}
	}
	return out, nil
}

// begins reports whether a UUID begins with a word, whatever the case.
func begins(uuid, word string) bool {
	return strings.HasPrefix(strings.ToLower(uuid), strings.ToLower(word))
}

// nameCards names cards by index and UUID.
func nameCards(n v1alpha1.GPUNode, uuids []string) string {
	var parts []string
	for _, u := range uuids {
		part := u + " (cordoned, not reported)"
		for _, c := range n.Status.Cards {
			if c.UUID == u {
				part = fmt.Sprintf("%d (%s)", c.Index, u)
			}
		}
		parts = append(parts, part)
	}
	return strings.Join(parts, ", ")
}

func listCards(n v1alpha1.GPUNode, reported int) string {
	if reported == 0 {
		return "none"
	}
	var parts []string
	for _, c := range byIndex(n.Status.Cards) {
		parts = append(parts, fmt.Sprintf("%d (%s)", c.Index, c.UUID))
	}
	return strings.Join(parts, ", ")
}

func byIndex(cards []v1alpha1.Card) []v1alpha1.Card {
	return slices.SortedStableFunc(slices.Values(cards), func(a, b v1alpha1.Card) int { return cmp.Compare(a.Index, b.Index) })
}

// cordon is the spec with the cards taken out. A reason replaces an earlier one;
// no reason leaves it.
func cordon(n v1alpha1.GPUNode, cards []string, reason string) v1alpha1.GPUNodeSpec {
	spec := *n.Spec.DeepCopy()
	for _, u := range cards {
		if !slices.Contains(spec.CordonedCards, u) {
			spec.CordonedCards = append(spec.CordonedCards, u)
		}
		if reason != "" {
			if spec.CordonReasons == nil {
				spec.CordonReasons = map[string]v1alpha1.CordonReason{}
			}
			spec.CordonReasons[u] = v1alpha1.CordonReason(reason)
		}
	}
	return spec
}

// uncordon is the spec with the cards put back.
func uncordon(n v1alpha1.GPUNode, cards []string) v1alpha1.GPUNodeSpec {
	spec := *n.Spec.DeepCopy()
	spec.CordonedCards = slices.DeleteFunc(spec.CordonedCards, func(u string) bool { return slices.Contains(cards, u) })
	for _, u := range cards {
		delete(spec.CordonReasons, u)
	}
	return spec
}

// cordonPatch is the merge patch from the node's spec to the given one, nil
// where nothing changes. It holds only for the version that was read.
func cordonPatch(n v1alpha1.GPUNode, spec v1alpha1.GPUNodeSpec) ([]byte, error) {
	reasons := map[string]any{}
	for u, r := range spec.CordonReasons {
		if n.Spec.CordonReasons[u] != r {
			reasons[u] = r
		}
	}
	for u := range n.Spec.CordonReasons {
		if _, stays := spec.CordonReasons[u]; !stays {
			reasons[u] = nil
		}
	}
	change := map[string]any{}
	if !slices.Equal(spec.CordonedCards, n.Spec.CordonedCards) {
		change["cordonedCards"] = append([]string{}, spec.CordonedCards...)
	}
	if len(reasons) > 0 {
		change["cordonReasons"] = reasons
	}
	if len(change) == 0 {
		return nil, nil
	}
	return json.Marshal(map[string]any{"metadata": map[string]any{"resourceVersion": n.ResourceVersion}, "spec": change})
}

// printCordon says of each card what became of it, and who is still on it where
// it is out.
func printCordon(w io.Writer, before, after v1alpha1.GPUNode, cards []string) error {
	var b strings.Builder
	reported := map[string]v1alpha1.Card{}
	for _, c := range after.Status.Cards {
		reported[c.UUID] = c
	}
	for _, u := range cards {
		was, is := slices.Contains(before.Spec.CordonedCards, u), slices.Contains(after.Spec.CordonedCards, u)
		what := "uncordoned"
		switch {
		case was && is:
			what = "is cordoned already"
			if before.Spec.CordonReasons[u] != after.Spec.CordonReasons[u] {
				what = "is cordoned already; the reason is new"
			}
		case is:
			what = "cordoned"
		case !was:
			what = "is not cordoned"
		}
		c, known := reported[u]
		name := "card " + u
		if known {
			name = fmt.Sprintf("card %d (%s)", c.Index, u)
		}
		fmt.Fprintf(&b, "%s: %s %s\n", after.Name, name, what)
		if !is {
			continue
		}
		for _, s := range c.Slices {
			amount := fmt.Sprintf("%d MiB", s.MemMiB)
			if s.Mode == "exclusive" {
				amount = "whole card"
			}
			fmt.Fprintf(&b, "  stays on it: %s/%s %s (%s)\n", s.Namespace, s.Pod, s.Container, amount)
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}
