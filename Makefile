# Each target makes .venv first where it is missing; nothing has to be installed by hand.
.PHONY: help venv demo test lint bench soak fault-matrix fuzz format protos bundle clean
.DEFAULT_GOAL := help

VENV := .venv/bin
export PATH := $(CURDIR)/.cache/bin:$(PATH):/usr/sbin
# How `make demo` and `make bench` are called; for example: make demo ARGS="--for 20s"
ARGS ?=
# Tests mostly wait for each other's messages: more workers than cores is fine.
JOBS ?= 3

help: ## what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.venv/installed-for: pyproject.toml
	@tools/dev-env.sh

venv: ## .venv with all that development needs, and the broker for the tests
	@tools/dev-env.sh browser

demo: .venv/installed-for ## two simulated GPUs shared by three pods, live in this terminal
	@$(VENV)/edgeagent demo $(ARGS)

test: venv ## all tests
	@# Exit status 5: none of the chosen tests. Real processes and sockets on a busy machine can be too
	@# late for their neighbours: what fails side by side is run once more by itself, and must pass there.
	$(VENV)/pytest -n $(JOBS) --dist loadfile -m "not alone" $(ARGS) || [ $$? -eq 5 ] || \
		$(VENV)/pytest -m "not alone" --last-failed --last-failed-no-failures none $(ARGS)
	$(VENV)/pytest -m alone $(ARGS) || [ $$? -eq 5 ]

lint: .venv/installed-for ## formatting, lint, types, import rules, shell scripts
	$(VENV)/ruff format --check .
	$(VENV)/ruff check .
	$(VENV)/mypy
	$(VENV)/lint-imports
	@if ls *.sh tools/*.sh >/dev/null 2>&1; then $(VENV)/shellcheck -s sh $$(ls install.sh tools/*.sh 2>/dev/null); fi

bench: venv ## measure: memory, CPU, latencies; prints a table against the targets
	$(VENV)/python -m tests.bench $(ARGS)

soak: venv ## the whole agent under churn for 10 min (ARGS="--minutes 60 --seed 2"); table and plot in bench-results/
	$(VENV)/python -m tests.soak $(ARGS)

fault-matrix: venv ## every external party times every way to fail, as a table
	$(VENV)/python -m tests.e2e.test_fault_matrix

fuzz: venv ## coverage-guided fuzzing of the parsers, a minute each (ARGS="--seconds 600")
	$(VENV)/python -m tests.fuzz $(ARGS)

format: .venv/installed-for ## format and fix
	$(VENV)/ruff check --fix .
	$(VENV)/ruff format .

protos: .venv/installed-for ## regenerate edgeagent/kubelet/protos from its .proto files
	$(VENV)/python tools/make_protos.py

bundle: .venv/installed-for ## bundles for installing without a network, one per architecture, in dist/
	tools/make-bundle.sh $(ARGS)

clean: ## remove what was built
	rm -rf .venv .cache build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
