# Everything starts from a bare clone: Python 3.11 or newer, git, make and a compiler are enough.
#   make test    set up .venv, lint, type-check, run the tests
#   make demo    set up .venv, show in one picture what it is for; then the paper in miniature, and the report
#   make docs    set up .venv, build the documentation site
#   make test-ecosystem    set up .venv-ecosystem, try networks of other packages
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# torch is always asked for by this exact version: a bare torch would bring gigabytes of CUDA packages.
TORCH := torch==2.13.0
# The tests' oracle for APGD. It declares torchvision (gigabytes of CUDA, and it does not import on a CPU torch) and an old
# requests, and imports neither: so it comes without its dependencies.
ORACLE := torchattacks==3.5.1
# Two workers, one thread each: torch's own threads would fight over the two cores. Work is stolen, not dealt, so that a
# file stays with one worker, which makes what its tests share once.
WORKERS := -n 2 --dist worksteal
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest $(WORKERS)
# torchvision, timm and transformers have an environment of their own: once torchvision is installed beside a CPU torch, what
# imports it breaks, but for ecosystem/conftest.py. These are the tests in tests/ that are skipped without them.
ECOSYSTEM := .venv-ecosystem
SKIPPED_WITHOUT := $(addprefix tests/test_foreign_networks.py::test_,networks_of_other_packages \
	our_resnet_and_theirs_are_one they_train_on_pictures channels_that_torchvision_does_not_take)

.PHONY: help test test-ecosystem lint demo docs bench comparison tables pictures clean
.DEFAULT_GOAL := help

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

test: lint ## lint, type-check and test (sets up .venv on first use)
	$(PYTEST)

test-ecosystem: $(ECOSYSTEM)/.ready ## try networks of torchvision, timm, MONAI, transformers (sets up .venv-ecosystem on first use)
	OMP_NUM_THREADS=1 $(ECOSYSTEM)/bin/pytest $(WORKERS) --ignore=ecosystem/conftest.py ecosystem $(SKIPPED_WITHOUT)

lint: $(VENV)/.ready-test ## ruff and mypy alone
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

demo: $(VENV)/.ready-all ## one picture of what it is for; then every table and figure of the paper in miniature, and the report
	OMP_NUM_THREADS=1 $(BIN)/tensor-dropout demo --out out/demo
	OMP_NUM_THREADS=1 $(BIN)/tensor-dropout reproduce all --preset quick --workers 2 --out out/reproduce/quick
	$(BIN)/tensor-dropout report --quick out/reproduce/quick --full results --out out/report

docs: $(VENV)/.ready-docs ## build the documentation site
	$(BIN)/sphinx-build -W --keep-going -q -b html docs out/docs/html
	@echo out/docs/html/index.html

bench: $(VENV)/.ready-test ## time and memory of the heads against others, and of the exact moments; error of the closed forms
	$(BIN)/python benchmarks/heads.py --out out/bench
	$(BIN)/python benchmarks/moments.py
	$(BIN)/python benchmarks/cross_entropy.py

comparison: $(VENV)/.ready-test ## measure the comparison with TensorLy-Torch anew, and rewrite its table
	REWRITE_COMPARISON=1 $(BIN)/pytest tests/test_comparison.py

tables: $(VENV)/.ready-all ## write the measured tables and figures of the docs anew, from the records in results
	$(BIN)/python tools/write_tables.py

pictures: $(VENV)/.ready-all ## draw the pictures of docs/images anew
	$(BIN)/python tools/draw_masks.py
	OMP_NUM_THREADS=1 $(BIN)/tensor-dropout demo --out out/demo
	$(BIN)/python tools/shrink_png.py out/demo/where-is-the-digit.png docs/images/where-is-the-digit.png

clean: ## remove both environments, caches and results
	rm -rf $(VENV) $(ECOSYSTEM) out .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python $(ECOSYSTEM)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "tensor-dropout needs Python 3.11 or newer; name one with: make PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv $(@:/bin/python=)

# .ready-test, .ready-all and .ready-docs: the extras are installed as pyproject.toml and constraints.txt now stand.
$(VENV)/.ready-%: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[$*]'
	@if [ $* = test ]; then $(BIN)/python -m pip install --quiet --no-deps $(ORACLE); fi
	@touch $@

$(ECOSYSTEM)/.ready: pyproject.toml constraints.txt $(wildcard ecosystem/*.txt) | $(ECOSYSTEM)/bin/python
	$(ECOSYSTEM)/bin/python -m pip install --quiet $(TORCH)
	$(ECOSYSTEM)/bin/python -m pip install --quiet -c constraints.txt -e '.[lab,onnx,sklearn]' -r ecosystem/requirements.txt
	$(ECOSYSTEM)/bin/python -m pip install --quiet --no-deps -r ecosystem/without-dependencies.txt
	@touch $@
