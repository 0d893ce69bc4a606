# make setup   a virtual environment in .venv with everything, once
# make demo    the whole pipeline on a small synthetic world, on CPU
# make test    lint, types, tests
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
WORKERS ?= 2
PYTEST_ARGS ?=
DEMO_OUT ?= demo
# One thread per process: the tests run in several processes.
export OMP_NUM_THREADS ?= 1

.PHONY: help setup demo test lint type unit format clean
help:
	@grep -E '^# make' Makefile | sed 's/^# //'
	@echo "also: make lint | type | unit | format | clean"

setup: $(STAMP)

# torch goes first and by its exact version, so that no other requirement can choose another build; torchrec goes
# last and without its dependencies, which name the CUDA build of fbgemm and an old torchmetrics.
$(STAMP): pyproject.toml constraints.txt
	@if [ ! -x $(BIN)/python ]; then \
	  for python in $(PYTHON) python3 python3.12 python3.11 python3.13; do \
	    if $$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then \
	      echo "creating $(VENV) with $$($$python --version)"; \
	      $$python -m venv $(VENV) || { rm -rf $(VENV); exit 1; }; break; \
	    fi; \
	  done; \
	  if [ ! -x $(BIN)/python ]; then \
	    echo "error: OpenGEM needs Python 3.11, 3.12 or 3.13; found $$(python3 --version 2>&1)." \
	         "Install one, or name it: make setup PYTHON=/path/to/python3.12" >&2; exit 1; \
	  fi; \
	fi
	$(BIN)/python -m pip install -q --upgrade 'pip>=24'
	$(BIN)/python -m pip install -q -c constraints.txt torch==2.13.0
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[cpu,serve,dev]'
	$(BIN)/python -m pip install -q --no-deps torchrec==1.8.0
	@touch $(STAMP)

demo: $(STAMP)
	$(BIN)/opengem demo --out $(DEMO_OUT) --overwrite true

test: lint type unit

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

type: $(STAMP)
	$(BIN)/mypy

unit: $(STAMP)
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal $(PYTEST_ARGS)

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .ruff_cache .mypy_cache .pytest_cache .hypothesis build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
