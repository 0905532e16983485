# Every target below makes a virtual environment and installs into it when it is missing or stale.
#   make test PYTEST_ARGS="-k cache -x"      make demo DEMO_ARGS="--dtype float32"      make PYTHON=python3.12 test
#   make reproduce REPRODUCE_ARGS="--model meta-llama/Llama-3.1-8B-Instruct --scale full"

PYTHON      ?= python3
VENV        ?= .venv
WORKERS     ?= 2
PYTEST_ARGS ?=
DEMO_ARGS   ?=
BENCH_ARGS  ?=
REPRODUCE_ARGS ?=

BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
TORCH  := $(shell sed -n 's/^torch==/&/p' constraints.txt)
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

OLDEST := .oldest
OLDEST_VERSION := $(shell sed -n 's/^transformers==//p' oldest.txt)
WITH_OLDEST := PYTHONPATH=$(CURDIR)/$(OLDEST) $(BIN)/python
ON_TRANSFORMERS := compile_tests/integrations \
	$(patsubst %,compile_tests/models/test_%.py,checkpoint hub config transformer moe rope rope_spellings two_sets template_args)

.DEFAULT_GOAL := help
.PHONY: help install demo check test test-fast test-oldest lint types format bench reproduce clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' Makefile

install: $(STAMP) ## Make the virtual environment, or bring it up to date

demo: $(STAMP) ## Answer a question about a long text: a tenth of the cache and all of it side by side
	cat scripts/demo/lighthouse.txt scripts/demo/question.txt | $(BIN)/python scripts/decode.py - \
		--policy rehearsed --dtype float32 --compare full --max-new-tokens 32 $(DEMO_ARGS)
	@echo "7419 is right. The paper's own rule, --policy inertiakv, answers 123456 from a tenth of the cache."

check: $(STAMP) ## While you work: lint, types and fast tests side by side
	@$(MAKE) --no-print-directory --output-sync -j3 lint types test-fast

test: $(STAMP) ## Before you push: all tests, compiled ones and those with real weights among them
	$(PYTEST) $(PYTEST_ARGS)

test-fast: $(STAMP) ## Run the tests that need neither real weights nor the compiler
	$(PYTEST) -q -m "not real and not slow" --no-compiler -r fE $(PYTEST_ARGS)

test-oldest: $(OLDEST)/.installed ## Run the tests of what uses transformers with the oldest one supported
	@$(WITH_OLDEST) -c 'import transformers as t; t.__version__ == "$(OLDEST_VERSION)" or \
		exit(f"transformers {t.__version__} is imported, not $(OLDEST_VERSION): {t.__file__}")'
	$(WITH_OLDEST) -m pytest -n $(WORKERS) -m "not real and not slow" $(ON_TRANSFORMERS) $(PYTEST_ARGS)

lint: $(STAMP) ## Check style and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP) ## Check types
	$(BIN)/mypy inertiakv

format: $(STAMP) ## Rewrite the files in the project's style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP) ## Measure decoding speed
	$(BIN)/python scripts/bench.py $(BENCH_ARGS)

reproduce: $(STAMP) ## Put the paper's claims to the test, on a small model
	$(BIN)/python scripts/reproduce.py $(REPRODUCE_ARGS)

clean: ## Remove the virtual environment, build outputs and caches
	rm -rf $(VENV) $(OLDEST) build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch goes first and by its exact version, so that a build of it that is at hand (CPU only, say) is taken as it is.
# An environment whose interpreter no longer runs (moved, or its Python removed) is made anew.
$(STAMP): pyproject.toml constraints.txt
	@$(BIN)/python -c 'import pip' 2>/dev/null || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

$(OLDEST)/.installed: oldest.txt | $(STAMP)
	@rm -rf $(OLDEST)
	$(BIN)/python -m pip install --quiet --no-deps --no-compile --target $(OLDEST) --requirement oldest.txt
	@touch $@
