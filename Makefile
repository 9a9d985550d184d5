# carve: `make help` lists what there is.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

VERSION ?= dev
# The same flags everywhere: the same sources give the same binary wherever they
# lie, and each package is compiled once, for builds, tests and the lab alike.
export GOFLAGS := -trimpath -buildvcs=false
GOBUILD := go build -ldflags '-s -w -X main.version=$(VERSION)'
BIN := bin
E2E := deploy/e2e
LAB := $(CURDIR)/$(BIN)/lab

.PHONY: help
help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## /{printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: all
all: build ## build everything

.PHONY: build
build: native $(BIN)/carve $(BIN)/carve-hook $(BIN)/kubectl-carve $(BIN)/kubectl_complete-carve ## build the binaries, the front libraries and the software GPU

.PHONY: native
native:
	@echo "front libraries and software GPU"
	@$(MAKE) -s --no-print-directory -C vgpu/lib
	@$(MAKE) -s --no-print-directory -C vgpu/soft

.PHONY: FORCE
FORCE:

$(BIN)/carve: FORCE
	@mkdir -p $(BIN)
	CGO_ENABLED=1 $(GOBUILD) -o $@ ./cmd/carve

$(BIN)/carve-hook: FORCE
	@mkdir -p $(BIN)
	CGO_ENABLED=0 $(GOBUILD) -o $@ ./cmd/carve-hook

# kubectl finds its plugin by the first name, and its completion by the second.
$(BIN)/kubectl-carve $(BIN)/kubectl_complete-carve: $(BIN)/carve
	@ln -sf carve $@

$(BIN)/lab $(BIN)/demo $(BIN)/benchnode: FORCE
	@mkdir -p $(BIN)
	cd $(E2E) && CGO_ENABLED=0 go build -o $(CURDIR)/$@ ./cmd/$(@F)

.PHONY: preflight
preflight: $(BIN)/lab ## name what this machine lacks, and install the Debian packages that it may
	@$(LAB) preflight --install

.PHONY: test
test: preflight lint generated test-c test-go test-e2e ## every test that needs no GPU, the real Kubernetes included

.PHONY: test-c
test-c: ## tests of the C libraries
	$(MAKE) --no-print-directory -C vgpu/soft test
	$(MAKE) --no-print-directory -C vgpu/lib test

.PHONY: test-go
test-go: native ## tests of the Go packages
	go test ./...

E2E_TIMEOUT := 40m
# What the kill matrix and its kin found; the tests write it there.
SHOW_E2E := cat build/e2e/*.txt
.PHONY: test-e2e
test-e2e: build $(BIN)/lab ## tests on a real kubelet, containerd and kube-scheduler
	$(LAB) build
	@rm -f build/e2e/*.txt
	go run ./nri-hook/bench -containers 10 > /dev/null # what nobody runs stops working
	cd $(E2E) && CGO_ENABLED=0 go test -count=1 -timeout $(E2E_TIMEOUT) ./...
	@$(SHOW_E2E)

# How many random cases a property is tried on in test-long.
CHECKS ?= 50000
# The kill matrix whole, and 1,000 kills (CARVE_KILLS, CARVE_SEED).
test-long: export CARVE_E2E_LONG := 1
test-long: E2E_TIMEOUT := 3h
.PHONY: test-long
test-long: test race asan tsan fuzz ## the same with larger counts, sanitizers and fuzzing
	go test -count=1 -timeout 60m ./api ./scheduler-extender/fit ./scheduler-extender/ledger -rapid.checks=$(CHECKS)
	go test -count=1 -run NoFalseRefusal ./vgpu/agent -args -long
	go test -count=1 -timeout 30m -v -run 'Share|Elastic|Truth' ./vgpu/compute/sim -seeds 20
	go test -count=1 -timeout 30m ./vgpu/compute/loop -args -seeds 20 -seed 1000
	vgpu/soft/build/test/corrupt 300
	$(MAKE) --no-print-directory -C vgpu/lib oracle
	$(MAKE) --no-print-directory -C vgpu/lib systems
	@$(SHOW_E2E)

BUNDLE := build/gpu-bundle
.PHONY: gpu-bundle
gpu-bundle: native ## one folder (and its .tar.gz) that tries everything on a bare machine with a card: $(BUNDLE)/run
	@$(MAKE) -s --no-print-directory -C vgpu/lib conformance
	@mkdir -p build
	CGO_ENABLED=1 $(GOBUILD) -o build/carve-gputest ./cmd/carve-gputest
	@vgpu/bundle/pack.sh $(BUNDLE) build/carve-gputest

.PHONY: test-gpu
test-gpu: gpu-bundle ## run it here; needs a card
	$(BUNDLE)/run

# The page's other tests are in test-go and need no browser.
CHROMIUM ?= $(shell command -v chromium)
.PHONY: test-page
test-page: ## the live page in a real browser (Debian: apt-get install chromium)
	@[ -n "$(CHROMIUM)" ] || { echo "no chromium here: apt-get install chromium, or set CHROMIUM"; exit 1; }
	@mkdir -p build/page
	go test -count=1 -run TestInABrowser ./monitor/page -browser $(CHROMIUM) -shots $(CURDIR)/build/page
	@echo "screenshots are in build/page"

.PHONY: race
race: native ## the Go tests under the race detector
	@# The simulator is one goroutine, and twenty times as slow under it.
	go test -race -timeout 20m $$(go list ./... | grep -v /vgpu/compute/sim$$)

.PHONY: asan
asan: ## the C tests under the address and undefined-behaviour sanitizers
	$(MAKE) --no-print-directory -C vgpu/soft asan
	$(MAKE) --no-print-directory -C vgpu/lib asan

.PHONY: tsan
tsan: ## what of the front libraries runs in several threads, under the thread sanitizer
	$(MAKE) --no-print-directory -C vgpu/lib tsan

FUZZTIME ?= 30s
.PHONY: fuzz
fuzz: ## run every fuzz target for FUZZTIME
	@# To make each interesting input as small as can be would take all that time.
	@for p in $$(go list ./...); do for f in $$(go test -list '^Fuzz' $$p | grep '^Fuzz' || true); do \
	  echo "$$p $$f"; go test -run '^$$' -fuzz "^$$f$$" -fuzztime $(FUZZTIME) -fuzzminimizetime 500x $$p; done; done

.PHONY: lint
lint: ## gofmt, vet, staticcheck
	@bad=$$(gofmt -l $$(git ls-files '*.go')); [ -z "$$bad" ] || { echo "not formatted: $$bad"; exit 1; }
	go vet ./...
	go tool staticcheck ./...
	cd $(E2E) && CGO_ENABLED=0 go vet ./...

.PHONY: generate
generate: ## write what is generated: deep copies and the CRD from the Go types, the local API from its description
	go tool controller-gen object crd paths=./api/v1alpha1 output:crd:dir=deploy/manifests/crds output:object:dir=api/v1alpha1
	go run ./cmd/generate-nodeapi

.PHONY: generated
generated: ## check that the generated files are up to date
	@d=$$(mktemp -d); trap 'rm -rf "$$d"' EXIT; \
	go tool controller-gen object crd paths=./api/v1alpha1 output:crd:dir=$$d output:object:dir=$$d; \
	for f in deploy/manifests/crds/carve.dev_gpunodes.yaml api/v1alpha1/zz_generated.deepcopy.go; do \
	  cmp -s $$d/$$(basename $$f) $$f || { echo "$$f is stale: run make generate"; exit 1; }; done
	@go run ./cmd/generate-nodeapi -check

.PHONY: image
image: build $(BIN)/lab ## write the container image to build/carve.tar, without a daemon
	@mkdir -p build
	@$(LAB) image carve -o build/carve.tar

.PHONY: demo
demo: preflight build $(BIN)/demo ## a real cluster with a software card node, carve installed, two pods on one card
	@$(BIN)/demo up

.PHONY: demo-down
demo-down: $(BIN)/demo ## end the demo and leave nothing of it
	@$(BIN)/demo down

.PHONY: bench
bench: bench-vgpu bench-agent bench-extender bench-packing bench-node ## all benches

.PHONY: bench-vgpu
bench-vgpu: ## what the front libraries add to a launch and to an allocation, and how exact shares of compute are
	@$(MAKE) -s --no-print-directory -C vgpu/lib bench
	@go test -count=1 -timeout 30m -v -run UnderContention ./vgpu/compute/loop -args -seeds 20 -seed 3000 -lines | grep _points\\\|_percent
	@go run ./vgpu/compute/sim/cmd -part lines

.PHONY: simulate
simulate: ## the tables of compute shares by simulation: designs, elastic shares, sensitivities, limits
	@go run ./vgpu/compute/sim/cmd

.PHONY: bench-agent
bench-agent: native ## CPU of the agent's look at 32 containers in use, each second; an idle node takes none
	@go test -count=1 -run '^$$' -bench LookAt32 ./vgpu/agent | awk '/agent_look/ {print "agent_look_32_containers", $$(NF-1), "ms/s"}'
	@go test -count=1 -run '^$$' -bench LookAt32 ./vgpu/compute/loop | awk '/compute_look/ {print "compute_look_32_containers", $$(NF-1), "ms/s"}'

.PHONY: bench-extender
bench-extender: ## CPU of a scheduling decision by cluster size
	@go run ./scheduler-extender/bench

# PACKING="-traces all -seeds 300-309", say; CARVE_TRACES names the folder that has openb/.
.PHONY: bench-packing
bench-packing: ## how full the extender packs a cluster beside published policies, and how fast it decides
	@go run ./scheduler-extender/packing/bench $(PACKING)

.PHONY: bench-node
bench-node: ## what carve adds to a container's start, and what it writes to the API server
	@$(MAKE) --no-print-directory build $(BIN)/benchnode >&2
	@go run ./nri-hook/bench
	@$(BIN)/benchnode

.PHONY: clean
clean: ## remove what was built here (not the cache of Kubernetes programs)
	rm -rf $(BIN) build
	$(MAKE) --no-print-directory -C vgpu/lib clean
	$(MAKE) --no-print-directory -C vgpu/soft clean
