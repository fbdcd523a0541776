# Two commands for a fresh Linux machine with Python 3.11 or newer, no GPU and no account: `make demo`, `make test`.

PYTHON ?= python3
VENV ?= .venv
OUT ?= outputs/demo
GPU_WORKERS ?= 8
SECONDS ?= 60
OP ?= attention
FUZZ_ARGS ?=
MUTANTS_ARGS ?=
PIP_ARGS ?=
PYTEST_ARGS ?=

# The modules whose names a user may rely on.
API := turbo_rcm_patch $(addprefix turbo_rcm_patch., boundary config errors models ops ops.sageattn patching skip checkpoints tiny video)

BIN := $(VENV)/bin
LINT := $(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check $(PIP_ARGS) -c constraints.txt

.DEFAULT_GOAL := help
.PHONY: help demo test test-diffusers test-engines test-gpu test-two-gpus test-op fuzz mutants record lint format docs dist clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'
	@printf '\nVariables: PYTHON=%s  VENV=%s  OUT=%s  GPU_WORKERS=%s  PIP_ARGS, PYTEST_ARGS (passed on)\n' \
	    '$(PYTHON)' '$(VENV)' '$(OUT)' '$(GPU_WORKERS)'

demo: $(VENV)/.installed ## Text to video with and without the patch on the shipped model, and a report with the verdict
	$(BIN)/python -m turbo_rcm_patch demo --out $(OUT)

# Lint and types run beside the tests: by themselves they keep one core busy.
test: $(VENV)/.installed-dev ## Lint, types and every test that a CPU can run; the slowest are in build/durations.txt
	($(LINT)) & lint=$$!; \
	$(BIN)/python -m pytest -v -n 2 --dist worksteal -m "not gpu" --durations-to=build/durations.txt $(PYTEST_ARGS); code=$$?; \
	wait $$lint || { echo 'make lint found faults: they are named above' >&2; exit 1; }; exit $$code

# Not part of `test`: it takes wheels from the package index.
test-engines: $(VENV)/.installed-dev ## The attention inside the newest wheels of SGLang, vllm-omni, xDiT, FastVideo (ENGINES='xdit' for some)
	$(BIN)/python tests/engines/released.py $(ENGINES)

# Nor this: it runs the tests of diffusers' release from a checkout, DIFFUSERS=PATH, or clones its tag.
test-diffusers: $(VENV)/.installed-dev ## diffusers' own tests, unpatched and over models that are patched as they are built
	$(BIN)/python tests/diffusers_suites.py $(if $(DIFFUSERS),--checkout $(DIFFUSERS)) $(SUITES)

# Most of a GPU test is compiling kernels on the CPU, so several processes share the card.
test-gpu: $(VENV)/.installed-dev ## The GPU suite, on one card
	$(BIN)/python -m pytest -v -n $(GPU_WORKERS) --dist worksteal -m gpu $(PYTEST_ARGS)

test-two-gpus: $(VENV)/.installed-dev ## Ulysses, a ring and CFG parallel over two cards through NCCL, each against one card
	$(BIN)/python -m pytest -v -m gpu tests/gpu/test_two_gpus.py tests/test_several_ranks.py $(PYTEST_ARGS)

test-op: $(VENV)/.installed-dev ## The tests of one operator, without Triton's interpreter: make test-op OP=attention
	$(BIN)/python -m pytest -v -m "not gpu and not interpreter" tests/ops/test_$(OP).py $(PYTEST_ARGS)

fuzz: $(VENV)/.installed-dev ## Random operations against fp64 and random models against unpatched ones, for SECONDS=60
	$(BIN)/python -m tools.fuzz --seconds $(SECONDS) $(FUZZ_ARGS)

mutants: $(VENV)/.installed-dev ## Break the library in many places and see whether a test notices
	$(BIN)/python -m tools.mutants $(MUTANTS_ARGS)

# A benchmark replaces no file, so a second call measures what is not there.
record: $(VENV)/.installed ## Measure speed and distance to fp32 on one card, into results/gpu; what is there stays
	for one in attention network pipeline vae; do \
		[ -e results/gpu/$$one.json ] || $(BIN)/python -m benchmarks $$one --out results/gpu || exit 1; done

lint: $(VENV)/.installed-dev ## Lint, formatting and types
	$(LINT)

format: $(VENV)/.installed-dev ## Format and fix what can be fixed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.installed-dev ## The API reference, from the docstrings, into build/docs
	$(BIN)/python -m pdoc -d google -o build/docs $(API)

dist: $(VENV)/.installed-dev ## Wheel and source distribution into dist/, checked: metadata, contents, sizes
	rm -rf dist
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m twine check --strict dist/*
	$(BIN)/python .ci/check_dist.py dist

# Not outputs/: what is there may have taken hours. VENV may name a folder that is no environment.
clean: ## Remove the environment and what was built; videos and reports in outputs/ stay
	[ ! -f $(VENV)/pyvenv.cfg ] || rm -rf $(VENV)
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "Python 3.11 or newer is needed, and '$(PYTHON)' is not. Say which: make PYTHON=python3.12" >&2; exit 1; }
	@had=; [ ! -e $(VENV) ] || had=1; $(PYTHON) -m venv $(VENV) || \
	    { echo "'$(PYTHON) -m venv' failed. On Debian or Ubuntu: apt-get install python3-venv" >&2; \
	      [ -n "$$had" ] || rm -rf $(VENV); exit 1; }

# A stamp says that the environment holds what these two files ask for, so that a second run starts at once.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e '.[all]'
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(INSTALL) -e '.[dev]'
	@touch $(VENV)/.installed $@
