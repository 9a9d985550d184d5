package admission_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"pgregory.net/rapid"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/scheduler-extender/admission"
)

// apply does what the API server does with a patch of "add" and "remove".
func apply(t interface {
	Helper()
	Fatalf(string, ...any)
}, p *corev1.Pod, patch []admission.Operation) *corev1.Pod {
	t.Helper()
	raw, err := json.Marshal(p)
	if err != nil {
		t.Fatalf("%v", err)
	}
	var tree any
	if err := json.Unmarshal(raw, &tree); err != nil {
		t.Fatalf("%v", err)
	}
	if raw, err = json.Marshal(patch); err != nil {
		t.Fatalf("%v", err)
	}
	patch = nil
	if err := json.Unmarshal(raw, &patch); err != nil {
		t.Fatalf("%v", err)
	}
	for _, o := range patch {
		parts := strings.Split(strings.TrimPrefix(o.Path, "/"), "/")
		at := tree
		for _, part := range parts[:len(parts)-1] {
			if list, ok := at.([]any); ok {
				i, err := strconv.Atoi(part)
				if err != nil || i >= len(list) {
					t.Fatalf("%s: no element %s", o.Path, part)
				}
				at = list[i]
				continue
			}
			next, ok := at.(map[string]any)[part]
			if !ok {
				t.Fatalf("%s: there is no %s", o.Path, part)
			}
			at = next
		}
		last := strings.ReplaceAll(strings.ReplaceAll(parts[len(parts)-1], "~1", "/"), "~0", "~")
		object := at.(map[string]any)
		switch _, there := object[last]; {
		case o.Op == "add":
			object[last] = o.Value
		case o.Op == "remove" && there:
			delete(object, last)
		default:
			t.Fatalf("%+v can't be applied", o)
		}
	}
	if raw, err = json.Marshal(tree); err != nil {
		t.Fatalf("%v", err)
	}
	out := &corev1.Pod{}
	if err := json.Unmarshal(raw, out); err != nil {
		t.Fatalf("%v", err)
	}
	return out
}

// list makes amounts from alternating short names and quantities.
func list(kv ...string) corev1.ResourceList {
	out := corev1.ResourceList{}
	for i := 0; i < len(kv); i += 2 {
		out[corev1.ResourceName(kv[i])] = resource.MustParse(kv[i+1])
	}
	return out
}

// pod asks for the same in limits and requests, as the API server shows it.
func pod(kv ...string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "p"},
		Spec: corev1.PodSpec{SchedulerName: "default-scheduler", Containers: []corev1.Container{{Name: "app",
			Resources: corev1.ResourceRequirements{Limits: list(kv...), Requests: list(kv...)}}}},
	}
}

func with(p *corev1.Pod, change func(*corev1.Pod)) *corev1.Pod {
	change(p)
	return p
}

func annotated(p *corev1.Pod, kv ...string) *corev1.Pod {
	p.Annotations = map[string]string{}
	for i := 0; i < len(kv); i += 2 {
		p.Annotations[kv[i]] = kv[i+1]
	}
	return p
}

func TestMutate(t *testing.T) {
	const mem, gpu, cores = api.ResourceMemory, api.ResourceGPU, api.ResourceCores
	second := admission.Options{SchedulerName: "carve-scheduler"}
	env := func(value string) func(*corev1.Pod) {
		return func(p *corev1.Pod) {
			p.Spec.Containers[0].Env = []corev1.EnvVar{{Name: "GPU_CORE_UTILIZATION_POLICY", Value: value}}
		}
	}
	setup := func(of *corev1.Pod) func(*corev1.Pod) {
		return func(p *corev1.Pod) {
			p.Spec.InitContainers = of.Spec.Containers
			p.Spec.InitContainers[0].Name = "setup"
		}
	}
	onNode := func(p *corev1.Pod) { p.Spec.NodeName = "n1" }
	for name, c := range map[string]struct {
		in, want *corev1.Pod
		options  admission.Options
		warnings []string // parts of them
	}{
		"a pod that asks for nothing":        {in: pod("cpu", "1"), want: pod("cpu", "1"), options: second},
		"a whole card":                       {in: pod(gpu, "1"), want: pod(gpu, "1")},
		"a share without a card gets one":    {in: pod(mem, "8000"), want: pod(mem, "8000", gpu, "1")},
		"so does compute":                    {in: pod(cores, "30"), want: pod(cores, "30", gpu, "1")},
		"a share with cards keeps them":      {in: pod(mem, "8000", gpu, "2"), want: pod(mem, "8000", gpu, "2")},
		"an instance gets no card":           {in: pod("nvidia.com/mig-1g.10gb", "1"), want: pod("nvidia.com/mig-1g.10gb", "1"), warnings: []string{"no node will take the pod"}},
		"a misspelt resource is warned of":   {in: pod(gpu, "1", "nvidia.com/gpucore", "30"), want: pod(gpu, "1", "nvidia.com/gpucore", "30"), warnings: []string{"did you mean nvidia.com/gpucores?"}},
		"also alone":                         {in: pod("nvidia.com/gpumen", "30"), want: pod("nvidia.com/gpumen", "30"), warnings: []string{"did you mean nvidia.com/gpumem?"}},
		"a share that takes a card whole":    {in: annotated(pod(gpu, "1", mem, "1000"), api.AnnotationIsolation, "exclusive"), want: annotated(pod(gpu, "1", mem, "1000"), api.AnnotationIsolation, "exclusive"), warnings: []string{"gives a whole card"}},
		"bytes become MiB":                   {in: pod(mem, "10Gi", gpu, "1"), want: pod(mem, "10240", gpu, "1")},
		"a part of a MiB is a whole one":     {in: pod(mem, "1Ki", gpu, "1"), want: pod(mem, "1", gpu, "1"), warnings: []string{"1 MiB may not hold"}},
		"MiB stay":                           {in: pod(mem, "8k", gpu, "1"), want: pod(mem, "8k", gpu, "1")},
		"a small share is warned of":         {in: pod(mem, "100", gpu, "1"), want: pod(mem, "100", gpu, "1"), warnings: []string{"100 MiB may not hold"}},
		"what can't be meant stays":          {in: pod(mem, "17Ti"), want: pod(mem, "17Ti")},
		"a share of no card stays":           {in: pod(mem, "10Gi", gpu, "0"), want: pod(mem, "10Gi", gpu, "0")},
		"what isn't served is warned of":     {in: annotated(pod(gpu, "1"), api.AnnotationIsolation, "mig"), want: annotated(pod(gpu, "1"), api.AnnotationIsolation, "mig"), warnings: []string{"isolation \"mig\" is not served"}},
		"HAMi's annotations stay":            {in: annotated(pod(gpu, "1"), api.HAMiUseModel, "A100"), want: annotated(pod(gpu, "1"), api.HAMiUseModel, "A100")},
		"share-14: a copied grant goes":      {in: annotated(pod("cpu", "1"), api.AnnotationGrant, "{}", "x", "y"), want: annotated(pod("cpu", "1"), "x", "y"), warnings: []string{api.AnnotationGrant}},
		"and all else that speaks of others": {in: annotated(pod("cpu", "1"), api.AnnotationResize, "a", api.AnnotationResizeResult, "b", api.AnnotationWake, "c"), want: annotated(pod("cpu", "1")), warnings: []string{"resize", "resize-result", "wake"}},
		"with the grant goes the node":       {in: with(annotated(pod(gpu, "1"), api.AnnotationGrant, "{}"), onNode), want: annotated(pod(gpu, "1")), warnings: []string{"grant", "spec.nodeName"}},
		"without one it stays":               {in: with(pod(gpu, "1"), onNode), want: with(pod(gpu, "1"), onNode)},
		"a mirror is left alone": {
			in:   with(annotated(pod(gpu, "1"), api.AnnotationGrant, "{}", corev1.MirrorPodAnnotationKey, "x"), onNode),
			want: with(annotated(pod(gpu, "1"), api.AnnotationGrant, "{}", corev1.MirrorPodAnnotationKey, "x"), onNode)},
		"a scheduler of its own":             {in: pod(gpu, "1"), want: with(pod(gpu, "1"), func(p *corev1.Pod) { p.Spec.SchedulerName = "carve-scheduler" }), options: second},
		"a scheduler that the pod names":     {in: with(pod(gpu, "1"), func(p *corev1.Pod) { p.Spec.SchedulerName = "other" }), want: with(pod(gpu, "1"), func(p *corev1.Pod) { p.Spec.SchedulerName = "other" }), options: second},
		"HAMi's hard cap":                    {in: with(pod(gpu, "1", cores, "10"), env("force")), want: annotated(with(pod(gpu, "1", cores, "10"), env("force")), api.AnnotationCompute, "fixed")},
		"HAMi's hard cap beside our words":   {in: annotated(with(pod(gpu, "1", cores, "10"), env("force")), api.AnnotationCompute, "elastic"), want: annotated(with(pod(gpu, "1", cores, "10"), env("force")), api.AnnotationCompute, "elastic")},
		"HAMi's no cap is warned of":         {in: with(pod(gpu, "1", cores, "10"), env("disable")), want: with(pod(gpu, "1", cores, "10"), env("disable")), warnings: []string{"isn't honoured"}},
		"oversold whole cards are warned of": {in: annotated(pod(gpu, "1"), api.AnnotationOversell, "host"), want: annotated(pod(gpu, "1"), api.AnnotationOversell, "host"), warnings: []string{"carve.dev/oversell has no effect"}},
		"oversold shares aren't":             {in: annotated(pod(gpu, "1", mem, "8000"), api.AnnotationOversell, "host", api.AnnotationManagedMemory, "count"), want: annotated(pod(gpu, "1", mem, "8000"), api.AnnotationOversell, "host", api.AnnotationManagedMemory, "count")},
		"init containers too": {
			in:   with(pod("cpu", "1"), setup(pod(mem, "1Gi"))),
			want: with(pod("cpu", "1"), setup(pod(mem, "1024", gpu, "1")))},
	} {
		t.Run(name, func(t *testing.T) {
			change := admission.Mutate(c.in, c.options)
			got, _ := json.Marshal(apply(t, c.in, change.Patch))
			want, _ := json.Marshal(apply(t, c.want, nil))
			if len(c.want.Annotations) == 0 {
				got = []byte(strings.Replace(string(got), `"annotations":{},`, "", 1))
			}
			if string(got) != string(want) {
				t.Errorf("%s\nwant %s", got, want)
			}
			if len(change.Warnings) != len(c.warnings) {
				t.Fatalf("warnings %q", change.Warnings)
			}
			for _, w := range c.warnings {
				if !slices.ContainsFunc(change.Warnings, func(s string) bool { return strings.Contains(s, w) }) {
					t.Errorf("no warning of %q in %q", w, change.Warnings)
				}
			}
		})
	}
}

// Whatever the pod: the change can be applied, isn't needed twice, leaves what the
// pod asks for as it was, and never touches a pod that asks for nothing.
func TestMutateProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		amounts := map[string][]string{
			api.ResourceGPU: {"0", "1", "2", "17"}, api.ResourceMemory: {"0", "100", "8000", "8Gi", "1Ki", "17Ti"},
			api.ResourceMemoryPercent: {"0", "50"}, api.ResourceCores: {"0", "30", "101"}, "nvidia.com/mig-1g.10gb": {"1"}, "cpu": {"1"},
		}
		container := func(name string) corev1.Container {
			c := corev1.Container{Name: name}
			for _, k := range slices.Sorted(maps.Keys(amounts)) {
				if rapid.IntRange(0, 3).Draw(t, "has "+k) > 0 {
					continue
				}
				if c.Resources.Limits == nil {
					c.Resources = corev1.ResourceRequirements{Limits: corev1.ResourceList{}, Requests: corev1.ResourceList{}}
				}
				q := resource.MustParse(rapid.SampledFrom(amounts[k]).Draw(t, k))
				c.Resources.Limits[corev1.ResourceName(k)], c.Resources.Requests[corev1.ResourceName(k)] = q, q
			}
			if rapid.Bool().Draw(t, "env") {
				c.Env = []corev1.EnvVar{{Name: "GPU_CORE_UTILIZATION_POLICY", Value: rapid.SampledFrom([]string{"force", "disable", "default"}).Draw(t, "policy")}}
			}
			return c
		}
		p := &corev1.Pod{Spec: corev1.PodSpec{Containers: []corev1.Container{container("a"), container("b")}, InitContainers: []corev1.Container{container("c")}}}
		for _, k := range append(api.OwnAnnotations(), api.AnnotationIsolation, "x/y") {
			if rapid.IntRange(0, 3).Draw(t, "annotation "+k) == 0 {
				metav1.SetMetaDataAnnotation(&p.ObjectMeta, k, rapid.SampledFrom([]string{"vgpu", "exclusive", "z"}).Draw(t, k))
			}
		}
		o := admission.Options{SchedulerName: rapid.SampledFrom([]string{"", "carve-scheduler"}).Draw(t, "scheduler")}
		out := apply(t, p, admission.Mutate(p, o).Patch)
		if again := admission.Mutate(out, o); len(again.Patch) > 0 {
			t.Fatalf("changed twice: %+v", again.Patch)
		}
		before, err := request(p)
		after, errAfter := request(out)
		if fmt.Sprint(err) != fmt.Sprint(errAfter) {
			t.Fatalf("verdict %v, then %v", err, errAfter)
		}
		before.Fixed, after.Fixed = false, false
		if !reflect.DeepEqual(before, after) {
			t.Fatalf("asks for %+v, then %+v", before, after)
		}
		for _, key := range api.OwnAnnotations() {
			if _, ok := out.Annotations[key]; ok {
				t.Fatalf("%s is still there", key)
			}
		}
		if err == nil && before.Empty() {
			for _, change := range admission.Mutate(p, o).Patch {
				if change.Op != "remove" || !strings.HasPrefix(change.Path, "/metadata/annotations/carve.dev~1") {
					t.Fatalf("%+v on a pod that asks for nothing", change)
				}
			}
		}
	})
}

func request(p *corev1.Pod) (api.Request, error) {
	var specs []api.ContainerSpec
	for i, c := range append(slices.Clone(p.Spec.InitContainers), p.Spec.Containers...) {
		s := api.ContainerSpec{Name: c.Name, Resources: map[string]string{}}
		if i < len(p.Spec.InitContainers) {
			s.Kind = api.Init
		}
		for k, q := range c.Resources.Limits {
			s.Resources[string(k)] = q.String()
		}
		specs = append(specs, s)
	}
	return api.ParseRequest(specs, p.Annotations)
}

// The manifest decides which pods are sent here: none with an annotation to take off
// may be missed.
func TestManifestNamesWhatIsTakenOff(t *testing.T) {
	text, err := os.ReadFile("../../deploy/manifests/webhook.yaml")
	if err != nil {
		t.Fatal(err)
	}
	_, list, found := strings.Cut(string(text), "k in [")
	list, _, _ = strings.Cut(list, "]")
	if got := regexp.MustCompile(`carve\.dev/[a-z-]+`).FindAllString(list, -1); !found || !slices.Equal(got, api.OwnAnnotations()) {
		t.Errorf("%q", got)
	}
}
