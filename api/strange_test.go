package api_test

import (
	"strings"
	"testing"

	"github.com/carve-gpu/carve/api"
)

func TestStrangeResources(t *testing.T) {
	for name, c := range map[string]struct {
		resources map[string]string
		want      string // part of the only sentence; empty for none
	}{
		"a letter too few":         {map[string]string{"nvidia.com/gpucore": "30"}, "did you mean nvidia.com/gpucores?"},
		"another case":             {map[string]string{"nvidia.com/gpuMem": "8000"}, "did you mean nvidia.com/gpumem?"},
		"swapped letters":          {map[string]string{"nvidia.com/gupmem": "8000"}, "did you mean nvidia.com/gpumem?"},
		"plural":                   {map[string]string{"nvidia.com/gpus": "1"}, "did you mean nvidia.com/gpu?"},
		"NVIDIA's replicas":        {map[string]string{"nvidia.com/gpu.shared": "1"}, "container app: nvidia.com/gpu.shared: carve gives replicas of a card as nvidia.com/gpu"},
		"no memory":                {map[string]string{"nvidia.com/gpumem": "0"}, "asks for nothing"},
		"no memory by percent":     {map[string]string{"nvidia.com/gpumem-percentage": "0"}, "asks for nothing"},
		"a share":                  {map[string]string{"nvidia.com/gpu": "1", "nvidia.com/gpumem": "8000", "nvidia.com/gpucores": "30", "nvidia.com/priority": "1"}, ""},
		"memory of 0 is refused":   {map[string]string{"nvidia.com/gpu": "1", "nvidia.com/gpumem": "0"}, ""},
		"no card, as charts write": {map[string]string{"nvidia.com/gpu": "0"}, ""},
		"an instance":              {map[string]string{"nvidia.com/mig-1g.10gb": "1"}, ""},
		"other plugins' resources": {map[string]string{"nvidia.com/hostdev": "1", "nvidia.com/GA102GL_A10": "1", "amd.com/gpu": "1", "nvidia.com/pgpu.x": "1", "cpu": "1"}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			got := api.StrangeResources([]api.ContainerSpec{{Name: "app", Resources: c.resources}})
			switch {
			case c.want == "" && len(got) != 0:
				t.Errorf("got %q", got)
			case c.want != "" && (len(got) != 1 || !strings.Contains(got[0], c.want)):
				t.Errorf("got %q, want %q", got, c.want)
			}
		})
	}
}
