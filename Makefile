# fedcog: `make demo` shows it, `make test` proves it. Both set up what they need in .venv and may be run again at will.

.PHONY: demo study test style types tests clean

# The first Python that is 3.11 or newer; choose another with: make demo PYTHON=/path/to/python3.12
PYTHON ?= $(shell for python in python3 python3.13 python3.12 python3.11; do \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo "$$python"; break; }; done)
BIN := .venv/bin

demo: .venv/.ready
	@$(BIN)/python -m fedcog compare examples/demo.toml --algorithms fedavg fedcog --seeds 0 1 2 --out runs/demo

# Every method, bare and with FedCOG, three seeds: about half an hour on one core. Stopped, it goes on where it was.
METHODS := fedavg fedavgm fedadam fedexp fedprox scaffold moon fedsam feddecorr feddyn fednova fedreg fedgen fedrep ditto vhl
study: .venv/.ready
	-$(BIN)/python -m fedcog compare examples/study.toml --algorithms $(METHODS) $(METHODS:%=%+fedcog) --seeds 0 1 2 --out runs/study
	$(BIN)/python -m fedcog report runs/study --table runs/study/table.md

test: style types tests

style: .venv/.ready
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m ruff check .

types: .venv/.ready
	$(BIN)/python -m mypy

# With byte code at hand: hundreds of processes load fedcog, and where Python may write none each would compile it anew.
tests: .venv/.ready
	$(BIN)/python -m compileall -q fedcog
	$(BIN)/python -m pytest -n 3 --dist loadscope

.venv/.ready: pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "fedcog needs Python 3.11 or newer, and found none: install it, or name it with make PYTHON=..."; exit 1; }
	@echo "Setting up .venv (the first time this takes a few minutes)"
	"$(PYTHON)" -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt --editable '.[dev]'
	@$(BIN)/python -m compileall -q -j 0 .venv/lib >/dev/null || true  # on all cores; files for another Python fail
	@touch .venv/.ready

clean:
	rm -rf .venv runs/demo
