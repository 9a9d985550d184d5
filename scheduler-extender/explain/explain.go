package explain

import (
	"cmp"
	"errors"
	"fmt"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/v1alpha1"
	"github.com/carve-gpu/carve/scheduler-extender/cluster"
	"github.com/carve-gpu/carve/scheduler-extender/fit"
	"github.com/carve-gpu/carve/scheduler-extender/ledger"
	"github.com/carve-gpu/carve/scheduler-extender/place"
	"github.com/carve-gpu/carve/scheduler-extender/score"
)

// Inputs are what the caller may read.
type Inputs struct {
	Pod    *corev1.Pod
	Events []corev1.Event // of the pod
	// The cluster, as far as it may be read: nil lists with the flag set are
	// those that may not.
	Nodes                                  []corev1.Node
	Reports                                []v1alpha1.GPUNode
	Pods                                   []corev1.Pod
	NodesHidden, ReportsHidden, PodsHidden bool
	// Quotas are those of the pod's namespace.
	Quotas       []corev1.ResourceQuota
	QuotasHidden bool
	Now          time.Time
}

// Verdict is one of a closed set of situations.
type Verdict string

// Verdicts.
const (
	NoRequest     Verdict = "no-request"      // it asks for nothing that carve hands out
	Invalid       Verdict = "invalid"         // its request can't be meant
	Gated         Verdict = "gated"           // its scheduling gates hold it back
	NoManagedNode Verdict = "no-managed-node" // there is no node that carve manages
	NoRoom        Verdict = "no-room"         // no card fits as of now
	HookDown      Verdict = "hook-down"       // a card is free; its node's hook has no link to the runtime
	AgentDown     Verdict = "agent-down"      // a card is free, or unknown; its node's agent is down
	NoReport      Verdict = "no-report"       // the agents have not reported any cards yet
	ForeignPods   Verdict = "foreign-pods"    // a card is free; pods run on the node's cards that carve didn't give them
	Quota         Verdict = "quota"           // a card is free; the namespace's shares have grown and its quota allows no more
	Cordoned      Verdict = "cordoned"        // cards that have room are cordoned
	ExtenderDown  Verdict = "extender-down"   // nothing that asks for cards is placed
	Never         Verdict = "never"           // no card will ever fit
	Isolation     Verdict = "isolation"       // no card is given in the mode that it asks for
	WaitsForOther Verdict = "waits-for-other" // a card fits; something else keeps it pending
	NotLookedAt   Verdict = "not-looked-at"   // a card fits; its scheduler has said nothing yet
	Unknown       Verdict = "unknown"         // pending, and the nodes can't be read
	Elsewhere     Verdict = "elsewhere"       // it is on a node that carve doesn't manage
	Ungranted     Verdict = "ungranted"       // it was bound past carve and has no card
	Refused       Verdict = "refused-grant"   // its node doesn't honour its grant
	NotPrepared   Verdict = "not-prepared"    // bound and granted; the node has not made its slices yet
	Prepared      Verdict = "prepared"        // the slices are there; no container runs with them yet
	Running       Verdict = "running"         // its containers run with their slices
	CutOff        Verdict = "cut-off"         // a container runs with files that are no longer its node's
	Drifted       Verdict = "drifted"         // the node reports other slices than granted
	Ended         Verdict = "ended"           // it has ended
)

// Report is the explanation.
type Report struct {
	Namespace string  `json:"namespace"`
	Pod       string  `json:"pod"`
	UID       string  `json:"uid"`
	Phase     string  `json:"phase"`
	Leaving   bool    `json:"leaving,omitempty"` // it is being deleted
	Verdict   Verdict `json:"verdict"`
	// Summary is the verdict in a sentence or two.
	Summary string `json:"summary"`

	Asks      []Ask      `json:"asks"`
	Wishes    []string   `json:"wishes,omitempty"`
	Fault     *Fault     `json:"fault,omitempty"`
	Scheduler *Scheduler `json:"scheduler,omitempty"`
	Nodes     []Node     `json:"nodes,omitempty"`
	Node      string     `json:"node,omitempty"`
	// NodeBlocked is why the pod's node takes nothing new, if it doesn't.
	NodeBlocked string `json:"nodeBlocked,omitempty"`
	Generation  int    `json:"generation,omitempty"` // of its grant
	// Limits says what holds it to its share of memory.
	Limits string  `json:"limits,omitempty"`
	Slices []Slice `json:"slices,omitempty"`
	// ReportsHidden is true where what nodes report may not be read.
	ReportsHidden bool    `json:"reportsHidden,omitempty"`
	Resize        *Resize `json:"resize,omitempty"`
	Events        []Event `json:"events,omitempty"`
	// Missing says what couldn't be looked at.
	Missing []string `json:"missing,omitempty"`
}

// Ask is what one container asks for, as carve reads it.
type Ask struct {
	Container string `json:"container"`
	Kind      string `json:"kind"`
	Text      string `json:"text"`
}

// Fault is what is wrong with a request.
type Fault struct {
	Field   string `json:"field"`
	Value   string `json:"value"`
	Allowed string `json:"allowed"`
}

// Scheduler is what the pod's scheduler says.
type Scheduler struct {
	Name    string     `json:"name"`
	Since   *time.Time `json:"since,omitempty"`
	Reason  string     `json:"reason,omitempty"`
	Message string     `json:"message,omitempty"`
}

// Node is what one node says to a pending pod's request.
type Node struct {
	Name string `json:"name"`
	Fits bool   `json:"fits"`
	// Reason is carve's, from the closed set of package fit; empty if it fits.
	Reason  string `json:"reason,omitempty"`
	Message string `json:"message,omitempty"`
	// Never is true where nothing that leaves the node could help.
	Never bool `json:"never,omitempty"`
	// OfNode is true where the reason is the node's and not that of a card.
	OfNode bool `json:"ofNode,omitempty"`
	// Kubernetes is what keeps the pod off the node apart from cards.
	Kubernetes string `json:"kubernetes,omitempty"`
	Cards      []Card `json:"cards"`

	otherwise bool // it fits but for the node's block and cordoned cards
	awayTaint bool // Kubernetes is the taint of an agent or hook that is away
}

// Card is what one card says.
type Card struct {
	Index     int    `json:"index"`
	UUID      string `json:"uuid"`
	Model     string `json:"model"`
	FreeMiB   int64  `json:"freeMiB"`
	MemoryMiB int64  `json:"memoryMiB"`
	FreeCores int    `json:"freeCores"`
	FreeSlots int    `json:"freeSlots"`
	// Mode is that of the card's pods, Sharing what NVIDIA's configuration sets.
	Mode    string `json:"mode,omitempty"`
	Sharing string `json:"sharing,omitempty"`
	Fits    bool   `json:"fits"`
	Reason  string `json:"reason,omitempty"`
	Message string `json:"message,omitempty"`
	// Missing is how much more would have to be free, in the reason's unit.
	Missing int64  `json:"missing,omitempty"`
	Held    string `json:"held,omitempty"`
}

// Resize is the last live resize.
type Resize struct {
	Pending bool   `json:"pending,omitempty"`
	ID      string `json:"id,omitempty"`
	Outcome string `json:"outcome,omitempty"`
	// Asked are the amounts of one that waits, by container.
	Asked map[string]api.ResizeAmounts `json:"asked,omitempty"`
	// Generation is the grant's after the answer.
	Generation int    `json:"generation,omitempty"`
	Message    string `json:"message,omitempty"`
}

// Event is one event of the pod that is about cards.
type Event struct {
	Time    time.Time `json:"time"`
	Type    string    `json:"type"`
	Reason  string    `json:"reason"`
	From    string    `json:"from"`
	Message string    `json:"message"`
	Count   int32     `json:"count,omitempty"`
}

// Explain explains the pod.
func Explain(in Inputs) Report {
	p := in.Pod
	r := Report{Namespace: p.Namespace, Pod: p.Name, UID: string(p.UID), Phase: string(p.Status.Phase),
		Leaving: p.DeletionTimestamp != nil, Asks: []Ask{}, Node: p.Spec.NodeName, Events: events(in.Events)}
	request, err := api.ParseRequest(cluster.ContainerSpecs(p), p.Annotations)
	var fault *api.FieldError
	if errors.As(err, &fault) {
		r.Fault = &Fault{fault.Field, fault.Value, fault.Allowed}
	}
	r.Asks, r.Wishes = asks(request), wishes(request)
	r.resize(p)
	grant, granted := p.Annotations[api.AnnotationGrant], false
	granted = grant != ""
	switch {
	case p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed:
		r.ended(in)
	case err == nil && request.Empty() && !granted:
		r.say(NoRequest, "It asks for no card. Of what carve hands out (nvidia.com/gpu, gpumem, gpumem-percentage, gpucores) its containers' limits name nothing, or 0, so carve has no part in where it runs.")
	case err != nil && p.Spec.NodeName == "":
		r.scheduler(p)
		r.say(Invalid, fmt.Sprintf("Its request can't be served: %s. Limits of a pod can't be changed: make it anew.", err))
	case p.Spec.NodeName == "":
		r.scheduler(p)
		r.pending(in, request)
	default:
		r.bound(in, request, granted)
	}
	for _, s := range api.StrangeResources(cluster.ContainerSpecs(p)) {
		r.Summary += " Mind " + s + "."
	}
	return r
}

func (r *Report) say(v Verdict, summary string) { r.Verdict, r.Summary = v, summary }

// pending explains a pod that isn't bound yet.
func (r *Report) pending(in Inputs, request api.Request) {
	p := in.Pod
	if gates := p.Spec.SchedulingGates; len(gates) > 0 {
		var names []string
		for _, g := range gates {
			if g.Name != api.GatePlan {
				names = append(names, g.Name)
			}
		}
		if len(names) > 0 {
			r.say(Gated, "Its scheduling gates ("+strings.Join(names, ", ")+") hold it back; no scheduler looks at it until whoever set them takes them away.")
		}
	}
	if in.ReportsHidden || in.NodesHidden {
		r.hidden(in)
		if r.Verdict == "" {
			r.say(Unknown, "It waits for a place. What its scheduler says of it: "+r.heard())
		}
		return
	}
	if in.PodsHidden {
		r.Missing = append(r.Missing, "pods of other namespaces: what is on the cards is taken from the nodes' reports alone, and every agent is taken to be ready")
	}
	if in.QuotasHidden {
		r.Missing = append(r.Missing, "ResourceQuotas of namespace "+p.Namespace+": whether one is in the way is said by the scheduler only")
	}
	books := cluster.Snapshot(cluster.Lists{Nodes: in.Nodes, Reports: in.Reports, Pods: in.Pods, Quotas: in.Quotas, Blind: in.PodsHidden}, in.Now)
	judged, refusal := place.Judge(books, place.Pod{Ref: ledger.Ref{UID: string(p.UID), Namespace: p.Namespace, Name: p.Name}, Request: request, Host: cluster.HostOf(p)}, score.Binpack)
	if refusal != nil {
		if r.Verdict == "" {
			r.say(Invalid, "No node can serve its request: "+refusal.Sentence()+".")
		}
		return
	}
	objects := map[string]*corev1.Node{}
	for i := range in.Nodes {
		objects[in.Nodes[i].Name] = &in.Nodes[i]
	}
	open := ""
	for _, j := range judged {
		n := node(j, objects[j.Node], p)
		n.reasons(in.Reports)
		r.Nodes = append(r.Nodes, n)
		if n.Fits && n.Kubernetes == "" && open == "" {
			open = n.Name
		}
	}
	if r.Verdict == "" {
		if r.verdict(open, request); cluster.ToPlan(p) {
			r.planned(open)
		}
		if what := tooLarge(in, request); what != "" {
			r.say(Never, what)
		}
		r.withoutExtender(in, open)
	}
}

// withoutExtender puts the extender's absence before all else that may pass: nothing is
// placed without it, and what its scheduler says of that is an error of a connection.
func (r *Report) withoutExtender(in Inputs, open string) {
	down := extenderDown(in)
	if down == "" {
		return
	}
	look := fmt.Sprintf("Look at kubectl -n %s get pods -l %s=%s, and at carve doctor.", api.Namespace, api.LabelName, api.ExtenderName)
	down = "carve's extender is down: " + down + ". Until it is back no pod that asks for cards is placed; those that run go on."
	what := strings.TrimSuffix(r.Summary, ".") + "."
	if r.Verdict == Never || r.Verdict == NoManagedNode {
		r.Summary = what + " Besides, " + down + " " + look
		return
	}
	if open != "" {
		what = "A card for it is free on " + open + "."
	}
	r.say(ExtenderDown, down+" What the API shows meanwhile: "+what+" "+look)
}

// planned says of a pod that carve holds back itself what that means.
func (r *Report) planned(open string) {
	if open != "" {
		r.say(Gated, fmt.Sprintf("It fits on %s. carve holds it back (scheduling gate %s) until it has planned its place, which is a matter of a moment while the extender leads.", open, api.GatePlan))
		return
	}
	r.Summary = strings.TrimSuffix(r.Summary, ".") + ". carve holds it back (scheduling gate " + api.GatePlan + ") until a node has room, or until --release-after has passed."
}

// verdict is drawn from what the nodes say, the nearest first.
func (r *Report) verdict(open string, request api.Request) {
	switch {
	case open != "" && r.Scheduler.Message == "":
		r.say(NotLookedAt, fmt.Sprintf("It fits on %s, and its scheduler, %s, has said nothing about it yet. If that lasts: is there a scheduler of that name, and is it configured to ask carve?", open, r.Scheduler.Name))
	case open != "":
		r.say(WaitsForOther, fmt.Sprintf("A card for it is free on %s; its scheduler gave another reason when it looked last, or looks again in a moment: %s", open, r.heard()))
	case len(r.Nodes) == 0 && request.WholeOnly():
		r.say(NoManagedNode, "There is no node labelled carve.dev/managed=true. It asks for whole cards, which nodes with another device plugin may have. Its scheduler says: "+r.heard())
	case len(r.Nodes) == 0:
		r.say(NoManagedNode, "There is no node labelled carve.dev/managed=true, and shares are handed out on such nodes only.")
	default:
		r.refused()
	}
}

// refused sums up where no node is open.
func (r *Report) refused() {
	never, full := true, false
	kept, fits := 0, ""
	var away, otherwise, over *Node
	for i := range r.Nodes {
		n := &r.Nodes[i]
		switch {
		case n.awayTaint:
			away = cmp.Or(away, n)
		case n.Fits:
			kept++
			fits = n.Name + " (" + n.Kubernetes + ")"
		case fit.Reason(n.Reason) == fit.ReasonQuota:
			if n.Kubernetes == "" {
				over = cmp.Or(over, n)
			}
		case n.otherwise:
			otherwise = cmp.Or(otherwise, n)
		}
		never = never && n.Never
		full = full || !n.Fits && !n.Never && !n.OfNode && !n.otherwise
	}
	switch nearest := &r.Nodes[0]; {
	case kept > 0:
		r.say(WaitsForOther, fmt.Sprintf("Cards for it are free, on nodes that Kubernetes keeps it off: %s.", fits))
	case over != nil:
		r.say(Quota, fmt.Sprintf("A card for it is free on %s, but its namespace may not have it: %s. carve resize makes a share smaller.", over.Name, over.Message))
	case away != nil:
		r.say(AgentDown, fmt.Sprintf("A card for it is free on %s, but carve's agent or hook there is away (the node has the taint carve.dev/hook-down, which goes when they are back).", away.Name))
	case otherwise != nil && !full:
		r.say(otherwise.but())
	case nearest.blocked() != "" && len(nearest.Cards) == 0:
		r.say(nearest.blocked(), "No node can take it. The nearest: "+nearest.Message)
	case never:
		r.say(Never, "No card that is there can ever serve it. Nearest miss: "+nearest.Message)
	case fit.Reason(nearest.Reason) == fit.ReasonIsolation:
		r.say(Isolation, "No card is given as it asks for. Nearest miss: "+nearest.Message)
	default:
		r.say(NoRoom, "No card has room for it as of now. Nearest miss: "+nearest.Message)
		if otherwise != nil {
			_, but := otherwise.but()
			r.Summary += ". Besides: " + but
		}
	}
}

// blocked is the verdict of a node that takes nothing, whatever its cards say.
func (n *Node) blocked() Verdict {
	return map[fit.Reason]Verdict{fit.ReasonHookDown: HookDown, fit.ReasonAgentDown: AgentDown, fit.ReasonNoReport: NoReport, fit.ReasonForeignPods: ForeignPods}[fit.Reason(n.Reason)]
}

// but says why a node with room doesn't take the pod.
func (n *Node) but() (Verdict, string) {
	if v := n.blocked(); v != "" {
		return v, fmt.Sprintf("A card for it is free on %s, but %s", n.Name, strings.TrimPrefix(n.Message, n.Name+": "))
	}
	var names, indexes []string
	for _, c := range n.Cards {
		if c.Reason == string(fit.ReasonCordoned) {
			names = append(names, fmt.Sprintf("card %d: %s", c.Index, c.Message))
			indexes = append(indexes, fmt.Sprint(c.Index))
		}
	}
	return Cordoned, fmt.Sprintf("It would fit on %s if cards weren't cordoned there (%s); carve uncordon %s %s puts them back.", n.Name, strings.Join(names, ", "), n.Name, strings.Join(indexes, " "))
}

func (r *Report) heard() string {
	if r.Scheduler == nil || r.Scheduler.Message == "" {
		return "nothing yet"
	}
	return r.Scheduler.Message
}

func (r *Report) hidden(in Inputs) {
	what := "GPUNodes"
	switch {
	case in.NodesHidden && in.ReportsHidden:
		what = "nodes and GPUNodes"
	case in.NodesHidden:
		what = "nodes"
	}
	r.Missing = append(r.Missing, "what each card says: "+what+" can't be listed (role carve-viewer may)")
}
