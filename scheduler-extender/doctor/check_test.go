package doctor

import (
	"encoding/json"
	"flag"
	"fmt"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	nodev1 "k8s.io/api/node/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/v1alpha1"
	"github.com/carve-gpu/carve/deploy/manifests"
	"github.com/carve-gpu/carve/scheduler-extender/schedconfig"
)

var update = flag.Bool("update", false, "write the golden files")

var now = time.Date(2026, 11, 30, 12, 0, 0, 0, time.UTC)

func agentPod(node string) corev1.Pod {
	return corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "carve-node-" + node, Namespace: api.Namespace},
		Spec:       corev1.PodSpec{NodeName: node},
		Status:     corev1.PodStatus{Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}},
	}
}

// healthy is a cluster with nothing wrong: n1 is managed, n2 isn't.
func healthy(t *testing.T) Facts {
	t.Helper()
	expected, err := Expect(manifests.Files, api.Namespace)
	if err != nil {
		t.Fatal(err)
	}
	since := metav1.NewTime(now)
	f := Facts{
		Namespace: api.Namespace, Version: "v1", Now: now, Unread: map[string]string{},
		Expected: expected, Actual: map[string]map[string]any{},
		Deployment: &appsv1.Deployment{Status: appsv1.DeploymentStatus{ReadyReplicas: 1}},
		Metrics:    fmt.Sprintf("carve_extender_verb_seconds_count{verb=\"filter\"} 12\ncarve_extender_last_filter_timestamp_seconds %d\ncarve_extender_denied_total 0\n", now.Unix()),
		CAEnds:     now.AddDate(10, 0, 0), ClientEnds: now.AddDate(9, 0, 0),
		Endpoints: map[string]int{"carve-extender": 1, "carve-webhook": 1},
		Nodes: []corev1.Node{
			{ObjectMeta: metav1.ObjectMeta{Name: "n1", Labels: map[string]string{api.LabelManaged: "true"}}, Status: corev1.NodeStatus{
				Conditions:  []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}},
				Allocatable: corev1.ResourceList{api.ResourceGPU: resource.MustParse("32")},
				Capacity:    corev1.ResourceList{api.ResourceMemory: resource.MustParse("81000Mi")},
			}},
			{ObjectMeta: metav1.ObjectMeta{Name: "n2"}},
		},
		Reports: []v1alpha1.GPUNode{{ObjectMeta: metav1.ObjectMeta{Name: "n1"}, Status: v1alpha1.GPUNodeStatus{
			AgentVersion: "v1", HookConnectedSince: &since, SlotsPerCard: 32,
			Cards: []v1alpha1.Card{{UUID: "GPU-a", MemoryMiB: 81000, Health: v1alpha1.Health{State: v1alpha1.Healthy}}},
		}}},
		Agents: []corev1.Pod{agentPod("n1")},
		Namespaces: []corev1.Namespace{
			{ObjectMeta: metav1.ObjectMeta{Name: "team", Labels: map[string]string{"pod-security.kubernetes.io/enforce": "baseline"}}},
			{ObjectMeta: metav1.ObjectMeta{Name: "kube-system"}}, {ObjectMeta: metav1.ObjectMeta{Name: api.Namespace}},
		},
	}
	for _, o := range expected {
		f.Actual[o.Key()] = asServed(t, o)
	}
	return f
}

// asServed is an object as an API server returns it: with defaults and status.
func asServed(t *testing.T, o Object) map[string]any {
	t.Helper()
	b, err := json.Marshal(o.Content)
	if err != nil {
		t.Fatal(err)
	}
	var have map[string]any
	if err := json.Unmarshal(b, &have); err != nil {
		t.Fatal(err)
	}
	have["metadata"].(map[string]any)["uid"] = "u"
	switch o.Kind {
	case "CustomResourceDefinition":
		have["status"] = map[string]any{"conditions": []any{map[string]any{"type": "Established", "status": "True"}}}
		have["spec"].(map[string]any)["conversion"] = map[string]any{"strategy": "None"}
	case "ValidatingAdmissionPolicy":
		v := have["spec"].(map[string]any)["validations"].([]any)[0].(map[string]any)
		v["expression"] = strings.ReplaceAll(v["expression"].(string), " ", "\n  ")
		have["spec"].(map[string]any)["matchConstraints"].(map[string]any)["matchPolicy"] = "Equivalent"
	}
	return have
}

// key finds the one expected object of a kind and name part.
func key(t *testing.T, f *Facts, kind, name string) string {
	t.Helper()
	for _, o := range f.Expected {
		if o.Kind == kind && strings.Contains(o.Name, name) {
			return o.Key()
		}
	}
	t.Fatalf("no %s %s is expected", kind, name)
	return ""
}

func TestHealthyClusterHasNoFinding(t *testing.T) {
	for _, f := range Check(healthy(t)) {
		if f.Level != api.LevelOK {
			t.Errorf("%+v", f)
		}
	}
}

// certificate makes a CA certificate that ends then.
func certificate(t *testing.T, ends time.Time) []byte {
	t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	c := &x509.Certificate{SerialNumber: big.NewInt(1), NotBefore: ends.AddDate(-1, 0, 0), NotAfter: ends}
	der, err := x509.CreateCertificate(rand.Reader, c, c, &k.PublicKey, k)
	if err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

// ownWebhook adds one that this version is said to install.
func ownWebhook(f *Facts, bundle []byte) {
	o := Object{Kind: "MutatingWebhookConfiguration", Name: "carve-test", Content: map[string]any{}}
	f.Expected = append(f.Expected, o)
	f.Actual[o.Key()] = map[string]any{}
	f.Webhooks = append(f.Webhooks, admissionv1.MutatingWebhookConfiguration{
		ObjectMeta: metav1.ObjectMeta{Name: "carve-test"},
		Webhooks: []admissionv1.MutatingWebhook{{Name: "pods.carve.dev", ClientConfig: admissionv1.WebhookClientConfig{
			CABundle: bundle, Service: &admissionv1.ServiceReference{Namespace: api.Namespace, Name: "carve-webhook"},
		}}},
	})
}

func plugin(node, name, image string) corev1.Pod {
	return corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "gpu", Name: name, OwnerReferences: []metav1.OwnerReference{{Kind: "DaemonSet", Name: name + "-ds"}}},
		Spec:       corev1.PodSpec{NodeName: node, Containers: []corev1.Container{{Image: image}}},
	}
}

var faults = []struct {
	name  string
	plant func(*testing.T, *Facts)
	check string
	level api.Level
	says  []string
}{
	{"no rights for nodes", func(_ *testing.T, f *Facts) { f.Unread[readNodes] = "forbidden"; f.Nodes = nil }, "access", api.LevelWarn, []string{"nodes", "forbidden"}},
	{"the CRD is missing", func(t *testing.T, f *Facts) { delete(f.Actual, key(t, f, "CustomResourceDefinition", "gpunodes")) }, "installed", api.LevelFail, []string{"CustomResourceDefinition/gpunodes.carve.dev", "kubectl apply -k"}},
	{"the CRD isn't established", func(t *testing.T, f *Facts) {
		delete(f.Actual[key(t, f, "CustomResourceDefinition", "gpunodes")], "status")
	}, "installed", api.LevelFail, []string{"established"}},
	{"the CRD is an older version's", func(t *testing.T, f *Facts) {
		spec := f.Actual[key(t, f, "CustomResourceDefinition", "gpunodes")]["spec"].(map[string]any)
		version := spec["versions"].([]any)[0].(map[string]any)
		version["schema"].(map[string]any)["openAPIV3Schema"].(map[string]any)["properties"].(map[string]any)["status"] = map[string]any{"type": "object"}
	}, "installed", api.LevelWarn, []string{"differs", "versions[0].schema"}},
	{"the grant's policy is missing", func(t *testing.T, f *Facts) {
		delete(f.Actual, key(t, f, "ValidatingAdmissionPolicy", "carve-grant"))
	}, "installed", api.LevelFail, []string{"ValidatingAdmissionPolicy/carve-grant", "policy-grant.yaml"}},
	{"the grant's policy only warns", func(t *testing.T, f *Facts) {
		f.Actual[key(t, f, "ValidatingAdmissionPolicyBinding", "carve-grant")]["spec"].(map[string]any)["validationActions"] = []any{"Warn"}
	}, "installed", api.LevelFail, []string{"Deny"}},
	{"the grant's policy lets through what it can't judge", func(t *testing.T, f *Facts) {
		f.Actual[key(t, f, "ValidatingAdmissionPolicy", "carve-grant")]["spec"].(map[string]any)["failurePolicy"] = "Ignore"
	}, "installed", api.LevelFail, []string{"failurePolicy"}},
	{"the grant's policy was softened", func(t *testing.T, f *Facts) {
		f.Actual[key(t, f, "ValidatingAdmissionPolicy", "carve-grant")]["spec"].(map[string]any)["validations"].([]any)[0].(map[string]any)["expression"] = "true"
	}, "installed", api.LevelWarn, []string{"spec.validations[0].expression"}},
	{"a path is unguarded", func(t *testing.T, f *Facts) {
		rule := f.Actual[key(t, f, "ValidatingAdmissionPolicy", "carve-grant")]["spec"].(map[string]any)["matchConstraints"].(map[string]any)["resourceRules"].([]any)[0].(map[string]any)
		rule["resources"] = []any{"pods"}
	}, "installed", api.LevelWarn, []string{"resourceRules[0].resources"}},
	{"no extender", func(_ *testing.T, f *Facts) { f.Deployment, f.Metrics = nil, "" }, "extender", api.LevelFail, []string{"missing"}},
	{"the extender isn't ready", func(_ *testing.T, f *Facts) { f.Deployment.Status.ReadyReplicas, f.Metrics = 0, "" }, "extender", api.LevelFail, []string{"no replica"}},
	{"the scheduler's certificate ended", func(_ *testing.T, f *Facts) { f.ClientEnds = now.Add(-time.Hour) }, "certificates", api.LevelFail, []string{"scheduler's"}},
	{"the CA ends next week", func(_ *testing.T, f *Facts) { f.CAEnds = now.AddDate(0, 0, 7) }, "certificates", api.LevelWarn, []string{"CA", "2026-12-07"}},
	{"no certificates", func(_ *testing.T, f *Facts) { f.CAEnds = time.Time{} }, "certificates", api.LevelWarn, []string{"carve-extender-tls"}},
	{"kube-scheduler never called, nobody waits", func(_ *testing.T, f *Facts) {
		f.Metrics = "carve_extender_verb_seconds_count{verb=\"filter\"} 0\ncarve_extender_last_filter_timestamp_seconds 0\n"
	}, "scheduler-calls", api.LevelWarn, []string{"hasn't asked"}},
	{"kube-scheduler never called though a pod waits", func(_ *testing.T, f *Facts) {
		f.Metrics = "carve_extender_verb_seconds_count{verb=\"filter\"} 0\n"
		f.Waiting = []corev1.Pod{{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "p", CreationTimestamp: metav1.NewTime(now.Add(-time.Hour))}}}
	}, "scheduler-calls", api.LevelFail, []string{"team/p", "scheduler-config"}},
	{"kube-scheduler lost its entry yesterday", func(_ *testing.T, f *Facts) {
		f.Metrics = fmt.Sprintf("carve_extender_verb_seconds_count{verb=\"filter\"} 5\ncarve_extender_last_filter_timestamp_seconds %d\n", now.Add(-24*time.Hour).Unix())
		f.Waiting = []corev1.Pod{{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "p", CreationTimestamp: metav1.NewTime(now.Add(-time.Hour))}}}
	}, "scheduler-calls", api.LevelFail, []string{"never asked", "team/p"}},
	{"strangers call", func(_ *testing.T, f *Facts) {
		f.Metrics = strings.Replace(f.Metrics, "denied_total 0", "denied_total 3", 1)
	}, "extender-strangers", api.LevelWarn, []string{"3 calls"}},
	{"kube-scheduler's pod has no configuration", func(_ *testing.T, f *Facts) {
		f.Schedulers = []corev1.Pod{{ObjectMeta: metav1.ObjectMeta{Namespace: "kube-system", Name: "kube-scheduler-cp"}, Spec: corev1.PodSpec{Containers: []corev1.Container{{Command: []string{"kube-scheduler", "--v=2"}}}}}}
	}, "scheduler", api.LevelFail, []string{"kube-scheduler-cp", "--config"}},
	{"a configuration without the entry", func(_ *testing.T, f *Facts) {
		f.SchedulerConfigPath, f.SchedulerConfig = "/s.yaml", []byte("apiVersion: kubescheduler.config.k8s.io/v1\nkind: KubeSchedulerConfiguration\n")
	}, "scheduler-entry", api.LevelFail, []string{"/s.yaml", "no entry"}},
	{"an entry that may be ignored", func(t *testing.T, f *Facts) {
		f.SchedulerConfigPath, f.SchedulerConfig = "/s.yaml", []byte(strings.Replace(string(entry(t)), "ignorable: false", "ignorable: true", 1))
	}, "scheduler-entry", api.LevelFail, []string{"ignorable"}},
	{"an entry without bind", func(t *testing.T, f *Facts) {
		f.SchedulerConfigPath, f.SchedulerConfig = "/s.yaml", []byte(strings.Replace(string(entry(t)), "bindVerb: bind", "bindVerb: \"\"", 1))
	}, "scheduler-entry", api.LevelFail, []string{"bindVerb"}},
	{"an entry without preempt", func(t *testing.T, f *Facts) {
		f.SchedulerConfigPath, f.SchedulerConfig = "/s.yaml", []byte(strings.Replace(string(entry(t)), "preemptVerb: preempt", "preemptVerb: \"\"", 1))
	}, "scheduler-entry", api.LevelWarn, []string{"preemptVerb"}},
	{"a webhook without a CA", func(_ *testing.T, f *Facts) { ownWebhook(f, nil) }, "webhook", api.LevelFail, []string{"caBundle"}},
	{"a webhook whose CA ended", func(t *testing.T, f *Facts) { ownWebhook(f, certificate(t, now.AddDate(0, -1, 0))) }, "webhook", api.LevelFail, []string{"2026-10-30"}},
	{"a webhook that nobody answers", func(t *testing.T, f *Facts) {
		ownWebhook(f, certificate(t, now.AddDate(1, 0, 0)))
		delete(f.Endpoints, "carve-webhook")
	}, "webhook", api.LevelFail, []string{"carve-system/carve-webhook"}},
	{"no node is managed", func(_ *testing.T, f *Facts) { f.Nodes, f.Reports, f.Agents = f.Nodes[1:], nil, nil }, "node", api.LevelWarn, []string{"carve.dev/managed=true"}},
	{"a managed node without an agent", func(_ *testing.T, f *Facts) { f.Agents = nil }, "node", api.LevelFail, []string{"node n1", "daemonset carve-node"}},
	{"an agent that isn't ready", func(_ *testing.T, f *Facts) { f.Agents[0].Status.Conditions = nil }, "node", api.LevelFail, []string{"carve-node-n1", "carve doctor --node"}},
	{"an agent that is being deleted", func(_ *testing.T, f *Facts) { at := metav1.NewTime(now); f.Agents[0].DeletionTimestamp = &at }, "node", api.LevelFail, []string{"isn't ready"}},
	{"no report", func(_ *testing.T, f *Facts) { f.Reports = nil }, "node", api.LevelFail, []string{"no GPUNode n1"}},
	{"the hook is down", func(_ *testing.T, f *Facts) { f.Reports[0].Status.HookConnectedSince = nil }, "node", api.LevelFail, []string{"hook"}},
	{"no cards", func(_ *testing.T, f *Facts) { f.Reports[0].Status.Cards = nil }, "node", api.LevelFail, []string{"no cards"}},
	{"a card is lost", func(_ *testing.T, f *Facts) {
		f.Reports[0].Status.Cards[0].Health = v1alpha1.Health{State: v1alpha1.Lost, Reason: "fell off"}
	}, "node", api.LevelWarn, []string{"GPU-a", "lost", "fell off"}},
	{"an MPS daemon is down", func(_ *testing.T, f *Facts) {
		since := metav1.NewTime(now)
		f.Reports[0].Status.Cards[0].MPS = &v1alpha1.MPS{Reason: "its server has ended", Since: &since}
	}, "mps", api.LevelFail, []string{"GPU-a", "its server has ended", "since 2026-11-30T12:00:00Z", "carve-mps"}},
	{"unadjusted containers", func(_ *testing.T, f *Facts) { f.Reports[0].Status.UnadjustedContainers = 2 }, "node", api.LevelWarn, []string{"2 container(s)"}},
	{"no slots", func(_ *testing.T, f *Facts) { delete(f.Nodes[0].Status.Allocatable, api.ResourceGPU) }, "node", api.LevelFail, []string{"nvidia.com/gpu"}},
	{"somebody else's slots", func(_ *testing.T, f *Facts) {
		f.Nodes[0].Status.Allocatable[api.ResourceGPU] = resource.MustParse("1")
	}, "node", api.LevelWarn, []string{"offers 1", "32 slots"}},
	{"no capacity of memory", func(_ *testing.T, f *Facts) { f.Nodes[0].Status.Capacity = nil }, "node", api.LevelWarn, []string{"81000"}},
	{"a node that isn't Ready", func(_ *testing.T, f *Facts) { f.Nodes[0].Status.Conditions = nil }, "node", api.LevelWarn, []string{"isn't Ready"}},
	{"software cards", func(_ *testing.T, f *Facts) { f.Reports[0].Status.SoftwareGPU = true }, "node", api.LevelWarn, []string{"software"}},
	{"an agent on a node without the label", func(_ *testing.T, f *Facts) { f.Agents = append(f.Agents, agentPod("n2")) }, "strays", api.LevelWarn, []string{"n2", "kubectl label node n2"}},
	{"a report of no node", func(_ *testing.T, f *Facts) {
		f.Reports = append(f.Reports, v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: "gone"}})
	}, "strays", api.LevelWarn, []string{"kubectl delete gpunode gone"}},
	{"an agent of another version", func(_ *testing.T, f *Facts) { f.Reports[0].Status.AgentVersion = "v0" }, "versions", api.LevelWarn, []string{"v0 on n1", "rollout status"}},
	{"NVIDIA's plugin on a managed node", func(_ *testing.T, f *Facts) {
		f.Plugins = []corev1.Pod{plugin("n1", "nvdp-x", "registry/nvidia/k8s-device-plugin:v0.17")}
	}, "double-serving", api.LevelFail, []string{"NVIDIA's device plugin", "daemonset gpu/nvdp-x-ds", "carve.dev/managed NotIn"}},
	{"HAMi's plugin on a managed node", func(_ *testing.T, f *Facts) {
		f.Plugins = []corev1.Pod{plugin("n1", "x", "registry/projecthami/hami:v2.5")}
	}, "double-serving", api.LevelFail, []string{"HAMi's device plugin"}},
	{"HAMi's register on a managed node", func(_ *testing.T, f *Facts) { f.Nodes[0].Annotations = map[string]string{hamiRegister: "GPU-a,10"} }, "hami-node", api.LevelWarn, []string{"kubectl annotate node n1 hami.io/node-nvidia-register-"}},
	{"pods that were there before", func(_ *testing.T, f *Facts) {
		f.Foreign = []corev1.Pod{
			{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "old", UID: "1"}, Spec: corev1.PodSpec{NodeName: "n1"}},
			{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "older", UID: "2"}, Spec: corev1.PodSpec{NodeName: "n1"}},
			{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "elsewhere", UID: "3"}, Spec: corev1.PodSpec{NodeName: "n2"}},
			{ObjectMeta: metav1.ObjectMeta{Namespace: "team", Name: "local", UID: "4"}, Spec: corev1.PodSpec{NodeName: "n1"}},
		}
		f.Reports[0].Status.Cards[0].Slices = []v1alpha1.Slice{{PodUID: "4"}}
	}, "foreign-pods", api.LevelWarn, []string{"node n1", "2 pod(s)", "team/old, team/older", "kubectl drain n1"}},
	{"HAMi's webhook", func(_ *testing.T, f *Facts) {
		f.Webhooks = []admissionv1.MutatingWebhookConfiguration{{ObjectMeta: metav1.ObjectMeta{Name: "hami-webhook"}, Webhooks: []admissionv1.MutatingWebhook{{Name: hamiWebhookIs}}}}
	}, "hami-webhook", api.LevelWarn, []string{"hami.io/webhook=ignore"}},
	{"open namespaces", func(_ *testing.T, f *Facts) { f.Namespaces[0].Labels = nil }, "privileged", api.LevelWarn, []string{"team"}},
}

// entry is a configuration as carve writes it.
func entry(t *testing.T) []byte {
	t.Helper()
	b, err := schedconfig.Merge(nil, schedconfig.Options{URL: "https://10.0.0.1:443", TLSDir: "/etc/kubernetes/carve"})
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestPlantedFaultIsFound(t *testing.T) {
	for _, c := range faults {
		t.Run(c.name, func(t *testing.T) {
			f := healthy(t)
			c.plant(t, &f)
			found := false
			for _, got := range Check(f) {
				if got.Level == api.LevelOK {
					continue
				}
				if got.Check != c.check {
					t.Errorf("%s also speaks: %s", got.Check, got.What)
					continue
				}
				text := got.Where + "\n" + got.What + "\n" + got.Why + "\n" + got.Do
				all := got.Level == c.level
				for _, s := range c.says {
					all = all && strings.Contains(text, s)
				}
				found = found || all
			}
			if !found {
				t.Errorf("no %s of %s with %q in\n%+v", c.level, c.check, c.says, Check(f))
			}
		})
	}
}

// Whoever may read nothing is told so once, and not that all is well.
func TestNoRightsAtAll(t *testing.T) {
	f := healthy(t)
	blind := Facts{Namespace: f.Namespace, Version: f.Version, Now: f.Now, Expected: f.Expected, Unread: map[string]string{}, Forbidden: map[string]bool{}}
	keys := []string{readNodes, readReports, readPods, readDeployment, readSecret, readWebhooks, readClasses, readNamespaces}
	for _, o := range f.Expected {
		keys = append(keys, o.Key())
	}
	for _, k := range keys {
		blind.Unread[k], blind.Forbidden[k] = "unknown", true
	}
	all := Check(blind)
	if len(all) != 1 || api.Worst(all) != api.LevelFail {
		t.Fatalf("%d findings, the worst is %s: %+v", len(all), api.Worst(all), all)
	}
	for _, want := range []string{"you may not read", "ClusterRole,", "nodes, pods", "carve-viewer"} {
		if text := all[0].What + " " + all[0].Do; !strings.Contains(text, want) {
			t.Errorf("no %q in %q", want, text)
		}
	}
	// One that may be read is enough for no failure.
	delete(blind.Unread, readClasses)
	delete(blind.Forbidden, readClasses)
	if w := api.Worst(Check(blind)); w != api.LevelWarn {
		t.Errorf("with something read, the worst is %s", w)
	}
}

func TestRightThings(t *testing.T) {
	f := healthy(t)
	f.SchedulerConfigPath, f.SchedulerConfig = "/s.yaml", entry(t)
	f.Schedulers = []corev1.Pod{{Spec: corev1.PodSpec{Containers: []corev1.Container{{Command: []string{"kube-scheduler", "--config=/x"}}}}}}
	ownWebhook(&f, certificate(t, now.AddDate(1, 0, 0)))
	// Others beside carve, on nodes of their own, are no fault.
	f.Plugins = []corev1.Pod{plugin("n2", "x", "projecthami/hami"), plugin("n1", "network", "sriov")}
	f.Nodes[1].Annotations = map[string]string{hamiRegister: "x"}
	f.Classes = []nodev1.RuntimeClass{{ObjectMeta: metav1.ObjectMeta{Name: "nvidia"}, Handler: "nvidia"}}
	// A node that carve gave up, with a pod still on it.
	f.Nodes = append(f.Nodes, corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n3"}})
	f.Reports = append(f.Reports, v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: "n3"}, Status: v1alpha1.GPUNodeStatus{AgentVersion: "v1"}})
	// A pod that waits for room was asked about.
	f.Waiting = []corev1.Pod{{ObjectMeta: metav1.ObjectMeta{Name: "p", CreationTimestamp: metav1.NewTime(now.Add(-time.Hour))}}}
	for _, got := range Check(f) {
		if got.Level != api.LevelOK {
			t.Errorf("%+v", got)
		}
	}
}

func TestText(t *testing.T) {
	var b strings.Builder
	for _, c := range faults {
		f := healthy(t)
		c.plant(t, &f)
		fmt.Fprintf(&b, "# %s\n", c.name)
		for _, got := range Check(f) {
			if got.Check == c.check && got.Level != api.LevelOK {
				fmt.Fprintf(&b, "%s %s %s\n  %s\n  %s\n  %s\n", got.Level, got.Check, got.Where, got.What, got.Why, strings.ReplaceAll(got.Do, "\n", "\n  "))
			}
		}
	}
	path := filepath.Join("testdata", "findings.txt")
	if *update {
		if err := os.WriteFile(path, []byte(b.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got := b.String(); got != string(want) {
		t.Errorf("the findings' text changed (go test -run TestText -update):\n%s", got)
	}
}

// TestExpect: every manifest of a kind that is compared is found, and those of
// another namespace name its accounts.
func TestExpect(t *testing.T) {
	objects, err := Expect(manifests.Files, "elsewhere")
	if err != nil {
		t.Fatal(err)
	}
	kinds := map[string]int{}
	for _, o := range objects {
		kinds[o.Kind]++
		b, err := json.Marshal(o.Content)
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(string(b), api.Namespace) {
			t.Errorf("%s still names %s", o.Key(), api.Namespace)
		}
	}
	if kinds["CustomResourceDefinition"] < 1 || kinds["ValidatingAdmissionPolicy"] < 2 || kinds["ValidatingAdmissionPolicyBinding"] < kinds["ValidatingAdmissionPolicy"] || kinds["ClusterRole"] < 2 {
		t.Errorf("expected objects: %v", kinds)
	}
	for name, files := range map[string]fstest.MapFS{
		"no index":       {},
		"broken index":   {"kustomization.yaml": {Data: []byte("resources: 3")}},
		"a missing file": {"kustomization.yaml": {Data: []byte("resources: [a.yaml]")}},
		"a broken file":  {"kustomization.yaml": {Data: []byte("resources: [a.yaml]")}, "a.yaml": {Data: []byte("{")}},
	} {
		if _, err := Expect(files, "x"); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}
