# Needs only Python 3.11 or newer (with venv) and make. `make demo` and `make test` are the two commands.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS := 1
export MKL_NUM_THREADS := 1

.PHONY: venv demo test test-slow lint bench dashboards gpu-check clean

venv: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt "torch==2.13.0" -e ".[dev]"
	touch $@

demo: venv
	$(BIN)/python -m jobs.train --config jobs/configs/demo.yaml

lint: venv
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell collectives placement actors zenray jobs tests docs README.md CHANGELOG.md

test: lint
	$(BIN)/python -m pytest -m "not slow" --durations=20

test-slow: venv
	ZENRAY_TEST_EXAMPLES=drawn $(BIN)/python -m pytest -m slow

bench: venv
	$(BIN)/python -m jobs.bench sparse
	$(BIN)/python -m jobs.bench net

dashboards: venv
	$(BIN)/python -c 'from pathlib import Path; from zenray.dashboards import write; write(Path("dashboards"))'

# Needs a card, and torch, numpy, numba and CuPy in $(PYTHON): no virtual environment, no network, no data.
gpu-check:
	$(PYTHON) -m collectives.gpucheck

clean:
	rm -rf $(VENV) runs
