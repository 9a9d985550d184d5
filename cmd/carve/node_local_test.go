package main

import (
	"strings"
	"testing"

	"github.com/carve-gpu/carve/api"
	"github.com/carve-gpu/carve/api/v1alpha1"
	"github.com/carve-gpu/carve/vgpu/agent"
)

// node-18, node-19, node-22: two cards are two different ones, packing is the
// default here, and each container has a grant of its own.
func TestTheNodeChoosesByTheExtendersArithmetic(t *testing.T) {
	rooms := func() []agent.Room {
		var r []agent.Room
		for i, uuid := range []string{"GPU-0", "GPU-1", "GPU-2"} {
			r = append(r, agent.Room{UUID: uuid, Model: "NVIDIA A100-SXM4-80GB", Index: i, MemMiB: 80000, Slots: 4})
		}
		return r
	}
	share := func(name string, cards int, mib int64) api.ContainerRequest {
		return api.ContainerRequest{Name: name, Cards: cards, MemMiB: mib, Cores: 20}
	}
	for name, c := range map[string]struct {
		request api.Request
		edit    func([]agent.Room)
		want    string // "container=cards…", or a refusal
	}{
		"the first card that fits":      {api.Request{Containers: []api.ContainerRequest{share("app", 1, 8000)}}, nil, "app=GPU-0"},
		"two shares are on two cards":   {api.Request{Containers: []api.ContainerRequest{share("app", 2, 8000)}}, nil, "app=GPU-0,GPU-1"},
		"two containers may be on one":  {api.Request{Containers: []api.ContainerRequest{share("app", 1, 8000), share("side", 1, 9000)}}, nil, "app=GPU-0 side=GPU-0"},
		"a full one is passed over":     {api.Request{Containers: []api.ContainerRequest{share("app", 1, 8000)}}, func(r []agent.Room) { r[0].UsedMiB, r[0].Touched = 75000, true }, "app=GPU-1"},
		"one without slots, too":        {api.Request{Containers: []api.ContainerRequest{share("app", 1, 8000)}}, func(r []agent.Room) { r[0].UsedSlots, r[0].Touched = 4, true }, "app=GPU-1"},
		"sick, cordoned and whole ones": {api.Request{Containers: []api.ContainerRequest{share("app", 1, 8000)}}, func(r []agent.Room) { r[0].Unfit, r[1].Cordoned, r[2].Whole, r[2].Touched = true, true, true, true }, "asked"},
		"a whole card is an empty one":  {api.Request{Containers: []api.ContainerRequest{{Name: "app", Cards: 1, Whole: true}}}, func(r []agent.Room) { r[0].UsedMiB, r[0].Touched = 1, true }, "app=GPU-1"},
		"more cards than there are":     {api.Request{Containers: []api.ContainerRequest{share("app", 4, 8000)}}, nil, "asked 4 different cards, the node has 3"},
		"a mode that isn't served":      {api.Request{Isolation: api.ModeMPS, Containers: []api.ContainerRequest{share("app", 1, 8000)}}, nil, "the node doesn't serve mode mps"},
		"no share beside time slices":   {api.Request{Containers: []api.ContainerRequest{share("app", 1, 8000)}}, func(r []agent.Room) { r[0].Mode, r[0].Touched, r[0].UsedMiB = api.ModeTimeslice, true, 100 }, "app=GPU-1"},
		"a replica": {api.Request{Containers: []api.ContainerRequest{{Name: "app", Cards: 1, Whole: true}}}, func(r []agent.Room) {
			for i := range r {
				r[i].Modes, r[i].Sharing = []string{"timeslice"}, &v1alpha1.Sharing{Mode: "timeslice", Replicas: 2}
			}
		}, "app=GPU-0"},
		"another model": {api.Request{Models: api.Selector{Only: []string{"H100"}}, Containers: []api.ContainerRequest{share("app", 1, 8000)}}, nil, "card-models"},
	} {
		cards := rooms()
		if c.edit != nil {
			c.edit(cards)
		}
		g, err := placeLocally(agent.LocalPod{UID: "uid-1", Node: "n1", Request: c.request, Cards: cards})
		if err != nil {
			if strings.Contains(c.want, "=") || !strings.Contains(err.Error(), c.want) && c.want != "asked" {
				t.Errorf("%s: %v, want %s", name, err, c.want)
			}
			continue
		}
		var got []string
		for _, container := range c.request.Containers {
			var on []string
			for _, cg := range g.Containers[container.Name] {
				on = append(on, cg.Card)
			}
			got = append(got, container.Name+"="+strings.Join(on, ","))
		}
		if strings.Join(got, " ") != c.want || g.UID != "uid-1" || g.Node != "n1" || g.Generation != 1 {
			t.Errorf("%s: %v of %+v, want %s", name, got, g, c.want)
		}
	}
}
