# Everything starts from a bare clone: Python 3.11 or newer, git, make and a compiler are enough.
#   make test    set up .venv, lint, type-check, run the tests
#   make demo    set up .venv, train FC, TRL and R-TRL heads on real digits, and show the theory on simulated data
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# torch is always asked for by this exact version: a bare torch would bring gigabytes of CUDA packages.
TORCH := torch==2.13.0
# The tests' oracle for APGD. It declares torchvision (gigabytes of CUDA, and it does not import on a CPU torch) and an old
# requests, and imports neither: so it comes without its dependencies.
ORACLE := torchattacks==3.5.1
# Two workers, one thread each: torch's own threads would fight over the two cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n 2

.PHONY: help test lint demo bench comparison pictures clean
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -E '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

test: lint ## lint, type-check and test (sets up .venv on first use)
	$(PYTEST)

lint: $(VENV)/.ready-test ## ruff and mypy alone
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

demo: $(VENV)/.ready-all ## heads on real digits, and the theory on simulated data: tables, figures, JSON in out/
	$(BIN)/tensor-dropout reproduce digits --out out/digits
	$(BIN)/tensor-dropout reproduce synthetic-cp --preset quick --out out/synthetic-cp
	$(BIN)/tensor-dropout reproduce synthetic-tucker --preset quick --out out/synthetic-tucker

bench: $(VENV)/.ready-all ## time and memory of the exact moments; error of the closed-form cross-entropies
	$(BIN)/python benchmarks/moments.py
	$(BIN)/python benchmarks/cross_entropy.py

comparison: $(VENV)/.ready-test ## measure the README's comparison with TensorLy-Torch anew, and rewrite its table
	REWRITE_COMPARISON=1 $(BIN)/pytest tests/test_comparison.py

pictures: demo ## draw the pictures of docs/images anew
	$(BIN)/python tools/draw_masks.py
	$(BIN)/python tools/shrink_png.py out/digits/digits-quick.png docs/images/digits.png

clean: ## remove .venv, caches and results
	rm -rf $(VENV) out .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "tensor-dropout needs Python 3.11 or newer; name one with: make PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# .ready-test and .ready-all: the extras are installed as pyproject.toml and constraints.txt now stand.
$(VENV)/.ready-%: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[$*]'
	@if [ $* = test ]; then $(BIN)/python -m pip install --quiet --no-deps $(ORACLE); fi
	@touch $@
