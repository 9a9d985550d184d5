package main

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/gpunodes"
	"github.com/carve-gpu/carve/api/v1alpha1"
)

const (
	// resizePoll is how often the pod and its node are looked at while a resize
	// is under way.
	resizePoll = 50 * time.Millisecond
	// resizeLook is how often it is found out why there is no answer.
	resizeLook = time.Second
	// resizeTries is how often a request is written anew when somebody else
	// changed the pod meanwhile.
	resizeTries = 10
)

// change is an amount of the command line: a number, or a difference to what is.
type change struct {
	given bool
	sign  int // 0: absolute
	value int64
}

// apply gives the amount that a change leads to.
func (c change) apply(now int64) int64 {
	switch {
	case !c.given:
		return now
	case c.sign != 0:
		return now + int64(c.sign)*c.value
	}
	return c.value
}

func parseChange(s string, read func(string) (int64, error)) (change, error) {
	if s == "" {
		return change{}, nil
	}
	c := change{given: true}
	switch s[0] {
	case '+':
		c.sign, s = 1, s[1:]
	case '-':
		c.sign, s = -1, s[1:]
	}
	var err error
	c.value, err = read(s)
	return c, err
}

// resizeView is what the command prints.
type resizeView struct {
	Namespace  string        `json:"namespace"`
	Pod        string        `json:"pod"`
	Container  string        `json:"container"`
	Node       string        `json:"node"`
	Outcome    string        `json:"outcome"` // granted, refused, unchanged, asked
	Message    string        `json:"message,omitempty"`
	Generation int           `json:"generation"`
	InForce    bool          `json:"inForce"` // the node reported it
	Seconds    float64       `json:"seconds"` // from the request until then
	Cards      []resizedCard `json:"cards"`
}

// resizedCard is one card of the container before and after.
type resizedCard struct {
	Card   string       `json:"card"`
	Before resizeAmount `json:"before"`
	After  resizeAmount `json:"after"`
}

type resizeAmount struct {
	MemMiB int64 `json:"memMiB"`
	Cores  int   `json:"cores"`
}

// resizeOptions are the flags of the command.
type resizeOptions struct {
	container, memory, cores, format string
	wait                             bool
	timeout                          time.Duration

	mem, compute change
}

func newResizeCommand() *cobra.Command {
	var k kubeFlags
	var o resizeOptions
	cmd := &cobra.Command{
		Use:   "resize pod/NAME",
		Short: "Change the share of a running pod",
		Long: `Change the share of a running pod: its memory, its compute, or both, on each
card of one of its containers. The pod isn't restarted; its processes may
allocate up to the new limit at once.

An amount is what the container shall have, or with a sign a difference to what
it has. Memory is in MiB; with a binary unit (8Gi) it is bytes. A limit can't go
below what is in use, and not above what others leave of the card and the
namespace's ResourceQuota allows; then nothing changes.

It takes the right to update pods/resize of the pod (ClusterRole carve-resize).
The pod's spec stays as it is: a pod that is made again starts with its old
share.`,
		Example: `  carve resize pod/train --gpumem 12000
  carve resize pod/train -c app --gpumem +2Gi --gpucores 50
  carve resize train --gpumem -1Gi --timeout 10s -o json`,
		Args: func(cmd *cobra.Command, args []string) error {
			for name, amount := range map[string]string{"--gpumem": o.memory, "--gpucores": o.cores} {
				if strings.HasPrefix(amount, "--") {
					return fmt.Errorf("%s needs an amount, and %q was taken for one", name, amount)
				}
			}
			if len(args) == 2 {
				if name, ok := podName(args[0] + "/" + args[1]); ok {
					return fmt.Errorf("a pod is one argument (did you mean %s pod/%s?)", cmd.CommandPath(), name)
				}
			}
			return cobra.ExactArgs(1)(cmd, args)
		},
		ValidArgsFunction: func(cmd *cobra.Command, args []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
			if len(args) > 0 {
				return nil, noFiles
			}
			return k.completeShares(cmd)
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if err := checkOutputFormat(cmd, o.format); err != nil {
				return err
			}
			name, ok := podName(args[0])
			if !ok {
				return usagef(cmd, "%q: allowed are pod/NAME and NAME", args[0])
			}
			var err error
			if o.mem, err = parseChange(o.memory, api.ParseMemoryMiB); err != nil {
				return usagef(cmd, "--gpumem: %w", err)
			}
			if o.compute, err = parseChange(o.cores, func(s string) (int64, error) {
				v, err := strconv.ParseUint(strings.TrimSuffix(s, "%"), 10, 7)
				if err != nil || v > 100 {
					return 0, fmt.Errorf("%q: allowed are 0 to 100 percent, or a difference such as +10", s)
				}
				return int64(v), nil
			}); err != nil {
				return usagef(cmd, "--gpucores: %w", err)
			}
			if !o.mem.given && !o.compute.given {
				return usagef(cmd, "--gpumem, --gpucores or both are needed")
			}
			if o.timeout <= 0 {
				return usagef(cmd, "--timeout %s: allowed is more than 0", o.timeout)
			}
			namespace, err := k.namespace()
			if err != nil {
				return err
			}
			kube, nodes, err := k.clients()
			if err != nil {
				return err
			}
			r := resizer{kube: kube, nodes: nodes, namespace: namespace, name: name, options: o, talk: cmd.ErrOrStderr()}
			view, err := r.run(cmd.Context())
			if view != nil {
				err = errors.Join(writeOutput(cmd.OutOrStdout(), cmd, o.format, view, func(w io.Writer) error { return printResize(w, *view) }), err)
			}
			return err
		},
	}
	f := cmd.Flags()
	f.StringVarP(&o.container, "container", "c", "", "container; needed where several have a share")
	f.StringVar(&o.memory, "gpumem", "", "memory on each card: MiB (12000), bytes (8Gi), or a difference (+2000, -1Gi)")
	f.StringVar(&o.cores, "gpucores", "", "percent of each card's compute, or a difference (+10)")
	f.BoolVar(&o.wait, "wait", true, "wait until the node has it in force, or says why not")
	f.DurationVar(&o.timeout, "timeout", time.Minute, "how long to wait")
	// The error is impossible: the flag was added above.
	_ = cmd.RegisterFlagCompletionFunc("container", k.completeContainers)
	addKubeFlags(cmd, &k, true)
	addOutputFlag(cmd, &o.format)
	return cmd
}

// podName reads pod/NAME, pods/NAME, po/NAME or NAME.
func podName(arg string) (string, bool) {
	kind, name, both := strings.Cut(arg, "/")
	if !both {
		return arg, arg != ""
	}
	return name, name != "" && !strings.Contains(name, "/") && slices.Contains([]string{"pod", "pods", "po"}, kind)
}

// completeShares completes the pods of the namespace that have a share.
func (k *kubeFlags) completeShares(cmd *cobra.Command) ([]cobra.Completion, cobra.ShellCompDirective) {
	return k.completePodsThat(cmd, "pod/", func(p *corev1.Pod) bool { return p.Annotations[api.AnnotationGrant] != "" })
}

// completeContainers completes the containers of the named pod that have a share.
func (k *kubeFlags) completeContainers(cmd *cobra.Command, args []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
	ctx, cancel, kube, _, ok := k.completing(cmd)
	defer cancel()
	namespace, err := k.namespace()
	if !ok || err != nil || len(args) == 0 {
		return nil, noFiles
	}
	name, _ := podName(args[0])
	p, err := kube.CoreV1().Pods(namespace).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return nil, noFiles
	}
	return sharers(p), noFiles
}

// sharers are the containers of a pod that were granted shares.
func sharers(p *corev1.Pod) []cobra.Completion {
	g, err := api.DecodeGrant(p.Annotations[api.AnnotationGrant])
	if err != nil {
		return nil
	}
	var out []cobra.Completion
	for _, name := range slices.Sorted(maps.Keys(g.Containers)) {
		if slices.ContainsFunc(g.Containers[name], func(c api.CardGrant) bool { return c.Mode != api.ModeExclusive }) {
			out = append(out, name)
		}
	}
	return out
}

// resizer takes one resize from the request to the node's report.
type resizer struct {
	kube            kubernetes.Interface
	nodes           *gpunodes.Client
	namespace, name string
	options         resizeOptions
	talk            io.Writer
}

// run asks, and waits. The view is what is to be printed, also beside an error
// that says that the resize was refused; nil where nothing was asked.
func (r *resizer) run(ctx context.Context) (*resizeView, error) {
	begin := time.Now()
	view, id, err := r.ask(ctx)
	if err != nil || id == "" {
		return view, err
	}
	if !r.options.wait {
		view.Outcome = "asked"
		return view, nil
	}
	ctx, cancel := context.WithTimeout(ctx, r.options.timeout)
	defer cancel()
	why, err := r.await(ctx, view, id)
	view.Seconds = time.Since(begin).Seconds()
	if err != nil && ctx.Err() != nil {
		if view.Outcome == "" {
			view.Outcome = "asked"
		}
		return view, fmt.Errorf("resize pod %s/%s: no end after %s: %s", r.namespace, r.name, r.options.timeout, why)
	}
	return view, err
}

// ask writes the request. The id is empty where there is nothing to ask for.
func (r *resizer) ask(ctx context.Context) (*resizeView, string, error) {
	failed := func(err error) error { return fmt.Errorf("resize pod %s/%s: %w", r.namespace, r.name, err) }
	for try := 1; ; try++ {
		p, err := r.kube.CoreV1().Pods(r.namespace).Get(ctx, r.name, metav1.GetOptions{})
		if err != nil {
			return nil, "", failed(err)
		}
		view, amounts, err := r.plan(p)
		if err != nil {
			return nil, "", failed(err)
		}
		if amounts == (api.ResizeAmounts{}) {
			view.Outcome, view.InForce = "unchanged", true
			return view, "", nil
		}
		request := api.Resize{Version: api.ResizeVersion, ID: rand.Text(), Containers: map[string]api.ResizeAmounts{view.Container: amounts}}
		text, err := request.Encode()
		if err != nil {
			return nil, "", failed(err)
		}
		// With the resourceVersion a difference is added to what was read, and a
		// request of somebody else isn't written over.
		body, err := json.Marshal(map[string]any{"metadata": map[string]any{
			"uid": p.UID, "resourceVersion": p.ResourceVersion, "annotations": map[string]string{api.AnnotationResize: text},
		}})
		if err != nil {
			return nil, "", failed(err)
		}
		_, err = r.kube.CoreV1().Pods(r.namespace).Patch(ctx, r.name, types.MergePatchType, body, metav1.PatchOptions{})
		switch {
		case err == nil:
			return view, request.ID, nil
		case apierrors.IsConflict(err) && try < resizeTries:
			continue
		case apierrors.IsForbidden(err):
			return nil, "", fmt.Errorf("%w\nask your administrator for ClusterRole carve-resize in namespace %s", failed(err), r.namespace)
		}
		return nil, "", failed(err)
	}
}

// plan works out what to ask for. Nothing is asked for where the container has
// it all.
func (r *resizer) plan(p *corev1.Pod) (*resizeView, api.ResizeAmounts, error) {
	var a api.ResizeAmounts
	g, err := api.DecodeGrant(p.Annotations[api.AnnotationGrant])
	switch {
	case errors.Is(err, api.ErrNoGrant) && p.Spec.NodeName == "":
		return nil, a, errors.New("the pod isn't placed yet")
	case errors.Is(err, api.ErrNoGrant):
		return nil, a, errors.New("the pod has no share: carve's scheduler extender didn't place it")
	case err != nil:
		return nil, a, err
	case p.Annotations[api.AnnotationResize] != "":
		return nil, a, errors.New("a resize of this pod is under way; try again when it is answered")
	}
	container := r.options.container
	names := slices.Sorted(maps.Keys(g.Containers))
	if container == "" {
		if len(names) > 1 {
			return nil, a, fmt.Errorf("several containers have a share: choose one with --container (%s)", strings.Join(names, ", "))
		}
		container = names[0]
	}
	cards := g.Containers[container]
	if cards == nil {
		return nil, a, fmt.Errorf("container %s has no share; those with one are %s", container, strings.Join(names, ", "))
	}
	view := &resizeView{Namespace: r.namespace, Pod: r.name, Container: container, Node: g.Node, Generation: g.Generation}
	for i, c := range cards {
		if c.Mode != api.ModeVGPU {
			return nil, a, fmt.Errorf("container %s has card %s in mode %s: %s", container, c.Card, c.Mode, c.Mode.FixedSize())
		}
		if i > 0 && (r.options.mem.sign != 0 && c.MemMiB != cards[0].MemMiB || r.options.compute.sign != 0 && c.Cores != cards[0].Cores) {
			return nil, a, errors.New("its cards have different amounts: say what it shall have, not a difference")
		}
	}
	memory, cores := r.options.mem.apply(cards[0].MemMiB), r.options.compute.apply(int64(cards[0].Cores))
	switch {
	case memory < 1:
		return nil, a, fmt.Errorf("--gpumem %s leaves %d MiB of %d; 1 MiB is the least", r.options.memory, memory, cards[0].MemMiB)
	case cores < 0 || cores > 100:
		return nil, a, fmt.Errorf("--gpucores %s leads to %d percent; allowed are 0 to 100", r.options.cores, cores)
	}
	for _, c := range cards {
		after := resizeAmount{c.MemMiB, c.Cores}
		if r.options.mem.given {
			after.MemMiB = memory
		}
		if r.options.compute.given {
			after.Cores = int(cores)
		}
		if after.MemMiB != c.MemMiB {
			a.MemMiB = &memory
		}
		if after.Cores != c.Cores {
			percent := int(cores)
			a.Cores = &percent
		}
		view.Cards = append(view.Cards, resizedCard{c.Card, resizeAmount{c.MemMiB, c.Cores}, after})
	}
	return view, a, nil
}

// await follows a request to its end. why says what it waited for when the
// context ended.
func (r *resizer) await(ctx context.Context, view *resizeView, id string) (why string, err error) {
	why = "the extender hasn't answered yet"
	begin, told := time.Now(), false
	for look := begin.Add(resizePoll); ; {
		p, err := r.kube.CoreV1().Pods(r.namespace).Get(ctx, r.name, metav1.GetOptions{})
		if err != nil {
			return why, fmt.Errorf("resize pod %s/%s: %w", r.namespace, r.name, err)
		}
		result, _ := api.DecodeResizeResult(p.Annotations[api.AnnotationResizeResult])
		asked := strings.Contains(p.Annotations[api.AnnotationResize], id)
		switch {
		case result.ID == id && result.Outcome == api.ResizeRefused:
			view.Outcome, view.Message, view.Generation = api.ResizeRefused, result.Message, result.Generation
			for i := range view.Cards {
				view.Cards[i].After = view.Cards[i].Before
			}
			return "", fmt.Errorf("resize of pod %s/%s refused: %s", r.namespace, r.name, result.Message)
		case result.ID == id:
			view.Outcome, view.Generation = api.ResizeGranted, result.Generation
			why = fmt.Sprintf("it is granted, but node %s hasn't reported it: does its agent run? (kubectl -n %s get pods -o wide)", view.Node, api.Namespace)
			switch in, seen, err := r.inForce(ctx, string(p.UID), view); {
			case err != nil:
				return why, err
			case in || !seen:
				view.InForce = in
				return "", nil
			}
		case !asked && result.ID != "":
			return why, fmt.Errorf("resize of pod %s/%s: another resize (%s) came after it", r.namespace, r.name, result.ID)
		case !asked:
			return why, fmt.Errorf("resize of pod %s/%s: somebody took the request away", r.namespace, r.name)
		case time.Now().After(look):
			look = time.Now().Add(resizeLook)
			if w := r.unanswered(ctx, view, string(p.UID)); ctx.Err() == nil {
				why = w
			}
		}
		if !told && time.Since(begin) > time.Second {
			told = true
			fmt.Fprintln(r.talk, "waiting:", why)
		}
		select {
		case <-ctx.Done():
			return why, ctx.Err()
		case <-time.After(resizePoll):
		}
	}
}

// unanswered says for whom a request waits that nobody has answered: the extender
// answers when the node has reported what was granted last.
func (r *resizer) unanswered(ctx context.Context, view *resizeView, uid string) string {
	n, err := r.nodes.Get(ctx, view.Node)
	if apierrors.IsNotFound(err) || err == nil && !reportsGeneration(n, uid, view.Container, view.Generation) {
		return fmt.Sprintf("node %s hasn't reported the pod's last grant (generation %d), and until then the extender doesn't answer: does the node's agent run? (kubectl -n %s get pods -o wide)", view.Node, view.Generation, api.Namespace)
	}
	return "the extender hasn't answered: does it run? (kubectl -n " + api.Namespace + " get pods)"
}

// inForce reports whether the node has a grant of the view's generation or later
// in force. A tenant may not read GPUNodes, and then it isn't seen.
func (r *resizer) inForce(ctx context.Context, uid string, view *resizeView) (in, seen bool, err error) {
	n, err := r.nodes.Get(ctx, view.Node)
	if apierrors.IsForbidden(err) {
		fmt.Fprintln(r.talk, "granted; whether the node has it in force can't be seen, since you may not read GPUNodes")
		return false, false, nil
	}
	if err != nil {
		return false, false, fmt.Errorf("read the report of node %s: %w", view.Node, err)
	}
	return reportsGeneration(n, uid, view.Container, view.Generation), true, nil
}

func reportsGeneration(n *v1alpha1.GPUNode, uid, container string, generation int) bool {
	found := false
	for _, c := range n.Status.Cards {
		for _, s := range c.Slices {
			if s.PodUID == uid && s.Container == container {
				if int(s.Generation) < generation {
					return false
				}
				found = true
			}
		}
	}
	return found
}

// printResize prints a line for each card.
func printResize(w io.Writer, v resizeView) error {
	t := tabwriter.NewWriter(w, 0, 4, 2, ' ', 0)
	fmt.Fprintln(t, "POD\tCONTAINER\tCARD\tMEMORY MiB\tCORES\tOUTCOME\tTIME")
	arrow := func(before, after any) string {
		if before == after {
			return fmt.Sprint(before)
		}
		return fmt.Sprintf("%v → %v", before, after)
	}
	took := "-"
	if v.Seconds > 0 {
		took = (time.Duration(v.Seconds * float64(time.Second))).Round(time.Millisecond).String()
	}
	for _, c := range v.Cards {
		fmt.Fprintf(t, "%s/%s\t%s\t%s\t%s\t%s\t%s\t%s\n", v.Namespace, v.Pod, v.Container, c.Card,
			arrow(c.Before.MemMiB, c.After.MemMiB), arrow(fmt.Sprintf("%d%%", c.Before.Cores), fmt.Sprintf("%d%%", c.After.Cores)), v.Outcome, took)
	}
	return t.Flush()
}
