# make demo and make test work on a fresh clone with only Python >= 3.11 and a network.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:

VENV := .venv
BIN := $(VENV)/bin
KEY := $(shell cksum < pyproject.toml | cut -d ' ' -f 1)
RUN := $(VENV)/.run-$(KEY)
DEV := $(VENV)/.dev-$(KEY)
DOCS := $(VENV)/.docs-$(KEY)

.PHONY: help demo test system test-opencl test-onednn test-no-onednn bench lint format docs clean

help:  ## show the targets
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 18

$(RUN):
	@tools/venv.sh $(VENV) $@ .
$(DEV):
	@tools/venv.sh $(VENV) $@ '.[dev]'
$(DOCS):
	@tools/venv.sh $(VENV) $@ '.[docs]'

demo: $(RUN)  ## train on handwritten digits, then classify PNG files in a new process
	$(BIN)/python examples/demo.py

test: system test-no-onednn test-onednn  ## all tests, with oneDNN and (a core part) without

system:
	@tools/system.sh

test-onednn: $(DEV)
	$(BIN)/python -m pytest -q

test-no-onednn: $(DEV)  ## the op and kernel contracts on NumPy alone
	TILEWRIGHT_ONEDNN=off $(BIN)/python -m pytest -q tests/contract

test-opencl: $(DEV) system  ## every kernel on the first OpenCL device that works (half an hour on PoCL)
	$(BIN)/python -m pip --disable-pip-version-check -qq install 'pyopencl>=2024.1'
	TILEWRIGHT_TEST_DEVICES=opencl:0 $(BIN)/python -m pytest -q tests/contract/test_kernels.py tests/unit/test_opencl.py tests/cases

bench: $(DEV)  ## host overhead, memory, training and inference times, into benchmarks/results
	$(BIN)/python benchmarks/run_all.py

lint: $(DEV)  ## ruff, pyright, import layers, no machine's own paths
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright --pythonpath $(BIN)/python
	PYTHONPATH=src $(BIN)/lint-imports
	@if git grep -InE '(^|[^A-Za-z0-9_.-])/(wor[k]|roo[t]|tm[p]|hom[e])/|pypi[.]org|pythonhosted[.]org|npmjs[.]'; then \
	  echo "the lines above name one machine's own paths or a registry's host" >&2; exit 1; \
	else [ $$? -eq 1 ]; fi

format: $(DEV)  ## let ruff fix and format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: $(DOCS)  ## the manual, into docs/_build/html
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs docs/_build/html

clean:  ## remove the environment and everything built
	rm -rf $(VENV) build dist docs/_build docs/_generated runs .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
