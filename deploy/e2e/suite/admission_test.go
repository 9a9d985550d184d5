package suite

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/carve-gpu/carve/api"
)

// dryRun asks the API server for its verdict on a pod, without making it.
func dryRun(ctx context.Context, client kubernetes.Interface, p *corev1.Pod) (*corev1.Pod, error) {
	return client.CoreV1().Pods(p.Namespace).Create(ctx, p, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
}

// byPolicy says that a ValidatingAdmissionPolicy of ours refused, and its words.
func byPolicy(err error, name string) bool {
	return err != nil && strings.Contains(err.Error(), "ValidatingAdmissionPolicy '"+name+"'")
}

// parse is our parser's verdict on a pod as the API server would store it.
func parse(p *corev1.Pod) (api.Request, error) {
	var specs []api.ContainerSpec
	read := func(c corev1.Container, kind api.ContainerKind) {
		s := api.ContainerSpec{Name: c.Name, Kind: kind, Resources: map[string]string{}}
		for name, q := range c.Resources.Limits {
			s.Resources[string(name)] = q.String()
		}
		specs = append(specs, s)
	}
	for _, c := range p.Spec.InitContainers {
		read(c, api.Init)
	}
	for _, c := range p.Spec.Containers {
		read(c, api.App)
	}
	return api.ParseRequest(specs, p.Annotations)
}

// inNamespace makes a namespace with a label and removes it at the test's end.
func inNamespace(t *testing.T, name, label string) {
	t.Helper()
	n := &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{label: "true"}}}
	if _, err := cluster.Client.CoreV1().Namespaces().Create(t.Context(), n, metav1.CreateOptions{}); err != nil {
		t.Fatalf("make namespace %s: %v", name, err)
	}
	t.Cleanup(func() {
		if err := cluster.Client.CoreV1().Namespaces().Delete(context.Background(), name, metav1.DeleteOptions{}); err != nil {
			t.Error(err)
		}
	})
	eventually(t, "namespace "+name+" to have its service account", func(ctx context.Context) string {
		if _, err := cluster.Client.CoreV1().ServiceAccounts(name).Get(ctx, "default", metav1.GetOptions{}); err != nil {
			return err.Error()
		}
		return ""
	})
}

const someCard = "GPU-6f6e0a5b-1c39-4d5e-8f00-00000000000a"

// TestPoliciesCompile: the API server checks the expressions against the types,
// and says in the status what it doesn't like.
func TestPoliciesCompile(t *testing.T) {
	policies := cluster.Client.AdmissionregistrationV1().ValidatingAdmissionPolicies()
	eventually(t, "the policies to be checked", func(ctx context.Context) string {
		list, err := policies.List(ctx, metav1.ListOptions{LabelSelector: "app.kubernetes.io/part-of=carve"})
		if err != nil {
			return err.Error()
		}
		if len(list.Items) < 6 {
			return fmt.Sprintf("%d policies", len(list.Items))
		}
		for _, p := range list.Items {
			if p.Status.ObservedGeneration != p.Generation || p.Status.TypeChecking == nil {
				return p.Name + " isn't checked yet"
			}
			for _, w := range p.Status.TypeChecking.ExpressionWarnings {
				t.Errorf("%s: %s: %s", p.Name, w.FieldRef, w.Warning)
			}
		}
		return ""
	})
}

// TestImpossibleRequestsAreRefusedAtCreation: the refusal names field, value and
// what is allowed, in the policy's words as in the parser's.
func TestImpossibleRequestsAreRefusedAtCreation(t *testing.T) {
	for name, c := range map[string]struct {
		share       share
		annotations map[string]string
		want        []string
	}{
		"101 percent of compute":        {share{"gpucores": "101"}, nil, []string{"container app: nvidia.com/gpucores", `"101"`, "0 to 100 percent"}},
		"101 percent of memory":         {share{"gpumem-percentage": "101"}, nil, []string{"nvidia.com/gpumem-percentage", `"101"`, "1 to 100 percent"}},
		"17 cards":                      {share{"gpu": "17"}, nil, []string{"nvidia.com/gpu", `"17"`, "0 to 16 cards"}},
		"more memory than any card has": {share{"gpumem": "8G"}, nil, []string{"nvidia.com/gpumem", `"8G"`, "a number of MiB (8000)"}},
		"17 TiB":                        {share{"gpumem": "17Ti"}, nil, []string{"nvidia.com/gpumem", `"17Ti"`}},
		"memory in both ways":           {share{"gpumem": "1000", "gpumem-percentage": "10"}, nil, []string{"nvidia.com/gpumem-percentage", `"10"`, "not both"}},
		"a share of no card":            {share{"gpu": "0", "gpumem": "1000"}, nil, []string{"nvidia.com/gpu:", `"0"`, "1 or more beside a share"}},
		"no memory of a card":           {share{"gpu": "1", "gpumem": "0"}, nil, []string{"nvidia.com/gpumem", `"0"`, "leave it out"}},
		"an instance and a card":        {share{"gpu": "1", "mig-1g.10gb": "1"}, nil, []string{"nvidia.com/mig-*", "instances alone"}},
		"a third priority":              {share{"gpumem": "1000", "priority": "2"}, nil, []string{"nvidia.com/priority", `"2"`, "0 (high) or 1 (low)"}},
		"a mistyped annotation":         {share{"gpumem": "1000"}, map[string]string{"carve.dev/card-modles": "A100"}, []string{`"carve.dev/card-modles"`, "one of carve.dev/card-models, ", "carve.dev/isolation, carve.dev/managed-memory, carve.dev/oversell"}},
		"a mistyped one on a plain pod": {nil, map[string]string{"carve.dev/gpumem": "1000"}, []string{`"carve.dev/gpumem"`, "one of "}},
		"two cards under MPS":           {share{"gpu": "2", "gpumem": "1000"}, map[string]string{api.AnnotationIsolation: "mps"}, []string{"container app: nvidia.com/gpu", `"2"`, "1 card with isolation mps"}},
		"the same in HAMi's words":      {share{"gpu": "2"}, map[string]string{api.HAMiMode: "mps"}, []string{"container app: nvidia.com/gpu", `"2"`, "1 card with isolation mps"}},
		"an unknown isolation":          {share{"gpumem": "1000"}, map[string]string{api.AnnotationIsolation: "vm"}, []string{api.AnnotationIsolation, `"vm"`, "allowed is vgpu, mps, timeslice, exclusive"}},
		"a mode in capitals":            {share{"gpumem": "1000"}, map[string]string{api.AnnotationIsolation: "MPS"}, []string{"allowed is vgpu, mps, timeslice, exclusive (did you mean mps?)"}},
		"an unknown policy":             {share{"gpumem": "1000"}, map[string]string{api.AnnotationCardPolicy: "best"}, []string{api.AnnotationCardPolicy, `"best"`, "binpack, spread, topology"}},
		"a bare exclusion":              {share{"gpumem": "1000"}, map[string]string{api.AnnotationCardModels: "A100,!"}, []string{api.AnnotationCardModels, `"A100,!"`, "separated by commas"}},
		"nonsense for a UUID":           {share{"gpumem": "1000"}, map[string]string{api.AnnotationCardUUIDs: "gpu0"}, []string{api.AnnotationCardUUIDs, `"gpu0"`, "GPU-xxxxxxxx"}},
	} {
		t.Run(name, func(t *testing.T) {
			p := pod("impossible", container("app", c.share))
			p.Annotations = c.annotations
			_, err := dryRun(t.Context(), cluster.Client, p)
			if !byPolicy(err, "carve-request") || !strings.Contains(err.Error(), "is not allowed; allowed is") && !strings.Contains(err.Error(), "; allowed is ") {
				t.Fatalf("%v", err)
			}
			for _, w := range c.want {
				if !strings.Contains(err.Error(), w) {
					t.Errorf("%q isn't in %v", w, err)
				}
			}
		})
	}
	// These the API server refuses by itself.
	for name, s := range map[string]share{"a negative amount": {"gpucores": "-1"}, "half a card": {"gpu": "500m"}} {
		if _, err := dryRun(t.Context(), cluster.Client, pod("impossible", container("app", s))); err == nil {
			t.Errorf("%s was accepted", name)
		}
	}
	unequal := pod("impossible", container("app", share{"gpumem": "1000"}))
	unequal.Spec.Containers[0].Resources.Requests = corev1.ResourceList{api.ResourceMemory: resource.MustParse("500")}
	if _, err := dryRun(t.Context(), cluster.Client, unequal); err == nil {
		t.Error("a request below its limit was accepted")
	}
}

// TestAnnotationsAreCheckedWhenTheyChange: they may be written at any time, and
// what stood on a pod before stays.
func TestAnnotationsAreCheckedWhenTheyChange(t *testing.T) {
	p := pod("changing", container("app", share{"gpumem": "1000"}))
	p.Spec.SchedulerName = "nobody"
	create(t, p)
	annotate := func(key, value string) error {
		_, err := cluster.Client.CoreV1().Pods(ns).Patch(t.Context(), "changing", types.MergePatchType,
			fmt.Appendf(nil, `{"metadata":{"annotations":{%q:%q}}}`, key, value), metav1.PatchOptions{})
		return err
	}
	for key, value := range map[string]string{api.AnnotationCardPolicy: "best", "carve.dev/card-polcy": "spread", api.AnnotationCardUUIDs: "0"} {
		if err := annotate(key, value); !byPolicy(err, "carve-request") {
			t.Errorf("%s: %v", key, err)
		}
	}
	for key, value := range map[string]string{api.AnnotationCardPolicy: "spread", "example.com/x": "y"} {
		if err := annotate(key, value); err != nil {
			t.Errorf("%s: %v", key, err)
		}
	}
}

// any is one of the values, the first ones more often.
func pick[T any](r *rand.Rand, values ...T) T {
	return values[min(r.IntN(len(values)), r.IntN(len(values)))]
}

// annotationValues are what pods may say of each annotation, the likeliest first.
var annotationValues = map[string][]string{
	api.AnnotationIsolation:       {"vgpu", "exclusive", "mig", "mps", "timeslice", "vm", ""},
	api.AnnotationCardPolicy:      {"binpack", "spread", "topology", "best", "Spread"},
	api.AnnotationCompute:         {"elastic", "fixed", "soft"},
	api.AnnotationComputePriority: {"high", "low", "1"},
	api.AnnotationManagedMemory:   {"charge", "count", "forbid", "free"},
	api.AnnotationOversell:        {"host", "disk"},
	api.AnnotationCardModels:      {"A100", "A100,!H100", " A100 , ! H100", "A100,", "", "!", "! ", "a,,b", "!!"},
	api.AnnotationCardUUIDs:       {someCard, "!" + someCard, someCard + ", !" + strings.ToUpper(someCard), "0", someCard + ",", someCard[:39], "GPU-", "! " + someCard},
	api.HAMiMode:                  {"hami-core", "mig", "mps", "vm"},
	api.HAMiCardPolicy:            {"binpack", "spread", "topology-aware", "mutex", "best"},
	api.HAMiUseModel:              {"A100", "", ","},
	api.HAMiUseUUID:               {"0", someCard},
	"carve.dev/gpumem":            {"1"},
	"example.com/x":               {"y"},
}

// randomPod is a pod that may ask for anything.
func randomPod(r *rand.Rand) *corev1.Pod {
	amounts := map[string][]string{
		"gpu":               {"1", "2", "0", "16", "17", "1k"},
		"gpumem":            {"8000", "8Gi", "0", "16777216", "16777217", "16Ti", "16385Gi", "1Ki", "8e3", "1E", "0.5Gi", "17592186044417"},
		"gpumem-percentage": {"50", "0", "100", "101"},
		"gpucores":          {"30", "0", "100", "101", "1e2"},
		"priority":          {"0", "1", "2"},
		"mig-1g.10gb":       {"1", "0", "128", "129"},
	}
	random := func(name string) corev1.Container {
		s := share{}
		for _, k := range slices.Sorted(maps.Keys(amounts)) {
			if r.IntN(4) == 0 {
				s[k] = pick(r, amounts[k]...)
			}
		}
		return container(name, s)
	}
	p := pod("any", random("app"))
	if r.IntN(4) == 0 {
		p.Spec.Containers = append(p.Spec.Containers, random("other"))
	}
	if r.IntN(4) == 0 {
		p.Spec.InitContainers = append(p.Spec.InitContainers, random("init"))
	}
	p.Annotations = map[string]string{}
	for _, k := range slices.Sorted(maps.Keys(annotationValues)) {
		if r.IntN(9) == 0 {
			p.Annotations[k] = pick(r, annotationValues[k]...)
		}
	}
	return p
}

// sameVerdict compares the API server's verdict on many pods with the parser's.
//
// Listed differences: a mistyped annotation of ours is refused by the policy on
// pods that ask for nothing as well; the parser doesn't look at those.
func sameVerdict(t *testing.T, count int) {
	t.Helper()
	seed := uint64(os.Getpid())
	r := rand.New(rand.NewPCG(seed, 1))
	refused := 0
	for i := range count {
		p := randomPod(r)
		request, want := parse(p)
		_, err := dryRun(t.Context(), cluster.Client, p)
		if _, mistyped := p.Annotations["carve.dev/gpumem"]; mistyped && want == nil && request.Empty() {
			want = errors.New("mistyped")
		}
		if want != nil {
			refused++
		}
		if (err == nil) != (want == nil) || err != nil && !byPolicy(err, "carve-request") {
			t.Fatalf("seed %d, pod %d: limits %v, annotations %v\nparser: %v\nAPI server: %v", seed, i, amounts(p), p.Annotations, want, err)
		}
	}
	if refused < count/5 || refused > count*4/5 {
		t.Errorf("%d of %d pods were refused: the comparison says little", refused, count)
	}
	t.Logf("%d pods, %d refused, the same by both", count, refused)
}

// sameVerdictOnUpdates compares the verdicts on pods that were accepted and whose annotations
// are then added, changed and taken off.
func sameVerdictOnUpdates(t *testing.T, pods, updates int) {
	t.Helper()
	seed := uint64(os.Getpid())
	r := rand.New(rand.NewPCG(seed, 2))
	good := func() *corev1.Pod {
		for {
			p := randomPod(r)
			if request, err := parse(p); err == nil && !request.Empty() {
				return p
			}
		}
	}
	refused := 0
	for i := range pods {
		p := good()
		// Under another annotation than the one that counts anything may stand.
		for other, key := range map[string]string{api.AnnotationIsolation: api.HAMiMode, api.AnnotationCardPolicy: api.HAMiCardPolicy} {
			if _, counts := p.Annotations[other]; counts && r.IntN(2) == 0 {
				p.Annotations[key] = pick(r, "mps", "vm", "best", "mig", "spread")
			}
		}
		p.Name, p.Spec.SchedulerName = fmt.Sprint("updated-", i), "nobody"
		p = create(t, p)
		for range updates {
			next := p.DeepCopy()
			for _, key := range slices.Sorted(maps.Keys(annotationValues)) {
				switch r.IntN(6) {
				case 0:
					delete(next.Annotations, key)
				case 1:
					if next.Annotations == nil {
						next.Annotations = map[string]string{}
					}
					next.Annotations[key] = pick(r, annotationValues[key]...)
				}
			}
			_, want := parse(next)
			_, err := cluster.Client.CoreV1().Pods(ns).Update(t.Context(), next, metav1.UpdateOptions{DryRun: []string{metav1.DryRunAll}})
			if want != nil {
				refused++
			}
			if (err == nil) != (want == nil) || err != nil && !byPolicy(err, "carve-request") {
				t.Fatalf("seed %d, pod %d: limits %v, annotations %v, before %v\nparser: %v\nAPI server: %v", seed, i, amounts(p), next.Annotations, p.Annotations, want, err)
			}
		}
		remove(t, p.Name)
	}
	if all := pods * updates; refused < all/20 || refused > all*19/20 {
		t.Errorf("%d of %d updates were refused: the comparison says little", refused, all)
	}
	t.Logf("%d updates of %d pods, %d refused, the same by both", pods*updates, pods, refused)
}

func amounts(p *corev1.Pod) (out []string) {
	for _, c := range append(slices.Clone(p.Spec.InitContainers), p.Spec.Containers...) {
		for name, q := range c.Resources.Limits {
			out = append(out, c.Name+" "+string(name)+" "+q.String())
		}
	}
	return out
}

// TestPolicyAndParserAgree: what api.ParseRequest refuses, the policies refuse, and
// what it accepts, they accept, when a pod is made and when its annotations change.
func TestPolicyAndParserAgree(t *testing.T) {
	count, pods := 500, 10
	if os.Getenv("CARVE_E2E_LONG") != "" {
		count, pods = 10000, 200
	}
	sameVerdict(t, count)
	sameVerdictOnUpdates(t, pods, 30)
}

// TestPrivilegedSharesAreRefused by policy, where the namespace doesn't allow it.
func TestPrivilegedSharesAreRefused(t *testing.T) {
	inNamespace(t, "allow-privileged", api.LabelAllowPrivileged)
	privileged := func(name string, s share, annotations map[string]string) *corev1.Pod {
		yes := true
		p := pod(name, container("app", s))
		p.Annotations = annotations
		p.Spec.Containers[0].SecurityContext = &corev1.SecurityContext{Privileged: &yes}
		return p
	}
	beside := pod("beside", container("app", share{"gpumem": "1000"}), privileged("", nil, nil).Spec.Containers[0])
	beside.Spec.Containers[1].Name = "helper"
	elsewhere := privileged("elsewhere", share{"gpumem": "1000"}, nil)
	elsewhere.Namespace = "allow-privileged"
	for name, c := range map[string]struct {
		pod  *corev1.Pod
		good bool
	}{
		"a share":                          {privileged("p", share{"gpumem": "1000"}, nil), false},
		"compute only":                     {privileged("p", share{"gpucores": "10"}, nil), false},
		"a whole card through the library": {privileged("p", share{"gpu": "1"}, map[string]string{api.AnnotationIsolation: "vgpu"}), false},
		"the same in HAMi's words":         {privileged("p", share{"gpu": "1"}, map[string]string{api.HAMiMode: "hami-core"}), false},
		"a replica":                        {privileged("p", share{"gpu": "1"}, map[string]string{api.AnnotationIsolation: "timeslice"}), false},
		"a replica in HAMi's words":        {privileged("p", share{"gpu": "1"}, map[string]string{api.HAMiMode: "mps"}), false},
		"a whole card":                     {privileged("p", share{"gpu": "1"}, nil), true},
		"a share with a card of its own":   {privileged("p", share{"gpumem": "1000"}, map[string]string{api.AnnotationIsolation: "exclusive"}), true},
		"nothing":                          {privileged("p", nil, nil), true},
		"another container of the pod":     {beside, true},
		"a namespace that allows it":       {elsewhere, true},
	} {
		_, err := dryRun(t.Context(), cluster.Client, c.pod)
		if c.good && err != nil || !c.good && (!byPolicy(err, "carve-privileged") || !strings.Contains(err.Error(), api.LabelAllowPrivileged)) {
			t.Errorf("%s: %v", name, err)
		}
	}

	// What was none becomes a share by an annotation that is taken off, or put on.
	for name, c := range map[string]struct {
		pod   *corev1.Pod
		patch string
		good  bool
	}{
		"a card of its own becomes a share": {privileged("own", share{"gpumem": "1000"}, map[string]string{api.AnnotationIsolation: "exclusive"}), `{"carve.dev/isolation":null}`, false},
		"a whole card becomes a replica":    {privileged("whole", share{"gpu": "1"}, nil), `{"carve.dev/isolation":"mps"}`, false},
		"an annotation that is no matter":   {privileged("other", share{"gpu": "1"}, nil), `{"carve.dev/card-policy":"spread"}`, true},
		"where the namespace allows it, too": {func() *corev1.Pod {
			p := privileged("let", share{"gpu": "1"}, nil)
			p.Namespace = "allow-privileged"
			return p
		}(), `{"carve.dev/isolation":"mps"}`, true},
	} {
		c.pod.Spec.SchedulerName = "nobody"
		if c.pod.Namespace == ns {
			create(t, c.pod)
		} else if _, err := cluster.Client.CoreV1().Pods(c.pod.Namespace).Create(t.Context(), c.pod, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		_, err := cluster.Client.CoreV1().Pods(c.pod.Namespace).Patch(t.Context(), c.pod.Name, types.MergePatchType, fmt.Appendf(nil, `{"metadata":{"annotations":%s}}`, c.patch), metav1.PatchOptions{DryRun: []string{metav1.DryRunAll}})
		if c.good && err != nil || !c.good && !byPolicy(err, "carve-privileged") {
			t.Errorf("%s: %v", name, err)
		}
	}

	p := pod("debugged", container("app", share{"gpumem": "1000"}))
	p.Spec.SchedulerName = "nobody"
	create(t, p)
	debug := func(name string, privileged bool) error {
		_, err := cluster.Client.CoreV1().Pods(ns).Patch(t.Context(), "debugged", types.StrategicMergePatchType,
			fmt.Appendf(nil, `{"spec":{"ephemeralContainers":[{"name":%q,"image":%q,"securityContext":{"privileged":%t}}]}}`, name, probeImage, privileged),
			metav1.PatchOptions{}, "ephemeralcontainers")
		return err
	}
	if err := debug("root", true); !byPolicy(err, "carve-privileged") {
		t.Errorf("a privileged debug container: %v", err)
	}
	if err := debug("user", false); err != nil {
		t.Errorf("a debug container: %v", err)
	}
}

// TestNodeNameIsRefused: share-10, for pods that come past the scheduler. Mirrors of
// static pods, and pods that ask for nothing, aren't meant.
func TestNodeNameIsRefused(t *testing.T) {
	inNamespace(t, "allow-node-name", api.LabelAllowNodeName)
	node := cluster.Lab.Config().Node.Name
	named := func(s share) *corev1.Pod {
		p := pod("named", container("app", s))
		p.Spec.NodeName = node
		return p
	}
	elsewhere := named(share{"gpumem": "1000"})
	elsewhere.Namespace = "allow-node-name"
	mirror := named(share{"gpumem": "1000"})
	mirror.Annotations = map[string]string{corev1.MirrorPodAnnotationKey: "x"}
	init := pod("named", container("app", nil))
	init.Spec.InitContainers = named(share{"gpu": "1"}).Spec.Containers
	init.Spec.InitContainers[0].Name, init.Spec.NodeName = "init", node
	for name, c := range map[string]struct {
		pod  *corev1.Pod
		good bool
	}{
		"a share":                          {named(share{"gpumem": "1000"}), false},
		"a card":                           {named(share{"gpu": "1"}), false},
		"an instance":                      {named(share{"mig-1g.10gb": "1"}), false},
		"a card for an init container":     {init, false},
		"a user's pod that plays a mirror": {mirror, false},
		"nothing":                          {named(nil), true},
		"nothing of ours":                  {named(share{"gpu": "0"}), true},
		"a namespace that allows it":       {elsewhere, true},
	} {
		_, err := dryRun(t.Context(), cluster.Client, c.pod)
		if c.good && err != nil || !c.good && (!byPolicy(err, "carve-node-name") || !strings.Contains(err.Error(), api.LabelAllowNodeName)) {
			t.Errorf("%s: %v", name, err)
		}
	}
	config, err := cluster.Lab.RESTConfig()
	if err != nil {
		t.Fatal(err)
	}
	config = rest.CopyConfig(config)
	config.Impersonate = rest.ImpersonationConfig{UserName: "system:node:" + node, Groups: []string{"system:nodes"}}
	kubelet, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := dryRun(t.Context(), kubelet, mirror); err != nil && (strings.Contains(err.Error(), "ValidatingAdmissionPolicy") || !apierrors.IsForbidden(err)) {
		t.Errorf("a node's mirror: %v", err)
	}
}

// TestCDIAnnotationsAreRefused, on each path by which one reaches a pod.
func TestCDIAnnotationsAreRefused(t *testing.T) {
	inNamespace(t, "allow-cdi", api.LabelAllowCDI)
	with := func(key, value string) *corev1.Pod {
		p := pod("cdi", container("app", nil))
		p.Annotations = map[string]string{key: value}
		return p
	}
	elsewhere := with("nvidia.cdi.k8s.io/container.app", "nvidia.com/gpu=all")
	elsewhere.Namespace = "allow-cdi"
	for name, c := range map[string]struct {
		pod  *corev1.Pod
		good bool
	}{
		"NVIDIA's plugin":            {with("nvidia.cdi.k8s.io/container.app", "management.nvidia.com/gpu=all"), false},
		"the runtime":                {with("cdi.k8s.io/app", "nvidia.com/gpu=0"), false},
		"another vendor's device":    {with("cdi.k8s.io/app", "vendor.com/nic=0"), true},
		"a namespace that allows it": {elsewhere, true},
	} {
		_, err := dryRun(t.Context(), cluster.Client, c.pod)
		if c.good && err != nil || !c.good && (!byPolicy(err, "carve-cdi") || !strings.Contains(err.Error(), api.LabelAllowCDI)) {
			t.Errorf("%s: %v", name, err)
		}
	}
	p := pod("cdi", container("app", nil))
	p.Spec.SchedulerName = "nobody"
	p = create(t, p)
	patch := []byte(`{"metadata":{"annotations":{"nvidia.cdi.k8s.io/pod":"nvidia.com/gpu=all"}}}`)
	for _, sub := range [][]string{nil, {"status"}} {
		_, err := cluster.Client.CoreV1().Pods(ns).Patch(t.Context(), "cdi", types.MergePatchType, patch, metav1.PatchOptions{}, sub...)
		if !byPolicy(err, "carve-cdi") {
			t.Errorf("patch of %v: %v", sub, err)
		}
	}
	err := cluster.Client.CoreV1().Pods(ns).Bind(t.Context(), &corev1.Binding{
		ObjectMeta: metav1.ObjectMeta{Name: "cdi", Namespace: ns, UID: p.UID, Annotations: map[string]string{"nvidia.cdi.k8s.io/pod": "nvidia.com/gpu=all"}},
		Target:     corev1.ObjectReference{Kind: "Node", Name: cluster.Lab.Config().Node.Name},
	}, metav1.CreateOptions{})
	if !byPolicy(err, "carve-cdi") {
		t.Errorf("binding: %v", err)
	}
}
