# One command for each thing a developer does. Every target makes the environment it needs first.
# `make test` is what CI runs (.ci/run).

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

# Any Python from 3.11 on; it only makes the environments, in which everything else runs.
PYTHON ?= $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest
# Four workers suit two cores: tests with real processes wait more than they compute. A file's tests stay on one worker, so that its fixtures
# are made once. The files that wait most come first; the many short ones of tests/unit fill what is left at the end.
XDIST := -n 4 --dist loadfile --no-loadscope-reorder
SUITES := tests/integration tests/examples tests/unit

# Where it is set, each of the hundreds of processes that the tests start would compile its modules again, for a third of its start.
export PYTHONDONTWRITEBYTECODE :=

ENV := .venv/.installed
CODEGEN := .venv-codegen/.installed
SPARK := .venv/.installed-spark
KAFKA := .venv-kafka/.installed
DEPLOY := .venv-deploy/.installed
PYPROJECTS := pyproject.toml $(wildcard clients/*/pyproject.toml services/*/pyproject.toml cli/pyproject.toml)

# A suite without tests is an error, never a silent success.
need_tests = for suite in $(1); do test -n "$$(find $$suite -name 'test_*.py' 2>/dev/null)" \
	|| { echo "make $@: no tests in $$suite" >&2; exit 1; }; done

.PHONY: help
help: ## show this list
	@awk -F ':.*## ' '/^[a-z -]+:.*## / { printf "  make %-26s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# --- environments -----------------------------------------------------------------------------------

.PHONY: env
env: $(ENV) ## make or update .venv (by uv when present, else venv + pip)

$(ENV): $(PYPROJECTS) tools/make_env.py
	@$(make_env) dev

# Both are found, or installed where this runs as root on Debian; else one line says what to do.
.PHONY: jdk
jdk:
	@$(need_python); $(PYTHON) tools/ensure_jdk.py "$(ASKED)"

# Both may install by apt-get, which bears no other beside it.
ifneq ($(filter jdk,$(MAKECMDGOALS)),)
etcd: | jdk
endif

.PHONY: etcd
etcd:
	@$(need_python); $(PYTHON) tools/ensure_etcd.py "$(ASKED)"

# With all that ENV has, whose stamp it sets too: by one run of the installer, not two.
$(SPARK): $(PYPROJECTS) tools/make_env.py
	@$(make_env) spark

$(CODEGEN): tools/codegen-requirements.txt tools/make_env.py
	@$(make_env) codegen

$(KAFKA): tests/bench/spark/requirements.txt tools/make_env.py
	@$(make_env) kafka

$(DEPLOY): tools/deploy-requirements.txt tools/make_env.py
	@$(make_env) deploy

# Who is named where something is missing.
ASKED = make $(MAKECMDGOALS)
need_python = test -n "$(PYTHON)" || { echo "make: no Python 3.11 or newer found; set PYTHON=" >&2; exit 1; }
make_env = $(need_python); $(PYTHON) tools/make_env.py

# --- see it work ------------------------------------------------------------------------------------

.PHONY: demo
demo: $(ENV) ## real messages through a real broker: 336,776 flights
	@$(BIN)/python tools/fetch_flights.py
	@$(BIN)/python -m protomq_cli.demo

.PHONY: cluster
cluster: etcd $(ENV) ## 2 masters, 2 slaves, etcd, 2 name servers on this machine, until Ctrl-C; LAYOUT=deploy/3r-etcd: another one
	@$(BIN)/python tools/cluster.py $(or $(LAYOUT),deploy/2m-2s-etcd)

.PHONY: demo-failover
demo-failover: etcd $(ENV) ## the flights through the cluster above, a master of which is killed with -9 on the way: the count, the time without service
	@$(BIN)/python tools/fetch_flights.py
	@$(BIN)/python tools/demo_failover.py --layout $(or $(LAYOUT),deploy/2m-2s-etcd)

.PHONY: demo-spark
demo-spark: jdk $(SPARK) ## Spark sums up the flights that `make demo` has sent (needs a JDK 17+)
	@test -d build/demo-store/commitlog || $(MAKE) --no-print-directory demo
	@$(BIN)/python clients/spark/demo.py

# --- checks -----------------------------------------------------------------------------------------

# The fast checks come before the tests, and one pytest run comes last: its closing line counts everything. What keeps one core busy only has
# something beside it: the environments are made together, and the stubs checked while the larger one is made; ruff and buf run beside the
# collection, and mypy beside its rest and the tests, which wait a lot. The collection compiles the tests for all workers, which would each
# do it again in a fresh checkout.
.PHONY: test
test: ## all that must pass: lint, types, proto, unit, integration, examples (Spark too: a JDK 17+; etcd)
	@$(MAKE) --no-print-directory -j 3 jdk etcd $(SPARK) generate-check ASKED="make test"
	@$(MAKE) --no-print-directory -j 2 collect lint proto types tests

# Without make's own variables: a test that starts make would get them.
.PHONY: tests
tests: | collect lint proto
	@unset MAKEFLAGS MAKELEVEL MFLAGS; $(PYTEST) $(XDIST) $(SUITES) -m "not long" || \
		{ test $$? -eq 1 && $(BIN)/python tools/failed_again.py $(SUITES); }

# One line, or all that pytest says against it.
.PHONY: collect
collect: jdk $(SPARK)
	@$(call need_tests,$(SUITES))
	@found=$$($(PYTEST) $(SUITES) -m "not long" --collect-only -qq -p no:cacheprovider 2>&1) || { echo "$$found"; exit 1; }

ROUNDS ?= 10
.PHONY: properties
properties: $(ENV) ## the property tests with new examples, ROUNDS=10 times; each round prints its seed
	@$(call need_tests,tests/unit)
	for round in $$(seq $(ROUNDS)); do seed=$$RANDOM; echo "round $$round: --hypothesis-seed=$$seed"; \
		$(PYTEST) $(XDIST) tests/unit --ignore tests/unit/protomq_spark -m hypothesis -q --hypothesis-profile searching --hypothesis-seed=$$seed; done

.PHONY: lint
lint: $(ENV) ## ruff
	$(BIN)/ruff check .

# Folders without a Python file are an error to mypy.
typed = $(foreach folder,$(wildcard clients/*/*protomq* services/*/protomq_* cli/protomq_cli tools tests examples),\
	$(if $(shell find $(folder) -name '*.py'),$(folder)))

.PHONY: types
types: $(ENV) ## mypy
	$(BIN)/mypy $(typed)

.PHONY: unit examples
unit examples: jdk $(SPARK) ## a test suite
	@$(call need_tests,tests/$@)
	$(PYTEST) $(XDIST) tests/$@

.PHONY: integration
integration: jdk etcd $(SPARK) ## the tests with real processes, Spark and etcd among them (a JDK 17+)
	@$(call need_tests,tests/$@)
	$(PYTEST) $(XDIST) tests/$@ -m "not long"

.PHONY: long
long: jdk etcd $(SPARK) ## the tests that are too long for `make test`, without those of Spark (`make spark`)
	$(PYTEST) -n 2 --dist loadfile $(filter-out $(wildcard tests/*/test_spark_*.py),$(wildcard tests/integration/test_*.py)) -m long -rP

.PHONY: spark
spark: jdk $(SPARK) ## the tests of the Spark package with a real Spark, a cluster too (a JDK 17+)
	$(PYTEST) tests/unit/protomq_spark $(filter-out tests/chaos/%,$(wildcard tests/*/test_spark_*.py))

.PHONY: spark-package
spark-package: $(ENV) ## what must be on the driver and executors of a cluster: build/spark-package
	@$(BIN)/python tools/spark_package.py

.PHONY: chaos
chaos: etcd $(ENV) $(CODEGEN) ## faults made on purpose, the long form (minutes)
	@$(call need_tests,tests/chaos)
	$(PYTEST) -n 2 --dist worksteal tests/chaos --ignore tests/chaos/test_spark_long.py -m "not soak" --timeout 3600 -rP

.PHONY: spark-chaos
spark-chaos: jdk $(SPARK) ## the same for Spark copying a topic: half an hour, or PROTOMQ_CHAOS_SEEDS=3 (a JDK 17+)
	$(PYTEST) tests/chaos/test_spark_long.py --timeout 0 -rP

.PHONY: soak
soak: etcd $(ENV) $(CODEGEN) ## faults and load for an hour or more
	@$(call need_tests,tests/chaos)
	$(PYTEST) tests/chaos -m soak --timeout 0 -rP

.PHONY: deploy-check
deploy-check: etcd $(ENV) $(DEPLOY) ## the files of deploy/: linters, helm (or Go, to build one), the compose layout started natively
	@$(BIN)/python tools/deploy_check.py
	$(PYTEST) tests/unit/test_deploy_files.py tests/integration/test_deploy.py tests/integration/test_compose.py

.PHONY: operations
operations: etcd $(ENV) ## grow, shrink, replace, upgrade and downgrade a cluster under load, and count (minutes)
	$(PYTEST) tests/integration/test_drain.py tests/integration/test_growing.py tests/integration/test_rolling.py \
		tests/integration/test_failover_operations.py -rP

# --- the contract -----------------------------------------------------------------------------------

.PHONY: proto
proto: $(ENV) ## buf lint, and buf breaking against the last released contract
	$(BIN)/buf lint
	@test -f proto/baseline.binpb || { echo "make proto: no proto/baseline.binpb: run make proto-release" >&2; exit 1; }
	$(BIN)/buf breaking --against proto/baseline.binpb

# A committed image and not a git reference: main compared with main says nothing, and CI may have neither
# tags nor history. That the promise moves is then a line in a commit that a reviewer sees.
.PHONY: proto-release
proto-release: $(ENV) ## make the contract as it stands the one that must not break
	$(BIN)/buf lint
	$(BIN)/buf build --exclude-source-info -o proto/baseline.binpb

.PHONY: generate
generate: $(CODEGEN) ## write the Python stubs of proto/
	@.venv-codegen/bin/python tools/generate_stubs.py

.PHONY: generate-check
generate-check: $(CODEGEN) ## prove that the committed stubs are what the generator makes
	@.venv-codegen/bin/python tools/generate_stubs.py --check

# --- measures ---------------------------------------------------------------------------------------

.PHONY: bench
bench: $(ENV) ## the benchmarks; writes docs/benchmarks.md and build/bench.json
	@test -f tests/bench/__main__.py || { echo "make bench: no tests/bench/__main__.py" >&2; exit 1; }
	$(BIN)/python -m tests.bench

.PHONY: bench-peers
bench-peers: $(ENV) ## the same, interleaved with real RocketMQ (needs a JDK and Maven)
	@test -f tests/bench/peers/__main__.py || { echo "make bench-peers: no tests/bench/peers/__main__.py" >&2; exit 1; }
	$(BIN)/python -m tests.bench.peers

BEFORE ?= $(error make bench-turns: BEFORE=checkout AFTER=checkout [ROWS="callers consume"] [TURNS=20])
.PHONY: bench-turns
bench-turns: $(ENV) ## broker CPU per message of two checkouts, in turns: BEFORE=dir AFTER=dir
	$(BIN)/python -m tests.bench.turns "$(BEFORE)" "$(AFTER)" $(ROWS) --turns $(or $(TURNS),20)

.PHONY: bench-spark
bench-spark: jdk $(SPARK) $(KAFKA) ## Spark with protomq against the SDK and against real Kafka (needs a JDK and Maven)
	$(BIN)/python -m tests.bench.spark

# --- the rest ---------------------------------------------------------------------------------------

.PHONY: clean
clean: ## remove what was built, the environments too
	rm -rf build .venv .venv-codegen .venv-kafka .venv-deploy .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +
