package doctor

import (
	"fmt"
	"slices"
	"sort"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/v1alpha1"
)

func managed(n corev1.Node) bool { return n.Labels[api.LabelManaged] == "true" }

// nodes looks at every node that carve manages.
func nodes(f Facts) []api.Finding {
	if f.unread(readNodes, readReports, readPods) {
		return nil
	}
	reports := map[string]v1alpha1.GPUNode{}
	for _, r := range f.Reports {
		reports[r.Name] = r
	}
	agents := map[string][]corev1.Pod{}
	for _, p := range f.Agents {
		agents[p.Spec.NodeName] = append(agents[p.Spec.NodeName], p)
	}
	var out []api.Finding
	count := 0
	for _, n := range f.Nodes {
		if !managed(n) {
			continue
		}
		count++
		found := node(f, n, agents[n.Name], reports[n.Name])
		if found == nil {
			r := reports[n.Name]
			what := fmt.Sprintf("%d cards, %d slices, agent %s", len(r.Status.Cards), r.Status.Summary.Slices, r.Status.AgentVersion)
			found = ok("node", "node "+n.Name, what)
		}
		out = append(out, found...)
	}
	if count == 0 {
		return warn("node", "nodes", "carve manages none", "no pod gets a share of a card", "kubectl label node NODE "+api.LabelManaged+"=true")
	}
	return out
}

// node says what is wrong with one, nil if nothing is.
func node(f Facts, n corev1.Node, agents []corev1.Pod, r v1alpha1.GPUNode) []api.Finding {
	const check = "node"
	where := "node " + n.Name
	agent := "$(kubectl -n " + f.Namespace + " get pods -l app.kubernetes.io/name=carve-node --field-selector spec.nodeName=" + n.Name + " -o name)"
	logs := "kubectl -n " + f.Namespace + " logs " + agent
	onNode := "kubectl -n " + f.Namespace + " exec " + agent + " -- carve doctor --node"
	var out []api.Finding
	if !slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	}) {
		out = append(out, warn(check, where, "the node isn't Ready", "it takes no pods; those on it keep their shares counted until it is back or deleted", "kubectl describe node "+n.Name)...)
	}
	pod := -1
	for i, p := range agents {
		if p.DeletionTimestamp == nil && ready(p) {
			pod = i
		}
	}
	switch {
	case len(agents) == 0:
		return append(out, fail(check, where, "it is labelled "+api.LabelManaged+"=true, and no agent runs on it", "its cards can't be handed out",
			"kubectl -n "+f.Namespace+" describe daemonset carve-node; an admission policy or a taint may keep it away")...)
	case pod < 0:
		return append(out, fail(check, where, "its agent isn't ready: pod "+f.Namespace+"/"+agents[0].Name, "it takes no new pods; running ones keep their limits", logs+"\n"+onNode)...)
	}
	switch {
	case r.Name == "":
		return append(out, fail(check, where, "its agent runs and has reported nothing: there is no GPUNode "+n.Name, "the extender knows of no card there", logs)...)
	case r.Status.HookConnectedSince == nil:
		out = append(out, fail(check, where, "the hook has no link to the container runtime", "containers would start without their cards, so the node takes no pods", onNode)...)
	}
	if len(r.Status.Cards) == 0 {
		out = append(out, fail(check, where, "it reports no cards", "there is nothing to hand out", onNode)...)
	}
	var memory int64
	for _, c := range r.Status.Cards {
		memory += c.MemoryMiB
		if c.Health.State != v1alpha1.Healthy {
			out = append(out, warn(check, fmt.Sprintf("%s, card %d (%s)", where, c.Index, c.UUID), "it is "+c.Health.State+": "+c.Health.Reason, "it takes no new slices; the node's other cards do", onNode)...)
		}
		if c.MPS != nil && !c.MPS.Ready {
			since := ""
			if c.MPS.Since != nil {
				since = " since " + c.MPS.Since.UTC().Format(time.RFC3339)
			}
			out = append(out, fail("mps", fmt.Sprintf("%s, card %d (%s)", where, c.Index, c.UUID), "its MPS daemon doesn't serve"+since+": "+c.MPS.Reason,
				api.MPSDownMeans, api.MendMPS(n.Name))...)
		}
	}
	if n := r.Status.UnadjustedContainers; n > 0 {
		out = append(out, warn(check, where, fmt.Sprintf("%d container(s) started while the hook was away and have no card", n), "they were granted one and can't use it", "kubectl get events -A --field-selector reason=StartedWithoutCard")...)
	}
	if len(r.Status.Cards) > 0 {
		slots := n.Status.Allocatable[api.ResourceGPU]
		want := int64(len(r.Status.Cards)) * int64(r.Status.SlotsPerCard)
		switch {
		case slots.IsZero():
			out = append(out, fail(check, where, "the kubelet offers no "+api.ResourceGPU, "no pod that names it fits: the device plugin isn't registered", onNode)...)
		case slots.Value() != want:
			out = append(out, warn(check, where, fmt.Sprintf("the kubelet offers %d %s, the cards have %d slots", slots.Value(), api.ResourceGPU, want), "another device plugin may have registered the same name, or the kubelet is a moment behind", onNode)...)
		}
		capacity := n.Status.Capacity[api.ResourceMemory]
		if mib := capacity.Value() / api.MiB; mib != memory {
			out = append(out, warn(check, where, fmt.Sprintf("the node's capacity of %s is %d MiB, its cards have %d", api.ResourceMemory, mib, memory), "autoscalers judge by it, and waiting pods aren't woken by the node's return", logs)...)
		}
	}
	if r.Status.SoftwareGPU {
		out = append(out, warn(check, where, "its cards are software", "they are a test instrument: nothing computes on them", "on a node with real cards, take CARVE_NODE_SOFTWARE_GPU out of ConfigMap carve-node")...)
	}
	return out
}

func ready(p corev1.Pod) bool {
	return slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
}

// strays are agents and reports where carve manages nothing.
func strays(f Facts) []api.Finding {
	const check = "strays"
	if f.unread(readNodes, readReports, readPods) {
		return nil
	}
	labelled, there := map[string]bool{}, map[string]bool{}
	for _, n := range f.Nodes {
		labelled[n.Name], there[n.Name] = managed(n), true
	}
	var out []api.Finding
	for _, p := range f.Agents {
		if p.Spec.NodeName != "" && !labelled[p.Spec.NodeName] && p.DeletionTimestamp == nil {
			out = append(out, warn(check, "pod "+p.Namespace+"/"+p.Name, "an agent runs on node "+p.Spec.NodeName+", which isn't labelled "+api.LabelManaged+"=true",
				"it offers slots that the extender never fills", "kubectl label node "+p.Spec.NodeName+" "+api.LabelManaged+"=true, or put the DaemonSet's nodeSelector back")...)
		}
	}
	for _, r := range f.Reports {
		switch {
		case !there[r.Name]:
			out = append(out, warn(check, "gpunode "+r.Name, "it reports a node that doesn't exist", "nothing: the extender counts cards of nodes only", "kubectl delete gpunode "+r.Name)...)
		case !labelled[r.Name]:
			out = append(out, ok(check, "gpunode "+r.Name, fmt.Sprintf("carve doesn't manage this node any more; %d slices are reported, and counted until they end", r.Status.Summary.Slices))...)
		}
	}
	return out
}

// foreign looks for pods on managed nodes that have cards of another device
// plugin's: carve can't know which, and sends nothing there until they are gone.
func foreign(f Facts) []api.Finding {
	const check = "foreign-pods"
	if f.unread(readNodes, readReports, readPods) {
		return nil
	}
	given := map[string]bool{}
	for _, r := range f.Reports {
		for _, c := range r.Status.Cards {
			for _, s := range c.Slices {
				given[s.PodUID] = true
			}
		}
	}
	on := map[string][]string{}
	for _, p := range f.Foreign {
		if !given[string(p.UID)] {
			on[p.Spec.NodeName] = append(on[p.Spec.NodeName], p.Namespace+"/"+p.Name)
		}
	}
	var out []api.Finding
	for _, n := range f.Nodes {
		names := on[n.Name]
		if !managed(n) || names == nil {
			continue
		}
		sort.Strings(names)
		total := len(names)
		if total > 5 {
			names = append(names[:5:5], "…")
		}
		out = append(out, warn(check, "node "+n.Name, fmt.Sprintf("%d pod(s) run there on cards that carve didn't give them: %s", total, strings.Join(names, ", ")),
			"they came before carve managed the node; which cards they have isn't known, so it takes no new pods that ask for cards",
			"wait until they end, or move them: kubectl drain "+n.Name+" --ignore-daemonsets, then kubectl uncordon "+n.Name)...)
	}
	if out == nil {
		return ok(check, "nodes", "no pod runs on a managed node's cards without a grant")
	}
	return out
}

// versions compares those of the agents with that of who looks.
func versions(f Facts) []api.Finding {
	const check = "versions"
	if f.unread(readReports) {
		return nil
	}
	byVersion := map[string][]string{}
	for _, r := range f.Reports {
		if r.Status.AgentVersion != "" {
			byVersion[r.Status.AgentVersion] = append(byVersion[r.Status.AgentVersion], r.Name)
		}
	}
	var others []string
	for v, names := range byVersion {
		if v != f.Version {
			sort.Strings(names)
			if len(names) > 3 {
				names = append(names[:3:3], "…")
			}
			others = append(others, v+" on "+strings.Join(names, ", "))
		}
	}
	if others == nil {
		return ok(check, "agents", "all are "+f.Version)
	}
	sort.Strings(others)
	return warn(check, "agents", "this is "+f.Version+", agents are "+strings.Join(others, "; "), "a roll is under way, or stuck; old and new agents understand each other's grants",
		"kubectl -n "+f.Namespace+" rollout status daemonset carve-node")
}
