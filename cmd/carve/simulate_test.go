package main

import (
	"bytes"
	"fmt"
	"strings"
	"testing"

	"github.com/carve-gpu/carve/scheduler-extender/place"
	"github.com/carve-gpu/carve/scheduler-extender/score"
	"github.com/carve-gpu/carve/scheduler-extender/simulate"
)

func TestSimulateTexts(t *testing.T) {
	w := newWorld(t, nil)
	kube, nodes := w.clients(t)
	in, err := listAll(t.Context(), kube, nodes)
	if err != nil {
		t.Fatal(err)
	}
	pods, _, err := simulate.Read(strings.NewReader(`
apiVersion: v1
kind: Pod
metadata: {name: large}
spec: {containers: [{name: app, image: x, resources: {limits: {nvidia.com/gpu: 1, nvidia.com/gpumem: 60000, nvidia.com/gpucores: 30}}}]}
---
apiVersion: batch/v1
kind: Job
metadata: {name: train}
spec: {parallelism: 2, template: {spec: {restartPolicy: Never, containers: [{name: app, image: x, resources: {limits: {nvidia.com/gpu: 1}}}]}}}
---
apiVersion: v1
kind: Pod
metadata: {name: giant}
spec: {containers: [{name: app, image: x, resources: {limits: {nvidia.com/gpumem: 900000}}}]}
---
apiVersion: v1
kind: Pod
metadata: {name: none}
spec: {containers: [{name: app, image: x}]}
`), "team-c")
	if err != nil {
		t.Fatal(err)
	}
	r, err := simulate.Run(in, pods, place.Config{Policy: score.Binpack}, explainNow)
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := printSimulated(&out, r, false); err != nil {
		t.Fatal(err)
	}
	fmt.Fprintf(&out, "error: %v\n", errNoPlace(r))
	wantGolden(t, "simulate.txt", out.Bytes())
}
