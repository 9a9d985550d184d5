package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/gpunodes"
	"github.com/carve-gpu/carve/api/v1alpha1"
	"github.com/carve-gpu/carve/monitor/page"
)

const (
	// agentsAtOnce bounds the requests to agents that are under way.
	agentsAtOnce = 16
	// agentTimeout bounds one of them: a node that hangs must not hold up the
	// view of the others.
	agentTimeout = 5 * time.Second
	// maxAnswer bounds what an agent's answer may be.
	maxAnswer = 16 << 20
	// metricsPort is the agent's, where its pod doesn't say.
	metricsPort = 9410
)

// live reads what the agents tell of the cards now.
type live struct {
	kube  kubernetes.Interface
	nodes *gpunodes.Client
	// ask reads one agent's page; askAgent outside of tests.
	ask func(ctx context.Context, agent corev1.Pod) (page.State, error)
}

func newLive(kube kubernetes.Interface, nodes *gpunodes.Client) *live {
	l := &live{kube: kube, nodes: nodes}
	l.ask = l.askAgent
	return l
}

// usage is what was learnt of the cluster's cards.
type usage struct {
	nodes []page.Node
	// notes say what is missing and why, for people.
	notes []string
	// answered are the nodes whose agent did.
	answered map[string]bool
}

// read asks the agent of each node, or of the named one. Where one doesn't
// answer, or mustn't be asked, the node's report stands in, which has grants and
// no use. It fails only where nothing at all can be told.
func (l *live) read(ctx context.Context, node string) (usage, error) {
	u := usage{answered: map[string]bool{}}
	options := metav1.ListOptions{}
	if node != "" {
		options.FieldSelector = "metadata.name=" + node
	}
	reports, reportErr := l.nodes.List(ctx, options)
	if reportErr != nil {
		reportErr = hinted(reportErr)
		reports = &v1alpha1.GPUNodeList{}
	}
	options = metav1.ListOptions{LabelSelector: api.LabelName + "=" + api.AgentName}
	if node != "" {
		options.FieldSelector = "spec.nodeName=" + node
	}
	agents, agentErr := l.kube.CoreV1().Pods(api.Namespace).List(ctx, options)
	if agentErr != nil {
		agents = &corev1.PodList{}
	}
	switch {
	case reportErr != nil && agentErr != nil:
		return u, fmt.Errorf("list GPUNodes: %w; list the agents: %w", reportErr, agentErr)
	case reportErr != nil:
		u.notes = append(u.notes, "cordoned cards and nodes whose agent doesn't answer are not shown: list GPUNodes: "+reportErr.Error())
	case agentErr != nil:
		u.notes = append(u.notes, "what is in use is not shown: list the agents: "+agentErr.Error())
	}

	byNode := map[string]corev1.Pod{}
	for _, p := range agents.Items {
		if p.Spec.NodeName == "" || node != "" && p.Spec.NodeName != node {
			continue
		}
		if old, there := byNode[p.Spec.NodeName]; !there || old.DeletionTimestamp != nil {
			byNode[p.Spec.NodeName] = p
		}
	}
	answers := l.askAll(ctx, byNode)

	for name, a := range answers {
		u.answered[name] = a.err == nil
	}
	missing := map[string][]string{} // nodes by what is wrong
	seen := map[string]bool{}
	for i := range reports.Items {
		report := &reports.Items[i]
		seen[report.Name] = true
		a, asked := answers[report.Name]
		switch {
		case asked && a.err == nil:
			n := a.node
			cordonedFromReport(&n, report)
			u.nodes = append(u.nodes, n)
			continue
		case asked:
			missing[reasonOf(a.err)] = append(missing[reasonOf(a.err)], report.Name)
		case agentErr == nil:
			missing["no agent runs there"] = append(missing["no agent runs there"], report.Name)
		}
		u.nodes = append(u.nodes, nodeFromReport(report))
	}
	for name, a := range answers {
		switch {
		case seen[name]:
		case a.err == nil:
			u.nodes = append(u.nodes, a.node)
		default:
			missing[reasonOf(a.err)] = append(missing[reasonOf(a.err)], name)
		}
	}
	for reason, names := range missing {
		u.notes = append(u.notes, fmt.Sprintf("no live use of %s: %s", some(names, 5), reason))
	}
	slices.Sort(u.notes)
	slices.SortFunc(u.nodes, func(a, b page.Node) int { return strings.Compare(a.Name, b.Name) })
	if node != "" && len(u.nodes) == 0 && len(u.notes) == 0 {
		return u, errNoCards(node)
	}
	return u, nil
}

// some joins the first few of the names.
func some(names []string, few int) string {
	names = slices.Sorted(slices.Values(names))
	if len(names) > few {
		return fmt.Sprintf("%s and %d more", strings.Join(names[:few], ", "), len(names)-few)
	}
	return strings.Join(names, ", ")
}

type agentAnswer struct {
	node page.Node
	err  error
}

// askAll asks the agents in parallel, a bounded number at once.
func (l *live) askAll(ctx context.Context, agents map[string]corev1.Pod) map[string]agentAnswer {
	var mu sync.Mutex
	out := make(map[string]agentAnswer, len(agents))
	var all sync.WaitGroup
	slots := make(chan struct{}, agentsAtOnce)
	for node, pod := range agents {
		slots <- struct{}{}
		all.Go(func() {
			defer func() { <-slots }()
			ctx, cancel := context.WithTimeout(ctx, agentTimeout)
			defer cancel()
			a := agentAnswer{}
			state, err := l.ask(ctx, pod)
			switch {
			case err != nil:
				a.err = err
			case len(state.Nodes) != 1:
				a.err = fmt.Errorf("its answer has %d nodes", len(state.Nodes))
			case state.Nodes[0].Name != node:
				a.err = errors.New("its answer is about another node")
			default:
				a.node = state.Nodes[0]
			}
			mu.Lock()
			defer mu.Unlock()
			out[node] = a
		})
	}
	all.Wait()
	return out
}

// askAgent reads an agent's page through the API server.
func (l *live) askAgent(ctx context.Context, agent corev1.Pod) (page.State, error) {
	port := int32(metricsPort)
	for _, c := range agent.Spec.Containers {
		for _, p := range c.Ports {
			if p.Name == "metrics" {
				port = p.ContainerPort
			}
		}
	}
	var s page.State
	stream, err := l.kube.CoreV1().RESTClient().Get().Namespace(agent.Namespace).Resource("pods").
		Name(fmt.Sprintf("%s:%d", agent.Name, port)).SubResource("proxy").Suffix("api/v1/cards").Stream(ctx)
	if err != nil {
		return s, err
	}
	defer stream.Close()
	b, err := io.ReadAll(io.LimitReader(stream, maxAnswer+1))
	switch {
	case err != nil:
		return s, fmt.Errorf("read its answer: %w", err)
	case len(b) > maxAnswer:
		return s, errors.New("its answer is too long")
	}
	if err := json.Unmarshal(b, &s); err != nil {
		return s, fmt.Errorf("read its answer: %w", err)
	}
	if s.Version != page.StateVersion {
		return s, fmt.Errorf("its answer has version %d, this build reads %d", s.Version, page.StateVersion)
	}
	return s, nil
}

// reasonOf is an error in words that are the same for all nodes it concerns.
func reasonOf(err error) string {
	switch {
	case apierrors.IsForbidden(err):
		return "you may not ask agents (get pods/proxy in namespace " + api.Namespace + "; role carve-viewer has it)"
	case errors.Is(err, context.DeadlineExceeded):
		return fmt.Sprintf("no answer from the agent within %s", agentTimeout)
	}
	return "ask the agent: " + err.Error()
}

func cordonedFromReport(n *page.Node, report *v1alpha1.GPUNode) {
	for i := range n.Cards {
		c := &n.Cards[i]
		c.Cordoned = slices.Contains(report.Spec.CordonedCards, c.UUID)
		c.CordonedFor = string(report.Spec.CordonReasons[c.UUID])
	}
}

// nodeFromReport is a node as its report shows it: grants and no use.
func nodeFromReport(report *v1alpha1.GPUNode) page.Node {
	st := &report.Status
	n := page.Node{Name: report.Name, Version: st.AgentVersion, Driver: st.DriverVersion, Software: st.SoftwareGPU,
		HookUp: st.HookConnectedSince != nil, Unadjusted: int(st.UnadjustedContainers), Cards: []page.Card{}}
	for _, c := range byIndex(st.Cards) {
		card := page.Card{Index: int(c.Index), UUID: c.UUID, Model: c.Model, Health: c.Health.State, Reason: c.Health.Reason,
			MemoryBytes: uint64(c.MemoryMiB) << 20, Holders: []page.Holder{}}
		for _, s := range c.Slices {
			h := page.Holder{Namespace: s.Namespace, Pod: s.Pod, Container: s.Container, State: s.State, LimitBytes: uint64(s.MemMiB) << 20, Percent: int(s.Cores), Mode: s.Mode}
			h.Counted = s.Mode == string(api.ModeTimeslice)
			if s.Mode == string(api.ModeExclusive) {
				h.Whole, h.LimitBytes, h.Percent = true, card.MemoryBytes, 100
			}
			card.GrantedBytes += h.LimitBytes
			card.GrantedPercent += h.Percent
			card.Holders = append(card.Holders, h)
		}
		card.GrantedBytes = min(card.GrantedBytes, card.MemoryBytes)
		sortHolders(card.Holders)
		n.Cards = append(n.Cards, card)
	}
	cordonedFromReport(&n, report)
	return n
}
