package explain

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/v1alpha1"
	"github.com/carve-gpu/carve/scheduler-extender/cluster"
	"github.com/carve-gpu/carve/scheduler-extender/fit"
)

// grantRefused is the reason of the agent's event about a grant that it doesn't
// honour.
const grantRefused = "GrantRefused"

// Slice is one container's part of one card: what was granted, and what its node
// made of it.
type Slice struct {
	Container string `json:"container"`
	Card      string `json:"card"`
	Index     *int32 `json:"index,omitempty"`
	Mode      string `json:"mode,omitempty"`
	// Granted amounts; both 0 for a whole card.
	MemMiB int64 `json:"memMiB,omitempty"`
	Cores  int   `json:"cores,omitempty"`
	// Compute is how Cores are meant, elastic or fixed; LowPriority waits for others.
	Compute     string `json:"compute,omitempty"`
	LowPriority bool   `json:"lowPriority,omitempty"`
	// Managed and Oversell are the policies that were granted beside them.
	Managed  string `json:"managed,omitempty"`
	Oversell string `json:"oversell,omitempty"`
	// State is prepared or active, or empty while the node reports nothing.
	State string `json:"state,omitempty"`
	// Ended is true of a container that has ended and has no slice any more.
	Ended bool `json:"ended,omitempty"`
	// Generation is the one in force.
	Generation int32 `json:"generation,omitempty"`
	// Layers hold the limits on the card, strongest first; ResidualMiB is what was
	// taken past the library.
	Layers      []string `json:"layers,omitempty"`
	ResidualMiB int64    `json:"residualMiB,omitempty"`
	// Drift says how the report differs from the grant.
	Drift string `json:"drift,omitempty"`
	// Fault says what is wrong with the files by which its node reaches the
	// container.
	Fault string `json:"fault,omitempty"`

	init bool
}

// bound explains a pod that has a node.
func (r *Report) bound(in Inputs, request api.Request, granted bool) {
	p := in.Pod
	report, managed := r.where(in)
	if !granted {
		switch {
		case managed == no:
			r.say(Elsewhere, "It is on "+r.Node+", which carve doesn't manage: whatever cards it has come from the device plugin there.")
		case cluster.OnCards(p) && !given(report, string(p.UID)):
			r.say(Ungranted, "It runs on "+r.Node+" without a grant: whatever cards it has come from a device plugin that was there before carve managed the node. carve doesn't know which, and places nothing there until it has ended.")
		default:
			r.say(Ungranted, "It was bound to "+r.Node+" without a grant, past carve's extender (a nodeName of its own, or a scheduler that doesn't ask carve): it has no card."+r.word())
		}
		return
	}
	g, err := api.DecodeGrant(p.Annotations[api.AnnotationGrant])
	switch {
	case err != nil:
		r.say(Refused, "Its grant can't be read, so its node refuses it: "+err.Error()+".")
		return
	case g.UID != string(p.UID):
		r.say(Refused, fmt.Sprintf("Its grant is for the pod with UID %s: it was copied from another pod, and its node refuses it.", g.UID))
		return
	case g.Node != p.Spec.NodeName:
		r.say(Refused, fmt.Sprintf("Its grant is for node %s and it is on %s, which refuses it.", g.Node, p.Spec.NodeName))
		return
	}
	r.Generation = g.Generation
	r.replicas(request, g)
	r.Slices, r.ReportsHidden = slicesOf(p, g, report), in.ReportsHidden
	if report == nil {
		why := "GPUNodes can't be read"
		if !in.ReportsHidden {
			why = "its node has no report"
		}
		r.Missing = append(r.Missing, "what the node made of the grant: "+why)
		r.say(Running, fmt.Sprintf("It was granted its share on %s. Its containers: %s.", r.Node, containerStates(p)))
		if in.ReportsHidden {
			return
		}
	}
	r.judgeSlices(p)
}

// replicas puts right what was asked, for containers that asked for cards alone and got
// replicas of them.
func (r *Report) replicas(request api.Request, g api.Grant) {
	for i, c := range request.Containers {
		cards := g.Containers[c.Name]
		if c.Whole && len(cards) > 0 && (cards[0].Mode == api.ModeMPS || cards[0].Mode == api.ModeTimeslice) && i < len(r.Asks) {
			r.Asks[i].Text = replicaText(c)
		}
	}
}

// limits says what holds shares to their memory; empty where no node has said. Where it
// isn't the same for all containers it says of each.
func limits(all []Slice) string {
	var names []string
	by := map[string][]Slice{}
	for _, s := range all {
		if by[s.Container] == nil {
			names = append(names, s.Container)
		}
		by[s.Container] = append(by[s.Container], s)
	}
	var each, kinds []string
	for _, name := range names {
		what := limitsOf(by[name])
		if what == "" {
			continue
		}
		each = append(each, name+": "+what)
		if !slices.Contains(kinds, what) {
			kinds = append(kinds, what)
		}
	}
	// A container with a whole card has no limits: what is said isn't said of it.
	if len(kinds) == 1 && len(each) == len(names) {
		return kinds[0]
	}
	return strings.Join(each, "; ")
}

// limitsOf says it of one container, by the weakest of its cards.
func limitsOf(all []Slice) string {
	var hard []string
	loose, served, weak := false, false, false
	for _, s := range all {
		switch {
		case s.Mode == string(api.ModeTimeslice):
			loose = true
		case s.Mode == string(api.ModeMPS) && s.Layers != nil:
			// The server holds the memory, so no layer of the node's knows whose it is.
			served = true
		case s.Mode != string(api.ModeVGPU) || s.Layers == nil:
		case s.Layers[0] == v1alpha1.LayerLibrary:
			weak = true
		case !slices.Contains(hard, s.Layers[0]):
			hard = append(hard, s.Layers[0])
		}
	}
	switch {
	case loose:
		return "none: in mode timeslice the amounts are counted, not enforced: nothing holds the program to them"
	case served:
		return "advisory, held by the library, and once more by MPS: " + api.AdvisoryMPSMeans
	case weak:
		return "advisory, held by the library alone: " + api.AdvisoryMeans
	case hard != nil:
		return "held by " + strings.Join(hard, ", ") + " beside the library, whatever a program does"
	}
	return ""
}

// judgeSlices compares grant and report. Init containers come and go: theirs
// needn't be there.
func (r *Report) judgeSlices(p *corev1.Pod) {
	r.Limits = limits(r.Slices)
	active, prepared, there, want := 0, 0, 0, 0
	var drift, faults []string
	for _, s := range r.Slices {
		if s.Fault != "" && !slices.Contains(faults, s.Fault) {
			faults = append(faults, s.Fault)
		}
		if s.Drift != "" {
			drift = append(drift, s.Container+": "+s.Drift)
		}
		if s.init {
			continue
		}
		want++
		switch s.State {
		case v1alpha1.Active:
			active++
			there++
		case v1alpha1.Prepared:
			prepared++
			there++
		}
	}
	refused := r.lastRefusal()
	switch {
	case there == 0 && refused != "":
		r.say(Refused, fmt.Sprintf("Its node %s doesn't honour its grant: %s", r.Node, refused))
	case there < want:
		why := "It should in a moment; if not, look at the agent on that node (kubectl -n " + api.Namespace + " get pods -o wide)."
		if r.NodeBlocked != "" {
			why = "The node says: " + r.NodeBlocked + "."
		}
		r.say(NotPrepared, fmt.Sprintf("It is bound to %s and has its grant; its node reports %d of %d slices. %s", r.Node, there, want, why))
	case len(faults) > 0:
		r.say(CutOff, fmt.Sprintf("It runs on %s, and what it was granted stays its own. But %s.", r.Node, strings.Join(faults, "; ")))
	case len(drift) > 0:
		r.say(Drifted, fmt.Sprintf("Its node %s reports other slices than granted: %s.", r.Node, strings.Join(drift, "; ")))
	case prepared > 0:
		r.say(Prepared, fmt.Sprintf("Its slices on %s are prepared; %d of %d are in use by a container. Its containers: %s.", r.Node, active, want, containerStates(p)))
	default:
		r.say(Running, fmt.Sprintf("It runs on %s with the share that it was granted.", r.Node))
	}
	if r.Leaving {
		r.Summary += " It is being deleted; its share is free when its node has let go of it."
	}
}

func (r *Report) ended(in Inputs) {
	report, _ := r.where(in)
	left := 0
	if report != nil {
		for _, c := range report.Status.Cards {
			for _, s := range c.Slices {
				if s.PodUID == r.UID {
					left++
				}
			}
		}
	}
	switch {
	case left > 0:
		r.say(Ended, fmt.Sprintf("It has ended (%s). Its node %s has not let go of its share yet (%s); that stays counted until it has.", in.Pod.Status.Phase, r.Node, plural(left, "slice")))
	default:
		r.say(Ended, fmt.Sprintf("It has ended (%s) and holds no card.", in.Pod.Status.Phase))
	}
}

type answer uint8

const (
	unknown answer = iota
	yes
	no
)

// where finds the report of the pod's node, and whether carve manages that.
func (r *Report) where(in Inputs) (*v1alpha1.GPUNode, answer) {
	managed := unknown
	if !in.NodesHidden {
		managed = no
		for _, n := range in.Nodes {
			if n.Name == r.Node && n.Labels[api.LabelManaged] == "true" {
				managed = yes
			}
		}
	}
	for i := range in.Reports {
		if in.Reports[i].Name != r.Node {
			continue
		}
		if managed == yes && !in.PodsHidden {
			books := cluster.Snapshot(cluster.Lists{Nodes: in.Nodes, Reports: in.Reports[i : i+1], Pods: in.Pods}, in.Now)
			if n := books.Node(r.Node); n != nil && n.Snapshot().View.Blocked != "" {
				view := n.Snapshot().View
				r.NodeBlocked = (&fit.Refusal{Reason: view.Blocked, Card: -1, Detail: view.Why}).Sentence()
			}
		}
		return &in.Reports[i], managed
	}
	return nil, managed
}

// given reports whether a node's report shows a slice of the pod.
func given(report *v1alpha1.GPUNode, uid string) bool {
	return report != nil && slices.ContainsFunc(report.Status.Cards, func(c v1alpha1.Card) bool {
		return slices.ContainsFunc(c.Slices, func(s v1alpha1.Slice) bool { return s.PodUID == uid })
	})
}

// slicesOf joins grant and report, by container in the pod's order.
func slicesOf(p *corev1.Pod, g api.Grant, report *v1alpha1.GPUNode) []Slice {
	var out []Slice
	for _, spec := range cluster.ContainerSpecs(p) {
		for _, cg := range g.Containers[spec.Name] {
			s := Slice{Container: spec.Name, Card: cg.Card, Mode: string(cg.Mode), MemMiB: cg.MemMiB, Cores: cg.Cores,
				Managed: string(cg.Managed), Oversell: string(cg.Oversell), init: spec.Kind == api.Init}
			switch {
			case cg.Cores == 0:
			case cg.Mode == api.ModeVGPU && !cg.Fixed:
				s.Compute = "elastic"
			case cg.Mode == api.ModeVGPU || cg.Mode == api.ModeMPS:
				s.Compute = "fixed"
			case cg.Mode == api.ModeTimeslice:
				s.Compute = "counted only"
			}
			s.LowPriority = cg.Low
			s.compare(p, g, report)
			s.Ended = s.init && s.State == "" && hasEnded(p, s.Container)
			out = append(out, s)
		}
	}
	return out
}

// hasEnded reports whether an init container is done.
func hasEnded(p *corev1.Pod, name string) bool {
	return slices.ContainsFunc(p.Status.InitContainerStatuses, func(s corev1.ContainerStatus) bool { return s.Name == name && s.State.Terminated != nil })
}

func (s *Slice) compare(p *corev1.Pod, g api.Grant, report *v1alpha1.GPUNode) {
	if report == nil {
		return
	}
	at := slices.IndexFunc(report.Status.Cards, func(c v1alpha1.Card) bool { return c.UUID == s.Card })
	if at < 0 {
		s.Drift = "the node doesn't report that card any more"
		return
	}
	c := &report.Status.Cards[at]
	index := c.Index
	s.Index, s.Layers = &index, c.Layers
	for _, is := range c.Slices {
		if is.PodUID != string(p.UID) || is.Container != s.Container {
			continue
		}
		s.State, s.Generation, s.ResidualMiB, s.Fault = is.State, is.Generation, is.ResidualMiB, is.Fault
		switch {
		case int(is.RefusedGeneration) == g.Generation && is.Refusal != "":
			s.Drift = fmt.Sprintf("the node refuses generation %d: %s", g.Generation, is.Refusal)
		case int(is.Generation) != g.Generation:
			s.Drift = fmt.Sprintf("generation %d is in force, granted is %d", is.Generation, g.Generation)
		case is.Mode != s.Mode:
			s.Drift = fmt.Sprintf("mode %s is in force, granted is %s", is.Mode, s.Mode)
		case is.MemMiB != s.MemMiB || int(is.Cores) != s.Cores:
			s.Drift = fmt.Sprintf("%d MiB and %d%% of compute are in force", is.MemMiB, is.Cores)
		case is.Managed != s.Managed || is.Oversell != s.Oversell:
			s.Drift = fmt.Sprintf("in force is %s, granted is %s (an agent of an earlier version charges managed memory and oversells nothing)",
				policies(is.Managed, is.Oversell), policies(s.Managed, s.Oversell))
		case c.Health.State != v1alpha1.Healthy:
			s.Drift = "the card is " + c.Health.State
			if c.Health.Reason != "" {
				s.Drift += " (" + c.Health.Reason + ")"
			}
		}
		return
	}
}

// policies are those on memory that needn't be on the card, in the words of the pod.
func policies(managed, oversell string) string {
	if managed == "" {
		managed = string(api.ManagedCharge)
	}
	out := "managed-memory: " + managed
	if oversell != "" {
		out += ", oversell: " + oversell
	}
	return out
}

// lastRefusal is the agent's word on a grant that it doesn't honour.
func (r *Report) lastRefusal() string {
	for _, e := range slices.Backward(r.Events) {
		if e.Reason == grantRefused {
			return e.Message
		}
	}
	return ""
}

// word is the last event, as a further sentence.
func (r *Report) word() string {
	if len(r.Events) == 0 {
		return ""
	}
	return " Its node says: " + r.Events[len(r.Events)-1].Message
}

func containerStates(p *corev1.Pod) string {
	var parts []string
	for _, s := range p.Status.ContainerStatuses {
		switch {
		case s.State.Running != nil:
			parts = append(parts, s.Name+" runs")
		case s.State.Terminated != nil:
			parts = append(parts, s.Name+" has ended ("+s.State.Terminated.Reason+")")
		case s.State.Waiting != nil:
			text := s.Name + " waits (" + s.State.Waiting.Reason
			if m := s.State.Waiting.Message; m != "" {
				text += ": " + m
			}
			parts = append(parts, text+")")
		}
	}
	if len(parts) == 0 {
		return "none was started yet"
	}
	return strings.Join(parts, ", ")
}

func plural(n int, word string) string {
	if n == 1 {
		return "1 " + word
	}
	return fmt.Sprintf("%d %ss", n, word)
}
