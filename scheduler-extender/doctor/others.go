package doctor

import (
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"github.com/carve-gpu/carve/api"
)

// Marks of HAMi (v2.5 and later) on nodes and in its webhook.
const (
	hamiRegister  = "hami.io/node-nvidia-register"
	hamiHandshake = "hami.io/node-handshake"
	hamiWebhookIs = "vgpu.hami.io"
	hamiIgnore    = "hami.io/webhook"
)

// whose names the software that a device-plugin pod belongs to, empty for one
// that has nothing to do with NVIDIA's cards.
func whose(p corev1.Pod) string {
	text := strings.ToLower(p.Name)
	for _, c := range p.Spec.Containers {
		text += " " + strings.ToLower(c.Image+" "+c.Name+" "+strings.Join(c.Command, " "))
	}
	switch {
	case strings.Contains(text, "hami"), strings.Contains(text, "4pdvgpu"):
		return "HAMi's device plugin"
	case strings.Contains(text, "volcano") && strings.Contains(text, "gpu"):
		return "Volcano's device plugin"
	case strings.Contains(text, "nvidia"), strings.Contains(text, "k8s-device-plugin"):
		return "NVIDIA's device plugin"
	}
	return ""
}

// doubleServing looks for other plugins that hand out the same cards.
func doubleServing(f Facts) []api.Finding {
	const check = "double-serving"
	if f.unread(readNodes, readPods) {
		return nil
	}
	labelled := map[string]bool{}
	for _, n := range f.Nodes {
		labelled[n.Name] = managed(n)
	}
	var out []api.Finding
	beside := map[string]int{}
	for _, p := range f.Plugins {
		who := whose(p)
		if who == "" || p.Spec.NodeName == "" {
			continue
		}
		if !labelled[p.Spec.NodeName] {
			beside[who]++
			continue
		}
		owner := "pod " + p.Namespace + "/" + p.Name
		for _, o := range p.OwnerReferences {
			if o.Kind == "DaemonSet" {
				owner = "daemonset " + p.Namespace + "/" + o.Name
			}
		}
		out = append(out, fail(check, "node "+p.Spec.NodeName, who+" runs there as well ("+owner+")",
			"both register "+api.ResourceGPU+" with the kubelet: the last one wins, and cards are handed out whole past carve's limits",
			"keep it off managed nodes: node affinity "+api.LabelManaged+" NotIn [true] in "+owner+" (GPU Operator: kubectl label node "+p.Spec.NodeName+" nvidia.com/gpu.deploy.device-plugin=false)")...)
	}
	if out == nil {
		what := "no other device plugin serves a managed node"
		for _, who := range []string{"HAMi's device plugin", "NVIDIA's device plugin", "Volcano's device plugin"} {
			if n := beside[who]; n > 0 {
				what += fmt.Sprintf("; %s serves %d others", who, n)
			}
		}
		return ok(check, "nodes", what)
	}
	return out
}

// hamiNodes looks for managed nodes that HAMi's scheduler takes for its own.
func hamiNodes(f Facts) []api.Finding {
	var out []api.Finding
	for _, n := range f.Nodes {
		if managed(n) && n.Annotations[hamiRegister] != "" {
			out = append(out, warn("hami-node", "node "+n.Name, "it still carries HAMi's register of cards ("+hamiRegister+")",
				"HAMi's scheduler may place pods there and count them; carve's ledger doesn't see those, and the hook gives them no card",
				"kubectl annotate node "+n.Name+" "+hamiRegister+"- "+hamiHandshake+"-; kubectl label node "+n.Name+" gpu-")...)
		}
	}
	return out
}

// hamiWebhook looks for the one that moves pods to HAMi's scheduler.
func hamiWebhook(f Facts) []api.Finding {
	const check = "hami-webhook"
	if f.unread(readWebhooks) {
		return nil
	}
	for _, w := range f.Webhooks {
		for _, h := range w.Webhooks {
			if w.Name != "hami-webhook" && h.Name != hamiWebhookIs {
				continue
			}
			return warn(check, "mutatingwebhookconfiguration "+w.Name, "HAMi's webhook is there: it gives pods that ask for "+api.ResourceGPU+" HAMi's scheduler",
				"such a pod never meets carve's extender, and stays pending if only managed nodes have room",
				"kubectl label namespace NAMESPACE "+hamiIgnore+"=ignore, for each namespace whose pods are carve's (or the same label on pods)")
		}
	}
	return ok(check, "mutatingwebhookconfigurations", "none of HAMi's")
}

func runtimeClasses(f Facts) []api.Finding {
	const check = "runtime-class"
	if f.unread(readClasses) {
		return nil
	}
	var names []string
	for _, c := range f.Classes {
		if strings.Contains(c.Handler, "nvidia") {
			names = append(names, c.Name)
		}
	}
	if names == nil {
		return ok(check, "runtimeclasses", "none is NVIDIA's")
	}
	return ok(check, "runtimeclass "+strings.Join(names, ", "), "pods may choose NVIDIA's runtime; whether that hands out cards by itself is each node's setting (carve doctor --node, toolkit-env)")
}

// privileged counts the namespaces that let privileged pods in.
func privileged(f Facts) []api.Finding {
	const check = "privileged"
	if f.unread(readNamespaces) {
		return nil
	}
	var open []string
	for _, n := range f.Namespaces {
		if n.Name == f.Namespace || strings.HasPrefix(n.Name, "kube-") {
			continue
		}
		if level := n.Labels["pod-security.kubernetes.io/enforce"]; level != "baseline" && level != "restricted" {
			open = append(open, n.Name)
		}
	}
	if open == nil {
		return ok(check, "namespaces", "none but the system's lets privileged pods in")
	}
	total := len(open)
	if total > 5 {
		open = append(open[:5:5], "…")
	}
	return warn(check, "namespaces "+strings.Join(open, ", "), fmt.Sprintf("%d namespace(s) let privileged pods in", total),
		"a privileged pod sees every device of its node, granted or not, as everywhere in Kubernetes", "kubectl label namespace NAMESPACE pod-security.kubernetes.io/enforce=baseline (unless another policy engine refuses them)")
}
