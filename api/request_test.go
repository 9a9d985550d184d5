package api_test

import (
	"errors"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/carve-gpu/carve/api"
)

// res is a container's limits from alternating names and quantities.
func res(kv ...string) map[string]string {
	m := map[string]string{}
	for i := 0; i < len(kv); i += 2 {
		m[kv[i]] = kv[i+1]
	}
	return m
}

func app(kv ...string) []api.ContainerSpec {
	return []api.ContainerSpec{{Name: "app", Resources: res(kv...)}}
}

func one(c api.ContainerRequest) api.Request {
	c.Name = "app"
	return api.Request{Containers: []api.ContainerRequest{c}}
}

const (
	cardA = "GPU-6f6e0a5b-1c39-4d5e-8f00-00000000000a"
	cardB = "GPU-6F6E0A5B-1C39-4D5E-8F00-00000000000B"
)

func TestParseRequest(t *testing.T) {
	whole := func(n int) api.Request { return one(api.ContainerRequest{Cards: n, Whole: true}) }
	share := one(api.ContainerRequest{Cards: 1, MemMiB: 8000})
	with := func(r api.Request, f func(*api.Request)) api.Request { f(&r); return r }
	for name, c := range map[string]struct {
		containers  []api.ContainerSpec
		annotations map[string]string
		want        api.Request
	}{
		"HAMi's manifest":                                  {app("nvidia.com/gpu", "1", "nvidia.com/gpumem", "8k", "nvidia.com/gpucores", "30"), nil, one(api.ContainerRequest{Cards: 1, MemMiB: 8000, Cores: 30})},
		"a card alone is a whole card":                     {app("nvidia.com/gpu", "2"), nil, whole(2)},
		"a share alone is of one card":                     {app("nvidia.com/gpumem", "8000"), nil, share},
		"compute alone is of one card with all its memory": {app("nvidia.com/gpucores", "30"), nil, one(api.ContainerRequest{Cards: 1, Cores: 30})},
		"memory by percent":                                {app("nvidia.com/gpu", "1", "nvidia.com/gpumem-percentage", "50"), nil, one(api.ContainerRequest{Cards: 1, MemPercent: 50})},
		"no compute is no share":                           {app("nvidia.com/gpu", "1", "nvidia.com/gpucores", "0"), nil, whole(1)},
		"zero cards is nothing":                            {app("nvidia.com/gpu", "0"), nil, api.Request{}},
		"nothing, whatever the annotations say":            {app("cpu", "1"), map[string]string{api.AnnotationIsolation: "nonsense"}, api.Request{}},
		"instances":                                        {app("nvidia.com/mig-1g.10gb", "2"), nil, one(api.ContainerRequest{MIG: map[string]int{"1g.10gb": 2}})},
		"low priority by resource":                         {app("nvidia.com/gpumem", "8000", "nvidia.com/priority", "1"), nil, with(share, func(r *api.Request) { r.LowPriority = true })},
		"our annotation beats the resource":                {app("nvidia.com/gpumem", "8000", "nvidia.com/priority", "1"), map[string]string{api.AnnotationComputePriority: "high"}, share},
		"a hard cap":                                       {app("nvidia.com/gpumem", "8000"), map[string]string{api.AnnotationCompute: "fixed"}, with(share, func(r *api.Request) { r.Fixed = true })},
		"managed memory is counted":                        {app("nvidia.com/gpumem", "8000"), map[string]string{api.AnnotationManagedMemory: "count"}, with(share, func(r *api.Request) { r.Managed = api.ManagedCount })},
		"managed memory is charged as ever":                {app("nvidia.com/gpumem", "8000"), map[string]string{api.AnnotationManagedMemory: "charge"}, share},
		"an oversold share":                                {app("nvidia.com/gpumem", "8000"), map[string]string{api.AnnotationOversell: "host"}, with(share, func(r *api.Request) { r.Oversell = api.OversellHost })},
		"isolation":                                        {app("nvidia.com/gpumem", "8000"), map[string]string{api.AnnotationIsolation: "mps"}, with(share, func(r *api.Request) { r.Isolation = api.ModeMPS })},
		"HAMi's mode":                                      {app("nvidia.com/gpumem", "8000"), map[string]string{api.HAMiMode: "hami-core"}, with(share, func(r *api.Request) { r.Isolation = api.ModeVGPU })},
		"ours beats HAMi's":                                {app("nvidia.com/gpumem", "8000"), map[string]string{api.HAMiMode: "mig", api.AnnotationIsolation: "vgpu"}, with(share, func(r *api.Request) { r.Isolation = api.ModeVGPU })},
		"a policy":                                         {app("nvidia.com/gpumem", "8000"), map[string]string{api.AnnotationCardPolicy: "spread"}, with(share, func(r *api.Request) { r.Policy = "spread" })},
		"HAMi's policy":                                    {app("nvidia.com/gpumem", "8000"), map[string]string{api.HAMiCardPolicy: "topology-aware"}, with(share, func(r *api.Request) { r.Policy = "topology" })},
		"HAMi's mutex spreads":                             {app("nvidia.com/gpumem", "8000"), map[string]string{api.HAMiCardPolicy: "mutex"}, with(share, func(r *api.Request) { r.Policy = "spread" })},
		"models, some of them excluded":                    {app("nvidia.com/gpumem", "8000"), map[string]string{api.AnnotationCardModels: "A100, ! A100-40 "}, with(share, func(r *api.Request) { r.Models = api.Selector{Only: []string{"A100"}, Not: []string{"A100-40"}} })},
		"cards, some of them excluded":                     {app("nvidia.com/gpumem", "8000"), map[string]string{api.AnnotationCardUUIDs: cardA + ",!" + cardB}, with(share, func(r *api.Request) { r.UUIDs = api.Selector{Only: []string{cardA}, Not: []string{cardB}} })},
		"annotations that carve wrote":                     {app("nvidia.com/gpumem", "8000"), map[string]string{api.AnnotationGrant: "x", api.AnnotationWake: "1", api.AnnotationResize: "x", api.AnnotationResizeResult: "x"}, share},
		"an unknown key on a pod that asks for nothing":    {app("cpu", "1"), map[string]string{"carve.dev/card-modles": "A100"}, api.Request{}},
		"HAMi's list with an empty entry":                  {app("nvidia.com/gpumem", "8000"), map[string]string{api.HAMiUseModel: "A100,"}, with(share, func(r *api.Request) { r.Models = api.Selector{Only: []string{"A100"}} })},
		"HAMi's pair of lists":                             {app("nvidia.com/gpumem", "8000"), map[string]string{api.HAMiUseUUID: "GPU-a,GPU-b", api.HAMiAvoidUUID: "GPU-c"}, with(share, func(r *api.Request) { r.UUIDs = api.Selector{Only: []string{"GPU-a", "GPU-b"}, Not: []string{"GPU-c"}} })},
		"share-11: containers by name, in their order": {[]api.ContainerSpec{
			{Name: "setup", Kind: api.Init}, {Name: "side", Kind: api.Sidecar, Resources: res("nvidia.com/gpumem", "1000")},
			{Name: "app", Resources: res("nvidia.com/gpumem", "8000")}, {Name: "plain"}}, nil,
			api.Request{Containers: []api.ContainerRequest{{Name: "side", Kind: api.Sidecar, Cards: 1, MemMiB: 1000}, {Name: "app", Cards: 1, MemMiB: 8000}}}},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := api.ParseRequest(c.containers, c.annotations)
			if err != nil || !reflect.DeepEqual(got, c.want) {
				t.Fatalf("%+v, %v\nwant %+v", got, err, c.want)
			}
		})
	}
}

// A refusal names the field, the value and what is allowed.
func TestRequestsThatCanNotBeMeant(t *testing.T) {
	for name, c := range map[string]struct {
		kv           []string
		annotations  map[string]string
		field, value string
	}{
		"101 percent of compute":               {[]string{"nvidia.com/gpucores", "101"}, nil, "nvidia.com/gpucores", "101"},
		"101 percent of memory":                {[]string{"nvidia.com/gpumem-percentage", "101"}, nil, "nvidia.com/gpumem-percentage", "101"},
		"a negative number of cards":           {[]string{"nvidia.com/gpu", "-1"}, nil, "nvidia.com/gpu", "-1"},
		"more cards than any node has":         {[]string{"nvidia.com/gpu", "17"}, nil, "nvidia.com/gpu", "17"},
		"more memory than any card has":        {[]string{"nvidia.com/gpumem", "8G"}, nil, "nvidia.com/gpumem", "8G"},
		"half a card":                          {[]string{"nvidia.com/gpu", "500m"}, nil, "nvidia.com/gpu", "500m"},
		"memory in both ways":                  {[]string{"nvidia.com/gpumem", "1", "nvidia.com/gpumem-percentage", "1"}, nil, "nvidia.com/gpumem-percentage", "1"},
		"a share of no card":                   {[]string{"nvidia.com/gpu", "0", "nvidia.com/gpumem", "8000"}, nil, "nvidia.com/gpu", "0"},
		"compute and no memory":                {[]string{"nvidia.com/gpucores", "30", "nvidia.com/gpumem", "0"}, nil, "nvidia.com/gpumem", "0"},
		"instances and a share":                {[]string{"nvidia.com/mig-1g.10gb", "1", "nvidia.com/gpumem", "8000"}, nil, "nvidia.com/mig-*", "1g.10gb"},
		"instances and a card":                 {[]string{"nvidia.com/mig-1g.10gb", "1", "nvidia.com/gpu", "1"}, nil, "nvidia.com/mig-*", "1g.10gb"},
		"a million instances":                  {[]string{"nvidia.com/mig-1g.10gb", "1000000"}, nil, "nvidia.com/mig-1g.10gb", "1000000"},
		"a third priority":                     {[]string{"nvidia.com/gpumem", "1", "nvidia.com/priority", "2"}, nil, "nvidia.com/priority", "2"},
		"two cards under MPS":                  {[]string{"nvidia.com/gpu", "2", "nvidia.com/gpumem", "1"}, map[string]string{api.AnnotationIsolation: "mps"}, "container app: nvidia.com/gpu", "2"},
		"two cards under MPS, as HAMi says it": {[]string{"nvidia.com/gpu", "2"}, map[string]string{api.HAMiMode: "mps"}, "container app: nvidia.com/gpu", "2"},
		"an unknown isolation":                 {[]string{"nvidia.com/gpumem", "1"}, map[string]string{api.AnnotationIsolation: "vm"}, api.AnnotationIsolation, "vm"},
		"an unknown mode of HAMi's":            {[]string{"nvidia.com/gpumem", "1"}, map[string]string{api.HAMiMode: "vm"}, api.HAMiMode, "vm"},
		"an unknown policy":                    {[]string{"nvidia.com/gpumem", "1"}, map[string]string{api.AnnotationCardPolicy: "best"}, api.AnnotationCardPolicy, "best"},
		"an unknown policy of HAMi's":          {[]string{"nvidia.com/gpumem", "1"}, map[string]string{api.HAMiCardPolicy: "best"}, api.HAMiCardPolicy, "best"},
		"an unknown compute policy":            {[]string{"nvidia.com/gpumem", "1"}, map[string]string{api.AnnotationCompute: "soft"}, api.AnnotationCompute, "soft"},
		"an unknown policy on managed memory":  {[]string{"nvidia.com/gpumem", "1"}, map[string]string{api.AnnotationManagedMemory: "free"}, api.AnnotationManagedMemory, "free"},
		"no policy on managed memory":          {[]string{"nvidia.com/gpumem", "1"}, map[string]string{api.AnnotationManagedMemory: ""}, api.AnnotationManagedMemory, ""},
		"an unknown way to oversell":           {[]string{"nvidia.com/gpumem", "1"}, map[string]string{api.AnnotationOversell: "disk"}, api.AnnotationOversell, "disk"},
		"oversold what is forbidden":           {[]string{"nvidia.com/gpumem", "1"}, map[string]string{api.AnnotationOversell: "host", api.AnnotationManagedMemory: "forbid"}, api.AnnotationOversell, "host"},
		"a mistyped annotation":                {[]string{"nvidia.com/gpumem", "1"}, map[string]string{"carve.dev/card-modles": "A100"}, "annotations", "carve.dev/card-modles"},
		"a container's annotation on a pod":    {[]string{"nvidia.com/gpumem", "1"}, map[string]string{api.AnnotationSlice: "x/y@1"}, "annotations", api.AnnotationSlice},
		"a resource's name as an annotation":   {[]string{"nvidia.com/gpumem", "1"}, map[string]string{"carve.dev/gpumem": "1"}, "annotations", "carve.dev/gpumem"},
		"no models":                            {[]string{"nvidia.com/gpumem", "1"}, map[string]string{api.AnnotationCardModels: ""}, api.AnnotationCardModels, ""},
		"an empty model":                       {[]string{"nvidia.com/gpumem", "1"}, map[string]string{api.AnnotationCardModels: "A100, ,H100"}, api.AnnotationCardModels, " (in A100, ,H100)"},
		"a model list that ends with a comma":  {[]string{"nvidia.com/gpumem", "1"}, map[string]string{api.AnnotationCardModels: "A100,"}, api.AnnotationCardModels, " (in A100,)"},
		"no model excluded":                    {[]string{"nvidia.com/gpumem", "1"}, map[string]string{api.AnnotationCardModels: "!"}, api.AnnotationCardModels, "!"},
		"no card excluded":                     {[]string{"nvidia.com/gpumem", "1"}, map[string]string{api.AnnotationCardUUIDs: cardA + ",! "}, api.AnnotationCardUUIDs, "! (in "},
		"an index for a card":                  {[]string{"nvidia.com/gpumem", "1"}, map[string]string{api.AnnotationCardUUIDs: "0"}, api.AnnotationCardUUIDs, "0"},
		"a UUID that is cut short":             {[]string{"nvidia.com/gpumem", "1"}, map[string]string{api.AnnotationCardUUIDs: cardA[:20]}, api.AnnotationCardUUIDs, cardA[:20]},
		"a UUID with a letter that isn't":      {[]string{"nvidia.com/gpumem", "1"}, map[string]string{api.AnnotationCardUUIDs: cardA[:39] + "g"}, api.AnnotationCardUUIDs, cardA[:39] + "g"},
		"a UUID without its dashes":            {[]string{"nvidia.com/gpumem", "1"}, map[string]string{api.AnnotationCardUUIDs: strings.ReplaceAll(cardA, "-", "0")}, api.AnnotationCardUUIDs, ""},
		"an instance's UUID":                   {[]string{"nvidia.com/gpumem", "1"}, map[string]string{api.AnnotationCardUUIDs: "MIG" + cardA[3:]}, api.AnnotationCardUUIDs, "MIG"},
		"an unknown compute priority":          {[]string{"nvidia.com/gpumem", "1"}, map[string]string{api.AnnotationComputePriority: "2"}, api.AnnotationComputePriority, "2"},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := api.ParseRequest(app(c.kv...), c.annotations)
			var field *api.FieldError
			if !errors.As(err, &field) || !strings.Contains(field.Field, c.field) || !strings.HasPrefix(field.Value, c.value) || field.Allowed == "" {
				t.Fatalf("%+v, %v", got, err)
			}
			if !reflect.DeepEqual(got, api.Request{}) {
				t.Fatalf("%+v beside an error", got)
			}
			if m := err.Error(); !strings.Contains(m, c.field) || !strings.Contains(m, c.value) || !strings.Contains(m, "allowed is") {
				t.Fatalf("message %q", m)
			}
		})
	}
}

func TestSelectorAdmits(t *testing.T) {
	for name, c := range map[string]struct {
		s     api.Selector
		value string
		want  bool
	}{
		"the zero selector admits all":     {api.Selector{}, "NVIDIA A100", true},
		"a part of the name, any case":     {api.Selector{Only: []string{"a100"}}, "NVIDIA A100-SXM4-80GB", true},
		"another model":                    {api.Selector{Only: []string{"a100"}}, "NVIDIA H100", false},
		"one of several":                   {api.Selector{Only: []string{"a100", "h100"}}, "NVIDIA H100", true},
		"excluded":                         {api.Selector{Not: []string{"h100"}}, "NVIDIA H100", false},
		"excluded though it is among them": {api.Selector{Only: []string{"a100"}, Not: []string{"40gb"}}, "NVIDIA A100-40GB", false},
	} {
		if got := c.s.Admits(c.value); got != c.want {
			t.Errorf("%s: %t", name, got)
		}
	}
}

func FuzzParseRequest(f *testing.F) {
	f.Add("nvidia.com/gpu", "1", "nvidia.com/gpumem", "8Gi", api.AnnotationIsolation, "vgpu")
	f.Add("nvidia.com/gpucores", "101", "nvidia.com/priority", "1", api.AnnotationCardPolicy, "spread")
	f.Add("nvidia.com/mig-1g.10gb", "1", "nvidia.com/gpumem-percentage", "50", api.AnnotationCardModels, "A100,!H100,,")
	f.Add("nvidia.com/gpumem", "100", "", "", api.AnnotationCardUUIDs, cardA+",!"+cardB)
	f.Add("nvidia.com/gpumem", "100", "", "", "carve.dev/grants", "{}")
	f.Add("", "", "cpu", "1", "", "")
	f.Fuzz(func(t *testing.T, k1, v1, k2, v2, annotation, value string) {
		r, err := api.ParseRequest(app(k1, v1, k2, v2), map[string]string{annotation: value})
		var field *api.FieldError
		if err != nil {
			if !errors.As(err, &field) || !reflect.DeepEqual(r, api.Request{}) || len(err.Error()) > 1000+len(k1)+len(k2) {
				t.Fatalf("%+v, %v", r, err)
			}
			return
		}
		for _, c := range r.Containers {
			shares := c.MemMiB > 0 || c.MemPercent > 0 || c.Cores > 0
			switch {
			case c.MIG != nil && (shares || c.Cards > 0 || c.Whole):
			case c.MIG == nil && (c.Cards < 1 || c.Cards > api.MaxCardsPerContainer || c.Whole == shares):
			case c.MemMiB < 0 || c.MemPercent < 0 || c.MemPercent > 100 || c.Cores < 0 || c.Cores > 100 || c.MemMiB > 0 && c.MemPercent > 0:
			default:
				continue
			}
			t.Fatalf("%+v", c)
		}
		again, err := api.ParseRequest(app(k1, v1, k2, v2), map[string]string{annotation: value})
		if err != nil || !reflect.DeepEqual(r, again) {
			t.Fatalf("%+v, then %+v, %v", r, again, err)
		}
	})
}

// The API server demands it of resources that can't be overcommitted; what came
// to us on another way is held to it as well.
func TestRequestsEqualLimits(t *testing.T) {
	for name, c := range map[string]struct {
		limits, requests map[string]string
		good             bool
	}{
		"none given":              {res("nvidia.com/gpumem", "8k"), nil, true},
		"the same":                {res("nvidia.com/gpumem", "8k"), res("nvidia.com/gpumem", "8k"), true},
		"the same amount":         {res("nvidia.com/gpumem", "8k"), res("nvidia.com/gpumem", "8000"), true},
		"another amount":          {res("nvidia.com/gpumem", "8k"), res("nvidia.com/gpumem", "4k"), false},
		"no limit":                {nil, res("nvidia.com/gpu", "1"), false},
		"no limit of an instance": {nil, res("nvidia.com/mig-1g.10gb", "1"), false},
		"a request that is none":  {res("nvidia.com/gpu", "1"), res("nvidia.com/gpu", "one"), false},
		"of others' resources":    {res("nvidia.com/gpu", "1", "cpu", "2"), res("cpu", "1", "memory", "1Gi"), true},
	} {
		r, err := api.ParseRequest([]api.ContainerSpec{{Name: "app", Resources: c.limits, Requests: c.requests}}, nil)
		if (err == nil) != c.good || err != nil && !strings.Contains(err.Error(), "in requests") {
			t.Errorf("%s: %+v, %v", name, r, err)
		}
	}
}

// A refusal of an annotation lists what people may write and are served with, and says
// what may have been meant.
func TestRefusedAnnotationsNameWhatIsAllowed(t *testing.T) {
	for name, c := range map[string]struct{ key, value, allowed string }{
		"another case":              {api.AnnotationIsolation, "MPS", "vgpu, mps, timeslice, exclusive (did you mean mps?)"},
		"a letter too few":          {api.AnnotationIsolation, "timeslic", "vgpu, mps, timeslice, exclusive (did you mean timeslice?)"},
		"another word":              {api.AnnotationIsolation, "vm", "vgpu, mps, timeslice, exclusive"},
		"spaces":                    {api.AnnotationIsolation, " vgpu ", "vgpu, mps, timeslice, exclusive (did you mean vgpu?)"},
		"in HAMi's words":           {api.HAMiMode, "hami_core", "hami-core, mps (did you mean hami-core?)"},
		"a policy":                  {api.AnnotationCardPolicy, "Spread", "binpack, spread, topology (did you mean spread?)"},
		"nothing at all":            {api.AnnotationCompute, "", "elastic, fixed"},
		"a mistyped annotation":     {"carve.dev/card-modles", "A100", "one of carve.dev/card-models, carve.dev/card-policy, carve.dev/card-uuids, carve.dev/compute, carve.dev/compute-priority, carve.dev/isolation, carve.dev/managed-memory, carve.dev/oversell, carve.dev/placement (did you mean carve.dev/card-models?)"},
		"one that is written by us": {"carve.dev/resizes", "x", "one of carve.dev/card-models, carve.dev/card-policy, carve.dev/card-uuids, carve.dev/compute, carve.dev/compute-priority, carve.dev/isolation, carve.dev/managed-memory, carve.dev/oversell, carve.dev/placement"},
	} {
		_, err := api.ParseRequest(app("nvidia.com/gpumem", "8000"), map[string]string{c.key: c.value})
		var fault *api.FieldError
		if !errors.As(err, &fault) || fault.Allowed != c.allowed {
			t.Errorf("%s: %v\nwant %s", name, err, c.allowed)
		}
	}
	// Instances aren't served, and a pod that asks for them is told so in its own words.
	if _, err := api.ParseRequest(app("nvidia.com/gpumem", "8000"), map[string]string{api.AnnotationIsolation: "mig"}); err != nil {
		t.Error(err)
	}
}

func TestAnnotationsAreSortedAndHoldWhatIsWritten(t *testing.T) {
	all := api.Annotations()
	if !slices.IsSorted(all) {
		t.Errorf("%q", all)
	}
	for _, key := range api.OwnAnnotations() {
		if !slices.Contains(all, key) {
			t.Errorf("%s is written and not known", key)
		}
	}
}

func TestCDIDevicesInAnnotations(t *testing.T) {
	for name, c := range map[string]struct {
		annotations map[string]string
		want        string
	}{
		"none":                        {nil, ""},
		"NVIDIA's plugin, a pod":      {map[string]string{"nvidia.cdi.k8s.io/pod": "nvidia.com/gpu=0"}, "nvidia.cdi.k8s.io/pod"},
		"its management devices":      {map[string]string{"nvidia.cdi.k8s.io/container.app": "management.nvidia.com/gpu=all"}, "nvidia.cdi.k8s.io/container.app"},
		"whatever is asked of it":     {map[string]string{"nvidia.cdi.k8s.io/x": ""}, "nvidia.cdi.k8s.io/x"},
		"the runtime's":               {map[string]string{"cdi.k8s.io/x": "vendor.com/nic=0,nvidia.com/gpu=all"}, "cdi.k8s.io/x"},
		"other vendors' devices":      {map[string]string{"cdi.k8s.io/x": "vendor.com/nic=0"}, ""},
		"two, the first is named":     {map[string]string{"nvidia.cdi.k8s.io/b": "", "nvidia.cdi.k8s.io/a": ""}, "nvidia.cdi.k8s.io/a"},
		"a key that only looks alike": {map[string]string{"my.nvidia.cdi.k8s.io/a": "nvidia.com/gpu=0"}, ""},
	} {
		key, found := api.NamesCDIDevices(c.annotations)
		if key != c.want || found != (c.want != "") {
			t.Errorf("%s: %q, %t", name, key, found)
		}
	}
}

func TestSmallSharesAreWarnedOf(t *testing.T) {
	for kv, want := range map[[2]string]int{
		{"nvidia.com/gpumem", "100"}: 1, {"nvidia.com/gpumem", "512"}: 0, {"nvidia.com/gpumem", "8Mi"}: 1,
		{"nvidia.com/gpucores", "1"}: 0, {"nvidia.com/gpumem-percentage", "1"}: 0, {"nvidia.com/gpu", "1"}: 0,
	} {
		r, err := api.ParseRequest(app(kv[:]...), nil)
		if w := r.Warnings(); err != nil || len(w) != want {
			t.Errorf("%s: %q, %v", kv, w, err)
		}
	}
}

func TestWhatAModeDoesNotHoldIsWarnedOf(t *testing.T) {
	for name, c := range map[string]struct {
		resources   []string
		annotations map[string]string
		want        []string
	}{
		"a time slice": {[]string{"nvidia.com/gpumem", "8000"}, map[string]string{api.AnnotationIsolation: "timeslice"}, []string{"holds no program"}},
		"one with wishes": {[]string{"nvidia.com/gpumem", "8000"}, map[string]string{api.AnnotationIsolation: "timeslice", api.AnnotationCompute: "fixed", api.AnnotationManagedMemory: "count"},
			[]string{"holds no program", "annotation carve.dev/compute has no effect", "annotation carve.dev/managed-memory has no effect"}},
		"a replica that is asked for by name": {[]string{"nvidia.com/gpu", "1"}, map[string]string{api.HAMiMode: "mps"}, []string{"container app: isolation mps without nvidia.com/gpumem"}},
		"a share under MPS":                   {[]string{"nvidia.com/gpumem", "8000"}, map[string]string{api.AnnotationIsolation: "mps", api.AnnotationManagedMemory: "count"}, nil},
		"a cap of no compute":                 {[]string{"nvidia.com/gpumem", "8000"}, map[string]string{api.AnnotationCompute: "fixed"}, []string{"container app: annotation carve.dev/compute: fixed caps nothing without nvidia.com/gpucores"}},
		"a cap of some":                       {[]string{"nvidia.com/gpumem", "8000", "nvidia.com/gpucores", "30"}, map[string]string{api.AnnotationCompute: "fixed"}, nil},
		"a cap of a whole card":               {[]string{"nvidia.com/gpu", "1"}, map[string]string{api.AnnotationCompute: "fixed"}, nil},
		"one that would wait for others":      {[]string{"nvidia.com/gpumem", "8000"}, map[string]string{api.AnnotationIsolation: "mps", api.AnnotationComputePriority: "low"}, []string{"annotation carve.dev/compute-priority has no effect"}},
	} {
		r, err := api.ParseRequest(app(c.resources...), c.annotations)
		got := r.Warnings()
		if err != nil || len(got) != len(c.want) {
			t.Errorf("%s: %q, %v", name, got, err)
			continue
		}
		for i := range got {
			if !strings.Contains(got[i], c.want[i]) {
				t.Errorf("%s: %q, want %q", name, got[i], c.want[i])
			}
		}
	}
}

func TestZeroMemoryBesideACardIsRefused(t *testing.T) {
	for _, name := range []string{api.ResourceMemory, api.ResourceMemoryPercent} {
		_, err := api.ParseRequest([]api.ContainerSpec{{Name: "app", Resources: map[string]string{api.ResourceGPU: "1", name: "0"}}}, nil)
		if fe, ok := err.(*api.FieldError); !ok || !strings.Contains(fe.Field, name) {
			t.Errorf("%s: 0 beside a card: %v", name, err)
		}
	}
	if r, err := api.ParseRequest([]api.ContainerSpec{{Name: "app", Resources: map[string]string{api.ResourceGPU: "0", api.ResourceMemory: "0"}}}, nil); err != nil || !r.Empty() {
		t.Errorf("zero of everything: %+v, %v", r, err)
	}
}

func TestWholeOnly(t *testing.T) {
	for name, c := range map[string]struct {
		resources, annotations map[string]string
		want                   bool
	}{
		"two cards":          {map[string]string{api.ResourceGPU: "2"}, nil, true},
		"nothing":            {nil, nil, true},
		"cards, exclusive":   {map[string]string{api.ResourceGPU: "1"}, map[string]string{api.AnnotationIsolation: "exclusive"}, true},
		"cards through vgpu": {map[string]string{api.ResourceGPU: "1"}, map[string]string{api.AnnotationIsolation: "vgpu"}, false},
		"memory":             {map[string]string{api.ResourceMemory: "1"}, nil, false},
		"compute and a card": {map[string]string{api.ResourceGPU: "1", api.ResourceCores: "10"}, nil, false},
		"an instance":        {map[string]string{api.ResourceMIGPrefix + "1g.10gb": "1"}, nil, false},
		"a percentage":       {map[string]string{api.ResourceMemoryPercent: "10"}, nil, false},
	} {
		r, err := api.ParseRequest([]api.ContainerSpec{{Name: "app", Resources: c.resources}}, c.annotations)
		if err != nil || r.WholeOnly() != c.want {
			t.Errorf("%s: %t, %v", name, r.WholeOnly(), err)
		}
	}
}

// The policy has the list a second time, since CEL can't read ours.
func TestPolicyKnowsOurAnnotations(t *testing.T) {
	text, err := os.ReadFile("../deploy/manifests/policy-request.yaml")
	if err != nil {
		t.Fatal(err)
	}
	_, list, found := strings.Cut(string(text), "- name: known\n")
	list, _, ended := strings.Cut(list, "]\n")
	if !found || !ended {
		t.Fatal("the policy has no variable known")
	}
	if got := regexp.MustCompile(`carve\.dev/[a-z-]+`).FindAllString(list, -1); !slices.Equal(got, api.Annotations()) {
		t.Errorf("the policy knows %q\nwanted are %q", got, api.Annotations())
	}
}
