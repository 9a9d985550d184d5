package simulate

import (
	"bufio"
	"errors"
	"fmt"
	"io"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/kubernetes/scheme"
)

// MaxPods is how many pods one file may stand for.
const MaxPods = 100_000

// Read reads a file of YAML or JSON documents, and returns the pods that Kubernetes would make
// of them: of a Pod itself, of a Deployment, ReplicaSet, StatefulSet, ReplicationController its
// replicas, of a Job those that run at a time. Objects of other kinds are named in skipped.
// namespace is that of objects that name none.
func Read(in io.Reader, namespace string) (pods []*corev1.Pod, skipped []string, err error) {
	documents := yaml.NewYAMLReader(bufio.NewReader(in))
	for n := 1; ; n++ {
		text, err := documents.Read()
		if errors.Is(err, io.EOF) {
			return pods, skipped, nil
		}
		if err != nil {
			return nil, nil, fmt.Errorf("document %d: %w", n, err)
		}
		raw, err := yaml.ToJSON(text)
		if err != nil {
			return nil, nil, fmt.Errorf("document %d: %w", n, err)
		}
		if string(raw) == "null" {
			continue
		}
		o, kind, err := scheme.Codecs.UniversalDeserializer().Decode(raw, nil, nil)
		if runtime.IsNotRegisteredError(err) {
			skipped = append(skipped, fmt.Sprintf("document %d: %s", n, kind.Kind))
			continue
		}
		if err != nil {
			return nil, nil, fmt.Errorf("document %d: %w", n, err)
		}
		made, known := podsOf(o)
		if !known {
			skipped = append(skipped, fmt.Sprintf("document %d: %s", n, kind.Kind))
			continue
		}
		if len(pods)+made.count > MaxPods {
			return nil, nil, fmt.Errorf("document %d: more than %d pods in all", n, MaxPods)
		}
		for i := range made.count {
			pods = append(pods, made.pod(i, namespace))
		}
	}
}

// template is what an object makes pods of.
type template struct {
	kind  string // empty for a pod itself
	meta  metav1.ObjectMeta
	pod1  metav1.ObjectMeta
	spec  corev1.PodSpec
	count int
}

func podsOf(o runtime.Object) (template, bool) {
	of := func(kind string, meta metav1.ObjectMeta, t corev1.PodTemplateSpec, replicas *int32) (template, bool) {
		n := 1
		if replicas != nil {
			n = int(max(0, *replicas))
		}
		return template{kind, meta, t.ObjectMeta, t.Spec, n}, true
	}
	switch o := o.(type) {
	case *corev1.Pod:
		return template{"", o.ObjectMeta, o.ObjectMeta, o.Spec, 1}, true
	case *appsv1.Deployment:
		return of("ReplicaSet", o.ObjectMeta, o.Spec.Template, o.Spec.Replicas)
	case *appsv1.ReplicaSet:
		return of("ReplicaSet", o.ObjectMeta, o.Spec.Template, o.Spec.Replicas)
	case *appsv1.StatefulSet:
		return of("StatefulSet", o.ObjectMeta, o.Spec.Template, o.Spec.Replicas)
	case *corev1.ReplicationController:
		if o.Spec.Template == nil {
			return template{}, true
		}
		return of("ReplicationController", o.ObjectMeta, *o.Spec.Template, o.Spec.Replicas)
	case *batchv1.Job:
		n := o.Spec.Parallelism
		if c := o.Spec.Completions; c != nil && (n == nil || *c < *n) && (n != nil || *c < 1) {
			n = c
		}
		return of("Job", o.ObjectMeta, o.Spec.Template, n)
	}
	return template{}, false
}

// pod is the i-th of them, with a made-up UID.
func (t template) pod(i int, namespace string) *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: *t.pod1.DeepCopy(), Spec: *t.spec.DeepCopy()}
	if p.Namespace = t.meta.Namespace; p.Namespace == "" {
		p.Namespace = namespace
	}
	p.Name, p.GenerateName = t.meta.Name, ""
	if p.Name == "" {
		p.Name = t.meta.GenerateName + "0"
	}
	if t.kind != "" {
		p.Name = fmt.Sprintf("%s-%d", p.Name, i)
		yes := true
		p.OwnerReferences = []metav1.OwnerReference{{Kind: t.kind, Name: t.meta.Name, UID: types.UID("simulated " + t.kind + " " + p.Namespace + "/" + t.meta.Name), Controller: &yes}}
	}
	p.UID = types.UID("simulated " + p.Namespace + "/" + p.Name)
	p.Spec.NodeName, p.Spec.SchedulingGates = "", nil
	return p
}
