# `make demo` generates from the built-in model.
# `make test` runs before every change: a few cases of every promise, on two idle cores in at most 12 minutes.
# `make test-long` runs the rest of what CI runs: every value of the grids, storms, faults under load, compilers.
# WITHIN=SECONDS skips the tests that have not started by then; the first test to run depends on the commit.
# `make test-all` runs everything that needs no GPU: whole grids, long storms, and the tools of bench/ too.
# `make test-gpu` runs what needs a GPU.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
# Where PYTHONDONTWRITEBYTECODE is set, every process of every test would compile the package's modules again, and pytest
# would rewrite the assertions of all tests each time: half of the time in which they are collected.
export PYTHONDONTWRITEBYTECODE :=
# Neighbours share a worker, and so the engines of their module, until one has nothing left to do.
PYTEST_PARALLEL := OMP_NUM_THREADS=1 $(PYTEST) -n auto --dist worksteal

# Of the few tests that run alone and of the long ones, the files: importing all of the others takes a minute.
ALONE = $(sort $(shell grep -rl --include='test_*.py' 'mark.alone' tests))
LONG = $(sort $(shell grep -rlE --include='test_*.py' 'mark.(long|spread)|graded_grid' tests))

.PHONY: demo test test-long test-all test-gpu wheel lint format clean

$(VENV)/.installed: pyproject.toml constraints.txt setup.py $(wildcard src/penstock/kernels/native/*)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt torch setuptools wheel
	$(BIN)/pip install --quiet -c constraints.txt --no-build-isolation -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/pip install --quiet -c constraints.txt --no-build-isolation -e ".[dev]"
	touch $@

demo: $(VENV)/.installed
	@[ "$$PENSTOCK_NATIVE" = 0 ] || $(BIN)/python -m penstock.kernels.native
	@echo 'penstock generate --chat --prompt "What are you?"'
	@$(BIN)/penstock generate --chat --prompt "What are you?"
	@echo 'penstock generate --prompt "Once upon a time" --max-tokens 200'
	@$(BIN)/penstock generate --prompt "Once upon a time" --max-tokens 200

test: $(VENV)/.installed-dev
	$(PYTEST_PARALLEL) -m "not alone and not long and not exhaustive"
	$(PYTEST) -m "alone and not long and not exhaustive" $(ALONE)

test-long: $(VENV)/.installed-dev
	$(PYTEST_PARALLEL) -m "long and not alone and not exhaustive" $(if $(WITHIN),--within $(WITHIN)) $(LONG)
	$(PYTEST) -m "long and alone and not exhaustive" $(ALONE)

# Files whose engines are in the test's own process, with workers in others; tests marked `uniproc` are skipped.
WITH_WORKER_PROCESS := $(patsubst %,tests/integration/test_%.py,disaggregation identity_matrix identity_speculation \
	kv_connectors kv_events llm rejection_sampling structured_outputs)

test-all: $(VENV)/.installed-dev
	$(PYTEST_PARALLEL) -m "not alone"
	$(PYTEST_PARALLEL) -m "not alone and not exhaustive" --executor mp $(WITH_WORKER_PROCESS)
	$(PYTEST) -m alone $(ALONE)

test-gpu: $(VENV)/.installed-dev
	$(PYTEST) -m gpu

# One wheel for Python 3.11 to 3.13, with the compiled kernels in it.
wheel: $(VENV)/.installed
	$(BIN)/pip wheel --quiet --no-deps --no-build-isolation -w dist .

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build src/*.egg-info src/penstock/kernels/*.so
