# make help lists the verbs.

GOFUMPT     = go run mvdan.cc/gofumpt@v0.12.0
STATICCHECK = go run honnef.co/go/tools/cmd/staticcheck@v0.8.2
ERRCHECK    = go run github.com/kisielk/errcheck@v1.30.0 -ignoretests

# Of "go test": make test TESTFLAGS='-run TestFence -v'
TESTFLAGS ?=
MATRIXFLAGS ?=
# Of make bench: a workload, and its flags.
WORKLOAD ?= short

.PHONY: help demo test race lint fmt bench bench-full matrix model check install

help: ## list the verbs
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

demo: ## show what Weir promises, on a private server, and check that it held
	@.ci/run need
	go run ./cmd/weir demo

test: ## run all tests, on private servers
	@.ci/run need
	go test $(TESTFLAGS) ./...
	cd adapter/watermill && go test $(TESTFLAGS) ./...
	cd bench && go vet ./...

race: ## the same with the race detector
	@$(MAKE) --no-print-directory test TESTFLAGS='-race $(TESTFLAGS)'

lint: ## check format, vet, staticcheck and errcheck
	@files=$$($(GOFUMPT) -l .) && test -z "$$files" || { printf 'not formatted, run make fmt:\n%s\n' "$$files"; exit 1; }
	go vet ./...
	$(STATICCHECK) ./...
	$(ERRCHECK) -exclude .errcheck ./...
	for module in bench adapter/watermill; do \
		(cd $$module && go vet ./... && $(STATICCHECK) ./... && $(ERRCHECK) -exclude "$(CURDIR)/.errcheck" ./...) || exit 1; \
	done

fmt: ## format the Go files
	$(GOFUMPT) -w .

bench: ## print the targets with measured figures: make bench WORKLOAD='single --peer nats'
	@.ci/run need
	cd bench && go run . $(WORKLOAD)

bench-full: ## run all benchmarks, keep their results and write docs/benchmarks.md
	@.ci/run need
	cd bench && go run . full --json results; go run . page

# Of make matrix: MATRIXFLAGS=-update writes what it found into internal/matrix/result.json and docs/operations.md.
matrix: ## run a suite on PostgreSQL 14 to 18, directly and through PgBouncer, in every query mode
	@.ci/run need
	cd internal/matrix && go test -run TestMatrix -count=1 -timeout 90m -full $(MATRIXFLAGS)

model: ## check the model of the fence, and that each broken variant of it fails
	docs/model/run.sh

check: ## everything that a change must pass
	.ci/run

install: ## install the command weir
	go install ./cmd/weir
