# `make demo` shows fedcog, `make test` checks all of it. Both set up .venv first.
.PHONY: help demo study quick test format style types tests docs schema clean

# The first Python that is 3.11 or newer; choose another with: make demo PYTHON=/path/to/python3.12
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo "$$python"; break; }; done)
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt

help:  ## show this help
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## */|/' | awk -F'|' '{printf "  make %-8s %s\n", $$1, $$2}'

demo: .venv/.base  ## compare FedAvg with FedCOG on ten clients, three seeds
	@$(BIN)/python -m fedcog compare examples/demo.toml --algorithms fedavg fedcog --seeds 0 1 2 --out runs/demo

METHODS := fedavg fedavgm fedadam fedexp fedprox scaffold moon fedsam feddecorr feddyn fednova fedreg fedgen fedrep ditto vhl
study: .venv/.base  ## compare all methods, bare and with FedCOG: half an hour on one core, resumable
	-$(BIN)/python -m fedcog compare examples/study.toml --algorithms $(METHODS) $(METHODS:%=%+fedcog) --seeds 0 1 2 --out runs/study
	$(BIN)/python -m fedcog report runs/study --table runs/study/table.md

test: style types tests  ## check format, lint, types, and run all tests

quick: .venv/.dev  ## run the tests that need no Ray, browser, processes or compiler
	$(BIN)/python -m pytest -n 2 -m "not (ray or browser or processes or compiler or slow or long or gpu)"

format: .venv/.dev  ## format the code and fix what ruff can fix
	$(BIN)/python -m ruff format .
	$(BIN)/python -m ruff check --fix .

style: .venv/.dev
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m ruff check .

types: .venv/.dev
	$(BIN)/python -m mypy

# Hundreds of test processes import fedcog; byte code saves each from compiling it.
tests: .venv/.dev
	$(BIN)/python -m compileall -q fedcog
	$(BIN)/python -m pytest -n 3 --dist loadscope

docs: .venv/.dev  ## build the documentation into site/
	$(BIN)/python -m mkdocs build --strict

schema: .venv/.base  ## regenerate the flags of the command line after a change of settings
	$(BIN)/python -m fedcog.cli.schema

.venv/.base: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "fedcog needs Python 3.11 or newer: install it, or name it with make PYTHON=..."; exit 1; }
	@echo "Setting up .venv"
	"$(PYTHON)" -m venv .venv
	$(PIP) --editable .
	@touch .venv/.base

.venv/.dev: .venv/.base
	@echo "Installing what the tests need"
	$(PIP) --editable '.[dev]'
	$(PIP) --no-deps timm torchvision  # torchvision would pull the torch that it was built for
	@$(BIN)/python -m compileall -q -j 0 .venv/lib >/dev/null || true  # some files are for another Python
	@touch .venv/.dev

clean:  ## remove .venv and the demo's runs
	rm -rf .venv runs/demo
