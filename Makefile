# Two commands do everything from a clean clone: `make demo` and `make test`.
# Each makes the virtual environment in .venv first, where it is missing or out of date.

PYTHON ?= python3
# pytest's processes. Each test process runs torch on one thread, which is fastest for small tensors.
JOBS ?= 2

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
ENCODER := examples/demo/encoder.py

.DEFAULT_GOAL := help
.PHONY: help demo test install lint types unit format bench docs docs-serve build clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 12

demo: $(INSTALLED) ## Freeze a real sentence encoder to bfloat16, run it, compare it
	@echo "==> freezing a sentence encoder, on one batch of sentences and on one of another size"
	@mkdir -p demo-output
	$(BIN)/amp-script freeze $(ENCODER):sentence_encoder --inputs $(ENCODER):example_inputs \
		--check-inputs $(ENCODER):other_inputs --output demo-output/minilm-bfloat16.pt --force
	@echo "==> loading the file with torch.jit.load, and comparing"
	$(BIN)/python examples/demo/compare.py demo-output/minilm-bfloat16.pt

test: lint types unit ## Lint, check types and run all tests

install: $(INSTALLED) ## Make the virtual environment

lint: $(INSTALLED) ## Check style and format
	@echo "==> ruff: style and format"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(INSTALLED) ## Check types
	@echo "==> mypy, strict: types of the package"
	@$(BIN)/mypy
	@echo "==> pyright, basic: the same"
	@PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(BIN)/pyright --project pyproject.toml

unit: $(INSTALLED) ## Run the tests alone
	@echo "==> pytest: $(JOBS) processes"
	@OMP_NUM_THREADS=1 $(BIN)/pytest -n $(JOBS) --dist worksteal

format: $(INSTALLED) ## Rewrite the code in the project's format
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

bench: $(INSTALLED) ## Run every benchmark, the figures of the README among them
	@for benchmark in benchmarks/*.py; do \
		echo "==> $$benchmark"; $(BIN)/python "$$benchmark" || exit 1; done

docs: $(INSTALLED) ## Build the documentation into site/, warnings being errors
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-serve: $(INSTALLED) ## Show the documentation at http://127.0.0.1:8000 while it is written
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

build: $(INSTALLED) ## Build the wheel and the source archive into dist/
	@$(BIN)/python -m hatchling build

clean: ## Remove what these commands made
	rm -rf $(VENV) dist build site demo-output .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "$(PYTHON) is older than Python 3.10: name another, as in make PYTHON=python3.12"; exit 1; }
	@test -x $(BIN)/python || \
		{ echo "==> making a virtual environment in $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "==> installing the project and what it needs, about a minute"
	@$(BIN)/python -m pip install -qq --no-compile --disable-pip-version-check \
		--constraint constraints.txt --editable '.[dev]'
	@touch $@
