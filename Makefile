# From a fresh clone: `make compare`, then `make test`. `make help` lists every target.
#
#   PYTHON   the Python (3.11 or newer) that .venv is made with; `make PYTHON=python3.12 test`
#   PEER     a checkout of nanoGPT, which `make bench-check` then races too
#   ARGS     passed on to `qurve compare`, to the torture, MkDocs or pytest; `make test ARGS="-k order"`

PYTHON ?= python3
ARGS ?=

IN_VENV := .venv/bin/python -m
INSTALL = @command -v "$(PYTHON)" >/dev/null || { echo "$(PYTHON) is not there: install Python 3.11 or newer, or name one: make PYTHON=…"; exit 1; }; \
	"$(PYTHON)" tools/install.py

.DEFAULT_GOAL := help
.PHONY: compare test test-all test-compat torture bench-check docs lint clean help

# Tests run on one thread each, two at a time, and may not look anything up on a hub.
test test-all test-compat torture docs: export OMP_NUM_THREADS = 1
test test-all test-compat torture docs: export HF_HUB_OFFLINE = 1
test test-all test-compat torture docs: export HF_DATASETS_OFFLINE = 1
test test-all test-compat torture docs: export TRANSFORMERS_OFFLINE = 1

compare: ## train the paper's three architectures on real text, then report (in runs/compare)
	$(INSTALL) requirements.lock
	@$(IN_VENV) qurve compare --out runs/compare $(ARGS)

test: lint ## lint, types, layers and every quick test
	@$(IN_VENV) pytest -n 2 -m "not slow" $(ARGS)

test-all: ## the slow tests, which `make test` leaves out
	$(INSTALL) requirements-dev.lock
	@$(IN_VENV) pytest -n 2 -m slow $(ARGS)

test-compat: ## the Hugging Face part with the oldest transformers that it takes (in .compat/)
	$(INSTALL) requirements-dev.lock
	@.venv/bin/python tools/compat.py $(ARGS)

torture: ## 300 SIGKILLs to trainings, then equality with an undisturbed one (figures: runs/torture.json)
	$(INSTALL) requirements-dev.lock
	@mkdir -p runs
	@.venv/bin/python tests/torture.py --out runs/torture --json runs/torture.json $(ARGS)

bench-check: ## has anything become slower? a few ratios against the committed ones, in five minutes
	$(INSTALL) requirements.lock
	@.venv/bin/python tools/bench_check.py $(if $(PEER),--peer "$(PEER)") $(ARGS)

docs: ## the documentation as a site, notebooks executed: site/index.html (a minute or two)
	$(INSTALL) requirements-dev.lock
	@NO_MKDOCS_2_WARNING=1 $(IN_VENV) mkdocs build --strict $(ARGS)
	@echo "site/index.html is built; to search it: python3 -m http.server --directory site"

lint: ## ruff, mypy and the layers alone
	$(INSTALL) requirements-dev.lock
	@$(IN_VENV) ruff check --quiet .
	@$(IN_VENV) ruff format --check --quiet .
	@$(IN_VENV) mypy --no-error-summary
	@.venv/bin/lint-imports --no-logo

clean: ## remove .venv and everything built or cached; runs/ and data/ stay
	rm -rf .venv .compat build dist site .pytest_cache .hypothesis .mypy_cache .ruff_cache .import_linter_cache src/*.egg-info
	find src tests tools benchmarks experiments -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' Makefile
