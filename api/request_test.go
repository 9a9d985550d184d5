package api_test

import (
	"errors"
	"reflect"
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
		"isolation":                                        {app("nvidia.com/gpumem", "8000"), map[string]string{api.AnnotationIsolation: "mps"}, with(share, func(r *api.Request) { r.Isolation = api.ModeMPS })},
		"HAMi's mode":                                      {app("nvidia.com/gpumem", "8000"), map[string]string{api.HAMiMode: "hami-core"}, with(share, func(r *api.Request) { r.Isolation = api.ModeVGPU })},
		"ours beats HAMi's":                                {app("nvidia.com/gpumem", "8000"), map[string]string{api.HAMiMode: "mig", api.AnnotationIsolation: "vgpu"}, with(share, func(r *api.Request) { r.Isolation = api.ModeVGPU })},
		"a policy":                                         {app("nvidia.com/gpumem", "8000"), map[string]string{api.AnnotationCardPolicy: "spread"}, with(share, func(r *api.Request) { r.Policy = "spread" })},
		"HAMi's policy":                                    {app("nvidia.com/gpumem", "8000"), map[string]string{api.HAMiCardPolicy: "topology-aware"}, with(share, func(r *api.Request) { r.Policy = "topology" })},
		"HAMi's mutex spreads":                             {app("nvidia.com/gpumem", "8000"), map[string]string{api.HAMiCardPolicy: "mutex"}, with(share, func(r *api.Request) { r.Policy = "spread" })},
		"models, some of them excluded":                    {app("nvidia.com/gpumem", "8000"), map[string]string{api.AnnotationCardModels: "A100, !A100-40 ,"}, with(share, func(r *api.Request) { r.Models = api.Selector{Only: []string{"A100"}, Not: []string{"A100-40"}} })},
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
		"101 percent of compute":        {[]string{"nvidia.com/gpucores", "101"}, nil, "nvidia.com/gpucores", "101"},
		"101 percent of memory":         {[]string{"nvidia.com/gpumem-percentage", "101"}, nil, "nvidia.com/gpumem-percentage", "101"},
		"a negative number of cards":    {[]string{"nvidia.com/gpu", "-1"}, nil, "nvidia.com/gpu", "-1"},
		"more cards than any node has":  {[]string{"nvidia.com/gpu", "17"}, nil, "nvidia.com/gpu", "17"},
		"more memory than any card has": {[]string{"nvidia.com/gpumem", "8G"}, nil, "nvidia.com/gpumem", "8G"},
		"half a card":                   {[]string{"nvidia.com/gpu", "500m"}, nil, "nvidia.com/gpu", "500m"},
		"memory in both ways":           {[]string{"nvidia.com/gpumem", "1", "nvidia.com/gpumem-percentage", "1"}, nil, "nvidia.com/gpumem-percentage", "1"},
		"a share of no card":            {[]string{"nvidia.com/gpu", "0", "nvidia.com/gpumem", "8000"}, nil, "nvidia.com/gpu", "0"},
		"instances and a share":         {[]string{"nvidia.com/mig-1g.10gb", "1", "nvidia.com/gpumem", "8000"}, nil, "nvidia.com/mig-*", "1g.10gb"},
		"instances and a card":          {[]string{"nvidia.com/mig-1g.10gb", "1", "nvidia.com/gpu", "1"}, nil, "nvidia.com/mig-*", "1g.10gb"},
		"a million instances":           {[]string{"nvidia.com/mig-1g.10gb", "1000000"}, nil, "nvidia.com/mig-1g.10gb", "1000000"},
		"a third priority":              {[]string{"nvidia.com/gpumem", "1", "nvidia.com/priority", "2"}, nil, "nvidia.com/priority", "2"},
		"an unknown isolation":          {[]string{"nvidia.com/gpumem", "1"}, map[string]string{api.AnnotationIsolation: "vm"}, api.AnnotationIsolation, "vm"},
		"an unknown mode of HAMi's":     {[]string{"nvidia.com/gpumem", "1"}, map[string]string{api.HAMiMode: "vm"}, api.HAMiMode, "vm"},
		"an unknown policy":             {[]string{"nvidia.com/gpumem", "1"}, map[string]string{api.AnnotationCardPolicy: "best"}, api.AnnotationCardPolicy, "best"},
		"an unknown policy of HAMi's":   {[]string{"nvidia.com/gpumem", "1"}, map[string]string{api.HAMiCardPolicy: "best"}, api.HAMiCardPolicy, "best"},
		"an unknown compute policy":     {[]string{"nvidia.com/gpumem", "1"}, map[string]string{api.AnnotationCompute: "soft"}, api.AnnotationCompute, "soft"},
		"an unknown compute priority":   {[]string{"nvidia.com/gpumem", "1"}, map[string]string{api.AnnotationComputePriority: "2"}, api.AnnotationComputePriority, "2"},
	} {
		t.Run(name, func(t *testing.T) {
			got, err := api.ParseRequest(app(c.kv...), c.annotations)
			var field *api.FieldError
			if !errors.As(err, &field) || !strings.Contains(field.Field, c.field) || field.Value != c.value || field.Allowed == "" {
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
