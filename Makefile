# Verbs of the project. Everything happens in .venv; nothing else is touched.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: run test lint bench test-slow test-gpu clean

run: $(VENV)/.run ## install, then serve a small Kimi-K3 checkpoint on 4 ranks, balanced beside static
	$(BIN)/evenep run

# Suites that only compute; the others have clocks running, and a busy neighbour makes them late.
COMPUTING := $(addprefix tests/,kernels device experts exchange plan formats weights bench models \
	test_engine.py test_contracts.py test_cli.py test_cli_errors.py test_docs.py test_support.py)

test: lint ## lint, types and every test of the default run
	$(BIN)/python -m pytest -n 2 $(COMPUTING)
	$(BIN)/python -m pytest $(addprefix --ignore=,$(COMPUTING))

lint: $(VENV)/.test ## ruff (lint and format) and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.run ## layer time against static expert parallelism, side by side, with its spread
	$(BIN)/python -m evenep.bench.layer

test-slow: $(VENV)/.test ## the tests that take long or assert a speed
	$(BIN)/python -m pytest -m "slow or bench"

test-gpu: ## on a machine with an NVIDIA GPU, with its own torch: the tests that need one
	$(PYTHON) -m pip install --quiet --no-deps --editable .
	$(PYTHON) -m pytest -m gpu

clean: ## remove the environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build

$(VENV)/.run: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "EvenEP needs Python >= 3.11; set PYTHON=python3.11 (or newer)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) --editable .
	@touch $@

$(VENV)/.test: $(VENV)/.run
	$(PIP) --editable '.[test]'
	@touch $@
