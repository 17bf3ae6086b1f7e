# `make demo` generates from the built-in model, `make test` runs everything that needs no GPU.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-gpu lint format bench clean

$(VENV)/.installed: pyproject.toml constraints.txt setup.py $(wildcard src/penstock/kernels/native/*)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt torch setuptools wheel
	$(BIN)/pip install --quiet -c constraints.txt --no-build-isolation -e .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(BIN)/pip install --quiet -c constraints.txt --no-build-isolation -e ".[dev]"
	touch $@

demo: $(VENV)/.installed
	@echo 'penstock generate --chat --prompt "What are you?"'
	@$(BIN)/penstock generate --chat --prompt "What are you?"
	@echo 'penstock generate --prompt "Once upon a time" --max-tokens 200'
	@$(BIN)/penstock generate --prompt "Once upon a time" --max-tokens 200

test: $(VENV)/.installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto -m "not alone"
	$(BIN)/python -m pytest -m alone

test-gpu: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m gpu

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build src/*.egg-info src/penstock/kernels/*.so
