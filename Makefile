# Every target does its own set-up: on a fresh machine with Python 3.11 or newer, `make demo` and `make test` work at once.
#
#   ENV=cpu-py311     which lock of requirements/ to install; ENV=v100-py312 is the one for a machine with V100s (Python 3.12)
#   PYTHON=python3    the interpreter that makes the environment
#   TORCH_INDEX=      an additional package index; with PyTorch's CPU wheels there, torch is a tenth of the size
#   SLOW=2            a test tier fails when it takes longer than this many times its budget

ENV ?= cpu-py311
PYTHON ?= python3
TORCH_INDEX ?=
SLOW ?= 2
VENV ?= .venv

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --quiet $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
TIER := $(BIN)/python ci/tier.py --slow $(SLOW)
OPS := packages/sm70kernels/src/sm70kernels/ops
PROJECTS := packages/sm70kernels/pyproject.toml packages/revolta-serve/pyproject.toml

# Two stamps in one environment: what serving needs (the demo waits for nothing else), then everything for tests and checks.
MADE := $(VENV)/.made
SERVE := $(VENV)/.installed-$(ENV)-serve
FULL := $(VENV)/.installed-$(ENV)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test test-full test-pure test-cpu test-http test-kernels check size where wheel bench bench-serve clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo; sed -n 's/^#   /  /p' $(MAKEFILE_LIST)

setup: $(FULL) ## Install both packages and everything tests and checks need into .venv

demo: $(SERVE) ## Make a tiny checkpoint, serve it on this CPU, ask it one question
	$(BIN)/revolta-serve demo $(ARGS)

test: test-pure test-cpu test-http test-kernels ## Run the four test tiers, each under its time budget

test-pure: $(FULL) ## Test scheduler, cache, text and the checks themselves, with torch made unimportable (1 minute)
	@$(TIER) pure $(ARGS)

test-cpu: $(FULL) ## Test model, runner, weights and engine on tiny checkpoints (5 minutes)
	@$(TIER) cpu $(ARGS)

test-http: $(FULL) ## Test the server over loopback HTTP (4 minutes)
	@$(TIER) http $(ARGS)

test-kernels: $(FULL) ## Test every op of sm70kernels against its definition (4 minutes)
	@$(TIER) kernels $(ARGS)

test-full: $(FULL) ## Run the sweeps and long runs that make test leaves out (35 minutes)
	@$(TIER) full $(ARGS)

# All of them run, whatever fails first: one look shows everything there is to mend.
CHECKS := "ruff check --no-cache packages ci bench" "mypy" "mypy --strict $(sort $(wildcard ci/*.py))" "python ci/check_layers.py" \
  "python ci/check_ops.py" "python ci/check_bans.py" "python ci/check_size.py" "python ci/ptxas_budget.py"

check: $(FULL) ## Lint, check types, import arrows, op files, bans, sizes, what kernels take of a V100
	@failed=; for command in $(CHECKS); do echo "$$command"; $(BIN)/$$command || failed="$$failed [$$command]"; done; \
	  test -z "$$failed" || { echo "check: failed:$$failed"; exit 1; }

size: $(SERVE) ## Print lines and files by folder, config fields, reads of the environment
	@$(BIN)/python ci/check_size.py --table

where: ## Show the files of one op (OP=gdn_conv)
	@test -n "$(OP)" || { echo "where: name an op, for example: make where OP=gdn_conv"; exit 2; }
	@test -f $(OPS)/$(OP).py || { echo "where: no op $(OP); there are:" $(sort $(basename $(notdir $(filter-out %/__init__.py,$(wildcard $(OPS)/*.py))))); exit 2; }
	@ls -1 $(wildcard $(OPS)/$(OP).py $(OPS)/$(OP).cu packages/sm70kernels/tests/test_$(OP).py bench/ops/bench_$(OP).py)

# What an earlier build left in build/ would be packed too.
wheel: $(FULL) ## Build both packages, with every kernel compiled, into dist/
	$(BIN)/python -m sm70kernels build
	rm -rf packages/*/build
	$(PIP) wheel --quiet --no-deps --no-build-isolation --wheel-dir dist packages/sm70kernels packages/revolta-serve
	rm -rf packages/*/build

bench: $(FULL) ## Test every kernel and time it on this GPU; without one, estimate what a V100 would need
	$(BIN)/python -m sm70kernels bench --all $(ARGS)

bench-serve: $(FULL) ## Time decode steps of the engine and the server beside transformers on this machine
	$(BIN)/python bench/serve/bench_generate.py $(ARGS)

clean: ## Remove the environment and every cache
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis packages/sm70kernels/src/sm70kernels/built
	find packages ci bench -name __pycache__ -prune -exec rm -rf {} +

$(MADE):
	@command -v $(PYTHON) >/dev/null || { echo "setup: there is no $(PYTHON): apt-get install python3 python3-venv, or say PYTHON=..."; exit 1; }
	@$(PYTHON) ci/check_python.py $(ENV)
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(SERVE): requirements/$(ENV)-serve.lock $(PROJECTS) | $(MADE)
	@rm -f $(VENV)/.installed-*
	@echo "setup: installing what serving needs, torch among it: a minute or more, and gigabytes where pip finds only its CUDA build"
	$(INSTALL) -r requirements/$(ENV)-serve.lock
	$(INSTALL) --no-deps --no-build-isolation -e packages/sm70kernels -e packages/revolta-serve
	$(PIP) check
	@touch $@

$(FULL): requirements/$(ENV).lock $(SERVE)
	$(INSTALL) -r requirements/$(ENV).lock
	$(BIN)/python ci/fetch_nvdisasm.py
	$(PIP) check
	@touch $@
