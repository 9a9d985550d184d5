package explain

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/selection"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/v1alpha1"
	"github.com/carve-gpu/carve/scheduler-extender/fit"
	"github.com/carve-gpu/carve/scheduler-extender/place"
)

// asks puts a request into words.
func asks(r api.Request) []Ask {
	out := []Ask{}
	for _, c := range r.Containers {
		text := askText(c)
		if c.Whole && (r.Isolation == api.ModeMPS || r.Isolation == api.ModeTimeslice) {
			text = replicaText(c)
		}
		out = append(out, Ask{c.Name, c.Kind.String(), text})
	}
	return out
}

// replicaText is what a container asks for that names cards alone, where those are given
// in replicas.
func replicaText(c api.ContainerRequest) string {
	if c.Cards > 1 {
		return fmt.Sprintf("%d replicas of cards", c.Cards)
	}
	return "1 replica of a card"
}

func askText(c api.ContainerRequest) string {
	if c.MIG != nil {
		return "MIG instances"
	}
	cards, each := "1 card", ""
	if c.Cards > 1 {
		cards, each = fmt.Sprintf("%d cards", c.Cards), " each"
	}
	if c.Whole {
		if c.Cards > 1 {
			return fmt.Sprintf("%d whole cards", c.Cards)
		}
		return "1 whole card"
	}
	memory := "all its memory"
	switch {
	case c.MemMiB > 0:
		memory = fmt.Sprintf("%d MiB", c.MemMiB)
	case c.MemPercent > 0:
		memory = fmt.Sprintf("%d%% of its memory", c.MemPercent)
	}
	cores := "no compute of its own"
	if c.Cores > 0 {
		cores = fmt.Sprintf("%d%% of compute", c.Cores)
	}
	return fmt.Sprintf("%s, %s and %s%s", cards, memory, cores, each)
}

// wishes are what the pod's annotations say about placement.
func wishes(r api.Request) []string {
	var out []string
	add := func(name, value string) {
		if value != "" {
			out = append(out, name+" "+value)
		}
	}
	list := func(s api.Selector) string {
		all := slices.Clone(s.Only)
		for _, n := range s.Not {
			all = append(all, "!"+n)
		}
		return strings.Join(all, ",")
	}
	add("isolation", string(r.Isolation))
	add("card-models", list(r.Models))
	add("card-uuids", list(r.UUIDs))
	add("card-policy", r.Policy)
	return out
}

// scheduler takes in what the pod's scheduler says.
func (r *Report) scheduler(p *corev1.Pod) {
	r.Scheduler = &Scheduler{Name: cmp.Or(p.Spec.SchedulerName, corev1.DefaultSchedulerName)}
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse {
			since := c.LastTransitionTime.Time
			r.Scheduler.Since, r.Scheduler.Reason, r.Scheduler.Message = &since, c.Reason, c.Message
		}
	}
}

// node puts a judgement into words.
func node(j place.Judgement, object *corev1.Node, p *corev1.Pod) Node {
	n := Node{Name: j.Node, Fits: j.Refusal == nil, Message: j.Message, Kubernetes: keptOff(p, object), Cards: []Card{}, otherwise: j.Otherwise}
	n.awayTaint = n.Fits && strings.Contains(n.Kubernetes, " "+api.TaintHookDown+":")
	if !n.Fits {
		n.Reason, n.Never, n.OfNode = string(j.Refusal.Reason), j.Refusal.Never, j.Refusal.Card < 0
	}
	for i := range j.Cards {
		c := &j.Cards[i]
		free := c.Free()
		card := Card{Index: c.Index, UUID: c.UUID, Model: c.Model, FreeMiB: free.MemMiB, MemoryMiB: c.MemMiB,
			FreeCores: free.Cores, FreeSlots: free.Slots, Mode: string(c.Mode), Fits: c.Refusal == nil, Held: c.Held}
		if c.Replicated() {
			card.Sharing = fmt.Sprintf("%s in %d replicas", c.Modes.Only, c.Modes.Replicas)
		}
		if c.Refusal != nil {
			card.Reason, card.Message, card.Missing = string(c.Refusal.Reason), c.Refusal.Sentence(), c.Refusal.Missing()
		}
		n.Cards = append(n.Cards, card)
	}
	return n
}

// reasons adds why cards are out, where the node's report says.
func (n *Node) reasons(reports []v1alpha1.GPUNode) {
	at := slices.IndexFunc(reports, func(r v1alpha1.GPUNode) bool { return r.Name == n.Name })
	if at < 0 {
		return
	}
	health := map[string]v1alpha1.Health{}
	for _, c := range reports[at].Status.Cards {
		health[c.UUID] = c.Health
	}
	for i := range n.Cards {
		c := &n.Cards[i]
		why := ""
		switch fit.Reason(c.Reason) {
		case fit.ReasonCordoned:
			why = string(reports[at].Spec.CordonReasons[c.UUID])
		case fit.ReasonUnhealthy:
			why = health[c.UUID].State
			if health[c.UUID].Reason != "" {
				why += ": " + health[c.UUID].Reason
			}
		}
		if why != "" {
			c.Message += " (" + why + ")"
		}
	}
}

// keptOff says what keeps the pod off the node apart from cards, as far as the
// two objects tell: other resources and other pods are its scheduler's affair.
func keptOff(p *corev1.Pod, n *corev1.Node) string {
	if n == nil {
		return ""
	}
	for k, v := range p.Spec.NodeSelector {
		if n.Labels[k] != v {
			return fmt.Sprintf("its nodeSelector wants %s=%s", k, v)
		}
	}
	if a := p.Spec.Affinity; a != nil && a.NodeAffinity != nil {
		if required := a.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution; required != nil && !anyTerm(required.NodeSelectorTerms, n) {
			return "its required node affinity doesn't admit the node"
		}
	}
	for _, t := range n.Spec.Taints {
		if t.Effect != corev1.TaintEffectPreferNoSchedule && !tolerated(p.Spec.Tolerations, t) {
			if t.Key == corev1.TaintNodeUnschedulable {
				return "the node is cordoned (kubectl cordon)"
			}
			return fmt.Sprintf("it doesn't tolerate the node's taint %s:%s", t.Key, t.Effect)
		}
	}
	return ""
}

func tolerated(ts []corev1.Toleration, taint corev1.Taint) bool {
	return slices.ContainsFunc(ts, func(t corev1.Toleration) bool {
		return (t.Effect == "" || t.Effect == taint.Effect) &&
			(t.Key == taint.Key && (t.Operator == corev1.TolerationOpExists || t.Value == taint.Value) ||
				t.Key == "" && t.Operator == corev1.TolerationOpExists)
	})
}

func anyTerm(terms []corev1.NodeSelectorTerm, n *corev1.Node) bool {
	fields := labels.Set{"metadata.name": n.Name}
	return slices.ContainsFunc(terms, func(t corev1.NodeSelectorTerm) bool {
		return (len(t.MatchExpressions) > 0 || len(t.MatchFields) > 0) && meets(t.MatchExpressions, labels.Set(n.Labels)) && meets(t.MatchFields, fields)
	})
}

var operators = map[corev1.NodeSelectorOperator]selection.Operator{
	corev1.NodeSelectorOpIn: selection.In, corev1.NodeSelectorOpNotIn: selection.NotIn,
	corev1.NodeSelectorOpExists: selection.Exists, corev1.NodeSelectorOpDoesNotExist: selection.DoesNotExist,
	corev1.NodeSelectorOpGt: selection.GreaterThan, corev1.NodeSelectorOpLt: selection.LessThan,
}

func meets(rs []corev1.NodeSelectorRequirement, set labels.Set) bool {
	for _, r := range rs {
		q, err := labels.NewRequirement(r.Key, operators[r.Operator], r.Values)
		if err != nil || !q.Matches(set) {
			return false
		}
	}
	return true
}

// events keeps those that are about cards, the latest last: carve's own, and the
// kubelet's that carry carve's words.
func events(all []corev1.Event) []Event {
	var out []Event
	for i := range all {
		e := &all[i]
		from := cmp.Or(e.Source.Component, e.ReportingController)
		ours := strings.HasPrefix(from, "carve") || strings.HasPrefix(e.Reason, "Carve")
		if !ours && !(e.Type == corev1.EventTypeWarning && strings.Contains(e.Message, "carve")) {
			continue
		}
		at := e.LastTimestamp.Time
		if at.IsZero() {
			at = e.EventTime.Time
		}
		if at.IsZero() {
			at = e.CreationTimestamp.Time
		}
		count := e.Count
		if e.Series != nil {
			count = max(count, e.Series.Count)
		}
		out = append(out, Event{at, e.Type, e.Reason, from, e.Message, count})
	}
	slices.SortStableFunc(out, func(a, b Event) int { return a.Time.Compare(b.Time) })
	return out
}

func (r *Report) resize(p *corev1.Pod) {
	if v := p.Annotations[api.AnnotationResize]; v != "" {
		asked, _ := api.DecodeResize(v) // one that can't be read is answered as well
		r.Resize = &Resize{Pending: true, ID: asked.ID, Asked: asked.Containers}
		return
	}
	if result, err := api.DecodeResizeResult(p.Annotations[api.AnnotationResizeResult]); err == nil {
		r.Resize = &Resize{ID: result.ID, Outcome: result.Outcome, Generation: result.Generation, Message: result.Message}
	}
}

// extenderDown says why no extender can be at work, as far as its pods tell; empty where one
// is, or pods can't be seen.
func extenderDown(in Inputs) string {
	if in.PodsHidden {
		return ""
	}
	why := "it has no pod in namespace " + api.Namespace
	for i := range in.Pods {
		p := &in.Pods[i]
		if p.Namespace != api.Namespace || p.Labels[api.LabelName] != api.ExtenderName {
			continue
		}
		if p.DeletionTimestamp == nil && slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
			return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
		}) {
			return ""
		}
		why = "its pod " + p.Name + " isn't ready (" + containerStates(p) + ")"
	}
	return why
}

// tooLarge says what no card of the cluster can ever hold, wherever there is room; empty
// where nothing is.
func tooLarge(in Inputs, request api.Request) string {
	managed := map[string]bool{}
	for _, n := range in.Nodes {
		managed[n.Name] = n.Labels[api.LabelManaged] == "true"
	}
	var largest *v1alpha1.Card
	node := ""
	for i := range in.Reports {
		for j := range in.Reports[i].Status.Cards {
			c, name := &in.Reports[i].Status.Cards[j], in.Reports[i].Name
			if managed[name] && (largest == nil || cmp.Or(cmp.Compare(largest.MemoryMiB, c.MemoryMiB), cmp.Compare(name, node), cmp.Compare(c.Index, largest.Index)) < 0) {
				largest, node = c, name
			}
		}
	}
	for _, c := range request.Containers {
		if largest != nil && c.MemMiB > largest.MemoryMiB {
			return fmt.Sprintf("No card of the cluster can ever hold it: container %s asks for %d MiB of one card, and the largest, card %d of %s (%s), has %d MiB to give.",
				c.Name, c.MemMiB, largest.Index, node, strings.TrimPrefix(largest.Model, "NVIDIA "), largest.MemoryMiB)
		}
	}
	return ""
}
