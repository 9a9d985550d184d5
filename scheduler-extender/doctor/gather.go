package doctor

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/gpunodes"
	"github.com/carve-gpu/carve/scheduler-extender/cluster"
	"github.com/carve-gpu/carve/scheduler-extender/pki"
)

// pageSize bounds one answer of a list of pods.
const pageSize = 500

// Config says what to look at, and as whom.
type Config struct {
	Kube    kubernetes.Interface
	Reports *gpunodes.Client
	// Namespace is carve's.
	Namespace string
	Version   string
	// Expected is what Expect returned.
	Expected []Object
	Now      time.Time
	// SchedulerConfig and its path are optional.
	SchedulerConfig     []byte
	SchedulerConfigPath string
}

// Gather reads the cluster. It never fails: what can't be read is a fact.
func Gather(ctx context.Context, c Config) Facts {
	f := Facts{
		Namespace: c.Namespace, Version: c.Version, Now: c.Now, Expected: c.Expected,
		Unread: map[string]string{}, Forbidden: map[string]bool{}, Actual: map[string]map[string]any{},
		SchedulerConfig: c.SchedulerConfig, SchedulerConfigPath: c.SchedulerConfigPath,
	}
	note := func(what string, err error) bool {
		if err != nil {
			f.Unread[what] = err.Error()
		}
		if apierrors.IsForbidden(err) {
			f.Forbidden[what] = true
		}
		return err == nil
	}
	for _, o := range c.Expected {
		raw, err := c.Kube.Discovery().RESTClient().Get().AbsPath(resources[o.Kind].path, o.Name).DoRaw(ctx)
		if apierrors.IsNotFound(err) {
			continue
		}
		var have map[string]any
		if err == nil {
			err = json.Unmarshal(raw, &have)
		}
		if note(o.Key(), err) {
			f.Actual[o.Key()] = have
		}
	}
	if l, err := c.Kube.CoreV1().Nodes().List(ctx, metav1.ListOptions{}); note(readNodes, err) {
		f.Nodes = l.Items
	}
	if l, err := c.Reports.List(ctx, metav1.ListOptions{}); note(readReports, err) {
		f.Reports = l.Items
	}
	note(readPods, f.sortPods(ctx, c))
	d, err := c.Kube.AppsV1().Deployments(c.Namespace).Get(ctx, "carve-extender", metav1.GetOptions{})
	if !apierrors.IsNotFound(err) && note(readDeployment, err) {
		f.Deployment = d
	}
	if l, err := c.Kube.AdmissionregistrationV1().MutatingWebhookConfigurations().List(ctx, metav1.ListOptions{}); note(readWebhooks, err) {
		f.Webhooks = l.Items
	}
	if l, err := c.Kube.NodeV1().RuntimeClasses().List(ctx, metav1.ListOptions{}); note(readClasses, err) {
		f.Classes = l.Items
	}
	if l, err := c.Kube.CoreV1().Namespaces().List(ctx, metav1.ListOptions{}); note(readNamespaces, err) {
		f.Namespaces = l.Items
	}
	if l, err := c.Kube.DiscoveryV1().EndpointSlices(c.Namespace).List(ctx, metav1.ListOptions{}); err == nil {
		f.Endpoints = map[string]int{}
		for _, s := range l.Items {
			for _, e := range s.Endpoints {
				if e.Conditions.Ready == nil || *e.Conditions.Ready {
					f.Endpoints[s.Labels["kubernetes.io/service-name"]]++
				}
			}
		}
	}
	note(readSecret, f.certificates(ctx, c))
	if f.Deployment != nil && f.Deployment.Status.ReadyReplicas > 0 {
		note(readMetrics, f.metrics(ctx, c))
	}
	return f
}

// sortPods reads all pods, page by page, and keeps those that matter.
func (f *Facts) sortPods(ctx context.Context, c Config) error {
	options := metav1.ListOptions{Limit: pageSize}
	for {
		page, err := c.Kube.CoreV1().Pods(metav1.NamespaceAll).List(ctx, options)
		if err != nil {
			return err
		}
		for _, p := range page.Items {
			switch {
			case p.Namespace == c.Namespace && p.Labels["app.kubernetes.io/name"] == "carve-node":
				f.Agents = append(f.Agents, p)
			case p.Labels["component"] == "kube-scheduler":
				f.Schedulers = append(f.Schedulers, p)
			case mountsPlugins(p):
				f.Plugins = append(f.Plugins, p)
			case p.Spec.NodeName == "" && p.Status.Phase == corev1.PodPending && len(p.Spec.SchedulingGates) == 0 && ours(p):
				f.Waiting = append(f.Waiting, p)
			case p.Spec.NodeName != "" && p.Annotations[api.AnnotationGrant] == "" && cluster.OnCards(&p):
				f.Foreign = append(f.Foreign, p)
			}
		}
		if options.Continue = page.Continue; options.Continue == "" {
			return nil
		}
	}
}

func mountsPlugins(p corev1.Pod) bool {
	for _, v := range p.Spec.Volumes {
		if v.HostPath != nil && strings.HasSuffix(strings.TrimRight(v.HostPath.Path, "/"), "/device-plugins") {
			return true
		}
	}
	return false
}

// ours reports whether the scheduler must ask the extender about a pod.
func ours(p corev1.Pod) bool {
	if strings.Contains(p.Spec.SchedulerName, "hami") {
		return false
	}
	for _, c := range append(append([]corev1.Container{}, p.Spec.InitContainers...), p.Spec.Containers...) {
		for name := range c.Resources.Limits {
			switch name {
			case api.ResourceGPU, api.ResourceMemory, api.ResourceMemoryPercent, api.ResourceCores:
				return true
			}
		}
	}
	return false
}

func (f *Facts) certificates(ctx context.Context, c Config) error {
	s, err := c.Kube.CoreV1().Secrets(c.Namespace).Get(ctx, "carve-extender-tls", metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	if f.CAEnds, err = caEnds(s.Data[pki.CACert]); err != nil {
		return fmt.Errorf("%s: %w", pki.CACert, err)
	}
	if f.ClientEnds, err = caEnds(s.Data[pki.ClientCert]); err != nil {
		return fmt.Errorf("%s: %w", pki.ClientCert, err)
	}
	return nil
}

// metrics reads the extender's through the API server, so that doctor needs no
// way to the pod network.
func (f *Facts) metrics(ctx context.Context, c Config) error {
	l, err := c.Kube.CoreV1().Pods(c.Namespace).List(ctx, metav1.ListOptions{LabelSelector: "app.kubernetes.io/name=carve-extender"})
	if err != nil {
		return err
	}
	// Of several the one that answers comes first.
	slices.SortStableFunc(l.Items, func(a, b corev1.Pod) int {
		return strings.Compare(b.Labels[api.LabelLeading], a.Labels[api.LabelLeading])
	})
	for _, p := range l.Items {
		if p.DeletionTimestamp != nil || !ready(p) {
			continue
		}
		text, err := c.Kube.CoreV1().RESTClient().Get().Namespace(c.Namespace).Resource("pods").Name(p.Name + ":8080").SubResource("proxy").Suffix("metrics").DoRaw(ctx)
		if err != nil {
			return err
		}
		f.Metrics = string(text)
		return nil
	}
	return fmt.Errorf("no pod of the extender is ready")
}
