package doctor

import (
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	nodev1 "k8s.io/api/node/v1"

	"github.com/carve-gpu/carve/api/v1alpha1"
)

// Names of what Gather reads, as keys of Facts.Unread.
const (
	readNodes      = "nodes"
	readReports    = "gpunodes.carve.dev"
	readPods       = "pods"
	readDeployment = "the extender's Deployment"
	readMetrics    = "the extender's metrics"
	readSecret     = "the extender's Secret"
	readWebhooks   = "mutatingwebhookconfigurations"
	readClasses    = "runtimeclasses"
	readNamespaces = "namespaces"
)

// Facts are what was read of a cluster.
type Facts struct {
	// Namespace is carve's, Version that of the program that looks.
	Namespace, Version string
	Now                time.Time
	// Unread says, for what couldn't be read, why.
	Unread map[string]string
	// Forbidden are those of Unread that whoever looks may not read.
	Forbidden map[string]bool
	// Expected are the objects that this version installs and that doctor
	// compares; Actual are those of the cluster by Object.Key.
	Expected []Object
	Actual   map[string]map[string]any

	Deployment *appsv1.Deployment
	// Metrics is the extender's text, empty if Unread says why.
	Metrics string
	// CAEnds and ClientEnds are the ends of the certificates' validity.
	CAEnds, ClientEnds time.Time
	// Endpoints counts the ready addresses behind each Service of the namespace.
	Endpoints map[string]int

	Nodes   []corev1.Node
	Reports []v1alpha1.GPUNode
	// Agents are the pods of carve-node, Plugins pods of others that mount the
	// kubelet's device-plugin directory, Schedulers the kube-schedulers that run
	// as pods, Waiting pods that ask for cards and have no node, Foreign those
	// that run on cards and carry no grant.
	Agents, Plugins, Schedulers, Waiting, Foreign []corev1.Pod

	Webhooks   []admissionv1.MutatingWebhookConfiguration
	Classes    []nodev1.RuntimeClass
	Namespaces []corev1.Namespace

	// SchedulerConfig is a KubeSchedulerConfiguration to look at and
	// SchedulerConfigPath its file, if one was given.
	SchedulerConfig     []byte
	SchedulerConfigPath string
}

// Object is one that this version installs.
type Object struct {
	APIVersion, Kind, Namespace, Name string
	// File is the manifest that it is in.
	File string
	// Content is all of it.
	Content map[string]any
}

// Key tells objects apart.
func (o Object) Key() string {
	if o.Namespace != "" {
		return o.Kind + "/" + o.Namespace + "/" + o.Name
	}
	return o.Kind + "/" + o.Name
}
